"""Link 1: do the optimizers get the mean of the ranks' own gradients?  Seen in their notes."""

import dataclasses
import math

import torch

from equivalence import limits, vectors
from equivalence.explain import LABEL, Gradients, explain, multiple
from equivalence.facts import Facts
from equivalence.notes import Notes, Step
from equivalence.vectors import Vector
from equivalence.words import PARTS, Link, apart, percent, some_of


@dataclasses.dataclass
class Known:
    """What one process has shown, if link 2 was answered."""

    weights: list[list[float]]  # of each share in one process's gradient, in each step
    facts: Facts  # the processes' notes, and one process's: without BatchNorm, say, if that
    notes: Notes  # is the only thing that differs
    limit: float  # of link 2


def averaging(facts: Facts, known: Known | None) -> Link:
    if facts.may_have_parts:
        return Link(LABEL, None, why=PARTS)
    if not facts.are_own_seen():
        return Link(LABEL, None, why="the ranks' own gradients were not seen")
    if not any(rank.steps[0].got for rank in facts.ranks):
        return Link(LABEL, None, why="the optimizer has parameters of its own")
    count = len(facts.own(0))
    even = [[1 / count] * count for _ in facts.steps]
    shares = known.weights if known else even
    goals = [vectors.combine(facts.own(k), shares[k]) for k in facts.steps]
    limit = limit_of(facts)
    bad, worst, far = compare(facts, goals, limit)
    if not bad:
        clipped = ", clipped" if any(step.clips for step in facts.ranks[0].steps) else ""
        text = f"right: the optimizers get {in_shares(shares)}{clipped} {apart(far, limit)}"
        return Link(LABEL, True, text, limit)
    gradients = gradients_of(facts, goals, shares, bad, worst)
    if link := sent_coarsely(facts, goals, limit):
        return link
    if known and (link := changed_as_alone(known, limit)):
        return link
    return explain(facts, gradients, is_known=bool(known), far=apart(far, limit))


def before_clip(facts: Facts, step: int) -> list[Vector]:
    """What each rank's optimizers got; if clip_grad_norm_ has made it so, what that got."""
    return [vectors.only(unclipped(rank.steps[step]), facts.trained) for rank in facts.ranks]


def unclipped(step: Step) -> Vector:
    gradients = dict(step.got)
    for clip in reversed(step.clips):
        times = clip.most / (clip.norm + 1e-6)  # 1e-6: as torch does
        if not 0 < times < 1:
            continue
        part = vectors.combine([vectors.only(gradients, set(clip.names))], [1 / times])
        is_last = abs(vectors.length(part) - clip.norm) <= limits.CLIPPED * clip.norm
        if is_last:  # nothing else has changed them since
            gradients |= part
    return gradients


def limit_of(facts: Facts) -> float:
    step = facts.ranks[0].steps[0]
    tensors = [*step.own.values(), *step.got.values()]
    is_coarse = any(torch.finfo(tensor.dtype).eps > limits.COARSE for tensor in tensors)
    return limits.AVERAGED_COARSE if is_coarse else limits.AVERAGED


def compare(facts: Facts, goals: list[Vector], limit: float) -> tuple[list[str], int, float]:
    """The tensors that are not the goal, the step in which they are furthest, and how far."""
    furthest: dict[str, float] = {}
    worst, most = 0, 0.0
    for k, goal in enumerate(goals):
        sizes, in_step = vectors.mean_lengths(facts.own(k)), 0.0
        all_got = before_clip(facts, k)
        for name in goal:
            for got in all_got:
                far = vectors.distance_in(name, got, goal, sizes.get(name, 0.0))
                furthest[name] = max(furthest.get(name, 0.0), far)
                in_step = max(in_step, far)
        # Where copies differ, shares are not exact: an earlier step says more.
        if in_step > most * 1.001 and (k < facts.first_unequal or not most):
            worst, most = k, in_step
    bad = [name for name, far in furthest.items() if far > limit]
    return bad, worst, max(furthest.values(), default=0.0)


def gradients_of(facts: Facts, goals: list, shares: list, bad: list[str], step: int) -> Gradients:
    names = set().union(*goals)
    right = len(names) - len(bad)
    place = ""
    if right:
        place = f" of {some_of(bad)} (the other {right} of {len(names)} tensors are right)"
    own = [vectors.only(part, set(bad)) for part in facts.own(step)]
    goal = vectors.only(goals[step], set(bad))
    got = [vectors.only(vector, set(bad)) for vector in before_clip(facts, step)]
    return Gradients(step, own, got, goal, shares[step], place)


def in_shares(shares: list[list[float]]) -> str:
    even = [1 / len(shares[0])] * len(shares[0])
    if all(vectors.near(weights, [1.0] * len(weights), limits.COEFFICIENT) for weights in shares):
        return "the sum of what the ranks' examples contribute"
    for number, weights in enumerate(shares):
        if not vectors.near(weights, even, limits.COEFFICIENT):
            text = "the ranks' gradients, each as heavy as in one process:"
            return f"{text} {percent(weights)} in step {number + 1}"
    return "the mean of the ranks' gradients"


# ------------------------------------------------------------------------------ changed on purpose


def sent_coarsely(facts: Facts, goals: list[Vector], limit: float) -> Link | None:
    """If each number is rounded as a message in float16 or bfloat16 rounds it, and no more."""
    for dtype in torch.float16, torch.bfloat16:
        most, far = torch.finfo(dtype).eps, 0.0
        for k, goal in enumerate(goals):
            for got in before_clip(facts, k):
                if not is_rounded(got, goal, facts.own(k), torch.finfo(dtype), limit):
                    far = math.inf
                far = max(far, vectors.distance(got, goal))
        if far <= most:
            name = str(dtype).removeprefix("torch.")
            text = (
                "right: the optimizers get the mean of the ranks' gradients, rounded on the way to"
            )
            return Link(LABEL, True, f"{text} {name} {apart(far, most)}", most)
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


def changed_as_alone(known: Known, limit: float) -> Link | None:
    """If one process's optimizer gets the same: the program changes gradients, such as clips."""
    facts, alone, far = known.facts, known.notes, 0.0
    for k in facts.comparable():
        wanted = vectors.only(unclipped(alone.steps[k]), facts.trained)
        for got in before_clip(facts, k):
            far = max(far, vectors.distance(got, wanted))
    limit = max(limits.UPDATED, limit, known.limit)
    if far > limit:
        return None
    for k in facts.comparable():
        if times := hidden_by_clip(facts, alone, k):
            text = f"WRONG: clip_grad_norm_ got {multiple(times, len(facts.ranks))}"
            return Link(LABEL, False, f"{text} of one process's gradients")
    text = "right: the optimizers get the mean of the ranks' gradients, changed as in one process"
    return Link(LABEL, True, f"{text} {apart(far, limit)}", limit)


def hidden_by_clip(facts: Facts, alone: Notes, step: int) -> float:
    """If clip_grad_norm_ got so many times the mean: clipped, it is no longer seen; else 0."""
    norms = []
    for notes in [*facts.ranks, alone]:
        norms.append([clip.norm for clip in notes.steps[step].clips])
    for *several, one in zip(*norms, strict=False):
        times = several[0] / max(one, 1e-150)
        are_equal = max(several) - min(several) <= limits.CLIPPED * max(several)
        if are_equal and abs(times - 1) > limits.COEFFICIENT:
            return times
    return 0.0
