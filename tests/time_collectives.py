"""How much the checks of distributed.py's collectives cost: five runs in alternation with torch's own, two processes.

python tests/time_collectives.py [PROCESSES]
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import distributed as torch_dist

import distributed as dist


def milliseconds(function, calls):
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return 1000 * (time.perf_counter() - started) / calls


def worker(rank, n, runs=5, calls=300):
    dist.init_process_group()
    numbers, rows = torch.rand(10), [torch.empty(10) for _ in range(n)]
    functions = {
        "all_reduce of torch": lambda: torch_dist.all_reduce(numbers.clone()),
        "reduce": lambda: dist.reduce(numbers),
        "all_gather of torch": lambda: torch_dist.all_gather(rows, numbers),
        "gather": lambda: dist.gather(numbers),
    }
    times = {name: [] for name in functions}
    for _ in range(1 + runs):  # the first is a warm-up
        for name, function in functions.items():
            times[name].append(milliseconds(function, calls))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    for ours, theirs in ("reduce", "all_reduce of torch"), ("gather", "all_gather of torch"):
        ratio = medians[ours] / medians[theirs]
        dist.print_primary(f"{ours} {medians[ours]:.3f} ms, {theirs} {medians[theirs]:.3f} ms: {ratio:.2f} times")
    dist.cleanup()


if __name__ == "__main__":
    dist.launch(worker, nproc=int(sys.argv[1]) if sys.argv[1:] else 2)
