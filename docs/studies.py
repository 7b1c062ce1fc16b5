"""Measures what docs/batch_size.md and docs/scaling.md show, and writes it to results/.

    python docs/studies.py batch-size    # accuracy by batch size and learning rate: half an hour
    python docs/studies.py scaling       # images per second on 1, 2, ... cores: 4 minutes on a quiet machine
    python docs/studies.py limit         # where mnist_ddp.py's time goes: 4 minutes on a quiet machine
    python docs/studies.py slow-link     # steps over a slowed network, as root: 4 minutes on a quiet machine
    python docs/studies.py draw          # only the tables and pictures, from what was measured

Each measured point is a line of results/NAME.csv.  A point that is there is not measured again, so a study that was
stopped goes on where it was; --again starts it anew.  results/NAME.md and .png are made from these lines.
"""

import argparse
import os
import re
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import batch_size  # noqa: E402
import slow_link  # noqa: E402
from points import (  # noqa: E402
    RESULTS,
    add,
    missing,
    new_picture,
    read,
    run,
    save_picture,
    set_ticks,
    spread,
    write_table,
)

import scaling  # noqa: E402
from benchmark import KEEP_MEMORY  # noqa: E402

# ------------------------------------------------------------------------------------------------------------- scaling


def scaling_points(repeats: int) -> list[dict]:
    """In alternation, so that a machine whose speed drifts is fair to all; one thread per process, so N cores."""
    cores = len(os.sched_getaffinity(0))
    counts = sorted({2**n for n in range(cores.bit_length())} | {cores})
    points = []
    for repeat in range(repeats):
        for n in counts:
            points.append({"kept": "global batch", "processes": n, "batch": 200, "repeat": repeat})
            if n > 1:
                points.append({"kept": "batch per process", "processes": n, "batch": 200 * n, "repeat": repeat})
    return points


def measure_scaling(args: argparse.Namespace) -> None:
    """The second epoch of mnist_ddp.py on synthetic digits."""
    for point in missing("scaling", scaling_points(args.repeats)):
        flags = ["--dataset", "synthetic", "--epochs", 2, "--nproc", point["processes"], "--batch-size", point["batch"]]
        printed = run(["mnist_ddp.py", *flags], OMP_NUM_THREADS="1", **KEEP_MEMORY)
        add("scaling", point | {"images_per_second": re.findall(r"(\d+) images/s", printed)[-1]})


def draw_scaling(points: list[dict]) -> None:
    speeds: dict[tuple[str, int], list[float]] = {}
    for row in points:
        speeds.setdefault((row["kept"], int(row["processes"])), []).append(float(row["images_per_second"]))
    alone = statistics.median(speeds["global batch", 1])
    rows = [["kept", "processes (cores)", "global batch", "images/s", "speed-up", "of perfect"]]
    for (kept, n), values in sorted(speeds.items(), key=lambda item: (item[0][0] != "global batch", item[0][1])):
        speed = statistics.median(values)
        batch = 200 if kept == "global batch" else 200 * n
        shares = [f"{speed / alone:.2f}", f"{100 * speed / alone / n:.0f} %"]
        rows.append([kept, str(n), str(batch), spread(values, "{:.0f}"), *shares])
    write_table("scaling", rows, points, f"Median and range; runs: {len(values)}. ")


# --------------------------------------------------------------------------------------------------------------- limit

PARTS = {"the model alone": (), "with the loader": ("--loader",), "with DDP": ("--ddp",)}
PARTS["with both, as mnist_ddp.py"] = ("--loader", "--ddp")


def measure_limit(args: argparse.Namespace) -> None:
    """The compute-only limit, and what each part of mnist_ddp.py costs: again the second epoch on synthetic digits."""
    most = len(os.sched_getaffinity(0))
    names = ("processes", "parts", "memory", "repeat")
    kept = ("kept", "returned")
    found = [(n, part, memory, k) for k in range(args.repeats) for n in (1, most) for part in PARTS for memory in kept]
    for point in missing("limit", [dict(zip(names, values, strict=True)) for values in found]):
        flags = ["--dataset", "synthetic", "--epochs", 2, "--nproc", point["processes"], *PARTS[point["parts"]]]
        memory = KEEP_MEMORY if point["memory"] == "kept" else {}
        printed = run(["baselines/limit.py", *flags], OMP_NUM_THREADS="1", **memory)
        add("limit", point | {"images_per_second": re.findall(r"(\d+) images/s", printed)[-1]})


def draw_limit(points: list[dict]) -> None:
    speeds: dict[tuple[str, str, str], list[float]] = {}
    for row in points:
        cell = (row["processes"], row["parts"], row["memory"])
        speeds.setdefault(cell, []).append(float(row["images_per_second"]))
    rows = [["processes", "what runs", "images/s, memory kept", "images/s, memory returned"]]
    for n, part in dict.fromkeys((n, part) for n, part, _ in speeds):
        rows.append([n, part, *(spread(speeds.get((n, part, kept), []), "{:.0f}") for kept in ("kept", "returned"))])
    repeats = max(map(len, speeds.values()))
    write_table("limit", rows, points, f"One thread per process. Median and range; runs: {repeats}. ")


