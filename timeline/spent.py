"""What the ranks spend in their steps, and one rank more than the others."""

import statistics
from collections.abc import Callable, Iterable

from timeline.steps import Step, Table


def waits_for(table: Table, slow: int) -> list[float]:
    """How long the other ranks waited for this one in each step, on average."""
    others = [steps for rank, steps in table.ranks.items() if rank != slow]
    waits = []
    for of_others in zip(*others, strict=True):
        waits.append(statistics.mean(step.waits_for[slow] for step in of_others))
    return waits


def spent_in(*parts: str) -> Callable[[Step], float]:
    return lambda step: sum(step.spent[part] for part in parts)


def without_core(step: Step) -> float:
    return step.without_core


def more_than_others(table: Table, slow: int, of: Callable[[Step], float]) -> list[float]:
    """What this rank has more than the others in each step, on average."""
    others = [steps for rank, steps in table.ranks.items() if rank != slow]
    mores = []
    for own, *of_others in zip(table.ranks[slow], *others, strict=True):
        mores.append(of(own) - statistics.mean(of(step) for step in of_others))
    return mores


def more_on_core(table: Table, slow: int, part: str) -> list[float]:
    """The same of a part, less the time in which only this rank had no core."""
    rest = []
    mores = more_than_others(table, slow, spent_in(part))
    for more, core in zip(mores, more_than_others(table, slow, without_core), strict=True):
        rest.append(more - max(0, core))
    return rest


def typical_length(table: Table) -> float:
    """The median of a step, on the rank where it takes longest."""
    medians = []
    for steps in table.ranks.values():
        medians.append(statistics.median(step.length for step in steps))
    return max(medians)


def least(all_steps: Iterable[list[Step]], of: Callable[[Step], float]) -> float:
    """The median of all steps, on the rank where it is least."""
    return min(statistics.median(of(step) for step in steps) for steps in all_steps)


def loading_of(steps: list[Step]) -> float:
    return average([step.spent["loading"] for step in steps])


def average(times: list[int]) -> float:
    """Of several steps, as workers of a DataLoader bring their batches together, and then none.

    The longest is left out, which may be an epoch's first, when they start.
    """
    return statistics.mean(sorted(times)[:-1] or times)
