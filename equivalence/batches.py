"""Batches as a program sees them: tensors in nested lists, tuples, mappings and objects."""

import copy
import dataclasses
import hashlib
import itertools
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from instruments.tensors import bytes_of, tensors_in
from torch import nn

IGNORED = -100  # torch's losses leave these targets out; everything else is padded with 0


def parts_of(value: Any) -> dict | None:
    """The parts of a list, tuple, mapping or object by index or name; None if it is a leaf.

    A list of numbers or strings is a leaf, and so is an object without tensors.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        kinds = (torch.Tensor, numpy.ndarray, Mapping, list, tuple)
        nested = any(isinstance(part, kinds) for part in value)
        return dict(enumerate(value)) if nested else None
    if isinstance(value, (torch.Tensor, nn.Module, type)):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if any(True for _ in tensors_in(value)):
        return dict(vars(value))
    return None


def with_parts(value: Any, parts: dict) -> Any:
    """The value, with other parts."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts.values())
    if isinstance(value, (list, tuple)):
        return type(value)(parts.values())
    made = copy.copy(value)
    if isinstance(value, Mapping):
        try:
            made.update(parts)
        except AttributeError:  # it can't be changed
            return type(value)(parts)
        return made
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


def mapped(function: Callable[[list, Any], Any], values: list, key: Any = None) -> Any:
    """Like the first value, with function(leaves, key) of the leaves in the same place of all."""
    parts = [parts_of(value) for value in values]
    if parts[0] is None:
        return function(values, key)
    made = {}
    for name in parts[0]:
        made[name] = mapped(function, [some[name] for some in parts], name)
    return with_parts(values[0], made)


def clone(value: Any) -> Any:
    def cloned(same: list, key: Any) -> Any:
        return same[0].detach().clone() if isinstance(same[0], torch.Tensor) else same[0]

    return mapped(cloned, [value])


class Own:
    """In place of what no other process can read: it takes its own."""


def to_plain(value: Any, depth: int = 8) -> Any:
    """A copy without the program's own classes: dictionaries of tensors, numbers and texts."""
    parts = parts_of(value)
    if parts is not None and depth:
        return {name: to_plain(part, depth - 1) for name, part in parts.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)  # for a process with other GPUs
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    try:
        pickle.dumps(value)
    except Exception:  # whatever an object's own methods raise
        return Own()
    return value


def from_plain(plain: Any, own: Any) -> Any:
    """What to_plain was given, as an object like `own`."""
    if isinstance(plain, Own):
        return own
    if isinstance(plain, torch.Tensor):
        copied = plain.to(own.device, copy=True) if isinstance(own, torch.Tensor) else plain.clone()
        return copied.numpy() if isinstance(own, numpy.ndarray) else copied
    parts = parts_of(own)
    if parts is None or not isinstance(plain, dict):
        return plain
    made = {}
    for name, part in plain.items():
        made[name] = from_plain(part, parts.get(name))
    return with_parts(own, made)


def join(batches: list) -> Any:
    """One batch with the examples of all of them; shorter ones are padded at their ends.

    A tensor that does not have a row for each example is taken once.
    """
    count = count_examples(batches[0])

    def joined(same: list, key: Any) -> Any:
        if isinstance(same[0], (list, tuple)):
            return type(same[0])(itertools.chain(*same))
        if not isinstance(same[0], torch.Tensor) or same[0].dim() == 0 or len(same[0]) != count:
            return same[0]
        shapes = [tensor.shape[1:] for tensor in same]
        longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        is_target = key == "labels" or any((tensor == IGNORED).any() for tensor in same)
        return torch.cat([_padded(tensor, longest, IGNORED * is_target) for tensor in same])

    return mapped(joined, batches) if len(batches) > 1 else batches[0]


def why_not_joined(batches: list) -> str:
    """If tensors that differ between the batches have no row for each example; else ""."""
    counts = [count_examples(batch) for batch in batches]
    for same in zip(*[tensors_in(batch) for batch in batches], strict=False):
        if same[0].dim() == 0 or all(tensor.equal(same[0]) for tensor in same):
            continue
        if [len(tensor) for tensor in same] != counts:
            sizes = [len(tensor) for tensor in tensors_in(batches[0]) if tensor.dim()]
            return ", ".join(map(str, dict.fromkeys(sizes)))
    return ""


def are_columns(batch: Any, count: int) -> bool:
    """Whether so many examples are the second dimension of all tensors, as with (time, batch)."""
    shapes = [tensor.shape for tensor in tensors_in(batch) if tensor.dim() > 1]
    return bool(shapes) and all(shape[0] != count == shape[1] for shape in shapes)


def _padded(tensor: torch.Tensor, longest: list[int], value: int) -> torch.Tensor:
    """The tensor with sizes `longest` in all dimensions but the first."""
    missing = [size - here for size, here in zip(longest, tensor.shape[1:], strict=True)]
    pads = []
    for count in reversed(missing):  # F.pad begins with the last dimension
        pads += [0, count]
    return F.pad(tensor, pads, value=value) if any(pads) else tensor


def split(batch: Any, count: int) -> list:
    """The batch in so many parts."""

    def part(number: int) -> Any:
        def chosen(same: list, key: Any) -> Any:
            value = same[0]
            if isinstance(value, torch.Tensor) and value.dim():
                return value.tensor_split(count)[number]
            return value

        return mapped(chosen, [batch])

    return [part(number) for number in range(count)]


def count_examples(batch: Any) -> int:
    """The size of the first tensor that has one; 1 if there is none."""
    for tensor in tensors_in(batch):
        if tensor.dim():
            return len(tensor)
    return 1


def digest(batch: Any) -> str:
    """Equal for equal batches, or tensors."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(batch):
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(bytes_of(tensor))
    return found.hexdigest()


def digests_of_examples(batch: Any) -> list[bytes]:
    """A name for each example, equal for equal ones."""
    count = count_examples(batch)
    tensors = [some for some in tensors_in(batch) if some.dim() and len(some) == count]
    names = []
    for row in range(count):
        found = hashlib.blake2b(digest_size=16)
        for tensor in tensors:
            found.update(bytes_of(tensor[row]))
        names.append(found.digest())
    return names


class RandomState(NamedTuple):
    """Of torch (the CPU's and this process's GPU's), Python and numpy."""

    cpu: torch.Tensor
    gpu: torch.Tensor | None
    python: tuple
    numpy: tuple

    def other_than(self, other: "RandomState") -> set[str]:
        """The generators that are in another state."""
        found = set()
        if not self.cpu.equal(other.cpu):
            found.add("cpu")
        if self.gpu is not None and other.gpu is not None and not self.gpu.equal(other.gpu):
            found.add("gpu")
        if self.python != other.python:
            found.add("python")
        if self.numpy[2] != other.numpy[2] or (self.numpy[1] != other.numpy[1]).any():
            found.add("numpy")
        return found


def random_state() -> RandomState:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return RandomState(torch.get_rng_state(), gpu, random.getstate(), numpy.random.get_state())


def set_random_state(state: RandomState, reseeded: bool = False) -> None:
    """`reseeded`: not this state, but another one that follows from it."""
    torch.set_rng_state(state.cpu)
    random.setstate(state.python)
    numpy.random.set_state(state.numpy)
    if state.gpu is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.gpu)
    if reseeded:
        seed = int(torch.randint(2**31, ()))
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
