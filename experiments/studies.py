"""Measures what docs/ shows, point by point, and writes it to experiments/results/.

    python -m experiments.studies batch_size    # accuracy by batch size and learning rate: half an hour
    python -m experiments.studies scaling       # images per second on 1, 2, ... cores: 4 minutes on a quiet machine
    python -m experiments.studies limit         # where mnist_ddp.py's time goes: 3 minutes on a quiet machine
    python -m experiments.studies memory        # what it is worth to keep memory: 4 minutes on a quiet machine
    python -m experiments.studies accuracy      # seconds to 99 % on MNIST: 7 minutes on a quiet machine
    python -m experiments.studies slow_link     # steps over a slowed network, as root: 4 minutes on a quiet machine
    python -m experiments.studies variants      # losses and accuracies of mnist_ddp.py's variants: 5 minutes
    python -m experiments.studies fsdp_bytes    # what each process of FSDP holds: a minute
    python -m experiments.studies variant_costs # what each variant sends and keeps, as root: 3 minutes
    python -m experiments.studies slow_variants # DDP and local SGD over a slowed network, as root: 5 minutes
    python -m experiments.studies draw          # only the tables and pictures, from what was measured

Each point is a line of experiments/results/STUDY.csv; STUDY.md and .png are made from these lines.  A point that is
there is not measured again, so a study that was stopped goes on where it was.  --again measures it again; --only WORD
takes only the points that have WORD in one of their values.  A point that can't be measured here is left as it is.
"""

import argparse
import os
import statistics
import sys

from experiments import batch_size, compare_variants, measured, slow_link, slow_variants, timed_runs
from experiments.measured import RESULTS, Study, spread, write_table


def images_per_second(program: list) -> dict:
    """On synthetic digits, with one thread per process: the median over the epochs without the first."""
    flags = ["--dataset", "synthetic", "--epochs", 3]
    printed = measured.run(["python", *program, *flags], OMP_NUM_THREADS="1")
    return {"images_per_second": round(statistics.median(e.images_per_s for e in measured.epochs(printed)[1:]))}


# ------------------------------------------------------------------------------------------------------------- scaling


def scaling_points(args: argparse.Namespace) -> list[dict]:
    """In alternation, so that a machine whose speed drifts is fair to all; one thread per process, so N cores."""
    cores = len(os.sched_getaffinity(0))
    points = []
    for repeat in range(args.repeats):
        for n in sorted({2**n for n in range(cores.bit_length())} | {cores}):
            points.append({"kept": "global batch", "processes": n, "batch": 200, "repeat": repeat})
            if n > 1:
                points.append({"kept": "batch per process", "processes": n, "batch": 200 * n, "repeat": repeat})
    return points


def measure_scaling(point: dict, args: argparse.Namespace) -> dict:
    flags = ["--nproc", point["processes"], "--batch-size", point["batch"]]
    return images_per_second(["mnist_ddp.py", *flags])


def draw_scaling(points: list[dict[str, str]]) -> None:
    speeds: dict[tuple[str, int], list[float]] = {}
    for row in points:
        speeds.setdefault((row["kept"], int(row["processes"])), []).append(float(row["images_per_second"]))
    alone = statistics.median(speeds["global batch", 1])
    rows = [["kept", "processes (cores)", "global batch", "images/s", "speed-up", "of perfect"]]
    for (kept, n), values in sorted(speeds.items(), key=lambda item: (item[0][0] != "global batch", item[0][1])):
        speed_up = statistics.median(values) / alone
        batch = 200 if kept == "global batch" else 200 * n
        shares = [f"{speed_up:.2f}", f"{100 * speed_up / n:.0f} %"]
        rows.append([kept, str(n), str(batch), spread(values, "{:.0f}"), *shares])
    write_table("scaling", rows, points, f"Median and range; runs: {len(values)}. ")


# --------------------------------------------------------------------------------------------------------------- limit

PARTS = {
    "the model alone": (),
    "with the loader": ("--loader",),
    "with DDP": ("--ddp",),
    "with both, as mnist_ddp.py": ("--loader", "--ddp"),
}


def limit_points(args: argparse.Namespace) -> list[dict]:
    """What mnist_ddp.py computes, and what each of its other parts costs; on all cores."""
    cores = len(os.sched_getaffinity(0))
    return [{"processes": cores, "parts": part, "repeat": r} for r in range(args.repeats) for part in PARTS]


def measure_limit(point: dict, args: argparse.Namespace) -> dict:
    program = ["-m", "experiments.baselines.limit", "--nproc", point["processes"], *PARTS[point["parts"]]]
    return images_per_second(program)


def draw_limit(points: list[dict[str, str]]) -> None:
    rows = [["what runs", "images/s", "of the model alone"]]
    measured_parts = dict.fromkeys(row["parts"] for row in points)
    speeds = {p: [float(row["images_per_second"]) for row in points if row["parts"] == p] for p in measured_parts}
    alone = statistics.median(speeds["the model alone"])
    for part, values in speeds.items():
        rows.append([part, spread(values, "{:.0f}"), f"{statistics.median(values) / alone:.0%}"])
    how = f"{points[0]['processes']} processes, one thread each. Median and range; runs: {len(values)}. "
    write_table("limit", rows, points, how)


# ------------------------------------------------------------------------------------------------------- command line

STUDIES = {
    "batch_size": batch_size.STUDY,
    "scaling": Study(scaling_points, measure_scaling, draw_scaling),
    "limit": Study(limit_points, measure_limit, draw_limit),
    "memory": timed_runs.MEMORY,
    "accuracy": timed_runs.ACCURACY,
    "slow_link": slow_link.STUDY,
    "variants": compare_variants.VARIANTS,
    "fsdp_bytes": compare_variants.BYTES,
    "variant_costs": slow_variants.COSTS,
    "slow_variants": slow_variants.SLOW,
}


def measure(name: str, args: argparse.Namespace) -> int:
    """Measure what is missing; 1 if a point can't be measured here."""
    code, path = 0, RESULTS / f"{name}.csv"
    points = [point for point in STUDIES[name].points(args) if any(args.only in str(v) for v in point.values())]
    for point in measured.missing(path, points, args.again):
        try:
            measured.add(path, point, STUDIES[name].measure(point, args))
        except RuntimeError as problem:
            print(f"left as it is: {problem}", file=sys.stderr)
            code = 1
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[*STUDIES, "draw"])
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    parser.add_argument("--only", default="", metavar="WORD", help="only these points")
    parser.add_argument("--repeats", type=int, default=3, help="of each point; for batch_size: seeds")
    parser.add_argument("--data-dir", default="data", help="MNIST is kept here (default: %(default)s)")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    code = 0
    try:
        code = measure(args.study, args) if args.study in STUDIES else 0
    except KeyboardInterrupt:
        print("stopped: what was measured stays, and is drawn", file=sys.stderr)
        code = 130
    for name, study in STUDIES.items():
        points = measured.read(RESULTS / f"{name}.csv")
        if points:
            study.draw(points)
    return code


if __name__ == "__main__":
    sys.exit(main())
