"""Is the mean of the ranks' local gradients the gradient of all examples in one batch?"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from ddp_by_diff.equivalence import limits, vectors
from ddp_by_diff.equivalence.batches import count_examples, counts_up, have_other_rows, mapped
from ddp_by_diff.equivalence.examples import NO_BATCHES
from ddp_by_diff.equivalence.facts import GOT, Facts
from ddp_by_diff.equivalence.notes import Alone, Event, Notes, drawn_between
from ddp_by_diff.equivalence.runs import Runs, with_counterparts
from ddp_by_diff.equivalence.source import SHARES
from ddp_by_diff.equivalence.vectors import Vector
from ddp_by_diff.equivalence.verdict import Check, Figures, Reason, inconclusive, some_of, span
from ddp_by_diff.equivalence.weights import UNMEASURED, other_state

TOLD = ", and the loss may be a sum, or divided by a batch size that the program is told"
TOGETHER = "the loss, a layer or the step depends on the composition or the size of the batch"
NUMBERS = "; or on numbers that differ by rank"
OF_PARTS = "the ranks compute parts of one batch, and their gradients don't add up to the batch's"
ALONE_RIGHT = "each rank's examples, computed alone, give that rank's gradient"
NO_GRADIENTS = Reason("not compared, as equal gradients were not found", "settle the others first")
OWN_DIFFERS = "a rank's examples, computed in one process, don't give that rank's gradient"
STATE = "training reads what does not change as in one process"


class Apart(NamedTuple):
    """The distance of two gradients, in the tensor that is furthest beyond its limit."""

    far: float
    limit: float  # up to this it is rounding
    name: str = ""
    step: int = 0
    factors: list[float] = []  # of the ranks' gradients, so that they add up to one process's

    @property
    def is_right(self) -> bool:
        return self.far <= self.limit


class Look(NamedTuple):
    """The ranks' notes beside a run in one process."""

    facts: Facts
    left_out: tuple  # kinds of layers that were switched off in both
    alone: Alone
    exact: Alone | None = None  # a run with the same batches, in float64
    rounding: dict[str, float] = {}  # of each tensor, if it was measured
    steps: tuple[Apart, ...] = ()  # the ranks' gradients and one process's, in each step

    @property
    def is_right(self) -> bool:
        return all(step.is_right for step in self.steps)

    @property
    def worst(self) -> Apart:
        return max(self.steps, key=lambda step: step.far / step.limit)

    @property
    def figures(self) -> Figures:
        return Figures(self.worst.far, self.worst.limit)

    @property
    def is_given(self) -> bool:
        """Whether no batches were joined: one process has its own, or all ranks have the same."""
        return not self.alone.is_joined or len(self.facts.distinct) == 1

    @property
    def total(self) -> int:
        """The number of examples in a step of one process."""
        own_total = 0 if self.alone.is_joined else self.alone.own_total
        return own_total or self.facts.total

    @property
    def limit(self) -> float:
        return max(step.limit for step in self.steps)

    @property
    def factors(self) -> list[list[float]]:
        """The factors of each step; steps that were not measured repeat the last ones."""
        factors = [step.factors for step in self.steps]
        return factors + [factors[-1]] * (len(self.facts.steps) - len(factors))


def look_at(runs: Runs, facts: Facts, left_out: tuple = ()) -> Look | Reason:
    """The look at a run with all examples; with rounding, if it may explain a difference."""
    if not facts.keys:
        return NO_BATCHES
    if not facts.comparable:
        return NO_GRADIENTS
    alone = runs.alone(facts, "all examples", left_out) if left_out else runs.of_the_same_job(facts)
    alone = with_counterparts(alone)
    if isinstance(alone, Reason):
        return alone
    if facts.is_collated and not alone.is_collated:
        return look_at(runs, dataclasses.replace(facts, is_collated=False), left_out)
    look = with_measurements(Look(facts, left_out, alone))
    if look.is_right:
        return look
    is_far = look.worst.far > facts.rounding_limit
    return look if is_far and kinds_that_differ(look) else with_rounding(runs, look)


def with_rounding(runs: Runs, look: Look) -> Look:
    """The look, with rounding measured in float64; the same look if float64 can't be had."""
    if look.exact or look.facts.is_coarse:
        return look
    exact = runs.alone(look.facts, "in float64", look.left_out, batches=look.alone.batches)
    return look if isinstance(exact, Reason) else with_measurements(look._replace(exact=exact))


def with_measurements(look: Look) -> Look:
    """The look, with a measurement of each step that all ranks begin with equal weights."""
    look = look._replace(rounding=roundings(look))
    return look._replace(steps=tuple(measure(look, k) for k in look.facts.comparable))


