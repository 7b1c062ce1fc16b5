"""Each rank's own gradients: what backward computes here, before any message."""

import torch
from instruments.tensors import whole
from torch.nn.parameter import is_lazy

from equivalence.notes import Step
from equivalence.shelf import Shelf


class OwnGradients:
    """Sums over the backward passes of a step, as in .grad."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.parameters: dict[int, torch.Tensor] = {}  # by the id of the tensor that is watched
        self.sums: dict[int, torch.Tensor] = {}  # by the id of the parameter

    def watch(self, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> None:
        """parameter: that of which `tensor` is the whole, while FSDP2 computes with it."""
        parameter = tensor if parameter is None else parameter
        if id(tensor) in self.parameters or not tensor.requires_grad or not tensor.is_leaf:
            return
        if hasattr(tensor, "to_local") or is_lazy(tensor):
            return  # its gradient may be a sum that is not yet made
        self.parameters[id(tensor)] = parameter
        tensor.register_hook(lambda gradient: self.add(parameter, gradient))
        hooks = tensor._backward_hooks  # the program's own may send messages: this one comes first
        others = list(hooks.items())
        hooks.clear()
        hooks.update([others[-1], *others[:-1]])

    def pass_begins(self) -> None:
        """Has the program thrown away what the passes before have left?"""
        for parameter in self.parameters.values():
            gradient = parameter.grad
            is_sharded = hasattr(gradient, "to_local")  # to look at its numbers is a collective
            if gradient is None or not is_sharded and not bool(gradient.to_dense().any()):
                self.sums.pop(id(parameter), None)

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        key, value = id(parameter), whole(gradient)
        self.sums[key] = self.sums[key] + value if key in self.sums else value

    def note(self, name: str, parameter: torch.Tensor, scale: float, step: Step) -> None:
        if id(parameter) in self.sums:
            step.own[name] = self.shelf.keep(self.sums[id(parameter)] / scale)
