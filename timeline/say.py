"""Says what was found, in sentences."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from instruments import command
from instruments.command import Line
from timeline.compare import was_seen
from timeline.data import COLLECTIVES, KINDS, PARTS, Picture, Recording, counted, ms, size_of
from timeline.steps import Step, Table, kinds
from timeline.why import Reason


def say(lines: Iterable[Line]) -> None:
    command.say(lines, indent=10)


def findings(
    picture: Picture, recordings: list[Recording], table: Table, reason: Reason
) -> list[Line]:
    """All lines."""
    ranks = picture["ranks"]
    lines = [Line("step", length_of_step(picture, table, reason))]
    drawn = set()
    for rank in ranks:
        lines.append(Line(f"rank {rank['rank']}", part_sums(rank, len(ranks) > 1)))
        drawn |= {part.what for part in rank["parts"]}
    missing = [part for part in ("forward", "backward") if part not in drawn]
    if missing:
        text = f"{' and '.join(missing)} can't be told apart, and are drawn as other"
        lines.append(Line("other", text))
    if len(ranks) > 1:
        lines.append(Line("waiting", who_came_last(table)))
    if reason.text and not lines[-1].text.startswith("not seen"):
        lines.append(Line("why", reason.text))
    text = of_ranks(ranks, message_sums)
    if len(ranks) > 1 and not any(rank["messages"] for rank in ranks):
        text += ", so each rank is drawn from the beginning of its own step"
    lines.append(Line("messages", text))
    lines.append(Line("memory", f"at most, {of_ranks(ranks, memory_sums)}"))
    if table.clocks:
        lines.append(Line("clocks", table.clocks))
    lines += of_the_run(recordings)
    lines += warnings(recordings, missing)
    return lines


def of_the_run(recordings: list[Recording]) -> Iterator[Line]:
    """Ranks that are missing, or apart."""
    ranks = recordings[0]["ranks"]
    if len(recordings) < ranks:
        here = {recording["rank"] for recording in recordings}
        missing = ", ".join(f"rank {rank}" for rank in range(ranks) if rank not in here)
        yield Line("ranks", f"without {missing}: no recorded step came from there")
    if len({recording["last"] for recording in recordings}) > 1:
        text = "they made different numbers of steps: with DDP, without its Join, those with more "
        text += "wait for ever"
        yield Line("ranks", text)


def warnings(recordings: list[Recording], missing: list[str]) -> Iterator[Line]:
    """Where the picture is surely not what the reader wants to see."""
    if len(missing) == 2 and any(recording["has_compiled"] for recording in recordings):
        text = "no forward and no backward was seen: what torch.compile compiles can't be watched"
        yield Line("warning", f"{text}. Record the program without it")
        return
    if len(recordings) == 1 or any(recording["messages"] for recording in recordings):
        return
    text = "the ranks are in no process group: each is a program of its own (--nproc 1 starts one)"
    if any(recording["has_group"] for recording in recordings):
        text = "no message was seen in the recorded steps: does each rank train for itself?"
        text += " equivalence/ says it"
    yield Line("warning", text)


# -------------------------------------------------------------------------------- the step drawn


def length_of_step(picture: Picture, table: Table, reason: Reason) -> str:
    number, shown = picture["steps"]
    which = f"step {number + 1}"
    if shown > 1:
        which = f"steps {number + 1} to {number + shown}"
    count = len(table.lengths)
    chosen = f"nearest to the median of {count} recorded"
    if reason.steps:
        chosen = f"as it shows what `why` says of {len(reason.steps)} of {count} recorded"
    text = (
        f"{ms(picture['length'])} ms: {which}, {chosen} (median of a step: "
        f"{ms(table.usual_length)} ms; of {len(table.bare)} without the recorder: "
        f"{ms(statistics.median(table.bare))} ms)"
    )
    if shown > 1:
        return text
    others = []
    for numbers in kinds(table):
        if number not in numbers:
            others += [table.lengths[k - table.first] for k in numbers]
    if others:
        text += f"; {len(others)} of the {count} have other passes or messages (median "
        text += f"{ms(statistics.median(others))} ms)"
    return text


def part_sums(rank: dict, has_others: bool) -> str:
    sums: Counter = Counter()
    for part in rank["parts"]:
        sums[part.what] += part.length
    text = ", ".join(f"{part} {ms(sums[part])}" for part in PARTS if part in sums) + " ms"
    idle = sum(pause.length for pause in rank["idle"])
    if idle:
        text += f", in {ms(idle)} of which the GPU has nothing to compute"
    waits = []
    while_bytes_move = []
    for other, duration in rank["waits_for"]:
        if other is None:
            while_bytes_move.append(f"{ms(duration)} while bytes move")
        else:
            waits.append(f"{ms(duration)} for rank {other}")
    waits += while_bytes_move
    if waits and has_others:
        text += f" (waiting: {', '.join(waits)})"
    return text


def message_sums(rank: dict) -> str:
    """Such as: 2 broadcasts 400 B together, 1 all-reduce 116 kB."""
    sizes = defaultdict(list)
    for message in rank["messages"]:
        if message["kind"] != "recv":
            sizes[message["kind"]].append(message["bytes"])
    texts = []
    for kind, some in sizes.items():
        together = " together" if len(some) > 1 else ""
        name = counted(len(some), COLLECTIVES.get(kind, kind))
        size = "(size not seen)" if None in some else f"{size_of(sum(some))}{together}"
        texts.append(f"{name} {size}")
    unseen = sum(not was_seen(message) for message in rank["messages"])
    if unseen:
        texts.append(f"when {unseen} of them ran was not seen")
    return ", ".join(texts) or "no messages"


def memory_sums(rank: dict) -> str:
    """The largest of each kind."""
    peaks = {kind: max(rank["memory"][kind]) for kind in KINDS}
    texts = [f"{kind} {size_of(peak)}" for kind, peak in peaks.items() if peak]
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
    messages = []
    for steps in table.ranks.values():
        for step in steps:
            messages += step.messages
    if messages and not any(map(was_seen, messages)):
        return "not seen, as the profiler tells no times of messages"
    steps: Counter = Counter()
    waited: Counter = Counter()
    for steps_of_ranks in zip(*table.ranks.values(), strict=True):
        caused = waits_in_step(steps_of_ranks)
        if caused:
            rank, duration = caused.most_common(1)[0]
            steps[rank] += 1
            waited[rank] += duration
    texts = []
    for rank, count in steps.most_common():
        average = ms(waited[rank] / count)
        texts.append(f"for rank {rank} in {count} of {len(table.lengths)} steps, {average} ms each")
    if not texts:
        return "no rank waited for another"
    return f"the others waited longest {'; '.join(texts)}"


def waits_in_step(steps: Iterable[Step]) -> Counter:
    """How long the others waited for each rank, divided by how many waited for it."""
    caused: Counter = Counter()
    waiting: Counter = Counter()
    for step in steps:
        for rank, duration in step.waits_for.items():
            if rank is not None and duration > 0:
                caused[rank] += duration
                waiting[rank] += 1
    return Counter({rank: caused[rank] / waiting[rank] for rank in caused})
