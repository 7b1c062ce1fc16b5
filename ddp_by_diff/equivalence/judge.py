"""The questions, one after the other: what can be seen of a program says which links are asked."""

import itertools
from typing import Any

from ddp_by_diff.equivalence import limits, one_batch, verdict, weights
from ddp_by_diff.equivalence.averaging import averaging, in_weights
from ddp_by_diff.equivalence.examples import NO_BATCHES, copies, examples
from ddp_by_diff.equivalence.facts import NONE_GOT, OWN, UNCLEAR, Facts, copies_or_parts, facts_of
from ddp_by_diff.equivalence.notes import Alone, Notes
from ddp_by_diff.equivalence.one_batch import Look
from ddp_by_diff.equivalence.vectors import only, unequal_names
from ddp_by_diff.equivalence.verdict import Answer, Link, Reason, inconclusive
from ddp_by_diff.instruments.command import Line

NO_STEP = Reason(
    "no step of an optimizer of torch.optim was seen",
    "in a copy, let torch.optim.SGD update the model's own parameters; if it does so already, then "
    "in the first thread of each process, and not compiled",
)
PARTS_UNCLEAR = Reason(
    "the ranks' weights differ from the start, and the modules called in one process have others",
    "if they are parts of one model, let one module's forward call them, in a copy",
)
NO_GRADIENTS = Reason("not compared, as equal gradients were not found", "settle the others first")
WRONG_GRADIENTS = Reason("not compared, as the gradients are wrong", "")
NO_COUNTERPART = "in a copy, call the same modules in both (with fully_shard in place of FSDP1)"
RESUMED = Reason(
    "one process began with weights that the ranks had later, so it has read their checkpoint",
    'give it another folder, such as --alone="--out elsewhere", or switch resuming off',
)
INFINITE = "torch.autograd.set_detect_anomaly(True), in a copy, names the line of the program"


def few_steps(ranks: list[Notes], length: int) -> Answer:
    """The answer if not all ranks made enough steps."""
    made = [len(rank.counts) for rank in ranks]
    if max(made) == 0:
        return verdict.unknown(NO_STEP)
    each = ", ".join(f"rank {rank.rank}: {len(rank.counts)}" for rank in ranks)
    few = f"not all ranks made {length + 1} steps of an optimizer ({each})"
    if bad := first_infinite(ranks, min(made)):
        return verdict.unknown(Reason(f"gradients: {bad.sentence}; {few}", bad.way_on))
    if min(made) > 1 and len(ranks) > 1:
        link = copies(facts_of(ranks, min(made) - 1))
        if not link.is_right:
            return Answer(verdict.problem([link], "one process"), [link], [Line("note", few)])
    way_on = "let the program train longer, or give fewer --steps"
    if len(set(made)) > 1:
        way_on = "let all ranks make a step, or none, so that each makes as many"
    return verdict.unknown(Reason(few, way_on))


def first_infinite(ranks: list[Notes], length: int) -> Reason | None:
    """The first gradient that is not finite: own gradients before averaged ones."""
    steps = range(min(length, *(len(rank.steps) for rank in ranks)))
    for k, what, rank in itertools.product(steps, ("own", "got"), ranks):
        if not all(bool(one.isfinite().all()) for one in getattr(rank.steps[k], what).values()):
            return Reason(f"infinite or NaN in step {k + 1} on rank {rank.rank}", INFINITE)
    return None


def judge(ranks: list[Notes], length: int, runs: Any, command: list[str]) -> Answer:
    """All links, the verdict from them, and notes on buffers and random numbers."""
    facts, own_data = facts_of(ranks, length), None
    if bad := first_infinite(ranks, length):
        links = [examples(facts), copies(facts), inconclusive("gradients", bad)]
        return Answer(verdict.conclude(links, length), links, [])
    if facts.model == UNCLEAR:
        own_data = runs.alone(facts, "own data")
        facts = copies_or_parts(facts, own_data)
    look = one_batch.look_at(runs, facts) if facts.keys else None
    reason = why_no_run(runs, look.alone) if look else NO_BATCHES
    alone = look.alone if not reason else own_data or runs.alone(facts, "own data")
    total, own_total = (0, 0) if reason else (look.total, look.own_total)
    settings = weights.options(facts, alone.notes if alone else None, command, own_total)
    stages = stages_of(runs, facts, look, alone, settings)
    links = [examples(facts, total), copies(facts), *stages]
    left_out = [name for name in facts.ranks[0].trainable if name not in facts.trained]
    draws_others = reason or one_batch.draws_others(look, 0)  # else it has the same masks, too
    notes, others = random_numbers(facts) if draws_others else [], []
    text = f"{verdict.some_of(left_out)}: no optimizer changed them in these steps"
    notes += [Line("not checked", text)] * bool(left_out)
    if not reason:
        notes = batch_sizes(look) + notes
        batch = next(link for link in stages if link.label == facts.stage_2)
        if stages[1] is batch or stages[1].is_right is not False:  # else averaging explains it
            others = weights.buffers(facts, alone, batch.limit, bool(batch.is_right))
    found = verdict.conclude(links, length, " (and except for buffers)" * bool(others))
    if found.code == verdict.DIFFERENT and alone and has_resumed(facts, alone):
        return verdict.unknown(RESUMED)
    return Answer(found, links, others + notes)


