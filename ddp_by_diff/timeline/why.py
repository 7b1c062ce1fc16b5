"""Why a step takes so long: what one rank spends more than the others, or what all spend."""

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ddp_by_diff.timeline.data import PARTS, ms, ms_range
from ddp_by_diff.timeline.habit import IsChance, habit_of, is_rare, mean_at
from ddp_by_diff.timeline.steps import MANY, Measure, Step, Table

LEAST = 0.1  # of a step: less is not worth a word
MUCH = 0.3  # of a step, for what all ranks spend in each
OWN_PARTS = [part for part in PARTS if part != "waiting"]


class Reason(NamedTuple):
    """A sentence, and the numbers of the steps that have what it says; none if all have."""

    text: str
    steps: Sequence[int] = ()


def why(table: Table) -> list[Reason]:
    """The reasons; an empty list if nothing was seen, or only what may be chance."""
    late = late_batches(table)
    in_some = what_all_spend_in_some(table)
    if len(table.ranks) > 1 and not (late and table.has_workers):
        slow = always_slow(table) + slow_in_some(table)
        if slow:
            return slow + in_some
        late = late_by_turns(table) or late
    return late + in_some + what_all_spend(table)


def steps_named(reasons: list[Reason]) -> Sequence[int]:
    """The steps of the first reason that only some have."""
    return next((reason.steps for reason in reasons if reason.steps), ())


def who(table: Table) -> str:
    return "each rank" if len(table.ranks) > 1 else "the process"


def up_to(table: Table) -> str:
    """What stands before a time for which several others wait, which is the longest."""
    return "up to " if len(table.ranks) > 2 else ""


def spent_in(*parts: str) -> Measure:
    return lambda step: sum(step.spent[part] for part in parts)


def in_some_steps(
    table: Table, subject: str, series: dict[str, list[float]], is_chance: IsChance
) -> list[Reason]:
    """What only some steps have; series: of each part.  Parts with the same steps are joined."""
    least = LEAST * statistics.mean(table.lengths)
    parts, mores = defaultdict(list), {}
    for part, values in series.items():
        habit = habit_of(values, least, is_chance)
        if habit.places:
            places = tuple(habit.places)
            parts[places].append(part)
            before = mores.get(places, [0] * len(places))
            mores[places] = [*map(sum, zip(before, habit.mores, strict=True))]
    reasons = []
    for places, names in parts.items():
        steps = [table.first + place for place in places]
        text = f"{subject} spends {ms_range(mores[places])} ms more in {' and '.join(names)} in "
        text += f"{len(places)} of {len(table.lengths)} steps"
        if "loading" in names and table.worker_starts.issuperset(steps):
            text += ", where its DataLoader starts workers (persistent_workers=True keeps them)"
        reasons.append(Reason(text, steps))
    return reasons


