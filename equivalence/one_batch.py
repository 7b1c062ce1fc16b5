"""Link 2: is the mean of the ranks' own gradients that of all examples in one batch?"""

from typing import NamedTuple

from instruments.tensors import tensors_in

from equivalence import limits, vectors
from equivalence.batches import counts_up, rows_differ
from equivalence.facts import Facts, together
from equivalence.notes import Alone, Notes
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
    def limit(self) -> float:
        return max(step.apart.limit for step in self.steps)

    @property
    def shares(self) -> list[list[float]]:
        """How much each rank's gradient counts in one process's; the last steps are like others."""
        weights = [step.weights for step in self.steps]
        return weights + [weights[-1]] * (len(self.facts.steps) - len(weights))


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


def measured(look: Look) -> Look:
    """With how far the gradients are apart, in each step that begins with equal weights."""
    steps = [measure(look, k) for k in look.facts.comparable()]
    return look._replace(steps=tuple(steps))


def measure(look: Look, step: int) -> Measured:
    facts = look.facts
    parts = facts.own(step) if facts.are_own_seen() else []
    actual, wanted = sides(facts, look.whole.notes, step)
    reordered = None
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
    if facts.are_own_seen():
        return vectors.mean(facts.own(step)), gradient(facts, alone, step, "own")
    wanted, actual = gradient(facts, alone, step, "got"), {}
    for name, tensor in wanted.items():
        parts = [rank.steps[step].got.get(name) for rank in facts.peers]
        whole = together(parts, tensor.shape)
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


# -------------------------------------------------------------------- may the program be accused?


def factors(look: Look) -> str:
    """If each tensor is a multiple of one process's: that no wrong batch would bring about."""
    actual, wanted = sides(look.facts, look.whole.notes, look.worst_step.step)
    names: dict[float, list[str]] = {}
    for name, goal in wanted.items():
        fit = vectors.fit({name: actual.get(name, goal * 0)}, [{name: goal}])
        if fit.left > limits.OWN or goal.numel() < 2 and abs(fit.weights[0] - 1) > limits.OWN:
            return ""
        names.setdefault(round(fit.weights[0], 3), []).append(name)
    if set(names) == {1.0}:
        return ""
    texts = [f"{times:.3g} times one process's of {some_of(names[times])}" for times in names]
    return " and ".join(texts)


def why_not_joined_well(look: Look) -> str:
    """What one batch of the ranks' batches is, was guessed: could the guess be wrong?"""
    facts = look.facts
    if are_ragged(facts):
        return "examples have different shapes: how a batch is padded may be what differs"
    if look.is_given:
        return ""
    if look.whole.is_mixed:
        return "some batches in one process are the program's own, and others are not"
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
            rank = facts.distinct[facts.chosen(k)]
            own = vectors.only(rank.steps[k].own, facts.trained)
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
