"""What the ranks spend in their steps, and one rank more than the others."""

import statistics
from collections.abc import Callable

from timeline.steps import Step, Table


def waits_for(table: Table, slow: int) -> list[float]:
    """How long the other ranks waited for this one in each step, on average."""
    others = [steps for rank, steps in table.ranks.items() if rank != slow]
    waits = []
    for of_others in zip(*others, strict=True):
        waits.append(statistics.mean(step.waits_for[slow] for step in of_others))
    return waits


def late_ranks(table: Table) -> list[tuple[int, float]]:
    """The rank for which the others waited longest in each step, and how long."""
    waits = {rank: waits_for(table, rank) for rank in table.ranks}
    late = []
    for place in range(len(table.lengths)):
        rank = max(waits, key=lambda rank: waits[rank][place])
        late.append((rank, waits[rank][place]))
    return late


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
    mores = more_than_others(table, slow, spent_in(part))
    cores = more_than_others(table, slow, without_core)
    return [more - max(0, core) for more, core in zip(mores, cores, strict=True)]


def least(table: Table, of: Callable[[Step], float]) -> float:
    """The median of all steps, on the rank where it is least."""
    return min(statistics.median(map(of, steps)) for steps in table.ranks.values())


def averages(table: Table, of: Callable[[Step], float]) -> list[float]:
    """Each rank's mean, as workers of a DataLoader bring their batches together, and then none.

    The longest step is left out, which may be an epoch's first, when they start.
    """
    means = []
    for steps in table.ranks.values():
        times = sorted(map(of, steps))
        means.append(statistics.mean(times[:-1] or times))
    return means
