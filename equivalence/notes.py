"""What one process has noted of each step."""

from dataclasses import dataclass, field
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


@dataclass
class Step:
    weights: Vector = field(default_factory=dict)  # before it; buffers, too
    own: Vector = field(default_factory=dict)  # gradients, before any message
    got: Vector = field(default_factory=dict)  # gradients, as the optimizer got them
    unclipped: Vector = field(default_factory=dict)  # those before clip_grad_norm_ changed them
    is_changed: bool = False  # something else has changed gradients after clip_grad_norm_
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # by parameter
    inputs: str = ""  # a digest of what the models were called with
    draws: set[str] = field(default_factory=set)  # generators used after the batch
    is_repeated: bool = False  # an optimizer has asked for gradients more than once
    begun: set[int] = field(default_factory=set)  # the models that were called in it

    def open(self) -> None:
        """Read what is kept in files."""
        self.weights, self.own = opened(self.weights), opened(self.own)
        self.got, self.unclipped = opened(self.got), opened(self.unclipped)


@dataclass
class Notes:
    """Of one process."""

    rank: int
    world_size: int
    steps: list[Step] = field(default_factory=list)  # the current one is the last
    # By where they come from: a loader, a model's inputs.
    events: dict[str, list[Event]] = field(default_factory=dict)
    counts: list[dict[str, int]] = field(default_factory=list)  # of events, when optimizers stepped
    parameters: list[str] = field(default_factory=list)  # else a step's weights are buffers
    kinds: set[str] = field(default_factory=set)  # "BatchNorm", "dropout", of layers that train
    is_coarse: bool = False  # a module computes in bfloat16 or float16
    # Of each loader, by its name:
    batch_sizes: dict[str, int] = field(default_factory=dict)  # 0: not known
    epochs: dict[str, list] = field(default_factory=dict)  # all indices, of torch's own samplers
    ends: dict[str, str] = field(default_factory=dict)  # a digest of the data set's; "": not known
    redraws: set[str] = field(default_factory=set)  # its sampler may take an example again

    def rate(self, key: str, step: int = 0) -> int:
        """How many events came between this step of the optimizer and the next."""
        return self.counts[step + 1].get(key, 0) - self.counts[step].get(key, 0)

    def open(self) -> None:
        for step in self.steps:
            step.open()
