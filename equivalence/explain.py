"""What the optimizers got, if it is not the mean of the ranks' own gradients."""

import dataclasses

from equivalence import clipping, limits, vectors
from equivalence.facts import Facts
from equivalence.vectors import Fit, Vector
from equivalence.verdict import Figures, Link, made_of, percent

LABEL = "averaging"
DEPENDS = "whether that is right depends on the loss: link 2, one batch, would tell"
LATE = "are some backward passes averaged, and others not (no_sync is set too late)?"
UNEVEN = "the mean of means is not the mean (unequal numbers of examples, tokens or labels?)"
DIVIDED = (
    "the sum of the ranks' gradients is right here (the loss is divided by the number of "
    "processes, is a sum over examples, or looks at all ranks' outputs), and the mean divides it by"
)


@dataclasses.dataclass
class WrongGradients:
    """Gradients of one step, of those tensors in which the optimizers did not get the goal."""

    step: int
    own: list[Vector]
    got: list[Vector]
    goal: Vector
    proper: list[float]  # factors: how much each rank's gradient should count
    place: str  # which tensors, if not all


def explain(facts: Facts, gradients: WrongGradients, is_known: bool, figures: Figures) -> Link:
    """Link 1, wrong or not found out.  is_known: the proper factors; else the mean is a guess."""
    if not vectors.are_near(gradients.got, limits.UPDATED):
        return wrong(unequal_in_words(facts, gradients), figures)
    fit = vectors.fit(gradients.got[0], gradients.own)
    if not is_known and (text := perhaps_right(gradients, fit, figures)):
        return Link(LABEL, None, text, why=f"{text}; {DEPENDS}", figures=figures)
    return wrong(equal_in_words(fit, gradients), figures)


def wrong(text: str, figures: Figures) -> Link:
    return Link(LABEL, False, f"WRONG: {text}", figures=figures)


def perhaps_right(gradients: WrongGradients, fit: Fit, figures: Figures) -> str:
    """What the optimizers got, if that is right for some losses (sums over examples, say)."""
    times = vectors.fit(gradients.got[0], [gradients.goal])
    if times.left < limits.EQUAL and not gradients.place:
        return f"the optimizers get {times.factors[0]:.4g} times the mean of the ranks' gradients"
    if fit.is_clear and fit.left < limits.EQUAL and min(fit.factors) > limits.FACTOR:
        return f"the optimizers get {made_of(fit.factors)}{gradients.place}"
    if fit.left > limits.MOST_COARSE:
        text = f"the optimizers don't get the mean of the ranks' gradients {figures}"
        return f"{text}, perhaps on purpose"
    return ""


def unequal_in_words(facts: Facts, gradients: WrongGradients) -> str:
    """The mistake in words, if the ranks' optimizers got different gradients."""
    got, own, place = gradients.got, gradients.own, gradients.place
    if text := clipping.too_early(facts.ranks, gradients.step, set(gradients.goal)):
        return text
    if are_multiples(got, own):
        text = f"each rank's optimizer gets the gradients of its own share{place}"
        return f"{text}: nobody averages them"
    text = f"the ranks' gradients differ{place}"
    if vectors.distance(vectors.mean(got), vectors.mean(own)) < limits.EQUAL:
        return f"{text}, and only their mean is right: {LATE}"
    fits = [vectors.fit(part, own) for part in got]
    if any(fit.left > limits.MOST_COARSE or not fit.is_clear for fit in fits):
        return text
    texts = [f"rank {rank} has {made_of(fit.factors)}" for rank, fit in enumerate(fits)]
    return f"{text}: {'; '.join(texts)}"


def are_multiples(got: list[Vector], own: list[Vector]) -> bool:
    """Whether each rank got a multiple of its own gradients (they may be clipped)."""
    if len(got) != len(own):
        return False
    for part, own_part in zip(got, own, strict=True):
        fit = vectors.fit(part, [own_part])
        if fit.left > limits.UPDATED or abs(fit.factors[0]) < limits.FACTOR:
            return False
    return True


def equal_in_words(fit: Fit, gradients: WrongGradients) -> str:
    """The mistake in words, if all optimizers got the same combination of ranks' gradients."""
    factors, proper, place = fit.factors, gradients.proper, gradients.place
    count = len(factors)
    if not fit.is_clear:
        return f"not the mean{place}; as the ranks' gradients are parallel, no more can be said"
    if fit.left > limits.MOST_COARSE:
        nearest = f"(nearest: {made_of(factors)})"
        return f"the optimizers get no combination of the ranks' gradients{place} {nearest}"
    ratios = [factor / (right or 1e-9) for factor, right in zip(factors, proper, strict=True)]
    times = sum(ratios) / count
    small = limits.FACTOR * max(abs(ratio) for ratio in ratios)
    rest = f", and something else ({fit.left:.0e})" if fit.left > limits.MOST else ""
    lost = [f"rank {k}'s" for k, ratio in enumerate(ratios) if abs(ratio) < small]
    if lost:
        return f"{' and '.join(lost)} examples don't count in the gradients{place}{rest}"
    if max(ratios) - min(ratios) > 2 * small:
        text = f"the shares count {percent(factors)}{place}, in one process {percent(proper)}"
        return f"{text}: {UNEVEN}{rest}"
    of_one = f"one process's gradients{place}"
    if abs(times - 1) < limits.FACTOR:
        return f"{of_one}, and something else ({fit.left:.0e})"
    if abs(times - count) < limits.FACTOR * count:
        return f"{count} times {of_one}: summed, not averaged{rest}"
    if abs(times * count - 1) < limits.FACTOR:
        is_sum = vectors.numbers_are_near(proper, [1.0] * count, limits.FACTOR)
        why = f"{DIVIDED} {count}" if is_sum else "divided by the number of processes twice"
        return f"1/{count} of {of_one}: {why}{rest}"
    return f"{times:.7g} times {of_one}{rest}"
