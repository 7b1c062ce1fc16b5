"""What the optimizers got, if it is not the mean of the ranks' own gradients."""

import dataclasses

from equivalence import clipping, limits, vectors
from equivalence.facts import Facts
from equivalence.vectors import Fit, Vector
from equivalence.verdict import Figures, Link, made_of, percent

LABEL = "averaging"
DEPENDS = "whether that is right depends on the loss (one batch)"
LATE = "are some backward passes averaged, and others not (no_sync is set too late)?"
UNEVEN = "the mean of means is not the mean (unequal numbers of examples, tokens or labels?)"
DIVIDED = (
    "these are the sum of the ranks' (a loss that is divided by the number of processes, is a sum "
    "over examples, or looks at all ranks' outputs), and the mean divides by"
)


@dataclasses.dataclass
class Gradients:
    """Gradients of one step: those tensors in which the optimizers' are not the goal."""

    step: int
    own: list[Vector]
    got: list[Vector]
    goal: Vector
    proper: list[float]  # how much each rank's should count
    place: str  # which tensors, if not all


def explain(facts: Facts, gradients: Gradients, is_known: bool, figures: Figures) -> Link:
    """is_known: how much each rank's should count; else the mean is a guess."""
    if not vectors.are_near(gradients.got, limits.UPDATED):
        return wrong(unequal(facts, gradients), figures)
    fit = vectors.fit(gradients.got[0], gradients.own)
    if not is_known and (text := perhaps_right(gradients, fit, figures)):
        return Link(LABEL, None, text, why=f"{text}; {DEPENDS}", figures=figures)
    return wrong(in_words(fit, gradients), figures)


def wrong(text: str, figures: Figures) -> Link:
    return Link(LABEL, False, f"WRONG: {text}", figures=figures)


def perhaps_right(gradients: Gradients, fit: Fit, figures: Figures) -> str:
    """What they got, if that is right for some losses: a sum over all ranks' examples, say."""
    times = vectors.fit(gradients.got[0], [gradients.goal])
    if times.left < limits.OWN and not gradients.place:
        return f"the optimizers get {times.weights[0]:.4g} times the mean of the ranks' gradients"
    if fit.is_clear and fit.left < limits.OWN and min(fit.weights) > limits.COEFFICIENT:
        return f"the optimizers get {made_of(fit.weights)}{gradients.place}"
    if fit.left > limits.MOST_COARSE:
        text = f"the optimizers don't get the mean of the ranks' gradients {figures}"
        return f"{text}: changed on purpose?"
    return ""


def unequal(facts: Facts, gradients: Gradients) -> str:
    """What is wrong, if the ranks' optimizers get different gradients."""
    got, own, place = gradients.got, gradients.own, gradients.place
    if text := clipping.too_early(facts.ranks, gradients.step, set(gradients.goal)):
        return text
    if are_multiples(got, own):
        text = f"each rank's optimizer gets the gradients of its own share{place}"
        return f"{text}: nobody averages them"
    text = f"the ranks' gradients differ{place}"
    if vectors.distance(vectors.mean(got), vectors.mean(own)) < limits.OWN:
        return f"{text}, and only their mean is right: {LATE}"
    fits = [vectors.fit(part, own) for part in got]
    if any(fit.left > limits.MOST_COARSE or not fit.is_clear for fit in fits):
        return text
    texts = [f"rank {rank} has {made_of(fit.weights)}" for rank, fit in enumerate(fits)]
    return f"{text}: {'; '.join(texts)}"


def are_multiples(got: list[Vector], own: list[Vector]) -> bool:
    """Whether each rank got a multiple of its own gradients (they may be clipped)."""
    if len(got) != len(own):
        return False
    for part, own_part in zip(got, own, strict=True):
        fit = vectors.fit(part, [own_part])
        if fit.left > limits.UPDATED or abs(fit.weights[0]) < limits.COEFFICIENT:
            return False
    return True


def in_words(fit: Fit, gradients: Gradients) -> str:
    """What all optimizers got, as a combination of the ranks' gradients."""
    weights, proper, place = fit.weights, gradients.proper, gradients.place
    count = len(weights)
    if not fit.is_clear:
        return f"not the mean{place}; as the ranks' gradients are parallel, no more can be said"
    if fit.left > limits.MOST_COARSE:
        return f"they are not made of the ranks' gradients{place} (nearest: {made_of(weights)})"
    ratios = [weight / (right or 1e-9) for weight, right in zip(weights, proper, strict=True)]
    times = sum(ratios) / count
    small = limits.COEFFICIENT * max(abs(ratio) for ratio in ratios)
    rest = f", and something else ({fit.left:.0e})" if fit.left > limits.MOST else ""
    lost = [f"rank {k}'s" for k, ratio in enumerate(ratios) if abs(ratio) < small]
    if lost:
        return f"{' and '.join(lost)} examples don't count in the gradients{place}{rest}"
    if max(ratios) - min(ratios) > 2 * small:
        text = f"the shares count {percent(weights)}{place}, in one process {percent(proper)}"
        return f"{text}: {UNEVEN}{rest}"
    of_one = f"one process's gradients{place}"
    if abs(times - 1) < limits.COEFFICIENT:
        return f"{of_one}, and something else ({fit.left:.0e})"
    if abs(times - count) < limits.COEFFICIENT * count:
        return f"{count} times {of_one}: summed, not averaged{rest}"
    if abs(times * count - 1) < limits.COEFFICIENT:
        is_sum = vectors.near(proper, [1.0] * count, limits.COEFFICIENT)
        why = f"{DIVIDED} {count} again" if is_sum else "divided by the number of processes twice"
        return f"1/{count} of {of_one}: {why}{rest}"
    return f"{times:.7g} times {of_one}{rest}"
