"""Each example once, shares of equal size, a new order in each epoch, the same one in each call."""

import torch

import distributed as dist

COUNTS = (12, 11, 2)  # the last: with 3 processes a rank has none
EPOCHS = (0, 1)


def run(function, folder):
    calls = {}
    for count in COUNTS:
        for epoch in EPOCHS:
            first = [int(example) for example in function(count, epoch)]
            torch.rand(1 + dist.get_rank())  # the ranks draw different random numbers meanwhile
            calls[count, epoch] = (first, [int(example) for example in function(count, epoch)])
    return calls


def judge(answers):
    for count in COUNTS:
        for epoch in EPOCHS:
            shares = [answer[count, epoch][0] for answer in answers]
            problem = uneven(count, shares) or missing_or_twice(count, shares)
            if not problem and shares != [answer[count, epoch][1] for answer in answers]:
                problem = "the same call, made twice, returns different numbers"
            if problem:
                return f"{count} examples, epoch {epoch}: {problem}"
    if all(answer[COUNTS[0], 0][0] == answer[COUNTS[0], 1][0] for answer in answers):
        return "epochs 0 and 1 have the same order: it must depend on the epoch"
    if len(answers) > 1 and groups(answers, 0) == groups(answers, 1):
        return "the ranks have the same examples in epochs 0 and 1: shuffle the data set first, then share it out"
    return ""


def groups(answers, epoch):
    return {frozenset(answer[COUNTS[0], epoch][0]) for answer in answers}


def uneven(count, shares):
    sizes = [len(share) for share in shares]
    if len(shares) > 1 and all(sorted(share) == list(range(count)) for share in shares):
        return "every rank has the whole data set"
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
        return f"{len(twice)} counted twice, example {twice[0]} on {where}: it looks like padding to equal shares"
    if missing:
        return f"{missing} on no rank: it looks like shares of count // world_size, which leave out the rest"
    return ""