def has_resumed(facts: Facts, alone: Alone) -> bool:
    """Whether one process began with the weights that rank 0 had after some step."""
    first, *later = [only(step.weights, facts.trained) for step in facts.ranks[0].steps]
    own = only(alone.notes.steps[0].weights, facts.trained)
    return bool(unequal_names(own, first)) and any(not unequal_names(own, some) for some in later)


def stages_of(
    runs: Any, facts: Facts, look: Look | None, alone: Alone | None, settings: Link
) -> list[Link]:
    """The options and the three stages; the first one tells if the gradients are right."""
    if facts.model == UNCLEAR:
        names = "averaging", facts.stage_2, "weights"
        reason = PARTS_UNCLEAR if alone else runs.failure
        return [settings, *[inconclusive(name, reason) for name in names]]
    batch, right = batch_and_look(runs, facts, look)
    if reason := why_no_run(runs, alone):
        last = inconclusive(weights.LABEL, reason)
    elif facts.are_forced:
        last = weights.weights(facts, alone, None, settings)
    elif right is None:
        last = inconclusive(weights.LABEL, NO_GRADIENTS)
    else:
        right = one_batch.with_rounding(runs, right)
        last = weights.weights(right.facts, right.alone, right.exact, settings)
    links = [batch]
    if facts.gradients == OWN:
        links = [averaging(facts, right, last), batch]
    if facts.gradients == NONE_GOT:
        links = [in_weights(last), batch]
    if links[0].is_right is False and settings.is_right is False and right:
        exact = one_batch.with_rounding(runs, right).exact
        if exact and weights.change_as_in_float64(right.facts, exact):  # such as a sum, and lr / n
            text = links[0].text.replace("WRONG:", "ok:") + ", but at other learning rates"
            links[0] = links[0]._replace(is_right=True, text=text)
            text = "ok: the weights change as in one process with its own gradients and options"
            last = Link(weights.LABEL, True, text, limits.UPDATED)
            settings = settings._replace(is_right=True)
    if links[0].is_right is False and last.is_right is False:  # with wrong gradients they differ
        last = inconclusive(weights.LABEL, WRONG_GRADIENTS)
    return [settings, *links, last]


def why_no_run(runs: Any, alone: Alone | None) -> Reason | None:
    """Why a run in one process can't be compared; None if it can."""
    if alone is None:
        return runs.failure
    if not alone.unmatched:
        return None
    text = "the ranks have no weights with the names and shapes of one process's "
    return Reason(text + verdict.some_of(alone.unmatched), NO_COUNTERPART)


def batch_and_look(runs: Any, facts: Facts, look: Look | None) -> tuple[Link, Look | None]:
    """Stage 2, and the look in which it is right: perhaps one without BatchNorm or dropout."""
    if look is None:
        return inconclusive(facts.stage_2, NO_BATCHES), None
    reason = why_no_run(runs, look.alone)
    if reason or not look.is_given:
        reason = one_batch.why_not_joined(facts) or reason
    if not reason and not runs.per_step:
        reason = why_other_steps(look)
    if not reason and not look.steps:
        reason = NO_GRADIENTS
    if reason:
        return inconclusive(facts.stage_2, reason), None
    return one_batch.one_batch(runs, look)


def why_other_steps(look: Look) -> Reason | None:
    """Why batches can't be compared step by step; None if one process takes them in these steps."""
    many, alone = look.facts.ranks[0], look.alone.notes
    if many.counts == alone.counts:
        return None
    ahead = [key for key in look.facts.keys if many.reads_ahead(key) or alone.reads_ahead(key)]
    if ahead and all(many.per_step(key) == alone.per_step(key) for key in look.facts.keys):
        return None
    key, steps = look.facts.keys[0], range(len(look.facts.steps) + 1)
    step = next(step for step in steps if many.counts[step] != alone.counts[step])
    taken = [notes.counts[step].get(key, 0) for notes in (many, alone)]
    sentence = f"step {step + 1} comes after {taken[0]} batches, in one process after {taken[1]}"
    return Reason(sentence, "in a copy, let each batch make a step: no GradScaler, no accumulation")


def batch_sizes(look: Look) -> list[Line]:
    """A note, if one process with the same flags takes another number of examples in a step."""
    if not look.alone.is_joined or look.own_total in (0, look.total):
        return []
    text = f"one process with the same flags takes {look.own_total} examples per step"
    text += f", the {len(look.facts.ranks)} processes {look.total}"
    first, *others = [look.facts.ranks[0].steps[k].options for k in look.facts.steps]
    if any(options != first for options in others):
        text += "; a schedule that counts the steps of an epoch was not tested (--alone)"
    return [Line("batch size", text)]


def random_numbers(facts: Facts) -> list[Line]:
    """A note, if ranks with different examples draw the same random numbers (dropout)."""
    ranks = facts.distinct
    drawn = set().union(*(rank.steps[0].draws for rank in ranks))
    states = [list(rank.events.values())[0][0].state for rank in ranks if rank.events]
    others = set().union(*(state.other_than(states[0]) for state in states[1:]))
    if len(states) < 2 or not drawn or drawn & others:
        return []
    text = "all ranks draw the same random numbers, so they have the same dropout masks (or noise)"
    return [Line("note", f"{text}: seed them differently")]
