"""Are the options equal, and do weights change as in one process with the same gradients?"""

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ddp_by_diff.equivalence import limits, vectors
from ddp_by_diff.equivalence.facts import Facts
from ddp_by_diff.equivalence.notes import Alone
from ddp_by_diff.equivalence.verdict import Check, Figures, Reason, inconclusive, some_of

LABEL = "weights"
UNMEASURED = Reason(
    "the difference may be rounding, of which a run in float64 gave no measure",
    "make a copy compute in float64: torch.set_default_dtype(torch.float64), double data",
)
UNCHANGED = Reason("no step changes the weights", "give --steps 10, or leave out the warm-up")
COARSE = Reason(
    "the optimizer computes in bfloat16 or float16",
    "compare a copy with torch.optim.SGD: then only this optimizer's own step is not compared",
)
SCHEDULE = Reason("not compared, as the learning rate may differ", "")


class Change(NamedTuple):
    """The distance of two changes of a weight: with several processes, and in one."""

    far: float = 0.0  # relative to the larger change; a difference in the last digit counts as 0
    size: float = 0.0  # the larger change
    hidden: float = 0.0  # a smaller distance is not seen, as weights are rounded
    name: str = ""
    step: int = 0


def weights(facts: Facts, alone: Alone, exact: Alone | None, settings: Check) -> Check:
    """The check.  exact: the same run in float64.  settings: equal learning rates?"""
    limit = limits.UPDATED
    changes = each_change(facts, alone)
    changed = {change.step for change in changes if change.size}
    if not changed:
        return inconclusive(LABEL, UNCHANGED)
    worst = max(changes, key=lambda change: change.far)
    if worst.far > limit and not facts.are_forced:
        # One process had gradients of its own, with other rounding errors.
        rounding = furthest(each_change(facts, alone, exact)) if exact else facts.rounding_limit
        if rounding > facts.rounding_limit or exact is None and not facts.is_coarse:
            return inconclusive(LABEL, UNMEASURED)
        limit = max(limit, min(facts.rounding_limit, limits.YARDSTICKS * rounding))
    figures = Figures(worst.far, limit)
    skipped = ", ".join(str(k + 1) for k in facts.steps if k not in changed)
    where = f" {figures}" + f"; not in step {skipped}, where nothing changes" * bool(skipped)
    start = "with the same gradients, " * facts.are_forced + "the weights"
    if worst.far <= limit:
        text = f"ok: {start} change as in one process{where}"
        limit = max(limit, *(change.hidden for change in changes))
        return Check(LABEL, True, text, limit, figures=figures)
    text = f"{start} do not change as in one process{where}; worst: {worst.name}"
    if alone.notes.has_coarse_optimizer:
        return inconclusive(LABEL, COARSE, text, figures)
    if settings.is_right is None:
        return inconclusive(LABEL, SCHEDULE)
    if settings.is_right and settings.text and worst.far <= 2 * limits.SCHEDULE:
        text = "ok: the weights change as in one process, except for the schedule's learning rates"
        return Check(LABEL, True, f"{text} {figures}", worst.far, figures=figures)
    return Check(LABEL, False, f"WRONG: {text}", worst.far, figures=figures)


def change_as_in_float64(facts: Facts, exact: Alone) -> bool:
    """Whether the weights change as in one process with gradients and options of its own."""
    changes = each_change(facts, exact)
    return furthest(changes) <= limits.UPDATED and any(change.size for change in changes)


def furthest(changes: list[Change]) -> float:
    return max((change.far for change in changes), default=0.0)


def each_change(facts: Facts, alone: Alone, exact: Alone | None = None) -> list[Change]:
    """The change of each weight in each step.  exact: a run in float64, in the ranks' place."""
    changes = []
    for k in facts.steps:
        for name, old, news, value_alone in values(facts, alone, k):
            if exact:
                news = [exact.notes.steps[k + 1].weights[name].to(old.dtype)]
            for new in news if name in facts.trained else []:
                changes.append(change_apart(old, new, value_alone)._replace(name=name, step=k))
    return changes


def values(
    facts: Facts, alone: Alone, step: int
) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor], torch.Tensor]]:
    """Name and values of each weight or buffer: before a step; after it on each rank and alone."""
    for name, value_alone in alone.notes.steps[step + 1].weights.items():
        shape = value_alone.shape
        old = facts.whole("weights", name, step, shape)
        afters = [rank.steps[step + 1].weights.get(name) for rank in facts.ranks]
        if any(new is not None and new.shape != shape for new in afters):
            afters = [facts.whole("weights", name, step + 1, shape)]
        news = [new for new in afters if new is not None]
        if step >= facts.first_unequal:
            news = news[:1]  # one process had rank 0's
        if old is not None and news:
            yield name, old, news, value_alone


