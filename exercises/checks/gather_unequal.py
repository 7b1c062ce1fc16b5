"""Check all rows and their order, with unequal numbers, a rank without rows, and a dtype other than float."""

from unittest import mock

import torch
from torch import distributed as torch_dist

import distributed as dist
from exercises.checks import common

HINT = """
Two all-gathers.  In the first, each rank sends its number of rows.  In the second, all ranks send the largest number
of rows, with zeros after their own, and each received part is cut to its rank's number of rows.
"""
SIGNS = {
    "killed by SIGABRT|gloo/transport": "all_gather is called with each rank's own number of rows, but needs the same "
    "shape on all ranks",
}
COUNTS = {"unequal rows": (2, 4, 3), "a rank without rows": (3, 0, 2), "int64": (1, 2, 3)}


def rows_of(case, rank):
    generator = torch.Generator().manual_seed(rank + len(case))
    rows = 1 + torch.rand(COUNTS[case][rank], 3, generator=generator, dtype=torch.float64)
    rows[-1:] = 0  # zeros can be data
    return (rows * 2**60).long() if case == "int64" else rows


def forbidden(*args, **kwargs):
    raise RuntimeError("write it without dist.gather and without all_gather_object")


def run(function, folder):
    with mock.patch.object(dist, "gather", forbidden), mock.patch.object(torch_dist, "all_gather_object", forbidden):
        return {case: common.as_answer(function(rows_of(case, dist.get_rank()))) for case in COUNTS}


def judge(answers):
    n = len(answers)
    shares = {case: [rows_of(case, rank) for rank in range(n)] for case in COUNTS}
    right = [{case: torch.cat(parts) for case, parts in shares.items()}] * n
    for rank, answer in enumerate(answers):
        if isinstance(answer["int64"], torch.Tensor) and answer["int64"].is_floating_point():
            return f"int64 rows became {answer['int64'].dtype} (rank {rank})"

    def padded(part, length):
        return torch.cat([part, part.new_zeros(max(0, length - len(part)), 3)])[:length]

    def each(length_of):
        return [
            {
                case: torch.cat([padded(part, length_of(parts, rank)) for part in parts])
                for case, parts in shares.items()
            }
            for rank in range(n)
        ]

    wrong = {
        "the padding is still there": each(lambda parts, rank: max(map(len, parts))),
        "each part is cut to this rank's own number of rows": each(lambda parts, rank: len(parts[rank])),
        "each part has as many rows as rank 0's": each(lambda parts, rank: len(parts[0])),
        "rows that are zero are left out, but they can be data: cut by the number of rows": [
            {case: torch.cat([part[part.any(1)] for part in parts]) for case, parts in shares.items()}
        ]
        * n,
        "each rank has its own rows only": [{case: parts[r] for case, parts in shares.items()} for r in range(n)],
        "this rank's own rows come first": [
            {case: torch.cat([parts[r], *parts[:r], *parts[r + 1 :]]) for case, parts in shares.items()}
            for r in range(n)
        ],
        "rank 0 alone has the rows": [right[0], *[dict.fromkeys(COUNTS)] * (n - 1)],
        "a list of parts: torch.cat makes one tensor of it": [dict.fromkeys(COUNTS, "a list")] * n,
    }
    return common.compare(answers, right, wrong)
