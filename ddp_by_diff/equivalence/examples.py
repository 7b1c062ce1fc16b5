"""Examples: is each on one rank, and once?  One count of them, for a few steps and for an epoch."""

import itertools
from collections import Counter
from typing import NamedTuple

from ddp_by_diff.equivalence.batches import digests_of_examples, tensors_in
from ddp_by_diff.equivalence.facts import COPIES, PARTS, UNCLEAR, Facts
from ddp_by_diff.equivalence.limits import ALIKE, OFTEN
from ddp_by_diff.equivalence.notes import Event, Loader, Notes, have_one_dataset
from ddp_by_diff.equivalence.verdict import Check, Reason, inconclusive, some_of, span

LABEL = "examples"
NO_BATCHES = Reason(
    "no DataLoader gives a batch in each of these steps",
    "in a copy, let one DataLoader give a batch for each step",
)
AGAIN = Reason(
    "some were read more than once, and not as padding",
    "if they are equal, drawn again or repeated on purpose, nothing is wrong; if not, and loader "
    "workers read a stream, give each its own share (get_worker_info)",
)
EQUAL = Reason(
    "some are on more than one rank, or the data have equal examples",
    "if they are equal, or drawn with replacement, nothing is wrong; else give each rank its share",
)
NEVER = Reason(
    "some examples are never read",
    "if they are left out on purpose (for validation), nothing is wrong",
)
CHANGED = Reason(
    "the data have changed since their loader was made, so their numbers say nothing",
    "in a copy, draw or change them once, before the first epoch",
)
ONE_ORDER = "make data, order and the labels' numbers equal on all ranks (sorted(), or a seed)"


def copies(facts: Facts) -> Check:
    """Whether all ranks have equal weights before and after each step, and train equal layers."""
    if facts.model == UNCLEAR:
        return Check("copies", True)
    if facts.unequal:
        when = f"after step {facts.first_unequal}" if facts.first_unequal else "from the start"
        text = f"the ranks' weights differ {when}: {some_of(facts.unequal)}"
        text += ", which no optimizer trains" * facts.trained.isdisjoint(facts.unequal)
        return Check("copies", False, text)
    if text := other_layers(facts):
        return Check("layers", False, text)
    names = facts.unequal_before(len(facts.steps), is_exact=True)
    text = f"ok, up to rounding in {some_of(names)}; in a long run, copies may drift apart"
    return Check("copies", True, text if names else "")


def other_layers(facts: Facts) -> str:
    """In words, if layers train on some ranks only, as others have forgotten model.train()."""
    for k in facts.steps if facts.model == COPIES else []:
        called = [rank for rank in facts.ranks if rank.steps[k].inputs]
        for kind in sorted(facts.kinds):
            some = [str(rank.rank) for rank in called if kind not in rank.steps[k].kinds]
            if 0 < len(some) < len(called):
                who = ", ".join(some)
                return f"no {kind} trains on rank {who} in step {k + 1}: call model.train() there"
    return ""


class Counted(NamedTuple):
    """Examples of all ranks, each counted once."""

    came: int
    different: int
    shared: int  # on more than one rank
    again: int  # more than once on one rank


def counted(shares: list[Counter]) -> Counted:
    """Count the ranks' examples.  shares: of each rank, how often each example came."""
    owners, times = Counter(itertools.chain(*shares)), sum(shares, Counter())
    shared = sum(count > 1 for count in owners.values())
    again = sum(times[one] > owners[one] for one in times)
    return Counted(times.total(), len(owners), shared, again)


def why_not_shared_out(
    found: Counted, text: str, loaders: list[Loader], is_proven: bool, slack: float = 0
) -> Check | None:
    """The check if examples are repeated, or on two ranks; None if not.  text: begins its line.

    is_proven: examples are known by their numbers in data that all ranks share, and come once in
    an epoch; else they may be equal, or drawn again.  slack: so many may come again, as padding.
    """
    if found.again > slack or found.again and found.shared > slack:  # no partition of the data
        text += f"{found.again} of {found.different} were read more than once by their rank"
        return inconclusive(LABEL, AGAIN, text)
    if found.shared <= slack:
        return None
    text += f"{found.shared} of {found.different} are on more than one rank"
    if is_proven or found.shared > OFTEN * found.different:
        return Check(LABEL, False, f"{text}: {remedy(loaders)}")
    return inconclusive(LABEL, EQUAL, text)


