"""What comes into the program: batches of its DataLoaders, a model's inputs, a loss's targets."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from distributed import unwrap_model
from instruments.hooks import Observer
from instruments.tensors import digest, tensors_in
from torch import nn
from torch.utils import data as torch_data
from torch.utils.data import Subset, dataloader
from torch.utils.data._utils import collate, fetch

from equivalence.batches import plain_copy, to_plain
from equivalence.limits import LARGEST_EPOCH
from equivalence.notes import (
    Event,
    Notes,
    RandomState,
    digest_of_ends,
    random_state,
    set_random_state,
)

IN_TURN = (torch_data.SequentialSampler, torch_data.DistributedSampler)  # they draw nothing
KEPT = "equivalence: a batch, and its examples"  # a class of ours could not be sent
TORCHS_COLLATE = (collate.default_collate, collate.default_convert)
LOSSES = [name for name in dir(F) if name.endswith("_loss") or name in ("cross_entropy", "kl_div")]
LOSSES += ["binary_cross_entropy", "binary_cross_entropy_with_logits"]


class Data(Observer):
    """Notes each batch with its examples; what the models are called with; what a step draws."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps
        self.loaders = Loaders(steps.noted)
        self.has_taught = False  # a model was called without gradients, since this step began
        self.known_state: RandomState | None = None  # in this step, at its last batch
        steps.at_new_step.append(self.new_step)

    def new_step(self) -> None:
        self.has_taught, self.known_state = False, None

    def patches(self) -> list[tuple[Any, str, Callable]]:
        loaders = self.loaders
        patches = [
            (dataloader._BaseDataLoaderIter, "_next_index", loaders.draw),
            (fetch._MapDatasetFetcher, "fetch", loaders.fetch),
            (fetch._IterableDatasetFetcher, "fetch", loaders.fetch),
            (dataloader._SingleProcessDataLoaderIter, "_next_data", loaders.unpack),
            (dataloader._MultiProcessingDataLoaderIter, "_next_data", loaders.unpack),
        ]
        return patches + [(F, name, functools.partial(self.loss, name)) for name in LOSSES]

    def note_draws(self) -> None:
        """Since data came in last, in this step."""
        if self.known_state is not None:
            self.steps.step.draws |= random_state().other_than(self.known_state)

    def came(self, key: str, value: Any, iterator: Any = None) -> Any:
        """Data come into the program, perhaps from a loader's iterator; returns what it gets."""
        self.steps.seen[key] += 1
        examples = self.loaders.examples if iterator is not None else None
        indices = self.loaders.indices_of(iterator) if iterator is not None else ()
        given = None
        if self.steps.source:
            number, step = self.steps.seen[key] - 1, len(self.steps.noted.steps)
            given = self.steps.source.batch(key, number, step, value, iterator, examples)
        if given is not None:
            value, self.known_state = given
            set_random_state(self.known_state)
            return value
        self.known_state = random_state()
        event = Event(to_plain(value), self.known_state, examples, indices=indices)
        event = event._replace(round=self.loaders.rounds.get(key, 0))
        self.steps.noted.events.setdefault(key, []).append(event)
        return value

    def load(self, iterator: Any, original: Callable) -> Any:
        if not torch.is_grad_enabled():
            return original()
        key = self.loaders.name_of(iterator)
        self.note_draws()
        batch = original()
        return self.came(key, batch, iterator)

    def loss(self, name: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Without a DataLoader the targets come in here."""
        hooks = self.hooks
        is_inside = hooks.inside and hooks.inside[-1].what != "optimizer"
        is_other = is_inside or hooks.is_elsewhere() or not torch.is_grad_enabled()
        if self.steps.has_loader or is_other:
            return original(*args, **kwargs)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        is_computed = isinstance(target, torch.Tensor) and target.is_floating_point()
        if target is None or (self.has_taught and is_computed):  # perhaps by a teacher
            return original(*args, **kwargs)
        self.note_draws()
        target = self.came(f"target of {name}", target)
        if "target" in kwargs:
            return original(*args, **{**kwargs, "target": target})
        return original(args[0], target, *args[2:], **kwargs)

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        if self.hooks.is_in("backward"):
            return None
        if not torch.is_grad_enabled():
            self.has_taught = True
            return None
        replaced = None
        tensors = list(tensors_in((args, kwargs)))
        is_data = bool(tensors) and not any(tensor.requires_grad for tensor in tensors)
        if not self.steps.has_loader and is_data:  # and not what another model has computed
            self.note_draws()
            name = f"inputs of {type(unwrap_model(module)).__name__}"
            replaced, new_kwargs = self.came(name, (args, dict(kwargs)))
            kwargs.update(new_kwargs)
        self.steps.step.inputs += digest((replaced or args, dict(kwargs)))
        return replaced

    def gradients_are_there(self, optimizer: Any, is_again: bool) -> None:
        if not is_again:
            self.note_draws()

    def notes(self, is_own_thread: bool) -> None:
        if is_own_thread:
            self.steps.noted.ends = self.loaders.ends()


class Loaders:
    """Each has a name: "loader 0" is the first that was asked for a batch."""

    def __init__(self, noted: Notes) -> None:
        self.noted = noted
        self.owners: list[weakref.ref] = []  # a loader's sampler, or its iterator
        self.rounds: dict[str, int] = {}
        self.datasets: dict[str, Any] = {}
        self.names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of iterators
        self.waiting: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # indices drawn
        self.examples: list | None = None  # of the last batch, if its collate_fn is not torch's

    def name_of(self, iterator: Any) -> str:
        """A new one takes the name of one that is gone: many programs build one for each epoch."""
        if iterator in self.names:
            return self.names[iterator]
        sampler = iterator._index_sampler
        is_list = isinstance(sampler, (list, tuple, range))  # which no weak reference refers to
        own = iterator if is_list else sampler
        known = [owner() for owner in self.owners]
        same = [number for number, owner in enumerate(known) if owner is own]
        gone = [number for number, owner in enumerate(known) if owner is None]
        number = [*same, *gone, len(known)][0]
        self.owners[number : number + 1] = [weakref.ref(own)]
        name = f"loader {number}"
        self.rounds[name] = self.rounds.get(name, 0) + 1
        self.names[iterator] = name
        if name not in self.datasets:
            self.datasets[name] = iterator._dataset
            self.noted.batch_sizes[name] = getattr(sampler, "batch_size", None) or 0
            self.noted.epochs[name] = epoch_of(iterator)
        inner = getattr(sampler, "sampler", None)
        if getattr(inner, "replacement", False):
            self.noted.redraws.add(name)
        return name

    def ends(self) -> dict[str, str]:
        """Of each data set, to know whether ranks have the same one.  The program is over."""
        digests = {}
        for name, dataset in self.datasets.items():
            whole, _ = in_whole(dataset, [])
            digests[name] = digest_of_ends(whole) if self.noted.epochs[name] else ""
        return digests

    def draw(self, original: Callable, iterator: Any) -> Any:
        """The indices of a batch, perhaps in advance."""
        indices = original(iterator)
        if iterator._dataset_kind == dataloader._DatasetKind.Map and isinstance(indices, list):
            _, drawn = in_whole(iterator._dataset, indices)
            self.waiting.setdefault(iterator, []).append(drawn)
        return indices

    def indices_of(self, iterator: Any) -> tuple:
        """Of the batch that was just loaded."""
        waiting = self.waiting.get(iterator)
        return tuple(waiting.pop(0)) if waiting else ()

    def fetch(self, original: Callable, fetcher: Any, index: Any) -> Any:
        """Keep the examples from which the program's own collate_fn makes a batch.

        This may be in a worker process, which was forked from the one that notes.
        """
        own = fetcher.collate_fn
        if own in TORCHS_COLLATE or not fetcher.auto_collation:
            return original(fetcher, index)
        kept: list | None = None

        def keep(examples: list) -> Any:
            nonlocal kept
            is_each = type(examples) is list and len(examples) == len(index)  # or __getitems__'s
            kept = plain_copy(examples) if is_each else None
            state = random_state()
            batch = own(examples)
            if random_state().other_than(state):
                kept = None  # from the same examples it makes another batch each time
            return batch

        fetcher.collate_fn = keep
        try:
            batch = original(fetcher, index)
        finally:
            fetcher.collate_fn = own
        return batch if kept is None else (KEPT, batch, kept)

    def unpack(self, original: Callable, iterator: Any) -> Any:
        """What the program gets of it."""
        batch = original(iterator)
        self.examples = None
        if type(batch) is tuple and batch and isinstance(batch[0], str) and batch[0] == KEPT:
            _, batch, self.examples = batch
        return batch


def in_whole(dataset: Any, indices: list) -> tuple[Any, list]:
    """The whole data set, if this is a Subset, and the indices' numbers in it."""
    while type(dataset) is Subset:  # as random_split makes them
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    return dataset, [int(index) for index in indices if isinstance(index, int)]


def epoch_of(iterator: Any) -> list:
    """All indices of an epoch, if the sampler is torch's own and draws nothing; else []."""
    sampler = getattr(iterator._index_sampler, "sampler", None)
    if type(sampler) is torch_data.RandomSampler and not sampler.replacement:
        sampler = torch_data.SequentialSampler(sampler.data_source)  # the same, in order
    is_own = type(iterator._index_sampler) is torch_data.BatchSampler and type(sampler) in IN_TURN
    if not is_own or len(sampler) > LARGEST_EPOCH:
        return []
    return in_whole(iterator._dataset, list(sampler))[1]
