"""Run A's notes side by side: which ranks have equal batches, weights and gradients."""

import dataclasses
import itertools
from collections import ChainMap
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch

from ddp_by_diff.equivalence import limits, vectors
from ddp_by_diff.equivalence.batches import count_examples, digest
from ddp_by_diff.equivalence.notes import Alone, Event, Loader, Notes, Step, have_one_dataset
from ddp_by_diff.equivalence.vectors import Vector, only, put_together, unequal_names

# What the ranks have:
COPIES = "copies of one model"
PARTS = "parts of one model"
UNCLEAR = "weights that differ from the start: copies, or parts?"
# What can be seen of the gradients; weights can always be seen:
OWN = "each rank's own, and what the optimizers got"
GOT = "only what the optimizers got"
NONE_GOT = "only each rank's own, as the optimizers have parameters of their own"


@dataclasses.dataclass(frozen=True)
class Facts:
    """The ranks' notes, and whether the ranks have COPIES or PARTS of one model, or UNCLEAR.

    Each property is computed once: the runs in one process read it often.
    """

    ranks: list[Notes]
    steps: range  # that are compared
    model: str
    parts: frozenset[str] = frozenset()  # the parameters of which the ranks have parts
    is_collated: bool = True  # of the same examples, a collate_fn makes the same batch again

    @cached_property
    def groups(self) -> list[list[Notes]]:
        """The ranks, in groups with equal batches: these may have parts of one model."""
        groups: dict[str, list[Notes]] = {}
        for rank in self.ranks:
            names, last = {}, rank.counts[-1] if rank.counts else {}
            for key, events in sorted(rank.events.items()):
                names[key] = [self.name_of(key, one) for one in events[: last.get(key, 0)]]
            groups.setdefault(str(names), []).append(rank)
        return list(groups.values())

    def are_collated(self, events: Iterable[Event]) -> bool:
        """Whether the program's own collate_fn has made them, and can make one batch of them."""
        return self.is_collated and all(event.examples for event in events)

    def name_of(self, key: str, event: Event) -> str:
        """A name of a batch; equal contents are no equal examples, if their numbers are known."""
        return digest(event.value) + str(event.indices) * have_one_dataset(self.loaders(key))

    def loaders(self, key: str) -> list[Loader]:
        """The ranks' loaders of this name; an empty one if the key is another one."""
        return [rank.loaders.get(key, Loader()) for rank in self.ranks]

    @cached_property
    def distinct(self) -> list[Notes]:
        """The ranks with different batches: the first one of those with the same."""
        return [group[0] for group in self.groups]

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the events that each step has: "loader 0", "inputs of Net"."""
        return [key for key in self.ranks[0].events if self.per_step(key)]

    def per_step(self, key: str) -> int:
        """The number of a key's events in a step; 0 if some steps have none.

        And if a program without a DataLoader has other numbers on other ranks, as games differ.
        """
        counts = {tuple(rank.in_each_step(key)) for rank in self.ranks}
        return self.ranks[0].per_step(key) * (key.startswith("loader") or len(counts) == 1)

    def events(self, rank: Notes, key: str, step: int) -> list[Event]:
        """A rank's events of one key in a step, also if they were loaded in advance."""
        per_step, first = self.per_step(key), self.ranks[0]
        last = (step + 1) * per_step
        if set(counts := first.in_each_step(key)) != {per_step} and min(counts):
            last = first.counts[step].get(key, 0)  # a GradScaler skipped steps before this one
        return rank.events.get(key, [])[max(0, last - per_step) : last]

    @property
    def unit(self) -> str:
        """What is counted: "examples", or a tensor's "rows", if these may be steps in time."""
        counts = {count_examples(self.ranks[0].events[key][0].value) for key in self.keys}
        return "examples" if self.keys[0].startswith("loader") or len(counts) == 1 else "rows"

    def examples(self, rank: Notes, step: int) -> int:
        """The number of a rank's examples in a step, of the first key: rows, if that is all."""
        counts, events = {}, self.events(rank, self.keys[0], step)
        if rank.steps[step].is_repeated:  # then some are of the step before
            events = events[-rank.counts[0].get(self.keys[0], 0) :]
        for event in events:
            name = self.name_of(self.keys[0], event) if len(events) > 1 else ""
            counts[name] = count_in(event)  # once: LBFGS repeats it
        return sum(counts.values())

    @cached_property
    def totals(self) -> list[int]:
        """The global batches: the number of all ranks' examples in each step."""
        if not self.keys:
            return [1]
        return [sum(self.examples(rank, k) for rank in self.distinct) for k in self.steps]

    @property
    def total(self) -> int:
        return max(self.totals)

    def is_same_job(self, alone: Alone) -> bool:
        """Whether it takes as many as all ranks: then its flags, too, are those of the whole."""
        return not alone.is_joined or alone.own_total in self.totals

    def flags_of_all(self) -> dict[str, int]:
        """The flags with which one process should take the examples of all ranks by itself.

        They are the program's flags for batch sizes that equal a rank's batch, or its examples in a
        step; and they have the global batch's value.
        """
        first, count = self.ranks[0], len(self.distinct)
        taken = {self.examples(first, 0)}
        for key in self.keys:
            taken |= {count_in(event) for event in self.events(first, key, 0)}
        return {flag: size * count for flag, size in first.sizes.items() if size in taken}

    @cached_property
    def is_same_work(self) -> bool:
        """Whether two ranks compute the same: equal inputs, and no parts of one batch."""
        pairs = itertools.combinations(self.groups[0], 2)
        return self.model != PARTS and any(self.do_same_work(*pair) for pair in pairs)

    def do_same_work(self, rank: Notes, other: Notes) -> bool:
        """Whether two ranks do.  With equal inputs, other gradients mean other parts."""
        if any(rank.steps[k].inputs != other.steps[k].inputs for k in self.steps):
            return False
        step, own, other_own = rank.steps[0], rank.steps[0].own, other.steps[0].own
        is_unknown = step.draws or not own or not other_own
        return bool(is_unknown) or vectors.distance(own, other_own) < limits.EQUAL

    @cached_property
    def trained(self) -> set[str]:
        """Names of the parameters that an optimizer has."""
        names: set[str] = set()
        for rank in self.ranks:
            names.update(*(step.options for step in rank.steps[: len(self.steps)]))
        return names

    def comparable_names(self, step: int) -> set[str]:
        """Names of parameters whose copies are equal when their gradients are computed."""
        if step + 1 < self.first_unequal:
            return self.trained
        return self.trained.difference(*(rank.steps[step].late for rank in self.ranks))

    @cached_property
    def first_unequal(self) -> int:
        """The first step, from 0, before which parameters differ; all steps + 1 if none do."""
        last = len(self.steps) + 1
        return next((k for k in range(last) if self.unequal_before(k)), last)

    @property
    def unequal(self) -> list[str]:
        """Names of the parameters that differ before that step."""
        k = self.first_unequal
        return self.unequal_before(k) if k <= len(self.steps) else []

    def unequal_before(self, step: int, is_exact: bool = False) -> list[str]:
        """Names of the parameters whose copies differ: by more than rounding, if gradients do."""
        names, first = [], self.ranks[0].steps[step].weights
        limit = 0.0 if is_exact or self.forced.issuperset(range(step)) else limits.COPIES
        for rank in self.ranks[1:]:
            names += unequal_names(first, rank.steps[step].weights, limit)
        return [name for name in self.ranks[0].parameters if name in set(names) - self.parts]

    @property
    def comparable(self) -> list[int]:
        """The steps that all ranks begin with equal weights."""
        return [k for k in self.steps if k < self.first_unequal]

    @cached_property
    def owns(self) -> list[list[Vector]]:
        """The ranks' own gradients in each step (of ranks that do the same work, only one's).

        [] for each step, if not all were seen in all.
        """
        owns = [[] if self.model == PARTS else self.own_in(k) for k in self.steps]
        return owns if all(owns) else [[] for _ in self.steps]

    def own_in(self, step: int) -> list[Vector]:
        groups = self.groups if self.is_same_work else [[rank] for rank in self.ranks]
        owns = [[only(rank.steps[step].own, self.trained) for rank in group] for group in groups]
        if not all(vectors.are_near(some, limits.EQUAL) for some in owns):  # dropout, say
            owns = [[only(rank.steps[step].own, self.trained)] for rank in self.ranks]
        own = [some[0] for some in owns]
        got = {name for name, one in self.ranks[0].steps[step].got.items() if bool(one.any())}
        return own if all(own) and set().union(*own) >= got else []

    @cached_property
    def gradients(self) -> str:
        """What can be seen of the gradients: OWN, GOT or NONE_GOT."""
        if not all(self.owns):
            return GOT
        return OWN if any(rank.steps[0].got for rank in self.ranks) else NONE_GOT

    @property
    def batch_check(self) -> str:
        """The name of the check `one batch`; another one if local gradients were not seen."""
        return "gradients" if self.gradients == GOT else "one batch"

    @cached_property
    def forced(self) -> set[int]:
        """The steps in which all optimizers got equal gradients, once: one process's gets them."""
        steps: set[int] = set()
        for k in self.steps if not any(step.is_repeated for step in self.ranks[0].steps) else []:
            first, *others = [rank.steps[k].got for rank in self.ranks]
            are_equal = not any(set(unequal_names(first, one)) - self.parts for one in others)
            if are_equal and any((first, *others)):
                steps.add(k)
        return steps

    @property
    def are_forced(self) -> bool:
        """Whether all steps are."""
        return self.forced == set(self.steps)

    @property
    def kinds(self) -> set[str]:
        """The kinds of layers that train: "BatchNorm", "dropout"."""
        return set().union(*(step.kinds for rank in self.ranks for step in rank.steps))

    @property
    def is_coarse(self) -> bool:
        return any(rank.is_coarse for rank in self.ranks)

    @property
    def rounding_limit(self) -> float:
        """The largest difference that can be rounding."""
        return limits.MOST_COARSE if self.is_coarse else limits.MOST

    def whole(self, what: str, name: str, step: int, shape: torch.Size) -> torch.Tensor | None:
        """A tensor of the ranks' "weights" or "got", put together if they have parts of it."""
        for ranks in self.groups[0], self.ranks:
            parts = [getattr(rank.steps[step], what).get(name) for rank in ranks]
            # Ranks that share a batch and a part of the model have equal ones.
            different = {digest(part): part for part in parts if part is not None}
            for some in parts, list(different.values()):
                if (tensor := put_together(some, shape)) is not None:
                    return tensor
        return None


