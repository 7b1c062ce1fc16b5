"""Why a step takes so long: what one rank spends more than the others, or what all spend."""

import itertools
import math
import statistics
from typing import NamedTuple

from timeline.data import PARTS, PHASES, ms
from timeline.spent import (
    average,
    least,
    loading_of,
    more_on_core,
    more_than_others,
    spent_in,
    typical_length,
    waits_for,
    without_core,
)
from timeline.steps import Table

LEAST = 0.1  # of a step: less is not worth a word
MUCH = 0.3  # of a step, for what all ranks spend
ALIKE = 0.7  # two ratios of which the smaller one is at least so large, compared with the other
CHANCE = 0.01  # what is more probable without a cause is not named
LAUNCH = 1_000_000  # ns: in a longer pause the process does something else than to launch kernels
OWN_PARTS = [part for part in PARTS if part != "waiting"]


class Reason(NamedTuple):
    """A sentence, and the numbers of the steps that have what it says; [] if all have."""

    text: str
    steps: list[int]


def why(table: Table, has_workers: bool = False) -> Reason:
    """The text is "" if nothing was seen, or only chance.

    has_workers: of each rank's DataLoader.
    """
    late = late_workers(table) if has_workers else ""
    if len(table.ranks) > 1 and not late:
        for find in slow_rank, slow_now_and_then:
            reason = find(table)
            if reason.text:
                return reason
        late = late_by_turns(table)
    return Reason("; ".join(what_all_spend(table, late)), [])


def late_workers(table: Table) -> str:
    """Workers that are too slow on every rank: whose batches come last is then only chance.

    On a rank whose workers are fast enough, the next batch is there when the others have come.
    """
    loading = [loading_of(steps) for steps in table.ranks.values()]
    length = typical_length(table)
    shortest, longest = min(loading), max(loading)
    if len(table.ranks) == 1 or shortest < LEAST * length or longest < MUCH * length:
        return ""
    return f"each rank waits {ms(shortest)} to {ms(longest)} of {ms(length)} ms for its next batch"


# ------------------------------------------------------------------------------------ one slow rank


