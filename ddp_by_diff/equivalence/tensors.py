"""Tensors in whatever holds them."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def tensors_in(value: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples, mappings and objects, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, str | bytes | type | nn.Module):
        parts = []
    else:
        parts = getattr(value, "__dict__", {}).values()  # such as torch_geometric's Data
    if not isinstance(value, torch.Tensor) and depth:
        for part in parts:
            yield from tensors_in(part, depth - 1)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a DTensor; another tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU.  All of a DTensor is copied, which is a collective."""
    with torch.no_grad():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full.detach().to_dense().cpu().clone()


def bytes_of(tensor: torch.Tensor) -> bytes:
    data = local(tensor).to_dense().cpu().contiguous()
    return data.reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(batch: Any) -> str:
    """Equal for equal batches, or tensors."""
    hashed = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(batch):
        hashed.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        hashed.update(bytes_of(tensor))
    return hashed.hexdigest()
