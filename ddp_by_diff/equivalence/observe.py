"""Observers that note what a process does, in their order.  They change nothing.

In a run in one process a source, if there is one, gives a step its batch, weights and gradients.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddp_by_diff.distributed import unwrap_model
from ddp_by_diff.equivalence.clipping import Clipping
from ddp_by_diff.equivalence.formats import CoarseOptimizers
from ddp_by_diff.equivalence.gradients import Gradients
from ddp_by_diff.equivalence.inputs import Data
from ddp_by_diff.equivalence.layers import BATCH_NORM, Layers
from ddp_by_diff.equivalence.notes import Alone, Notes, Shelf, Step, plain_name
from ddp_by_diff.equivalence.tensors import digest
from ddp_by_diff.instruments.command import show
from ddp_by_diff.instruments.meeting import Place
from ddp_by_diff.instruments.observer import Observer
from ddp_by_diff.instruments.program import Finished


def observers(
    place: Place,
    length: int,
    log: str,
    folder: str | None,
    left_out: tuple = (),
    source: Any = None,
    terminal: int = 2,
) -> list[Observer]:
    """All observers of `length` steps, and of the weights at the start of the next one.

    log: a file for what the program prints.  folder: for large tensors.  left_out: kinds of layers
    that are switched off.  terminal: the file descriptor that shows each step.
    """
    torch.set_num_threads(1)  # in both runs: sums have one order
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    shelf = Shelf(folder)
    steps = Steps(place, length, source)
    weights = Weights(steps, shelf)
    clipping = Clipping(steps, shelf)
    parts = [Layers(steps.noted, left_out), weights, Data(steps), clipping]
    parts.append(Gradients(steps, weights, clipping, shelf))
    parts += [source, CoarseOptimizers(steps.noted)] if source else []
    return [steps, *parts, Progress(steps, f"{log}{place.rank}", terminal)]


def print_into(undo: contextlib.ExitStack, log: str) -> None:
    """What the program prints goes into this file, until it ends."""
    file = open(log, "w", encoding="utf-8")  # noqa: SIM115  `undo` closes it
    undo.enter_context(file)
    undo.enter_context(contextlib.redirect_stdout(file))
    undo.enter_context(contextlib.redirect_stderr(file))


class Steps(Observer):
    """Steps: where each begins, and the notes of all observers.

    A step begins with the first batch after a step of the first optimizer; with a forward pass, if
    the batch came in advance; without a DataLoader, right after the optimizer's step.
    """

    def __init__(self, place: Place, length: int, source: Any) -> None:
        self.length, self.source = length, source
        self.noted = Notes(place.rank, place.world_size, steps=[Step()])
        self.seen: Counter = Counter()  # events, by key
        self.at_new_step: list[Callable[[], None]] = []  # called when a step begins
        self.has_loader = False
        self.has_stepped = False  # the first optimizer has, since this step began
        self.fetched = 0  # batches, since this step began

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
        self.has_stepped, self.fetched = False, 0
        for call in self.at_new_step:
            call()

    def load(self, iterator: Any, original: Callable) -> Any:
        if torch.is_grad_enabled():
            self.has_loader = True
            if self.has_stepped:
                self.new_step()
            self.fetched += 1
        return original()

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        is_training = torch.is_grad_enabled() and not self.hooks.is_in("backward")
        if is_training and self.has_stepped and self.fetched > 1:  # one is of the next step
            self.new_step()
            self.fetched = 1  # that one

    def optimizer_begins(self, optimizer: Any) -> None:
        if optimizer is self.hooks.optimizer and self.has_stepped:
            self.new_step()

    def gradients_are_there(self, optimizer: Any, is_again: bool) -> None:
        self.step.is_repeated |= is_again
        is_first = optimizer is self.hooks.optimizer and not is_again
        if is_first and len(self.noted.counts) <= self.length:
            self.noted.counts.append(dict(self.seen))

    def optimizer_ends(self, optimizer: Any) -> None:
        if optimizer is self.hooks.optimizer and not self.hooks.is_in("optimizer"):
            self.has_stepped = True
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

    def __init__(self, steps: Steps, shelf: Shelf) -> None:
        self.steps, self.shelf = steps, shelf
        self.begun: set[int] = set()  # the models that were called in this step
        steps.at_new_step.append(self.begun.clear)

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note the weights of each model that is called, a teacher's, too."""
        if id(module) in self.begun or self.hooks.is_in("backward"):
            return
        self.begun.add(id(module))
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self.steps.noted.has_buffers_of_first |= module.broadcast_buffers
        for name, tensor in self.named_tensors(module):
            self.note(name, tensor)

    def gradients_are_there(self, optimizer: Any, is_again: bool) -> None:
        for owned in [] if is_again else self.owned_by(optimizer):
            self.note(owned.name, owned.parameter)

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor once in a step; in one process, set it to the ranks' value."""
        if name in self.steps.step.weights:
            return
        self.steps.step.weights[name] = self.shelf.keep(tensor)
        if self.steps.source:
            self.steps.source.set_weight(name, self.steps.number, tensor)

    def named_tensors(self, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Parameters and buffers, each once, with the name that the first model gives it.

        A second model's names begin with its class.
        """
        names: dict[int, str] = {}
        own: list = []
        for number, owner in enumerate(self.hooks.models.values()):
            prefix = f"{type(unwrap_model(owner)).__name__} {number + 1}: " if number else ""
            own = [*owner.named_parameters(), *owner.named_buffers()]
            for name, tensor in own:
                names.setdefault(id(tensor), prefix + plain_name(name))
            if owner is model:
                break
        return [(names[id(tensor)], tensor) for _, tensor in own if not is_lazy(tensor)]

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """Names and parameters of all models that need a gradient."""
        pairs: list[tuple[str, torch.Tensor]] = []
        for model in self.hooks.models.values():
            pairs += [pair for pair in self.named_tensors(model) if pair[1].requires_grad]
        return pairs

    def owned_by(self, optimizer: Any) -> list[Owned]:
        """An optimizer's parameters; or all models', if none of its parameters is a model's."""
        models, names = self.trained(), {}
        for name, tensor in models:
            names.setdefault(id(tensor), name)
        owned = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not is_lazy(parameter):
                    spare = f"{type(optimizer).__name__}'s parameter {len(owned)}"
                    name = names.get(id(parameter), spare)
                    owned.append(Owned(name, parameter, group, True))
        if not models or any(id(one.parameter) in names for one in owned):
            return owned
        group = optimizer.param_groups[0]
        return [Owned(name, parameter, group, False) for name, parameter in models]

    def has_changed(self) -> bool:
        """Whether a weight has changed since the first forward pass."""
        first = self.steps.noted.steps[0].weights
        pairs = [(first.get(name), tensor) for name, tensor in self.trained()]
        pairs = [(old, new) for old, new in pairs if isinstance(old, torch.Tensor)]
        return any(digest(old) != digest(new) for old, new in pairs if not hasattr(new, "to_local"))

    def notes(self, is_own_thread: bool) -> None:
        self.steps.noted.has_changed = not self.steps.noted.counts and self.has_changed()
        names: dict[str, None] = {}  # each once, in their order
        for model in self.hooks.models.values():
            parameters = {id(parameter) for parameter in model.parameters()}
            named = self.named_tensors(model)
            names |= {name: None for name, t in named if id(t) in parameters}
            norms = [layer for layer in model.modules() if isinstance(layer, BATCH_NORM)]
            buffers = {id(buffer) for layer in norms for buffer in layer.buffers()}
            self.steps.noted.norm_buffers |= {name for name, t in named if id(t) in buffers}
        for step in self.steps.noted.steps:
            names |= dict.fromkeys(step.options)
        self.steps.noted.parameters = list(names)


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
            run = source.name if source else f"{noted.world_size} processes"
            show(f"equivalence: {run}, step {len(noted.counts)} of {length + 1}", self.terminal)
        if self.steps.is_last:
            raise Finished
