"""What a figure of each step is in all steps, and what only some have: by chance, or not."""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

CHANCE = 0.01  # what is more probable without a cause is not named
LONG = 10  # usual steps: a pause that comes by chance is seldom longer

IsChance = Callable[[list[int], float], bool]  # of places of steps, and how much more they have


class Habit(NamedTuple):
    """Which steps have far more of something."""

    places: list[int]  # none: no step, but for chance
    mores: list[float]  # so much, each
    others: list[int]  # places of the other steps, without chance


def habit_of(values: list[float], least: float, is_chance: IsChance) -> Habit:
    """What is far above the rest is what some steps have.  If it is chance, it is left out.

    values: of each step; least: what it must be on average of all.
    """
    others = [*range(len(values))]
    while far := far_above(values, others):
        rest = [place for place in others if place not in far]
        usual = mean_at(values, rest)
        mores = [values[place] - usual for place in far]
        if sum(mores) < least * len(values):
            break
        others = rest
        if not is_chance(far, statistics.mean(mores)):
            return Habit(far, mores, others)
    return Habit([], [], others)


def far_above(values: list[float], places: list[int]) -> list[int]:
    """The places of the larger of two groups of values, if there is a gap between these."""
    limit, last = mean_at(values, places), None
    while limit != last:  # until it is in the middle between the groups' means
        high = [place for place in places if values[place] > limit]
        low = [place for place in places if values[place] <= limit]
        if not high or len(high) > len(low):
            return []
        last, limit = limit, (mean_at(values, high) + mean_at(values, low)) / 2
    gap = min(values[place] for place in high) - max(values[place] for place in low)
    return high if gap > (mean_at(values, high) - mean_at(values, low)) / 3 else []


def mean_at(values: list[float], places: list[int]) -> float:
    return statistics.mean(values[place] for place in places)


def is_rare(places: list[int], length: float, others: int, ranks: int, steps: int) -> bool:
    """Whether pauses that come by chance, to any rank, would seldom come to one like this.

    length: of a pause, in usual steps; others: how many come to other ranks.  Regular intervals
    are rare, too, and so are long pauses, if no other rank has some.  Once is chance.
    """
    if len(places) < 2:
        return False
    count, share = len(places) + others, 1 / ranks
    probability = 0.0
    for mine in range(len(places), count + 1):
        ways = math.comb(count, mine)
        probability += ways * share**mine * (1 - share) ** (count - mine)
    regular = []  # from the first steps to the last
    for interval in range(1, steps):
        regular += [[*range(first, steps, interval)] for first in range(interval)]
    alike = [some for some in regular if len(some) == len(places)]
    if places in alike and others < len(places) / 2:
        probability *= len(alike) / math.comb(steps, len(places))
    if not others:
        probability *= min(1, LONG / length) ** len(places)
    return probability <= CHANCE
