"""torch's clip_grad_norm_ and clip_grad_value_: the gradients before them."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from ddp_by_diff.equivalence.notes import Shelf, Step
from ddp_by_diff.equivalence.tensors import digest, whole
from ddp_by_diff.instruments.observer import Observer


class Clipping(Observer):
    """Notes gradients before they are clipped."""

    def __init__(self, steps: Any, shelf: Shelf) -> None:
        self.steps, self.shelf = steps, shelf
        self.clipped: dict[int, Any] = {}  # gradients before that, by the id of the parameter
        steps.at_new_step.append(self.clipped.clear)

    def patches(self) -> list[tuple[Any, str, Callable]]:
        names = "clip_grad_norm_", "clip_grad_value_"
        return [(place, name, self.clip) for place in (nn.utils, clip_grad) for name in names]

    def clip(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.hooks.is_elsewhere():
            return original(*args, **kwargs)
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        parameters = arguments["parameters"]
        is_one = isinstance(parameters, torch.Tensor)
        parameters = [parameters] if is_one else list(parameters)  # an iterator is read once
        self.steps.noted.has_clipped = True
        some = [parameter for parameter in parameters if parameter.grad is not None]
        # Of all of a DTensor, as ranks must agree.
        before = [(self.shelf.keep(one.grad), digest(whole(one.grad))) for one in some]
        result = original(**{**arguments, "parameters": parameters})
        for parameter, (gradient, old) in zip(some, before, strict=True):
            if digest(whole(parameter.grad)) != old:
                self.clipped[id(parameter)] = gradient
        return result

    def note(self, step: Step, name: str, parameter: torch.Tensor) -> None:
        """Note a parameter's gradient before clipping, as the optimizer is about to use it."""
        if id(parameter) in self.clipped:
            step.unclipped[name] = self.clipped[id(parameter)]
