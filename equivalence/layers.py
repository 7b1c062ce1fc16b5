"""The layers and functions that compute something else with several processes, by design."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH_NORM = nn.modules.batchnorm._BatchNorm
AVERAGES = ("running_mean", "running_var", "num_batches_tracked")  # its buffers
DROPOUT = nn.modules.dropout._DropoutNd
ATTENTION = "scaled_dot_product_attention"
DROPOUTS = [name for name in dir(F) if name.rstrip("123d").endswith("dropout") and name[0] != "_"]
DROPOUTS.append(ATTENTION)


def kinds_in(models: Iterable[nn.Module]) -> set[str]:
    found = set()
    for model in models:
        for part in model.modules():
            if isinstance(part, BATCH_NORM):
                found.add("BatchNorm")
            elif isinstance(part, DROPOUT) and part.p:
                found.add("dropout")
    return found


def drops(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call of one of DROPOUTS drops anything."""
    if not torch.is_grad_enabled():
        return False
    if name == ATTENTION:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return bool(rate and kwargs.get("training", args[2] if len(args) > 2 else True))


def without_dropout(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of the same call that drops nothing."""
    if name == ATTENTION:
        return args[:4], kwargs | {"dropout_p": 0.0}
    return args[:2], kwargs | {"training": False}
