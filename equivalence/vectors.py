"""Arithmetic on gradients and weights: a vector is a dictionary of tensors, one for each name."""

import math
from typing import NamedTuple

import torch

Vector = dict[str, torch.Tensor]


def dot(one: Vector, other: Vector) -> float:
    """The inner product, in float64; a name that only one of them has counts as 0."""
    total = 0.0
    for name in one:
        if name in other:
            total += (one[name].double() * other[name].double()).sum().item()
    return total


def length(one: Vector) -> float:
    return dot(one, one) ** 0.5


def difference(one: Vector, other: Vector) -> Vector:
    return {name: one[name].double() - other[name].double() for name in one}


def distance(found: Vector, wanted: Vector) -> float:
    """The length of the difference, relative to that of `wanted`."""
    return length(difference(found, wanted)) / max(1e-150, length(wanted))


def distances(found: list[Vector], wanted: list[Vector]) -> list[float]:
    """The distance in each step."""
    return [distance(one, other) for one, other in zip(found, wanted, strict=True)]


def masked(one: Vector, mask: Vector) -> Vector:
    """0 where the mask is False; a name that the mask doesn't have is kept."""
    return {name: one[name] * mask[name] if name in mask else one[name] for name in one}


def combine(parts: list[Vector], weights: list[float]) -> Vector:
    """The sum of weight * part, in float64."""
    total: Vector = {}
    for part, weight in zip(parts, weights, strict=True):
        for name, tensor in part.items():
            scaled = tensor.double() * weight
            total[name] = total[name] + scaled if name in total else scaled
    return total


class Fit(NamedTuple):
    """`target` as a combination of parts, by least squares."""

    weights: list[float]
    left: float  # the length of what they don't explain, relative to the target's
    is_clear: bool = True  # no: the parts are parallel, so other weights fit as well


def fit(target: Vector, parts: list[Vector]) -> Fit:
    products = torch.zeros(len(parts), len(parts), dtype=torch.float64)
    for row, one in enumerate(parts):
        for column, other in enumerate(parts):
            products[row, column] = dot(one, other)
    right = torch.tensor([[dot(part, target)] for part in parts], dtype=torch.float64)
    if not (products.isfinite().all() and right.isfinite().all()):  # lstsq would fail
        return Fit([math.nan] * len(parts), math.inf, is_clear=False)
    lengths = products.diagonal().sqrt()
    cosines = (products / lengths.outer(lengths))[lengths > 0][:, lengths > 0]
    is_clear = len(cosines) == 0 or bool(torch.linalg.cond(cosines) < 1e8)
    # gelsd: also if two parts are equal, or one is 0
    weights = torch.linalg.lstsq(products, right, driver="gelsd").solution.flatten().tolist()
    made = combine(parts, weights)
    left = distance({name: made[name] for name in target if name in made}, target)
    return Fit(weights, left, is_clear)


def spread(one: list[float], other: list[float]) -> float:
    """The largest difference between two lists of numbers."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def median(numbers: list[float]) -> float:
    """The middle one; of an even number the larger of the two."""
    return sorted(numbers)[len(numbers) // 2]
