"""What both runs have found, side by side; and how much rounding changes."""

import functools

import torch

from equivalence import vectors
from equivalence.layers import AVERAGES
from equivalence.notes import Step
from equivalence.plan import FACTOR, Plan, Test
from equivalence.replay import Result
from equivalence.vectors import Vector

ALONE = "in one process"
UNSTEADY = 0.01
CANCELLED = 1e-4  # so small the mean of the shares' gradients may be, compared with their sizes


class Evidence:
    def __init__(self, plan: Plan, result: Result) -> None:
        self.plan, self.result = plan, result
        self.steps = range(plan.steps)
        self.columns = range(len(plan.columns))
        whole = [result.steps[Test("whole", step)] for step in self.steps]
        self.shapes = {}
        for one in whole:
            self.shapes |= {name: tensor.shape for name, tensor in one.forced.items()}
        trained = set().union(*(one.gradients for one in whole))
        in_all = set(self.shapes).intersection(*(one.forced for one in whole))
        # Not those of a model that an evaluation calls now and then.
        known = (trained & set(self.shapes)) | in_all
        self.parameters = [name for name in result.notes.parameters if name in known]
        others = in_all.difference(result.notes.parameters)
        self.buffers = sorted(name for name in others if not name.endswith(AVERAGES))
        self.names = self.names_with(whole)  # of the tensors that are compared
        self.is_blind = not self.names  # the optimizer's parameters are others than the model's
        if self.is_blind:
            seen = set().union(*(one.raw for one in whole))
            self.names = [name for name in self.parameters if name in seen]
        plan.trained = set(self.names)
        # The ranks whose batches are different; of one rank there is no mean.
        self.shares = plan.distinct(0) if len(self.columns) > 1 else [0]
        has_means = all(Test("mean", step) in result.steps for step in self.steps)
        self.has_shares = len(self.shares) > 1 and result.notes.optimizers == 1 and has_means
        if self.has_shares and self.names and self.is_one_process():
            self.has_shares = False  # its loss may look at other ranks' examples, and do it right
        self.expected = "mean" if self.has_shares else "whole"

    def is_one_process(self) -> bool:
        """Whether the optimizers get one process's gradients, and not the mean of the shares'."""
        if self.is_blind:
            return False
        is_mean = self.gradients_from("mean") <= self.exact_mean
        return not is_mean and self.gradients_from("whole") <= FACTOR * self.rounding()

    def gradients_from(self, kind: str) -> float:
        """How far they are from the test's, in most of the steps."""
        goal = [self.tensors("gradients", Test(kind, step)) for step in self.steps]
        far = 0.0
        for column in self.columns:
            found = [self.of_column("gradients", k, column, self.names) for k in self.steps]
            far = max(far, vectors.median(vectors.distances(found, goal)))
        return far

    def names_with(self, steps: list[Step]) -> list[str]:
        """The parameters that have a gradient at an optimizer."""
        found = []
        for name in self.parameters:
            if any(one.gradients.get(name) is not None for one in steps):
                found.append(name)
        return found

    # ----------------------------------------------------------------------- of the one process

    def tensors(self, kind: str, test: Test) -> Vector:
        """Its "raw" or "gradients"; 0 where there is none."""
        found = getattr(self.result.steps[test], kind)
        vector = {}
        for name in self.names:
            value = found.get(name)
            vector[name] = torch.zeros(self.shapes[name]) if value is None else value
        return vector

    def raw(self, test: Test) -> Vector:
        return self.tensors("raw", test)

    def raws(self, kind: str, is_neutral: bool = False) -> list[Vector]:
        return [self.raw(Test(kind, step, 0, is_neutral)) for step in self.steps]

    def update(self, kind: str, step: int, names: list[str] | None = None) -> Vector:
        """How a step changed the weights, or tensors of these names; {} if that was not seen."""
        names = self.parameters if names is None else names
        test = Test(kind, step)
        after = self.result.after.get(test, {})
        before = self.result.steps[test].forced
        if not all(name in after and name in before for name in names):
            return {}
        return {name: after[name].double() - before[name].double() for name in names}

    def more_than_rounding(self, step: int) -> Vector:
        """False where the shares' gradients cancel each other.

        What is left there is rounding, other than that of the processes; Adam makes it large.
        """
        shares = [self.raw(Test("share", step, column)) for column in self.shares]
        mean = self.raw(Test("mean", step))
        found = {}
        for name in self.names:
            size = sum(share[name].abs() for share in shares) / len(shares)
            found[name] = mean[name].abs() > CANCELLED * size
        return found

    def changed_by(self, kind: str) -> float:
        """How much the gradients of step 1 change if it is computed "again", or "reseeded"."""
        test = Test(kind, 0)
        if not self.names or test not in self.result.steps:
            return 0.0
        return vectors.distance(self.raw(test), self.raw(Test("whole", 0)))

    # ------------------------------------------------------------------------- of the processes

    def of_column(self, kind: str, step: int, column: int, names: list[str]) -> Vector:
        vector = {}
        for name in names:
            value = self.plan.value(kind, name, step, column, self.shapes[name])
            vector[name] = torch.zeros(self.shapes[name]) if value is None else value
        return vector

    def change(self, step: int, column: int, names: list[str] | None = None) -> Vector:
        """How their step changed the weights, or tensors of these names."""
        names = self.parameters if names is None else names
        before = self.of_column("weights", step, column, names)
        after = self.of_column("weights", step + 1, column, names)
        return vectors.difference(after, before)

    @functools.cached_property
    def different_copies(self) -> tuple[int, list[str]]:
        """The first step that begins with weights that differ between the ranks, and which."""
        for step in range(len(self.steps) + 1):
            names = []
            for name in self.parameters:
                for same in zip(*self.plan.columns, strict=True):
                    values = [self.plan.ranks[rank].steps[step].weights.get(name) for rank in same]
                    if differ([value for value in values if value is not None]):
                        names.append(name)
            if names:
                return step, names
        return len(self.steps) + 1, []

    def not_finite(self, step: int) -> list[str]:
        """Where the gradients of a step are infinite or NaN."""
        found = []
        for rank, notes in enumerate(self.plan.ranks):
            names = names_not_finite(notes.steps[step])
            if names:
                found.append(f"on rank {rank} ({names[0]})")
        if names_not_finite(self.result.steps[Test("whole", step)]):
            found.append(ALONE)
        return found

    def sizes(self) -> tuple[int, int]:
        """Examples in a step: as the program itself takes them in one process, and of all ranks."""
        key = self.plan.keys[0]
        alone = self.result.notes.examples.get(key, 0) * self.plan.rates[key]
        return alone, self.examples(0)

    def examples(self, step: int) -> int:
        """Of all ranks together."""
        counts = self.plan.examples(step)
        return sum(counts[column] for column in self.shares)

    def draws_random_numbers(self) -> bool:
        """Whether a step computes something else if it is reseeded."""
        return self.changed_by("reseeded") > FACTOR * self.rounding()

    # --------------------------------------------------------------------------- the yardsticks

    @functools.cached_property
    def coarse(self) -> float:
        """Of the number format in which the modules compute."""
        return max(self.result.notes.precision, 1e-7) / 8

    @functools.cached_property
    def unsteady(self) -> float:
        """So far apart a step's gradients may not be from its own, computed again."""
        return max(UNSTEADY, 50 * self.coarse)

    def moved(self, is_neutral: bool = False) -> list[float]:
        """How far the gradients move in each step if each weight is changed in its last digit."""
        return vectors.distances(self.raws("rounded", is_neutral), self.raws("whole", is_neutral))

    def rounding(self, is_neutral: bool = False) -> float:
        """How far they move by rounding alone; what moves more is no yardstick."""
        return max(min(max(self.moved(is_neutral)), self.unsteady), self.coarse)

    @functools.cached_property
    def exact_mean(self) -> float:
        """How far apart two means of the same shares may be: the last bits."""
        return max(1e-6, FACTOR * self.changed_by("again"))

    @functools.cached_property
    def exact(self) -> float:
        """How far gradients may be apart from what is expected.

        The mean of the shares' is compared to the last bits; one process's own, up to rounding.
        """
        return self.exact_mean if self.has_shares else FACTOR * self.rounding()


def differ(values: list[torch.Tensor]) -> bool:
    first = values[0] if values else None
    return any(value.shape != first.shape or not value.equal(first) for value in values)


def names_not_finite(step: Step) -> list[str]:
    found = []
    for name, gradient in step.gradients.items():
        if gradient is not None and not gradient.isfinite().all():
            found.append(name)
    return found
