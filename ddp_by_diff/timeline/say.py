"""Says what was found, in sentences."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable

from ddp_by_diff.instruments.command import Line
from ddp_by_diff.timeline.data import (
    KINDS,
    PARTS,
    Picture,
    Recording,
    counted,
    ms,
    ms_range,
    size_of,
)
from ddp_by_diff.timeline.steps import Table
from ddp_by_diff.timeline.why import MUCH, Reason, steps_named


def findings(
    picture: Picture, recordings: list[Recording], table: Table, reasons: list[Reason]
) -> list[Line]:
    ranks = picture["ranks"]
    lines = [Line("step", length_of_step(picture, table, reasons))]
    if reasons and not table.is_unseen:
        lines.append(Line("why", "; ".join(reason.text for reason in reasons)))
    if len(ranks) > 1:
        lines.append(Line("waiting", who_came_last(table)))
    drawn = set()
    for rank in ranks:
        lines.append(Line(f"rank {rank['rank']}", part_sums(rank, len(ranks) > 1)))
        drawn |= {part.what for part in rank["parts"]}
    lines.append(Line("messages", of_ranks(ranks, message_sums)))
    lines.append(Line("memory", f"peak {of_ranks(ranks, memory_sums)}"))
    if table.clocks:
        lines.append(Line("clocks", table.clocks))
    missing = set(range(recordings[0]["ranks"])) - table.ranks.keys()
    if missing:
        names = ", ".join(f"rank {rank}" for rank in sorted(missing))
        lines.append(Line("ranks", f"without {names}, which recorded no step"))
    unseen = [part for part in ("forward", "backward") if part not in drawn]
    if unseen:
        text = f"{' and '.join(unseen)} not seen, and drawn as other, because torch.compile and "
        lines.append(Line("warning", f"{text}torch.func hide what they run"))
    elif len(ranks) > 1 and not any(recording["messages"] for recording in recordings):
        text = "no communication was seen in the recorded steps. Does each rank train on its own? "
        text += "Check with ddp-equivalence, or record one process with --nproc 1"
        lines.append(Line("warning", text))
    return lines


def length_of_step(picture: Picture, table: Table, reasons: list[Reason]) -> str:
    """The median first; the mean, too, if it is far from that; then which step is drawn."""
    usual, mean = table.usual_length, statistics.mean(table.lengths)
    text = f"median {ms(usual)} ms"
    if abs(mean - usual) > MUCH * usual:
        text += f", mean {ms(mean)} ms"
    bare = f"{ms(statistics.median(table.bare))} ms of {len(table.bare)} without profiling"
    number, shown = picture["steps"]
    which = f"steps {number + 1} to {number + shown}" if shown > 1 else f"step {number + 1}"
    drawn = f"drawn: {which}, {ms(picture['length'])} ms"
    if steps_named(reasons):
        drawn += ", as it shows what `why` says"
    return f"{text} of {counted(len(table.lengths), 'recorded step')} ({bare}); {drawn}"


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
        what = "for the transfer" if other is None else f"for rank {other}"
        waits.append(f"{ms(duration)} {what}")
    if waits and has_others:
        text += f" (waiting: {', '.join(waits)})"
    return text


def message_sums(rank: dict) -> str:
    """Such as: 2 broadcasts, 400 B together; 1 all-reduce, 116 kB."""
    sizes = defaultdict(list)
    for message in rank["messages"]:
        if message.kind != "recv":
            sizes[message.name].append(message.bytes)
    texts = []
    for name, some in sizes.items():
        together = " together" if len(some) > 1 else ""
        size = "size not seen" if None in some else f"{size_of(sum(some))}{together}"
        texts.append(f"{counted(len(some), name)}, {size}")
    unseen = sum(not message.was_seen for message in rank["messages"])
    if unseen:
        texts.append(f"when {unseen} of them ran was not seen")
    return "; ".join(texts) or ("no messages" if rank["trace"] else "not seen")


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
        return f"per rank: {text_of(ranks[0])}"
    return "; ".join(f"rank {number}: {text}" for number, text in texts.items())


def who_came_last(table: Table) -> str:
    """In how many of the recorded steps the others waited longest for a rank, and how long each."""
    if table.is_unseen:
        return "not seen, because the profiler tells no times of messages"
    steps, waits = Counter(), defaultdict(list)
    for place, (rank, wait) in enumerate(table.late_ranks()):
        if wait:
            steps[rank] += 1
            waits[rank] += [step.waits_for[rank] for step in table.others(rank)[place]]
    texts = []
    for rank, count in steps.most_common():
        who = "" if texts else "the others waited "
        where = f"rank {rank} in {count} of {len(table.lengths)} steps"
        texts.append(f"{where} ({who}{ms_range(waits[rank])} ms)")
    return f"last to arrive: {', '.join(texts)}" if texts else "no rank waited for another"
