"""Copies or parts: which of them the ranks have is decided before any question is asked."""

import dataclasses
from collections import ChainMap

from ddp_by_diff.equivalence.facts import COPIES, PARTS, UNCLEAR, Facts
from ddp_by_diff.equivalence.notes import Alone, Notes, Step
from ddp_by_diff.equivalence.vectors import only
from ddp_by_diff.equivalence.verdict import Reason

INFINITE = "torch.autograd.set_detect_anomaly(True), in a copy, names the line of the program"


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
    shapes = []
    for rank in ranks:
        shapes.append({(name, one.shape) for name, one in rank.steps[0].weights.items()})
    names = {name for name, _ in set.union(*shapes) - set.intersection(*shapes)}
    return names & set().union(*(rank.parameters for rank in ranks))


def copies_or_parts(facts: Facts, alone: Alone | None) -> Facts:
    """Facts that say, from a run in one process, whether weights that differ are parts."""
    first, parts = facts.ranks[0].steps[0].weights, set(facts.parts)
    for name, tensor in alone.notes.steps[0].weights.items() if alone else []:
        is_other = name not in first or first[name].shape != tensor.shape
        if is_other and name in alone.notes.parameters:
            parts.add(name)
    if alone and not parts:
        return dataclasses.replace(facts, model=COPIES)
    model = PARTS if alone and not alone.unmatched else UNCLEAR
    return dataclasses.replace(facts, model=model, parts=frozenset(parts))


def are_joined_rightly(facts: Facts, alone: Alone) -> bool:
    """Whether the parts, put together, are the weights with which one process begins."""
    theirs = alone.notes.steps[0].weights
    for name in facts.parts & theirs.keys():
        whole = facts.whole("weights", name, 0, theirs[name].shape)
        if whole is None or not whole.equal(theirs[name]):
            return False
    return True


def complete(ranks: tuple[Step, ...]) -> list[Step]:
    """A step of all ranks; a gradient that only one rank's optimizer got (ZeRO) is on all ranks."""
    completed, stepped = [], set().union(*(rank.options for rank in ranks))
    for rank in ranks:
        others = rank.weights.keys() - rank.options.keys()
        received = {"own": only(rank.own, stepped)}  # others are thrown away, or come later
        for kind in "got", "unclipped":
            every = ChainMap(*(getattr(owner, kind) for owner in ranks))
            received[kind] = only(every, others) | getattr(rank, kind)
        completed.append(dataclasses.replace(rank, **received))
    return completed


def first_infinite(ranks: list[Notes], length: int) -> Reason | None:
    """The first gradient that is not finite: own gradients before averaged ones."""
    for k in range(min(length, *(len(rank.steps) for rank in ranks))):
        for what in "own", "got":
            for rank in ranks:
                gradients = getattr(rank.steps[k], what).values()
                if not all(bool(gradient.isfinite().all()) for gradient in gradients):
                    place = f"in step {k + 1} on rank {rank.rank}"
                    return Reason(f"infinite or NaN {place}", INFINITE)
    return None
