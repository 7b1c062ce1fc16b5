"""Accuracy on MNIST by global batch, learning rate and number of processes: the tables of docs/scaling.md.

    python -m experiments.batch_size                  # prints two tables: an hour on two busy cores
    python -m experiments.batch_size --seeds 1        # a third of that
    python -m experiments.batch_size --save           # writes them to experiments/results/, too

Each point is a run of mnist_amp.py, which is faster than mnist_ddp.py on CPUs with bfloat16 instructions.
"""

import argparse
import math
import os
import sys
import time
from typing import NamedTuple

import data
from experiments import measured

EPOCHS, IMAGES = 3, 60_000
BASE_BATCH, BASE_LR = 50, 0.025
BATCHES = (50, 200, 800, 3200)
RULES = {  # peak learning rate for k times the base batch
    "left alone": lambda k: BASE_LR,
    "square root": lambda k: BASE_LR * k**0.5,
    "linear": lambda k: BASE_LR * k,
    "linear, no warm-up": lambda k: BASE_LR * k,
}
PROCESSES, BATCH, LR = (1, 2, 4, 8), 200, 0.1  # the script's defaults, for the runs with several processes

# The scripts' schedule rises from 1/25 of the peak learning rate during 30 % of the steps.  This one starts at the
# peak and stays there as long; the rest is the same.
NO_WARM_UP = """
import functools, runpy, sys, torch
schedules = torch.optim.lr_scheduler
schedules.OneCycleLR = functools.partial(schedules.OneCycleLR, div_factor=1, final_div_factor=25e4)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Point(NamedTuple):
    """What a run of the script is given."""

    processes: int
    batch: int  # global
    lr: float
    warm_up: bool = True


def point_of(rule: str, batch: int) -> Point:
    return Point(1, batch, round(RULES[rule](batch / BASE_BATCH), 6), warm_up=rule != "linear, no warm-up")


def all_points() -> list[Point]:
    """Each once: at the base batch three rules have the same learning rate."""
    points = [point_of(rule, batch) for batch in reversed(BATCHES) for rule in RULES]
    points += [Point(n, batch, LR) for n in PROCESSES for batch in (BATCH, BATCH * n)]
    return list(dict.fromkeys(points))


def measure(point: Point, seed: int, args: argparse.Namespace) -> float:
    """The test accuracy at the end, per cent."""
    command = ["mnist_amp.py"] if point.warm_up else ["-c", NO_WARM_UP, "mnist_amp.py"]
    command += ["--batch-size", point.batch, "--lr", point.lr, "--seed", seed, "--nproc", point.processes]
    command += ["--dataset", "synthetic", "--dry-run"] if args.dry_run else ["--epochs", EPOCHS]
    return measured.accuracies([*command, "--data-dir", os.path.abspath(args.data_dir)])[-1]


def rule_rows(found: dict[Point, list[float]]) -> list[list[str]]:
    rows = [["global batch", "steps", *RULES]]
    for batch in BATCHES:
        cells = [measured.spread(found[point_of(rule, batch)], "{:.2f}") for rule in RULES]
        rows.append([str(batch), str(EPOCHS * math.ceil(IMAGES / batch)), *cells])
    return rows


def process_rows(found: dict[Point, list[float]]) -> list[list[str]]:
    rows = [["processes", f"global batch kept: {BATCH}", f"batch per process kept: {BATCH}", "its global batch"]]
    for n in PROCESSES:
        both = [measured.spread(found[Point(n, batch, LR)], "{:.2f}") for batch in (BATCH, BATCH * n)]
        rows.append([str(n), *both, str(BATCH * n)])
    return rows


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each point (default: %(default)s)")
    parser.add_argument("--data-dir", default="data", help="MNIST is kept here (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write the tables to experiments/results/")
    parser.add_argument("--dry-run", action="store_true", help="two batches of each point: only to see that it runs")
    args = parser.parse_args()
    if args.seeds < 1 or (args.save and args.dry_run):
        parser.error("--seeds must be at least 1; --save goes without --dry-run")
    if not args.dry_run:
        data.prepare("mnist", args.data_dir, error=parser.error)
    return args


def main() -> None:
    args = parse_args()
    points, started = all_points(), time.monotonic()
    found: dict[Point, list[float]] = {point: [] for point in points}
    runs = [(seed, point) for seed in range(args.seeds) for point in points]
    for number, (seed, point) in enumerate(runs):
        print(f"run {number + 1} of {len(runs)}, {time.monotonic() - started:.0f} s: {point}", flush=True)
        found[point].append(measure(point, seed, args))
    how = f"Accuracy after {EPOCHS} epochs of MNIST, %: median, least and greatest. Seeds: {args.seeds}."
    line = measured.conditions("python -m experiments.batch_size --save", how)
    measured.report("batch_size", line, rule_rows(found), args.save)
    measured.report("batch_size_processes", line, process_rows(found), args.save)


if __name__ == "__main__":
    sys.exit(main())
