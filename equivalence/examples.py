"""Examples that are on two ranks, and copies of the model that differ."""

from collections import Counter
from typing import Any

from equivalence.batches import digests_of_examples
from equivalence.facts import PARTS, UNCLEAR, Facts
from equivalence.limits import ALIKE, OFTEN
from equivalence.notes import Event
from equivalence.tensors import tensors_in
from equivalence.verdict import Link, Reason, some_of

LABEL = "examples"
NO_BATCHES = Reason(
    "no batches were seen, or not in each step",
    "in a copy, load the data with a DataLoader, or hand them to the model as its inputs",
)
SAMPLER = "give each its share (a DistributedSampler)"


def copies(facts: Facts) -> Link:
    """Whether all ranks have equal weights before and after each step."""
    if facts.model == UNCLEAR or not facts.unequal:
        return Link("copies", True)
    when = "from the start" if facts.first_unequal == 0 else f"after step {facts.first_unequal}"
    text = f"the ranks' weights differ {when}: {some_of(facts.unequal)}"
    return Link("copies", False, text)


def examples(facts: Facts, total: int = 0) -> Link:
    """Whether each example is on one rank.  total: examples of one process in a step, or 0."""
    if not facts.keys:
        return Link(LABEL, True, NO_BATCHES.sentence)
    if facts.model == PARTS:
        return of_parts(facts)
    spread = {}
    for k in facts.steps:
        some = [facts.examples(rank, k) for rank in facts.ranks]
        spread[max(some) - min(some)] = some
    most = spread[max(spread)]
    text = " + ".join(map(str, most)) + " in a step"
    if facts.is_same_work:
        count = len(facts.ranks)
        who, times = ("both", "twice") if count == 2 else (f"all {count}", f"{count} times")
        if len(facts.distinct) > 1:
            who, times = "some", "again"
        text += f": {who} ranks have the same, and do the same work {times}: {SAMPLER}"
        return Link(LABEL, False, text)
    if len(facts.distinct) < len(facts.ranks):
        return Link(LABEL, True, f"{text}: each rank takes its part of the same batch")
    if 0 < total < sum(most):
        return Link(LABEL, True, f"{text}: each rank takes its part of the same {total} examples")
    return of_shares(facts, text)


def of_shares(facts: Facts, text: str) -> Link:
    """Whether an example is on two ranks, in these steps or in an epoch: data parallelism."""
    steps = f"{len(facts.steps)} steps"
    twice, total, is_proven = on_two_ranks(facts)
    epoch, shared = in_an_epoch(facts)
    if shared:
        return Link(LABEL, False, f"{text}. In an epoch, {shared}: {SAMPLER}")
    if not twice:
        return Link(LABEL, True, f"{text}, none on two ranks in {steps}{epoch}")
    text += f"; {twice} of {total} in {steps} are on more than one rank"
    if is_proven:
        return Link(LABEL, False, f"{text}: {SAMPLER}")
    text += " (unless the data have equal examples)"
    return Link(LABEL, None, text, why="some may be on more than one rank")


def of_parts(facts: Facts) -> Link:
    """Examples of ranks that have parts of one model: link 2 tells whether they are right."""
    text = " + ".join(str(facts.examples(rank, 0)) for rank in facts.distinct) + " in a step"
    shared = f"all {len(facts.ranks)}" if len(facts.distinct) == 1 else "some"
    if len(facts.distinct) < len(facts.ranks):
        text += f", the same on {shared} ranks, which share one model"
    return Link(LABEL, True, text)


def on_two_ranks(facts: Facts) -> tuple[int, int, bool]:
    """Counts: examples on two ranks, all examples; and whether the numbers of examples prove it."""
    twice, total, is_proven = 0, 0, False
    for key in facts.keys:
        owners: dict[Any, set[int]] = {}  # of an example in a round of its loader
        numbers: dict[Any, set[Any]] = {}
        has_own_twice = False
        for rank in facts.ranks:
            seen = set()
            for step in facts.steps:
                for name, number in named(facts.events(rank, key, step)):
                    has_own_twice |= name in seen
                    seen.add(name)
                    owners.setdefault(name, set()).add(rank.rank)
                    numbers.setdefault(name, set()).add(number)
        shared = [name for name in owners if len(owners[name]) > 1]
        # Some may come twice on one rank, too.  Pieces that a program draws itself can be alike.
        least = 0 if key.startswith("loader") else ALIKE * len(owners)
        if any(key in rank.redraws for rank in facts.ranks):
            continue
        if len(shared) > least and (not has_own_twice or are_in_each_step(facts, key)):
            twice, total = twice + len(shared), total + len(owners)
            proofs = [numbers[name] for name in shared]
            is_new = any(len(proof) == 1 and None not in proof for proof in proofs)
            is_proven |= is_new and not has_own_twice
    return twice, total, is_proven


def are_in_each_step(facts: Facts, key: str) -> bool:
    """Whether each step has many examples on two ranks, and none twice on one: no chance."""
    for step in facts.steps:
        every = []
        for rank in facts.ranks:
            names = [name for name, _ in named(facts.events(rank, key, step))]
            if len(set(names)) < len(names):
                return False
            every += names
        shared = len(every) - len(set(every))
        if shared < OFTEN * len(every):
            return False
    return True


def named(events: list[Event]) -> list[tuple[tuple[int, str], Any]]:
    """Each example's name (the round and a digest), and its number in the data set or None."""
    pairs = []
    for event in events:
        digests = digests_of_examples(event.value, event.examples)
        count = len(digests)
        if not event.examples and not has_rows(event, count):
            continue
        numbers = event.indices if len(event.indices) == count else [None] * count
        names = [(event.round, text) for text in digests]
        pairs += zip(names, numbers, strict=True)
    return pairs


def has_rows(event: Event, count: int) -> bool:
    """Whether an event's examples are the rows of its tensors (and not nodes of graphs, say)."""
    if event.indices:
        return len(event.indices) == count
    return len({len(tensor) for tensor in tensors_in(event.value) if tensor.dim()}) <= 1


def in_an_epoch(facts: Facts) -> tuple[str, str]:
    """The words on a whole epoch: if no example is on two ranks, or unknown; if some are."""
    key = facts.keys[0]
    indices = [rank.epochs.get(key) or [] for rank in facts.ranks]
    digests = {rank.dataset_digests.get(key) for rank in facts.ranks}
    is_one_dataset = len(digests) == 1 and all(digests)
    is_known = all(indices) and all(len(set(some)) == len(some) for some in indices)
    if not (is_known and is_one_dataset):
        return " (the epoch's length is not known)", ""
    owners: Counter = Counter()
    for some in indices:
        owners.update(set(some))
    slack = 2 * len(indices) + facts.total  # padding, or a last batch that is left out
    if owners.total() <= len(owners) + slack:
        return " or in an epoch", ""
    twice = sum(count > 1 for count in owners.values())
    return "", f"{twice} of {len(owners)} are on more than one rank"