def always_slow(table: Table) -> list[Reason]:
    """The rank for which the others wait longest in each step, if it spends so much more."""
    waits = {rank: statistics.median(table.waits_for(rank)) for rank in table.ranks}
    slow = max(waits, key=waits.__getitem__)
    wait = waits[slow]
    shortest = LEAST * table.usual_length
    parts = []
    for part in OWN_PARTS:
        if statistics.median(table.more(slow, spent_in(part))) >= shortest:
            parts.append(part)
    mores = table.more(slow, spent_in(*parts))
    more = statistics.median(mores)
    usual = sorted(mores)[len(mores) // 4]  # three of four steps have more
    if not parts or wait < shortest or not wait / 2 <= more <= 2 * wait or usual < more / 2:
        return []
    text = f"rank {slow} spends {ms(more)} ms more in {' and '.join(parts)} than the other ranks"
    core = statistics.median(table.more(slow, Step.without_core))
    if core > more / 2:
        text += f" ({ms(min(core, more))} ms of it without a CPU core)"
    return [Reason(f"{text}, which wait {up_to(table)}{ms(wait)} ms per step for it")]


def slow_in_some(table: Table) -> list[Reason]:
    """The rank for which the others wait longest on average: what it spends more in some steps."""
    waits = {rank: statistics.mean(table.waits_for(rank)) for rank in table.ranks}
    slow = max(waits, key=waits.__getitem__)
    extras = {}  # time without a core is chance
    for rank, part in itertools.product(table.ranks, OWN_PARTS):
        mores = table.more(rank, lambda step, part=part: step.work(part))
        extras[rank, part] = [max(0, more) for more in mores]

    def is_chance(places: list[int], more: float) -> bool:
        others = set()  # pauses of other ranks, in any part
        for (rank, _), values in extras.items():
            if rank != slow:
                others |= {(rank, place) for place, value in enumerate(values) if value > more / 2}
        steps = len(table.lengths)
        is_waited_for = waits[slow] >= more * len(places) / steps / 2
        length = more / table.usual_length
        rare = is_rare(places, length, len(others), len(table.ranks), steps)
        return not is_waited_for or not rare

    own = {part: extras[slow, part] for part in OWN_PARTS}
    return in_some_steps(table, f"rank {slow}", own, is_chance)


def late_by_turns(table: Table) -> list[Reason]:
    """The others wait long in each step, and not for the same rank.

    Ranks that send to each other, as the stages of a pipeline, do so by design.
    """
    late = table.late_ranks()
    usual, length = statistics.median(wait for _, wait in late), table.usual_length
    most = max(Counter(rank for rank, _ in late).values())
    if table.arrows or usual < MUCH * length or most > 0.75 * len(late):
        return []
    if table.least(Step.without_core) > usual / 2:
        return []  # they take turns on the cores
    wait = f"{up_to(table)}{ms(usual)} of {ms(length)} ms"
    text = f"now one rank is late, now another, and the others wait {wait} for it. Does the work "
    text += "of a batch differ, do the ranks take turns at a lock, or is the machine shared?"
    return [Reason(text)]


def what_all_spend_in_some(table: Table) -> list[Reason]:
    """What all ranks have in the same steps.  Once is chance, and so is time without a core."""
    least = defaultdict(list)  # a pause is as long as the shortest of the ranks'
    for steps in zip(*table.ranks.values(), strict=True):
        for part in OWN_PARTS:
            least[part].append(min(step.work(part) for step in steps))
    return in_some_steps(table, who(table), least, once)


def once(places: list[int], more: float) -> bool:
    return len(places) < 2


def late_batches(table: Table) -> list[Reason]:
    """Batches that come late in each step, on every rank.

    If all have workers, whose batches come last is then only chance: on a rank whose workers are
    fast enough, the next batch is there when the others have come.
    """
    means, least = [], LEAST * statistics.mean(table.lengths)
    for steps in table.ranks.values():
        values = [step.spent["loading"] for step in steps]
        habit = habit_of(values, least, once)
        means.append(mean_at(values, habit.others))
    shortest, longest, length = min(means), max(means), table.usual_length
    some_have_none = table.has_workers and len(means) > 1
    if shortest < (LEAST if some_have_none else MUCH) * length or longest < MUCH * length:
        return []
    time = ms_range([shortest, longest]) if some_have_none else ms(shortest)
    text = f"{who(table)} waits {time} of {ms(length)} ms for its next batch"
    if not any(recording["worker_starts"] for recording in table.recordings):
        text = f"{who(table)} spends {time} of {ms(length)} ms loading its next batch itself"
        text += " (num_workers=0)"
    return [Reason(text)]


def what_all_spend(table: Table) -> list[Reason]:
    """Messages, pauses of GPUs, and no cores, in each step."""
    length = table.usual_length
    texts = []
    messages = table.least(lambda step: step.waits_for[None])
    count = table.least(lambda step: len(step.messages))
    if messages > MUCH * length:
        many = f" in {count:.0f} messages" if count >= MANY else ""
        text = f"communication{many} takes {ms(messages)} of {ms(length)} ms and is not overlapped "
        texts.append(f"{text}with computation")
    idle = table.least(idle_in)
    if idle > MUCH * length:
        text = f"the GPU has nothing to compute for {ms(idle)} of {ms(length)} ms: kernels are "
        texts.append(f"{text}launched too slowly, or none")
    core = table.least(Step.without_core)
    if core > MUCH / 2 * length and not (messages > MUCH * length and count >= MANY):
        time = f"{ms(core)} of {ms(length)} ms"
        texts.append(f"{who(table)} is ready to run, but has no CPU core for {time}")
    return [Reason(text) for text in texts]


def idle_in(step: Step) -> float:
    return sum(pause.length for pause in step.idle)
