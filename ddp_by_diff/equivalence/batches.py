"""Tensors, and batches of any form (in nested lists, dictionaries, objects): copied and joined."""

import copy
import dataclasses
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from ddp_by_diff.equivalence.limits import GROUPS

IGNORED = -100  # torch's losses leave these targets out; everything else is padded with 0


def tensors_in(value: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples, mappings and objects, in order."""
    parts: Iterable = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif not isinstance(value, str | bytes | type | nn.Module):
        parts = getattr(value, "__dict__", {}).values()  # such as torch_geometric's Data
    for part in parts if depth else ():
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


def parts_of(value: Any) -> dict | None:
    """The parts of a list, tuple, mapping or object by index or name; None if it is a leaf.

    A list of numbers or strings is a leaf, and so is an object without tensors.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        kinds = (torch.Tensor, numpy.ndarray, list, tuple)
        nested = any(isinstance(part, kinds) or parts_of(part) is not None for part in value)
        return dict(enumerate(value)) if nested else None
    if isinstance(value, (torch.Tensor, nn.Module, type)):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(vars(value)) if any(True for _ in tensors_in(value)) else None


def with_parts(value: Any, parts: dict) -> Any:
    """A copy of the list, tuple, mapping or object, with these parts in place of its own."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts.values())
    if isinstance(value, (list, tuple)):
        return type(value)(parts.values())
    made = copy.copy(value)
    if isinstance(value, Mapping):
        made.update(parts)
        return made
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


def mapped(function: Callable[[list, Any], Any], values: list, key: Any = None) -> Any:
    """An object like the first value; its leaves are function(leaves of all values, their name)."""
    parts = [parts_of(value) for value in values]
    if parts[0] is None:
        return function(values, key)
    made = {}
    for name in parts[0]:
        made[name] = mapped(function, [some[name] for some in parts if some], name)
    return with_parts(values[0], made)


class Unsent:
    """A marker in place of an object that can't be sent: the receiver uses its own object."""


def to_plain(value: Any, depth: int = 8) -> Any:
    """A copy that another process can read: dictionaries of tensors, numbers and texts."""
    parts = parts_of(value)
    if parts is not None and depth:
        return {name: to_plain(part, depth - 1) for name, part in parts.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    try:
        pickle.dumps(value)
    except Exception:  # whatever an object's own methods raise
        return Unsent()
    return value


def from_plain(plain: Any, own: Any) -> Any:
    """The value that to_plain made `plain` of, as an object of the same classes as `own`."""
    if isinstance(plain, Unsent):
        return own
    if isinstance(plain, torch.Tensor):
        if isinstance(own, numpy.ndarray):
            return plain.clone().numpy()
        if not isinstance(own, torch.Tensor):
            return plain.clone()
        if own.requires_grad and own.shape == plain.shape:
            own.data.copy_(plain)  # the program asks for this tensor's gradient
            return own
        return plain.to(own.device, copy=True).requires_grad_(own.requires_grad)
    parts = parts_of(own)
    if parts is None or not isinstance(plain, dict):
        return plain
    made = {name: from_plain(part, parts.get(name)) for name, part in plain.items()}
    return with_parts(own, made)


def join(batches: list, only: int | None = None, order: torch.Generator | None = None) -> Any:
    """One batch with the examples of all batches; shorter examples are padded at their ends.

    only: the examples of this one batch, padded to the longest of all batches.  order: shuffles
    the examples.  A tensor that does not have a row for each example is taken once.
    """
    counts = [count_examples(batch) for batch in batches]
    rows = torch.arange(sum(counts)).split(counts)
    rows = torch.cat(rows) if only is None else rows[only]
    if order is not None:
        rows = rows[torch.randperm(len(rows), generator=order)]

    def joined(leaves: list, key: Any) -> Any:
        is_list = isinstance(leaves[0], (list, tuple))
        is_tensor = isinstance(leaves[0], torch.Tensor) and leaves[0].dim() > 0
        has_rows = (is_list or is_tensor) and [len(leaf) for leaf in leaves] == counts
        if is_list and (has_rows or only is None):
            every = list(itertools.chain(*leaves))
            return type(leaves[0])([every[row] for row in rows] if has_rows else every)
        if not has_rows:
            # a state's examples may have another place: (layers, examples, ...)
            for place in range(leaves[0].dim() if is_tensor else 0):
                if [leaf.shape[place] for leaf in leaves] == counts:
                    return torch.cat(leaves, place).index_select(place, rows)
            return leaves[only or 0]
        shapes = [tensor.shape[1:] for tensor in leaves]
        longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        is_target = key == "labels" or any((tensor == IGNORED).any() for tensor in leaves)
        padded = []
        for tensor in leaves:
            padded.append(tensor.new_full((len(tensor), *longest), IGNORED * is_target))
            padded[-1][tuple(map(slice, tensor.shape))] = tensor
        return torch.cat(padded)[rows]

    return mapped(joined, batches)


def is_made_of(value: Any, parts: list) -> bool:
    """Whether the ranks' parts hold all numbers of `value`, in any order, along another dimension.

    True if each rank has its part of each sequence.  A tensor may be the same on all ranks.  Parts
    along the first dimension are compared row by row, as numbers in a row may be in another order.
    """
    is_shared = False
    for tensors in zip(tensors_in(value), *[tensors_in(part) for part in parts], strict=False):
        whole, *some = [tensor.detach().cpu() for tensor in tensors]
        if all(tensor.equal(whole) for tensor in some):
            continue
        are_rows = any(tensor.shape[:1] != whole.shape[:1] for tensor in some)
        numbers = torch.cat([tensor.flatten() for tensor in some]).sort().values
        is_other = are_rows or numbers.dtype != whole.dtype
        if is_other or not numbers.equal(whole.flatten().sort().values):
            return False
        is_shared = True
    return is_shared


def have_other_rows(batches: list) -> bool:
    """Whether a tensor of a batch, other than on the other ranks, has not a row per example."""
    counts = [count_examples(batch) for batch in batches]
    for tensors in zip(*[tensors_in(batch) for batch in batches], strict=False):
        is_same = tensors[0].dim() == 0 or all(tensor.equal(tensors[0]) for tensor in tensors)
        if not is_same and [len(tensor) for tensor in tensors] != counts:
            return True
    return False


def counts_up(batch: Any) -> bool:
    """Whether a tensor in the batch numbers groups of rows (such as the graph of each node)."""
    for tensor in tensors_in(batch):
        if tensor.dim() != 1 or tensor.is_floating_point() or len(tensor) <= GROUPS:
            continue
        steps = set(tensor.long().diff().tolist())
        if tensor[0] == 0 and tensor[-1] > 1 and steps <= {0, 1}:
            return True
    return False


def count_examples(batch: Any) -> int:
    """The number of rows of the first tensor that has rows; 1 if no tensor has."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)


def digests_of_examples(batch: Any, examples: list | None = None) -> list[str]:
    """A digest of each example in the batch.  examples: what collate_fn made the batch of."""
    if examples:
        return [digest(example) for example in examples]
    count = count_examples(batch)
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() and len(tensor) == count]
    return [digest([tensor[row] for tensor in tensors]) for row in range(count)]


def plain_copy(value: Any) -> Any:
    """A copy, if the value consists of torch's, numpy's and Python's own types only; else None."""
    if type(value) in (str, bytes, int, float, bool):
        return value
    if type(value) is torch.Tensor:
        return value.detach().clone()
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        return value.copy()
    if type(value) not in (list, tuple, dict):
        return None
    parts = [plain_copy(part) for part in (value.values() if type(value) is dict else value)]
    if any(part is None for part in parts):
        return None
    return dict(zip(value, parts, strict=True)) if type(value) is dict else type(value)(parts)
