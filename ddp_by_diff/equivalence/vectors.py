"""Arithmetic on gradients and weights: a vector is a dictionary of tensors, one for each name."""

import contextlib
import math
from typing import NamedTuple

import torch

from ddp_by_diff.equivalence.batches import digest

Vector = dict[str, torch.Tensor]


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's numbers in float64; a complex number is two of them."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.double()


def dot(vector: Vector, other: Vector) -> float:
    """The inner product; a tensor that only one vector has counts as 0 in the other."""
    names = [name for name in vector if name in other]
    return sum((numbers(vector[name]) * numbers(other[name])).sum().item() for name in names)


def length(vector: Vector) -> float:
    return math.sqrt(dot(vector, vector))


def distance(found: Vector, wanted: Vector, scale: float = 0.0) -> float:
    """The length of the difference, relative to that of `wanted`, or to `scale` if that is more."""
    size = max(length(wanted), scale)
    rest = combine([found, wanted], [1.0, -1.0])
    return length(rest) / size if size else float(length(found) > 0)


def are_near(parts: list[Vector], limit: float) -> bool:
    """Whether all vectors are equal, up to this distance."""
    return all(distance(part, parts[0]) < limit for part in parts)


def distances(found: Vector, wanted: Vector, scales: dict[str, float]) -> dict[str, float]:
    """The distance of each tensor."""
    apart = {}
    for name in wanted | found:
        apart[name] = distance(only(found, {name}), only(wanted, {name}), scales.get(name, 0.0))
    return apart


def mean_lengths(parts: list[Vector]) -> dict[str, float]:
    """The mean length of each tensor over the parts; a part without it counts as 0."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, tensor in part.items():
            totals[name] = totals.get(name, 0.0) + length({name: tensor})
    return {name: total / len(parts) for name, total in totals.items()}


def combine(parts: list[Vector], factors: list[float]) -> Vector:
    """The sum of factor * part."""
    total: Vector = {}
    for part, factor in zip(parts, factors, strict=True):
        for name, tensor in part.items():
            scaled = numbers(tensor) * factor
            total[name] = total[name] + scaled if name in total else scaled
    return total


def mean(parts: list[Vector]) -> Vector:
    return combine(parts, [1 / len(parts)] * len(parts))


def only(vector: Vector, names: set[str]) -> Vector:
    return {name: tensor for name, tensor in vector.items() if name in names}


class Fit(NamedTuple):
    """`target` as a combination of parts, by least squares."""

    factors: list[float]
    left: float  # the length of the rest that they don't explain, relative to the target's
    is_clear: bool = True  # False: the parts are parallel, so other factors fit as well


def fit(target: Vector, parts: list[Vector]) -> Fit:
    """The factors of the parts, so that their sum is as near to the target as possible."""
    count = len(parts)
    rows = [[dot(part, other) for other in (*parts, target)] for part in parts]
    equations = torch.tensor(rows, dtype=torch.float64)
    products, right = equations[:, :-1], equations[:, -1:]
    if not equations.isfinite().all():  # lstsq would fail
        return Fit([math.nan] * count, math.inf, is_clear=False)
    lengths = products.diagonal().sqrt()
    some = lengths > 0
    cosines = (products / lengths.outer(lengths))[some][:, some]
    is_clear = len(cosines) == count and bool(torch.linalg.cond(cosines) < 1e8)
    # gelsd: also if two parts are equal, or one is 0
    factors = torch.linalg.lstsq(products, right, driver="gelsd").solution.flatten().tolist()
    return Fit(factors, distance(combine(parts, factors), target), is_clear)


def numbers_are_near(values: list[float], wanted: list[float], limit: float) -> bool:
    """Whether two lists of numbers are equal, up to limit * the largest number."""
    most = max(abs(number) for number in wanted)
    return all(abs(a - b) <= limit * most for a, b in zip(values, wanted, strict=True))


def unequal_names(vector: Vector, other: Vector, limit: float = 0.0) -> list[str]:
    """Names of the tensors that both vectors have, and whose distance is more than the limit."""
    names = []
    for name in vector.keys() & other.keys():
        tensor, theirs = vector[name], other[name]
        is_equal = tensor.shape == theirs.shape and tensor.equal(theirs)
        if not is_equal and digest(tensor) != digest(theirs):  # a NaN is equal to itself here
            is_near = tensor.shape == theirs.shape and distance({"": theirs}, {"": tensor}) <= limit
            names += [name] * (not is_near)
    return names


def put_together(parts: list, shape: torch.Size) -> torch.Tensor | None:
    """One tensor of this shape, concatenated from the ranks' parts; None if that can't be."""
    parts = [part for part in parts if part is not None]
    for part in parts:
        if part.shape == shape:
            return part
    for dimension in range(len(shape) if parts else 0):
        with contextlib.suppress(RuntimeError, IndexError):
            whole = torch.cat(parts, dimension)
            if whole.shape == shape:
                return whole
    return None