def roundings(look: Look) -> dict[str, float]:
    """How much rounding changes each tensor: the most in all steps, as a few may be lucky.

    A tensor that changes more than that is not measured: the program does something else there.
    """
    facts, most = look.facts, dict[str, float]()
    if look.exact is None:
        return {}
    for k in facts.comparable:
        wanted = gradient(facts, look.alone.notes, k)
        exact = gradient(facts, look.exact.notes, k)
        size = scales(facts, wanted, facts.owns[k])
        for name, far in vectors.distances(exact, wanted, size).items():
            most[name] = max(most.get(name, 0.0), far)
    return {name: far for name, far in most.items() if far <= facts.rounding_limit}


def scales(facts: Facts, wanted: Vector, parts: list[Vector]) -> dict[str, float]:
    """The least length to which the distance of each tensor is relative.  parts: the ranks' own."""
    small = limits.SMALL_COARSE if facts.is_coarse else limits.SMALL
    least, sizes = small * vectors.length(wanted), vectors.mean_lengths(parts)
    return {name: max(least, sizes.get(name, 0.0)) for name in wanted}


def measure(look: Look, step: int) -> Apart:
    """The distance in a step: of the mean, or of a better combination if that is right."""
    facts, names = look.facts, look.facts.comparable_names(step)
    parts = [vectors.only(part, names) for part in facts.owns[step]]
    wanted = vectors.only(gradient(facts, look.alone.notes, step), names)
    actual = vectors.only(of_ranks(facts, wanted, step), names)
    count, apart = len(parts), furthest_apart(look, actual, wanted, parts)
    even = apart._replace(step=step, factors=[1 / count for _ in parts])
    if apart.is_right or not parts:
        return even
    fit = vectors.fit(wanted, parts)
    if not fit.is_clear or min(fit.factors) <= 0:
        return even
    ones = [1.0] * count
    factors = ones if vectors.numbers_are_near(fit.factors, ones, limits.FACTOR) else fit.factors
    left = furthest_apart(look, vectors.combine(parts, factors), wanted, parts)
    is_better = left.is_right and left.far <= apart.far / limits.CLEARLY
    return left._replace(step=step, factors=factors) if is_better else even


def gradient(facts: Facts, notes: Notes, step: int) -> Vector:
    """One process's gradient: its own, if the ranks' were seen; else its optimizers'."""
    noted = notes.steps[step]
    seen = noted.got if facts.gradients == GOT else noted.own
    return vectors.only(seen, facts.trained & noted.options.keys())


def of_ranks(facts: Facts, wanted: Vector, step: int) -> Vector:
    """The ranks' gradient.  wanted: one process's, in whose shapes it is put together."""
    if facts.gradients != GOT:
        return vectors.mean(facts.owns[step])
    every = {name: facts.whole("got", name, step, one.shape) for name, one in wanted.items()}
    return {name: whole for name, whole in every.items() if whole is not None}


def furthest_apart(look: Look, actual: Vector, wanted: Vector, parts: list[Vector]) -> Apart:
    """The worst tensor.  parts: the ranks' own gradients."""
    facts = look.facts
    # Below the rounding error of a sum over all examples nothing is measured.
    floor = limits.ROUNDING * max(4, facts.total) ** 0.5
    floor = limits.MOST_COARSE if facts.is_coarse else floor
    worst = Apart(0.0, floor)
    for name, far in vectors.distances(actual, wanted, scales(facts, wanted, parts)).items():
        most = min(facts.rounding_limit, limits.YARDSTICKS * look.rounding.get(name, 0.0))
        if far / max(floor, most) > worst.far / worst.limit:
            worst = Apart(far, max(floor, most), name)
    return worst


def one_batch(runs: Runs, look: Look) -> tuple[Check, Look | None]:
    """The check, and the look in which it is right: perhaps one without BatchNorm or dropout.

    A kind of layers is named as the cause only if the difference is gone without it alone.
    """
    label, text, cause = look.facts.batch_check, in_words(look), ""
    kinds = [] if look.is_right else kinds_that_differ(look)
    if kinds:
        names, without = " and ".join(kinds), without_kinds(runs, look.facts, kinds)
        if without is None:
            why = f"the tool's run without {names} failed, or all its gradients are 0"
            failed = Reason(why, f"in a copy, omit {names} (or use GroupNorm)")
            return inconclusive(label, failed, text), None
        look, cause = without, " and ".join(without.left_out)
        if look.is_right:
            text = f"ok without {cause} {look.figures}; with all layers, {text}"
        else:
            text += f"; it differs without {names}, too {look.figures}"
    if not look.is_right:
        return unexplained(runs, look, text)._replace(figures=look.figures), None
    if reason := other_job(runs, look):
        return inconclusive(label, reason), None
    return Check(label, True, text, look.limit, cause, figures=look.figures), look


