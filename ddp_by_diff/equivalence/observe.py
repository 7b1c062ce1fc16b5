"""Observers that note what a process does, in their order.  They change nothing.

In a run in one process a source, if there is one, gives a step its batch, weights and gradients.
"""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddp_by_diff.distributed import unwrap_model
from ddp_by_diff.equivalence.batches import whole
from ddp_by_diff.equivalence.formats import CoarseOptimizers
from ddp_by_diff.equivalence.gradients import Gradients
from ddp_by_diff.equivalence.inputs import Data
from ddp_by_diff.equivalence.layers import BATCH_NORM, Layers
from ddp_by_diff.equivalence.notes import Alone, Notes, RandomState, Step
from ddp_by_diff.instruments.command import show
from ddp_by_diff.instruments.meeting import Place
from ddp_by_diff.instruments.observer import Observer
from ddp_by_diff.instruments.program import Finished


def observers(
    place: Place, length: int, log: str, left_out: tuple = (), source: Any = None, terminal: int = 2
) -> list[Observer]:
    """All observers of `length` steps, and of the weights at the start of the next one.

    log: a file for what the program prints.  left_out: kinds of layers that are switched off.
    terminal: the file descriptor that shows each step.
    """
    torch.set_num_threads(1)  # in both runs: sums have one order
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    steps = Steps(place, length, source)
    weights = Weights(steps)
    parts = [Layers(steps.noted, left_out), weights, Data(steps), Gradients(steps, weights)]
    parts += [source, CoarseOptimizers(steps.noted)] if source else []
    return [steps, *parts, Progress(steps, f"{log}{place.rank}", terminal)]


def print_into(undo: contextlib.ExitStack, log: str) -> None:
    """What the program prints goes into this file, until it ends."""
    file = open(log, "w", encoding="utf-8")  # noqa: SIM115  `undo` closes it
    undo.enter_context(file)
    undo.enter_context(contextlib.redirect_stdout(file))
    undo.enter_context(contextlib.redirect_stderr(file))


@dataclass
class Now:
    """What is known of the current step only."""

    has_stepped: bool = False  # the first optimizer has
    any_steps: bool = False  # any optimizer does, or has
    fetched: int = 0  # batches
    begun: set[int] = field(default_factory=set)  # the models that were called
    has_teacher: bool = False  # a model was called without gradients
    known_state: RandomState | None = None  # at the last event
    # Gradients before clipping, by the id of the parameter.
    clipped: dict[int, Any] = field(default_factory=dict)


class Steps(Observer):
    """Steps: where each begins, and the notes of all observers.

    A step begins with the first batch after a step of the first optimizer; with a forward pass, if
    the batch came in advance; without a DataLoader, right after the optimizer's step.
    """

    def __init__(self, place: Place, length: int, source: Any) -> None:
        self.length, self.source = length, source
        self.noted = Notes(place.rank, place.world_size, steps=[Step()])
        self.seen: Counter = Counter()  # events, by key
        self.now = Now()
        self.has_loader = False

    @property
    def step(self) -> Step:
        return self.noted.steps[-1]

    @property
    def number(self) -> int:
        """The step's number, from 0; all steps after the last noted one have that one's number."""
        return min(len(self.noted.steps) - 1, self.length)

    @property
    def is_last(self) -> bool:
        """Whether enough steps are noted: of this one only the weights."""
        return len(self.noted.steps) > self.length

    def new_step(self) -> None:
        self.noted.steps.append(Step())
        self.now = Now()

    def load(self, iterator: Any, original: Callable) -> Any:
        if torch.is_grad_enabled():
            self.has_loader = True
            if self.now.has_stepped:
                self.new_step()
            self.now.fetched += 1
        return original()

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        is_training = torch.is_grad_enabled() and not self.hooks.is_in("backward")
        if is_training and self.now.has_stepped and self.now.fetched > 1:  # one is the next step's
            self.new_step()
            self.now.fetched = 1  # that one

    def optimizer_begins(self, optimizer: Any) -> None:
        if optimizer is self.hooks.optimizer and self.now.has_stepped:
            self.new_step()

    def gradients_are_there(self, optimizer: Any, is_again: bool) -> None:
        self.step.is_repeated |= is_again
        is_first = optimizer is self.hooks.optimizer and not is_again
        if is_first and len(self.noted.counts) <= self.length:
            self.noted.counts.append(dict(self.seen))

    def optimizer_ends(self, optimizer: Any) -> None:
        if optimizer is self.hooks.optimizer and not self.hooks.is_in("optimizer"):
            self.now.has_stepped = True
            if not self.has_loader:
                self.new_step()

    def notes(self, is_own_thread: bool) -> Notes | Alone:
        return self.source.result(self.noted) if self.source else self.noted


