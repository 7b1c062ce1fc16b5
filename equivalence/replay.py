"""The run in one process: each step of it is a test of the plan."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from instruments.meeting import Place
from instruments.program import Finished
from instruments.tensors import local, parameters_of, whole
from torch import nn

from equivalence.batches import clone, from_plain, set_random_state
from equivalence.layers import BATCH_NORM, DROPOUT
from equivalence.notes import Notes, Step
from equivalence.plan import Plan, Test
from equivalence.record import Recorder
from equivalence.vectors import Vector


class Result(NamedTuple):
    """Of one run; it may have made only some of the tests."""

    steps: dict[Test, Step]
    after: dict[Test, Vector]  # the weights after the step, if the next one began with them
    rates: dict[str, int]  # batches that the program takes in a step
    notes: Notes
    unmatched: list[str]


class Kept(NamedTuple):
    """An optimizer before a step."""

    state: list[tuple[Any, dict]]
    values: dict[int, torch.Tensor]  # of parameters that no module has
    options: list[dict]


class Replayer(Recorder):
    """A recorder that replaces batches, weights and, in the test `mean`, gradients."""

    def __init__(self, place: Place, plan: Plan, terminal: int) -> None:
        super().__init__(place, len(plan.tests))
        self.run, self.terminal = "one process", terminal
        self.plan = plan
        self.kept: dict[tuple[int, int], Kept] = {}
        self.put_aside: list[nn.Module] = []  # BatchNorm and dropout that are told to evaluate

    @property
    def test(self) -> Test | None:
        return self.plan.test(len(self.noted) - 1)

    def event(self, key: str, value: Any) -> Any:
        number = self.seen[key]
        self.seen[key] += 1
        found = self.plan.replacement(key, number)
        if found is None:
            return value
        batch, state = found
        set_random_state(state, reseeded=self.is_reseeded())
        return from_plain(batch, own=value)

    def new_step(self) -> None:
        super().new_step()
        number = len(self.noted) - 2
        if number < len(self.plan.tests):
            self.keep_what_is_needed(number)

    def keep_what_is_needed(self, number: int) -> None:
        """Of a step that was made: all tensors of all steps are much memory."""
        test, step = self.plan.tests[number], self.noted[number]
        if number == 0 or not self.plan.tests[number - 1].has_update:
            step.weights = {}
        if not test.has_update:
            step.forced = {}
        if test.kind != "mean" and not (test.kind == "whole" and not test.is_neutral):
            step.gradients = {}
        for name, gradient in step.gradients.items():
            if gradient is not None and name in step.raw and gradient.equal(step.raw[name]):
                step.gradients[name] = step.raw[name]

    def is_reseeded(self) -> bool:
        return self.test is not None and self.test.kind == "reseeded"

    def forget(self, key: str, count: int) -> None:
        self.seen[key] -= count

    def model_begins(self, model: nn.Module) -> None:
        super().model_begins(model)
        test = self.test
        self.let_train(model, is_neutral=test is not None and test.is_neutral)
        if test is None:
            return
        named = dict(self.named_tensors(model))
        self.plan.force(test, named)
        for name, tensor in named.items():
            self.step.forced[name] = whole(tensor)

    def let_train(self, model: nn.Module, is_neutral: bool) -> None:
        """In a neutral test BatchNorm and dropout evaluate."""
        if not is_neutral:
            while self.put_aside:
                self.put_aside.pop().training = True
            return
        for part in model.modules():
            if part.training and isinstance(part, BATCH_NORM | DROPOUT):
                part.training = False
                self.put_aside.append(part)

    def note_state(self) -> None:
        if self.test is not None:
            state = self.plan.state(self.test, len(self.step.states))
            set_random_state(state, reseeded=self.is_reseeded())
        super().note_state()

    def leaves_out_dropout(self) -> bool:
        return self.test is not None and self.test.is_neutral

    def backward(self, original: Callable) -> Any:
        found = super().backward(original)
        if found is None:  # torch.autograd.grad returns gradients, and leaves .grad as it is
            self.note_raw()
        return found

    def note_raw(self) -> None:
        """The gradients; in the test `mean` they are replaced."""
        test = self.test
        if test is None or self.has_gradients:
            return
        named = {}
        for model in self.models.values():
            for name, tensor in self.named_tensors(model):
                if tensor.grad is not None:
                    named[name] = tensor
        if test.kind == "mean":
            for name, value in self.plan.mean(test.step, self.raw_of).items():
                if name in named:
                    local(named[name].grad).copy_(value)
        self.step.raw = {name: whole(tensor.grad) for name, tensor in named.items()}

    def raw_of(self, test: Test) -> Vector:
        if test in self.plan.known:
            return self.plan.known[test]
        return self.noted[self.plan.tests.index(test)].raw

    # ---------------------------------------------------------------------------- the optimizer

    def optimizer_begins(self, optimizer: Any) -> None:
        super().optimizer_begins(optimizer)
        if self.test is not None:
            self.keep_or_restore(optimizer, self.test)

    def keep_or_restore(self, optimizer: Any, test: Test) -> None:
        """All tests of a step begin with the same state of the optimizer."""
        key = test.step, id(optimizer)
        if test.kind == "whole" and not test.is_neutral:
            self.kept[key] = self.kept_of(optimizer)
            return
        if key not in self.kept:
            return
        kept = self.kept[key]
        for group, options in zip(optimizer.param_groups, kept.options, strict=True):
            group.update(options)
        if test.kind == "mean" and test.step > 0:
            return  # these go on from step to step
        optimizer.state.clear()
        for parameter, state in kept.state:
            optimizer.state[parameter] = clone(state)
        for parameter in parameters_of(optimizer):
            if id(parameter) in kept.values:
                parameter.detach().copy_(kept.values[id(parameter)])

    def kept_of(self, optimizer: Any) -> Kept:
        of_modules = set()
        for model in self.models.values():
            of_modules |= {id(tensor) for _, tensor in self.named_tensors(model)}
        values, options = {}, []
        for parameter in parameters_of(optimizer):
            if id(parameter) not in of_modules:
                values[id(parameter)] = parameter.detach().clone()
        for group in optimizer.param_groups:
            options.append({name: value for name, value in group.items() if name != "params"})
        state = [(parameter, clone(one)) for parameter, one in optimizer.state.items()]
        return Kept(state, values, options)

    def gradients_are_there(self, optimizer: Any) -> None:
        if not self.step.raw:
            self.note_raw()
        super().gradients_are_there(optimizer)
        self.plan.trained |= set(self.step.gradients)

    def step_is_complete(self) -> None:
        super().step_is_complete()
        if len(self.counts) == 2 and self.rates() != self.plan.rates:
            raise Finished  # it takes more, or fewer, batches than was planned: plan again

    def rates(self) -> dict[str, int]:
        """How many batches the program takes in a step."""
        if len(self.counts) < 2:
            return dict(self.plan.rates)
        return {key: self.counts[1][key] - self.counts[0][key] for key in self.plan.rates}

    def notes(self, is_own_thread: bool = True) -> Result:
        made = self.plan.tests[: max(0, len(self.counts) - 1)]
        steps, after = {}, {}
        for number, test in enumerate(made):
            steps[test] = self.noted[number]
            if test.has_update:
                after[test] = self.noted[number + 1].weights if number + 1 < len(self.noted) else {}
        notes = super().notes(is_own_thread)
        notes.steps, notes.events = [], {}
        return Result(steps, after, self.rates(), notes, sorted(self.plan.unmatched))