# ----------------------------------------------------------------------------------------------------------- slow-link

LINKS = [  # model, ranks, Mbit/s
    ("convnet", 2, (10, 20, 50, 100)),
    ("resnet9", 2, (20, 50, 100, 200)),
    ("mlp", 2, (50, 100, 200, 400)),
    ("mlp", 3, (50, 100, 200, 400)),
]


def measure_slow_link(args: argparse.Namespace) -> None:
    if slow_link.problem():
        sys.exit(f"slow-link: {slow_link.problem()}")
    rates = {(model, ranks): rates for model, ranks, rates in LINKS}
    for point in missing("slow_link", [{"model": model, "ranks": ranks} for model, ranks in rates]):
        for row in slow_link.measure(**point, rates=rates[point["model"], point["ranks"]], repeats=args.repeats):
            add("slow_link", row)


def draw_slow_link(points: list[dict]) -> None:
    rows = [["model", "ranks", "gradients", "Mbit/s per link", "no limit", "measured", "predicted", "difference"]]
    for row in points:
        unslowed, measured, predicted = (float(row[name]) for name in ("unslowed", "measured", "predicted"))
        cells = [row["model"], row["ranks"], f"{float(row['megabytes']):.2f} MB", f"{float(row['rate']):g}"]
        cells += [f"{1e3 * seconds:.0f} ms" for seconds in (unslowed, measured, predicted)]
        rows.append([*cells, f"{100 * (predicted / measured - 1):+.0f} %"])
    worst = max(abs(float(row["predicted"]) / float(row["measured"]) - 1) for row in points)
    write_table("slow_link", rows, points, f"Largest difference: {100 * worst:.0f} %. ")

    figure, axes = new_picture(2)
    for color, (model, ranks, rates) in enumerate(LINKS):
        group = [row for row in points if (row["model"], row["ranks"]) == (model, str(ranks))]
        if not group:
            continue
        axes[0].plot(rates, [1e3 * float(row["predicted"]) for row in group], "-", color=f"C{color}")
        measured = [1e3 * float(row["measured"]) for row in group]
        axes[0].plot(rates, measured, "o", color=f"C{color}", label=f"{model}, {ranks} ranks")
    axes[0].set(xscale="log", yscale="log", xlabel="Mbit/s of each link", ylabel="ms per step")
    set_ticks(axes[0].yaxis, (50, 100, 200, 500, 1000, 2000))
    axes[0].set_title("a slowed link: points measured, lines predicted")
    model, gpus = scaling.MODELS["resnet50"], [2**n for n in range(11)]
    compute = scaling.compute_time(model.flop * model.batch, scaling.PEAK, model.utilisation)
    sizes = scaling.buckets(4 * model.parameters)
    for network in scaling.NETWORKS:
        shares = [100 * compute / scaling.step_time(compute, sizes, n, network) for n in gpus]
        axes[1].plot(gpus, shares, label=network.name)
    axes[1].set(xscale="log", xlabel="GPUs", ylabel="speed-up / GPUs (%)", ylim=(0, 104))
    axes[1].set_title(f"predicted: ResNet-50, {model.batch} images per GPU in {1e3 * compute:.0f} ms")
    for axis, ticks in zip(axes, ((10, 20, 50, 100, 200, 400), (1, 2, 8, 64, 256, 1024)), strict=True):
        axis.legend(frameon=False)
        set_ticks(axis.xaxis, ticks)
    save_picture(figure, "scaling")


# ------------------------------------------------------------------------------------------------------- command line

STUDIES = {
    "batch-size": (batch_size.measure, batch_size.draw),
    "scaling": (measure_scaling, draw_scaling),
    "limit": (measure_limit, draw_limit),
    "slow-link": (measure_slow_link, draw_slow_link),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[*STUDIES, "draw"])
    parser.add_argument("--again", action="store_true", help="forget what was measured")
    parser.add_argument("--data-dir", default="data", help="MNIST is kept here (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="for batch-size (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="for the others (default: %(default)s)")
    args = parser.parse_args()
    if min(args.seeds, args.repeats) < 1:
        parser.error("--seeds and --repeats must be at least 1")
    if args.study in STUDIES:
        if args.again:
            (RESULTS / f"{args.study.replace('-', '_')}.csv").unlink(missing_ok=True)
        try:
            STUDIES[args.study][0](args)
        except KeyboardInterrupt:
            print("stopped: what was measured stays, and is drawn")
        except RuntimeError as error:
            sys.exit(f"studies.py: {error}")
    for study, (_, draw) in STUDIES.items():
        points = read(study.replace("-", "_"))
        if points:
            draw(points)


if __name__ == "__main__":
    main()
