"""The answer, and the lines below it."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from equivalence import vectors
from equivalence.batches import digests_of_examples
from equivalence.evidence import ALONE, Evidence
from equivalence.gradients import Line, averaging
from equivalence.one_batch import one_batch
from equivalence.plan import FACTOR, Test
from equivalence.words import some_of

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
UNSTEADY = 0.01  # so far apart a step's gradients may not be from its own, computed again
SCHEDULE = 0.01  # so much a schedule may differ in a few steps, if an epoch has other steps
SAMPLER = "give each its share (a DistributedSampler)"


def judge(evidence: Evidence) -> tuple[int, list[Line]]:
    """The exit code, and the lines; the first one is the verdict."""
    lines = examples(evidence)
    for step in evidence.steps:
        places = evidence.not_finite(step)
        if places:
            return with_numbers_not_finite(step, places, lines)
    lines += [*copies(evidence), *learning_rate(evidence)]
    if why := no_gradients(evidence):
        return not_found_out(why, lines)
    again = evidence.changed_by("again")
    if again > UNSTEADY:
        text = (
            f"the same step, computed again, has other gradients (apart by {again:.0e}), so they "
        )
        text += "can't be compared. Does the program compute with data that no DataLoader returns, "
        text += "or with parameters that no module has?"
        return not_found_out(text, lines)
    found = averaging(evidence)
    lines += [*found.lines, *spare_tensors(evidence)]
    if found.unknown:
        return not_found_out(found.unknown, lines)
    cause = ""
    _, different = evidence.different_copies
    if evidence.has_shares and evidence.names and not different:
        batch = one_batch(evidence)
        lines.append(batch.line)
        cause = batch.cause
        if batch.unknown:
            return not_found_out(batch.unknown, lines)
    change = weights(evidence)
    lines += change
    lines += random_numbers(evidence)
    reasons = labels_of_wrong(lines)
    if found.is_own and change and not change[0].is_wrong:
        reasons.remove("averaging")
        lines = [line._replace(text=line.text.removeprefix("WRONG: ")) for line in lines]
        lines.append(Line("note", "the weights are averaged after the step: that is the same"))
    if why := not_compared(evidence, has_changed=bool(change)):
        return not_found_out(why, lines)
    code, answer = conclude(reasons, cause)
    return code, [Line("verdict", answer), *lines]


def no_gradients(evidence: Evidence) -> str:
    """Why there is nothing to compare; "" if there is."""
    if not evidence.names or any(vectors.length(one) for one in evidence.raws("whole")):
        return ""
    if any(vectors.length(evidence.update("whole", step)) for step in evidence.steps):
        text = "weights change, but no gradient is left after backward: an optimizer that steps "
        return f"{text}inside backward can't be compared"
    return "nothing is trained: all gradients are 0 in one process, too"


def not_compared(evidence: Evidence, has_changed: bool) -> str:
    """Parameters of an optimizer that were not seen in the models; "" if there are none."""
    if evidence.is_blind and not has_changed:
        return "the optimizer has no tensor of the models, and no weight changed"
    if not evidence.is_blind and any(rank.loose for rank in evidence.plan.ranks):
        return "the optimizer has parameters of no module that was called: they are not compared"
    return ""


def not_found_out(why: str, lines: list[Line]) -> tuple[int, list[Line]]:
    """What is wrong for certain is said all the same."""
    code, answer = UNKNOWN, f"NOT FOUND OUT: {why}"
    if reasons := labels_of_wrong(lines):
        code, answer = conclude(reasons, "")
    return code, [Line("verdict", answer), *lines]


def labels_of_wrong(lines: list[Line]) -> list[str]:
    return list(dict.fromkeys(line.label for line in lines if line.is_wrong))


def conclude(reasons: list[str], cause: str) -> tuple[int, str]:
    if not reasons:
        return SAME, "THE SAME as one process, up to rounding"
    if reasons == ["one batch"] and cause == "BatchNorm":
        return SAME, "THE SAME, but for BatchNorm: each process normalises its own share"
    if reasons == ["one batch"] and cause == "dropout":
        return SAME, "THE SAME, but for dropout, which draws other numbers in each process"
    if reasons == ["one batch"] and cause == "random numbers":
        return SAME, "THE SAME, but for random numbers that each step draws"
    if reasons == ["one batch"]:
        text = "the loss, or a layer, depends on which examples are in a batch together"
        return DIFFERENT, f"DIFFERENT from one process: {text}"
    return DIFFERENT, f"DIFFERENT from one process in: {', '.join(reasons)}"


def with_numbers_not_finite(
    step: int, places: list[str], lines: list[Line]
) -> tuple[int, list[Line]]:
    text = f"infinite or NaN in step {step + 1} {', '.join(places)}"
    if ALONE in places:
        text += ": find out why there, before you compare"
        lines.append(Line("gradients", text))
        return not_found_out("gradients are infinite or NaN", lines)
    text += ", and not in one process"
    code, verdict = conclude(["gradients"], "")
    return code, [Line("verdict", verdict), *lines, Line("gradients", f"WRONG: {text}")]


# ------------------------------------------------------------------------------- the examples


def examples(evidence: Evidence) -> list[Line]:
    plan, count = evidence.plan, len(evidence.columns)
    most = max(
        (plan.examples(step) for step in evidence.steps), key=lambda some: max(some) - min(some)
    )
    text, is_wrong = " + ".join(map(str, most)) + " in a step", False
    if len(evidence.shares) < count:
        who, times = ("both", "twice") if count == 2 else (f"all {count}", f"{count} times")
        text += f": {who} ranks have the same, and do the same work {times}: {SAMPLER}"
        is_wrong = True
    elif count > 1:
        text += twice_in_steps(evidence)
        said = in_an_epoch(evidence)
        text += said
        is_wrong = bool(said)
    elif len(plan.ranks) > 1:
        text += f", the same on all {len(plan.ranks)} ranks, which share one model"
    return [Line("examples", text, is_wrong), *larger_alone(evidence)]


def twice_in_steps(evidence: Evidence) -> str:
    owners: dict[bytes, set[int]] = {}
    for column in evidence.columns:
        for step in evidence.steps:
            for event in evidence.plan.share(evidence.plan.keys[0], step, column):
                for name in digests_of_examples(event.value):
                    owners.setdefault(name, set()).add(column)
    twice = sum(len(columns) > 1 for columns in owners.values())
    if not twice:
        return ", none on two ranks"
    return f", {twice} of {len(owners)} different ones on more than one rank"


def in_an_epoch(evidence: Evidence) -> str:
    """What the samplers say, if they could be asked."""
    plan, key = evidence.plan, evidence.plan.keys[0]
    indices = [plan.ranks[column[0]].indices.get(key) or [] for column in plan.columns]
    if not all(indices):
        return ""
    if any(len(set(some)) < len(some) for some in indices):
        return ""  # drawn with replacement, where some come twice on one rank, too
    owners = Counter(itertools.chain(*(set(some) for some in indices)))
    union = set(owners)
    total = owners.total()
    slack = 2 * len(indices) + sum(plan.examples(0))  # padding, or a last batch that is left out
    text = ""
    if total > len(union) + slack:
        twice = sum(count > 1 for count in owners.values())
        text += f". In an epoch {twice} of {len(union)} come on more than one rank: {SAMPLER}"
    reach = set(evidence.result.notes.indices.get(key) or [])
    if len(reach) > len(union) + slack:
        text += f". In an epoch the ranks leave out {len(reach - union)} of {len(reach)}"
    return text


def larger_alone(evidence: Evidence) -> list[Line]:
    """If --batch-size means another number of examples in one process."""
    alone, total = evidence.sizes()
    if not alone or alone == total:
        return []
    count = len(evidence.plan.ranks)
    steps = "fewer" if total > alone else "more"
    text = f"alone the program takes {alone} examples in a step, with {count} processes {total}: "
    return [Line("note", f"{text}an epoch has {steps} steps, and other rates may be best")]


# ------------------------------------------------------------------- weights, learning rates


def copies(evidence: Evidence) -> list[Line]:
    """Weights that differ between the ranks."""
    step, names = evidence.different_copies
    if not names:
        return []
    when = "from the start" if step == 0 else f"after step {step}"
    return [Line("copies", f"the ranks' weights differ {when}: {some_of(names)}", True)]


def learning_rate(evidence: Evidence) -> list[Line]:
    count = len(evidence.plan.ranks)
    size, total = evidence.sizes()
    for step in evidence.steps:
        for one, other in rates(evidence, step):
            apart = rates_apart(one, other)
            if apart < 1e-6:
                continue
            text = f"{one:.6g} with {count} processes, {other:.6g} with one"
            if size and size != total and apart < SCHEDULE:
                text += f", in step {step + 1}: as a schedule does that counts an epoch's steps"
                return [Line("learning rate", text)]
            text += f" ({one / other:.4g} times)" if other else ""
            return [Line("learning rate", f"{text}, in step {step + 1}", True)]
    return []


def rates(evidence: Evidence, step: int) -> list[tuple[float, float]]:
    """Learning rates of the processes, and of one process."""
    many = evidence.plan.ranks[0].steps[step].rates
    alone = evidence.result.steps[Test("whole", step)].rates
    return list(zip(many, alone, strict=False))


def rates_apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(other), 1e-150)


def schedule_apart(evidence: Evidence) -> float:
    """How far the rates are apart, if that is a schedule's; as far may the steps be."""
    if any(line.is_wrong for line in learning_rate(evidence)):
        return 0.0
    found = 0.0
    for step in evidence.steps:
        for one, other in rates(evidence, step):
            found = max(found, rates_apart(one, other))
    return found


