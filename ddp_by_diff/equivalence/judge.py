"""The questions, one after the other: what can be seen of a program says which checks are made."""

import argparse
import itertools
from pathlib import Path

from ddp_by_diff.equivalence import epoch, limits, one_batch, verdict, weights
from ddp_by_diff.equivalence.averaging import averaging, in_weights
from ddp_by_diff.equivalence.examples import copies, examples, has_own_data
from ddp_by_diff.equivalence.facts import NONE_GOT, OWN, UNCLEAR, Facts, copies_or_parts, facts_of
from ddp_by_diff.equivalence.notes import Alone, Notes, drawn_between
from ddp_by_diff.equivalence.one_batch import Look
from ddp_by_diff.equivalence.runs import Runs, with_counterparts
from ddp_by_diff.equivalence.vectors import only, unequal_names
from ddp_by_diff.equivalence.verdict import Answer, Check, Reason, inconclusive
from ddp_by_diff.instruments.command import Line

NO_STEP = Reason(
    "no step of an optimizer of torch.optim was seen",
    "in a copy, let torch.optim.SGD update the model's parameters in the first thread, uncompiled",
)
PARTS_UNCLEAR = Reason(
    "the ranks' weights differ from the start, and the modules called in one process have others",
    "if they are parts of one model, let one module's forward call them, in a copy",
)
FOLLOWS = Reason("not compared, as wrong gradients or options change them", "")
ON_THEIR_OWN = "no process has started a process group, so each of them trains on its own"
PORT_IT = "call init_process_group, and wrap the model in DDP (docs/porting.md)"
OWN_DATA = " (each rank has a dataset of its own: what it makes of its values was not compared)"
RESUMED = Reason(
    "one process began with weights that the ranks had later, so it has read their checkpoint",
    'give it another folder, such as --alone="--out elsewhere", or switch resuming off',
)
INFINITE = "torch.autograd.set_detect_anomaly(True), in a copy, names the line of the program"


def answer(args: argparse.Namespace, notes: list, folder: Path) -> Answer:
    """The answer from the notes of all ranks that came."""
    ranks = [note.value for note in notes]
    runs = Runs(args, folder, len(ranks))
    if args.epoch:
        return epoch.answer(ranks, runs)
    is_short = min(len(rank.counts) for rank in ranks) <= args.steps
    if len(ranks) < ranks[0].world_size or is_short:
        return few_steps(ranks, args.steps)
    if len(ranks) < 2:
        return verdict.unknown(Reason("there is only one process", "give --nproc 2"))
    return judge(ranks, args.steps, runs)._replace(error=runs.problem)


def few_steps(ranks: list[Notes], length: int) -> Answer:
    """The answer if not all ranks made enough steps."""
    made = [len(rank.counts) for rank in ranks]
    if max(made) == 0:
        return verdict.unknown(NO_STEP)
    each = ", ".join(f"rank {rank.rank}: {len(rank.counts)}" for rank in ranks)
    few = f"not all ranks made {length + 1} steps of an optimizer ({each})"
    if bad := first_infinite(ranks, min(made)):
        return verdict.unknown(Reason(f"gradients: {bad.sentence}; {few}", bad.way_on))
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


def judge(ranks: list[Notes], length: int, runs: Runs) -> Answer:
    """All checks, the verdict from them, and notes on untrained weights and random numbers."""
    facts, own_data = facts_of(ranks, length), None
    if bad := first_infinite(ranks, length):
        checks = [examples(facts), copies(facts), inconclusive("gradients", bad)]
        return Answer(verdict.conclude(checks, length), checks, [])
    if are_on_their_own(facts):
        check = Check("processes", False, f"{ON_THEIR_OWN}: {PORT_IT}", why=ON_THEIR_OWN)
        return Answer(verdict.conclude([check], length), [check], [])
    if facts.model == UNCLEAR:
        own_data = runs.alone(facts, "own data")
        facts = copies_or_parts(facts, own_data) if isinstance(own_data, Alone) else facts
    look = one_batch.look_at(runs, facts)
    alone = look.alone if isinstance(look, Look) else own_data or runs.alone(facts, "own data")
    checks = checks_of(runs, facts, look, alone)
    left_out = [name for name in facts.ranks[0].trainable if name not in facts.trained]
    text = f"{verdict.some_of(left_out)}: no optimizer changed them in these steps"
    notes = [Line("not checked", text)] * bool(left_out)
    if not isinstance(look, Look) or one_batch.draws_others(look, 0):  # else the masks are equal
        notes = random_numbers(facts) + notes
    batch = next(check for check in checks if check.label == facts.batch_check)
    # Wrong averaging explains other buffers.
    if isinstance(look, Look) and (checks[3] is batch or checks[3].is_right is not False):
        checks += weights.buffers(facts, look.alone, batch.limit, bool(batch.is_right))
    is_unseen = all(check.is_right for check in checks) and has_own_data(facts)
    other = one_process(facts, alone) + OWN_DATA * is_unseen
    found = verdict.conclude(checks, length, other)
    if found.code == verdict.DIFFERENT and isinstance(alone, Alone) and has_resumed(facts, alone):
        return verdict.unknown(RESUMED)
    return Answer(found, checks, notes)


