"""The layers and functions that compute something else with several processes, by design."""

from typing import Any

import torch.nn.functional as F
from torch import nn

BATCH_NORM = nn.modules.batchnorm._BatchNorm
AVERAGES = ("running_mean", "running_var", "num_batches_tracked")  # its buffers
DROPOUT = nn.modules.dropout._DropoutNd
DROPS_PATHS = ("DropPath", "StochasticDepth")  # classes of timm, torchvision and others
ATTENTION = "scaled_dot_product_attention"
DROPOUTS = [name for name in dir(F) if name.rstrip("123d").endswith("dropout") and name[0] != "_"]
DROPOUTS.append(ATTENTION)


def kind_of(layer: nn.Module) -> str:
    """What it is, if it trains."""
    if not layer.training:
        return ""
    if isinstance(layer, BATCH_NORM):
        return "BatchNorm"
    is_dropout = isinstance(layer, DROPOUT) and layer.p or type(layer).__name__ in DROPS_PATHS
    return "dropout" if is_dropout or isinstance(layer, nn.RNNBase) and layer.dropout else ""


def drops(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call of one of DROPOUTS drops anything."""
    if name == ATTENTION:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return bool(rate and kwargs.get("training", args[2] if len(args) > 2 else True))


def without_dropout(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of the same call that drops nothing."""
    if name == ATTENTION:
        if len(args) > 4:
            return (*args[:4], 0.0, *args[5:]), kwargs
        return args, kwargs | {"dropout_p": 0.0}
    return args[:2], kwargs | {"training": False}
