"""Link 2: is the mean of the ranks' own gradients the gradient of all examples in one batch?"""

from typing import Any, NamedTuple

from equivalence import limits, vectors
from equivalence.facts import GOT, Facts
from equivalence.notes import Alone, Notes
from equivalence.vectors import Vector


class Apart(NamedTuple):
    """The distance of two gradients, in the tensor that is furthest beyond its limit."""

    far: float
    limit: float  # up to this it is rounding
    name: str = ""
    rounding: float = 0.0  # how much rounding, or another order of the examples, changes it
    most_rounding: float = 0.0  # the largest of all tensors

    @property
    def is_right(self) -> bool:
        return self.far <= self.limit


class Measurement(NamedTuple):
    """The distance of the ranks' gradients from one process's, in one step."""

    step: int
    apart: Apart
    factors: list[float]  # of the ranks' gradients, so that they add up to one process's


class Look(NamedTuple):
    """The ranks' notes beside a run in one process."""

    facts: Facts
    left_out: tuple  # kinds of layers that were switched off in both
    alone: Alone | None
    perturbed: Alone | None = None
    steps: tuple[Measurement, ...] = ()

    @property
    def is_right(self) -> bool:
        return bool(self.steps) and all(step.apart.is_right for step in self.steps)

    @property
    def worst_step(self) -> Measurement:
        return max(self.steps, key=lambda step: step.apart.far / step.apart.limit)

    @property
    def worst(self) -> Apart:
        return self.worst_step.apart

    @property
    def is_given(self) -> bool:
        """Whether no batches were joined: one process has its own, or all ranks have the same."""
        return not self.alone.is_joined or len(self.facts.distinct) == 1

    @property
    def total(self) -> int:
        """The number of examples in a step of one process."""
        own = self.alone.rows.get(self.facts.keys[0], 0)
        return self.facts.total if self.alone.is_joined or not own else own

    @property
    def limit(self) -> float:
        return max(step.apart.limit for step in self.steps)

    @property
    def factors(self) -> list[list[float]]:
        """The factors of each step; steps that were not measured repeat the last ones."""
        factors = [step.factors for step in self.steps]
        return factors + [factors[-1]] * (len(self.facts.steps) - len(factors))


class Looks:
    """Looks, and the runs that each needs; rounding is measured only where it matters."""

    def __init__(self, facts: Facts, runs: Any) -> None:
        self.facts, self.runs = facts, runs

    def at(self, facts: Facts, left_out: tuple = ()) -> Look:
        """The look at a run with all examples; with rounding, if it may explain a difference."""
        look = Look(facts, left_out, self.runs.alone(facts, "all examples", left_out))
        if look.alone is None or look.alone.unmatched:
            return look
        look = with_measurements(look)
        if not look.steps or look.is_right or look.worst.far > facts.rounding_limit:
            return look
        return self.with_rounding(look)

    def with_rounding(self, look: Look) -> Look:
        """The same look, with a second run that measures how much rounding changes gradients."""
        perturbed = look.perturbed or self.runs.alone(look.facts, "perturbed", look.left_out)
        return with_measurements(look._replace(perturbed=perturbed)) if perturbed else look

    def without(self, kinds: tuple) -> Look | None:
        """The look at runs without these kinds of layers; run A, too, is made once more."""
        facts = self.runs.with_all_ranks(kinds, self.facts)
        look = self.at(facts, kinds) if facts else None
        return look if look and look.steps else None


def with_measurements(look: Look) -> Look:
    """The look, with a measurement of each step that all ranks begin with equal weights."""
    steps = [measure(look, k) for k in look.facts.comparable]
    return look._replace(steps=tuple(steps))


def measure(look: Look, step: int) -> Measurement:
    """The distance in a step: of the mean, or of a better combination if that is right."""
    facts = look.facts
    names, reordered = facts.comparable_names(step), None
    parts = facts.owns[step] if facts.gradients != GOT else []
    parts = [vectors.only(part, names) for part in parts]
    actual, wanted = (vectors.only(side, names) for side in sides(facts, look.alone.notes, step))
    if look.perturbed:
        reordered = gradient(facts, look.perturbed.notes, step, "own" if parts else "got")
    count, sizes = len(parts), vectors.mean_lengths(parts)
    apart = furthest_apart(facts, actual, wanted, reordered, sizes)
    even = Measurement(step, apart, [1 / count for _ in parts])
    if apart.is_right or not parts:
        return even
    fit = vectors.fit(wanted, parts)
    if not fit.is_clear or min(fit.factors) <= 0:
        return even
    ones = [1.0] * count
    factors = ones if vectors.numbers_are_near(fit.factors, ones, limits.FACTOR) else fit.factors
    left = furthest_apart(facts, vectors.combine(parts, factors), wanted, reordered, sizes)
    is_better = left.is_right and left.far <= apart.far / limits.CLEARLY
    return Measurement(step, left, factors) if is_better else even


def sides(facts: Facts, alone: Notes, step: int) -> tuple[Vector, Vector]:
    """The ranks' gradient and one process's: own, if these were seen; else the optimizers'."""
    if facts.gradients != GOT:
        return vectors.mean(facts.owns[step]), gradient(facts, alone, step, "own")
    wanted, actual = gradient(facts, alone, step, "got"), {}
    for name, tensor in wanted.items():
        whole = facts.whole("got", name, step, tensor.shape)
        if whole is not None:
            actual[name] = whole
    return actual, wanted


def furthest_apart(
    facts: Facts, actual: Vector, wanted: Vector, reordered: Vector | None, sizes: dict[str, float]
) -> Apart:
    """The worst tensor.  reordered: `wanted`, rounded otherwise.  sizes: of the ranks' own."""
    small = limits.SMALL_COARSE if facts.is_coarse else limits.SMALL
    least, floor = small * vectors.length(wanted), floor_of(facts)
    worst, most_rounding = Apart(0.0, floor), 0.0
    for name in wanted:
        scale = max(least, sizes.get(name, 0.0))
        far = vectors.distance_in(name, actual, wanted, scale)
        limit, rounding = floor, 0.0
        if reordered is not None:
            rounding = vectors.distance_in(name, reordered, wanted, scale)
            limit = max(floor, min(facts.rounding_limit, limits.YARDSTICKS * rounding))
        most_rounding = max(most_rounding, rounding)
        if far / limit > worst.far / worst.limit:
            worst = Apart(far, limit, name, rounding)
    for name in actual:
        if name not in wanted and bool(actual[name].any()):
            worst = Apart(1.0, floor, name)
    return worst._replace(most_rounding=most_rounding)


def floor_of(facts: Facts) -> float:
    """The rounding error of a sum over all examples: the least limit."""
    if facts.is_coarse:
        return limits.MOST_COARSE
    return limits.ROUNDING * max(4, facts.total) ** 0.5


def gradient(facts: Facts, notes: Notes, step: int, what: str) -> Vector:
    return vectors.only(getattr(notes.steps[step], what), facts.trained)
