"""Do the optimizers receive the mean of the ranks' local gradients?

And is that what one process's optimizer would receive, after its own program has clipped it?
"""

import re

import torch

from ddp_by_diff.equivalence import limits, one_batch, vectors, verdict
from ddp_by_diff.equivalence.facts import Facts
from ddp_by_diff.equivalence.notes import Notes, Step
from ddp_by_diff.equivalence.one_batch import Look, combination
from ddp_by_diff.equivalence.vectors import Fit, Vector
from ddp_by_diff.equivalence.verdict import Check, Figures, Reason, inconclusive

LABEL = "averaging"
MEAN = "the optimizers receive the mean of the ranks' gradients"
OWN_PARAMETERS = Reason(
    "the optimizer has parameters of its own",
    "in a copy, give the optimizer the model's own parameters",
)
COARSE_MESSAGES = Reason(
    "the difference may be rounding of messages in 16 bits",
    "in a copy, send gradients in float32 (no hook that compresses; no reduce_dtype)",
)
DEPENDS = "whether that is right depends on the loss: the check `one batch` would tell"
UNEVEN = (
    "Do the ranks have different numbers of examples, tokens or labels? Then the mean of their "
    "means is not the overall mean"
)
DIVIDED = "their sum is right for this loss (a sum, or divided before), and the mean divides it by"


def averaging(facts: Facts, right: Look | None, weights: Check) -> Check:
    """The check.  right: the look in which `one batch` is right, if any.  weights: that check."""
    check = of_the_mean(facts, right)
    if right:
        check = of_the_whole_step(right, check)
    if check.is_right is False and weights.is_right and not (facts.unequal or facts.forced):
        # The program averages the weights after the step, or the gradients in it.
        text = "ok: a step begins with each rank's local gradients, and ends as with their mean"
        return Check(LABEL, True, text, weights.limit)
    return check


def in_weights(weights: Check) -> Check:
    """The check if the optimizers have parameters of their own: the weights alone can tell."""
    if weights.is_right is None:
        return inconclusive(LABEL, OWN_PARAMETERS)
    text = f"ok: seen in the weights only, as {OWN_PARAMETERS.sentence}"
    return Check(LABEL, True, text, weights.limit)


def of_the_mean(facts: Facts, right: Look | None) -> Check:
    """Whether the gradients, before they were clipped, are the mean."""
    count = len(facts.owns[0])
    factors = [[1 / count] * count for _ in facts.steps]
    if right and len(right.factors[0]) == count:  # else the ranks do the same work without dropout
        factors = right.factors
    goals = [vectors.combine(facts.owns[k], factors[k]) for k in facts.steps]
    steps = [[rank.steps[k] for rank in facts.ranks] for k in facts.steps]
    gots = [[vectors.only(before(one), facts.trained) for one in some] for some in steps]
    limit = limit_of(facts)
    bad, worst, far = furthest_from_goals(facts, gots, goals, limit)
    figures = Figures(far, limit)
    if not bad:
        text = MEAN.replace("mean", combination(factors))
        return ok(text + clipped_in_words(facts.ranks), figures)
    differ = [[vectors.only(got, set(bad)) for got in in_step] for in_step in gots]
    if check := sent_coarsely(facts, differ, goals, figures):
        return check
    tensors = len(set().union(*goals))
    place = f" of {len(bad)} of {tensors} tensors ({verdict.some_of(bad)})" * (len(bad) < tensors)

    def explained(step: int) -> Check:
        own = [vectors.only(part, set(bad)) for part in facts.owns[step]]
        got = differ[step]
        text = "" if right else perhaps_right(got, own, vectors.only(goals[step], set(bad)), place)
        if text:
            return inconclusive(LABEL, Reason(f"{text}; {DEPENDS}", ""), text, figures)
        if vectors.are_near(got, limits.UPDATED):
            text = equal_in_words(vectors.fit(got[0], own), factors[step], place)
            text = "before clipping, " * any(one.unclipped for one in steps[step]) + text
        clipped = [vectors.only(one.got, set(bad)) for one in steps[step] if one.unclipped]
        return wrong(text or unlike_in_words(got, own, clipped, place), figures)

    checks = {k: explained(k) for k in facts.steps if not goals[k].keys().isdisjoint(bad)}
    check = checks.get(worst) or explained(worst)
    if check.is_right is None or len({one.text for one in checks.values()}) == 1:
        return check
    same = ", ".join(str(k + 1) for k, one in checks.items() if one == check)
    kinds = {re.sub(r"\d", "", one.text) for one in checks.values()}  # without their numbers
    where = f"in {'each step, such as ' * (len(kinds) == 1)}step {same}"
    return check._replace(text=check.text.replace("WRONG:", f"WRONG {where}:"))


