"""Is it the same as one process?  Trains a small network in right and wrong ways, and prints the distances.

    python -m experiments.equivalence                            # all ways with two processes, in a minute
    python -m experiments.equivalence ddp fsdp                   # only these
    python -m experiments.equivalence --all                      # with 1, 2, 3 and 4 processes
    torchrun --nproc_per_node=2 -m experiments.equivalence       # with the launcher's processes: checks a cluster
    python -m experiments.equivalence --save                     # as --all; writes experiments/results/equivalence.md

All processes together train on the global batches of a plain loop in one process: equivalence_ways.py.  The distance is
max |dw|: the largest difference of any weight after the last step, on any rank (of an evaluation: of the accuracy).
A line is printed as each way ends.  A right way differs by rounding only: if one is further away than its limit, the
exit code is 1.
"""

import argparse
import os
import signal
import sys
import warnings
from typing import NamedTuple

import torch
from torch import nn

import distributed as dist
from experiments import measured
from experiments.equivalence_ways import BATCH, WAYS, Run, Way

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LIMITS = {"fp32": 1e-6, "fp64": 1e-12}  # after 100 steps; a weight of size 1 is rounded to 6e-8 and 1e-16
ALL = [1, 2, 3, 4]  # numbers of processes
SHAREABLE = [1, 2, 3, 4, 6, 8]  # shares of a batch that can be halved, and no empty share of an epoch's last batch


class Result(NamedTuple):
    """What was measured of a way with one number of processes."""

    distances: dict[str, float]  # of each precision; empty if the way can't run here
    note: str  # what it has counted, or why it can't run


# ----------------------------------------------------------------------------------------------------------- measuring


def values(state: nn.Module | torch.Tensor) -> torch.Tensor:
    """All weights (or the accuracy) in one dimension, float64 on the CPU.  With FSDP a collective."""
    tensors = [state] if isinstance(state, torch.Tensor) else state.parameters()
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in whole]).to("cpu", torch.float64)


def measure(way: Way, steps: int) -> Result:
    """The distances of one way; a collective, the same on every rank."""
    distances, note = {}, ""
    for name, dtype in DTYPES.items():
        run = Run(dtype, steps)
        expected = values(way.against(run))
        try:
            found = values(way.function(run))
        except NotImplementedError as problem:
            return Result({}, str(problem))
        distances[name] = dist.all_reduce((found - expected).abs().max(), "max").item()
        note = run.note
    return Result(distances, note)


def limit_of(way: Way, dtype: str, steps: int) -> float:
    """Rounding errors of later steps add up."""
    return way.limit * LIMITS[dtype] * max(1, steps / 100)


def is_wrong(way: Way, result: Result, steps: int) -> bool:
    """Whether a way that must be equal isn't."""
    near = [distance <= limit_of(way, dtype, steps) for dtype, distance in result.distances.items()]  # NaN is not near
    return way.must_be_equal and not all(near)


def sentence_of(way: Way, result: Result) -> str:
    """What happens, and what was counted."""
    return f"{way.sentence} {result.note[:1].upper()}{result.note[1:]}." if result.note else way.sentence


def worker(local_rank: int, world_size: int, names: list[str], steps: int) -> dict[str, Result]:
    """Runs in each process: measures the ways, and prints a line as each ends."""
    warnings.simplefilter("ignore")  # torch's own, and that of dist.data_sampler in no_set_epoch
    dist.init_process_group()
    torch.set_num_threads(1)  # the same sums, however many cores there are
    results = {}
    for way in (way for way in WAYS if way.name in names):
        results[way.name] = result = measure(way, steps)
        sizes = "  ".join(f"{dtype} {short(distance):5}" for dtype, distance in result.distances.items())
        said = "equal" if way.must_be_equal and result.distances else sentence_of(way, result)
        said = "NOT EQUAL, and it must be" if is_wrong(way, result, steps) else said
        dist.print_primary(f"{way.name:24}{sizes}  {said}")
    return results


# -------------------------------------------------------------------------------------------------------------- tables


def short(number: float) -> str:
    """With one digit: more would differ from machine to machine."""
    return f"{number:.0e}".replace("e-0", "e-") if 0 < number < 1e-3 else f"{number:.1g}"


def table(results: dict[int, dict[str, Result]]) -> list[list[str]]:
    """fp32 for each number of processes, fp64 for the largest; results[processes][way]."""
    most = max(results)
    columns = [("fp32", processes) for processes in results] + [("fp64", most)]
    rows = [["way", "must be equal", *(f"{dtype}, {processes}" for dtype, processes in columns), "what happens"]]
    for way in (way for way in WAYS if way.name in results[most]):
        found = [results[processes][way.name].distances.get(dtype) for dtype, processes in columns]
        cells = [measured.NONE if distance is None else short(distance) for distance in found]
        must = "yes" if way.must_be_equal else "no"
        rows.append([f"`{way.name}`", must, *cells, sentence_of(way, results[most][way.name])])
    return rows


# --------------------------------------------------------------------------------------------------------- the program


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [way.name for way in WAYS]
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"(default: all) {' '.join(names)}")
    parser.add_argument("--all", action="store_true", help="with 1, 2, 3 and 4 processes")
    parser.add_argument("--steps", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="all of it, and write the page's table")
    parser.add_argument("--nproc", type=int, help="processes (default: one per GPU; without a GPU, 2)")
    args = parser.parse_args()
    unknown = [name for name in args.ways if name not in names]
    if unknown:
        parser.error(f"there is no way {unknown[0]!r}: choose from {', '.join(names)}")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    if args.save and args.ways:
        parser.error("--save takes all ways: leave out their names")
    is_launched = "WORLD_SIZE" in os.environ
    args.processes = ALL if args.all or args.save else [dist.count_processes(args.nproc)]
    args.processes = [dist.get_world_size()] if is_launched else args.processes
    for processes in args.processes:
        if processes not in SHAREABLE:
            parser.error(f"{processes} processes can't share a batch of {BATCH}: start one of {SHAREABLE}")
    args.ways = args.ways or names
    return args


def main() -> int:
    """0; 1 if a way that must be equal isn't."""
    args = parse_args()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # imports what every process would import by itself
    dist.print_primary(f"{args.steps} steps, global batch {BATCH}: the largest difference of any weight")
    results = {}
    for processes in args.processes:
        found = dist.launch(worker, args.ways, args.steps, nproc=processes)
        if found is None:  # under a launcher rank 0 goes on alone
            return 0
        results[processes] = found
    if args.save:
        line = measured.conditions("python -m experiments.equivalence --save", f"{args.steps} steps.")
        measured.report("equivalence", line, table(results), save=True)
    found = [(way, result[way.name]) for result in results.values() for way in WAYS if way.name in result]
    wrong = [way.name for way, result in found if is_wrong(way, result, args.steps)]
    print(f"not equal: {', '.join(wrong)}" if wrong else "all ways that must be equal are equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
