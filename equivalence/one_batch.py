"""Link 2: is the mean of the ranks' own gradients that of all examples in one batch?"""

from typing import NamedTuple

from instruments.tensors import tensors_in

from equivalence import limits, vectors
from equivalence.batches import counts_up, rows_differ
from equivalence.facts import Facts
from equivalence.given import together
from equivalence.notes import Notes
from equivalence.replay import Alone
from equivalence.vectors import Vector
from equivalence.words import some_of


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

    apart: Apart
    weights: list[float] | None  # of the shares, that make one process's gradient; None: no such


class Look(NamedTuple):
    """The processes' notes beside a run in one process."""

    facts: Facts
    whole: Alone | None
    moved: Alone | None
    steps: list[Measured]

    @property
    def is_right(self) -> bool:
        return bool(self.steps) and all(step.apart.is_right for step in self.steps)

    @property
    def worst(self) -> Apart:
        return max((step.apart for step in self.steps), key=lambda apart: apart.far / apart.limit)

    @property
    def limit(self) -> float:
        return max(step.apart.limit for step in self.steps)


def why_not_joined(facts: Facts) -> str:
    """Why the ranks' batches can't be made one; "" if they can."""
    for key in facts.keys:
        shares = [rank.events.get(key, []) for rank in facts.distinct]
        for events in zip(*shares, strict=False):
            if all(event.examples for event in events):
                continue  # the program's own collate_fn makes it
            if sizes := rows_differ([event.value for event in events]):
                return f"the tensors of a batch have {sizes} rows, not one for each example"
    return ""


def most(facts: Facts) -> float:
    """No larger difference is rounding."""
    return limits.MOST_COARSE if facts.is_coarse else limits.MOST


def measure(facts: Facts, whole: Alone, moved: Alone | None) -> list[Measured]:
    """In each step that begins with equal weights."""
    measured = []
    for k in facts.comparable():
        if facts.are_own_seen():
            measured.append(measure_own(facts, whole, moved, k))
        else:
            wanted = gradient(facts, whole.notes, k, "got")
            reordered = gradient(facts, moved.notes, k, "got") if moved else None
            apart = compare(facts, got_of_all(facts, whole.notes, k), wanted, reordered, {})
            measured.append(Measured(apart, None))
    return measured


def measure_own(facts: Facts, whole: Alone, moved: Alone | None, step: int) -> Measured:
    parts = facts.own(step)
    wanted = gradient(facts, whole.notes, step, "own")
    reordered = gradient(facts, moved.notes, step, "own") if moved else None
    count, sizes = len(parts), vectors.mean_lengths(parts)
    apart = compare(facts, vectors.mean(parts), wanted, reordered, sizes)
    if apart.is_right:
        return Measured(apart, [1 / count] * count)
    fit = vectors.fit(wanted, parts)
    if not fit.is_clear or min(fit.weights) <= 0:
        return Measured(apart, None)
    ones = [1.0] * count
    weights = ones if vectors.near(fit.weights, ones, limits.COEFFICIENT) else fit.weights
    left = compare(facts, vectors.combine(parts, weights), wanted, reordered, sizes)
    if left.is_right and left.far <= apart.far / limits.CLEARLY:
        return Measured(left, weights)
    return Measured(apart, None)


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
            limit = max(floor, min(most(facts), limits.YARDSTICKS * rounding))
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
    return limits.ROUNDING * max(4, facts.total()) ** 0.5


def gradient(facts: Facts, notes: Notes, step: int, what: str) -> Vector:
    return vectors.only(getattr(notes.steps[step], what), facts.trained)


def got_of_all(facts: Facts, alone: Notes, step: int) -> Vector:
    """What the optimizers got; put together, if the ranks have parts."""
    gradients = {}
    for name, wanted in gradient(facts, alone, step, "got").items():
        parts = [rank.steps[step].got.get(name) for rank in facts.peers]
        whole = together(parts, wanted.shape)
        if whole is not None:
            gradients[name] = whole
    return gradients


# -------------------------------------------------------------------- may the program be accused?


def factors(look: Look) -> str:
    """If each tensor is a multiple of one process's: that no wrong batch would bring about."""
    facts = look.facts
    steps = zip(facts.comparable(), look.steps, strict=True)
    k = max(steps, key=lambda pair: pair[1].apart.far / pair[1].apart.limit)[0]
    if facts.are_own_seen():
        actual = vectors.mean(facts.own(k))
        wanted = gradient(facts, look.whole.notes, k, "own")
    else:
        actual = got_of_all(facts, look.whole.notes, k)
        wanted = gradient(facts, look.whole.notes, k, "got")
    names: dict[float, list[str]] = {}
    for name, goal in wanted.items():
        fit = vectors.fit({name: actual.get(name, goal * 0)}, [{name: goal}])
        if fit.left > limits.OWN or goal.numel() < 2 and abs(fit.weights[0] - 1) > limits.OWN:
            return ""
        names.setdefault(round(fit.weights[0], 3), []).append(name)
    if set(names) == {1.0}:
        return ""
    if len(names) == 1:
        return f"{next(iter(names)):.3g} times one process's"
    texts = [f"{times:.3g} times that of {some_of(some)}" for times, some in names.items()]
    return " and ".join(texts)


def why_not_joined_well(look: Look) -> str:
    """What one batch of the ranks' batches is, was guessed: could the guess be wrong?"""
    facts = look.facts
    rounding = max(step.apart.most_rounding for step in look.steps)
    if rounding > limits.YARDSTICKS * most(facts):
        return f"the same examples have another gradient in another order (apart by {rounding:.0e})"
    for rank in facts.ranks:
        for events in rank.events.values():
            if any(counts_up(event.value) for event in events[:1] if not event.examples):
                return "a tensor numbers groups of rows, and can't be joined with another rank's"
    return ""


def why_not_its_own(look: Look, share: Alone | None) -> str:
    """share: a run with one rank's examples, as long as the longest of all.

    Unless they give that rank's own gradient, or a multiple, the join is wrong, not the program.
    """
    facts = look.facts
    for k in facts.comparable():
        if share is not None:
            own = vectors.only(facts.distinct[share.chosen[k]].steps[k].own, facts.trained)
            fit = vectors.fit(own, [gradient(facts, share.notes, k, "own")])
        if share is None or fit.left > max(most(facts) / limits.CLEARLY, limits.OWN):
            text = "a rank's examples, computed in one process, don't give that rank's gradient"
            return f"{text}: it depends on other ranks, on padding, or on something unseen"
    return ""


def are_ragged(facts: Facts) -> bool:
    """Whether the program's own collate_fn makes batches of examples of different shapes."""
    shapes: dict[str, set] = {key: set() for key in facts.keys}
    for rank in facts.ranks:
        for key, known in shapes.items():
            for event in rank.events.get(key, []):
                for example in event.examples or []:
                    known.add(tuple(tensor.shape for tensor in tensors_in(example)))
    return any(len(known) > 1 for known in shapes.values())
