"""The table of steps: what each rank does in each of them; made once, and read by the others."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy

from ddp_by_diff.timeline.compare import align_clocks, match_messages
from ddp_by_diff.timeline.data import KINDS, Block, CoreWait, Message, Recording, Span
from ddp_by_diff.timeline.lanes import filled, inside, parts_of


class Step(NamedTuple):
    """What a rank does in a step."""

    begin: int
    end: int
    parts: list[Span]  # without a gap
    idle: list[Span]  # inside of them: the GPU has nothing to compute
    spent: Counter  # by part
    waits_for: Counter  # other ranks; None: for no rank, as bytes moved or a queue was full
    no_core: Counter  # by part: for how long it was ready to run, but had no CPU core
    messages: list[Message]

    @property
    def length(self) -> int:
        return self.end - self.begin

    def without_core(self) -> float:
        return self.no_core.total()

    def work(self, part: str) -> float:
        """What is left of a part without the time in which the rank had no core."""
        return self.spent[part] - self.no_core[part]


Measure = Callable[[Step], float]
MANY = 10  # messages in a step, short pauses between them


class Table(NamedTuple):
    """All ranks' steps, on one clock."""

    recordings: list[Recording]  # on one clock, with matched messages
    first: int  # the number of the first recorded step
    ranks: dict[int, list[Step]]
    lengths: list[int]  # of each step, on the rank whose median is longest
    bare: list[int]  # the same of steps without the recorder
    has_workers: bool  # on all ranks a DataLoader loads while the program computes
    worker_starts: set[int]  # steps in which it starts them, on any rank
    is_unseen: bool  # there are messages, and of none it is known when it ran
    arrows: list[dict]  # from a send to the end of the wait for it
    clocks: str  # in words, what was done to have one clock

    @property
    def usual_length(self) -> float:
        return statistics.median(self.lengths)

    def others(self, rank: int) -> list[list[Step]]:
        """In each step what the other ranks do."""
        others = [steps for other, steps in self.ranks.items() if other != rank]
        return list(map(list, zip(*others, strict=True)))

    def waits_for(self, rank: int) -> list[float]:
        """How long another rank waited for this one in each step, at most."""
        return [max(step.waits_for[rank] for step in others) for others in self.others(rank)]

    def late_ranks(self) -> list[tuple[int, float]]:
        """The rank for which the others waited longest in each step, and how long."""
        waits = {rank: self.waits_for(rank) for rank in self.ranks}
        late = []
        for place in range(len(self.lengths)):
            rank = max(waits, key=lambda rank: waits[rank][place])
            late.append((rank, waits[rank][place]))
        return late

    def more(self, rank: int, of: Measure) -> list[float]:
        """What this rank has more than each other rank in each step."""
        pairs = zip(self.ranks[rank], self.others(rank), strict=True)
        return [of(own) - max(map(of, others)) for own, others in pairs]

    def least(self, of: Measure) -> float:
        """The median of all steps, on the rank where it is least."""
        return min(statistics.median(map(of, steps)) for steps in self.ranks.values())


def table_of(recordings: list[Recording]) -> Table:
    """Brings the clocks and the messages of the recordings together, and makes the table."""
    aligned, clocks = align_clocks(recordings)
    recordings, arrows = match_messages(aligned)
    first = recordings[0]["first"]
    numbers = range(first, min(recording["last"] for recording in recordings) + 1)
    ranks = {}
    for recording in recordings:
        ranks[recording["rank"]] = [step_of(recording, number) for number in numbers]
    lengths = longest([[step.length for step in steps] for steps in ranks.values()])
    bare = longest([recording["bare"] for recording in recordings])
    starts = [recording["worker_starts"] for recording in recordings]
    messages = list(itertools.chain(*(recording["messages"] for recording in recordings)))
    is_unseen = bool(messages) and not any(message.was_seen for message in messages)
    in_steps = {*itertools.chain(*starts)}
    return Table(
        recordings, first, ranks, lengths, bare, all(starts), in_steps, is_unseen, arrows, clocks
    )


def longest(lengths: list[list[float]]) -> list[float]:
    """The lengths of the rank whose median is longest: so each pause counts once."""
    return max(lengths, key=lambda of_rank: statistics.median(of_rank or [0]))


def step_of(recording: Recording, number: int) -> Step:
    begin, end = recording["cuts"][number : number + 2]
    parts = messages_joined(parts_of(recording["lane"], begin, end))
    spent: Counter = Counter()
    for part in parts:
        spent[part.what] += part.length
    messages = [message for message in recording["messages"] if message.step == number]
    idle, lost = inside(recording["idle"], begin, end), no_core(parts, recording["core_waits"])
    return Step(begin, end, parts, idle, spent, waits_for(parts, messages), lost, messages)


def no_core(parts: list[Span], waits: list[CoreWait]) -> Counter:
    """For how long the rank had no core in each part: between two notes as much in each moment.

    A note whose time is earlier than its reading, as the rank had no core between, tells too much.
    """
    lost: Counter = Counter()
    if waits:
        borders = [parts[0].begin, *(part.end for part in parts)]
        totals = numpy.interp(borders, *zip(*waits, strict=True)).tolist()
        for part, before, after in zip(parts, totals, totals[1:], strict=False):
            lost[part.what] += min(after - before, part.length)
    return lost


def waits_for(parts: list[Span], messages: list[Message]) -> Counter:
    """How long the rank waited for each other rank."""
    waited: Counter = Counter()
    by_begin = sorted(messages, key=lambda message: message.begin)
    for part in parts:
        if part.what != "waiting":
            continue
        now = part.begin
        remaining = part.length
        for message in by_begin:
            left, right = max(now, message.begin), min(part.end, message.until)
            if left < right:
                waited[message.last] += right - left
                remaining -= right - left
                now = right
        waited[None] += remaining
    return waited


def messages_joined(parts: list[Span]) -> list[Span]:
    """The parts, in which the short pauses between many messages are waiting, too.

    There the process ends one and begins the next.
    """
    longest = (parts[-1].end - parts[0].begin) / MANY
    pauses = []
    for before, part, after in zip(parts, parts[1:], parts[2:], strict=False):
        is_between = (before.what, part.what, after.what) == ("waiting", "other", "waiting")
        if is_between and part.length < longest:
            pauses.append(Span("waiting", part.begin, part.end))
    waits = sum(part.length for part in parts if part.what == "waiting")
    if len(pauses) < MANY or sum(pause.length for pause in pauses) > waits:
        return parts
    return filled(pauses, parts)


def memory_curve(blocks: list[Block], begin: int, end: int) -> dict[str, list]:
    """The "times" of its changes, and the bytes of each of KINDS from then on."""
    changes: dict[float, Counter] = {begin: Counter(), end: Counter()}
    for block in blocks:
        if block.born < end and begin < block.freed:
            changes.setdefault(max(block.born, begin), Counter())[block.kind] += block.bytes
            if block.freed < end:
                changes.setdefault(block.freed, Counter())[block.kind] -= block.bytes
    times = sorted(changes)
    curve = {"times": times}
    for kind in KINDS:
        curve[kind] = list(itertools.accumulate(changes[time][kind] for time in times))
    return curve