def weights(evidence: Evidence) -> list[Line]:
    """Whether the steps change them as in one process; [] if that was not seen.

    The steps `whole` are the first in one process.  So they also have what the program keeps
    itself, such as Lookahead's slow weights; those of `mean` come later.
    """
    found = apart(evidence, evidence.expected, max)
    if found is None:
        return []
    if found.far > found.limit and evidence.expected == "mean":
        as_first = apart(evidence, "whole", min)  # `rounded` comes later, too
        if as_first and as_first.far <= as_first.limit:
            found = as_first
    is_right = found.far <= found.limit
    if not is_right and found.far <= FACTOR * schedule_apart(evidence):
        text = "they change as in one process, but for the schedule's other rates "
        return [Line("weights", f"{text}(apart by {found.far:.0e})")]
    text = "right: they change" if is_right else "they don't change"
    text += f" as in one process (apart by {found.far:.0e}; rounding {found.rounding:.0e})"
    return [Line("weights", text, not is_right)]


class Apart(NamedTuple):
    """How far the changes of the weights are apart from those of a test."""

    far: float
    rounding: float
    limit: float


def apart(evidence: Evidence, kind: str, of_steps: Callable) -> Apart | None:
    """None: a step's change was not seen, or there is none.

    of_steps: whether rounding is what it makes in the step where it makes most, or least.
    """
    expected = [evidence.update(kind, step) for step in evidence.steps]
    if not all(expected) or not any(vectors.length(one) for one in expected):
        return None
    if kind == "mean":
        expected = list(map(evidence.without_rounding, expected, evidence.steps))
    far = 0.0
    for column in evidence.columns:
        changes = [evidence.change(step, column) for step in evidence.steps]
        if kind == "mean":
            changes = list(map(evidence.without_rounding, changes, evidence.steps))
        far = max(far, *vectors.distances(changes, expected))
    rounding = 0.0
    for step in evidence.steps:
        forced = evidence.result.steps[Test("whole", step)].forced
        size = vectors.length({name: forced[name] for name in evidence.parameters})
        rounding = max(rounding, 6e-8 * size / max(1e-150, vectors.length(expected[step])))
    is_repeated = any(step.is_repeated for step in evidence.plan.ranks[0].steps)
    if is_repeated or kind == "whole":  # rounding of more than one gradient
        moved = []
        for step in evidence.steps:
            rounded, exact = evidence.update("rounded", step), evidence.update("whole", step)
            if rounded and exact:
                moved.append(vectors.distance(rounded, exact))
        rounding = max(rounding, of_steps(moved, default=0.0))
    return Apart(far, rounding, max(evidence.exact, FACTOR * rounding))


# ---------------------------------------------------------------------------------- the notes


def spare_tensors(evidence: Evidence) -> list[Line]:
    first = evidence.result.steps[Test("whole", 0)]
    if evidence.is_blind:
        return []
    spare = [n for n in evidence.parameters if n not in first.gradients and n in first.raw]
    if not spare:
        return []
    return [Line("note", f"no optimizer has {some_of(spare)}, though there are gradients")]


def random_numbers(evidence: Evidence) -> list[Line]:
    if not evidence.draws_random_numbers():
        return []
    moved = evidence.changed_by("reseeded")
    lines = []
    if "dropout" not in evidence.result.notes.kinds:
        text = f"a step draws random numbers: others change its gradients by {moved:.0e}"
        lines.append(Line("note", text))
    plan = evidence.plan
    states = [plan.ranks[column[0]].steps[0].states[0].cpu for column in plan.columns]
    if len(states) > 1 and all(state.equal(states[0]) for state in states):
        text = "all ranks draw the same random numbers, so they have the same dropout masks (or "
        lines.append(Line("note", f"{text}noise): seed them differently"))
    return lines