class Owned(NamedTuple):
    """A parameter of an optimizer."""

    name: str
    parameter: torch.Tensor
    group: dict  # the optimizer's options
    is_in_optimizer: bool  # False: a model's, of which the optimizer has a copy


class Weights(Observer):
    """Notes weights and buffers before a step; gives them their names."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.spares: dict[torch.Tensor, str] = {}  # names of parameters that are no model's

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note the weights of each model that is called, a teacher's, too; and of none."""
        if id(module) in self.steps.now.begun or self.hooks.is_in("backward"):
            return
        self.steps.now.begun.add(id(module))
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self.steps.noted.has_buffers_of_first |= module.broadcast_buffers
        names = self.spares | self.names()
        for tensor in itertools.chain(module.parameters(), module.buffers(), self.spares):
            if tensor in names:
                self.note(names[tensor], tensor)

    def gradients_are_there(self, optimizer: Any, is_again: bool) -> None:
        for owned in [] if is_again else self.owned_by(optimizer):
            self.note(owned.name, owned.parameter)

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor once in a step; in one process, set it to the ranks' value."""
        if name in self.steps.step.weights:
            return
        self.steps.step.weights[name] = whole(tensor)
        if self.steps.source:
            self.steps.source.set_weight(name, self.steps.number, tensor)

    def names(self) -> dict[torch.Tensor, str]:
        """Names of all models' parameters and buffers; a second model's begin with its class."""
        names: dict[torch.Tensor, str] = {}
        for number, model in enumerate(self.hooks.models.values()):
            prefix = f"{type(unwrap_model(model)).__name__} {number + 1}: " if number else ""
            for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
                if not is_lazy(tensor):  # without the names of wrappers: DDP's, torch.compile's
                    names.setdefault(tensor, prefix + re.sub(r"\b(module|_orig_mod)\.", "", name))
        return names

    def trained(self) -> dict[torch.Tensor, str]:
        """Names of what needs a gradient."""
        return {tensor: name for tensor, name in self.names().items() if tensor.requires_grad}

    def owned_by(self, optimizer: Any) -> list[Owned]:
        """An optimizer's parameters; or all models', if none of its parameters is a model's."""
        names = self.trained()
        owned: list[Owned] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not is_lazy(parameter):
                    spare = f"{type(optimizer).__name__}'s parameter {len(owned)}"
                    owned.append(Owned(names.get(parameter, spare), parameter, group, True))
        if not names or any(one.parameter in names for one in owned):
            self.spares |= {one.parameter: one.name for one in owned if one.parameter not in names}
            return owned
        group = optimizer.param_groups[0]
        return [Owned(name, parameter, group, False) for parameter, name in names.items()]

    def notes(self, is_own_thread: bool) -> None:
        noted, names = self.steps.noted, self.names()
        for layer in itertools.chain(*(model.modules() for model in self.hooks.models.values())):
            if isinstance(layer, BATCH_NORM):
                noted.norm_buffers |= {names[one] for one in names.keys() & layer.buffers()}
        parameters = [name for one, name in names.items() if isinstance(one, nn.Parameter)]
        for step in noted.steps:
            parameters += step.options
        noted.parameters = list(dict.fromkeys(parameters))
        noted.trainable = list(self.trained().values())


class Progress(Observer):
    """Shows the run and its step on the terminal; ends the run when enough is noted."""

    def __init__(self, steps: Steps, log: str, terminal: int) -> None:
        self.steps, self.log, self.terminal = steps, log, terminal

    def installed(self) -> None:
        print_into(self.hooks.undo, self.log)

    def gradients_are_there(self, optimizer: Any, is_again: bool) -> None:
        noted, length = self.steps.noted, self.steps.length
        if optimizer is not self.hooks.optimizer or is_again:
            return
        if noted.rank == 0:
            source = self.steps.source
            run = f"one process, {source.kind}" if source else f"{noted.world_size} processes"
            show(f"equivalence: {run}, step {len(noted.counts)} of {length + 1}", self.terminal)
        if self.steps.is_last:
            raise Finished
