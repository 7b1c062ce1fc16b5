"""Link 1: do the optimizers get the mean of the ranks' own gradients?  The ranks' notes tell."""

import math
import re
from collections.abc import Callable

import torch

from equivalence import clipping, limits, vectors
from equivalence.explain import LABEL, WrongGradients, explain
from equivalence.facts import Facts
from equivalence.notes import Step
from equivalence.one_batch import Look
from equivalence.vectors import Vector
from equivalence.verdict import Figures, Link, percent, some_of
from equivalence.weights import Changes

OWN_PARAMETERS = "the optimizer has parameters of its own"
Choose = Callable[[Step], Vector]  # clipping.before or clipping.after


def averaging(facts: Facts, right: Look | None, changes: Changes) -> Link:
    """Link 1.  right: the look in which link 2 is right, if there is one.  changes: link 3's."""
    link = averaging_of(facts, right, clipping.before)
    if link.is_right and clipping.is_changed_after(facts.ranks):
        link = averaging_of(facts, right, clipping.after)
    is_wrong = link.is_right is False and facts.is_free and not facts.unequal
    if is_wrong and changes.is_right:  # with gradients of its own one process changes them so, too
        text = link.text.removeprefix("WRONG: ")
        text += "; but the weights are averaged after the step, with the same result"
        return Link(LABEL, True, text, max(changes.limit, changes.hidden))
    return link


def in_weights(changes: Changes) -> Link:
    """Link 1 if the optimizers have parameters of their own: the weights alone can tell."""
    if changes.why or changes.excuse and not changes.is_right:
        return Link(LABEL, None, why=OWN_PARAMETERS)
    limit = max(changes.limit, changes.hidden) if changes.is_right else changes.worst.far
    return Link(LABEL, True, f"seen in the weights only: {OWN_PARAMETERS}", limit)


def averaging_of(facts: Facts, right: Look | None, choose: Choose) -> Link:
    """Link 1 of the gradients that `choose` takes: before they were clipped, or after."""
    count = len(facts.owns[0])
    factors = right.factors if right else [[1 / count] * count for _ in facts.steps]
    goals = [vectors.combine(facts.owns[k], factors[k]) for k in facts.steps]
    gots = [got_by_each(facts, k, choose) for k in facts.steps]
    limit = limit_of(facts)
    bad, worst, far = furthest_from_goals(facts, gots, goals, limit)
    figures = Figures(far, limit)
    if not bad:
        clipped = clipping.in_words(facts.ranks)
        text = f"right: the optimizers get {in_words(factors)}{clipped} {figures}"
        return Link(LABEL, True, text, limit, figures=figures)
    if link := sent_coarsely(facts, gots, goals, limit):
        return link
    if right and (link := changed_as_alone(right, choose, limit)):
        return link
    place, names = "", set().union(*goals)
    if len(bad) < len(names):
        others = f"the other {len(names) - len(bad)} of {len(names)} tensors are right"
        place = f" of {some_of(bad)} ({others})"

    def explained(step: int) -> Link:
        own = [vectors.only(part, set(bad)) for part in facts.owns[step]]
        got = [vectors.only(part, set(bad)) for part in gots[step]]
        goal = vectors.only(goals[step], set(bad))
        gradients = WrongGradients(step, own, got, goal, factors[step], place)
        return explain(facts, gradients, bool(right), figures)

    links = {k: explained(k) for k in facts.steps if not goals[k].keys().isdisjoint(bad)}
    link = links.get(worst) or explained(worst)
    kinds = {re.sub(r"[0-9.e+-]+", "", one.text) for one in links.values()}  # without numbers
    if link.is_right is None or len(kinds) == 1:
        return link
    same = [str(k + 1) for k, one in links.items() if one == link]
    return link._replace(text=link.text.replace("WRONG:", f"WRONG in step {', '.join(same)}:"))


def got_by_each(facts: Facts, step: int, choose: Choose) -> list[Vector]:
    """The gradients that each rank's optimizer got in this step."""
    return [vectors.only(choose(rank.steps[step]), facts.trained) for rank in facts.ranks]


def limit_of(facts: Facts) -> float:
    """The largest difference that is rounding: more if gradients are in bfloat16 or float16."""
    step = facts.ranks[0].steps[0]
    tensors = [*step.own.values(), *step.got.values()]
    is_coarse = any(torch.finfo(tensor.dtype).eps > limits.COARSE for tensor in tensors)
    return limits.AVERAGED_COARSE if is_coarse else limits.AVERAGED


