"""Notes of one process on each step; states of its random generators."""

import contextlib
import hashlib
import io
import itertools
import multiprocessing
import pickle
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch

from ddp_by_diff.equivalence.batches import bytes_of
from ddp_by_diff.equivalence.limits import AHEAD
from ddp_by_diff.equivalence.vectors import Vector

PICKING = 10  # seconds to wait for the examples of a data set


RandomState = dict[str, Any]  # of each generator: torch's ("cpu", "gpu"), Python's and numpy's


def random_state() -> RandomState:
    state: RandomState = {"cpu": torch.get_rng_state().numpy(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["gpu"] = torch.cuda.get_rng_state().numpy()
    return state | {"numpy": numpy.random.get_state()}


def set_random_state(state: RandomState) -> None:
    torch.set_rng_state(torch.from_numpy(state["cpu"]))
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    if "gpu" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state["gpu"]))


def drawn_between(state: RandomState, other: RandomState) -> set[str]:
    """Names of the generators whose states differ."""
    names = state.keys() & other.keys()
    return {name for name in names if pickle.dumps(state[name]) != pickle.dumps(other[name])}


class Content(pickle.Pickler):
    """Pickles a tensor as its numbers: by itself torch adds names that differ in each process."""

    def persistent_id(self, value: Any) -> tuple | None:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), bytes_of(value)
        return None


@dataclass
class Loader:
    """A DataLoader, and what it reads, on one rank."""

    sampler: str = ""  # a DistributedSampler's options, in words
    is_known: bool = False  # the sampler is torch's own, and takes each example once in an epoch
    redraws: bool = False  # the sampler may take an example again, or the data set draws them
    drops: bool = True  # the last batch, if it is not full; or its sampler may do so
    epoch: list[int] = field(default_factory=list)  # all numbers of one, if they can be listed
    length: int = 0  # of the data set, without its Subsets; 0: it has none
    pool: list[int] | None = None  # the numbers that a Subset has of it
    begun: dict[int, str] = field(default_factory=dict)  # a few examples, before the first batch
    picks: dict[int, str] = field(default_factory=dict)  # the same at the end; {}: not known


def have_one_dataset(loaders: list[Loader]) -> bool:
    """Whether an example's number means the same on all ranks."""
    first = loaders[0].picks
    return bool(first) and all(loader.picks == first for loader in loaders)


def pick(dataset: Any, number: int, seed: int = 0) -> str:
    """The digest of an example: equal on ranks that have the same data."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    content = io.BytesIO()
    Content(content).dump(dataset[number])
    return hashlib.blake2b(content.getvalue(), digest_size=16).hexdigest()


def pick_some(dataset: Any) -> dict[int, str]:
    """A few examples of a data set by their numbers; {} if they are never the same."""
    try:
        last = len(dataset) - 1
        picks = {last * k // 8: pick(dataset, last * k // 8) for k in range(9)}
        return picks if pick(dataset, 0) == picks[0] else {}
    except Exception:  # the program's own code, or what can't be pickled
        return {}


def pick_in_a_child(dataset: Any) -> dict[int, str]:
    """pick_some in a forked process, as a data set may keep what it does (a cache, open files)."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: sender.send(pick_some(dataset)), daemon=True)
    picks: dict[int, str] = {}
    with contextlib.suppress(Exception):  # no process may be forked here
        child.start()
        picks = receiver.recv() if receiver.poll(PICKING) else {}
        child.kill()
        child.join()
    return picks


def draws(dataset: Any, picks: dict[int, str]) -> bool:
    """Whether a data set draws its examples, whatever their numbers."""
    return 2 * len(set(picks.values())) < len(picks) and pick(dataset, 0, seed=1) != picks[0]


