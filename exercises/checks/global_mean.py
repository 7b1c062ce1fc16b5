"""Check the mean, with unequal counts, a rank without numbers, and numbers far from 0."""

import torch

import distributed as dist
from exercises.checks import common

HINT = """
Sums and counts can be added up, but means can't.  Add up both in one all-reduce of two numbers, and divide at the end.
"""
COUNTS = {"equal counts": (4, 4, 4), "unequal counts": (5, 2, 3), "a rank without numbers": (3, 0, 4)}


def numbers_of(case, rank):
    generator = torch.Generator().manual_seed(10 * rank + len(case))
    return 3 + torch.randn(COUNTS[case][rank], generator=generator, dtype=torch.float64)


def run(function, folder):
    answer = {case: common.as_answer(function(numbers_of(case, dist.get_rank()))) for case in COUNTS}
    for case, mean in answer.items():
        if isinstance(mean, torch.Tensor) and mean.numel() == 1:
            answer[case] = mean.reshape(())  # shape [1] is correct, too
    return answer


def judge(answers):
    n = len(answers)
    shares = {case: [numbers_of(case, rank) for rank in range(n)] for case in COUNTS}

    def on_all(function):
        return [{case: function(parts) for case, parts in shares.items()}] * n

    right = on_all(lambda parts: torch.cat(parts).mean())
    own = [{case: parts[rank].mean() for case, parts in shares.items()} for rank in range(n)]
    zeros = on_all(lambda parts: sum(part.mean().nan_to_num() for part in parts) / n)
    with_any = on_all(lambda parts: torch.stack([part.mean() for part in parts if len(part)]).mean())
    mean_of_means = "a mean of means: ranks with few numbers count too much"
    wrong = {
        "each rank has the mean of its own numbers": own,
        mean_of_means: on_all(lambda parts: sum(part.mean() for part in parts) / n),
        f"{mean_of_means} (a rank without numbers counts as 0)": zeros,
        f"{mean_of_means} (a rank without numbers is left out)": with_any,
        "a sum where a mean was meant": on_all(lambda parts: torch.cat(parts).sum()),
        "the sum of all ranks, divided by this rank's count": [
            {case: torch.cat(parts).sum() / len(parts[rank]) for case, parts in shares.items()} for rank in range(n)
        ],
        "divided by this rank's count times the number of ranks, but the counts differ: add them up, too": [
            {case: torch.cat(parts).sum() / (len(parts[rank]) * n) for case, parts in shares.items()}
            for rank in range(n)
        ],
        "the sum of all ranks, divided by the number of ranks": on_all(lambda parts: torch.cat(parts).sum() / n),
        "rank 0 alone has the mean": [right[0], *[dict.fromkeys(COUNTS)] * (n - 1)],
    }
    return common.compare(answers, right, wrong)
