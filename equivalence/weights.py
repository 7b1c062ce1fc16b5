"""Link 3: with the gradients that the optimizers got, do weights change as in one process?"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from instruments.command import Line

from equivalence import coarse, limits, vectors
from equivalence.facts import Facts
from equivalence.notes import Alone
from equivalence.verdict import Figures, Link, some_of

LABEL = "weights"


class Change(NamedTuple):
    """How far two changes of a weight are apart."""

    far: float = 0.0  # relative to the larger change; a number that is off by its last digit is not
    size: float = 0.0  # the larger change
    hidden: float = 0.0  # what could not be seen, as rounding the weight hides it
    name: str = ""
    step: int = 0


class Changes(NamedTuple):
    """Changes of all weights in all steps, in one sentence; or why they were not measured."""

    why: str = ""
    text: str = ""
    worst: Change = Change()
    limit: float = 0.0
    hidden: float = 0.0
    excuse: str = ""  # why they may be right though they differ

    @property
    def is_right(self) -> bool | None:
        return None if self.why else self.worst.far <= self.limit


def measured(facts: Facts, alone: Alone, moved_run: Alone | None) -> Changes:
    """alone: one process that got the processes' gradients, where these were equal."""
    is_free = not all(facts.is_forced(k) for k in facts.steps)
    limit = limits.UPDATED
    if is_free:  # it got gradients of its own, which are rounded otherwise
        if moved_run is None:
            return Changes("in one process the optimizer gets its own gradients")
        yardstick = between(facts, moved_run, alone)
        limit = max(limit, min(facts.most, limits.YARDSTICKS * yardstick))
    changes = changes_of(facts, alone)
    changed = {change.step for change in changes if change.size}
    if not changed:
        return Changes("no step changes the weights")
    worst = max(changes, key=lambda change: change.far)
    what = "as in one process" if is_free else "as in one process that gets these gradients"
    text = f"{what} {Figures(worst.far, limit)}"
    skipped = [str(k + 1) for k in facts.steps if k not in changed]
    if skipped:
        text += f"; not in step {', '.join(skipped)}, where nothing changes"
    hidden = max(change.hidden for change in changes)
    return Changes("", text, worst, limit, hidden, coarse.excuse(alone.notes))


def weights(changes: Changes, gradients: Link, settings: Link) -> Link:
    """gradients: whether the optimizers got the right ones; settings: whether rates are equal."""
    if changes.why:
        return Link(LABEL, None, why=changes.why)
    far, name = changes.worst.far, changes.worst.name
    figures = Figures(far, changes.limit)
    if changes.is_right:
        limit = max(changes.limit, changes.hidden)
        return Link(LABEL, True, f"right: they change {changes.text}", limit, figures=figures)
    if changes.excuse:
        text = f"not found out: they don't change {changes.text}: {name}"
        return Link(LABEL, None, text, why=changes.excuse)
    if gradients.is_right is False:
        return Link(LABEL, None, why="not looked at, as the gradients are wrong")
    if settings.is_right is None:
        return Link(LABEL, None, why="not looked at, as the rates differ")
    if settings.is_right and settings.text and far <= 2 * limits.SCHEDULE:
        text = "they change as in one process, but for the schedule's other rates"
        return Link(LABEL, True, f"{text} {figures}", far, figures=figures)
    text = f"WRONG: they don't change {changes.text}: {name}"
    return Link(LABEL, False, text, far, figures=figures)


def changes_of(facts: Facts, alone: Alone) -> list[Change]:
    """Changes of all weights in all steps."""
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
    """Each weight or buffer: before a step, and after it on each rank and in one process."""
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
    """How far the changes of two runs in one process are apart; the first one was moved."""
    most_apart = 0.0
    for k in facts.steps:
        theirs = moved_run.notes.steps[k + 1].weights
        for name, old, _, value_alone in values(facts, alone, k):
            if name in theirs and name in facts.trained:
                change = change_apart(
                    vectors.moved(old, facts.digit), theirs[name], old, value_alone
                )
                most_apart = max(most_apart, change.far)
    return most_apart


def buffers(facts: Facts, alone: Alone, limit: float, left_out: tuple) -> list[Line]:
    """Buffers that a layer updates differently, perhaps from its own process's examples only."""
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
    return [Line("buffers", f"{text}: does a process look at its own examples only?")]