def are_on_their_own(facts: Facts) -> bool:
    """Whether the ranks send nothing: an unported program, which each process runs for itself."""
    is_apart = facts.model == UNCLEAR or bool(facts.unequal) or facts.is_same_work
    return is_apart and not any(rank.has_group for rank in facts.ranks)


def one_process(facts: Facts, alone: Alone | Reason) -> str:
    """One process in words: with flags, or with a batch, that it has not by itself."""
    if isinstance(alone, Reason) or not facts.keys:
        return "one process"
    read = alone.notes.sizes
    flags = {flag: size for flag, size in facts.flags_of_all().items() if read.get(flag) == size}
    if flags and len(facts.distinct) > 1:
        given = " ".join(f"{flag} {size}" for flag, size in flags.items())
        own = " and ".join(dict.fromkeys(str(facts.ranks[0].sizes[flag]) for flag in flags))
        return f"one process with {given} (with the same flags, it would take {own})"
    if facts.is_same_job(alone):
        return "one process"
    whose = " of the first DataLoader" * ("loader 1" in facts.keys)
    text = f"one process that takes {facts.total} examples{whose} in a step"
    return f"{text} (with the same flags, it takes {alone.own_total})"


def has_resumed(facts: Facts, alone: Alone) -> bool:
    """Whether one process began with the weights that rank 0 had after some step."""
    first, *later = [only(step.weights, facts.trained) for step in facts.ranks[0].steps]
    own = only(alone.notes.steps[0].weights, facts.trained)
    return bool(unequal_names(own, first)) and any(not unequal_names(own, some) for some in later)


def checks_of(runs: Runs, facts: Facts, look: Look | Reason, alone: Alone | Reason) -> list[Check]:
    """All checks: examples, copies, options; averaging, if it was seen, `one batch` and weights."""
    settings = weights.options(facts, alone, runs.other_job(facts, alone))
    if facts.model == UNCLEAR:
        names = "averaging", facts.batch_check, "weights"
        reason = alone if isinstance(alone, Reason) else PARTS_UNCLEAR
        unclear = (inconclusive(name, reason) for name in names)
        return [examples(facts), copies(facts), settings, *unclear]
    batch, right = batch_and_look(runs, facts, look)
    # Without dropout, say, if that is the cause: then the same work has the same gradients.
    seen = examples(right.facts if right else facts, look.total if isinstance(look, Look) else 0)
    alone = with_counterparts(alone)
    if isinstance(alone, Reason):
        last = inconclusive(weights.LABEL, alone)
    elif facts.are_forced:
        last = weights.weights(facts, alone, None, settings)
    elif right is None:
        last = inconclusive(weights.LABEL, one_batch.NO_GRADIENTS)
    else:
        right = one_batch.with_rounding(runs, right)
        last = weights.weights(right.facts, right.alone, right.exact, settings)
    checks = [batch]
    if facts.gradients == OWN:
        checks = [averaging(facts, right, last), batch]
    if facts.gradients == NONE_GOT:
        checks = [in_weights(last), batch]
    if checks[0].is_right is False and not settings.is_right and right:
        exact = one_batch.with_rounding(runs, right).exact
        if exact and weights.change_as_in_float64(right.facts, exact):  # such as a sum, and lr / n
            text = checks[0].text.replace("WRONG:", "ok:") + ", but at other learning rates"
            checks[0] = checks[0]._replace(is_right=True, text=text)
            text = "ok: the weights change as in one process with its own gradients and options"
            last = Check(weights.LABEL, True, text, limits.UPDATED)
            settings = settings._replace(is_right=True)
    if False in (settings.is_right, checks[0].is_right) and last.is_right is False:
        last = inconclusive(weights.LABEL, FOLLOWS)
    return [seen, copies(facts), settings, *checks, last]


def batch_and_look(runs: Runs, facts: Facts, look: Look | Reason) -> tuple[Check, Look | None]:
    """The check, and the look in which it is right: perhaps one without BatchNorm or dropout."""
    if isinstance(look, Reason):
        return inconclusive(facts.batch_check, one_batch.why_not_joined(facts) or look), None
    reason = None if look.is_given else one_batch.why_not_joined(look.facts)
    if not reason and not runs.per_step and takes_other_steps(look):
        reason = one_batch.OTHER_BATCHES
    if reason:
        return inconclusive(facts.batch_check, reason), None
    return one_batch.one_batch(runs, look)


def takes_other_steps(look: Look) -> bool:
    """Whether one process makes its steps after other numbers of batches, not only in advance."""
    many, alone, keys = look.facts.ranks[0], look.alone.notes, look.facts.keys
    ahead = [key for key in keys if many.reads_ahead(key) or alone.reads_ahead(key)]
    are_equal = all(many.per_step(key) == alone.per_step(key) for key in keys)
    return many.counts != alone.counts and not (ahead and are_equal)


def random_numbers(facts: Facts) -> list[Line]:
    """A note, if ranks with different examples draw the same random numbers (dropout)."""
    ranks = facts.distinct
    drawn = set().union(*(rank.steps[0].draws for rank in ranks))
    states = [list(rank.events.values())[0][0].state for rank in ranks if rank.events]
    others = set().union(*(drawn_between(states[0], state) for state in states[1:]))
    if len(states) < 2 or not drawn or drawn & others:
        return []
    text = "all ranks draw the same random numbers in a step"
    text += ", so they have the same dropout masks" * ("dropout" in facts.kinds)
    return [Line("note", f"{text}: seed them differently")]