def count_in(event: Event) -> int:
    """The number of a batch's examples: rows, if that is all that is known."""
    return len(event.examples or event.indices) or count_examples(event.value)


def facts_of(ranks: list[Notes], length: int, known: Facts | None = None) -> Facts:
    """The facts of these ranks.  known: facts of an earlier run with the same model."""
    completed = [complete(step) for step in zip(*[rank.steps for rank in ranks], strict=False)]
    pairs = zip(ranks, zip(*completed, strict=True), strict=True)
    ranks = [dataclasses.replace(rank, steps=list(steps)) for rank, steps in pairs]
    if known:
        return dataclasses.replace(known, ranks=ranks)
    parts = frozenset().union(*(rank.parts for rank in ranks), names_with_other_shapes(ranks))
    facts = Facts(ranks, range(length), PARTS if parts else COPIES, parts)
    return dataclasses.replace(facts, model=UNCLEAR) if facts.first_unequal == 0 else facts


def names_with_other_shapes(ranks: list[Notes]) -> set[str]:
    """Names of the parameters whose shapes differ, or that some ranks lack."""
    shapes: list[set] = []
    for rank in ranks:
        shapes.append({(name, one.shape) for name, one in rank.steps[0].weights.items()})
    names = {name for name, _ in set.union(*shapes) - set.intersection(*shapes)}
    return names & set().union(*(rank.parameters for rank in ranks))


def copies_or_parts(facts: Facts, alone: Alone) -> Facts:
    """Facts that say, from a run in one process, whether weights that differ are parts."""
    others = names_with_other_shapes([facts.ranks[0], alone.notes])
    parts = facts.parts | others.intersection(alone.notes.parameters)
    if not parts:
        return dataclasses.replace(facts, model=COPIES)
    return dataclasses.replace(facts, model=UNCLEAR if alone.unmatched else PARTS, parts=parts)


def complete(ranks: tuple[Step, ...]) -> list[Step]:
    """A step of all ranks; a gradient that only one rank's optimizer got (ZeRO) is on all ranks."""
    completed, stepped = [], set().union(*(rank.options for rank in ranks))
    for rank in ranks:
        others = rank.weights.keys() - rank.options.keys()
        received: dict[str, Any] = {"own": only(rank.own, stepped)}  # others come later, or never
        for kind in "got", "unclipped":
            every = dict(ChainMap(*(getattr(owner, kind) for owner in ranks)))
            received[kind] = only(every, others) | getattr(rank, kind)
        completed.append(dataclasses.replace(rank, **received))
    return completed