def furthest_from_goals(
    facts: Facts, gots: list[list[Vector]], goals: list[Vector], limit: float
) -> tuple[list[str], int, float]:
    """Names of the tensors that differ from their goals; the worst step; the largest distance."""
    furthest: dict[str, float] = {}
    worst, most = 0, 0.0
    for k, goal in enumerate(goals):
        sizes, in_step = vectors.mean_lengths(facts.owns[k]), 0.0
        for name in goal:
            for got in gots[k]:
                far = vectors.distance_in(name, got, goal, sizes.get(name, 0.0))
                furthest[name] = max(furthest.get(name, 0.0), far)
                in_step = max(in_step, far)
        # After copies have become different, `factors` are not exact: an earlier step says more.
        if in_step > most * 1.001 and (k < facts.first_unequal or not most):
            worst, most = k, in_step
    bad = [name for name, far in furthest.items() if far > limit]
    return bad, worst, max(furthest.values(), default=0.0)


def in_words(factors: list[list[float]]) -> str:
    """What the optimizers get.  factors: of each rank's gradient, in each step."""
    even = [1 / len(factors[0])] * len(factors[0])
    ones = [1.0] * len(even)
    if even != ones and all(vectors.numbers_are_near(k, ones, limits.FACTOR) for k in factors):
        return "the sum of the ranks' gradients"
    for number, in_step in enumerate(factors):
        if not vectors.numbers_are_near(in_step, even, limits.FACTOR):
            text = "the ranks' gradients, weighted as in one process:"
            return f"{text} {percent(in_step)} in step {number + 1}"
    return "the mean of the ranks' gradients"


# ------------------------------------------------------------------------------ changed on purpose


def sent_coarsely(
    facts: Facts, gots: list[list[Vector]], goals: list[Vector], limit: float
) -> Link | None:
    """Link 1, right, if messages in 16 bits explain all differences; else None."""
    for dtype in torch.float16, torch.bfloat16:
        most, far = torch.finfo(dtype).eps, 0.0
        for k, goal in enumerate(goals):
            for got in gots[k]:
                if not is_rounded(got, goal, facts.owns[k], torch.finfo(dtype), limit):
                    far = math.inf
                far = max(far, vectors.distance(got, goal))
        if far <= most:
            name = str(dtype).removeprefix("torch.")
            text = "right: the optimizers get the mean of the ranks' gradients, sent as"
            figures = Figures(far, most)
            return Link(LABEL, True, f"{text} {name} {figures}", most, figures=figures)
    return None


def is_rounded(
    got: Vector, goal: Vector, parts: list[Vector], format: torch.finfo, limit: float
) -> bool:
    """Whether each number differs by no more than the format rounds, some up and others down."""
    most = (len(parts) + 1) / 2 * format.eps  # each addition rounds
    for name, numbers in vectors.difference(got, goal).items():
        own = [vectors.numbers(part[name]).abs() for part in parts if name in part]
        if bool((numbers.abs() > most * sum(own) / len(parts) + format.tiny).any()):
            return False
        wanted = vectors.only(goal, {name})
        times = vectors.fit(vectors.only(got, {name}), [wanted]).factors[0]
        far = vectors.distance_in(name, got, goal)
        squares = vectors.numbers(goal[name]).square()
        large = float(squares.sum() ** 2 / squares.square().sum().clamp(min=1e-300))  # numbers
        if abs(times - 1) > max(limit, limits.DEVIATIONS * far / max(1.0, large) ** 0.5):
            return False
    return True


def changed_as_alone(right: Look, choose: Choose, limit: float) -> Link | None:
    """Link 1, right, if one process's optimizer gets the same (the program clamps them, say)."""
    facts, far = right.facts, 0.0
    for k in facts.comparable:
        wanted = vectors.only(choose(right.alone.notes.steps[k]), facts.trained)
        for got in got_by_each(facts, k, choose):
            far = max(far, vectors.distance(got, wanted))
    limit = max(limits.UPDATED, limit, right.limit)
    if far > limit:
        return None
    text = "right: the optimizers get the mean of the ranks' gradients, changed as in one process"
    figures = Figures(far, limit)
    return Link(LABEL, True, f"{text} {figures}", limit, figures=figures)