def before(step: Step) -> Vector:
    """The gradients of a step, before they were clipped."""
    return step.got | step.unclipped


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
        for got in gots[k]:
            for name, far in vectors.distances(got, goal, sizes).items():
                furthest[name] = max(furthest.get(name, 0.0), far)
                in_step = max(in_step, far)
        # After copies have become different, `factors` are not exact: an earlier step says more.
        if in_step > most * 1.001 and (k < facts.first_unequal or not most):
            worst, most = k, in_step
    bad = [name for name, far in furthest.items() if far > limit]
    return bad, worst, max(furthest.values(), default=0.0)


def is_clipped(ranks: list[Notes]) -> bool:
    """Whether clipping has changed a gradient."""
    return any(step.unclipped for rank in ranks for step in rank.steps)


def clipped_in_words(ranks: list[Notes]) -> str:
    """Whether clipping has changed a gradient; if it never did, it was not tested."""
    if is_clipped(ranks):
        return ", clipped"
    if any(rank.has_clipped for rank in ranks):
        return ", not clipped (clipping was not active in these steps, so it was not tested)"
    return ""


def of_the_whole_step(right: Look, check: Check) -> Check:
    """Whether the optimizers receive what one process's optimizer would have received.

    Its own program has clipped, scaled or masked it, before it was given the ranks' gradients.
    """
    facts = right.facts
    most = min(limits.YARDSTICKS * max([*right.rounding.values(), 0.0]), facts.rounding_limit)
    limit = max(limits.UPDATED, limit_of(facts), check.limit, right.limit, most)
    is_part = any(facts.comparable_names(k) < facts.trained for k in facts.comparable)
    far, k, got, wanted = furthest_from_alone(right, is_before=False)
    if not check.is_right:
        earlier, place, sent, made = furthest_from_alone(right, is_before=True)
        if earlier > limit >= far and not is_part:
            text = check.text.replace("WRONG: ", "").replace("before clipping", "before")
            text = f"after clipping, the gradients are those of one process; {text}"
            return ok(text, Figures(far, limit))
        if earlier > limit:
            own, times = right.alone.notes.steps[place].own, vectors.fit(sent, [made])
            is_changed = vectors.distance(made, vectors.only(own, set(made))) > limit
            text = f"{times.factors[0]:.7g} times what one process's optimizer receives"
            is_multiple = is_changed and times.left < limits.EQUAL
            return wrong(text, Figures(earlier, limit)) if is_multiple else check
    figures, times = Figures(far, limit), vectors.fit(got, [wanted])
    if far <= limit:
        if not check.is_right and is_part:
            return check  # of the others, these gradients tell nothing
        if check.is_right and not is_clipped(facts.ranks):
            return check._replace(limit=max(check.limit, limit))
        return ok(f"{MEAN}, changed as in one process", figures)
    if one_batch.draws_others(right, k):
        return inconclusive(LABEL, one_batch.DRAWS, MEAN, figures)
    if is_clipped([*facts.ranks, right.alone.notes]):
        lengths = f"{vectors.length(got):.3g}, but {vectors.length(wanted):.3g} in one process"
        return wrong(f"after clipping, the mean has length {lengths} {figures}", figures)
    if times.left <= limit:
        what = f"{times.factors[0]:.7g} times what one process's optimizer receives"
        return wrong(f"{MEAN}, which is {what}", figures)
    return wrong(f"the mean is changed otherwise than in one process {figures}", figures)


