"""Number formats: a run in float64, which tells rounding; optimizers that compute in 16 bits."""

from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_by_diff.equivalence.limits import COARSE
from ddp_by_diff.equivalence.notes import Notes
from ddp_by_diff.instruments.observer import Observer

DRAWN = {"rand", "randn", "normal", "bernoulli", "multinomial", "rand_like", "randn_like"}
DRAWN_INTO = {"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_"}


class InFloat64(TorchDispatchMode):
    """A block that computes in float64 also where the program asks for float32.

    Random numbers are drawn in float32: a generator gives others in float64.
    """

    def __torch_dispatch__(
        self, function: Any, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), function._schema.name.removeprefix("aten::")
        if name in DRAWN_INTO and args[0].dtype == torch.float64:
            drawn = args[0].float()
            function(drawn, *args[1:], **kwargs)
            return args[0].copy_(drawn)
        if name in DRAWN:
            args = tuple(in_float32(value) for value in args)
            is_new = not any(isinstance(value, torch.Tensor) for value in args)
            if is_new and kwargs.get("dtype") in (None, torch.float64):
                kwargs["dtype"] = torch.float32
            drawn = function(*args, **kwargs)
            return drawn.double() if drawn.dtype == torch.float32 else drawn
        if kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        result = function(*args, **kwargs)
        return in_float64([result]) if name == "lift_fresh" else result  # such as torch.tensor's


def in_float32(value: Any) -> Any:
    is_double = isinstance(value, torch.Tensor) and value.dtype == torch.float64
    return value.float() if is_double else value


def in_float64(leaves: list, key: Any = None) -> Any:
    """A leaf of a batch (see batches.mapped)."""
    leaf = leaves[0]
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return leaf.double()
    is_array = isinstance(leaf, numpy.ndarray) and leaf.dtype.kind == "f"
    return leaf.astype("float64") if is_array else leaf


class CoarseOptimizers(Observer, TorchDispatchMode):
    """Notes whether an optimizer computes in bfloat16 or float16, in the run in one process."""

    def __init__(self, noted: Notes) -> None:
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None):  # noqa: ANN204
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.noted.has_coarse_optimizer |= torch.finfo(result.dtype).eps > COARSE
        return result

    def optimizer_begins(self, optimizer: Any) -> None:
        if not self.hooks.is_in("optimizer"):
            self.__enter__()

    def optimizer_ends(self, optimizer: Any) -> None:
        if not self.hooks.is_in("optimizer"):
            self.__exit__(None, None, None)
