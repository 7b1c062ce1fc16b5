"""What the ranks have, copies or parts, decided before any question is asked."""

import dataclasses

from equivalence.facts import COPIES, PARTS, UNKNOWN, Facts
from equivalence.notes import Alone, Notes, Step


def facts_of(ranks: list[Notes], length: int, model: str = "") -> Facts:
    """model: what the ranks have, if it is known; else it is seen in the shapes of weights."""
    completed = [complete(step) for step in zip(*[rank.steps for rank in ranks], strict=False)]
    pairs = zip(ranks, zip(*completed, strict=True), strict=True)
    ranks = [dataclasses.replace(rank, steps=list(steps)) for rank, steps in pairs]
    facts = Facts(ranks, range(length), model or COPIES)
    if model:
        return facts
    if have_other_shapes(facts.peers):
        return dataclasses.replace(facts, model=PARTS)
    return dataclasses.replace(facts, model=UNKNOWN) if facts.first_unequal == 0 else facts


def have_other_shapes(peers: list[Notes]) -> bool:
    """Whether ranks that have the same batches hold different tensors of one model."""
    shapes = []
    for rank in peers:
        weights = rank.steps[0].weights
        some = [name for name in rank.parameters if name in weights]
        shapes.append({name: weights[name].shape for name in some})
    return any(shapes_of_rank != shapes[0] for shapes_of_rank in shapes[1:])


def beside_one(facts: Facts, alone: Alone | None) -> Facts:
    """The facts, if one process shows whether weights that differ are copies or parts."""
    if alone is None:
        return dataclasses.replace(facts, model=COPIES)
    first, model = facts.ranks[0].steps[0].weights, COPIES
    for name, tensor in alone.notes.steps[0].weights.items():
        is_other = name not in first or first[name].shape != tensor.shape
        if is_other and name in alone.notes.parameters:
            model = UNKNOWN if alone.unmatched else PARTS
    return dataclasses.replace(facts, model=model)


def complete(ranks: tuple[Step, ...]) -> list[Step]:
    """Where optimizers share out the parameters, the others get what the owner's has made."""
    completed = []
    for rank in ranks:
        got, unclipped = dict(rank.got), dict(rank.unclipped)
        for owner in ranks:
            for name in owner.got:
                if name not in rank.options and name in rank.weights:
                    got.setdefault(name, owner.got[name])
                    if name in owner.unclipped:
                        unclipped.setdefault(name, owner.unclipped[name])
        completed.append(dataclasses.replace(rank, got=got, unclipped=unclipped))
    return completed
