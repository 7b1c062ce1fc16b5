"""The notes of run A side by side: whose batches, weights and gradients are equal."""

import contextlib

import torch
from instruments.tensors import digest, tensors_in

from equivalence import vectors
from equivalence.batches import count_examples
from equivalence.notes import Event, Notes, Step
from equivalence.vectors import Vector


class Facts:
    def __init__(self, ranks: list[Notes], steps: int) -> None:
        self.ranks, self.steps = ranks, range(steps)
        batches = [batches_of(rank) for rank in ranks]
        pairs = list(zip(ranks, batches, strict=True))
        # Those that have rank 0's batches may have parts of one model.
        self.peers = [rank for rank, own in pairs if own == batches[0]]
        self.distinct = [rank for k, (rank, own) in enumerate(pairs) if own not in batches[:k]]
        self.keys = [key for key in ranks[0].events if self.rate(key)]
        for step in zip(*[rank.steps[:steps] for rank in ranks], strict=True):
            complete(step)
        self.trained: set[str] = set()  # parameters that an optimizer has
        for rank in ranks:
            for step in rank.steps[:steps]:
                self.trained |= set(step.options)
        self.first_unequal, self.unequal = self.different_copies()
        self.has_parts = self.are_parts()
        self.may_have_parts = False  # of one model, in an unknown way
        self.is_coarse = any(rank.is_coarse for rank in ranks)
        # The number format whose last digit rounds.
        self.digit = torch.bfloat16 if self.is_coarse else torch.float32
        self.is_repeated = any(step.is_repeated for step in ranks[0].steps)
        # These look at all gradients, so each is made once; the runs in one process ask often.
        self.owns = [self.find_own(k) for k in self.steps]
        self.have_equal_got = [self.is_got_equal(k) for k in self.steps]

    # --------------------------------------------------------------------------------- examples

    def rate(self, key: str) -> int:
        """Batches from there in a step; the largest number, if a GradScaler has skipped steps.

        0 if some steps load none.
        """
        rates = [self.ranks[0].rate(key, k) for k in self.steps]
        return max(rates) if min(rates) else 0

    def events(self, rank: Notes, key: str, step: int) -> list[Event]:
        """Those of a step; if some were loaded in advance, those that came in its place."""
        rate, first = self.rate(key), self.ranks[0]
        last = (step + 1) * rate
        if any(first.rate(key, k) != rate for k in self.steps):
            last = first.counts[step].get(key, 0)  # skipped steps come first
        return rank.events.get(key, [])[max(0, last - rate) : last]

    def examples(self, rank: Notes, step: int) -> int:
        """How many it has, of the first loader: rows, if no better is known."""
        count = 0
        for event in self.events(rank, self.keys[0], step):
            count += len(event.examples or event.indices) or count_examples(event.value)
        return count

    def total(self) -> int:
        """All ranks' examples in a step."""
        if not self.keys:
            return 1
        return max(sum(self.examples(rank, k) for rank in self.distinct) for k in self.steps)

    def chosen(self, step: int) -> int:
        """Which has the smallest batches, that become longest; if all are alike, another each."""
        sizes = []
        step = min(step, len(self.steps) - 1)
        for place, rank in enumerate(self.distinct):
            values = []
            for key in self.keys:
                values += [event.value for event in self.events(rank, key, step)]
            size = sum(tensor.numel() for tensor in tensors_in(values))
            sizes.append((size, (place - step) % len(self.distinct)))
        return sizes.index(min(sizes))

    def is_same_work(self) -> bool:
        """Whether ranks' models get the same, and not parts of one batch."""
        if len(self.ranks) == len(self.distinct) or self.has_parts:
            return False
        inputs = set()
        for rank in self.peers:
            inputs.add(tuple(step.inputs for step in rank.steps[: len(self.steps)]))
        return len(inputs) < len(self.peers)

    # ----------------------------------------------------------------------- weights, gradients

    def different_copies(self) -> tuple[int, list[str]]:
        """Before which step parameters differ first, and which; all steps + 1 if none do."""
        for k in range(len(self.steps) + 1):
            names: list[str] = []
            for rank in self.ranks[1:]:
                names += unequal(self.ranks[0].steps[k].weights, rank.steps[k].weights)
            names = [name for name in self.ranks[0].parameters if name in names]
            if names:
                return k, names
        return len(self.steps) + 1, []

    def are_parts(self) -> bool:
        """Whether ranks that have the same batches hold different tensors of one model."""
        shapes = []
        for rank in self.peers:
            weights = rank.steps[0].weights
            some = [name for name in rank.parameters if name in weights]
            shapes.append({name: weights[name].shape for name in some})
        return any(shapes_of_rank != shapes[0] for shapes_of_rank in shapes[1:])

    def comparable(self) -> list[int]:
        """The steps that all ranks begin with equal weights."""
        return [k for k in self.steps if k < self.first_unequal or self.has_parts]

    def own(self, step: int) -> list[Vector]:
        """The own gradients of each rank that does work of its own; [] if they were not seen."""
        return [] if self.has_parts else self.owns[step]

    def find_own(self, step: int) -> list[Vector]:
        ranks = self.distinct if self.is_same_work() else self.ranks
        own = [vectors.only(rank.steps[step].own, self.trained) for rank in ranks]
        got = {name for name, tensor in ranks[0].steps[step].got.items() if bool(tensor.any())}
        return own if all(own) and set().union(*own) >= got else []

    def are_own_seen(self) -> bool:
        return all(self.own(k) for k in self.steps)

    def is_forced(self, step: int) -> bool:
        """Whether one process's optimizer can be given what the processes' got in this step."""
        if self.is_repeated or not any(rank.steps[step].got for rank in self.ranks):
            return False
        return self.has_parts or self.have_equal_got[step]

    def is_got_equal(self, step: int) -> bool:
        first, *others = [rank.steps[step].got for rank in self.ranks]
        return not any(unequal(first, other) for other in others)

    def kinds(self) -> set[str]:
        """Of layers that train."""
        return set().union(*(rank.kinds for rank in self.ranks))

    def infinite(self) -> str:
        for k in self.steps:
            for rank in self.ranks:
                got = rank.steps[k].got.values()
                if not all(bool(gradient.isfinite().all()) for gradient in got):
                    return f"infinite or NaN in step {k + 1} on rank {rank.rank}"
        return ""


def complete(ranks: tuple[Step, ...]) -> None:
    """Where optimizers share out the parameters, the others get what the owner's has made."""
    for owner in ranks:
        for rank in ranks:
            for name in owner.got:
                if name not in rank.options and name in rank.weights:
                    rank.got.setdefault(name, owner.got[name])
                    if name in owner.unclipped:
                        rank.unclipped.setdefault(name, owner.unclipped[name])


def batches_of(rank: Notes) -> tuple:
    """Digests of what came in, in the steps that are compared."""
    digests = []
    for key, events in rank.events.items():
        last = rank.counts[-1].get(key, 0) if rank.counts else 0
        digests.append((key, *[digest(event.value) for event in events[:last]]))
    return tuple(digests)


def unequal(vector: Vector, other: Vector) -> list[str]:
    """The names of tensors that differ."""
    return [name for name in vector if name in other and not are_equal(vector[name], other[name])]


def are_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.shape == other.shape and (tensor.equal(other) or digest(tensor) == digest(other))


def together(parts: list, shape: torch.Size) -> torch.Tensor | None:
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
