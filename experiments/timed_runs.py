"""Two studies that run programs as benchmark.py does: what kept memory is worth, and the time to 99 %.  See studies.py.

Seconds count from the start of the command: with imports, data and starting processes.
"""

import argparse
import functools
import json
import os
import statistics
from itertools import pairwise
from types import SimpleNamespace

from experiments import benchmark, measured
from experiments.benchmark_results import BASE, DDP, Row, Run
from experiments.measured import RESULTS, Study, new_picture, png, spread, write_table


@functools.cache
def look(dataset: str, data_dir: str) -> tuple[measured.Machine, dict[str, str]]:
    return benchmark.look(dataset, data_dir, _fail)


def run(row: Row, dataset: str, seed: int, data_dir: str, **variables: str) -> Run:
    """Three epochs; RuntimeError if that fails."""
    machine, malloc = look(dataset, data_dir)
    args = SimpleNamespace(dataset=dataset, data_dir=data_dir, epochs=3, timeout=600, machine=machine, malloc=malloc)
    found = Run(*row, 1, seed + 1, **benchmark.conditions_of(args), date="")
    benchmark.measure(found, args, **variables)
    if found.error:
        _fail(found.error)
    return found


def _fail(reason: str) -> None:
    raise RuntimeError(reason)


def rows() -> dict[str, Row]:
    """One process with all cores as threads; one process for each core."""
    cores = len(os.sched_getaffinity(0))
    return {BASE: Row(BASE, 1, cores, "fp32"), DDP: Row(DDP, cores, 1, "fp32")}


# -------------------------------------------------------------------------------------------------------------- memory

# data.py leaves the allocator alone if one of its variables is set.  This one changes nothing else.
LEFT_ALONE = {"MALLOC_PERTURB_": "0"}
MEMORY_WAYS = {"kept": {}, "given back": LEFT_ALONE}


def memory_points(args: argparse.Namespace) -> list[dict]:
    return [
        {"program": title, "memory": memory, "repeat": repeat}
        for repeat in range(args.repeats)
        for title in rows()
        for memory in MEMORY_WAYS
    ]


def measure_memory(point: dict, args: argparse.Namespace) -> dict:
    row = rows()[point["program"]]
    found = run(row, "synthetic", point["repeat"], args.data_dir, **MEMORY_WAYS[point["memory"]])
    return {"layout": row.layout, "images_per_second": round(found.speed), "peak_mib": found.memory_mib}


def draw_memory(points: list[dict[str, str]]) -> None:
    table = [["program", "processes x threads", "memory", "images/s", "peak memory per process, MiB"]]
    worth = []
    for title in dict.fromkeys(row["program"] for row in points):
        medians = []
        for memory in MEMORY_WAYS:
            found = [row for row in points if (row["program"], row["memory"]) == (title, memory)]
            if not found:  # the study was stopped
                continue
            speeds, peaks = ([float(row[name]) for row in found] for name in ("images_per_second", "peak_mib"))
            medians.append((statistics.median(speeds), statistics.median(peaks)))
            table.append([title, found[0]["layout"], memory, spread(speeds, "{:.0f}"), spread(peaks, "{:.0f}")])
        if len(medians) == 2:
            (speed, peak), (speed_back, peak_back) = medians
            more = f"{100 * (speed / speed_back - 1):.0f} % more images/s and {peak - peak_back:.0f} MiB more"
            worth.append(f"`{title}`: {more}")
    runs = max(int(row["repeat"]) for row in points) + 1
    after = f"With kept memory, {'; '.join(worth)}. Synthetic digits; median and range; runs: {runs}. "
    write_table("memory", table, points, after)


MEMORY = Study(memory_points, measure_memory, draw_memory)


# ------------------------------------------------------------------------------------------------------------ accuracy

TARGET = 99.0  # per cent, on MNIST


def accuracy_points(args: argparse.Namespace) -> list[dict]:
    return [{"program": title, "seed": seed} for seed in range(args.repeats) for title in rows()]


def measure_accuracy(point: dict, args: argparse.Namespace) -> dict:
    found = run(rows()[point["program"]], "mnist", point["seed"], args.data_dir)
    percents = [round(value, 2) for value in found.accuracies]
    return {"layout": found.row.layout, "seconds": json.dumps(found.epoch_s), "accuracies": json.dumps(percents)}


def reached(seconds: list[float], percents: list[float]) -> tuple[float, float] | None:
    """When TARGET is reached: seconds and epochs, on the straight line between the ends of two epochs.

    None if it never is.  The end of the first epoch if it is reached there: nothing is known of the time before.
    """
    if percents[0] >= TARGET:
        return seconds[0], 1.0
    points = list(zip(seconds, percents, strict=True))
    for number, ((start, low), (end, high)) in enumerate(pairwise(points), 1):
        if high >= TARGET:
            share = (TARGET - low) / (high - low)
            return start + share * (end - start), number + share
    return None


def draw_accuracy(points: list[dict[str, str]]) -> None:
    table = [["program", "processes x threads", f"{TARGET:g} % after, s", "epochs until then", "at the end, %"]]
    figure, (axes,) = new_picture(1, size=(7, 5))
    styles = {BASE: ("#444444", "s--"), DDP: ("#E69F00", "o-")}
    for title in dict.fromkeys(row["program"] for row in points):
        found = [row for row in points if row["program"] == title]
        curves = [(json.loads(row["seconds"]), json.loads(row["accuracies"])) for row in found]
        times = [reached(*curve) for curve in curves]
        cells = ["not reached with each seed"] * 2
        if all(times):
            cells = [spread([time[part] for time in times], "{:.1f}") for part in (0, 1)]
        table.append([title, found[0]["layout"], *cells, spread([percents[-1] for _, percents in curves], "{:.2f}")])
        colour, style = styles[title]
        for seed, (seconds, percents) in enumerate(curves):
            axes.plot(seconds, percents, style, color=colour, label=title if seed == 0 else None)
    axes.axhline(TARGET, color="0.4", linestyle=":", zorder=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the command was typed", fontsize=12)
    axes.set_ylabel("test accuracy, %", fontsize=12)
    axes.set_title("A line for each seed, a mark at the end of each epoch", fontsize=13)
    axes.legend(loc="lower right", frameon=False, fontsize=12)
    measured.write(RESULTS / "accuracy.png", png(figure))
    seeds = len({row["seed"] for row in points})
    after = (
        f"MNIST, 3 epochs, seeds: {seeds}; median and range. Between the ends of two epochs a straight line is drawn. "
    )
    write_table("accuracy", table, points, after)


ACCURACY = Study(accuracy_points, measure_accuracy, draw_accuracy)
