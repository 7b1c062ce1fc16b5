"""What a process notes of gradients and optimizers."""

import contextlib
import inspect
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from instruments.hooks import Hooks, plain_name
from instruments.meeting import Place
from instruments.program import Finished, Refused
from instruments.tensors import parameters_of, whole
from torch import nn
from torch.nn.parameter import is_lazy

from equivalence import progress
from equivalence.batches import digest
from equivalence.loaders import Loaders
from equivalence.notes import Notes, Step
from equivalence.own import OwnGradients
from equivalence.randomness import RandomState, random_state
from equivalence.shelf import Shelf

MEMORY = "/proc/meminfo"
PLAIN = (int, float, bool, str, type(None), tuple)


class Optimizers(Hooks):
    """Notes `length` steps, and how the next one begins."""

    def __init__(self, place: Place, length: int, shelf: Shelf) -> None:
        super().__init__()
        self.place, self.length, self.shelf = place, length, shelf
        self.run, self.terminal = f"{place.world_size} processes", 2
        self.noted = Notes(place.rank, place.world_size, steps=[Step()])
        self.seen: Counter = Counter()  # batches, by where they come from
        self.loaders = Loaders(self.noted)
        self.own = OwnGradients(shelf)
        self.slots: dict[tuple[int, str], torch.Tensor] = {}  # parameters, by module and name
        self.scale = 1.0  # a GradScaler's
        self.stepping = 0  # optimizers inside optimizers
        self.has_gradients = False  # an optimizer's step has begun, and its gradients are noted
        self.has_stepped = False  # the first optimizer has, since this step began
        self.has_taught = False  # a model was called without gradients, since this step began
        # Of a parameter's id: its gradient before clip_grad_norm_, and a digest of that after it.
        self.clipped: dict[int, tuple[Any, str]] = {}
        self.fetched = 0  # batches, since this step began
        self.known_state: RandomState | None = None  # in this step, at its last batch

    @property
    def step(self) -> Step:
        return self.noted.steps[-1]

    def new_step(self) -> None:
        """At the first batch after the optimizer's step, or else at the first forward pass."""
        self.noted.steps.append(Step())
        self.has_stepped, self.fetched, self.known_state = False, 0, None
        self.has_taught, self.clipped = False, {}

    def begin(self, name: str, tensor: torch.Tensor) -> None:
        """Note a weight or buffer before the step; once, though several may ask."""
        if name not in self.step.weights:
            self.step.weights[name] = self.shelf.keep(tensor)

    def note_draws(self) -> None:
        """Since data came in last, in this step."""
        if self.known_state is not None:
            self.step.draws |= random_state().other_than(self.known_state)

    def backward(self, original: Callable) -> Any:
        if not any(call.what == "backward" for call in self.inside[:-1]):
            self.own.pass_begins()
        return original()

    def clip(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.is_elsewhere():
            return original(*args, **kwargs)
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        parameters = arguments["parameters"]
        is_one = isinstance(parameters, torch.Tensor)
        parameters = [parameters] if is_one else list(parameters)  # an iterator is read once
        some = [parameter for parameter in parameters if parameter.grad is not None]
        before = [self.before_clip(parameter) for parameter in some]
        norm = original(**{**arguments, "parameters": parameters})
        for parameter, (gradient, old) in zip(some, before, strict=True):
            left = digest(whole(parameter.grad))
            if left != old:
                self.clipped[id(parameter)] = gradient, left
        return norm

    def before_clip(self, parameter: torch.Tensor) -> tuple[Any, str]:
        """Its gradient, and a digest; before the first of several clips, if no more was done."""
        now = digest(whole(parameter.grad))  # of all of a DTensor, as ranks must agree
        gradient, left = self.clipped.get(id(parameter), (None, ""))
        return (gradient if now == left else self.shelf.keep(parameter.grad)), now

    def scaled(self, original: Callable, scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        self.scale = float(scaler.get_scale()) or 1.0
        return scaled

    def note_unsharded(self, module: nn.Module, args: tuple, output: Any) -> None:
        """FSDP2's layers have whole parameters while they compute."""
        if self.is_elsewhere():
            return
        for name, tensor in module._parameters.items():
            sharded = self.slots.get((id(module), name))
            if tensor is not sharded and hasattr(sharded, "to_local"):
                self.own.watch(tensor, sharded)

    def parameters_are_known(self, original: Callable, optimizer: Any, group: dict) -> Any:
        result = original(optimizer, group)
        if not self.is_elsewhere():
            for parameter in parameters_of(optimizer):
                self.own.watch(parameter)
        return result

    def optimizer_begins(self, optimizer: Any) -> None:
        self.stepping += 1
        if optimizer is self.optimizer and self.has_stepped:
            self.new_step()

    def gradients_are_there(self, optimizer: Any) -> None:
        if self.stepping > 1:
            return
        if self.has_gradients:  # its closure was called again
            self.step.is_repeated = True
            return
        self.has_gradients = True
        self.note_draws()
        named = self.named_of(optimizer)
        for name, parameter, _ in named:
            self.begin(name, parameter)
        if optimizer is self.optimizer and len(self.noted.counts) <= self.length:
            self.noted.counts.append(dict(self.seen))
            self.step_is_complete()
        if len(self.noted.steps) <= self.length:  # of the last step only the weights are needed
            for name, parameter, is_its in named:
                self.note_gradient(name, parameter, is_its)
            self.note_others()
        if len(self.noted.counts) == 1 and self.place.rank == 0:
            refuse_if_no_room(self.step, self.length, self.place.world_size, self.shelf)

    def note_others(self) -> None:
        """Own gradients of parameters that another rank's optimizer may have."""
        for model in self.models.values():
            for name, tensor in self.named_tensors(model):
                if tensor.requires_grad and name not in self.step.options:
                    self.own.note(name, tensor, self.scale, self.step)

    def note_gradient(self, name: str, parameter: torch.Tensor, is_its: bool) -> None:
        """is_its: the optimizer's; else it has copies of its own, and other gradients."""
        step = self.step
        step.is_repeated |= name in step.got  # another optimizer makes several steps in this one
        if parameter.grad is not None and is_its:
            step.got[name] = self.shelf.keep(parameter.grad)
            if id(parameter) in self.clipped:
                step.unclipped[name], left = self.clipped[id(parameter)]
                step.is_changed |= digest(whole(parameter.grad)) != left
        self.own.note(name, parameter, self.scale, step)

    def named_of(self, optimizer: Any) -> list[tuple[str, torch.Tensor, bool]]:
        """Its parameters, or all models' if it has none of them; notes the options of each."""
        names: dict[int, str] = {}
        models: list[tuple[str, torch.Tensor]] = []
        for model in self.models.values():
            models += [pair for pair in self.named_tensors(model) if pair[1].requires_grad]
        for name, tensor in models:
            names.setdefault(id(tensor), name)
        named = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if is_lazy(parameter):
                    continue
                spare = f"{type(optimizer).__name__}'s parameter {len(named)}"
                name = names.get(id(parameter), spare)
                self.step.options[name] = plain_options(group)
                named.append((name, parameter, True))
        if not models or any(id(parameter) in names for _, parameter, _ in named):
            return named
        options = plain_options(optimizer.param_groups[0])
        self.step.options |= {name: options for name, _ in models}
        return [(name, parameter, False) for name, parameter in models]

    def step_is_complete(self) -> None:
        if self.place.rank == 0:
            text = f"equivalence: {self.run}, step {len(self.noted.counts)} of {self.length + 1}"
            progress.show(text, self.terminal)
        if len(self.noted.steps) > self.length:
            raise Finished

    def optimizer_ends(self, optimizer: Any) -> None:
        self.stepping -= 1  # torch's ZeroRedundancyOptimizer calls another one
        if self.stepping:
            return
        self.has_gradients = False
        if optimizer is self.optimizer:
            self.has_stepped = True
            if not self.loaders.owners:
                self.new_step()

    def named_tensors(self, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Parameters and buffers, each once, with the name that the first model gives it.

        A second model's names begin with its class.
        """
        names: dict[int, str] = {}
        own: list = []
        for number, owner in enumerate(self.models.values()):
            prefix = f"{type(owner).__name__} {number + 1}: " if number else ""
            own = [*owner.named_parameters(), *owner.named_buffers()]
            for name, tensor in own:
                names.setdefault(id(tensor), prefix + plain_name(name))
            if owner is model:
                break
        return [(names[id(tensor)], tensor) for _, tensor in own if not is_lazy(tensor)]


def refuse_if_no_room(step: Step, length: int, processes: int, shelf: Shelf) -> None:
    """A full disk would harm others, too; a full memory ends the run without a word."""
    tensors = [*step.weights.values(), *step.own.values(), *step.got.values()]
    tensors += step.unclipped.values()
    noted = sum(tensor.nbytes for tensor in tensors)
    needed = (processes + 2) * length * noted  # the runs in one process are noted, too
    free, where = math.inf, "in memory"
    if shelf.path is not None:
        free, where = shutil.disk_usage(shelf.path).free, f"on the disk of {shelf.path} (TMPDIR)"
    else:
        with contextlib.suppress(OSError, TypeError):  # not on macOS
            free = 1024 * int(re.search(r"MemAvailable: *(\d+)", Path(MEMORY).read_text())[1])
    if needed > free:
        text = f"the notes of all ranks take up to {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB"
        raise Refused(f"{text} are free {where}: give --steps 2")


def plain_options(group: dict) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = float(value)
        if key != "params" and isinstance(value, PLAIN):
            options[key] = value
    return options
