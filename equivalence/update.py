"""Do the optimizer's step, and the layers, change weights and buffers as in one process?"""

from collections.abc import Callable
from typing import NamedTuple

from equivalence import vectors
from equivalence.evidence import Evidence
from equivalence.gradients import Line
from equivalence.plan import FACTOR, Test
from equivalence.words import some_of

SCHEDULE = 0.01  # so much a schedule may differ in a few steps, if an epoch has other steps


def learning_rate(evidence: Evidence) -> list[Line]:
    count = len(evidence.plan.ranks)
    size, total = evidence.sizes()
    for step in evidence.steps:
        for one, other in rates(evidence, step):
            apart = rates_apart(one, other)
            if apart < 1e-6:
                continue
            text = f"{one:.6g} with {count} processes, {other:.6g} with one"
            if size and size != total and apart < SCHEDULE:
                text += f", in step {step + 1}: as a schedule does that counts an epoch's steps"
                return [Line("learning rate", text)]
            text += f" ({one / other:.4g} times)" if other else ""
            return [Line("learning rate", f"{text}, in step {step + 1}", True)]
    return []


def rates(evidence: Evidence, step: int) -> list[tuple[float, float]]:
    """Learning rates of the processes, and of one process."""
    many = evidence.plan.ranks[0].steps[step].rates
    alone = evidence.result.steps[Test("whole", step)].rates
    return list(zip(many, alone, strict=False))


def rates_apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(other), 1e-150)


def schedule_apart(evidence: Evidence) -> float:
    """How far the rates are apart, if that is a schedule's; as far may the steps be."""
    if any(line.is_wrong for line in learning_rate(evidence)):
        return 0.0
    found = 0.0
    for step in evidence.steps:
        for one, other in rates(evidence, step):
            found = max(found, rates_apart(one, other))
    return found


class Apart(NamedTuple):
    """How far the changes of the weights are apart from those of a test."""

    far: float
    rounding: float
    limit: float

    @property
    def is_unclear(self) -> bool:
        """The same step in one process differs as much from itself."""
        return self.limit < self.far <= FACTOR * self.rounding


def nearest(evidence: Evidence) -> Apart | None:
    """From the test that has the weights and the state of the processes; None: not seen.

    The steps `whole` are the first in one process.  So they also have what the program keeps
    itself, such as Lookahead's slow weights; those of `mean` come later.
    """
    found = apart(evidence, evidence.expected, max)
    if found and found.far > found.limit and evidence.expected == "mean":
        as_first = apart(evidence, "whole", min)  # `rounded` comes later, too
        if as_first and as_first.far <= as_first.limit:
            return as_first
    return found


def apart(evidence: Evidence, kind: str, of_steps: Callable) -> Apart | None:
    """None: a step's change was not seen, or there is none.

    of_steps: whether rounding is what it makes in the step where it makes most, or least.
    """
    expected = [evidence.update(kind, step) for step in evidence.steps]
    if not all(expected) or not any(vectors.length(one) for one in expected):
        return None
    masks: list[vectors.Vector] = [{} for _ in evidence.steps]
    if kind == "mean":
        masks = [evidence.more_than_rounding(step) for step in evidence.steps]
    expected = list(map(vectors.masked, expected, masks))
    far = 0.0
    for column in evidence.columns:
        changes = [evidence.change(step, column) for step in evidence.steps]
        changes = list(map(vectors.masked, changes, masks))
        far = max(far, *vectors.distances(changes, expected))
    rounding = 0.0
    for step in evidence.steps:
        forced = evidence.result.steps[Test("whole", step)].forced
        size = vectors.length({name: forced[name] for name in evidence.parameters})
        rounding = max(rounding, 6e-8 * size / max(1e-150, vectors.length(expected[step])))
    is_repeated = any(step.is_repeated for step in evidence.plan.ranks[0].steps)
    if is_repeated or kind == "whole":  # rounding of more than one gradient
        moved = []
        for step in evidence.steps:
            rounded, exact = evidence.update("rounded", step), evidence.update("whole", step)
            if rounded and exact:
                moved.append(vectors.distance(rounded, exact))
        rounding = max(rounding, of_steps(moved, default=0.0))
    limit = max(evidence.exact, FACTOR * min(rounding, evidence.unsteady))
    return Apart(far, rounding, limit)


def weights(evidence: Evidence, found: Apart | None) -> list[Line]:
    """Whether the steps change them as in one process; [] if that was not seen."""
    if found is None:
        return []
    is_right = found.far <= found.limit
    if not is_right and found.far <= FACTOR * schedule_apart(evidence):
        text = "they change as in one process, but for the schedule's other rates "
        return [Line("weights", f"{text}(apart by {found.far:.0e})")]
    text = "right: they change" if is_right else "they don't change"
    text += f" as in one process (apart by {found.far:.0e}; rounding {found.rounding:.0e})"
    return [Line("weights", text, not is_right and not found.is_unclear)]


def unclear_weights(found: Apart | None) -> str:
    """Why it isn't known whether a step changes the weights as in one process, or ""."""
    if found is None or not found.is_unclear:
        return ""
    text = f"in one process the same step changes the weights otherwise (by {found.rounding:.0e}): "
    return f"{text}does the program keep a state, or change a number in each step?"


def buffers(evidence: Evidence) -> list[Line]:
    """Those that a layer changes otherwise: with the examples of its own process, it may be."""
    far: dict[str, float] = {}
    for step in evidence.steps:
        change = evidence.change(step, 0, evidence.buffers)
        expected = evidence.update("whole", step, evidence.buffers)
        for name in expected:
            own, wanted = {name: change[name]}, {name: expected[name]}
            size = max(vectors.length(own), vectors.length(wanted), 1e-150)
            distance = vectors.length(vectors.difference(own, wanted)) / size
            far[name] = max(far.get(name, 0.0), distance)
    limit = max(1e-3, FACTOR * evidence.rounding())
    names = [name for name in far if far[name] > limit]
    if not names:
        return []
    most = max(far[name] for name in names)
    text = f"{some_of(names)} don't change as in one process (apart by {most:.0e}): does a process "
    return [Line("buffers", f"{text}look at its own examples only?")]