def furthest_from_alone(right: Look, is_before: bool) -> tuple[float, int, Vector, Vector]:
    """The largest distance from what one process's optimizer would get; its step; both vectors.

    is_before: of the gradients before they were clipped.
    """
    facts = right.facts
    worst: tuple[float, int, Vector, Vector] = 0.0, 0, {}, {}
    for k in facts.comparable:
        names = facts.comparable_names(k)
        alone = right.alone.notes.steps[k]
        wanted = vectors.only(before(alone) if is_before else alone.got, names)
        own = [vectors.only(part, names) for part in facts.owns[k]]
        # Relative to the own gradients, which may be longer: so much the program has shrunk them.
        shrunk = vectors.length(wanted) / (vectors.length(vectors.mean(own)) or 1.0)
        own = [vectors.combine([part], [min(1.0, shrunk)]) for part in own]
        for rank in facts.ranks:
            step = rank.steps[k]
            got = vectors.only(before(step) if is_before else step.got, names)
            apart = vectors.distances(got, wanted, one_batch.scales(facts, wanted | got, own))
            far = max(apart.values(), default=0.0)
            if far > 1.001 * worst[0]:  # of equal ones the first step
                worst = far, k, got, wanted
    return worst


def sent_coarsely(
    facts: Facts, gots: list[list[Vector]], goals: list[Vector], figures: Figures
) -> Check | None:
    """The check if numbers differ as 16 bits round: right, if all received ones are in 16 bits."""
    count, every = len(gots[0]), [got for in_step in gots for got in in_step]
    for dtype in torch.float16, torch.bfloat16:
        most = torch.finfo(dtype).eps * max(1.0, count**0.5 / 2)  # each addition rounds
        if figures.difference <= most and all(is_in(dtype, got, count) for got in every):
            text = f"{MEAN}, sent as {str(dtype).removeprefix('torch.')}"
            return ok(text, Figures(figures.difference, most))
    eps = torch.finfo(torch.bfloat16).eps  # twice what a message rounds: micro-batches may cancel
    for k, goal in enumerate(goals):
        for got in gots[k]:
            own = [vectors.only(part, set(got)) for part in facts.owns[k]]
            rest = {}
            some = vectors.only(goal, set(got))
            for name, far in vectors.combine([got, some], [1, -1]).items():
                sizes = [vectors.numbers(part[name]).abs() for part in own if name in part]
                rest[name] = (far.abs() - eps * sum(sizes)).clamp(min=0)
            is_explained = vectors.fit(got, own).left < limits.EQUAL
            if is_explained or vectors.length(rest) > limits.UPDATED * vectors.length(goal):
                return None
    return inconclusive(LABEL, COARSE_MESSAGES, f"{MEAN}, as far as 16 bits tell", figures)


def is_in(dtype: torch.dtype, got: Vector, count: int) -> bool:
    """Whether a dtype holds all numbers, or all times the number of ranks (divided afterwards)."""
    for tensor in map(vectors.numbers, got.values()):
        rests = [(part.to(dtype) - part).abs() / part.abs() for part in (tensor, count * tensor)]
        if not any(bool((rest.nan_to_num() <= limits.AVERAGED).all()) for rest in rests):
            return False
    return True


def ok(text: str, figures: Figures) -> Check:
    return Check(LABEL, True, f"ok: {text} {figures}", figures.threshold, figures=figures)


def wrong(text: str, figures: Figures) -> Check:
    return Check(LABEL, False, f"WRONG: {text}", figures=figures)


