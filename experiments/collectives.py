"""What the checks of distributed.py's collectives cost: in alternation with torch's own calls, 300 of each per turn.

python -m experiments.collectives            # two processes; --nproc 3: three
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import distributed as torch_dist

import distributed as dist

CALLS, TURNS = 300, 5
PAIRS = {"all_reduce": "torch's all_reduce", "reduce": "torch's all_reduce", "gather": "torch's all_gather"}


def milliseconds(function: Callable) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        function()
    return 1000 * (time.perf_counter() - started) / CALLS


def worker(local_rank: int, world_size: int) -> None:
    dist.init_process_group()
    numbers, rows = torch.zeros(10), [torch.empty(10) for _ in range(world_size)]
    functions = {
        "torch's all_reduce": lambda: torch_dist.all_reduce(numbers),
        "all_reduce": lambda: dist.all_reduce(numbers),
        "reduce": lambda: dist.reduce(numbers),
        "torch's all_gather": lambda: torch_dist.all_gather(rows, numbers),
        "gather": lambda: dist.gather(numbers),
    }
    turns = [{name: milliseconds(function) for name, function in functions.items()} for _ in range(1 + TURNS)]
    for ours, theirs in PAIRS.items():
        ratios = [turn[ours] / turn[theirs] for turn in turns[1:]]  # the first turn is a warm-up
        times = [statistics.median(turn[name] for turn in turns[1:]) for name in (ours, theirs)]
        dist.print_primary(
            f"{ours} {times[0]:.3f} ms, {theirs} {times[1]:.3f} ms: "
            f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    dist.cleanup()


if __name__ == "__main__":
    args = dist.parse_args(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    dist.launch(worker, nproc=args.nproc)
