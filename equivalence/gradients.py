"""Do the optimizers get the mean of the shares' gradients?  That is the program's own part."""

from typing import NamedTuple

from equivalence import vectors
from equivalence.differences import Differences, where, worst_step, wrong_steps, wrong_tensors
from equivalence.evidence import Evidence
from equivalence.plan import FACTOR, Test
from equivalence.vectors import Fit
from equivalence.words import made_of, percent, some_of

NEAR = 0.002  # coefficients that differ by less are the same


class Line(NamedTuple):
    label: str
    text: str
    is_wrong: bool = False


class Averaging(NamedTuple):
    lines: list[Line]
    is_own: bool = False  # each rank's optimizer gets its own share's gradients, in all steps
    unknown: str = ""  # why the question can't be answered


def averaging(evidence: Evidence) -> Averaging:
    if evidence.is_blind:
        text = "seen in the weights only: the optimizer has parameters of its own"
        return Averaging([Line("averaging", text)])
    goal = []
    for step in evidence.steps:
        goal.append(evidence.tensors("gradients", Test(evidence.expected, step)))
    found = []
    for column in evidence.columns:
        steps = evidence.steps
        found.append([evidence.of_column("gradients", k, column, evidence.names) for k in steps])
    differences = Differences(found, goal, [vectors.distances(steps, goal) for steps in found])
    pick = max if evidence.has_shares else vectors.median
    worst = max(pick(steps) for steps in differences.far)
    if worst > evidence.exact:
        return explain(evidence, differences)
    if not evidence.has_shares:
        text = f"right: one process's (apart by {worst:.0e}; rounding alone makes "
        return Averaging([Line("gradients", f"{text}{evidence.rounding():.0e})")])
    text = "the mean of the ranks' gradients"
    weights = [evidence.plan.weights_of_shares(step, evidence.raw) for step in evidence.steps]
    even = [1 / len(evidence.shares)] * len(evidence.shares)
    uneven = [step for step in evidence.steps if vectors.spread(weights[step], even) > 1e-3]
    if all(near(one, [1.0] * len(one)) for one in weights):  # the program has weighted them
        text = "the sum of what the ranks' examples contribute"
    elif uneven:
        text = "the ranks' gradients, each as heavy as in one process: "
        text += f"{percent(weights[uneven[0]])} in step {uneven[0] + 1}"
    apart = "to the last bit" if worst == 0 else f"apart by {worst:.0e}"
    return Averaging([Line("averaging", f"right: the optimizers get {text} ({apart})")])


def explain(evidence: Evidence, differences: Differences) -> Averaging:
    """What they got, from the worst step and its tensors."""
    worst = worst_step(evidence, differences)
    lines = missing_gradients(evidence, worst)
    if not evidence.has_shares:
        if evidence.draws_random_numbers():
            return undecided_by_chance(evidence, differences, lines)
        return Averaging([*lines, explain_whole(evidence, differences, worst)])
    bad = wrong_tensors(evidence, differences)
    place = where(evidence, differences, bad)
    parts = []
    for column in evidence.shares:
        raw = evidence.raw(Test("share", worst, column))
        parts.append({name: raw[name] for name in bad})
    fits = []
    for steps in differences.found:
        fits.append(vectors.fit({name: steps[worst][name] for name in bad}, parts))
    if is_own(evidence, fits):
        text = f"each rank's optimizer gets the gradients of its own share{place}: nobody averages"
        is_in_all = len(wrong_steps(evidence, differences)) == len(evidence.steps)
        line = Line("averaging", f"WRONG: {text} them", True)
        return Averaging([*lines, line], is_own=is_in_all)
    if is_of_a_set_size(evidence, fits, worst):
        return undecided_by_size(evidence, lines)
    text = clipped_early(evidence, differences, worst) or in_words(evidence, fits, worst, place)
    return Averaging([*lines, Line("averaging", f"WRONG: {text}", True)])


def explain_whole(evidence: Evidence, differences: Differences, worst: int) -> Line:
    """Several optimizers, or one share: compared with one process's own gradients."""
    fit = vectors.fit(differences.found[0][worst], [differences.goal[worst]])
    rounding = evidence.rounding()
    if fit.left < FACTOR * rounding:
        return Line("gradients", f"WRONG: {fit.weights[0]:.4g} times one process's", True)
    text = f"WRONG: apart from one process's by {differences.largest:.0e}"
    return Line("gradients", f"{text}; rounding alone makes {rounding:.0e}", True)


def undecided_by_chance(
    evidence: Evidence, differences: Differences, notes: list[Line]
) -> Averaging:
    text = f"apart from one process's by {differences.largest:.0e}; other random numbers move them "
    text += f"by {evidence.changed_by('reseeded'):.0e}"
    why = "a step draws random numbers, other ones on each rank, and with several optimizers, or "
    why += "one batch for all ranks, the ranks' shares are not looked at: draw none, and try again"
    return Averaging([*notes, Line("gradients", text)], unknown=why)


def is_of_a_set_size(evidence: Evidence, fits: list[Fit], step: int) -> bool:
    """Whether the loss may be a sum, divided by a batch size that is set and not counted.

    One process got more examples than it would take by itself, and divided by its own size.
    """
    alone, total = evidence.sizes()
    proper = evidence.plan.weights_of_shares(step, evidence.raw)
    if not alone or alone == total or not near(proper, [1.0] * len(proper)):
        return False
    return all(near(fit.weights, [alone / total] * len(proper)) for fit in fits)


