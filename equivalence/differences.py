"""Which gradients, in which steps, are not those that the optimizers should get."""

import dataclasses
from collections.abc import Callable

from equivalence import vectors
from equivalence.evidence import Evidence
from equivalence.vectors import Vector
from equivalence.words import some_of

TURNED = 0.001  # a vector has another direction if so much of it is left over


@dataclasses.dataclass
class Differences:
    """Between the gradients that the optimizers got and those that they should get."""

    found: list[list[Vector]]  # of each column, in each step
    goal: list[Vector]
    far: list[list[float]]  # the distances

    @property
    def largest(self) -> float:
        return max(max(steps) for steps in self.far)

    def in_step(self, step: int) -> float:
        return max(steps[step] for steps in self.far)


def wrong_steps(evidence: Evidence, differences: Differences) -> list[int]:
    return [step for step in evidence.steps if differences.in_step(step) > evidence.exact]


def worst_step(evidence: Evidence, differences: Differences) -> int:
    """Of those that begin with equal weights, if one is wrong: there the shares are exact."""
    first_unequal, _ = evidence.different_copies
    wrong = [step for step in wrong_steps(evidence, differences) if step < first_unequal]
    return max(wrong or evidence.steps, key=differences.in_step)


def wrong_tensors(evidence: Evidence, differences: Differences) -> list[str]:
    """Clipping shortens all of a rank's tensors: then those that have another direction, too."""
    first_unequal, _ = evidence.different_copies
    limits = []
    for step in evidence.steps:
        limits.append(max(evidence.exact, 1e-5 if step < first_unequal else TURNED))
    found = tensors_apart(evidence, differences, vectors.distance, limits)
    if is_clipped(evidence):
        limits = [TURNED] * len(evidence.steps)
        found = tensors_apart(evidence, differences, turned, limits) or found
    return found or evidence.names


def tensors_apart(
    evidence: Evidence,
    differences: Differences,
    measure: Callable[[Vector, Vector], float],
    limits: list[float],
) -> list[str]:
    """Those that are further from their goal than a step's limit, on some rank."""
    found = []
    for name in evidence.names:
        for step in evidence.steps:
            goal = {name: differences.goal[step][name]}
            values = [{name: steps[step][name]} for steps in differences.found]
            if max(measure(value, goal) for value in values) > limits[step]:
                found.append(name)
                break
    return found


def turned(value: Vector, goal: Vector) -> float:
    """How much of it has another direction."""
    return vectors.fit(value, [goal]).left


def is_clipped(evidence: Evidence) -> bool:
    """Whether the program calls clip_grad_norm_."""
    return any(rank.steps[0].norms for rank in evidence.plan.ranks)


def where(evidence: Evidence, differences: Differences, bad: list[str]) -> str:
    """Which tensors and steps, if not all."""
    text = ""
    right = len(evidence.names) - len(bad)
    if right:
        are = "differ at most in length" if is_clipped(evidence) else "are right"
        text += f" of {some_of(bad)} (the other {right} of {len(evidence.names)} tensors {are})"
    wrong = [str(step + 1) for step in wrong_steps(evidence, differences)]
    if len(wrong) < len(evidence.steps):
        text += f", in step {', '.join(wrong)} only"
    return text
