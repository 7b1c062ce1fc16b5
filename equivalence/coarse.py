"""Optimizers that compute in bfloat16 or float16: their rounding looks like an error."""

from typing import Any

import torch
from instruments.observer import Observer
from torch.utils._python_dispatch import TorchDispatchMode

from equivalence.limits import COARSE
from equivalence.notes import Notes


class Formats(TorchDispatchMode):
    """A block in which `are_coarse` notes whether torch makes numbers in bfloat16 or float16."""

    are_coarse = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None):  # noqa: ANN204
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.are_coarse |= torch.finfo(result.dtype).eps > COARSE
        return result


class CoarseOptimizers(Observer):
    """Notes whether an optimizer computes in 16 bits, in the run in one process."""

    def __init__(self, noted: Notes) -> None:
        self.noted, self.formats = noted, Formats()

    def optimizer_begins(self, optimizer: Any) -> None:
        if not self.hooks.is_in("optimizer"):
            self.formats.__enter__()

    def optimizer_ends(self, optimizer: Any) -> None:
        if not self.hooks.is_in("optimizer"):
            self.formats.__exit__(None, None, None)
            self.noted.has_coarse_optimizer = self.formats.are_coarse
