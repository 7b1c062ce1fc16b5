"""What the optimizers got, if it is not the mean of the ranks' own gradients."""

import dataclasses

from equivalence import limits, vectors
from equivalence.facts import Facts
from equivalence.vectors import Fit, Vector
from equivalence.words import Link, made_of, percent

LABEL = "averaging"
DEPENDS = "whether that is right depends on the loss (one batch)"


@dataclasses.dataclass
class Gradients:
    """Of the step in which the optimizers' are furthest from the goal, the tensors that are."""

    step: int
    own: list[Vector]
    got: list[Vector]
    goal: Vector
    proper: list[float]  # how much each rank's should count
    place: str  # which tensors, if not all


def explain(facts: Facts, gradients: Gradients, is_known: bool, far: str) -> Link:
    """is_known: how much each rank's should count; else the mean is a guess."""
    first = gradients.got[0]
    are_equal = all(vectors.distance(got, first) < limits.UPDATED for got in gradients.got)
    if not are_equal:
        return wrong(unequal(facts, gradients))
    if early := clipped_early(facts, gradients.step):
        return wrong(early)
    fit = vectors.fit(first, gradients.own)
    if not is_known and (text := perhaps_right(facts, gradients, fit, far)):
        return Link(LABEL, None, text, why=f"{text}; {DEPENDS}")
    return wrong(in_words(fit, gradients))


def wrong(text: str) -> Link:
    return Link(LABEL, False, f"WRONG: {text}")


def perhaps_right(facts: Facts, gradients: Gradients, fit: Fit, far: str) -> str:
    """What they got, if that is right for some losses: a sum over all ranks' examples, say."""
    times = vectors.fit(gradients.got[0], [gradients.goal])
    if times.left < limits.OWN and not gradients.place:
        text = multiple(times.weights[0], len(facts.ranks))
        return f"the optimizers get {text} of the ranks' gradients"
    if fit.is_clear and fit.left < limits.OWN and min(fit.weights) > limits.COEFFICIENT:
        return f"the optimizers get {made_of(fit.weights)}{gradients.place}"
    if fit.left > limits.MOST_COARSE:
        return (
            f"the optimizers don't get the mean of the ranks' gradients {far}: changed on purpose?"
        )
    return ""


def multiple(times: float, count: int) -> str:
    if abs(times - count) < limits.COEFFICIENT * count:
        return "the sum, and not the mean,"
    if abs(times * count - 1) < limits.COEFFICIENT:
        return f"1/{count} of the mean"
    return f"{times:.4g} times the mean"


def unequal(facts: Facts, gradients: Gradients) -> str:
    """The ranks' optimizers get different gradients."""
    if are_their_own(gradients):
        text = f"each rank's optimizer gets the gradients of its own share{gradients.place}"
        return f"{text}: nobody averages them"
    late = "(no_sync, or require_backward_grad_sync, is set too late?)"
    if only_first_is_averaged(facts, gradients):
        text = "the first of a step's backward passes is averaged, and the last is not"
        return f"{text}{gradients.place} {late}"
    if early := clipped_early(facts, gradients.step):
        return early
    if vectors.distance(vectors.mean(gradients.got), vectors.mean(gradients.own)) < limits.OWN:
        text = "of a step's backward passes some are averaged, and others are not"
        return f"{text}{gradients.place} {late}"
    fits = [vectors.fit(got, gradients.own) for got in gradients.got]
    if any(fit.left > limits.MOST_COARSE or not fit.is_clear for fit in fits):
        return f"the ranks' gradients differ{gradients.place}"
    texts = [f"rank {rank} has {made_of(fit.weights)}" for rank, fit in enumerate(fits)]
    return f"the ranks' gradients differ{gradients.place}: {'; '.join(texts)}"


