"""The answer, and the lines below it."""

import itertools
from collections import Counter

from equivalence import vectors
from equivalence.batches import digests_of_examples
from equivalence.evidence import ALONE, Evidence
from equivalence.gradients import Line, averaging
from equivalence.one_batch import one_batch
from equivalence.plan import Test
from equivalence.update import buffers, learning_rate, nearest, unclear_weights, weights
from equivalence.words import some_of

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
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
    again = max(evidence.changed_by("again"), vectors.median(evidence.moved()))
    if again > evidence.unsteady:
        text = (
            f"the same step, computed again, has other gradients (apart by {again:.0e}), so they "
        )
        text += "can't be compared. Does the program compute with data that no DataLoader returns, "
        text += "with parameters that no module has, or with a number that it changes in each step?"
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
    found_weights = nearest(evidence)
    change = weights(evidence, found_weights)
    others = buffers(evidence)
    lines += [*change, *others]
    lines += random_numbers(evidence)
    reasons = labels_of_wrong(lines)
    if found.is_own and change and not change[0].is_wrong:
        reasons.remove("averaging")
        lines = [line._replace(text=line.text.removeprefix("WRONG: ")) for line in lines]
        lines.append(Line("note", "the weights are averaged after the step: that is the same"))
    if why := not_compared(evidence, has_changed=bool(change)) or unclear_weights(found_weights):
        return not_found_out(why, lines)
    code, answer = conclude(reasons, cause, has_other_buffers=bool(others))
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


def conclude(reasons: list[str], cause: str, has_other_buffers: bool = False) -> tuple[int, str]:
    but = " (but for buffers)" if has_other_buffers else ""
    if not reasons:
        return SAME, f"THE SAME as one process, up to rounding{but}"
    if reasons == ["one batch"] and cause == "BatchNorm":
        return SAME, f"THE SAME, but for BatchNorm: each process normalises its own share{but}"
    if reasons == ["one batch"] and cause == "dropout":
        return SAME, f"THE SAME, but for dropout, which draws other numbers in each process{but}"
    if reasons == ["one batch"] and cause == "random numbers":
        return SAME, f"THE SAME, but for random numbers that each step draws{but}"
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
    owners: dict[tuple, set[int]] = {}  # of an example in a step
    for column in evidence.columns:
        for step in evidence.steps:
            for event in evidence.plan.share(evidence.plan.keys[0], step, column):
                for name in digests_of_examples(event.value):
                    owners.setdefault((step, name), set()).add(column)
    twice = sum(len(columns) > 1 for columns in owners.values())
    if not twice:
        return ", none on two ranks"
    return f"; {twice} of {len(owners)} in {len(evidence.steps)} steps are on more than one rank"


def in_an_epoch(evidence: Evidence) -> str:
    """What the samplers say, if they could be asked."""
    plan, key = evidence.plan, evidence.plan.keys[0]
    indices = [plan.ranks[column[0]].indices.get(key) or [] for column in plan.columns]
    notes = [*plan.ranks, evidence.result.notes]
    if not all(indices) or len({one.lengths.get(key) for one in notes}) > 1:
        return ""  # or the ranks have data sets of their own
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


def copies(evidence: Evidence) -> list[Line]:
    """Weights that differ between the ranks."""
    step, names = evidence.different_copies
    if not names:
        return []
    when = "from the start" if step == 0 else f"after step {step}"
    return [Line("copies", f"the ranks' weights differ {when}: {some_of(names)}", True)]


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
    first = [plan.ranks[column[0]].steps[0] for column in plan.columns]
    drawn = set().union(*(step.draws for step in first))
    others = [step.states[0].other_than(first[0].states[0]) for step in first]
    if len(first) > 1 and drawn and not drawn & set().union(*others):
        text = "all ranks draw the same random numbers, so they have the same dropout masks (or "
        lines.append(Line("note", f"{text}noise): seed them differently"))
    return lines
