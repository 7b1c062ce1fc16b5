"""Says what was found, in sentences."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable

from instruments.command import Line
from timeline.data import COLLECTIVES, KINDS, PARTS, Picture, Recording, counted, ms, size_of
from timeline.steps import Table
from timeline.why import Reason, steps_named


def findings(
    picture: Picture, recordings: list[Recording], table: Table, reasons: list[Reason]
) -> list[Line]:
    ranks = picture["ranks"]
    lines = [Line("step", length_of_step(picture, table, reasons))]
    drawn = set()
    for rank in ranks:
        lines.append(Line(f"rank {rank['rank']}", part_sums(rank, len(ranks) > 1)))
        drawn |= {part.what for part in rank["parts"]}
    if len(ranks) > 1:
        lines.append(Line("waiting", who_came_last(table)))
    if reasons and not table.is_unseen:
        lines.append(Line("why", "; ".join(reason.text for reason in reasons)))
    lines.append(Line("messages", of_ranks(ranks, message_sums)))
    lines.append(Line("memory", f"at most, {of_ranks(ranks, memory_sums)}"))
    if table.clocks:
        lines.append(Line("clocks", table.clocks))
    missing = set(range(recordings[0]["ranks"])) - table.ranks.keys()
    if missing:
        names = ", ".join(f"rank {rank}" for rank in sorted(missing))
        lines.append(Line("ranks", f"without {names}: no recorded step came from there"))
    unseen = [part for part in ("forward", "backward") if part not in drawn]
    if unseen:
        text = f"{' and '.join(unseen)} not seen, and drawn as other: torch.compile and torch.func "
        lines.append(Line("warning", f"{text}hide what they run"))
    elif len(ranks) > 1 and not any(recording["messages"] for recording in recordings):
        text = "no message was seen in the recorded steps: does each rank train for itself? "
        lines.append(Line("warning", f"{text}equivalence/ says it; --nproc 1 records one process"))
    return lines


# -------------------------------------------------------------------------------- the step drawn


def length_of_step(picture: Picture, table: Table, reasons: list[Reason]) -> str:
    number, shown = picture["steps"]
    which = f"step {number + 1}"
    if shown > 1:
        which = f"steps {number + 1} to {number + shown}"
    count = len(table.lengths)
    chosen = f"nearest to the median of {count} recorded"
    if some := steps_named(reasons):
        chosen = f"as it shows what `why` says of {len(some)} of {count} recorded"
    return (
        f"{ms(picture['length'])} ms: {which}, {chosen} (median of a step: "
        f"{ms(table.usual_length)} ms; of {len(table.bare)} without the recorder: "
        f"{ms(statistics.median(table.bare))} ms)"
    )


def part_sums(rank: dict, has_others: bool) -> str:
    sums: Counter = Counter()
    for part in rank["parts"]:
        sums[part.what] += part.length
    text = ", ".join(f"{part} {ms(sums[part])}" for part in PARTS if part in sums) + " ms"
    idle = sum(pause.length for pause in rank["idle"])
    if idle:
        text += f", in {ms(idle)} of which the GPU has nothing to compute"
    waits = []
    for other, duration in rank["waits_for"]:
        what = "while bytes move" if other is None else f"for rank {other}"
        waits.append(f"{ms(duration)} {what}")
    if waits and has_others:
        text += f" (waiting: {', '.join(waits)})"
    return text


def message_sums(rank: dict) -> str:
    """Such as: 2 broadcasts 400 B together, 1 all-reduce 116 kB."""
    sizes = defaultdict(list)
    for message in rank["messages"]:
        if message.kind != "recv":
            sizes[message.kind].append(message.bytes)
    texts = []
    for kind, some in sizes.items():
        together = " together" if len(some) > 1 else ""
        name = counted(len(some), COLLECTIVES.get(kind, kind))
        size = "(size not seen)" if None in some else f"{size_of(sum(some))}{together}"
        texts.append(f"{name} {size}")
    unseen = sum(not message.was_seen for message in rank["messages"])
    if unseen:
        texts.append(f"when {unseen} of them ran was not seen")
    return ", ".join(texts) or ("no messages" if rank["trace"] else "not seen")


def memory_sums(rank: dict) -> str:
    """The largest of each kind."""
    peaks = {kind: max(rank["memory"][kind]) for kind in KINDS}
    texts = [f"{kind} {size_of(peak)}" for kind, peak in peaks.items() if peak]
    if texts and rank["reserved"]:
        texts.append(f"reserved by the allocator {size_of(rank['reserved'])}")
    return ", ".join(texts) or "not seen"


def of_ranks(ranks: list[dict], text_of: Callable[[dict], str]) -> str:
    """The text of each rank, or once what is the same for all."""
    texts = {rank["rank"]: text_of(rank) for rank in ranks}
    if len(ranks) == 1:
        return text_of(ranks[0])
    if len(set(texts.values())) == 1:
        return f"each rank: {text_of(ranks[0])}"
    return "; ".join(f"rank {number}: {text}" for number, text in texts.items())


# ----------------------------------------------------------------------------- all recorded steps


def who_came_last(table: Table) -> str:
    """The ranks for which the others waited longest, and in how many of the recorded steps."""
    if table.is_unseen:
        return "not seen, as the profiler tells no times of messages"
    waited = defaultdict(list)
    for rank, wait in table.late_ranks():
        if wait:
            waited[rank].append(wait)
    texts = []
    for rank, waits in sorted(waited.items(), key=lambda item: -len(item[1])):
        count = f"{len(waits)} of {len(table.lengths)} steps"
        texts.append(f"for rank {rank} in {count}, {ms(statistics.mean(waits))} ms each")
    if not texts:
        return "no rank waited for another"
    return f"the others waited longest {'; '.join(texts)}"
