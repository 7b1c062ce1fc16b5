"""What an instrument wants to know of a program: a class of methods, to be overridden.

class Counter(Observer):
    def forward_begins(self, module, args, kwargs):
        self.count += 1

with Hooks([Counter()]).installed():
    run_program(["train.py"], begin=lambda: None)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Observer:
    """What an instrument wants to know: the methods that it overrides.  Here they do nothing."""

    hooks: Any  # that call it: instruments.hooks.Hooks
    stuck = "made no step"  # what a rank that hangs has done since Hooks.last_step

    def installed(self) -> None:
        """The program is about to run.  What `self.hooks.undo` holds is undone at its end."""

    def patches(self) -> list[tuple[Any, str, Callable]]:
        """(place, name, function): function(original, *args, **kwargs) replaces place.name."""
        return []

    def is_ours(self) -> bool:
        """Whether a call in another thread than the program's first one is to be told."""
        return False

    def load(self, iterator: Any, original: Callable) -> Any:
        """Return the next batch of a DataLoader: that of original(), or another one."""
        return original()

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        """A module is called by no other module.  May return other args, and change kwargs."""

    def forward_ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        """The call has ended; after an exception the output is None."""

    def backward(self, original: Callable) -> Any:
        """torch.autograd.backward, Tensor.backward or torch.autograd.grad was called."""
        return original()

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins: the first one's, or another's, perhaps inside it."""

    def gradients_are_there(self, optimizer: Any, is_again: bool) -> None:
        """An optimizer that is inside no other is about to use them.

        With a closure: after each call of the closure.  is_again: not the first call in this step.
        """

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has ended."""

    def notes(self, is_own_thread: bool) -> Any:
        """What was noted, for `ranks`.  Another thread asks if the program hangs."""


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