def change_apart(old: torch.Tensor, new: torch.Tensor, new_alone: torch.Tensor) -> Change:
    """The distance of the changes of one weight with several processes, and in one."""
    if not old.is_floating_point() and not old.is_complex():
        return Change()
    digit = limits.DIGITS * torch.finfo(new.dtype).eps * vectors.numbers(new).abs()
    many = vectors.numbers(new) - vectors.numbers(old)
    one = vectors.numbers(new_alone) - vectors.numbers(old)
    size = max(many.norm().item(), one.norm().item())
    far = (many - one).abs()
    if not size or not bool(far.any()):
        return Change(size=size)
    beyond = (far - digit).clamp(min=0).norm().item()
    return Change(beyond / size, size, digit.norm().item() / size)


def buffers(facts: Facts, alone: Alone, limit: float, is_right: bool) -> list[Check]:
    """The check of buffers: an exception, if any change otherwise.  is_right: the gradients."""
    limit = max(limits.MOST, limit)
    others = other_state(facts, alone, limit)
    left_out = {*facts.ranks[0].parameters, *facts.ranks[0].norm_buffers}
    names = [name for name in others if name not in left_out]
    if not names:
        return []
    worst = max(others[name] for name in names)
    text = f"otherwise than in one process: {some_of(names)} {Figures(worst, limit)}"
    text += ", but all gradients agree in these steps" * is_right
    return [Check("buffers", True, text, but="buffers")]


def other_state(facts: Facts, alone: Alone, limit: float) -> dict[str, float]:
    """What no optimizer trains, and changes otherwise than in one process, and how much so."""
    furthest: dict[str, float] = {}
    for k in facts.comparable:
        for name, old, news, value_alone in values(facts, alone, k):
            if name not in facts.trained:
                far = max(change_apart(old, new, value_alone).far for new in news)
                if far > limit and vectors.are_near([*map(in_order, (value_alone, *news))], limit):
                    far = 0.0  # such as the rows of a queue
                furthest[name] = max(furthest.get(name, 0.0), far)
    return {name: far for name, far in furthest.items() if far > limit}


def options(facts: Facts, alone: Alone | Reason, other_job: Reason | None) -> Check:
    """The optimizers' options; right, but with a text, if only a schedule differs a little.

    other_job: why one process may have others, without a mistake.
    """
    for k in facts.steps:
        first = facts.ranks[0].steps[k].options
        for rank in facts.ranks[1:]:
            for name, key, value, theirs in unlike(first, rank.steps[k].options):
                text = f"{key} of {name} is {value} on rank 0, {theirs} on rank {rank.rank}"
                return Check(label(key), False, f"{text}, in step {k + 1}")
    found, steps = [], alone.notes.steps if isinstance(alone, Alone) else []
    for k, step in zip(facts.steps, steps, strict=False):
        every = ChainMap(*(rank.steps[k].options for rank in facts.ranks))
        for two in unlike(every, step.options):
            if far_apart(*two[2:]) > limits.UPDATED:
                found.append((k, *two))
    if not found:
        return Check("options", True)
    k, name, key, value, one = max(found, key=lambda difference: far_apart(*difference[3:]))
    text = "" if key == "lr" else f"{key} of {name} is "
    text += f"{show(value)} with {len(facts.ranks)} processes, {show(one)} with one"
    text += f" ({value / one:.4g} times)" if key == "lr" and one else ""
    text += f", in step {k + 1}"
    if other_job is None:
        return Check(label(key), False, text)
    if far_apart(value, one) <= limits.SCHEDULE:
        return Check(label(key), True, f"{text}: a schedule counts the steps of an epoch")
    reason = f"{other_job.sentence}, which may set it, or the number of steps in an epoch"
    return inconclusive(label(key), other_job._replace(sentence=reason), text)


def far_apart(value: Any, other: Any) -> float:
    """The relative difference of two values of an option: of Adam's betas, the largest."""
    if isinstance(value, tuple) and isinstance(other, tuple) and len(value) == len(other):
        return max(map(far_apart, value, other), default=0.0)
    are_numbers = isinstance(value, int | float) and isinstance(other, int | float)
    if value == other or not are_numbers:
        return 0.0 if value == other else math.inf
    return abs(value - other) / max(abs(value), abs(other))


def label(key: str) -> str:
    return "learning rate" if key == "lr" else "options"


def unlike(table: Mapping, other_table: Mapping) -> Iterator[tuple[str, str, Any, Any]]:
    """Parameter, option and both values of each difference between two tables of options."""
    for name in table:
        for key, value in table[name].items():
            theirs = other_table.get(name, {}).get(key, value)
            if theirs != value and not key.endswith("_lr"):  # initial_lr, max_lr: not in use
                yield name, key, value, theirs


def show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def in_order(tensor: torch.Tensor) -> vectors.Vector:
    """The tensor's numbers in ascending order."""
    return {"": vectors.numbers(tensor).flatten().sort().values}
