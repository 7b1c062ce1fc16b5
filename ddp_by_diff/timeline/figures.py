"""The figures of a run as one object of JSON, and what became slower since another run."""

import itertools
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_by_diff.instruments.command import Line
from ddp_by_diff.timeline.data import KINDS, PARTS, Block, Recording, counted
from ddp_by_diff.timeline.say import of_ranks
from ddp_by_diff.timeline.steps import Step, Table, longest, memory_curve
from ddp_by_diff.timeline.why import OWN_PARTS, Reason

MORE, NOT_KNOWN = 1, 2  # exit codes
COMPARED = (*OWN_PARTS, "messages")


def figures_of(
    command: list[str],
    recordings: list[Recording],
    table: Table,
    reasons: list[Reason],
    findings: list[Line],
) -> dict[str, Any]:
    """The figures under names that do not change: see docs/timeline.md.  Times are milliseconds."""
    ranks = []
    for place, (number, steps) in enumerate(table.ranks.items()):
        times = {"step": [in_ms(step.length) for step in steps]}
        for part in PARTS:
            times[part] = [in_ms(step.spent[part]) for step in steps]
        times["messages"] = [in_ms(step.waits_for[None]) for step in steps]
        times["without_core"] = [in_ms(step.without_core()) for step in steps]
        work = {part: [in_ms(step.work(part)) for step in steps] for part in OWN_PARTS}
        exact = exact_figures(steps, table.recordings[place]["memory"])
        ranks.append({"rank": number, **times, "work": work, "exact": exact})
    return {
        "program": command,
        "processes": recordings[0]["ranks"],
        "device": recordings[0]["device"],
        "torch": torch.__version__,
        "first_step": table.first + 1,
        "step": in_ms(table.usual_length),
        "step_without_recorder": in_ms(statistics.median(table.bare)),
        "ranks": ranks,
        "why": [{"text": text, "steps": [step + 1 for step in some]} for text, some in reasons],
        "lines": [{"label": label, "text": text} for label, text in findings],
    }


def exact_figures(steps: list[Step], blocks: list[Block]) -> dict[str, int]:
    """What is the same each time that a program runs: messages, their bytes, peaks of memory."""
    exact: Counter = Counter()
    for message in itertools.chain(*(step.messages for step in steps)):
        if message.kind != "recv":
            exact[f"{message.name} messages"] += 1
            exact[f"{message.name} bytes"] += message.bytes or 0
    curves = [memory_curve(blocks, step.begin, step.end) for step in steps]
    for kind in KINDS:
        exact[f"peak bytes of {kind}"] = statistics.median_low(max(curve[kind]) for curve in curves)
    return exact


def in_ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 3)


def read_figures(file: str) -> dict[str, Any]:
    """What --json has written; an error such as KeyError or TypeError if it is none."""
    found = json.loads(Path(file).read_text(encoding="utf-8"))
    compare(found, found, 0)
    return found


class Change(NamedTuple):
    """How much more something takes in a step, in milliseconds."""

    more: float
    noise: float  # so much of it may be chance
    part: str = ""
    rank: int = 0

    @property
    def is_seen(self) -> bool:
        return abs(self.more) > self.noise


def compare(before: dict, after: dict, tolerance: float) -> tuple[str, int]:
    """What became slower or more, in words, and the exit code.  tolerance: in percent of a step."""
    was, now = what_ran(before), what_ran(after)
    for name in was:
        if was[name] != now[name]:
            return f"not compared: {name}: {was[name]} before, now {now[name]}", NOT_KNOWN
    text, code = compare_times(before, after, tolerance)
    exact, is_more = compare_exactly(before["ranks"], after["ranks"])
    if before["program"] != after["program"]:
        exact += "; other flags before: " + " ".join(before["program"])
    return text + exact, MORE if is_more else code


def what_ran(found: dict) -> dict[str, Any]:
    first, *others = found["program"]
    program = others[0] if first == "-m" else Path(first).name
    return {"program": program, "processes": found["processes"], "device": found["device"]}


