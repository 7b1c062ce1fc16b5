"""What is passed from file to file.

All times are nanoseconds: since 1970, and in a Picture from its left end.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypedDict

WARM_UP = 3  # steps
KEPT = ("weights", "optimizer state", "gradients", "communication buffers")  # kinds of memory
BORN = ("activations", "temporary")
KINDS = (*KEPT, *BORN)
PHASES = ("forward", "backward", "optimizer")
PARTS = ("loading", *PHASES, "evaluation", "waiting", "other")  # of a step
COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
}


class CoreWait(NamedTuple):
    """How long the program's thread has been ready to run, but had no CPU core, up to a time."""

    time: int
    total: int


class Span(NamedTuple):
    what: str
    begin: int
    end: int

    def earlier(self, by: int) -> "Span":
        return Span(self.what, self.begin - by, self.end - by)

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclasses.dataclass
class Block:
    """One allocation of memory."""

    kind: str  # "": not known yet
    bytes: int
    born: float  # infinite: before the recording
    freed: float = math.inf  # it is still there
    is_end_known: bool = False

    def earlier(self, by: float) -> "Block":
        return dataclasses.replace(self, born=self.born - by, freed=self.freed - by)


class Message(NamedTuple):
    """One rank's part in a collective, in a send or in a receive."""

    kind: str  # "allreduce", "send", ...
    group: str = ""  # the process group's name
    number: int | None = None  # in its group, on all ranks the same; None: torch doesn't tell it
    peer: int | None = None  # the other rank of a send or a receive
    bytes: int | None = None  # what this rank puts in; None: not seen
    step: int = 0  # in which it was issued
    last: int = 0  # the rank that came last
    issued: int = 0  # the call: it enters the queue,
    begin: int = 0  # leaves it, and waits for other ranks,
    until: int = 0  # the last rank has come, and bytes begin to move,
    end: int = 0  # the bytes have arrived; no later than `begin`: not seen when it ran
    runs: int = 1  # how often gloo's algorithm runs
    is_check: bool = False  # distributed.py compares the ranks' calls by it

    @property
    def times(self) -> tuple[int, ...]:
        return self[7:11]

    @property
    def name(self) -> str:
        return "check" if self.is_check else COLLECTIVES.get(self.kind, self.kind)

    @property
    def was_seen(self) -> bool:
        """Whether it is known when the message ran."""
        return self.begin < self.end

    def earlier(self, by: int) -> "Message":
        return Message(*self[:7], *(time - by for time in self.times), *self[11:])


@dataclasses.dataclass
class Noted:
    """What a rank notes while its program runs; torch's profiler notes the rest."""

    rank: int
    ranks: int
    thread: int  # that runs the program: the system's number
    first: int  # the first recorded step
    last: int  # the last one
    device: str = "cpu"  # of the first optimizer's parameters
    device_name: str = "cpu"  # a GPU's own
    spans: list[Span] = dataclasses.field(default_factory=list)  # may lie inside each other
    cuts: list[int] = dataclasses.field(default_factory=list)  # where steps begin
    marks: list[Any] = dataclasses.field(default_factory=list)  # there: events of CUDA, or None
    core_waits: list[CoreWait] = dataclasses.field(default_factory=list)
    calls: list[Message] = dataclasses.field(default_factory=list)  # not known yet: when they ran
    graph_ends: list[int] = dataclasses.field(default_factory=list)  # of backwards with messages
    tensors: list[tuple[int, dict]] = dataclasses.field(default_factory=list)  # see note_memory
    worker_starts: list[int] = dataclasses.field(default_factory=list)  # steps


class Recording(TypedDict):
    """All that is known of one rank."""

    rank: int
    ranks: int  # how many the run has, also those that left no recording
    setting: str  # in words: torch, device, threads
    device: str  # "cpu", or the name of the GPU
    machine: str  # those with the same have one clock
    cuts: list[int]  # where the steps begin, and where the last one ends
    first: int  # the first recorded step; the steps before are there for their cuts
    last: int  # the last recorded step
    bare: list[int]  # how long each step without the recorder took
    lane: list[Span]  # what the process does, or its GPU; without overlap
    idle: list[Span]  # inside of it: the GPU has nothing to compute, as the phase launches nothing
    messages: list[Message]
    memory: list[Block]
    reserved: int  # bytes that torch's allocator has taken from a GPU
    trace: list[dict]  # torch's own events, for Perfetto
    core_waits: list[CoreWait]
    worker_starts: list[int]  # the steps in which a DataLoader starts its workers, if it has some


Picture = dict[str, Any]  # what picture.py makes, draw.py draws, and trace.py writes


def recorded_steps(count: int) -> tuple[int, int]:
    """The numbers of the first and the last recorded step, from 0.

    Before them are the warm-up, some steps without the recorder, and the recorder's first step.
    """
    first = WARM_UP + max(1, count // 2) + 1
    return first, first + count - 1


def ms(nanoseconds: float, digits: int = 1) -> str:
    return f"{nanoseconds / 1e6:.{digits}f}"


def ms_range(nanoseconds: Iterable[float]) -> str:
    """The smallest and the largest, such as 0.2 to 60.3; one number if they are printed alike."""
    values = [*nanoseconds]
    ends = [ms(min(values)), ms(max(values))]
    return " to ".join(ends if ends[0] != ends[1] else ends[:1])


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
