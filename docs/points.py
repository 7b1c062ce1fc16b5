"""What the studies share: measured points in results/NAME.csv, tables in NAME.md, pictures in NAME.png."""

import contextlib
import csv
import datetime
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch  # noqa: E402
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


def read(name: str) -> list[dict[str, str]]:
    """The points measured so far, in the order of the file; all values as text."""
    with contextlib.suppress(FileNotFoundError), open(RESULTS / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
    return []


def missing(name: str, points: list[dict]) -> Iterator[dict]:
    """Those of the points that are not in the file; a progress line for each."""
    there = read(name)
    for number, point in enumerate(points, 1):
        wanted = {key: str(value) for key, value in point.items()}
        if not any(wanted.items() <= row.items() for row in there):
            print(f"{name}: {number} of {len(points)}: {', '.join(wanted.values())}", flush=True)
            yield point


def machine() -> dict[str, str]:
    """Where and when: for the end of each line, and for the tables."""
    cpu = "unknown CPU"
    with contextlib.suppress(OSError, IndexError):
        cpu = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[0]
    return {"machine": f"{cpu}, {os.cpu_count()} cores", "torch": torch.__version__, "date": str(datetime.date.today())}


def write_table(name: str, rows: list[list[str]], points: list[dict], after: str = "") -> None:
    """results/NAME.md: the first row is the table's head; below, `after` and where the points were measured."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + len(rows[0]) * "---|")
    places = sorted({f"{row['machine']}, torch {row['torch']}, {row['date']}" for row in points})
    text = "\n".join(lines) + "\n\n" + after + "Measured on: " + "; ".join(places) + ".\n"
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")


def add(name: str, row: dict) -> None:
    """One more point, at once on the disk: what was measured stays, whatever happens next."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    fresh = not path.exists()
    with open(path, "a", encoding="utf-8", newline="") as file:
        row = row | machine()
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def run(command: list, **environment: str) -> str:
    """What a script prints; its errors go to the terminal, and end the study."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"this run failed: {' '.join(command)}")
    return done.stdout


def spread(values: list[float], form: str) -> str:
    """The median, and if there are several values the smallest and the largest; `form` as for str.format."""
    if not values:
        return "not measured"
    median = form.format(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({form.format(min(values))} to {form.format(max(values))})"


def new_picture(panels: int) -> tuple[Any, Any]:
    """A figure, and its axes: as many as there are panels."""
    figure, axes = pyplot.subplots(1, panels, figsize=(6.4 * panels, 4.6), squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def set_ticks(axis: Any, ticks: tuple[float, ...]) -> None:
    """Only these ticks, with plain numbers; `axis` is axes.xaxis or axes.yaxis."""
    axis.set_ticks(ticks, [str(tick) for tick in ticks], minor=False)
    axis.set_ticks([], minor=True)


def save_picture(figure: Any, name: str) -> None:
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