def undecided_by_size(evidence: Evidence, notes: list[Line]) -> Averaging:
    alone, total = evidence.sizes()
    text = f"{alone / total:.4g} times one process's: the loss is a sum over examples, or a sum "
    text += f"that is divided by a size that is set ({alone} in one process)"
    why = "the loss is a sum, or divided by a batch size that is set and not counted: give "
    why += f'--alone="FLAGS" that set it to {total}, or let the loss be a mean'
    return Averaging([*notes, Line("averaging", text)], unknown=why)


def missing_gradients(evidence: Evidence, step: int) -> list[Line]:
    missing = []
    for name in evidence.names:
        for rank, notes in enumerate(evidence.plan.ranks):
            if notes.steps[step].gradients.get(name, 0) is None:
                missing.append(f"{name} on rank {rank}")
    return [Line("note", f"no gradient: {some_of(missing)}")] if missing else []


def near(one: list[float], other: list[float]) -> bool:
    return vectors.spread(one, other) < NEAR * max(abs(weight) for weight in other)


def is_own(evidence: Evidence, fits: list[Fit]) -> bool:
    """Each gets its own share's; clipped, or weighted, they have another length."""
    for column, fit in zip(evidence.columns, fits, strict=True):
        own = [float(column == share) for share in evidence.shares]
        length = sum(weight * is_its for weight, is_its in zip(fit.weights, own, strict=True))
        own = [length * is_its for is_its in own]
        if fit.left > 1e-3 or not any(own) or not near(fit.weights, own):
            return False
    return True


def clipped_early(evidence: Evidence, differences: Differences, step: int) -> str:
    """If clip_grad_norm_ got other gradients on each rank, and they were averaged after it.

    After a tensor that nobody averages they are clipped in another way on each rank, too.
    """
    first = differences.found[0][step]
    if any(vectors.distance(steps[step], first) > evidence.exact for steps in differences.found):
        return ""
    norms = []
    for column in evidence.plan.columns:
        norms.append(evidence.plan.ranks[column[0]].steps[step].norms)
    if not any(len(set(same)) > 1 for same in zip(*norms, strict=False)):
        return ""
    lengths = ", ".join(f"{one[0]:.3g}" for one in norms)
    text = f"clip_grad_norm_ got other gradients on each rank (of length {lengths})"
    return f"{text}: average them before they are clipped"


def in_words(evidence: Evidence, fits: list[Fit], step: int, place: str) -> str:
    """What the optimizers got, as a combination of the shares' gradients."""
    first = fits[0].weights
    count = len(evidence.shares)
    left = max(fit.left for fit in fits)
    if not fits[0].is_clear:
        return f"not the mean{place}; as the ranks' gradients are parallel, no more can be said"
    if not all(near(fit.weights, first) for fit in fits):
        if left > 0.01:
            return f"the ranks' gradients differ{place}, and are not made of the shares'"
        texts = []
        for column, fit in zip(evidence.plan.columns, fits, strict=True):
            texts.append(f"rank {column[0]} has {made_of(fit.weights, evidence.shares)}")
        return f"the ranks' gradients differ{place}: {'; '.join(texts)}"
    proper = evidence.plan.weights_of_shares(step, evidence.raw)
    ratios = [found / (right or 1e-9) for found, right in zip(first, proper, strict=True)]
    times = sum(ratios) / count
    uneven = max(ratios) - min(ratios)
    rest = f", and something else ({left:.0e})" if left > 1e-3 else ""
    if left < evidence.exact and near(first, proper):
        return f"{times:.7g} times one process's gradients{place}"
    if left < 0.01 and near(first, proper):
        return f"they are coarsely rounded{place} (by a communication hook that sends bfloat16?)"
    if left > 0.01 or (abs(times - 1) < NEAR and uneven < 2 * NEAR):
        nearest = made_of(first, evidence.shares)
        return f"they are not made of the shares' gradients{place} (nearest: {nearest})"
    lost = [c for c, ratio in zip(evidence.shares, ratios, strict=True) if abs(ratio) < NEAR]
    if lost:
        names = " and ".join(f"rank {evidence.plan.columns[column][0]}'s" for column in lost)
        return f"{names} examples don't count in the gradients{place}{rest}"
    if uneven > 2 * NEAR * max(abs(ratio) for ratio in ratios):
        are_equal = step < evidence.different_copies[0]
        return f"{mean_of_means(first, proper, are_equal, place)}{rest}"
    is_sum = near(proper, [1.0] * count)
    return f"{multiple(times, count, is_sum, place)}{rest}"


def mean_of_means(found: list[float], proper: list[float], are_equal: bool, place: str) -> str:
    """are_equal: the ranks' weights; else it can't be measured how much a share should count."""
    text = f"the shares count {percent(found)}{place}"
    if not are_equal:
        return f"{text}: as the ranks' weights differ, that may be right"
    text += f", in one process {percent(proper)}: the mean of means is not the mean"
    return f"{text} (unequal numbers of examples, tokens or labels?)"


def multiple(times: float, count: int, is_sum: bool, place: str) -> str:
    """What they got is so many times one process's gradients; is_sum: so is its loss."""
    if is_sum and abs(times * count - 1) < NEAR:
        return (
            f"1/{count} of one process's gradients{place}: the loss is a sum over examples, and "
            f"the mean over {count} processes divides it by {count}"
        )
    if abs(times - count) < NEAR * count:
        return f"{count} times one process's gradients{place}: summed, not averaged"
    if abs(times * count - 1) < NEAR:
        return (
            f"1/{count} of one process's gradients{place}: divided by the number of processes twice"
        )
    return f"{times:.4g} times one process's gradients{place}"
