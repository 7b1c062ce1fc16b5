"""Why a step takes so long: what one rank spends more than the others, or what all spend."""

import statistics
from collections import Counter
from typing import NamedTuple

from timeline import compare
from timeline.data import PARTS, Recording, ms

LEAST = 0.1  # of a step: less is not worth a word
MUCH = 0.3  # of a step, for what all ranks spend
CHECK = ("allgather", 16)  # distributed.py compares the calls


class Step(NamedTuple):
    """What a rank spends in a step, in nanoseconds."""

    parts: Counter
    waits_for: Counter  # other ranks; None: while bytes move
    without_core: int
    length: int


def step_of(recording: Recording, number: int) -> Step:
    begin, end = recording["cuts"][number : number + 2]
    spans = compare.parts_of(recording["spans"], begin, end)
    parts: Counter = Counter()
    for span in spans:
        parts[span.what] += span.end - span.begin
    core = recording["core_waits"][number : number + 2]
    without_core = core[1] - core[0] if len(core) == 2 else 0
    waits = compare.waits_for(spans, compare.issued_in(recording, begin, end))
    return Step(parts, waits, without_core, end - begin)


def why(recordings: list[Recording], first: int, last: int) -> str:
    """A sentence; "" if nothing was seen, or only chance."""
    ranks = {}
    for recording in recordings:
        steps = [step_of(recording, number) for number in range(first, last + 1)]
        ranks[recording["rank"]] = steps
    late = late_workers(ranks) if all(one["has_workers"] for one in recordings) else ""
    found = slow_rank(ranks) if len(ranks) > 1 and not late else ""
    return found or "; ".join(what_all_spend(ranks, late))


def late_workers(ranks: dict[int, list[Step]]) -> str:
    """Workers that are too slow on every rank: whose batches come last is then only chance.

    On a rank whose workers are fast enough, the next batch is there when the others have come.
    """
    loading = [average([step.parts["loading"] for step in steps]) for steps in ranks.values()]
    length = typical_length(ranks)
    shortest, longest = min(loading), max(loading)
    if len(ranks) == 1 or shortest < LEAST * length or longest < MUCH * length:
        return ""
    return f"each rank waits {ms(shortest)} to {ms(longest)} of {ms(length)} ms for its next batch"


def slow_rank(ranks: dict[int, list[Step]]) -> str:
    """The rank for which the others wait longest, if it is always the same part that it spends."""
    waits = {rank: waits_for(ranks, rank) for rank in ranks}
    slow = max(waits, key=lambda rank: statistics.median(waits[rank]))
    wait = statistics.median(waits[slow])
    length = typical_length(ranks)
    if wait < LEAST * length:
        return ""
    extras = {}
    for part in PARTS:
        if part != "waiting":
            extras[part] = more_than_others(spent_in(part, ranks), slow)
    part = max(extras, key=lambda part: statistics.median(extras[part]))
    more = statistics.median(extras[part])
    usual = sorted(extras[part])[len(extras[part]) // 4]  # three of four steps have more
    if more < max(LEAST * length, wait / 2) or more > 2 * wait or usual < more / 2:
        return ""
    text = f"rank {slow} spends {ms(more)} ms more in {part} than the others"
    without_core = {}
    for rank, steps in ranks.items():
        without_core[rank] = [step.without_core for step in steps]
    core = statistics.median(more_than_others(without_core, slow))
    if core > more / 2:
        text += f" ({ms(min(core, more))} ms of it without a core)"
    return f"{text}, who wait {ms(wait)} ms a step for it"


def waits_for(ranks: dict[int, list[Step]], slow: int) -> list[float]:
    """How long the other ranks waited for this one in each step, on average."""
    others = [steps for rank, steps in ranks.items() if rank != slow]
    found = []
    for same in zip(*others, strict=True):
        found.append(statistics.mean(step.waits_for[slow] for step in same))
    return found


def spent_in(part: str, ranks: dict[int, list[Step]]) -> dict[int, list[int]]:
    spent = {}
    for rank, steps in ranks.items():
        spent[rank] = [step.parts[part] for step in steps]
    return spent


def more_than_others(spent: dict[int, list[int]], slow: int) -> list[float]:
    """What this rank spends more than the others in each step, on average."""
    others = [steps for rank, steps in spent.items() if rank != slow]
    found = []
    for own, *same in zip(spent[slow], *others, strict=True):
        found.append(own - statistics.mean(same))
    return found


def typical_length(ranks: dict[int, list[Step]]) -> float:
    """The median of a step, on the rank where it takes longest."""
    medians = []
    for steps in ranks.values():
        medians.append(statistics.median(step.length for step in steps))
    return max(medians)


def what_all_spend(ranks: dict[int, list[Step]], late: str) -> list[str]:
    """Loading (late: by workers), messages that nothing hides, and cores that others have."""
    length = typical_length(ranks)
    loading, messages, core, lengths = [], [], [], []
    for steps in ranks.values():
        loading.append(average([step.parts["loading"] for step in steps]))
        lengths.append(average([step.length for step in steps]))
        messages.append(statistics.median(step.waits_for[None] for step in steps))
        core.append(statistics.median(step.without_core for step in steps))
    texts = [late] if late else []
    who = "each rank" if len(ranks) > 1 else "the process"
    if not late and min(loading) > MUCH * max(lengths):
        text = f"{who} waits {ms(min(loading))} of {ms(max(lengths))} ms for its next batch"
        texts.append(text)
    if min(messages) > MUCH * length:
        text = f"messages take {ms(min(messages))} of {ms(length)} ms in which {who} does nothing"
        texts.append(f"{text} else")
    if min(core) > MUCH / 2 * length:
        text = f"{who} is ready, but has no core for {ms(min(core))} of {ms(length)} ms"
        texts.append(text)
    return texts


def average(times: list[int]) -> float:
    """Of several steps, as workers of a DataLoader bring their batches together, and then none.

    The longest is left out, which may be an epoch's first, when they start.
    """
    return statistics.mean(sorted(times)[:-1] or times)


# -------------------------------------------------------------------------------- kinds of steps


def kinds(recordings: list[Recording], first: int, last: int) -> dict[tuple, list[int]]:
    """The steps by what is done in them: how many passes, and which messages."""
    found: dict[tuple, list[int]] = {}
    for number in range(first, last + 1):
        signature = tuple(signature_of(recording, number) for recording in recordings)
        found.setdefault(signature, []).append(number)
    return found


def signature_of(recording: Recording, number: int) -> tuple:
    begin, end = recording["cuts"][number : number + 2]
    backwards = {span.begin for span in recording["spans"] if span.what == "backward"}
    counts: Counter = Counter()
    for span in recording["spans"]:
        is_loss = span.end in backwards  # it is a part of a forward pass
        if begin <= span.begin < end and span.what not in ("wait", "data") and not is_loss:
            counts[span.what] += 1
    for message in compare.issued_in(recording, begin, end):
        if (message["kind"], message["bytes"]) != CHECK:
            counts[message["kind"]] += 1
    return tuple(sorted(counts.items()))
