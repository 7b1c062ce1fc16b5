"""DataLoaders of the program: which of them a batch comes from, and which examples are in it."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils import data as torch_data
from torch.utils.data import ConcatDataset, Subset, dataloader
from torch.utils.data._utils import collate, fetch

from ddp_by_diff.equivalence import notes
from ddp_by_diff.equivalence.batches import plain_copy
from ddp_by_diff.equivalence.notes import Loader, draws, pick_in_a_child, pick_some

FIXED = (torch_data.SequentialSampler, torch_data.DistributedSampler)  # order known without a draw
KEPT = "equivalence: a batch, and its examples"  # a class of ours could not be sent
TORCHS_COLLATE = (collate.default_collate, collate.default_convert)


class Loaders:
    """Names of the program's DataLoaders ("loader 0" gave the first batch), and their examples."""

    def __init__(self, loaders: dict[str, Loader], looks: bool = True) -> None:
        """loaders: by name, which are noted here.  looks: into their data sets, too."""
        self.loaders, self.looks = loaders, looks
        self.owners: list[weakref.ref] = []  # a loader's sampler, or its iterator
        self.rounds: dict[str, int] = {}
        self.datasets: dict[str, Any] = {}
        self.names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of iterators
        self.waiting: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # indices drawn
        self.examples: list | None = None  # of the last batch, if its collate_fn is not torch's

    def patches(self) -> list[tuple[Any, str, Callable]]:
        return [
            (dataloader._BaseDataLoaderIter, "_next_index", self.draw),
            (fetch._MapDatasetFetcher, "fetch", self.fetch),
            (fetch._IterableDatasetFetcher, "fetch", self.fetch),
            (dataloader._SingleProcessDataLoaderIter, "_next_data", self.unpack),
            (dataloader._MultiProcessingDataLoaderIter, "_next_data", self.unpack),
        ]

    def name_of(self, iterator: Any) -> str:
        """The loader's name; one that is made anew for an epoch has the name of the one before."""
        if iterator in self.names:
            return self.names[iterator]
        sampler = iterator._index_sampler
        # No weak reference refers to a list.
        own = iterator if isinstance(sampler, (list, tuple, range)) else sampler
        known = [owner() for owner in self.owners]
        same = [number for number, owner in enumerate(known) if owner is own]
        noted = loader_of(iterator)
        gone = [number for number, owner in enumerate(known) if owner is None]
        again = [number for number in gone if self.reads(number, iterator._dataset, noted)]
        again.sort(key=lambda number: self.datasets[f"loader {number}"] is not iterator._dataset)
        number = [*same, *again, len(known)][0]
        self.owners[number : number + 1] = [weakref.ref(own)]
        name = f"loader {number}"
        self.rounds[name] = self.rounds.get(name, 0) + 1
        self.names[iterator] = name
        if name not in self.datasets:
            self.datasets[name] = iterator._dataset
            self.loaders[name] = noted
            if self.looks and noted.length:
                noted.begun = pick_in_a_child(without_subsets(iterator._dataset, [])[0])
        return name

    def reads(self, number: int, dataset: Any, noted: Loader) -> bool:
        """Whether the loader of this number reads such a data set, too."""
        name = f"loader {number}"
        other, is_alike = self.loaders[name], type(self.datasets[name]) is type(dataset)
        return is_alike and (other.length, other.pool) == (noted.length, noted.pool)

    def look_into_data(self) -> None:
        """Note a few examples of each data set; called when the program is over."""
        for name, dataset in self.datasets.items():
            loader, (whole, _) = self.loaders[name], without_subsets(dataset, [])
            if self.looks and loader.length and type(whole) is not ConcatDataset:
                loader.picks = pick_some(whole)
                if draws(whole, loader.picks):  # then numbers say nothing
                    loader.redraws, loader.picks = True, {}

    def draw(self, original: Callable, iterator: Any) -> Any:
        """Note the indices of a batch, which may be loaded later."""
        indices = original(iterator)
        if iterator._dataset_kind == dataloader._DatasetKind.Map and isinstance(indices, list):
            _, drawn = without_subsets(iterator._dataset, indices)
            self.waiting.setdefault(iterator, []).append(drawn)
        return indices

    def indices_of(self, iterator: Any) -> tuple:
        """The numbers of the examples in the batch that was just loaded."""
        waiting = self.waiting.get(iterator)
        return tuple(waiting.pop(0)) if waiting else ()

    def fetch(self, original: Callable, fetcher: Any, index: Any) -> Any:
        """Fetch a batch, and copies of its examples, if the program's own collate_fn joins them.

        This may run in a worker process, which was forked from the one that notes.
        """
        own = fetcher.collate_fn
        if own in TORCHS_COLLATE or not fetcher.auto_collation:
            return original(fetcher, index)
        kept: list | None = None

        def keep(examples: list) -> Any:
            nonlocal kept
            is_each = type(examples) is list and len(examples) == len(index)  # or __getitems__'s
            kept = plain_copy(examples) if is_each else None
            state = notes.random_state()
            batch = own(examples)
            if notes.drawn_between(state, notes.random_state()):
                kept = None  # from the same examples it makes another batch each time
            return batch

        fetcher.collate_fn = keep
        try:
            batch = original(fetcher, index)
        finally:
            fetcher.collate_fn = own
        return batch if kept is None else (KEPT, batch, kept)

    def unpack(self, original: Callable, iterator: Any) -> Any:
        """The batch as the program gets it; its examples, if `fetch` has sent them, are noted."""
        batch, self.examples = original(iterator), None
        # Before torch 2.14 pin_memory makes a list of a tuple.
        first = batch[0] if type(batch) in (tuple, list) and batch else None
        if isinstance(first, str) and first == KEPT:
            _, batch, self.examples = batch
        return batch


