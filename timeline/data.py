"""What is passed from file to file.

All times are nanoseconds: in a Recording since 1970, in a Picture from its left end.
"""

from typing import Any, NamedTuple, TypedDict

WARM_UP = 3  # steps
KEPT = ("weights", "optimizer state", "gradients", "message buffers")  # kinds of memory
BORN = ("activations", "temporary")
KINDS = (*KEPT, *BORN)
PARTS = ("loading", "forward", "backward", "optimizer", "waiting", "other")  # of a step
COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
}


class Span(NamedTuple):
    what: str
    begin: int
    end: int

    def earlier(self, by: int) -> "Span":
        return Span(self.what, self.begin - by, self.end - by)


class Allocation(NamedTuple):
    kind: str
    bytes: int
    born: float  # infinite: before the recording
    freed: float  # infinite: after the recording

    def earlier(self, by: int) -> "Allocation":
        return Allocation(self.kind, self.bytes, self.born - by, self.freed - by)


class Message(TypedDict, total=False):
    """One rank's part in a collective, in a send or in a receive."""

    kind: str  # "allreduce", "send", ...
    group: str  # the process group's name
    peer: int | None  # the other rank of a send or a receive
    bytes: int  # what this rank puts in
    runs: int  # how often gloo's algorithm ran
    issued: int  # it enters the queue,
    begin: int  # leaves it, and waits for other ranks,
    until: int  # the last rank has come, and bytes begin to move,
    end: int  # the bytes have arrived
    last: int  # the rank that came last


class Recording(TypedDict):
    """All that is known of one rank."""

    rank: int
    ranks: int  # how many the run has, also those that left no recording
    setting: str  # in words: torch, device, threads
    machine: str  # those with the same have one clock
    cuts: list[int]  # where the steps begin, and where the last one ends
    first: int  # the first recorded step; the steps before are there for their cuts
    last: int  # the last recorded step
    spans: list[Span]  # forward, backward, optimizer, data, wait; may lie inside each other
    messages: list[Message]
    memory: list[Allocation]
    operations: list[Span]  # torch's
    core_waits: list[int]  # at each cut: how long the program's thread has waited for a core
    has_workers: bool  # a DataLoader loads while the program computes
    has_group: bool
    has_compiled: bool  # torch.compile has made a graph


Picture = dict[str, Any]  # what picture.py makes, draw.py draws, and timeline.json keeps


def recorded_steps(count: int) -> tuple[int, int]:
    """The numbers of the first and the last recorded step, from 0.

    Before them are the warm-up, some steps without the recorder, and the recorder's first step.
    """
    first = WARM_UP + max(1, count // 2) + 1
    return first, first + count - 1


def ms(nanoseconds: float, digits: int = 1) -> str:
    return f"{nanoseconds / 1e6:.{digits}f}"


def size_of(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            digits = 0 if unit == "kB" and count >= 1e4 else 1
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count} B"


def counted(count: int, name: str) -> str:
    if count == 1:
        return f"1 {name}"
    plural = "es" if name.endswith(("s", "ch")) else "s"
    return f"{count} {name}{plural}"
