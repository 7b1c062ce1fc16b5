"""What the run in one process is given: for each test its batches and weights."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from instruments.tensors import local

from equivalence import vectors
from equivalence.batches import (
    RandomState,
    are_columns,
    count_examples,
    digest,
    join,
    split,
    why_not_joined,
)
from equivalence.notes import Notes
from equivalence.vectors import Vector

FACTOR = 10  # a difference of up to so many times the yardstick is rounding
LEFT = 0.02  # so much of a gradient may be left unexplained


class Test(NamedTuple):
    """A step of the run in one process.

    whole      all examples, the weights that the processes had: what they should compute
    rounded    the same, each weight changed by half of its last digit: the yardstick
    share      the examples of one column, its weights: what it contributes
    again      whole, once more: is a step deterministic?
    reseeded   whole, with other random numbers: does a step draw some?
    mean       whole; then the gradients are replaced by what they should be, made of the shares'
    """

    kind: str
    step: int
    column: int = 0
    is_neutral: bool = False  # without dropout; BatchNorm uses its running averages

    @property
    def has_update(self) -> bool:
        """Whether it is noted how the step changes the weights; otherwise only its gradients."""
        return self.kind in ("whole", "rounded", "mean") and not self.is_neutral


class Plan:
    """Made of what the ranks have noted.

    A column is a number of ranks that hold one model together: each rank alone, or, with tensor
    parallelism, those that have the same batches and parts of the weights.
    """

    def __init__(self, ranks: list[Notes], steps: int, rates: dict[str, int] | None = None) -> None:
        """rates: how many batches the run in one process takes in a step, if that is known."""
        self.ranks, self.steps = ranks, steps
        self.per_step = {key: self.rate(key) for key in ranks[0].events}
        used = [key for key, rate in self.per_step.items() if rate]
        used = [key for key in used if self.is_in_each_step(key)] or used
        loaders = [key for key in used if key.startswith("loader")]
        self.keys = loaders or used
        self.rates = {key: (rates or {}).get(key, self.per_step[key]) for key in self.keys}
        self.columns = self.find_columns()
        self.distinct_columns: dict[int, list[int]] = {}  # in each step
        self.has_neutral = any(rank.kinds for rank in ranks)
        self.tests: list[Test] = []  # of one run
        self.known: dict[Test, Vector] = {}  # gradients that earlier runs have found
        self.weights: dict[int, list[float]] = {}  # of the shares, in each step
        self.trained: set[str] = set()  # what the optimizers have
        self.unmatched: set[str] = set()  # weights that the ranks don't have, or not in this shape

    def rate(self, key: str) -> int:
        """Batches per step.  A DataLoader may be asked for some in advance."""
        counts = self.ranks[0].counts
        return (counts[self.steps][key] - counts[0][key]) // self.steps

    def is_in_each_step(self, key: str) -> bool:
        """An evaluation that computes gradients is not, even if it needs many batches."""
        counts = [one[key] for one in self.ranks[0].counts[: self.steps + 1]]
        return all(before < after for before, after in itertools.pairwise(counts))

    def all_tests(self) -> list[Test]:
        steps, shares = range(self.steps), self.distinct(0)
        tests = []
        for is_neutral in [False, True] if self.has_neutral else [False]:
            for kind in "whole", "rounded":
                tests += [Test(kind, step, 0, is_neutral) for step in steps]
            if len(shares) > 1:
                for column in shares:
                    tests += [Test("share", step, column, is_neutral) for step in steps]
        tests += [Test("again", 0), Test("reseeded", 0)]
        if len(shares) > 1:
            tests += [Test("mean", step) for step in steps]
        return tests

    # ------------------------------------------------------------------------- who has what

    def find_columns(self) -> list[list[int]]:
        if not self.keys:
            return [[rank] for rank in range(len(self.ranks))]
        names = set()
        for rank in self.ranks:
            names |= {*rank.steps[0].gradients, *rank.steps[0].weights}
        by_batches: dict[tuple, dict[tuple, list[int]]] = {}
        for number, rank in enumerate(self.ranks):
            events = []
            for key in self.keys:
                events += rank.events[key][: self.steps]
            batches = tuple(digest(event.value) for event in events)
            weights = tuple(digest(rank.steps[0].weights.get(name)) for name in sorted(names))
            by_batches.setdefault(batches, {}).setdefault(weights, []).append(number)
        columns = []
        for by_weights in by_batches.values():
            parts = list(by_weights.values())
            if len(parts) > 1 and len({len(part) for part in parts}) == 1:
                columns += [list(column) for column in zip(*parts, strict=True)]
            else:
                columns += [[rank] for rank in itertools.chain(*parts)]
        return sorted(columns)

    def share(self, key: str, step: int, column: int) -> list:
        """The events of a step."""
        rate, rank = self.per_step[key], self.ranks[self.columns[column][0]]
        return rank.events[key][step * rate : (step + 1) * rate]

    def batches(self, step: int, column: int) -> list:
        events = []
        for key in self.keys:
            events += self.share(key, step, column)
        return [event.value for event in events]

    def distinct(self, step: int) -> list[int]:
        """The columns, without those that only repeat another one's batches."""
        if step in self.distinct_columns:
            return self.distinct_columns[step]
        found: dict[tuple, int] = {}
        for column in range(len(self.columns)):
            names = tuple(digest(batch) for batch in self.batches(step, column))
            found.setdefault(names, column)
        self.distinct_columns[step] = sorted(found.values())
        return self.distinct_columns[step]

    def why_not_one_batch(self) -> str:
        """Why one batch can't be made of the ranks'; "" if it can."""
        if not self.per_step:
            return "no batch was seen: no DataLoader, no inputs of a module, no target of a loss"
        if not self.keys or not all(map(self.is_in_each_step, self.keys)):
            return (
                "not each step of the optimizer loads a batch from the same place (several steps "
                "with one batch? loaders that take turns? all batches loaded before?)"
            )
        for key in self.keys:
            size = self.ranks[0].batch_sizes.get(key)
            first = self.ranks[0].events[key][0].value
            if size and are_columns(first, size):
                return f"a batch's {size} examples are the columns of its tensors, not their rows"
        for step in range(self.steps):
            shares = [self.batches(step, column) for column in self.distinct(step)]
            for same in zip(*shares, strict=False):
                if sizes := why_not_joined(list(same)):
                    text = f"the tensors of a batch have {sizes} rows, so the ranks' batches can't "
                    return f"{text}become one: each tensor needs a row for each example"
        return ""

    def examples(self, step: int) -> list[int]:
        """How many each column has."""
        counts = []
        for column in range(len(self.columns)):
            events = self.share(self.keys[0], step, column)
            counts.append(sum(count_examples(event.value) for event in events))
        return counts

    def value(
        self, kind: str, name: str, step: int, column: int, shape: torch.Size
    ) -> torch.Tensor | None:
        """A weight or gradient of a column, put together if its ranks have parts."""
        parts = []
        for rank in self.columns[column]:
            part = getattr(self.ranks[rank].steps[step], kind).get(name)
            if part is not None:
                parts.append(part)
        if not parts:
            return None
        if parts[0].shape == shape:
            return parts[0]
        for dimension in range(len(shape)):
            with contextlib.suppress(RuntimeError, IndexError):
                found = torch.cat(parts, dimension)
                if found.shape == shape:
                    return found
        return None

    def has_weight(self, name: str, column: int, shape: torch.Size) -> bool:
        """In some step: an evaluation of another model is not in each."""
        found = [self.value("weights", name, step, column, shape) for step in range(self.steps)]
        return any(value is not None for value in found)

    # --------------------------------------------------------------- what the run is given

    def test(self, number: int) -> Test | None:
        return self.tests[number] if number < len(self.tests) else None

    def replacement(self, key: str, number: int) -> tuple[Any, RandomState] | None:
        """In place of the run's batch of this number; None: its own."""
        if key not in self.rates:
            return None
        place, part = divmod(number, self.rates[key])
        test = self.test(place)
        if test is None:
            return None
        columns = [test.column] if test.kind == "share" else self.distinct(test.step)
        shares = [self.share(key, test.step, column) for column in columns]
        count, rate = self.rates[key], self.per_step[key]
        state = shares[0][min(part, rate - 1)].state
        if count == rate:
            return join([share[part].value for share in shares]), state
        if count == rate * len(shares):  # such as nanoGPT: alone it accumulates N times as often
            return shares[part % len(shares)][part // len(shares)].value, state
        batch = join([event.value for event in itertools.chain(*shares)])
        return split(batch, count)[part], state

    def state(self, test: Test, number: int) -> RandomState:
        """At the number-th forward pass of a step."""
        column = test.column if test.kind == "share" else 0
        states = self.ranks[self.columns[column][0]].steps[test.step].states
        return states[min(number, len(states) - 1)]

    def force(self, test: Test, named: dict[str, torch.Tensor]) -> None:
        """Give the model the weights that the ranks had."""
        column = test.column if test.kind == "share" else 0
        parameters = set(self.ranks[self.columns[column][0]].parameters)
        draw = torch.Generator().manual_seed(1)
        for name, tensor in named.items():
            is_buffer = name not in parameters  # BatchNorm's averages differ between the ranks
            source = 0 if is_buffer and test.is_neutral else column
            value = self.value("weights", name, test.step, source, tensor.shape)
            if value is None:
                if not is_buffer and not self.has_weight(name, column, tensor.shape):
                    self.unmatched.add(name)
                continue
            if test.kind == "rounded" and value.is_floating_point():
                noise = torch.rand(value.shape, generator=draw, dtype=torch.float64) * 2 - 1
                half = torch.finfo(value.dtype).eps / 2
                value = (value.double() * (1 + noise * half)).to(value.dtype)
            with torch.no_grad():
                local(tensor).copy_(value)

    # -------------------------------------------------------- what the shares should make up

    def weights_of_shares(self, step: int, raw: Callable[[Test], Vector]) -> list[float]:
        """How much each counts in the gradient of the whole batch: that is measured.

        If it can't be, as BatchNorm or dropout makes other gradients: like its examples.  A share
        that would count negatively has a loss that is no mean, or sum, of its examples'.
        """
        if step in self.weights:
            return self.weights[step]
        shares, examples = self.distinct(0), self.examples(step)
        total = sum(examples[column] for column in shares)
        counted = [examples[column] / total for column in shares]
        neutral = self.has_neutral
        parts = [self.only(raw(Test("share", step, column, neutral))) for column in shares]
        wanted = self.only(raw(Test("whole", step, 0, neutral)))
        rounded = self.only(raw(Test("rounded", step, 0, neutral)))
        found = vectors.fit(wanted, parts)
        noise = vectors.fit(wanted, [rounded]).left
        near = FACTOR * max(found.left, noise, 1e-7)
        weights = found.weights
        is_explained = found.left <= max(LEFT, FACTOR * noise) and min(weights) >= 0
        if not is_explained or vectors.spread(weights, counted) < near:
            weights = counted
        elif vectors.spread(weights, [1.0] * len(shares)) < near:
            weights = [1.0] * len(shares)  # the loss is a sum
        self.weights[step] = weights
        return weights

    def only(self, vector: Vector) -> Vector:
        """What an optimizer has, if it has any of it."""
        found = {name: vector[name] for name in vector if name in self.trained}
        return found or vector

    def mean(self, step: int, raw: Callable[[Test], Vector]) -> Vector:
        """The gradients that the processes should have, made of the shares'."""
        shares = [self.only(raw(Test("share", step, column))) for column in self.distinct(0)]
        return vectors.combine(shares, self.weights_of_shares(step, raw))