def in_words(look: Look) -> str:
    """Whether the ranks' gradient is that of the whole batch."""
    facts, whole = look.facts, "the gradient of the whole batch"
    if look.total == facts.total and len(facts.keys) == 1:
        whole = f"the gradient of all {span(facts.totals)} {facts.unit} in one batch"
    if len(look.steps) < len(facts.steps):
        steps = "step" + "s" * (len(look.steps) > 1)
        whole += f" ({steps} {span([1, len(look.steps)])}, before the ranks' weights differ)"
    if look.is_right:
        text = "the optimizers receive one process's gradients"
        if facts.gradients != GOT:
            text = f"this {combination(look.factors)} equals {whole}"
        return f"ok: {text} {look.figures}"
    text = f"this mean differs from {whole}"
    if facts.gradients == GOT:
        text = "what the optimizers receive differs from one process's gradients"
    return f"{text} {look.figures}" + f", in {look.worst.name}" * bool(look.worst.name)


def other_job(runs: Runs, look: Look) -> Reason | None:
    """Why nobody is accused if one process has the flags of one rank, and the examples of all.

    None if that can't explain a difference: its gradient stays the same if its examples are
    repeated, as that of a mean does, and not that of a sum, or of one divided by a constant.
    """
    facts, reason = look.facts, runs.other_job(look.facts, look.alone)
    times = sum(look.steps[0].factors) or 1.0  # no factors: the local gradients were not seen
    if reason is None or look.is_right and abs(times - 1) <= limits.FACTOR:
        return None
    told, gradients = reason._replace(sentence=reason.sentence + TOLD), []
    for kind in SHARES:
        share = runs.alone(facts, kind, look.left_out, rank=0)
        if isinstance(share, Reason):
            return told
        gradients.append(gradient(facts, share.notes, look.worst.step))
    return None if vectors.are_near(gradients, facts.rounding_limit / limits.CLEARLY) else told


def combination(factors: list[list[float]]) -> str:
    """How the ranks' gradients make one process's, in words.  factors: theirs, in each step."""
    count = len(factors[0])
    for word, factor in ("sum", 1.0), ("mean", 1 / count):
        if all(vectors.numbers_are_near(some, [factor] * count, limits.FACTOR) for some in factors):
            return word if count > 1 else "mean"
    return "weighted mean"


def kinds_that_differ(look: Look) -> list[str]:
    """Kinds of layers that may explain a difference: BatchNorm only if its averages differ."""
    kinds, averages = look.facts.kinds - set(look.left_out), look.facts.ranks[0].norm_buffers
    if averages and averages.isdisjoint(other_state(look.facts, look.alone, limits.MOST)):
        kinds.discard("BatchNorm")
    return sorted(kinds)


def without_kinds(runs: Runs, facts: Facts, kinds: list[str]) -> Look | None:
    """The look without all these layers; or without one kind, if that alone is the cause."""

    def without(*some: str) -> Look | None:
        other = runs.with_all_ranks(some, facts)
        look = look_at(runs, other, some) if other else None
        if isinstance(look, Look) and vectors.length(gradient(look.facts, look.alone.notes, 0)):
            return look
        return None  # it failed, or would compare 0 with 0

    without_all = without(*kinds)
    if without_all is None or not without_all.is_right or len(kinds) == 1:
        return without_all
    looks = (look for look in map(without, kinds) if look is None or look.is_right)
    return next(looks, without_all)


