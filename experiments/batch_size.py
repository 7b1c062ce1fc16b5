"""The study behind docs/batch_size.md: accuracy on MNIST by global batch and learning rate.  See studies.py."""

import argparse
import math
import statistics
from pathlib import Path

from experiments import measured
from experiments.measured import RESULTS, Study, new_picture, png, set_ticks, spread, write_table

SCRIPT = "mnist_amp.py"  # faster than mnist_ddp.py on CPUs with bfloat16 instructions
EPOCHS = 3
BASE_BATCH, BASE_LR = 50, 0.025
BATCHES = (50, 200, 800, 3200)
RULES = {  # peak learning rate for k times the base batch
    "left alone": lambda k: BASE_LR,
    "square root": lambda k: BASE_LR * k**0.5,
    "linear": lambda k: BASE_LR * k,
    "linear, no warm-up": lambda k: BASE_LR * k,
}
PROCESSES, ONE_BATCH, LR = (1, 2, 4, 8), 200, 0.1  # the script's defaults, for the runs with several processes

# The scripts' schedule rises from 1/25 of the peak learning rate during 30 % of the steps.  This one starts at the
# peak and stays there as long; the rest is the same.
NO_WARM_UP = """
import functools, runpy, sys, torch
schedules = torch.optim.lr_scheduler
schedules.OneCycleLR = functools.partial(schedules.OneCycleLR, div_factor=1, final_div_factor=25e4)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def all_points(args: argparse.Namespace) -> list[dict]:
    """Every seed once before any seed comes a second time: a study that was stopped early still shows all points."""
    points = []
    for seed in range(args.repeats):
        runs = []  # rule, processes, batch, learning rate
        for batch in reversed(BATCHES):
            for rule, learning_rate in RULES.items():
                if batch != BASE_BATCH or rule not in ("square root", "linear"):  # there they change nothing
                    runs.append((rule, 1, batch, round(learning_rate(batch / BASE_BATCH), 6)))
        for n in PROCESSES:
            runs += [("default", n, batch, LR) for batch in sorted({ONE_BATCH, ONE_BATCH * n})]
        names = ("rule", "processes", "batch", "lr")
        points += [dict(zip(names, values, strict=True)) | {"epochs": EPOCHS, "seed": seed} for values in runs]
    return points


def measure(point: dict, args: argparse.Namespace) -> dict:
    """One run of the script."""
    command = ["python", "-c", NO_WARM_UP] if point["rule"] == "linear, no warm-up" else ["python"]
    command += [SCRIPT, "--epochs", point["epochs"], "--batch-size", point["batch"], "--lr", point["lr"]]
    command += ["--seed", point["seed"], "--nproc", point["processes"], "--data-dir", Path(args.data_dir).resolve()]
    last = measured.epochs(measured.run(command))[-1]
    return {"accuracy": f"{last.accuracy:.2f}", "loss": f"{last.loss:.4f}"}


def accuracies(points: list[dict[str, str]], rule: str, processes: int, batch: int) -> list[float]:
    """Those of all seeds.  At the base batch all rules have the same learning rate, so it was measured once."""
    if batch == BASE_BATCH and rule in ("square root", "linear"):
        rule = "left alone"
    wanted = (rule, str(processes), str(batch))
    return [float(row["accuracy"]) for row in points if (row["rule"], row["processes"], row["batch"]) == wanted]


def draw(points: list[dict[str, str]]) -> None:
    seeds = f"Test accuracy after {EPOCHS} epochs, median and range; seeds: {len({row['seed'] for row in points})}. "
    rows = [["global batch", "steps", *RULES]]
    for batch in BATCHES:
        cells = [spread(accuracies(points, rule, 1, batch), "{:.2f} %") for rule in RULES]
        rows.append([str(batch), str(EPOCHS * math.ceil(60_000 / batch)), *cells])
    write_table("batch_size", rows, points, seeds)
    rows = [["processes", "global batch kept: 200", "batch per process kept: 200", "its global batch"]]
    for n in PROCESSES:
        both = [accuracies(points, "default", n, batch) for batch in (ONE_BATCH, ONE_BATCH * n)]
        rows.append([str(n), *(spread(values, "{:.2f} %") for values in both), str(ONE_BATCH * n)])
    write_table("batch_size_processes", rows, points, seeds)
    draw_picture(points)


def draw_picture(points: list[dict[str, str]]) -> None:
    """The test error, log scale: the differences near 99 % are as visible as a run that has failed."""
    figure, (axes,) = new_picture(1)
    for rule, style in zip(RULES, ("o-", "s-", "^-", "^:"), strict=True):
        errors = {batch: [100 - value for value in accuracies(points, rule, 1, batch)] for batch in BATCHES}
        errors = {batch: values for batch, values in errors.items() if values}
        axes.plot(list(errors), [statistics.median(values) for values in errors.values()], style, label=rule)
        lows, highs = [min(values) for values in errors.values()], [max(values) for values in errors.values()]
        axes.fill_between(list(errors), lows, highs, alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel="global batch (images)", ylabel=f"test error after {EPOCHS} epochs (%)")
    set_ticks(axes.xaxis, BATCHES)
    set_ticks(axes.yaxis, (0.7, 1, 2, 5, 10, 20, 50, 90))
    axes.set_ylim(0.6, 100)
    axes.legend(frameon=False, title="learning rate")
    measured.write(RESULTS / "batch_size.png", png(figure))


STUDY = Study(all_points, measure, draw)