def are_their_own(gradients: Gradients) -> bool:
    """Each a multiple of the rank's own: it may be clipped."""
    if len(gradients.got) != len(gradients.own):
        return False
    for got, own in zip(gradients.got, gradients.own, strict=True):
        fit = vectors.fit(got, [own])
        if fit.left > limits.CLIPPED or abs(fit.weights[0]) < limits.COEFFICIENT:
            return False
    return True


def only_first_is_averaged(facts: Facts, gradients: Gradients) -> bool:
    names = set(gradients.goal)
    firsts = [vectors.only(rank.steps[gradients.step].first, names) for rank in facts.ranks]
    pairs = zip(gradients.own, firsts, strict=False)
    rests = [vectors.difference(own, first) for own, first in pairs]
    if not any(map(vectors.length, rests)):
        return False
    first = vectors.mean(firsts)
    made = [vectors.combine([first, rest], [1.0, 1.0]) for rest in rests]
    pairs = zip(gradients.got, made, strict=False)
    return all(vectors.distance(got, expected) < limits.OWN for got, expected in pairs)


def clipped_early(facts: Facts, step: int) -> str:
    """If clip_grad_norm_ got other gradients on each rank, and they were averaged after it."""
    norms = [[clip.norm for clip in rank.steps[step].clips] for rank in facts.ranks]
    of_clips = list(zip(*norms, strict=False))
    if not any(max(some) - min(some) > limits.CLIPPED * max(some) for some in of_clips):
        return ""
    lengths = ", ".join(f"{of_rank[0]:.3g}" for of_rank in norms)
    text = f"clip_grad_norm_ got other gradients on each rank (of length {lengths})"
    return f"{text}: average them before they are clipped"


def in_words(fit: Fit, gradients: Gradients) -> str:
    """What all optimizers got, as a combination of the ranks' gradients."""
    weights, proper, place = fit.weights, gradients.proper, gradients.place
    count = len(weights)
    if not fit.is_clear:
        return f"not the mean{place}; as the ranks' gradients are parallel, no more can be said"
    ratios = [weight / (right or 1e-9) for weight, right in zip(weights, proper, strict=True)]
    times = sum(ratios) / count
    uneven = max(ratios) - min(ratios)
    if fit.left > limits.MOST_COARSE:
        return f"they are not made of the ranks' gradients{place} (nearest: {made_of(weights)})"
    if abs(times - 1) < limits.COEFFICIENT and uneven < 2 * limits.COEFFICIENT:
        return (
            f"they are the mean of the ranks' gradients{place}, and something else ({fit.left:.0e})"
        )
    rest = f", and something else ({fit.left:.0e})" if fit.left > limits.MOST else ""
    lost = [f"rank {k}'s" for k, ratio in enumerate(ratios) if abs(ratio) < limits.COEFFICIENT]
    if lost:
        return f"{' and '.join(lost)} examples don't count in the gradients{place}{rest}"
    if uneven > 2 * limits.COEFFICIENT * max(abs(ratio) for ratio in ratios):
        text = f"the shares count {percent(weights)}{place}, in one process {percent(proper)}: "
        text += "the mean of means is not the mean (unequal numbers of examples, tokens or labels?)"
        return f"{text}{rest}"
    of_one = f"one process's gradients{place}"
    is_sum = vectors.near(proper, [1.0] * count, limits.COEFFICIENT)
    if is_sum and abs(times * count - 1) < limits.COEFFICIENT:
        text = f"1/{count} of {of_one}: these are the sum of the ranks' (a loss that is divided by"
        text += " the number of processes, is a sum over examples, or looks at all ranks' outputs)"
        return f"{text}, and the mean divides by {count} again"
    if abs(times - count) < limits.COEFFICIENT * count:
        return f"{count} times {of_one}: summed, not averaged{rest}"
    if abs(times * count - 1) < limits.COEFFICIENT:
        return f"1/{count} of {of_one}: divided by the number of processes twice{rest}"
    return f"{times:.7g} times {of_one}{rest}"
