"""Large tensors are kept in files, not in memory; equal ones once, whichever rank has them."""

import functools
import threading
from pathlib import Path
from typing import NamedTuple

import torch
from instruments.tensors import whole

from equivalence.batches import digest
from equivalence.vectors import Vector

LARGE = 1_000_000  # bytes: a smaller tensor stays in memory


class Kept(NamedTuple):
    """A tensor in a file."""

    file: str
    dtype: torch.dtype
    shape: torch.Size
    nbytes: int


class Shelf:
    """path: a folder that all processes of the run see; None: all tensors stay in memory."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | Kept:
        """All of the tensor, copied."""
        copy = whole(tensor)
        if self.path is None or copy.nbytes < LARGE:
            return copy
        file = Path(self.path) / f"{digest(copy)}.tensor"
        if not file.exists():
            part = Path(f"{file}.{threading.get_native_id()}")  # several may write one file
            copy.contiguous().view(-1).view(torch.uint8).numpy().tofile(part)
            part.rename(file)  # a reader sees all of it, or nothing
        return Kept(str(file), copy.dtype, copy.shape, copy.nbytes)


@functools.cache
def read(kept: Kept) -> torch.Tensor:
    """The system reads its numbers when they are needed; what is written to it is not kept."""
    content = torch.from_file(kept.file, shared=False, size=kept.nbytes, dtype=torch.uint8)
    return content.view(kept.dtype).view(kept.shape)


def opened(vector: Vector) -> Vector:
    """With tensors in place of those that are kept in files."""
    tensors = {}
    for name, tensor in vector.items():
        tensors[name] = read(tensor) if isinstance(tensor, Kept) else tensor
    return tensors
