"""Link 3: do weights change as in one process whose optimizer gets the same gradients?"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from instruments.command import Line

from equivalence import limits, vectors
from equivalence.facts import Facts
from equivalence.notes import Alone
from equivalence.verdict import Figures, Link, some_of

LABEL = "weights"


class Change(NamedTuple):
    """The distance of two changes of a weight: with several processes, and in one."""

    far: float = 0.0  # relative to the larger change; a difference in the last digit counts as 0
    size: float = 0.0  # the larger change
    hidden: float = 0.0  # a smaller distance is not seen, as weights are rounded
    name: str = ""
    step: int = 0


class Changes(NamedTuple):
    """Changes of all weights in all steps, in one sentence; or why they were not measured."""

    why: str = ""
    text: str = ""
    worst: Change = Change()
    limit: float = 0.0
    hidden: float = 0.0
    excuse: str = ""  # a reason why a difference may be right

    @property
    def is_right(self) -> bool | None:
        return None if self.why else self.worst.far <= self.limit


def all_changes(facts: Facts, alone: Alone, perturbed_run: Alone | None) -> Changes:
    """Changes of the ranks' weights beside one process's.  perturbed_run: measures rounding."""
    is_forced = all(facts.is_forced(k) for k in facts.steps)
    limit = limits.UPDATED
    if not is_forced:  # one process had gradients of its own, with other rounding errors
        if perturbed_run is None:
            return Changes("the run in one process that measures rounding failed")
        yardstick = between(facts, perturbed_run, alone)
        limit = max(limit, min(facts.rounding_limit, limits.YARDSTICKS * yardstick))
    changes = each_change(facts, alone)
    changed = {change.step for change in changes if change.size}
    if not changed:
        return Changes("no step changes the weights")
    worst = max(changes, key=lambda change: change.far)
    what = "as in one process" + " that gets the same gradients" * is_forced
    text = f"{what} {Figures(worst.far, limit)}"
    skipped = [str(k + 1) for k in facts.steps if k not in changed]
    if skipped:
        text += f"; not in step {', '.join(skipped)}, where nothing changes"
    hidden = max(change.hidden for change in changes)
    excuse = "the optimizer computes in bfloat16 or float16" * alone.notes.has_coarse_optimizer
    return Changes("", text, worst, limit, hidden, excuse)


def weights(changes: Changes, gradients: Link, settings: Link) -> Link:
    """Link 3.  gradients: of the optimizers, right or wrong?  settings: equal learning rates?"""
    if changes.why:
        return Link(LABEL, None, why=changes.why)
    far, name = changes.worst.far, changes.worst.name
    figures = Figures(far, changes.limit)
    if changes.is_right:
        limit = max(changes.limit, changes.hidden)
        text = f"right: the weights change {changes.text}"
        return Link(LABEL, True, text, limit, figures=figures)
    if changes.excuse:
        text = f"not found out: the weights don't change {changes.text}; worst: {name}"
        return Link(LABEL, None, text, why=changes.excuse)
    if gradients.is_right is False:
        return Link(LABEL, None, why="not looked at, as the gradients are wrong")
    if settings.is_right is None:
        return Link(LABEL, None, why="not looked at, as a schedule may differ")
    if settings.is_right and settings.text and far <= 2 * limits.SCHEDULE:
        text = "the weights change as in one process, but for the schedule's other learning rates"
        return Link(LABEL, True, f"{text} {figures}", far, figures=figures)
    text = f"WRONG: the weights don't change {changes.text}; worst: {name}"
    return Link(LABEL, False, text, far, figures=figures)


def each_change(facts: Facts, alone: Alone) -> list[Change]:
    """The change of each weight in each step."""
    changes = []
    for k in facts.steps:
        for name, old, news, value_alone in values(facts, alone, k):
            for new in news if name in facts.trained else []:
                change = change_apart(old, new, old, value_alone)
                changes.append(change._replace(name=name, step=k))
    return changes


def values(
    facts: Facts, alone: Alone, step: int
) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor], torch.Tensor]]:
    """Name and values of each weight or buffer: before a step; after it on each rank and alone."""
    for name, value_alone in alone.notes.steps[step + 1].weights.items():
        shape = value_alone.shape
        old = facts.whole("weights", name, step, shape)
        news = [rank.steps[step + 1].weights.get(name) for rank in facts.ranks]
        news = [new for new in news if new is not None]
        if any(new.shape != shape for new in news):
            news = [facts.whole("weights", name, step + 1, shape)]
        elif step >= facts.first_unequal:
            news = news[:1]  # one process had rank 0's
        if old is not None and news and news[0] is not None:
            yield name, old, news, value_alone


def change_apart(
    old: torch.Tensor, new: torch.Tensor, old_alone: torch.Tensor, new_alone: torch.Tensor
) -> Change:
    """The distance of the changes of one weight with several processes, and in one."""
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


def between(facts: Facts, perturbed_run: Alone, alone: Alone) -> float:
    """The largest distance of changes in two runs in one process: the first one was perturbed."""
    most_apart = 0.0
    for k in facts.steps:
        theirs = perturbed_run.notes.steps[k + 1].weights
        for name, old, _, value_alone in values(facts, alone, k):
            if name in theirs and name in facts.trained:
                begin = vectors.perturbed(old, facts.number_format)
                change = change_apart(begin, theirs[name], old, value_alone)
                most_apart = max(most_apart, change.far)
    return most_apart


def buffers(facts: Facts, alone: Alone, limit: float, left_out: tuple) -> list[Line]:
    """A note on buffers that change otherwise than in one process."""
    limit, worst, names = max(limits.MOST, limit), 0.0, []
    for k in facts.comparable:
        for name, old, news, value_alone in values(facts, alone, k):
            if name in facts.ranks[0].parameters or name.endswith(left_out):
                continue
            far = max(change_apart(old, new, old, value_alone).far for new in news)
            if far > limit:
                worst = max(worst, far)
                names.append(name)
    if not names:
        return []
    text = f"{some_of(names)} don't change as in one process {Figures(worst, limit)}"
    return [Line("buffers", f"{text}: does each process update them from its own examples?")]
