"""What one process has noted of each step: batches, weights, gradients."""

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

import torch

from equivalence.batches import RandomState
from equivalence.vectors import Vector


class Event(NamedTuple):
    """Data that came into the program."""

    value: Any  # without the program's own classes
    state: RandomState  # after it


@dataclasses.dataclass
class Step:
    weights: Vector = dataclasses.field(default_factory=dict)  # before it; buffers, too
    forced: Vector = dataclasses.field(default_factory=dict)  # those that it computed with
    raw: Vector = dataclasses.field(default_factory=dict)  # gradients after backward, not clipped
    gradients: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    rates: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)  # of clip_grad_norm_
    states: list[RandomState] = dataclasses.field(default_factory=list)  # at each forward pass
    draws: set[str] = dataclasses.field(default_factory=set)  # the generators that the program used
    is_repeated: bool = False  # the optimizer has called its closure again, at other weights
    begun: set[int] = dataclasses.field(default_factory=set)  # the models that were called in it


@dataclasses.dataclass
class Notes:
    """Of one process."""

    rank: int
    world_size: int
    steps: list[Step]
    events: dict[str, list[Event]]  # by where they come from: a loader, a model's inputs
    counts: list[Counter]  # how many events there were at each step of the optimizer
    parameters: list[str]  # names; what else a step's weights have are buffers
    loose: int  # parameters with gradients that an optimizer has, and none of the modules
    kinds: set[str]  # "BatchNorm", "dropout", if the models have them
    precision: float  # of the coarsest number format in which a module computes
    optimizers: int  # that the program itself calls
    indices: dict[str, list]  # of an epoch, as a loader's sampler says
    lengths: dict[str, int]  # of the data sets to which they belong
    examples: dict[str, int]  # in the first batch of each loader
    batch_sizes: dict[str, int]  # that each loader's sampler makes, if it is torch's own
    size: int  # bytes of all tensors here
