"""What the optimizers got, if it is not the mean of the ranks' own gradients."""

import dataclasses

from equivalence import limits, vectors
from equivalence.facts import Facts
from equivalence.vectors import Fit, Vector
from equivalence.words import Link, list_of, made_of, percent

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


def explain(facts: Facts, found: Gradients, is_known: bool, far: str) -> Link:
    """is_known: how much each rank's should count; else the mean is a guess."""
    are_equal = all(vectors.distance(got, found.got[0]) < limits.UPDATED for got in found.got)
    if not are_equal:
        return wrong(unequal(facts, found))
    if early := clipped_early(facts, found.step):
        return wrong(early)
    fit = vectors.fit(found.got[0], found.own)
    if not is_known and (text := perhaps_right(facts, found, fit, far)):
        return Link(LABEL, None, text, why=f"{text}; {DEPENDS}")
    return wrong(in_words(fit, found))


def wrong(text: str) -> Link:
    return Link(LABEL, False, f"WRONG: {text}")


def perhaps_right(facts: Facts, found: Gradients, fit: Fit, far: str) -> str:
    """What they got, if that is right for some losses: a sum over all ranks' examples, say."""
    times = vectors.fit(found.got[0], [found.goal])
    if times.left < limits.OWN and not found.place:
        text = multiple(times.weights[0], len(facts.ranks))
        return f"the optimizers get {text} of the ranks' gradients"
    if fit.is_clear and fit.left < limits.OWN and min(fit.weights) > limits.COEFFICIENT:
        return f"the optimizers get {made_of(fit.weights)}{found.place}"
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


def unequal(facts: Facts, found: Gradients) -> str:
    """The ranks' optimizers get different gradients."""
    if are_their_own(found):
        text = f"each rank's optimizer gets the gradients of its own share{found.place}"
        return f"{text}: nobody averages them"
    late = "(no_sync, or require_backward_grad_sync, is set too late?)"
    if only_first_is_averaged(facts, found):
        text = "the first of a step's backward passes is averaged, and the last is not"
        return f"{text}{found.place} {late}"
    if early := clipped_early(facts, found.step):
        return early
    if vectors.distance(vectors.mean(found.got), vectors.mean(found.own)) < limits.OWN:
        text = "of a step's backward passes some are averaged, and others are not"
        return f"{text}{found.place} {late}"
    fits = [vectors.fit(got, found.own) for got in found.got]
    if any(fit.left > limits.MOST_COARSE or not fit.is_clear for fit in fits):
        return f"the ranks' gradients differ{found.place}"
    texts = [f"rank {rank} has {made_of(fit.weights)}" for rank, fit in enumerate(fits)]
    return f"the ranks' gradients differ{found.place}: {'; '.join(texts)}"


def are_their_own(found: Gradients) -> bool:
    """Each a multiple of the rank's own: it may be clipped."""
    if len(found.got) != len(found.own):
        return False
    for got, own in zip(found.got, found.own, strict=True):
        fit = vectors.fit(got, [own])
        if fit.left > limits.CLIPPED or abs(fit.weights[0]) < limits.COEFFICIENT:
            return False
    return True


def only_first_is_averaged(facts: Facts, found: Gradients) -> bool:
    names = set(found.goal)
    firsts = [vectors.only(rank.steps[found.step].first, names) for rank in facts.ranks]
    rests = [vectors.difference(own, one) for own, one in zip(found.own, firsts, strict=False)]
    if not any(map(vectors.length, rests)):
        return False
    first = vectors.mean(firsts)
    made = [vectors.combine([first, rest], [1.0, 1.0]) for rest in rests]
    pairs = zip(found.got, made, strict=False)
    return all(vectors.distance(got, one) < limits.OWN for got, one in pairs)


def clipped_early(facts: Facts, step: int) -> str:
    """If clip_grad_norm_ got other gradients on each rank, and they were averaged after it."""
    norms = [[clip.norm for clip in rank.steps[step].clips] for rank in facts.ranks]
    pairs = list(zip(*norms, strict=False))
    if not any(max(same) - min(same) > limits.CLIPPED * max(same) for same in pairs):
        return ""
    lengths = ", ".join(f"{one[0]:.3g}" for one in norms)
    text = f"clip_grad_norm_ got other gradients on each rank (of length {lengths})"
    return f"{text}: average them before they are clipped"


def in_words(fit: Fit, found: Gradients) -> str:
    """What all optimizers got, as a combination of the ranks' gradients."""
    weights, proper, place = fit.weights, found.proper, found.place
    count = len(weights)
    if not fit.is_clear:
        return f"not the mean{place}; as the ranks' gradients are parallel, no more can be said"
    ratios = [one / (right or 1e-9) for one, right in zip(weights, proper, strict=True)]
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
        return f"{list_of(lost)} examples don't count in the gradients{place}{rest}"
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