def slow_rank(table: Table) -> Reason:
    """The rank for which the others wait longest, if it is always the same part that it spends."""
    waits = {rank: waits_for(table, rank) for rank in table.ranks}
    slow = max(waits, key=lambda rank: statistics.median(waits[rank]))
    wait = statistics.median(waits[slow])
    length = typical_length(table)
    if wait < LEAST * length:
        return Reason("", [])
    extras = {(part,): more_than_others(table, slow, spent_in(part)) for part in OWN_PARTS}
    if in_proportion(table, slow):
        computing = "forward", "backward"
        extras[computing] = more_than_others(table, slow, spent_in(*computing))
    parts = max(extras, key=lambda parts: statistics.median(extras[parts]))
    more = statistics.median(extras[parts])
    usual = sorted(extras[parts])[len(extras[parts]) // 4]  # three of four steps have more
    if more < max(LEAST * length, wait / 2) or more > 2 * wait or usual < more / 2:
        return Reason("", [])
    text = f"rank {slow} spends {ms(more)} ms more in {' and '.join(parts)} than the others"
    core = statistics.median(more_than_others(table, slow, without_core))
    if core > more / 2:
        text += f" ({ms(min(core, more))} ms of it without a core)"
    elif len(parts) > 1:
        text += f", {in_proportion(table, slow):.1f} times as long: has it more to compute?"
        return Reason(f"{text} They wait {ms(wait)} ms a step for it", [])
    return Reason(f"{text}, who wait {ms(wait)} ms a step for it", [])


def in_proportion(table: Table, slow: int) -> float:
    """How many times as long as the others' its forward and its backward take; 0 if not alike."""
    times = []
    for part in "forward", "backward":
        usual = {}
        for rank, steps in table.ranks.items():
            usual[rank] = statistics.median(step.spent[part] for step in steps)
        own = usual.pop(slow)
        times.append(own / max(statistics.mean(usual.values()), 1))
    if min(times) < 1 + LEAST or min(times) < ALIKE * max(times):
        return 0
    return statistics.mean(times)


def slow_now_and_then(table: Table) -> Reason:
    """A rank that spends more in some steps only: so much that the mean of all steps shows it.

    Time without a core is chance.  So is what another rank has now and then, too.
    """
    length = table.usual_length
    means = {}
    for rank in table.ranks:
        for part in OWN_PARTS:
            extras = more_on_core(table, rank, part)
            means[rank, part] = statistics.mean(max(0, extra) for extra in extras)
    slow, part = max(means, key=means.__getitem__)
    mean = means.pop((slow, part))
    rest = max(mean_of for (rank, _), mean_of in means.items() if rank != slow)
    wait = statistics.mean(waits_for(table, slow))
    if mean < LEAST * statistics.mean(table.lengths) or mean < 2 * rest or wait < mean / 2:
        return Reason("", [])
    extras = more_on_core(table, slow, part)
    least_pause = max(LEAST * length, mean)
    places = [k for k, extra in enumerate(extras) if extra > least_pause]
    others = 0  # pauses of other ranks, in any part
    for rank in table.ranks:
        of_parts = [more_on_core(table, rank, own_part) for own_part in OWN_PARTS]
        if rank != slow:
            of_steps = zip(*of_parts, strict=True)
            others += sum(max(mores) > least_pause for mores in of_steps)
    if is_chance(places, others, len(table.ranks)):
        return Reason("", [])
    more = statistics.mean(extras[place] for place in places)
    text = (
        f"rank {slow} spends {ms(more)} ms more in {part} in {len(places)} of {len(extras)} steps"
    )
    return Reason(text, [table.first + place for place in places])


def is_chance(places: list[int], others: int, ranks: int) -> bool:
    """Whether pauses that come by chance, to any rank, would often come to one so often.

    Not if they come at regular intervals.
    """
    gaps = {later - earlier for earlier, later in itertools.pairwise(places)}
    if len(places) >= 4 and len(gaps) == 1:
        return False
    count, share = len(places) + others, 1 / ranks
    probability = 0.0
    for mine in range(len(places), count + 1):
        ways = math.comb(count, mine)
        probability += ways * share**mine * (1 - share) ** (count - mine)
    return probability > CHANCE


def late_by_turns(table: Table) -> str:
    """The others wait long in each step, and not for the same rank.

    Ranks that send to each other, as the stages of a pipeline, do so by design.
    """
    if table.arrows:
        return ""
    waits = {rank: waits_for(table, rank) for rank in table.ranks}
    longest, last = [], []
    for in_step in zip(*waits.values(), strict=True):
        longest.append(max(in_step))
        last.append(in_step.index(max(in_step)))
    usual = statistics.median(longest)
    most = max(last.count(place) for place in last)
    if usual < MUCH * table.usual_length or most > 0.75 * len(last):
        return ""
    if least(list(table.ranks.values()), without_core) > usual / 2:
        return ""  # they take turns on the cores
    text = f"another rank is late in each step, and the others wait {ms(usual)} of "
    text += f"{ms(table.usual_length)} ms for it: the work of a batch differs, or the machine "
    return f"{text}is shared"


# ----------------------------------------------------------------------------- what all ranks spend


def what_all_spend(table: Table, late: str) -> list[str]:
    """Loading (late: a rank is, now this one, now that), messages, pauses of GPUs, no cores."""
    length = typical_length(table)
    all_steps = list(table.ranks.values())
    texts = [late] if late else []
    who = "each rank" if len(all_steps) > 1 else "the process"
    loading = min(map(loading_of, all_steps))
    longest = max(average([step.length for step in steps]) for steps in all_steps)
    if not late and loading > MUCH * longest:
        texts.append(f"{who} waits {ms(loading)} of {ms(longest)} ms for its next batch")
    messages = least(all_steps, lambda step: step.waits_for[None])
    if messages > MUCH * length:
        text = f"messages take {ms(messages)} of {ms(length)} ms in which {who} does nothing else"
        texts.append(text)
    idle = least(all_steps, lambda step: sum(pause.length for pause in step.idle))
    if idle > MUCH * length:
        share = f"{ms(idle)} of {ms(length)} ms"
        texts.append(f"the GPU has nothing to compute for {share}: {cause(table)}")
    core = least(all_steps, without_core)
    if core > MUCH / 2 * length:
        texts.append(f"{who} is ready, but has no core for {ms(core)} of {ms(length)} ms")
    return texts


def cause(table: Table) -> str:
    """Why the GPU computes nothing: short pauses, or long ones with something else in them."""
    short, spent = 0, dict.fromkeys(PHASES, 0)
    for steps in table.ranks.values():
        for step in steps:
            for pause in step.idle:
                spent[pause.what] += pause.length
                short += pause.length if pause.length < LAUNCH else 0
    if short > sum(spent.values()) / 2:
        return "kernels are launched too slowly"
    return f"{max(spent, key=spent.__getitem__)} launches no kernel then"