def perhaps_right(got: list[Vector], own: list[Vector], goal: Vector, place: str) -> str:
    """What the optimizers receive, if that is right for some losses (sums over examples, say)."""
    if not vectors.are_near(got, limits.UPDATED):
        return ""
    fit, times = vectors.fit(got[0], own), vectors.fit(got[0], [goal])
    if times.left < limits.EQUAL and not place:
        return MEAN.replace("receive", f"receive {times.factors[0]:.4g} times")
    if fit.is_clear and fit.left < limits.EQUAL and min(fit.factors) > limits.FACTOR:
        return f"the optimizers receive {verdict.made_of(fit.factors)}{place}"
    return MEAN.replace("receive", "do not receive") if fit.left > limits.MOST_COARSE else ""


def unlike_in_words(got: list[Vector], own: list[Vector], clipped: list[Vector], place: str) -> str:
    """The mistake in words, if the ranks' optimizers received different gradients.

    place: which tensors, if not all.  clipped: what clipping made of each rank's gradients.
    """
    if clipped and vectors.are_near(clipped, limits.UPDATED):
        return "each rank clips its own gradients: average them before they are clipped"
    if are_multiples(got, own):
        text = f"the gradients{place} are not averaged; each rank's optimizer receives only"
        return f"{text} its own rank's gradients"
    text = f"the ranks' optimizers receive different gradients{place}"
    fits = [vectors.fit(part, own) for part in got]
    if any(fit.left > limits.MOST_COARSE or not fit.is_clear for fit in fits):
        return text
    each = [f"rank {k} receives {verdict.made_of(fit.factors)}" for k, fit in enumerate(fits)]
    return f"{text}: {'; '.join(each)}"


def are_multiples(got: list[Vector], own: list[Vector]) -> bool:
    """Whether each rank got its own gradients, or times a positive number (they may be clipped)."""
    fits = [vectors.fit(part, [own_part]) for part, own_part in zip(got, own, strict=False)]
    is_other = any(fit.left > limits.UPDATED or abs(fit.factors[0]) < limits.FACTOR for fit in fits)
    return len(got) == len(own) and not is_other


def equal_in_words(fit: Fit, proper: list[float], place: str) -> str:
    """The mistake in words, if all optimizers got the same combination of ranks' gradients.

    proper: how much each rank's gradient should count.
    """
    factors, count = fit.factors, len(fit.factors)
    if not fit.is_clear:
        return f"not the mean{place}; as the ranks' gradients are parallel, no more can be said"
    if fit.left > limits.MOST_COARSE:
        nearest = f"(nearest: {verdict.made_of(factors)})"
        return f"the optimizers receive no combination of the ranks' gradients{place} {nearest}"
    ratios = [factor / (right or 1e-9) for factor, right in zip(factors, proper, strict=True)]
    times = sum(ratios) / count
    small = limits.FACTOR * max(abs(ratio) for ratio in ratios)
    rest = f", and something else ({fit.left:.0e})" if fit.left > limits.MOST else ""
    lost = [f"rank {k}'s" for k, ratio in enumerate(ratios) if abs(ratio) < small]
    if lost:
        return f"{' and '.join(lost)} examples don't count in the gradients{place}{rest}"
    if max(ratios) - min(ratios) > 2 * small:
        is_even = vectors.numbers_are_near(factors, [factors[0]] * count, limits.FACTOR)
        text = f"the ranks are weighted {verdict.percent(factors)}{place}, but in one process"
        return f"{text} {verdict.percent(proper)}{rest}" + f". {UNEVEN}" * is_even
    of_one = f"one process's gradients{place}"
    if abs(times - 1) < limits.FACTOR:
        left = max(fit.left, *(abs(ratio - 1) for ratio in ratios))
        return f"{of_one}, but for {left:.0e} of them"
    if abs(times - count) < limits.FACTOR * count:
        return f"{count} times {of_one}: the ranks' sum, not their mean{rest}"
    if abs(times * count - 1) < limits.FACTOR:
        is_sum = vectors.numbers_are_near(proper, [1.0] * count, limits.FACTOR)
        why = f"{DIVIDED} {count}" if is_sum else "divided by the number of processes twice"
        return f"1/{count} of {of_one}: {why}{rest}"
    return f"{times:.7g} times {of_one}{rest}"
