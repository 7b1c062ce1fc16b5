"""Compares with the softmax over all keys at once; unequal parts, and scores of which exp overflows."""

import functools

import torch

import distributed as dist
from exercises.checks import common
from variants.mnist_context_parallel import pass_on

HINT = """
Three tensors stay, for each query: the largest score so far (-inf at first), the sum of exp(score - largest), and the
sum of exp(score - largest) * value (0 at first).  In each turn: what is the largest score now?  By which factor must
both sums be multiplied, so that they look as if they had been computed with it?  Divide once, after the last turn.
"""
COUNTS = (4, 2, 3)  # tokens of each rank
CASES = ("scores near 1", "scores near 1000", "scores near -1000")


def tokens_of(case, rank):
    """This rank's queries, and its keys and values in one tensor."""
    generator = torch.Generator().manual_seed(rank)
    q, keys, values = torch.randn(3, COUNTS[rank], 4, generator=generator, dtype=torch.float64)
    if case == "scores near -1000":
        q, keys = -q.abs(), keys.abs()
    return (q if case == "scores near 1" else 1000 * q), torch.stack([keys, values])


def parts_of(case):
    """All ranks' keys and values from the ring; the memory of each is used again."""
    n, (_, part) = dist.get_world_size(), tokens_of(case, dist.get_rank())
    for turn in range(n):
        yield part.unbind()
        arrived = pass_on(part, COUNTS[:n], turn)
        part.zero_()
        part = arrived


def run(function, folder):
    answer = {}
    for case in CASES:
        result = function(tokens_of(case, dist.get_rank())[0], parts_of(case))
        output, logsumexp = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        answer |= {f"output, {case}": common.as_answer(output), f"logsumexp, {case}": common.as_answer(logsumexp)}
    return answer


def as_if(n, way):
    """All ranks' answers if each returns way(its queries, the keys and values in the order in which they arrive)."""
    answers = [{} for _ in range(n)]
    for case in CASES:
        for rank, answer in enumerate(answers):
            parts = [tokens_of(case, (rank - turn) % n)[1].unbind() for turn in range(n)]
            answer[f"output, {case}"], answer[f"logsumexp, {case}"] = way(tokens_of(case, rank)[0], parts)
    return answers


def at_once(q, parts, scale=4**-0.5):
    keys, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    scores = q @ keys.mT * scale
    return scores.softmax(1) @ values, scores.logsumexp(1, keepdim=True)


def average_of_parts(q, parts):
    outputs, logs = zip(*(at_once(q, [part]) for part in parts), strict=True)
    return torch.stack(outputs).mean(0), torch.stack([log.exp() for log in logs]).sum(0).log()


def by_turns(q, parts, powers=(1, 1), new=torch.maximum, own=False, divide="at the end", back=1, start=-torch.inf):
    """An online softmax, or a wrong one.

    powers: of the correction, for denominator and output.  new: the new maximum.  own: subtract the part's own maximum.
    divide: when the output is divided.  back: times the maximum is added again, for logsumexp.  start: first maximum.
    """
    maximum = q.new_full((len(q), 1), start)
    denominator, output = torch.zeros_like(maximum), torch.zeros_like(q)
    for keys, values in parts:
        scores = q @ keys.mT * 4**-0.5
        largest = scores.amax(1, keepdim=True)
        before, maximum = maximum, new(maximum, largest)
        weights, correction = (scores - (largest if own else maximum)).exp(), (before - maximum).exp()
        denominator = correction ** powers[0] * denominator + weights.sum(1, keepdim=True)
        output = correction ** powers[1] * output + weights @ values
        output = output / denominator if divide == "in each turn" else output
    return output / (denominator if divide == "at the end" else 1), back * maximum + denominator.log()


def judge(answers):
    n = len(answers)

    def like(**mistake):
        return functools.partial(by_turns, **mistake)

    ways = {
        "both sums are never corrected (or the old maximum was overwritten before it was used)": like(powers=(0, 0)),
        "the denominator is corrected, the output is not": like(powers=(1, 0)),
        "the output is corrected, the denominator is not": like(powers=(0, 1)),
        "the correction is upside down: it is exp(old - new), which is 0 in the first turn": like(powers=(-1, -1)),
        "the weights are computed with the largest score of their own part, not of all so far": like(own=True),
        "the largest score of the last part replaces a larger one before: take the maximum of both": like(
            new=lambda old, largest: largest
        ),
        "the largest score is that of the first part only: a later part may have a larger one": like(
            new=lambda old, largest: largest if old.isinf().all() else old
        ),
        "each part subtracts its own maximum, and the sums are never corrected": like(
            own=True, powers=(0, 0), new=lambda old, largest: largest
        ),
        "the softmax of each part alone, averaged: a part with larger scores must count more": average_of_parts,
        "the largest score starts at 0, not at -inf: if all scores are far below 0, each exp is 0": like(start=0),
        "no maximum is subtracted, so exp overflows": like(new=lambda old, largest: torch.zeros_like(largest)),
        "one maximum for all queries: for a query with smaller scores, each exp is 0": like(
            new=lambda old, largest: torch.maximum(old, largest.max())
        ),
        "the output is divided in each turn: divide once, after the last one": like(divide="in each turn"),
        "the output is not divided by the sum of the weights": like(divide="never"),
        "the output is right, but logsumexp lacks the maximum: maximum + denominator.log()": like(back=0),
        "the scores are not multiplied by q.shape[-1] ** -0.5": functools.partial(at_once, scale=1),
        "only this rank's own keys": lambda q, parts: at_once(q, parts[:1]),
        "parts were kept, but their memory has been overwritten: keep sums": lambda q, parts: at_once(
            q, [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in parts]
        ),
    }
    return common.compare(answers, as_if(n, at_once), {text: as_if(n, way) for text, way in ways.items()})
