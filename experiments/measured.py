"""What the experiments share: the store of measured points, the machine, the line that the scripts print, tables.

A point is what was asked (which script, how many processes) and the figures that were measured: a line of a CSV file in
experiments/results/.  Neither torch nor (before `new_picture`) matplotlib is imported: benchmark.py must stay a small
process.
"""

import contextlib
import csv
import datetime
import functools
import io
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
FIRST_STEP = "first optimizer step"  # the line of baselines/timed.py
NOT_PASSED_ON = r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NPROC|MASTER_ADDR|MASTER_PORT|DIST_.*|OMP_NUM_THREADS"
NOT_PASSED_ON += r"|MALLOC_.*|GLIBC_TUNABLES)"  # the allocator is part of what is measured


class Study(NamedTuple):
    """What studies.py measures point by point."""

    points: Callable[[Any], list[dict]]  # of the flags: what to measure, in this order
    measure: Callable[[dict, Any], dict]  # of a point and the flags: its figures; RuntimeError if it can't run here
    draw: Callable[[list[dict[str, str]]], None]  # writes the table, and perhaps a picture, of the stored points


# --------------------------------------------------------------------------------------------------- running a script


def environment(**variables: str) -> dict[str, str]:
    """The user's, without what changes a measurement; `python` is this Python, and what is printed comes at once."""
    kept = {name: value for name, value in os.environ.items() if not re.fullmatch(NOT_PASSED_ON, name)}
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return kept | {"PYTHONUNBUFFERED": "1"} | variables


def run(command: list, **variables: str) -> str:
    """What a command prints; its errors go to the terminal, and RuntimeError says which command it was."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=environment(**variables), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {shlex.join(words)}")
    return done.stdout


class Epoch(NamedTuple):
    """What a script prints after an epoch; no accuracy where there is no evaluation."""

    loss: float
    correct: int | None
    count: int | None
    images_per_s: float

    @property
    def accuracy(self) -> float:
        """Per cent."""
        return 100 * self.correct / self.count


_EPOCH = re.compile(  # horovodrun begins its lines with the rank
    r"(?:\[0\]<stdout>:)?epoch \d+/\d+  loss (\S+)(?:  accuracy \S+ \((\d+)/(\d+)\))?  (\d+) images/s"
)


def read_epoch(line: str) -> Epoch | None:
    """The figures of a line such as `epoch 1/3  loss 0.1  accuracy 97.40% (1948/2000)  4581 images/s`."""
    found = _EPOCH.fullmatch(line)
    if not found:
        return None
    loss, correct, count, images_per_s = found.groups()
    return Epoch(float(loss), int(correct) if correct else None, int(count) if count else None, float(images_per_s))


def epochs(printed: str) -> list[Epoch]:
    return [epoch for epoch in map(read_epoch, printed.splitlines()) if epoch]


# -------------------------------------------------------------------------------------------------------- the machine

# Started by `python -c`: with torch in it, this process would be large.
_LOOK = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
before_ampere = bool(gpus) and torch.cuda.get_device_capability(0) < (8, 0)
print(json.dumps([gpus, "fp16" if before_ampere else "bf16", torch.__version__]))
"""


class Machine(NamedTuple):
    cores: int  # that this process may use
    gpus: list[str]  # their names
    half: str  # the precision of mnist_amp.py: bf16 or fp16
    torch: str  # its version
    name: str


@functools.cache
def machine() -> Machine:
    gpus, half, version = json.loads(run(["python", "-c", _LOOK]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    used = f"{len(gpus)} x {gpus[0]}" if gpus else f"{cores} cores of {_cpu()}"
    name = f"{used}, {platform.system()} {platform.machine()}"
    return Machine(cores, gpus, half, version, name)


def _cpu() -> str:
    """As the system calls it, with the bfloat16 instructions that make mixed precision fast."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "a CPU"
    model = re.search(r"model name\s*: (.+)", text)
    bf16 = [name for name in ("avx512_bf16", "amx_bf16") if name in text] or ["no bf16 instructions"]
    return f"{model[1].strip() if model else 'a CPU'} ({', '.join(bf16)})"


def here() -> dict[str, str]:
    """What each stored point says of where it was measured."""
    return {"machine": machine().name, "torch": machine().torch, "date": str(datetime.date.today())}


# ---------------------------------------------------------------------------------------------------------- the store


def write(path: Path, content: bytes) -> None:
    """Atomic: readers see the old file or the complete new one."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def read(path: Path) -> list[dict[str, str]]:
    """The stored points, in the order of the file; all values as text."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
    return []


def save(path: Path, points: list[dict]) -> None:
    """All of them; ValueError if one has a column that the first has not."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(points[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    write(path, text.getvalue().encode())


def _is(point: dict, stored: dict[str, str]) -> bool:
    return {name: str(value) for name, value in point.items()}.items() <= stored.items()


def add(path: Path, point: dict, figures: dict) -> None:
    """Store a point, in the place of what was measured of it before: what was measured stays, whatever happens next."""
    row, points = point | figures | here(), read(path)
    places = [place for place, stored in enumerate(points) if _is(point, stored)] or [len(points)]
    points[places[0] : places[0] + 1] = [row]
    save(path, points)


def missing(path: Path, points: list[dict], again: bool = False) -> Iterator[dict]:
    """Those of the points that are not in the file (again: all); a progress line for each."""
    there = read(path)
    for number, point in enumerate(points, 1):
        if again or not any(_is(point, stored) for stored in there):
            print(f"{path.stem}: {number} of {len(points)}: {', '.join(map(str, point.values()))}", flush=True)
            yield point


# -------------------------------------------------------------------------------------------------- tables, pictures


def table(rows: list[list[str]], align: bool = False) -> str:
    """In Markdown; the first row is the head.  align: for a terminal, too."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    if align:
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|" + len(rows[0]) * "---|", *lines[1:]]) + "\n"


def write_table(name: str, rows: list[list[str]], points: list[dict[str, str]], after: str = "") -> None:
    """results/NAME.md: the table; below it, `after` and where the points were measured, as far as that is known."""
    places = sorted({f"{row['machine']}, torch {row['torch']}, {row['date']}" for row in points if row["machine"]})
    after += f"Measured on: {'; '.join(places)}." if places else ""
    unknown = sum(not row["machine"] for row in points)
    if places and unknown:
        after += f" Of {unknown} older points the machine is not known."
    write(RESULTS / f"{name}.md", (table(rows) + (f"\n{after}\n" if after else "")).encode())


def spread(values: list[float], form: str) -> str:
    """The median, and if there are several values the smallest and the largest; `form` as for str.format."""
    if not values:
        return "not measured"
    median = form.format(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({form.format(min(values))} to {form.format(max(values))})"


def new_picture(*panels: float, size: tuple[float, float] | None = None, **options: Any) -> tuple[Any, Any]:
    """A figure, and its axes side by side; `panels`: the relative width of each.  size: in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size or (6.4 * len(panels), 4.6), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(panels), width_ratios=panels, squeeze=False, **options)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def set_ticks(axis: Any, ticks: tuple[float, ...]) -> None:
    """Only these ticks, with plain numbers; `axis` is axes.xaxis or axes.yaxis."""
    axis.set_ticks(ticks, [str(tick) for tick in ticks], minor=False)
    axis.set_ticks([], minor=True)