class Event(NamedTuple):
    """Data that came into the program: a batch of a loader, a model's inputs, a loss's targets."""

    value: Any  # without the program's own classes
    state: RandomState  # after it
    examples: list | None = None  # of which the program's own collate_fn made the batch
    round: int = 0  # how often its loader had been begun
    indices: tuple = ()  # of its examples in the data set, if the loader has one


@dataclass
class Step:
    """One step of the first optimizer."""

    weights: Vector = field(default_factory=dict)  # before it; buffers, too
    own: Vector = field(default_factory=dict)  # gradients, before any message
    got: Vector = field(default_factory=dict)  # gradients, as the optimizer got them
    unclipped: Vector = field(default_factory=dict)  # before clipping, if that changes them
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # by parameter
    kinds: set[str] = field(default_factory=set)  # "BatchNorm", "dropout", of layers that train
    inputs: str = ""  # a digest of what the models were called with
    draws: set[str] = field(default_factory=set)  # generators used after the batch
    after: RandomState = field(default_factory=random_state)  # when an optimizer gets gradients
    late: set[str] = field(default_factory=set)  # gradients that came after an optimizer's step
    is_repeated: bool = False  # an optimizer has asked for gradients more than once


@dataclass
class Notes:
    """Notes of one process."""

    rank: int
    world_size: int
    steps: list[Step] = field(default_factory=list)  # the current one is the last
    # By key, which says where events come from: "loader 0", "inputs of Net".
    events: dict[str, list[Event]] = field(default_factory=dict)
    counts: list[dict[str, int]] = field(default_factory=list)  # of events, when optimizers stepped
    parameters: list[str] = field(default_factory=list)  # names; a step's other weights are buffers
    has_buffers_of_first: bool = False  # DDP gives it rank 0's, after they were noted
    trainable: list[str] = field(default_factory=list)  # names of what needs a gradient
    norm_buffers: set[str] = field(default_factory=set)  # of BatchNorm layers
    parts: set[str] = field(default_factory=set)  # parameters of which a layer has a part (DTensor)
    has_clipped: bool = False  # torch's clip_grad_norm_ or clip_grad_value_ was called
    is_coarse: bool = False  # a module computes in bfloat16 or float16
    has_coarse_optimizer: bool = False  # an optimizer does (see formats.py)
    loaders: dict[str, Loader] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # flags that may be batch sizes (argparse)
    has_group: bool = False  # of torch.distributed

    def in_each_step(self, key: str) -> list[int]:
        """The number of events between each step of the optimizer and the next."""
        totals = [count.get(key, 0) for count in self.counts]
        return [after - before for before, after in itertools.pairwise(totals)]

    def per_step(self, key: str) -> int:
        """The number of events in a step; 0 if some steps have none.

        A GradScaler skips steps, so the largest number counts.  A loader that reads ahead gives
        none in the last steps of an epoch: then the total after k steps is k times this, or more.
        """
        counts = self.in_each_step(key)
        if not counts or min(counts):
            return max(counts, default=0)
        totals = [count.get(key, 0) for count in self.counts]
        per_step = min(total // (k + 1) for k, total in enumerate(totals))
        ahead = max(total - (k + 1) * per_step for k, total in enumerate(totals))
        return per_step if any(counts) and ahead <= AHEAD * per_step else 0

    def reads_ahead(self, key: str) -> bool:
        """Whether a loader has read ahead, so that some step took no event from it."""
        return self.per_step(key) > 0 and min(self.in_each_step(key)) == 0


class Alone(NamedTuple):
    """A run in one process: its notes, and what it was given."""

    notes: Notes  # the weights are its own, before it was given the ranks'
    unmatched: list[str]  # weights that the ranks don't have, or not in this shape
    is_joined: bool  # it was given the ranks' batches as one, or has others; else its own were they
    is_mixed: bool  # both in one step
    own_total: int  # examples that it would take itself in the first step; 0: not known
    batches: dict  # what the program got, by key and number, and the random state after it
    is_collated: bool  # of the same examples, a collate_fn makes the same batch again
