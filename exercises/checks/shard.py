"""Check that each example is used once, in equal shares, in a new order in each epoch, the same in each call."""

import itertools
import random

import torch

HINT = """
All ranks must draw the same order: a new generator, torch.Generator().manual_seed(epoch), does not depend on what
this rank has drawn before.  Each rank's share is then a slice of the order, with a start and a step.
"""
COUNTS = (12, 13, 2)  # with 3 processes, pieces of 13 / 3, rounded up, are 5, 5 and 3; of 2 examples, one rank has none
EPOCHS = (0, 1, 2, 5)
OWN = {"torch.manual_seed": "torch.Generator().manual_seed(epoch)", "random.seed": "random.Random(epoch)"}


def run(function, folder):
    before = global_generators()
    answer = {}
    for count in COUNTS:
        for epoch in EPOCHS:
            first = as_list(function(count, epoch))
            answer[count, epoch] = (first, as_list(function(count, epoch)))
    after = global_generators()
    answer["global generators used"] = [call for call in before if after[call] != before[call]]
    return answer


def global_generators():
    """Return the states of the global generators, by the call that seeds them."""
    return {"torch.manual_seed": torch.get_rng_state().tolist(), "random.seed": random.getstate()}


def as_list(share):
    if isinstance(share, list) and all(type(example) is int for example in share):
        return share
    raise TypeError(f"shard returned {share}, not a list of int: .tolist() makes one from a tensor")


def judge(answers):
    for count in COUNTS:
        for epoch in EPOCHS:
            shares = [answer[count, epoch][0] for answer in answers]
            problem = uneven(count, shares) or missing_or_twice(count, shares)
            if not problem and shares != [answer[count, epoch][1] for answer in answers]:
                problem = "the same call, made twice, returns different numbers"
            if problem:
                return f"{count} examples, epoch {epoch}: {problem}"
    problem = not_shuffled(answers)
    used = {call for answer in answers for call in answer["global generators used"]}
    for call, own in OWN.items():
        if not problem and call in used:
            problem = (
                f"the shares are correct, but from a global generator: after {call}(epoch), dropout and crops draw the "
                f"same numbers on all ranks. Use a new generator: {own}"
            )
    return problem


def not_shuffled(answers):
    count = COUNTS[0]
    orders = {epoch: [answer[count, epoch][0] for answer in answers] for epoch in EPOCHS}
    groups = {epoch: {frozenset(share) for share in orders[epoch]} for epoch in EPOCHS}
    for one, two in itertools.combinations(EPOCHS, 2):
        if orders[one] == orders[two]:
            return f"epochs {one} and {two} have the same order, but it must depend on the epoch"
        if len(answers) > 1 and groups[one] == groups[two]:
            return f"the ranks have the same examples in epochs {one} and {two}: shuffle first, then divide"
    for epoch in EPOCHS:
        first = orders[epoch][0]
        steps = {(b - a) % count for a, b in itertools.pairwise(first)}
        if len(steps) == 1:
            return f"epoch {epoch} is not shuffled: rank 0 has {first}"
    return ""


def uneven(count, shares):
    sizes = [len(share) for share in shares]
    if len(shares) > 1 and all(sorted(share) == list(range(count)) for share in shares):
        return "every rank has the whole dataset"
    if max(sizes) - min(sizes) > 1:
        return f"the ranks have {sizes} examples: no two numbers may differ by more than one"
    return ""


def missing_or_twice(count, shares):
    dealt = [example for share in shares for example in share]
    strange = sorted(set(dealt) - set(range(count)))
    missing = sorted(set(range(count)) - set(dealt))
    twice = sorted({example for example in dealt if dealt.count(example) > 1})
    if strange:
        return f"there is no example {strange[0]}: they are 0 to {count - 1}"
    if twice and missing:
        return f"{twice} on several ranks, {missing} on none: it looks like an order that differs between ranks"
    if twice:
        ranks = [rank for rank, share in enumerate(shares) for example in share if example == twice[0]]
        where = " and ".join(f"rank {rank}" for rank in ranks)
        return f"{len(twice)} examples are repeated, {twice[0]} on {where}: it looks like padding to equal shares"
    if missing:
        return f"{missing} on no rank: it looks like shares of count // world_size, which leave out the rest"
    return ""