def unexplained(runs: Runs, look: Look, text: str) -> Check:
    """The check if layers don't explain the difference."""
    label, is_direct = look.facts.batch_check, look.facts.gradients == GOT
    wrong = Check(label, False, f"WRONG: {text}")
    if draws_others(look, 0):
        return inconclusive(label, DRAWS, text)
    is_measured = look.facts.is_coarse or look.worst.name in look.rounding
    if not is_measured and look.worst.far <= look.facts.rounding_limit:
        return inconclusive(label, UNMEASURED, text)
    told = other_job(runs, look)
    if not told and (multiple := multiples(look)):  # which no wrongly joined batch makes
        what = "what the optimizers receive" if is_direct else "the mean of the ranks' gradients"
        return wrong._replace(text=f"WRONG: {what} is {multiple}")
    goes_on = look.steps[0].is_right
    if goes_on and (names := buffers_that_differ(runs, look)):
        why, reason = f"{STATE}: {some_of(names)}", runs.other_job(look.facts, look.alone)
        if reason is None:
            return wrong._replace(why=why)
        # A batch size may set a teacher's momentum, say.
        reason = reason._replace(sentence=f"{reason.sentence}, and {why}")
        return inconclusive(label, reason, text)
    if reason := why_joined_wrongly(runs, look) or told:
        return inconclusive(label, reason, text)
    if is_direct or look.total < look.facts.total:
        return wrong._replace(why="" if is_direct else OF_PARTS)
    has_shares = len(look.facts.distinct) > 1 and not runs.per_step
    is_own = shares_give_their_own(runs, look) if has_shares else None
    if is_own:
        why = TOGETHER + f"; or {STATE}" * goes_on + NUMBERS * has_other_parts(look.facts)
        return wrong._replace(text=f"{wrong.text}; {ALONE_RIGHT}", why=why)
    if look.is_given and computes_the_same_again(runs, look):  # nothing was joined
        why = OF_PARTS if len(look.facts.distinct) == 1 else OWN_DIFFERS * (is_own is not None)
        return wrong._replace(why=why)
    joined = runs.failure if is_own is None else JOINED
    reason = OTHERWISE if look.is_given else joined
    return inconclusive(label, reason, text + "; step 1 is ok" * goes_on)


def multiples(look: Look) -> str:
    """Each tensor as a multiple of one process's, in words."""
    wanted = gradient(look.facts, look.alone.notes, look.worst.step)
    actual = of_ranks(look.facts, wanted, look.worst.step)
    names: dict[float, list[str]] = {}
    for name, goal in wanted.items():
        fit = vectors.fit({name: actual.get(name, goal * 0)}, [{name: goal}])
        is_one = abs(fit.factors[0] - 1) <= limits.EQUAL
        if fit.left > limits.EQUAL or goal.numel() < 2 and not is_one:  # any number is a multiple
            return ""
        names.setdefault(round(fit.factors[0], 3), []).append(name)
    right = names.pop(1.0, [])
    texts = []
    for times, some in names.items():
        place = f" of {some_of(some)}" if right or len(names) > 1 else ""
        texts.append(f"{times:.3g} times one process's gradient{place}")
    return " and ".join(texts) + " (the others are right)" * bool(texts and right)


def buffers_that_differ(runs: Runs, look: Look) -> list[str]:
    """Buffers that are the cause: with those of the ranks, given in each step, all is right."""
    facts, batches = look.facts, look.alone.batches
    given = runs.alone(facts, "given state", look.left_out, batches=batches)
    if isinstance(given, Reason) or not with_measurements(look._replace(alone=given)).is_right:
        return []
    others = other_state(facts, look.alone, limits.MOST)
    return [name for name in others if name not in facts.ranks[0].norm_buffers]


def shares_give_their_own(runs: Runs, look: Look) -> bool | None:
    """Whether each rank's examples, alone in one process, give its own gradient; None: not run.

    Or a multiple of it.  If not, padding or joining may be wrong.
    """
    facts = look.facts
    for place, rank in enumerate(facts.distinct):
        share = runs.alone(facts, "one share", look.left_out, rank=place)
        if isinstance(share, Reason):
            return None
        for k in facts.comparable:
            own = vectors.only(rank.steps[k].own, facts.comparable_names(k))
            wanted = vectors.only(gradient(facts, share.notes, k), set(own))
            if vectors.fit(own, [wanted]).left > facts.rounding_limit / limits.CLEARLY:
                return False
    return True


def computes_the_same_again(runs: Runs, look: Look) -> bool:
    """Whether one process, with the first step's weights and batch in each step, repeats it."""
    ranks = [dataclasses.replace(r, steps=r.steps[:1] * len(r.steps)) for r in look.facts.ranks]
    facts = dataclasses.replace(look.facts, ranks=ranks)
    counts, every = look.alone.notes.counts[0], look.alone.batches
    batches = {(key, k): every[key, k % counts[key]] for key, k in every if counts.get(key)}
    again = runs.alone(facts, "given state", look.left_out, batches=batches)
    if isinstance(again, Reason):
        return False
    gradients = [gradient(facts, again.notes, k) for k in facts.steps]
    return vectors.are_near(gradients, limits.EQUAL)


def draws_others(look: Look, step: int) -> bool:
    """Whether one process draws other random numbers in a step than a rank."""
    after = look.alone.notes.steps[step].after
    steps = [rank.steps[step] for rank in look.facts.ranks]
    return any(one.draws & drawn_between(one.after, after) for one in steps)


