"""clip_grad_norm_: gradients before and after it, and whether they were averaged before it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from instruments.observer import Observer
from torch import nn
from torch.nn.utils import clip_grad

from equivalence import limits, vectors
from equivalence.notes import Notes, Shelf, Step
from equivalence.tensors import digest, whole
from equivalence.vectors import Vector


class Clipping(Observer):
    """Notes gradients before they are clipped, and whether something changes them after that."""

    def __init__(self, steps: Any, shelf: Shelf) -> None:
        self.steps, self.shelf = steps, shelf
        # Of a parameter's id: its gradient before clip_grad_norm_, and a digest of that after it.
        self.clipped: dict[int, tuple[Any, str]] = {}
        steps.at_new_step.append(self.clipped.clear)

    def patches(self) -> list[tuple[Any, str, Callable]]:
        return [(place, "clip_grad_norm_", self.clip) for place in (nn.utils, clip_grad)]

    def clip(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.hooks.is_elsewhere():
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
        """A parameter's gradient before the first of several clips in a row; a digest of it now."""
        now = digest(whole(parameter.grad))  # of all of a DTensor, as ranks must agree
        gradient, left = self.clipped.get(id(parameter), (None, ""))
        return (gradient if now == left else self.shelf.keep(parameter.grad)), now

    def note(self, step: Step, name: str, parameter: torch.Tensor) -> None:
        """Note a parameter's gradient before clipping, as the optimizer is about to use it."""
        if id(parameter) in self.clipped:
            step.unclipped[name], left = self.clipped[id(parameter)]
            step.is_changed |= digest(whole(parameter.grad)) != left


# ------------------------------------------------------------------------------ what it says


def before(step: Step) -> Vector:
    """The gradients of a step, before they were clipped: these should be the mean."""
    return step.got | step.unclipped


def after(step: Step) -> Vector:
    """The gradients of a step as the optimizer got them."""
    return step.got


def is_changed_after(ranks: list[Notes]) -> bool:
    """Whether something else has changed gradients that were clipped."""
    return any(step.is_changed for rank in ranks for step in rank.steps)


def in_words(ranks: list[Notes]) -> str:
    """The word "clipped", if clip_grad_norm_ has changed a gradient; "" if not."""
    return ", clipped" if any(step.unclipped for step in ranks[0].steps) else ""


def too_early(ranks: list[Notes], step: int, names: set[str]) -> str:
    """The mistake in words, if ranks clipped their own gradients and averaged them then; or ""."""
    steps = [rank.steps[step] for rank in ranks]
    is_clipped = any(vectors.only(one.unclipped, names) for one in steps)
    gots = [vectors.only(one.got, names) for one in steps]
    if is_clipped and vectors.are_near(gots, limits.UPDATED):
        text = "clip_grad_norm_ got other gradients on each rank"
        return f"{text}: average them before they are clipped"
    return ""
