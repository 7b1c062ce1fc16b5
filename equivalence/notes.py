"""What one process has noted of each step."""

import dataclasses
from typing import Any, NamedTuple

from equivalence.randomness import RandomState
from equivalence.shelf import opened
from equivalence.vectors import Vector


class Event(NamedTuple):
    """Data that came into the program."""

    value: Any  # without the program's own classes
    state: RandomState  # after it
    examples: list | None = None  # before the program's own collate_fn made a batch of them
    round: int = 0  # how often its loader had been begun
    indices: tuple = ()  # of its examples in the data set, if the loader has one


class Clip(NamedTuple):
    """A call of clip_grad_norm_."""

    norm: float  # what it returned
    most: float  # max_norm
    names: list[str]  # of the parameters


@dataclasses.dataclass
class Step:
    weights: Vector = dataclasses.field(default_factory=dict)  # before it; buffers, too
    own: Vector = dataclasses.field(default_factory=dict)  # gradients, before any message
    first: Vector = dataclasses.field(default_factory=dict)  # own, after the first backward pass
    got: Vector = dataclasses.field(default_factory=dict)  # gradients, as the optimizer got them
    options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by parameter
    clips: list[Clip] = dataclasses.field(default_factory=list)
    inputs: str = ""  # a digest of what the models were called with
    draws: set[str] = dataclasses.field(default_factory=set)  # generators used after the batch
    is_repeated: bool = False  # an optimizer has asked for gradients more than once
    begun: set[int] = dataclasses.field(default_factory=set)  # the models that were called in it

    def open(self) -> None:
        """Read what is kept in files."""
        self.weights, self.own = opened(self.weights), opened(self.own)
        self.first, self.got = opened(self.first), opened(self.got)


@dataclasses.dataclass
class Notes:
    """Of one process."""

    rank: int
    world_size: int
    steps: list[Step]
    events: dict[str, list[Event]]  # by where they come from: a loader, a model's inputs
    counts: list[dict[str, int]]  # how many events there were at each step of the optimizer
    parameters: list[str]  # names; what else a step's weights have are buffers
    kinds: set[str]  # "BatchNorm", "dropout", if layers that train have them
    is_coarse: bool  # a module computes in bfloat16 or float16
    batch_sizes: dict[str, int]  # of each loader, if it is known
    epochs: dict[str, list]  # the indices of an epoch, where a sampler is torch's own
    ends: dict[str, str]  # a digest of the data set's first and last examples; "": not known
    redraws: set[str]  # the loaders whose sampler may take an example again

    def open(self) -> None:
        for step in self.steps:
            step.open()