def compare_times(before: dict, after: dict, tolerance: float) -> tuple[str, int]:
    """Whether a step became slower, in words, and the exit code."""
    usual = usual_work(before["ranks"])
    changes = part_changes(before["ranks"], after["ranks"])
    noises = {part: max(one.noise for one in changes if one.part == part) for part in COMPARED}
    change = step_change(before, after, changes)
    parts = parts_in_words(changes, change.more)

    def share_of(time: float) -> str:
        return f"{time:.1f} ms ({100 * time / usual:.0f} %)"

    least = tolerance / 100 * usual
    if abs(change.more) > least:
        word = "slower" if change.more > 0 else "faster"
        noise = f"noise: {change.noise:.1f} ms, tolerance: {tolerance:g} %"
        text = f"{word} by {share_of(abs(change.more))} in a step ({noise}): {parts}"
        return text, MORE if change.more > 0 else 0
    coarse = [part for part, noise in noises.items() if noise > least]
    if coarse:
        texts = [f"{share_of(noises[part])} in {part}" for part in coarse]
        text = f"can't tell: differences below {', '.join(texts)} don't show on this machine"
        return f"{text} (tolerance: {tolerance:g} %)", NOT_KNOWN
    noise = f"noise: at most {share_of(max(noises.values()))}, tolerance: {tolerance:g} %"
    return f"not slower, and not faster: {parts} ({noise})", 0


def step_change(before: dict, after: dict, changes: list[Change]) -> Change:
    """How much more a step takes: what its parts do on one rank, if the whole doesn't contradict.

    On a busy machine the whole differs by chance, because a rank has no core, and the others wait
    for it.  Another time that may be as much, or nothing.
    """
    whole = change_of(whole_steps(before), whole_steps(after))
    waits = [statistics.median(rank["without_core"]) for rank in before["ranks"] + after["ranks"]]
    whole = whole._replace(noise=whole.noise + max(waits))
    seen = [change for change in changes if change.is_seen]
    mores: Counter = Counter()
    for change in seen:
        mores[change.rank] += change.more
    more = max(mores.values(), default=0)
    if abs(whole.more - more) > whole.noise:
        return whole
    return Change(more, max((change.noise for change in seen), default=0))


def usual_work(ranks: list[dict]) -> float:
    """What a step takes without its waits for a core and for other ranks, on the slowest rank."""
    lengths = []
    for rank in ranks:
        of_steps = zip(*rank["work"].values(), rank["messages"], strict=True)
        lengths.append(statistics.median(faster_half([*map(sum, of_steps)])))
    return max(lengths)


def whole_steps(found: dict) -> list[float]:
    """The length of each step, on the rank whose steps are longest."""
    return longest([rank["step"] for rank in found["ranks"]])


def part_changes(before: list[dict], after: list[dict]) -> list[Change]:
    """Of each rank's own parts, and of the time in which its messages are transferred."""
    changes = []
    for old, new in zip(before, after, strict=True):
        for part in COMPARED:
            then, now = ((rank | rank["work"])[part] for rank in (old, new))
            changes.append(change_of(then, now)._replace(part=part, rank=new["rank"]))
    return changes


def change_of(before: list[float], after: list[float]) -> Change:
    """The change in the faster half of the steps, because other programs disturb the slower half.

    Noise is as much as the steps of a half differ.
    """
    halves = faster_half(before), faster_half(after)
    then, now = map(statistics.median, halves)
    return Change(now - then, max(half[-1] - half[0] for half in halves))


def faster_half(values: list[float]) -> list[float]:
    return sorted(values)[: len(values) // 2 + 1]


def parts_in_words(changes: list[Change], whole: float) -> str:
    """The parts that differ, such as: forward +4.0 ms on rank 1.

    Less than a quarter of the whole isn't said.
    """
    texts = []
    for part in COMPARED:
        of_part = [change for change in changes if change.part == part]
        some = [one for one in of_part if one.is_seen and abs(one.more) >= abs(whole) / 4]
        if some:
            mores = sorted({f"{one.more:+.1f}" for one in some}, key=float)
            ranks = " and ".join(f"rank {one.rank}" for one in some)
            who = "each rank" if len(some) == len(of_part) > 1 else ranks
            texts.append(f"{part} {' to '.join(mores[:: len(mores) - 1 or 1])} ms on {who}")
    return ", ".join(texts) or "no part differs by more than its noise"


def compare_exactly(before: list[dict], after: list[dict]) -> tuple[str, bool]:
    """The exact figures that differ, in words, and whether one is more than before."""
    steps = len(after[0]["step"])
    if len(before[0]["step"]) != steps:
        return "", False
    ranks, is_more = [], False
    for old, new in zip(before, after, strict=True):
        texts, then, now = [], Counter(old["exact"]), Counter(new["exact"])
        for name in then | now:
            if then[name] != now[name]:
                texts.append(f"{now[name]:,} {name} (before: {then[name]:,})")
                is_more |= now[name] > then[name]
        ranks.append({"rank": new["rank"], "text": ", ".join(texts)})
    if not any(rank["text"] for rank in ranks):
        return "", False
    told = of_ranks(ranks, lambda rank: rank["text"] or "as before")
    return f"; in {counted(steps, 'step')}, {told}", is_more
