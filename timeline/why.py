"""Why a step takes so long: what one rank spends more than the others, or what all spend."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from timeline.data import PARTS, ms
from timeline.steps import Measure, Step, Table

LEAST = 0.1  # of a step: less is not worth a word
MUCH = 0.3  # of a step, for what all ranks spend
CHANCE = 0.01  # what is more probable without a cause is not named
OWN_PARTS = [part for part in PARTS if part != "waiting"]


class Reason(NamedTuple):
    """A sentence, and the numbers of the steps that have what it says; none if all have."""

    text: str = ""
    steps: Sequence[int] = ()


def why(table: Table, has_workers: bool = False) -> Reason:
    """The text is "" if nothing was seen, or only chance.

    has_workers: of each rank's DataLoader.
    """
    late = late_batches(table, has_workers)
    if len(table.ranks) > 1 and not (late and has_workers):
        for find in slow_rank, slow_now_and_then:
            reason = find(table)
            if reason.text:
                return reason
        late = late_by_turns(table) or late
    return Reason("; ".join(what_all_spend(table, late)))


def who(table: Table) -> str:
    return "each rank" if len(table.ranks) > 1 else "the process"


def spent_in(*parts: str) -> Measure:
    return lambda step: sum(step.spent[part] for part in parts)


def without_core(step: Step) -> float:
    return step.without_core


def late_batches(table: Table, has_workers: bool) -> str:
    """Batches that come late on every rank.

    If all have workers, whose batches come last is then only chance: on a rank whose workers are
    fast enough, the next batch is there when the others have come.
    """
    loading = table.averages(spent_in("loading"))
    length = max(table.averages(lambda step: step.length))
    shortest, longest = min(loading), max(loading)
    time, least = ms(shortest), MUCH * length
    if has_workers and len(loading) > 1:
        time, least = f"{ms(shortest)} to {ms(longest)}", LEAST * length
    if shortest < least or longest < MUCH * length:
        return ""
    return f"{who(table)} waits {time} of {ms(length)} ms for its next batch"


# ------------------------------------------------------------------------------------ one slow rank


def slow_rank(table: Table) -> Reason:
    """The rank for which the others wait longest, if it is always the same that it spends more."""
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
        return Reason()
    text = f"rank {slow} spends {ms(more)} ms more in {' and '.join(parts)} than the others"
    core = statistics.median(table.more(slow, without_core))
    if core > more / 2:
        text += f" ({ms(min(core, more))} ms of it without a core)"
    return Reason(f"{text}, who wait {ms(wait)} ms a step for it")


def slow_now_and_then(table: Table) -> Reason:
    """A rank that spends more in some steps only: so much that the mean of all steps shows it.

    Time without a core is chance.  So is what another rank has now and then, too.
    """
    cores = {rank: table.more(rank, without_core) for rank in table.ranks}
    extras, means = {}, {}
    for rank, part in itertools.product(table.ranks, OWN_PARTS):
        mores = zip(table.more(rank, spent_in(part)), cores[rank], strict=True)
        extras[rank, part] = [more - max(0, core) for more, core in mores]
        means[rank, part] = statistics.mean(max(0, more) for more in extras[rank, part])
    slow, part = max(means, key=means.__getitem__)
    mean = means[slow, part]
    wait = statistics.mean(table.waits_for(slow))
    if mean < LEAST * statistics.mean(table.lengths) or wait < mean / 2:
        return Reason()
    least_pause = max(LEAST * table.usual_length, mean)
    places = [place for place, more in enumerate(extras[slow, part]) if more > least_pause]
    others = set()  # pauses of other ranks, in any part
    for (rank, _), mores in extras.items():
        if rank != slow:
            others |= {(rank, place) for place, more in enumerate(mores) if more > least_pause}
    if is_chance(places, len(others), len(table.ranks)):
        return Reason()
    more = statistics.mean(extras[slow, part][place] for place in places)
    count = f"{len(places)} of {len(table.lengths)}"
    text = f"rank {slow} spends {ms(more)} ms more in {part} in {count} steps"
    return Reason(text, [table.first + place for place in places])


def is_chance(places: list[int], others: int, ranks: int) -> bool:
    """Whether pauses that come by chance, to any rank, would often come to one so often.

    Not if they come at regular intervals, and to the others seldom.
    """
    gaps = {later - earlier for earlier, later in itertools.pairwise(places)}
    if len(places) >= 4 and len(gaps) == 1 and others < len(places) / 2:
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
    late = table.late_ranks()
    usual, length = statistics.median(wait for _, wait in late), table.usual_length
    most = max(Counter(rank for rank, _ in late).values())
    if table.arrows or usual < MUCH * length or most > 0.75 * len(late):
        return ""
    if table.least(without_core) > usual / 2:
        return ""  # they take turns on the cores
    text = f"another rank is late in each step, and the others wait {ms(usual)} of {ms(length)} ms"
    return f"{text} for it: the work of a batch differs, or the machine is shared"


# ----------------------------------------------------------------------------- what all ranks spend


def what_all_spend(table: Table, late: str) -> list[str]:
    """Loading (late: a rank is, now this one, now that), messages, pauses of GPUs, no cores."""
    length = table.usual_length
    texts = [late] if late else []
    messages = table.least(lambda step: step.waits_for[None])
    if messages > MUCH * length:
        text = f"messages take {ms(messages)} of {ms(length)} ms in which {who(table)} does "
        texts.append(f"{text}nothing else")
    idle = table.least(idle_in)
    if idle > MUCH * length:
        text = f"the GPU has nothing to compute for {ms(idle)} of {ms(length)} ms: kernels are "
        texts.append(f"{text}launched too slowly, or none")
    core = table.least(without_core)
    if core > MUCH / 2 * length:
        texts.append(f"{who(table)} is ready, but has no core for {ms(core)} of {ms(length)} ms")
    return texts


def idle_in(step: Step) -> float:
    return sum(pause.length for pause in step.idle)
