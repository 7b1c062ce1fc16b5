"""Which of the program's DataLoaders a batch comes from, and what its sampler says."""

import contextlib
import copy
import weakref
from typing import Any

from torch.utils.data import BatchSampler, Subset, dataloader

from equivalence.batches import random_state, set_random_state


class Loaders:
    """Each has a name: "loader 0" is the first that was asked for a batch."""

    def __init__(self) -> None:
        self.owners: list[weakref.ref] = []  # a loader's sampler, or its iterator
        self.indices: dict[str, list] = {}
        self.lengths: dict[str, int] = {}  # of the data sets to which the indices belong
        self.batch_sizes: dict[str, int] = {}

    def name_of(self, iterator: Any) -> str:
        """A new one takes the name of one that is gone: many programs build one for each epoch."""
        sampler = iterator._index_sampler
        known = [owner() for owner in self.owners]
        for number, owner in enumerate(known):
            if owner is sampler or owner is iterator:
                return f"loader {number}"
        is_list = isinstance(sampler, (list, tuple, range))  # which no weak reference refers to
        own = weakref.ref(iterator if is_list else sampler)
        if None in known:
            number = known.index(None)
            self.owners[number] = own
            return f"loader {number}"
        self.owners.append(own)
        name = f"loader {len(known)}"
        is_stream = iterator._dataset_kind == dataloader._DatasetKind.Iterable  # it never ends
        if not is_stream:
            self.note_epoch(name, sampler, iterator._dataset)
        if type(sampler) is BatchSampler:  # a subclass may split its batches
            self.batch_sizes[name] = sampler.batch_size
        return name

    def note_epoch(self, name: str, sampler: Any, dataset: Any) -> None:
        """Which examples come in it; those of a Subset have the numbers of the whole data set."""
        with contextlib.suppress(Exception):  # whatever classes of the program's own raise
            indices = indices_of(sampler)
            while type(dataset) is Subset:  # as random_split makes them
                indices = [int(dataset.indices[index]) for index in indices]
                dataset = dataset.dataset
            self.lengths[name] = len(dataset)
            self.indices[name] = indices


def indices_of(sampler: Any) -> list:
    """Those of an epoch, if a sampler of torch's can be asked without a trace; else none."""
    state, generators = random_state(), []
    copied = copy.copy(sampler)
    inner = copied
    while inner is not None:
        generator = getattr(inner, "generator", None)
        if generator is not None:
            generators.append((generator, generator.get_state()))
        below = None
        for name in "batch_sampler", "sampler":
            if hasattr(inner, name):
                below = copy.copy(getattr(inner, name))
                setattr(inner, name, below)
                break
        inner = below
    found = []
    with contextlib.suppress(Exception):
        for batch in copied:
            found += batch if isinstance(batch, (list, tuple)) else [batch]
    set_random_state(state)
    for generator, old in generators:
        generator.set_state(old)
    return found
