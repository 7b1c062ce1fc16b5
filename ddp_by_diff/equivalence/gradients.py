"""Each rank's own gradients, what the optimizers got, and the optimizers' options."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad

from ddp_by_diff.equivalence.batches import whole
from ddp_by_diff.instruments.observer import Observer, parameters_of

PLAIN = (int, float, bool, str, type(None), tuple)


class Gradients(Observer):
    """Notes gradients: own ones, before clipping, as optimizers got them; and the options."""

    def __init__(self, steps: Any, weights: Any) -> None:
        self.steps, self.weights = steps, weights
        self.watched: dict[int, torch.Tensor] = {}  # parameters, by the id of what is watched
        self.own: dict[int, torch.Tensor] = {}  # sums of all passes, by the id of the parameter
        self.slots: dict[tuple[int, str], torch.Tensor] = {}  # parameters, by module and name
        self.parts: set[int] = set()  # the ids of parameters of which a layer has a part
        self.scale = 1.0  # a GradScaler's

    def installed(self) -> None:
        handle = nn_module.register_module_forward_hook(self.watch_unsharded)
        self.hooks.undo.callback(handle.remove)

    def patches(self) -> list[tuple[Any, str, Callable]]:
        patches: list[tuple[Any, str, Callable]] = [
            (torch.amp.GradScaler, "scale", self.scaled),
            (torch.optim.Optimizer, "add_param_group", self.parameters_are_known),
        ]
        for place in nn.utils, clip_grad:
            patches += [(place, f"clip_grad_{what}_", self.clip) for what in ("norm", "value")]
        return patches

    def parameters_are_known(self, original: Callable, optimizer: Any, group: dict) -> Any:
        result = original(optimizer, group)
        if not self.hooks.is_elsewhere():
            for parameter in parameters_of(optimizer):
                self.watch(parameter)
        return result

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.hooks.is_in("backward"):
            return
        for tensor in module.parameters():
            self.watch(tensor)
        for layer in module.modules():
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    self.slots.setdefault((id(layer), name), parameter)

    def watch_unsharded(self, module: nn.Module, args: tuple, output: Any) -> None:
        """FSDP2's layers have whole parameters while they compute."""
        if self.hooks.is_elsewhere():
            return
        for layer in module.modules():  # it may use weights of one that it doesn't call
            for name, tensor in layer._parameters.items():
                sharded = self.slots.get((id(layer), name))
                if tensor is not None and tensor is not sharded and hasattr(sharded, "to_local"):
                    self.watch(tensor, sharded)
                placements = getattr(tensor, "placements", ()) if layer is module else ()
                if any(placement.is_shard() for placement in placements):
                    self.parts.add(id(sharded))  # tensor parallel: the layer computes with a part

    def backward(self, original: Callable) -> Any:
        """Forget the sums of gradients that the program has removed, or set to 0."""
        is_pass = sum(call.what == "backward" for call in self.hooks.inside) == 1
        for parameter in self.watched.values() if is_pass else []:
            gradient = parameter.grad
            is_sharded = hasattr(gradient, "to_local")  # to look at its numbers is a collective
            if gradient is None or not is_sharded and not bool(gradient.to_dense().any()):
                self.own.pop(id(parameter), None)
        return original()

    def watch(self, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> None:
        """Add up a tensor's gradients.  parameter: the sharded one that FSDP2 made it of."""
        parameter = tensor if parameter is None else parameter
        if id(tensor) in self.watched or not tensor.requires_grad or not tensor.is_leaf:
            return
        if hasattr(tensor, "to_local") or is_lazy(tensor):
            return  # its gradient may be a sum that is not yet made
        self.watched[id(tensor)] = parameter
        tensor.register_hook(lambda gradient: self.add(parameter, gradient))
        hooks: Any = tensor._backward_hooks  # the program's may send messages: this one comes first
        others = list(hooks.items())
        hooks.clear()
        hooks.update([others[-1], *others[:-1]])

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Add a pass's gradient, which this rank has computed, before any message."""
        if gradient is not None:
            key, value = id(parameter), whole(gradient)
            self.own[key] = self.own[key] + value if key in self.own else value

    def scaled(self, original: Callable, scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        self.scale = float(scaler.get_scale()) or 1.0
        return scaled

    def clip(self, original: Callable, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if self.hooks.is_elsewhere():
            return original(parameters, *args, **kwargs)
        is_one = isinstance(parameters, torch.Tensor)
        parameters = [parameters] if is_one else list(parameters)  # an iterator is read once
        self.steps.noted.has_clipped = True
        # Of all of a DTensor, as ranks must agree.
        before = [(one, whole(one.grad)) for one in parameters if one.grad is not None]
        result = original(parameters, *args, **kwargs)
        for parameter, gradient in before:
            if not whole(parameter.grad).equal(gradient):
                self.steps.now.clipped[id(parameter)] = gradient
        return result

    def gradients_are_there(self, optimizer: Any, is_again: bool) -> None:
        step = self.steps.step
        if is_again:
            return
        owned = self.weights.owned_by(optimizer)
        for one in owned:
            step.options[one.name] = plain_options(one.group)
        if self.steps.is_last:
            return
        if self.steps.now.any_steps:
            step.late |= {one.name for one in owned}
        for one in owned:
            if one.is_in_optimizer:
                self.note_got(one.name, one.parameter)
            self.note_own(one.name, one.parameter)
            if self.steps.source:
                self.steps.source.set_gradient(one.name, self.steps.number, one.parameter)
        for tensor, name in self.weights.trained().items():  # another rank's optimizer may have it
            if name not in step.options:
                self.note_own(name, tensor)
        self.steps.now.any_steps = True

    def note_got(self, name: str, parameter: torch.Tensor) -> None:
        step = self.steps.step
        step.is_repeated |= name in step.got  # another optimizer makes several steps in this one
        if parameter.grad is None:
            return
        step.got[name] = whole(parameter.grad)
        if id(parameter) in self.steps.now.clipped:
            step.unclipped[name] = self.steps.now.clipped[id(parameter)]

    def notes(self, is_own_thread: bool) -> None:
        trained = self.weights.trained().items()
        self.steps.noted.parts = {name for tensor, name in trained if id(tensor) in self.parts}

    def note_own(self, name: str, parameter: torch.Tensor) -> None:
        if id(parameter) in self.own:
            self.steps.step.own[name] = self.own[id(parameter)] / self.scale


def plain_options(group: dict) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = float(value)
        if key != "params" and isinstance(value, PLAIN):
            options[key] = value
    return options
