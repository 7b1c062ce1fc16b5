"""Link 1: do the optimizers get the mean of the ranks' own gradients?  Seen in their notes."""

import math
import re
from collections.abc import Callable

import torch

from equivalence import clipping, limits, vectors
from equivalence.explain import LABEL, Gradients, explain
from equivalence.facts import Facts
from equivalence.notes import Step
from equivalence.one_batch import Look
from equivalence.vectors import Vector
from equivalence.verdict import Figures, Link, percent, some_of
from equivalence.weights import Changes

Choose = Callable[[Step], Vector]  # which gradients of a step


def averaging(facts: Facts, right: Look | None, changes: Changes) -> Link:
    """right: what one process has shown, if link 2 was answered.  changes: of the weights."""
    link = compared(facts, right, clipping.before)
    if link.is_right and clipping.is_changed_after(facts.ranks):
        link = compared(facts, right, clipping.after)
    is_other = link.is_right is False and facts.is_free and not facts.unequal
    if is_other and changes.is_right:  # one process's own changes
        text = link.text.removeprefix("WRONG: ")
        text += "; the weights are averaged after the step, which is the same"
        return Link(LABEL, True, text, max(changes.limit, changes.hidden))
    return link


def in_weights(changes: Changes) -> Link:
    """If the optimizers have parameters of their own, what they got is not seen."""
    why = "the optimizer has parameters of its own"
    if changes.why or changes.excuse and not changes.is_right:
        return Link(LABEL, None, why=why)
    limit = max(changes.limit, changes.hidden) if changes.is_right else changes.worst.far
    return Link(LABEL, True, f"seen in the weights only: {why}", limit)


def compared(facts: Facts, right: Look | None, choose: Choose) -> Link:
    count = len(facts.owns[0])
    even = [[1 / count] * count for _ in facts.steps]
    shares = right.shares if right else even
    goals = [vectors.combine(facts.owns[k], shares[k]) for k in facts.steps]
    gots = [chosen(facts, k, choose) for k in facts.steps]
    limit = limit_of(facts)
    bad, worst, far = compare(facts, gots, goals, limit)
    figures = Figures(far, limit)
    if not bad:
        clipped = clipping.in_words(facts.ranks)
        text = f"right: the optimizers get {in_shares(shares)}{clipped} {figures}"
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
        gradients = Gradients(step, own, got, goal, shares[step], place)
        return explain(facts, gradients, bool(right), figures)

    link = explained(worst)
    links = {k: explained(k) for k in facts.steps if not goals[k].keys().isdisjoint(bad)}
    kinds = {without_numbers(one) for one in links.values()}
    if link.is_right is None or len(kinds) == 1:
        return link
    same = [str(k + 1) for k, one in links.items() if one == link]
    return link._replace(text=link.text.replace("WRONG:", f"WRONG in step {', '.join(same)}:"))


def without_numbers(link: Link) -> str:
    return re.sub(r"[0-9.e+-]+", "", link.text)


def chosen(facts: Facts, step: int, choose: Choose) -> list[Vector]:
    return [vectors.only(choose(rank.steps[step]), facts.trained) for rank in facts.ranks]


def limit_of(facts: Facts) -> float:
    step = facts.ranks[0].steps[0]
    tensors = [*step.own.values(), *step.got.values()]
    is_coarse = any(torch.finfo(tensor.dtype).eps > limits.COARSE for tensor in tensors)
    return limits.AVERAGED_COARSE if is_coarse else limits.AVERAGED


def compare(
    facts: Facts, gots: list[list[Vector]], goals: list[Vector], limit: float
) -> tuple[list[str], int, float]:
    """The tensors that are not the goal, the step in which they are furthest, and how far."""
    furthest: dict[str, float] = {}
    worst, most = 0, 0.0
    for k, goal in enumerate(goals):
        sizes, in_step = vectors.mean_lengths(facts.owns[k]), 0.0
        for name in goal:
            for got in gots[k]:
                far = vectors.distance_in(name, got, goal, sizes.get(name, 0.0))
                furthest[name] = max(furthest.get(name, 0.0), far)
                in_step = max(in_step, far)
        # Where copies differ, shares are not exact: an earlier step says more.
        if in_step > most * 1.001 and (k < facts.first_unequal or not most):
            worst, most = k, in_step
    bad = [name for name, far in furthest.items() if far > limit]
    return bad, worst, max(furthest.values(), default=0.0)


def in_shares(shares: list[list[float]]) -> str:
    even = [1 / len(shares[0])] * len(shares[0])
    is_sum = [vectors.near(weights, [1.0] * len(weights), limits.COEFFICIENT) for weights in shares]
    if all(is_sum) and len(even) > 1:
        return "the sum of what the ranks' examples contribute"
    for number, weights in enumerate(shares):
        if not vectors.near(weights, even, limits.COEFFICIENT):
            text = "the ranks' gradients, each as heavy as in one process:"
            return f"{text} {percent(weights)} in step {number + 1}"
    return "the mean of the ranks' gradients"


# ------------------------------------------------------------------------------ changed on purpose


def sent_coarsely(
    facts: Facts, gots: list[list[Vector]], goals: list[Vector], limit: float
) -> Link | None:
    """If each number is rounded as a message in float16 or bfloat16 rounds it, and no more."""
    for dtype in torch.float16, torch.bfloat16:
        most, far = torch.finfo(dtype).eps, 0.0
        for k, goal in enumerate(goals):
            for got in gots[k]:
                if not is_rounded(got, goal, facts.owns[k], torch.finfo(dtype), limit):
                    far = math.inf
                far = max(far, vectors.distance(got, goal))
        if far <= most:
            name = str(dtype).removeprefix("torch.")
            text = "right: the optimizers get the mean of the ranks' gradients, rounded on the way"
            figures = Figures(far, most)
            return Link(LABEL, True, f"{text} to {name} {figures}", most, figures=figures)
    return None


def is_rounded(
    got: Vector, goal: Vector, parts: list[Vector], format: torch.finfo, limit: float
) -> bool:
    """Each number by no more than the format rounds; and not all of a tensor in one direction."""
    most = (len(parts) + 1) / 2 * format.eps  # each addition rounds
    for name, numbers in vectors.difference(got, goal).items():
        own = [vectors.numbers(part[name]).abs() for part in parts if name in part]
        if bool((numbers.abs() > most * sum(own) / len(parts) + format.tiny).any()):
            return False
        wanted = vectors.only(goal, {name})
        times = vectors.fit(vectors.only(got, {name}), [wanted]).weights[0]
        far = vectors.distance_in(name, got, goal)
        squares = vectors.numbers(goal[name]).square()
        count = float(squares.sum() ** 2 / squares.square().sum().clamp(min=1e-300))  # that weigh
        if abs(times - 1) > max(limit, limits.DEVIATIONS * far / max(1.0, count) ** 0.5):
            return False
    return True


def changed_as_alone(right: Look, choose: Choose, limit: float) -> Link | None:
    """If one process's optimizer gets the same: the program changes gradients, such as clips."""
    facts, far = right.facts, 0.0
    for k in facts.comparable:
        wanted = vectors.only(choose(right.whole.notes.steps[k]), facts.trained)
        for got in chosen(facts, k, choose):
            far = max(far, vectors.distance(got, wanted))
    limit = max(limits.UPDATED, limit, right.limit)
    if far > limit:
        return None
    text = "right: the optimizers get the mean of the ranks' gradients, changed as in one process"
    figures = Figures(far, limit)
    return Link(LABEL, True, f"{text} {figures}", limit, figures=figures)