def without_subsets(dataset: Any, indices: list) -> tuple[Any, list]:
    """The whole data set of a Subset, and the indices in the whole one.

    Of a ConcatDataset none: its parts may be any part of other data.
    """
    while type(dataset) is Subset:  # as random_split makes them
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        return dataset, []
    return dataset, [int(index) for index in indices if isinstance(index, int)]


def loader_of(iterator: Any) -> Loader:
    """What is known of a loader when its first epoch begins."""
    batches, dataset = iterator._index_sampler, iterator._dataset
    sampler: Any = getattr(batches, "sampler", None)
    noted = Loader(redraws=bool(getattr(sampler, "replacement", False)))
    noted.drops = getattr(batches, "drop_last", True)
    if isinstance(sampler, torch_data.DistributedSampler):
        place = f"rank {sampler.rank} of {sampler.num_replicas}"
        noted.sampler = f"{place}, seed {sampler.seed}, epoch {sampler.epoch}"
    if isinstance(dataset, torch_data.IterableDataset):
        return noted
    whole, _ = without_subsets(dataset, [])
    with contextlib.suppress(TypeError, NotImplementedError):  # it has no length
        noted.length = len(whole)
    if dataset is not whole:
        _, noted.pool = without_subsets(dataset, list(range(len(dataset))))
    if type(sampler) is torch_data.RandomSampler and not sampler.replacement:
        sampler = torch_data.SequentialSampler(sampler.data_source)  # the same, in order
    is_ours = type(sampler).__name__ == "_Sampler" and not getattr(sampler, "skip", True)
    noted.is_known = type(batches) is torch_data.BatchSampler and type(sampler) in FIXED
    if noted.is_known or is_ours:
        # torch's own __iter__, as that of distributed.py counts the passes.
        order = torch_data.DistributedSampler.__iter__(sampler) if is_ours else sampler or ()
        _, noted.epoch = without_subsets(dataset, list(order))
    return noted
