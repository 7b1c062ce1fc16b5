"""The time of the check of the calls: dist.all_reduce and dist.reduce beside torch's own all_reduce.

    python -m dev.check_cost                      # two ranks on the CPU, over Gloo
    python -m dev.check_cost --save               # into dev/results/check.md, for docs/api.md

The two calls take turns within one run, so a busy machine slows both.  A figure is the median of 300 pairs.  The check
is a message from all ranks to all before the call; torch's barrier is shown for comparison.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import distributed as dist
from dev.measured import report

SIZES = {"1 number": 1, "1,000 numbers": 1000, "10 MB": 2_500_000}  # float32
PAIRS = 300


def after_barrier(tensor: torch.Tensor) -> None:
    torch.distributed.barrier()
    torch.distributed.all_reduce(tensor)


FUNCTIONS = {  # by the heading of their column
    "after torch's `barrier`": after_barrier,
    "`dist.all_reduce`": dist.all_reduce,
    "`dist.reduce`": dist.reduce,
}


def median_times(function: Callable, size: int) -> tuple[float, float]:
    """The median time of torch's call and of ours, in ms, on this rank."""
    tensor, ours, theirs = torch.zeros(size), [], []
    for _ in range(PAIRS):
        begin = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        middle = time.perf_counter()
        function(tensor)
        theirs.append(middle - begin)
        ours.append(time.perf_counter() - middle)
    return 1000 * statistics.median(theirs), 1000 * statistics.median(ours)


def measure(local_rank: int, world_size: int) -> list[list[str]]:
    dist.init_process_group()
    rows = [["float32", "torch's `all_reduce`"]]
    for text in FUNCTIONS:
        rows[0] += [text, "ratio"]
    for text, size in SIZES.items():
        row = [text]
        for function in FUNCTIONS.values():
            theirs, ours = median_times(function, size)
            row += [f"{theirs:.2f} ms"] * (len(row) == 1) + [f"{ours:.2f} ms", f"{ours / theirs:.2f}"]
        rows.append(row)
    dist.cleanup()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    runs = f"Two ranks, Gloo, each with half of the cores; medians of {PAIRS} pairs, rank 0's."
    report("check", "python -m dev.check_cost", runs, dist.launch(measure, nproc=2), args.save)