def depends_on_order(runs: Runs, look: Look) -> bool:
    """Whether the same examples have a different gradient in another order, in a differing step."""
    events = [event for some in side_by_side(look.facts) for event in some]
    if look.is_given or all(are_rows_examples(look.facts, event) for event in events):
        return False  # then it is the program that depends on the order
    other = runs.alone(look.facts, "other order", look.left_out)
    if isinstance(other, Reason):
        return False
    step = next(step for step in look.steps if not step.is_right)
    wanted = gradient(look.facts, look.alone.notes, step.step)
    apart = furthest_apart(look, gradient(look.facts, other.notes, step.step), wanted, [])
    return not apart.is_right and step.far <= limits.YARDSTICKS * apart.far


def are_rows_examples(facts: Facts, event: Event) -> bool:
    """Whether numbers, or the program's own collate_fn, prove that each row is one example."""
    count, value = len(event.indices), event.value
    is_list = isinstance(value, dict) and [*value] == [*range(count)]  # of objects, perhaps
    return facts.are_collated([event]) or count == count_examples(value) and not is_list


def has_other_weights(look: Look) -> bool:
    """Whether the parts, put together, are not the weights with which one process begins."""
    facts, theirs = look.facts, look.alone.notes.steps[0].weights
    for name in facts.parts & theirs.keys():
        whole = facts.whole("weights", name, 0, theirs[name].shape)
        if whole is None or not whole.equal(theirs[name]):
            return True
    return False


def has_other_parts(facts: Facts) -> bool:
    """Whether a batch numbers groups of its rows, or has a number that differs by rank."""
    for events in side_by_side(facts):
        numbers = [mapped(number_in, [event.value]) for event in events]
        is_any = any(counts_up(event.value) for event in events) or numbers[1:] != numbers[:-1]
        if is_any and not facts.are_collated(events):
            return True
    return False


def number_in(leaves: list, key: Any) -> Any:
    """A leaf of a batch, if it is one number; else 0."""
    is_one = isinstance(leaves[0], int | float) or getattr(leaves[0], "shape", None) == ()
    return leaves[0] if is_one else 0


# If one of these holds, no difference is a mistake of the program: each with what settles it.
DRAWS = Reason(
    "each step draws random numbers, and one process draws others",
    "in a copy, make each random draw of a step a constant (omit permutations; indices: by rank)",
)
ROWS = Reason(
    "a batch has parts that don't have one row for each example",
    "in a copy, let a collate_fn make the batch of tensors with one row for each example",
)
UNSEEN = Reason(
    "the ranks' local gradients were not seen",
    "in a copy, call loss.backward() for the optimizer's own parameters, and do not compile",
)
OTHER_BATCHES = Reason(
    "one process takes other batches in a step than the ranks together",
    "in a copy, step after each batch (no GradScaler), unshuffled, and evaluate within no_grad()",
)
OTHER_WEIGHTS = Reason(
    "one process begins with other weights than the ranks' parts make",
    "in a copy, draw the whole model's weights on each rank, and let it keep its part",
)
ORDER = Reason(
    "the same examples have a different gradient in a different order",
    "in a copy, let a DataLoader give all it uses, one example in each row (batch_first=True)",
)
OTHERWISE = Reason(
    "a step may use more than weights, buffers and the batches seen (a generator, rows it picks)",
    "in a copy, let a DataLoader give all it uses, draw no random numbers, keep state in buffers",
)
JOINED = Reason(f"{OTHERWISE.sentence}, or these are joined wrongly", OTHERWISE.way_on)


def why_joined_wrongly(runs: Runs, look: Look) -> Reason | None:
    """Why the one batch, or the one model of the ranks' parts, may be made wrongly; None if not."""
    is_direct = look.facts.gradients == GOT
    if is_direct and not look.facts.parts:
        return UNSEEN
    if (is_direct or runs.per_step or look.alone.is_mixed) and not look.is_given:
        return OTHER_BATCHES
    if has_other_weights(look):
        return OTHER_WEIGHTS
    if not look.is_given and has_other_parts(look.facts):
        return ROWS
    return ORDER if depends_on_order(runs, look) else None


def why_not_joined(facts: Facts) -> Reason | None:
    """Why the ranks' batches can't be made one; None if they can."""
    for events in side_by_side(facts):
        if not facts.are_collated(events) and have_other_rows([event.value for event in events]):
            return ROWS
    return None


def side_by_side(facts: Facts) -> Iterator[tuple[Event, ...]]:
    """The ranks' events of each key, in their order."""
    for key in facts.keys:
        yield from zip(*[rank.events.get(key, []) for rank in facts.distinct], strict=False)
