"""Link 3: with the gradients that the optimizers got, do weights change as in one process?"""

from typing import NamedTuple

import torch
from instruments.command import Line

from equivalence import limits, vectors
from equivalence.facts import Facts
from equivalence.given import together
from equivalence.one_batch import most
from equivalence.replay import Alone, moved
from equivalence.words import Link, apart, some_of

LABEL = "weights"


class Change(NamedTuple):
    """How far two changes of a weight are apart."""

    far: float = 0.0  # relative to the larger change; a number that is off by its last digit is not
    size: float = 0.0  # the larger change
    hidden: float = 0.0  # what could not be seen, as rounding the weight hides it


class Furthest(NamedTuple):
    far: float = 0.0
    name: str = ""
    changed: frozenset[int] = frozenset()  # the steps in which a weight changes
    hidden: float = 0.0


def weights(facts: Facts, alone: Alone, moved_run: Alone | None) -> Link:
    """alone: one process that got the processes' gradients, where these were equal."""
    free = [k for k in facts.steps if not facts.is_forced(k)]
    limit = limits.UPDATED
    if free:  # it got gradients of its own, which are rounded otherwise
        if moved_run is None:
            return Link(LABEL, None, why="in one process the optimizer gets its own gradients")
        yardstick = between(facts, moved_run, alone)
        limit = max(limit, min(most(facts), limits.YARDSTICKS * yardstick))
    worst = furthest(facts, alone)
    if not worst.changed:
        return Link(LABEL, None, why="no step changes the weights")
    what = "as in one process" if free else "as in one process that gets these gradients"
    text = f"{what} {apart(worst.far, limit)}"
    skipped = [str(k + 1) for k in facts.steps if k not in worst.changed]
    if skipped:
        text += f"; not in step {', '.join(skipped)}, where nothing changes"
    if worst.far <= limit:
        return Link(LABEL, True, f"right: they change {text}", max(limit, worst.hidden))
    if alone.has_coarse_optimizer:
        text = f"not found out: they don't change {text}: {worst.name}"
        return Link(LABEL, None, text, why="the optimizer computes in bfloat16 or float16")
    text = f"WRONG: they don't change {text}: {worst.name}"
    return Link(LABEL, False, text, worst.far)


def furthest(facts: Facts, alone: Alone) -> Furthest:
    """The processes' changes beside one process's."""
    worst, changed = Furthest(), set()
    for k in facts.steps:
        before, after = of_ranks(facts, k), of_ranks(facts, k + 1)
        for name, value_alone in alone.weights[k + 1].items():
            if name not in facts.trained or name not in after:
                continue
            old, new = together(before.get(name, []), value_alone.shape), after[name]
            if new[0].shape != value_alone.shape:
                new = [together(new, value_alone.shape)]
            elif k >= facts.first_unequal:
                new = new[:1]  # one process had rank 0's
            for value in new:
                if old is None or value is None:
                    continue
                change = change_apart(old, value, old, value_alone)
                if change.size:
                    changed.add(k)
                hidden = max(worst.hidden, change.hidden)
                if change.far > worst.far:
                    worst = Furthest(change.far, name)
                worst = worst._replace(hidden=hidden)
    return worst._replace(changed=frozenset(changed))


def of_ranks(facts: Facts, step: int) -> dict[str, list[torch.Tensor]]:
    """Each weight, of all ranks; or its parts."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for rank in facts.peers if facts.has_parts else facts.ranks:
        for name, tensor in rank.steps[step].weights.items():
            tensors.setdefault(name, []).append(tensor)
    return tensors


def change_apart(
    old: torch.Tensor, new: torch.Tensor, old_alone: torch.Tensor, new_alone: torch.Tensor
) -> Change:
    if not old.is_floating_point() and not old.is_complex():
        return Change()
    digit = limits.DIGITS * torch.finfo(new.dtype).eps * vectors.numbers(new).abs()
    many = vectors.numbers(new) - vectors.numbers(old)
    one = vectors.numbers(new_alone) - vectors.numbers(old_alone)
    size = max(many.norm().item(), one.norm().item())
    far = (many - one).abs()
    if not size or not bool(far.any()):
        return Change(size=size)
    beyond = (far - digit).clamp(min=0).norm().item()
    return Change(beyond / size, size, digit.norm().item() / size)


def between(facts: Facts, moved_run: Alone, alone: Alone) -> float:
    """How far the changes of two runs in one process are apart; `one` was moved."""
    most_apart = 0.0
    for k in facts.steps:
        before = of_ranks(facts, k)
        for name, value_alone in alone.weights[k + 1].items():
            theirs = moved_run.weights[k + 1].get(name)
            if theirs is None or name not in facts.trained or name not in before:
                continue
            old = together(before[name], value_alone.shape)
            if old is not None:
                start = moved(old, facts.digit)
                most_apart = max(most_apart, change_apart(start, theirs, old, value_alone).far)
    return most_apart


def buffers(facts: Facts, alone: Alone, limit: float, left_out: tuple) -> list[Line]:
    """Those that a layer changes otherwise: with the examples of its own process, it may be."""
    far: dict[str, float] = {}
    for k in facts.comparable():
        before, after = of_ranks(facts, k), of_ranks(facts, k + 1)
        for name, value_alone in alone.weights[k + 1].items():
            if name in facts.ranks[0].parameters or name not in after or name not in before:
                continue
            if any(name.endswith(ending) for ending in left_out):
                continue
            old, news = before[name][0], after[name]
            if any(new.shape != value_alone.shape for new in [old, *news]):
                continue
            for new in news:
                apart_here = change_apart(old, new, old, value_alone).far
                far[name] = max(far.get(name, 0.0), apart_here)
    limit = max(limits.MOST, limit)
    names = [name for name in far if far[name] > limit]
    if not names:
        return []
    worst = max(far[name] for name in names)
    text = f"{some_of(names)} don't change as in one process {apart(worst, limit)}: does a process "
    return [Line("buffers", f"{text}look at its own examples only?")]
