"""Link 2: is the mean of the ranks' own gradients that of all examples in one batch?"""

from typing import Any, NamedTuple

from equivalence import limits, vectors
from equivalence.facts import GOT, Facts
from equivalence.notes import Alone, Notes
from equivalence.vectors import Vector


class Apart(NamedTuple):
    """How far two gradients are apart: of the tensor that is furthest beyond its limit."""

    far: float
    limit: float  # up to this it is rounding
    name: str = ""
    rounding: float = 0.0  # how far rounding, or another order of the examples, moves it
    most_rounding: float = 0.0  # of all tensors

    @property
    def is_right(self) -> bool:
        return self.far <= self.limit


class Measured(NamedTuple):
    """In one step."""

    step: int
    apart: Apart
    weights: list[float]  # of the shares, that make one process's gradient, if these do


class Look(NamedTuple):
    """The processes' notes beside a run in one process."""

    facts: Facts
    left_out: tuple  # kinds of layers that both were made without
    whole: Alone | None
    moved: Alone | None = None
    steps: tuple[Measured, ...] = ()

    @property
    def is_right(self) -> bool:
        return bool(self.steps) and all(step.apart.is_right for step in self.steps)

    @property
    def worst_step(self) -> Measured:
        return max(self.steps, key=lambda step: step.apart.far / step.apart.limit)

    @property
    def worst(self) -> Apart:
        return self.worst_step.apart

    @property
    def is_given(self) -> bool:
        """Whether nothing was joined: the batches are its own, or the same on all ranks."""
        return not self.whole.is_joined or len(self.facts.distinct) == 1

    @property
    def total(self) -> int:
        """Examples in a step: as one process has them itself, or those of all ranks."""
        own = self.whole.rows.get(self.facts.keys[0], 0)
        return self.facts.total if self.whole.is_joined or not own else own

    @property
    def limit(self) -> float:
        return max(step.apart.limit for step in self.steps)

    @property
    def shares(self) -> list[list[float]]:
        """Each rank's weight in one process's gradient; steps not measured repeat the last."""
        weights = [step.weights for step in self.steps]
        return weights + [weights[-1]] * (len(self.facts.steps) - len(weights))


class Looks:
    """Makes the looks, and the runs that each needs.  Rounding is measured where it matters."""

    def __init__(self, facts: Facts, runs: Any) -> None:
        self.facts, self.runs = facts, runs

    def at(self, facts: Facts, left_out: tuple = ()) -> Look:
        look = Look(facts, left_out, self.runs.alone(facts, "whole", left_out))
        if look.whole is None or look.whole.unmatched:
            return look
        look = measured(look)
        may_be_rounding = look.steps and not look.is_right and look.worst.far <= facts.most
        return self.with_rounding(look) if may_be_rounding else look

    def with_rounding(self, look: Look) -> Look:
        moved = look.moved or self.runs.alone(look.facts, "moved", look.left_out)
        return measured(look._replace(moved=moved)) if moved else look

    def without(self, kinds: tuple) -> Look | None:
        """Without these kinds of layers, in run A, too."""
        facts = self.runs.several(kinds, self.facts)
        look = self.at(facts, kinds) if facts else None
        return look if look and look.steps else None


def measured(look: Look) -> Look:
    """With how far the gradients are apart, in each step that begins with equal weights."""
    steps = [measure(look, k) for k in look.facts.comparable]
    return look._replace(steps=tuple(steps))


def measure(look: Look, step: int) -> Measured:
    facts = look.facts
    names, reordered = facts.comparable_names(step), None
    parts = facts.owns[step] if facts.gradients != GOT else []
    parts = [vectors.only(part, names) for part in parts]
    actual, wanted = (vectors.only(side, names) for side in sides(facts, look.whole.notes, step))
    if look.moved:
        reordered = gradient(facts, look.moved.notes, step, "own" if parts else "got")
    count, sizes = len(parts), vectors.mean_lengths(parts)
    apart = compare(facts, actual, wanted, reordered, sizes)
    even = Measured(step, apart, [1 / count for _ in parts])
    if apart.is_right or not parts:
        return even
    fit = vectors.fit(wanted, parts)
    if not fit.is_clear or min(fit.weights) <= 0:
        return even
    ones = [1.0] * count
    weights = ones if vectors.near(fit.weights, ones, limits.COEFFICIENT) else fit.weights
    left = compare(facts, vectors.combine(parts, weights), wanted, reordered, sizes)
    is_better = left.is_right and left.far <= apart.far / limits.CLEARLY
    return Measured(step, left, weights) if is_better else even


def sides(facts: Facts, alone: Notes, step: int) -> tuple[Vector, Vector]:
    """The processes' gradients and one process's: own, if they were seen; else the optimizers'."""
    if facts.gradients != GOT:
        return vectors.mean(facts.owns[step]), gradient(facts, alone, step, "own")
    wanted, actual = gradient(facts, alone, step, "got"), {}
    for name, tensor in wanted.items():
        whole = facts.whole("got", name, step, tensor.shape)
        if whole is not None:
            actual[name] = whole
    return actual, wanted


def compare(
    facts: Facts, actual: Vector, wanted: Vector, reordered: Vector | None, sizes: dict[str, float]
) -> Apart:
    """reordered: `wanted`, rounded otherwise.  sizes: the ranks' own, of each tensor."""
    small = limits.SMALL_COARSE if facts.is_coarse else limits.SMALL
    least, floor = small * vectors.length(wanted), floor_of(facts)
    worst, most_rounding = Apart(0.0, floor), 0.0
    for name in wanted:
        scale = max(least, sizes.get(name, 0.0))
        far = vectors.distance_in(name, actual, wanted, scale)
        limit, rounding = floor, 0.0
        if reordered is not None:
            rounding = vectors.distance_in(name, reordered, wanted, scale)
            limit = max(floor, min(facts.most, limits.YARDSTICKS * rounding))
        most_rounding = max(most_rounding, rounding)
        if far / limit > worst.far / worst.limit:
            worst = Apart(far, limit, name, rounding)
    for name in actual.keys() - wanted.keys():
        if bool(actual[name].any()):
            worst = Apart(1.0, floor, name)
    return worst._replace(most_rounding=most_rounding)


def floor_of(facts: Facts) -> float:
    """What sums of so many numbers round, whatever was measured."""
    if facts.is_coarse:
        return limits.MOST_COARSE
    return limits.ROUNDING * max(4, facts.total) ** 0.5


def gradient(facts: Facts, notes: Notes, step: int, what: str) -> Vector:
    return vectors.only(getattr(notes.steps[step], what), facts.trained)
