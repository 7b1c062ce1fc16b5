"""Layers that compute something else with several processes, by design: BatchNorm, dropout."""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_by_diff.equivalence.batches import tensors_in
from ddp_by_diff.equivalence.limits import COARSE
from ddp_by_diff.equivalence.notes import Notes
from ddp_by_diff.instruments.observer import Observer

BATCH_NORM = nn.modules.batchnorm._BatchNorm
DROPOUT_LAYER = nn.modules.dropout._DropoutNd
DROPS_PATHS = ("DropPath", "StochasticDepth")  # classes of timm, torchvision and others
ATTENTION = "scaled_dot_product_attention"
DROPOUT_FUNCTIONS = [name for name in dir(F) if re.fullmatch(r"(?!_).*dropout[123d]*", name)]
DROPOUT_FUNCTIONS.append(ATTENTION)


class Layers(Observer):
    """Notes the kinds of layers that train, and 16-bit formats; switches layers off."""

    def __init__(self, noted: Notes, left_out: tuple) -> None:
        self.noted, self.left_out = noted, left_out

    def patches(self) -> list[tuple[Any, str, Callable]]:
        return [(F, name, functools.partial(self.dropout, name)) for name in DROPOUT_FUNCTIONS]

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.hooks.is_in("backward"):  # again, to save memory
            return
        for layer in module.modules():
            if kind := kind_of(layer):
                self.noted.steps[-1].kinds.add(kind)
                layer.training = kind not in self.left_out
        for device in "cpu", "cuda":
            if torch.is_grad_enabled() and torch.is_autocast_enabled(device):
                self.note_format(torch.get_autocast_dtype(device))

    def forward_ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.is_floating_point():
                self.note_format(tensor.dtype)

    def note_format(self, dtype: torch.dtype) -> None:
        self.noted.is_coarse |= torch.finfo(dtype).eps > COARSE

    def dropout(self, name: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """A call of a DROPOUT_FUNCTION, by nn.Dropout or the program: noted, or switched off."""
        is_attention = name == ATTENTION
        key, place, usual = ("dropout_p", 4, 0.0) if is_attention else ("p", 1, 0.5)
        rate = kwargs.get(key, args[place] if len(args) > place else usual)
        training = is_attention or kwargs.get("training", args[2] if len(args) > 2 else True)
        if torch.compiler.is_compiling() or not rate or not training:
            return original(*args, **kwargs)
        self.noted.steps[-1].kinds.add("dropout")
        if "dropout" in self.left_out:
            if len(args) > place:
                args = *args[:place], 0.0, *args[place + 1 :]
            else:
                kwargs[key] = 0.0
        return original(*args, **kwargs)


def kind_of(layer: nn.Module) -> str:
    """The kind of a layer that trains: "BatchNorm" or "dropout"; "" for others."""
    if not layer.training:
        return ""
    if isinstance(layer, BATCH_NORM):
        return "BatchNorm"
    is_dropout = isinstance(layer, DROPOUT_LAYER) and layer.p or type(layer).__name__ in DROPS_PATHS
    return "dropout" if is_dropout or isinstance(layer, nn.RNNBase) and layer.dropout else ""