def remedy(loaders: list[Loader]) -> str:
    """What to do so that each rank has its own examples."""
    if any(loader.redraws for loader in loaders):
        return "let each rank draw its own examples (another seed on each rank)"
    samplers = [loader.sampler for loader in loaders]
    if all(samplers) and not have_one_pool(loaders):
        return "the ranks' Subsets have different examples: split with the same seed on all ranks"
    if all(samplers):
        return f"the ranks' DistributedSamplers have {'; '.join(samplers)}"
    tool = " (DistributedSampler)" * any(loader.length for loader in loaders)  # not for a stream
    return f"give each rank its own share{tool}"


def have_one_pool(loaders: list[Loader]) -> bool:
    """Whether the ranks' Subsets, if there are any, have the same examples."""
    return all(sorted(loader.pool or []) == sorted(loaders[0].pool or []) for loader in loaders)


def other_number(text: str, loaders: list[Loader], is_shared_out: bool) -> Check | None:
    """The check if number k of the data is another example on some rank; None if it is the same.

    text: begins its line.  is_shared_out: each rank takes other numbers, so they are meant to be
    those of one data set.
    """
    picks = [loader.picks for loader in loaders]
    for rank, some in enumerate(picks if is_shared_out else []):
        for number in some.keys() & picks[0].keys():
            if some[number] != picks[0][number]:
                text += f"example {number} of the data is not the same on rank {rank} as on rank 0"
                if any(one.begun and one.picks not in ({}, one.begun) for one in loaders):
                    return inconclusive(LABEL, CHANGED, text)
                return Check(LABEL, False, f"{text}: {ONE_ORDER}")
    return None


def have_own_data(loaders: list[Loader]) -> bool:
    """Whether an example's number means something else on some rank."""
    return all(loader.picks for loader in loaders) and not have_one_dataset(loaders)


def has_own_data(facts: Facts) -> bool:
    """Whether each rank has a data set of its own."""
    return any(have_own_data(facts.loaders(key)) for key in facts.keys)


def pool_of(loaders: list[Loader]) -> int:
    """The number of examples that the ranks' data sets have together."""
    pools = [loader.pool for loader in loaders if loader.pool is not None]
    is_of_parts = len(pools) == len(loaders)
    return len(set().union(*pools)) if is_of_parts else max(one.length for one in loaders)


def never_come(found: Counted, text: str, length: int, ranks: int, slack: float) -> Check | None:
    """The check if some of so many examples are on no rank."""
    missing = length - found.different
    if missing <= slack:
        return None
    text += f", {missing:.0f} are never read"
    if abs(found.different * ranks - length) > slack * ranks:
        return inconclusive(LABEL, NEVER, text)
    return Check(LABEL, False, f"{text}: as if each rank took its share of its share")


def examples(facts: Facts, total: int = 0) -> Check:
    """Whether each example is on one rank.  total: examples of one process in a step, or 0."""
    if not facts.keys:
        return Check(LABEL, True, NO_BATCHES.sentence)
    text = in_words(facts, facts.ranks if facts.model == COPIES else facts.distinct)
    if facts.model != COPIES:  # `one batch` tells whether they are right
        shared = "all" if len(facts.distinct) == 1 else "some"
        same = f", the same on {shared} ranks" + ", which share one model" * (facts.model == PARTS)
        return Check(LABEL, True, text + same * (len(facts.distinct) < len(facts.ranks)))
    if facts.is_same_work:
        who = "some ranks" if len(facts.distinct) > 1 else "all ranks"
        text += f", but {who} have the same {facts.unit}, so the work is done again"
        return Check(LABEL, False, f"{text}: {remedy(facts.loaders(facts.keys[0]))}")
    if len(facts.distinct) < len(facts.ranks) or 0 < total < facts.total:
        return Check(LABEL, True, f"{text}: each rank takes its part of the same batch")
    return of_shares(facts, text)


