"""What is noted of tensors: digests, and how the gradients of the ranks go together."""

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

Named = Iterable[tuple[str, torch.Tensor]]


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


def is_sharded(tensor: torch.Tensor) -> bool:
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


def digest(tensor: torch.Tensor) -> str:
    """Equal for equal tensors; of a sharded DTensor only that it is sharded."""
    if is_sharded(tensor):
        return "sharded"
    data = local(tensor).to_dense().cpu().contiguous()
    content = data.reshape(-1).view(torch.uint8).numpy().tobytes()
    content += str((data.dtype, *data.shape)).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def size_in_bytes(tensor: torch.Tensor) -> int:
    """Of a sparse tensor its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


@dataclasses.dataclass
class Gradients:
    """Of the step after the recorded ones.

    A projection is the sum of a tensor's elements, each with a sign of its own, the same on all
    ranks.  So the projection of the ranks' mean is the mean of their projections: that says
    whether gradients were averaged, without sending them.
    """

    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    final: dict[str, float] = dataclasses.field(default_factory=dict)  # as the optimizer gets them
    own: dict[str, float] = dataclasses.field(default_factory=dict)  # before any message
    is_zero: bool = False
    is_finite: bool = True

    def watch(self, parameters: Named) -> None:
        """Note what backward computes here, before DDP or the program sends it."""
        for name, parameter in parameters:
            if parameter.requires_grad and not is_sharded(parameter):
                parameter.register_hook(self.adding(name))

    def adding(self, name: str) -> Callable[[torch.Tensor], None]:
        def add(gradient: torch.Tensor) -> None:
            self.own[name] = self.own.get(name, 0.0) + projection(name, gradient)

        return add

    def note(self, parameters: Named) -> None:
        """What the optimizer gets."""
        found = []
        for name, parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            self.digests[name] = digest(gradient)
            if not is_sharded(gradient):
                self.final[name] = projection(name, gradient)
            found.append(local(gradient).to_dense())
        self.is_zero = bool(found) and not any(bool(gradient.any()) for gradient in found)
        self.is_finite = all(bool(gradient.isfinite().all()) for gradient in found)


def projection(name: str, gradient: torch.Tensor) -> float:
    values = local(gradient).to_dense().cpu().double()
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(2, values.shape, generator=draw) * 2 - 1
    return (values * signs).sum().item()
