"""The figures of a run as one object of JSON, and what became slower since another run."""

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from instruments.command import Line
from timeline.data import PARTS, Recording
from timeline.steps import Table, longest
from timeline.why import OWN_PARTS, Reason

SLOWER, NOT_COMPARED = 1, 2  # exit codes


def figures_of(
    command: list[str],
    recordings: list[Recording],
    table: Table,
    reasons: list[Reason],
    findings: list[Line],
) -> dict[str, Any]:
    """The figures under names that do not change: see docs/timeline.md.  Times are milliseconds."""
    ranks = []
    for number, steps in table.ranks.items():
        times = {"step": [in_ms(step.length) for step in steps]}
        for part in PARTS:
            times[part] = [in_ms(step.spent[part]) for step in steps]
        times["messages"] = [in_ms(step.waits_for[None]) for step in steps]
        times["without_core"] = [in_ms(step.without_core) for step in steps]
        ranks.append({"rank": number, **times})
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


def in_ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 3)


def read_figures(file: str) -> dict[str, Any]:
    """What --json has written; ValueError, KeyError, TypeError or OSError if it is none."""
    found = json.loads(Path(file).read_text(encoding="utf-8"))
    for name in ("program", "processes", "device"):
        found[name]
    for rank in found["ranks"]:
        for name in ("step", "messages", "without_core", *OWN_PARTS):
            change(rank[name], rank[name])
    return found


# ------------------------------------------------------------------------------------------ compare


def faster_half(values: list[float]) -> list[float]:
    """The smaller half of the values, without the tenth that is smallest."""
    return sorted(values)[len(values) // 10 : len(values) // 2 + 1]


def change(before: list[float], after: list[float]) -> tuple[float, float]:
    """How much more it is in the faster half of the steps, and how much of that may be noise.

    Other programs disturb the slower half.  Noise is as much as the steps of a half differ.
    """
    halves = [faster_half(values) for values in (before, after)]
    middles = [statistics.median(half) for half in halves]
    return middles[1] - middles[0], max(half[-1] - half[0] for half in halves)


def compare(before: dict, after: dict, tolerance: float) -> tuple[str, int]:
    """What became slower, in words, and the exit code.  tolerance: in percent of a step."""
    for name in ("processes", "device"):
        if before[name] != after[name]:
            return f"not compared: {name}: {before[name]} before, now {after[name]}", NOT_COMPARED
    programs = [program_of(found["program"]) for found in (before, after)]
    if programs[0] != programs[1]:
        return f"not compared: {programs[0]} before, now {programs[1]}", NOT_COMPARED
    usual = statistics.median(faster_half(whole_steps(before)))
    more, noise, where = difference(before, after, tolerance / 100 * usual)
    share = f"{abs(more):.1f} ms ({100 * abs(more) / usual:.0f} %) {where}"
    told = f"noise: {noise:.1f} ms, tolerance: {tolerance:g} %"
    if before["program"] != after["program"]:
        told += "; other flags before: " + " ".join(before["program"])
    if abs(more) <= max(noise, tolerance / 100 * usual):
        return f"not slower, and not faster: a difference of {share} ({told})", 0
    if more < 0:
        return f"faster by {share} ({told})", 0
    return f"slower by {share} ({told}): {slower_parts(before, after, more)}", SLOWER


def difference(before: dict, after: dict, least: float) -> tuple[float, float, str]:
    """How much more a step takes, how much of that may be noise, and of what it is.

    least: a smaller difference is none.  On a busy machine the whole step differs by chance, as a
    rank has no core, and the others wait for it.  If that may hide a difference of what is left
    without these times, which differs less, this one counts.
    """
    whole, noise = change(whole_steps(before), whole_steps(after))
    noise += max(map(without_core, (before, after)))
    more, of_work = change(work(before), work(after))
    of_work *= 1.5  # a second look must be clear: of unchanged programs it was up to 1.0
    may_be_hidden = abs(whole) <= max(noise, least) and abs(more - whole) <= noise
    if may_be_hidden and abs(more) > max(of_work, least):
        return more, of_work, "in a step, without its waits"
    return whole, noise, "in a step"


def whole_steps(found: dict) -> list[float]:
    """The length of each step, on the rank whose steps are longest."""
    return longest([rank["step"] for rank in found["ranks"]])


def work(found: dict) -> list[float]:
    """What is left of each step without waits for messages and for a core; most on all ranks."""
    works = []
    for rank in found["ranks"]:
        parts, cores = [rank[part] for part in OWN_PARTS], rank["without_core"]
        works.append([sum(some) - core for *some, core in zip(*parts, cores, strict=True)])
    return longest(works)


def program_of(command: list[str]) -> str:
    return command[1] if command[0] == "-m" else Path(command[0]).name


def without_core(found: dict) -> float:
    """For how long a rank had no core in a step: another time it may be as much, or nothing."""
    return max(statistics.median(rank["without_core"]) for rank in found["ranks"])


def slower_parts(before: dict, after: dict, more: float) -> str:
    """The parts that are longer, of each rank; less than a quarter of the whole isn't said."""
    texts = []
    for part in (*OWN_PARTS, "messages"):
        mores = {}
        for old, new in zip(before["ranks"], after["ranks"], strict=True):
            own, noise = change(old[part], new[part])
            if own >= max(noise, more / 4):
                mores[new["rank"]] = own
        whole = f"{max(mores.values(), default=0):.1f} ms more in {part}"
        if len(mores) == len(after["ranks"]):
            texts.append(f"each rank spends {whole}")
        elif mores and part != "messages":
            texts.append(f"rank {' and rank '.join(map(str, mores))} spends {whole}")
    return ", ".join(texts) or "in no part by more than its noise"