def in_words(facts: Facts, ranks: list[Notes]) -> str:
    """The ranks' examples in a step, such as "8 + 7-8 per step"."""
    counts = [span([facts.examples(rank, k) for k in facts.steps]) for rank in ranks]
    return " + ".join(counts) + " rows" * (facts.unit == "rows") + " per step"


def of_shares(facts: Facts, text: str) -> Check:
    """Whether an example is on two ranks, in these steps or in an epoch: data parallelism."""
    done = "; whether some are on two ranks is not known"
    for key in facts.keys:
        # The text has the first one's counts.
        begin = text if key == facts.keys[0] else key.replace("loader", "DataLoader with index")
        loaders = facts.loaders(key)
        if any(loader.redraws for loader in loaders):
            continue  # they may take an example again
        are_numbers = have_one_dataset(loaders)
        check, is_listed = in_an_epoch(begin, loaders, are_numbers)
        found, slack = in_the_steps(facts, key, are_numbers)
        if not check and (not found.came or found.again and max(found[2:]) > slack):
            continue  # not known, drawn again, or equal: these tell nothing
        start = f"{begin}; in {len(facts.steps)} steps, "
        is_proven = are_numbers and all(loader.is_known for loader in loaders)
        if check := check or why_not_shared_out(found, start, loaders, is_proven, slack):
            return check
        if key == facts.keys[0]:
            some = f"{found.shared} of {found.different}" if found.shared else "none of them"
            done = f", {some} on two ranks (checked{'' if are_numbers else ' by their content'} "
            done += f"for {len(facts.steps)} steps{', and in an epoch' * is_listed})"
    return Check(LABEL, True, text + done)


def in_an_epoch(text: str, loaders: list[Loader], are_numbers: bool) -> tuple[Check | None, bool]:
    """The check if a whole epoch is not shared out; and whether its examples are known."""
    epochs = [Counter(loader.epoch) for loader in loaders]
    found, slack = counted(epochs), len(loaders)  # padding, or what is left out
    is_listed = all(epochs) and not found.again
    # Of distributed.py's sampler nothing is said: each rank may draw its part of an epoch's data.
    is_shared_out = is_listed and found.shared <= slack and all(one.is_known for one in loaders)
    if check := other_number(f"{text}, but ", loaders, is_shared_out):
        return check, False
    if not (is_listed and are_numbers):
        return None, False
    text += "; in an epoch, "
    length = pool_of(loaders)
    came = f"{text}{found.different} of {length} examples are read"
    check = why_not_shared_out(found, text, loaders, True, slack)
    return check or never_come(found, came, length, len(loaders), slack), True


def in_the_steps(facts: Facts, key: str, are_numbers: bool) -> tuple[Counted, float]:
    """The count of a key's examples in these steps; and how many may come again."""
    shares = [named(facts, rank, key, are_numbers) for rank in facts.ranks]
    found = counted(shares)
    if not key.startswith("loader"):  # pieces that a program draws itself can be alike by chance
        return found, ALIKE * found.different
    # At an epoch's end some may come again, as padding.
    rounds = {name[0] for share in shares for name in share}
    is_end = len(rounds) > 1 or found.different == pool_of(facts.loaders(key))
    return found, (len(shares) + facts.total) * (are_numbers and is_end)


def named(facts: Facts, rank: Notes, key: str, are_numbers: bool) -> Counter:
    """How often each example came in these steps: by its loader's round, and number or digest."""
    names: Counter = Counter()
    for step in facts.steps:
        for event in facts.events(rank, key, step):
            digests = digests_of_examples(event.value, event.examples)
            if are_numbers and event.indices:
                digests = [*event.indices]
            elif not event.examples and not has_rows(event, len(digests)):
                continue
            names.update((event.round, one) for one in digests)
    return names


def has_rows(event: Event, count: int) -> bool:
    """Whether an event's examples are the rows of its tensors (and not nodes of graphs, say)."""
    if event.indices:
        return len(event.indices) == count
    return len({len(tensor) for tensor in tensors_in(event.value) if tensor.dim()}) <= 1
