"""The notes of run A side by side: whose batches, weights and gradients are equal."""

import dataclasses
import itertools
from functools import cached_property

import torch
from instruments.tensors import digest, tensors_in

from equivalence import limits, vectors
from equivalence.batches import count_examples
from equivalence.notes import Event, Notes
from equivalence.vectors import Vector, together, unequal

# What the ranks have:
COPIES = "copies of one model"
PARTS = "parts of one model"
UNKNOWN = "weights that differ from the start: copies, or parts?"
# What can be seen of the gradients; weights can always be seen:
OWN = "each rank's own, and what the optimizers got"
GOT = "only what the optimizers got"
NONE_GOT = "only each rank's own, as the optimizers have parameters of their own"


@dataclasses.dataclass(frozen=True)
class Facts:
    """The ranks' notes, and what they have: COPIES, PARTS, or UNKNOWN.

    What is asked of them is computed once: the runs in one process ask often.
    """

    ranks: list[Notes]
    steps: range  # that are compared
    model: str
    parts: frozenset[str] = frozenset()  # the parameters of which the ranks have parts

    # --------------------------------------------------------------------------------- examples

    @cached_property
    def batches(self) -> list[tuple]:
        return [batches_of(rank) for rank in self.ranks]

    @cached_property
    def peers(self) -> list[Notes]:
        """The ranks that have rank 0's batches: they may have parts of one model."""
        pairs = zip(self.ranks, self.batches, strict=True)
        return [rank for rank, own in pairs if own == self.batches[0]]

    @cached_property
    def distinct(self) -> list[Notes]:
        """One rank for each share of the batches."""
        pairs = enumerate(zip(self.ranks, self.batches, strict=True))
        return [rank for k, (rank, own) in pairs if own not in self.batches[:k]]

    @cached_property
    def keys(self) -> list[str]:
        """Where each step's batches come from."""
        return [key for key in self.ranks[0].events if self.rate(key)]

    def rate(self, key: str) -> int:
        """Batches from there in a step; 0 if not each step takes one."""
        return self.ranks[0].rate(key)

    def events(self, rank: Notes, key: str, step: int) -> list[Event]:
        """A step's events; if some were loaded in advance, the events in its place."""
        rate, first = self.rate(key), self.ranks[0]
        last = (step + 1) * rate
        if set(rates := first.rates(key)) != {rate} and min(rates):
            last = first.counts[step].get(key, 0)  # skipped steps come first
        return rank.events.get(key, [])[max(0, last - rate) : last]

    def examples(self, rank: Notes, step: int) -> int:
        """How many it has, of the first loader: rows, if no better is known."""
        count = 0
        for event in self.events(rank, self.keys[0], step):
            count += len(event.examples or event.indices) or count_examples(event.value)
        return count

    @cached_property
    def total(self) -> int:
        """All ranks' examples in a step."""
        if not self.keys:
            return 1
        return max(sum(self.examples(rank, k) for rank in self.distinct) for k in self.steps)

    def chosen(self, step: int, turn: int) -> int:
        """A rank: that with the smallest batches first, as padding changes it most; if all are
        equal, a different one in each step.  turn: the next smallest, until each had its turn."""
        sizes = []
        step = min(step, len(self.steps) - 1)
        for place, rank in enumerate(self.distinct):
            values = []
            for key in self.keys:
                values += [event.value for event in self.events(rank, key, step)]
            size = sum(tensor.numel() for tensor in tensors_in(values))
            sizes.append((size, (place - step) % len(self.distinct)))
        return sizes.index(sorted(sizes)[turn])

    @cached_property
    def is_same_work(self) -> bool:
        """Whether ranks' models get the same, and not parts of one batch."""
        if self.model == PARTS:
            return False
        works: list[tuple] = []  # the inputs of models, and the gradients of the first step
        for rank in self.peers:
            inputs = [step.inputs for step in rank.steps[: len(self.steps)]]
            works.append((inputs, rank.steps[0].own, rank.steps[0].draws))
        return any(is_same(one, other) for one, other in itertools.combinations(works, 2))

    # ----------------------------------------------------------------------- weights, gradients

    @cached_property
    def trained(self) -> set[str]:
        """Parameters that an optimizer has."""
        names: set[str] = set()
        for rank in self.ranks:
            for step in rank.steps[: len(self.steps)]:
                names |= set(step.options)
        return names

    def comparable_names(self, step: int) -> set[str]:
        """Parameters whose gradients need only equal weights: copies may differ after a step."""
        if step + 1 < self.first_unequal:
            return self.trained
        return self.trained.difference(*(rank.steps[step].late for rank in self.ranks))

    @cached_property
    def first_unequal(self) -> int:
        """Before which step parameters differ first; all steps + 1 if none do."""
        for k in range(len(self.steps) + 1):
            if self.unequal_before(k):
                return k
        return len(self.steps) + 1

    @property
    def unequal(self) -> list[str]:
        """Which of them."""
        k = self.first_unequal
        return self.unequal_before(k) if k <= len(self.steps) else []

    def unequal_before(self, step: int) -> list[str]:
        names: list[str] = []
        for rank in self.ranks[1:]:
            names += unequal(self.ranks[0].steps[step].weights, rank.steps[step].weights)
        return [name for name in self.ranks[0].parameters if name in set(names) - self.parts]

    @property
    def comparable(self) -> list[int]:
        """The steps that all ranks begin with equal weights."""
        return [k for k in self.steps if k < self.first_unequal]

    @cached_property
    def owns(self) -> list[list[Vector]]:
        """In each step the own gradients of each rank that does work of its own.

        [] if they were not seen.
        """
        if self.model == PARTS:
            return [[] for _ in self.steps]
        return [self.own_in(k) for k in self.steps]

    def own_in(self, step: int) -> list[Vector]:
        ranks = self.distinct if self.is_same_work else self.ranks
        own = [vectors.only(rank.steps[step].own, self.trained) for rank in ranks]
        got = {name for name, tensor in ranks[0].steps[step].got.items() if bool(tensor.any())}
        return own if all(own) and set().union(*own) >= got else []

    @cached_property
    def gradients(self) -> str:
        """What can be seen of them: OWN, GOT or NONE_GOT."""
        if not all(self.owns):
            return GOT
        return OWN if any(rank.steps[0].got for rank in self.ranks) else NONE_GOT

    def is_forced(self, step: int) -> bool:
        """Whether one process's optimizer can be given what the processes' got in this step."""
        is_repeated = any(step.is_repeated for step in self.ranks[0].steps)
        if is_repeated or not any(rank.steps[step].got for rank in self.ranks):
            return False
        return self.have_equal_got[step]

    @cached_property
    def have_equal_got(self) -> list[bool]:
        """Whether all ranks' optimizers got the same, in each step."""
        are_equal = []
        for k in self.steps:
            first, *others = [rank.steps[k].got for rank in self.ranks]
            are_equal.append(not any(set(unequal(first, one)) - self.parts for one in others))
        return are_equal

    @property
    def is_free(self) -> bool:
        """Whether one process's optimizer can be given nothing in any step."""
        return not any(self.is_forced(k) for k in self.steps)

    @property
    def kinds(self) -> set[str]:
        """Kinds of layers that train."""
        return set().union(*(rank.kinds for rank in self.ranks))

    @property
    def is_coarse(self) -> bool:
        return any(rank.is_coarse for rank in self.ranks)

    @property
    def most(self) -> float:
        """No larger difference is rounding."""
        return limits.MOST_COARSE if self.is_coarse else limits.MOST

    @property
    def digit(self) -> torch.dtype:
        """The number format whose last digit rounds."""
        return torch.bfloat16 if self.is_coarse else torch.float32

    def whole(self, what: str, name: str, step: int, shape: torch.Size) -> torch.Tensor | None:
        """What the ranks had ("weights" or "got"); put together, if they have parts of it."""
        for ranks in self.peers, self.ranks:
            parts = [getattr(rank.steps[step], what).get(name) for rank in ranks]
            for some in parts, without_repeated(parts):
                if (tensor := together(some, shape)) is not None:
                    return tensor
        return None


def is_same(work: tuple, other: tuple) -> bool:
    """Whether two ranks do the same: their gradients tell who takes a part of equal inputs."""
    (inputs, own, draws), (other_inputs, other_own, _) = work, other
    if inputs != other_inputs or draws or not own or not other_own:
        return inputs == other_inputs
    return vectors.distance(own, other_own) < limits.OWN


def without_repeated(tensors: list) -> list:
    """Ranks that share a batch and a part of the model have the same."""
    return list({digest(tensor): tensor for tensor in tensors if tensor is not None}.values())


def batches_of(rank: Notes) -> tuple:
    """Digests of what came in, in the steps that are compared."""
    digests = []
    for key, events in rank.events.items():
        last = rank.counts[-1].get(key, 0) if rank.counts else 0
        digests.append((key, *[digest(event.value) for event in events[:last]]))
    return tuple(digests)
