"""Check that each output is in its token's row; unequal counts, a rank or an expert without tokens."""

import torch

import distributed as dist
from exercises.checks import common

HINT = """
Two all-to-alls.  A rank knows how many of its own tokens each expert got: count them in `chosen`.  Only the other
ranks know how many rows it must send back to them, so all ranks exchange these numbers first.  The rows return in the
order in which the tokens were sent: row 0 belongs to token order[0].
"""
COUNTS = {"unequal counts": (7, 4, 5), "a rank without tokens": (6, 0, 5), "an expert without tokens": (4, 6, 5)}
SIGNS = {
    "Split sizes doesn't match total dim 0 size": "the counts don't fit, or are swapped. A rank receives a row for "
    "each of its tokens, and sends back as many rows as it got from each rank, which the ranks must first exchange",
    "killed by SIGABRT": "the ranks exchange lists of counts of different lengths: the count "
    "of an expert that got no token is 0 (use bincount's minlength)",
    "does not divide equally across group size": "the counts are left out, but the ranks have unequal numbers of rows",
}


def tokens_of(case, n, rank):
    """Return this rank's tokens, their experts and weights."""
    generator = torch.Generator().manual_seed(100 * rank + len(case))
    count = COUNTS[case][rank]
    tokens = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    experts = max(1, n - 1) if case == "an expert without tokens" else n
    chosen = torch.randint(experts, (count,), generator=generator)
    return tokens, chosen, 0.2 + torch.rand(count, generator=generator, dtype=torch.float64)


def expert(number, tokens):
    return (number + 2) * tokens + number


def outputs_of(case, n, rank):
    """Return what this rank's expert has computed, rank 0's tokens first."""
    parts = []
    for sender in range(n):
        tokens, chosen, _ = tokens_of(case, n, sender)
        parts.append(expert(rank, tokens[chosen == rank]))
    return torch.cat(parts)


def run(function, folder):
    n, rank = dist.get_world_size(), dist.get_rank()
    answer = {}
    for case in COUNTS:
        _, chosen, weights = tokens_of(case, n, rank)
        answer[case] = common.as_answer(function(outputs_of(case, n, rank), chosen, weights))
    return answer


def judge(answers):
    n = len(answers)

    def as_if(way):
        """Return all ranks' answers if each returns way(rows as they return, order, weights)."""
        found = [{} for _ in range(n)]
        for case in COUNTS:
            for rank, answer in enumerate(found):
                tokens, chosen, weights = tokens_of(case, n, rank)
                order = chosen.argsort(stable=True)
                rows = torch.cat([expert(number, tokens[chosen == number]) for number in range(n)])
                answer[case] = way(rows, order, weights[:, None])
        return found

    wrong = {
        "the weights are left out": as_if(lambda rows, order, weights: rows[order.argsort()]),
        "the rows are in the order in which they came back, by expert: undo the sort": as_if(
            lambda rows, order, weights: rows * weights
        ),
        "the rows are in the order in which they came back, by expert, and the weights are left out": as_if(
            lambda rows, order, weights: rows
        ),
        "the rows were sorted once more, by rows[order]: undo the sort by result[order] = rows": as_if(
            lambda rows, order, weights: rows[order] * weights
        ),
        "each row has another token's weight: the sort was undone after the multiplication": as_if(
            lambda rows, order, weights: (rows * weights)[order.argsort()]
        ),
        "each weight counts twice": as_if(lambda rows, order, weights: rows[order.argsort()] * weights.square()),
        "this rank's own rows, which nobody has sent back": [
            {case: outputs_of(case, n, rank) for case in COUNTS} for rank in range(n)
        ],
    }
    return common.compare(answers, as_if(lambda rows, order, weights: rows[order.argsort()] * weights), wrong)
