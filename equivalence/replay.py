"""The run in one process: step k of it gets the weights and the examples of the ranks' step k."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from instruments.meeting import Place
from instruments.program import Refused
from instruments.tensors import local
from torch import distributed as torch_dist
from torch.utils._python_dispatch import TorchDispatchMode

from equivalence.batches import count_examples, from_plain
from equivalence.given import Batch, Given
from equivalence.limits import COARSE
from equivalence.loaders import plain_copy
from equivalence.notes import Notes
from equivalence.randomness import set_random_state
from equivalence.record import Recorder

FORCED = ("whole", "own data")  # here the optimizer gets what the processes' got


class Alone(NamedTuple):
    """What a run in one process has found."""

    notes: Notes  # weights: its own, before those of the processes were set
    unmatched: list[str]  # weights that the ranks don't have, or not in this shape
    has_coarse_optimizer: bool  # it computes in bfloat16 or float16
    is_joined: bool  # it had batches that were made of the ranks'; else it had these itself
    is_mixed: bool  # it had both in one step


class Formats(TorchDispatchMode):
    """Whether what is called within it makes numbers in bfloat16 or float16."""

    are_coarse = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None):  # noqa: ANN204
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.are_coarse |= torch.finfo(result.dtype).eps > COARSE
        return result


class Replayer(Recorder):
    """A recorder that replaces batches, weights and gradients."""

    def __init__(self, place: Place, given: Given, log: str, folder: str, terminal: int) -> None:
        super().__init__(place, len(given.facts.steps), log, folder, given.left_out)
        self.given, self.terminal = given, terminal
        self.run = f"one process, {given.kind}"
        self.matched: dict[str, bool] = {}  # whether the ranks had such a weight, in some step
        self.formats = Formats()  # that the optimizer computes in
        self.own_in = 0  # the last step in which a batch was left as it is
        self.joined_in = 0  # and in which one was replaced
        self.is_mixed = False
        self.is_global = False  # alone the program takes as many examples as all ranks together

    def patches(self) -> list[tuple[Any, str, Callable]]:
        return [*super().patches(), (torch_dist, "init_process_group", self.group_begins)]

    def group_begins(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        """A program that has been told its number of processes would wait for the others."""
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        size = given.get("world_size", 1)
        if size > 1:
            raise Refused(
                f"in one process the program waits for {size}: give the flags with which it "
                'does not, such as --alone="--devices 1"'
            )
        original(*args, **kwargs)

    @property
    def number(self) -> int:
        return min(len(self.noted.steps) - 1, self.length)

    def event(self, key: str, value: Any, iterator: Any = None) -> Any:
        batch = self.given.batch(key, self.seen[key])
        if batch is None or self.keeps_own(batch, value, iterator):
            return super().event(key, value, iterator)
        self.seen[key] += 1
        if batch.examples:
            made = iterator._collate_fn(plain_copy(batch.examples))
        else:
            made = from_plain(batch.value, own=value)
        self.known_state = batch.state
        set_random_state(batch.state)
        return made

    def keeps_own(self, batch: Batch, value: Any, iterator: Any) -> bool:
        """Whether the program's own batch is as good: it invents nothing."""
        if self.given.kind == "share":
            return False
        if iterator is None and batch.is_equal and self.is_global:
            return True
        own = self.loaders.examples if iterator is not None else None
        step = len(self.noted.steps)
        if self.joined_in != step and batch.has_examples_of(value, own):
            self.own_in, self.is_global = step, True
            return True
        self.joined_in = step
        self.is_mixed |= self.own_in == step
        if batch.value is not None:
            self.is_global = count_examples(batch.value) == count_examples(value)
        return False

    def begin(self, name: str, tensor: torch.Tensor) -> None:
        """Give a tensor the value that it had in the processes."""
        if name in self.step.weights:
            return
        super().begin(name, tensor)
        value = self.given.value("weights", name, self.number, tensor.shape)
        self.matched[name] = self.matched.get(name, False) or value is not None
        if value is None:
            return
        if self.given.kind == "moved":
            value = moved(value, self.given.facts.digit)
        with torch.no_grad():
            local(tensor).copy_(value)

    def optimizer_begins(self, optimizer: Any) -> None:
        super().optimizer_begins(optimizer)
        if self.stepping == 1:
            self.formats.__enter__()

    def optimizer_ends(self, optimizer: Any) -> None:
        super().optimizer_ends(optimizer)
        if not self.stepping:
            self.formats.__exit__(None, None, None)

    def note_gradient(self, name: str, parameter: torch.Tensor, is_its: bool) -> None:
        super().note_gradient(name, parameter, is_its)
        given = self.given
        if given.kind not in FORCED or not given.facts.is_forced(self.number):
            return
        value = given.value("got", name, self.number, parameter.shape)
        if value is not None:
            set_gradient(parameter, value)

    def notes(self, is_own_thread: bool = True) -> Alone:
        notes = super().notes(is_own_thread)
        notes.events = {}
        unmatched = sorted(name for name, is_matched in self.matched.items() if not is_matched)
        is_joined = self.joined_in > 0
        return Alone(notes, unmatched, self.formats.are_coarse, is_joined, self.is_mixed)


def moved(value: torch.Tensor, least: torch.dtype) -> torch.Tensor:
    """Each number changed in its last digit, or in that of `least`; whole numbers are kept."""
    if value.is_complex():
        return torch.view_as_complex(moved(torch.view_as_real(value), least))
    if not value.is_floating_point():
        return value
    by = max(torch.finfo(least).eps, torch.finfo(value.dtype).eps)
    draw = torch.Generator().manual_seed(1)
    noise = torch.rand(value.shape, generator=draw, dtype=torch.float64) * 2 - 1
    return (value.double() * (1 + noise * by)).to(value.dtype)


def set_gradient(parameter: torch.Tensor, value: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:
        parameter.grad = value.to(gradient.dtype).to_sparse(gradient.sparse_dim())
    elif gradient is None:
        parameter.grad = None if hasattr(parameter, "to_local") else value.to(parameter, copy=True)
    else:
        with torch.no_grad():
            if gradient.is_complex() and not value.is_complex():
                value = torch.view_as_complex(value.contiguous())
            local(gradient).copy_(value)
