"""What benchmark.py has measured: the runs, stored as CSV; the table and the sentences; the picture.

    runs = from_csv(Path("results/benchmark.csv"))
    print(markdown(runs))

Neither torch nor (before `picture`) matplotlib is imported: benchmark.py must stay a small process.
"""

import csv
import dataclasses
import io
import itertools
import json
import math
import os
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

BASE, DDP, AMP, LIMIT = "mnist_single.py", "mnist_ddp.py", "mnist_amp.py", "baselines/limit.py"
TITLES = {
    LIMIT: "compute-only limit",
    "baselines/plain_ddp.py": "the plain DDP loop",
    "baselines/with_ignite.py": "PyTorch-Ignite",
    "baselines/with_accelerate.py": "Accelerate",
    "baselines/with_fabric.py": "Lightning Fabric",
}
TARGETS = {"mnist": 99.0, "cifar10": 60.0, "synthetic": 97.0}  # per cent, which each script reaches in three epochs
NOT_INSTALLED = "not installed"  # how the error of a run without its library begins
NONE = "–"  # in a cell without a figure


class Row(NamedTuple):
    """A line of the table: a program, and how it is started."""

    program: str  # its path
    processes: int
    threads: int  # of each process
    precision: str  # fp32, bf16 or fp16

    @property
    def title(self) -> str:
        return TITLES.get(self.program, Path(self.program).name)


@dataclasses.dataclass
class Run:
    """One run of a row's program: a line of benchmark.csv.  Seconds count from the start of the command."""

    program: str
    processes: int
    threads: int
    precision: str
    repeat: int
    dataset: str
    epochs: int
    machine: str
    versions: str
    date: str
    error: str = ""  # in one line; "" if it went well
    first_step_s: float | None = None
    memory_mib: float | None = None
    epoch_s: list[float] = dataclasses.field(default_factory=list)  # when each epoch's line came
    loss: list[float] = dataclasses.field(default_factory=list)
    correct: list[int] = dataclasses.field(default_factory=list)  # empty for the limit, which has no evaluation
    count: int | None = None  # of test examples
    images_per_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def row(self) -> Row:
        return Row(self.program, self.processes, self.threads, self.precision)

    @property
    def speed(self) -> float:
        """images/s: without the first epoch, in which memory is allocated and DDP arranges its buckets."""
        return statistics.median(self.images_per_s[1:] or self.images_per_s)

    @property
    def accuracies(self) -> list[float]:
        """Per cent, after each epoch."""
        return [100 * correct / self.count for correct in self.correct]

    def time_to(self, target: float) -> float | None:
        """Seconds until the line of the first epoch with an accuracy of at least `target` per cent; None: never."""
        for seconds, correct in zip(self.epoch_s, self.correct, strict=False):
            if 100 * correct >= target * self.count:
                return seconds
        return None


# ------------------------------------------------------------------------------------------------------------- the CSV

TEXTS = {field.name for field in dataclasses.fields(Run) if field.type is str}


def write(path: Path, content: bytes) -> None:
    """Atomic: readers see the old file or the complete new one."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def to_csv(runs: list[Run]) -> bytes:
    """Texts as they are, all else as JSON: the lists have a figure for each epoch."""
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in dataclasses.fields(Run)], lineterminator="\n")
    table.writeheader()
    for run in runs:
        values = dataclasses.asdict(run)
        table.writerow({name: value if name in TEXTS else json.dumps(value) for name, value in values.items()})
    return text.getvalue().encode()


def from_csv(path: Path) -> list[Run]:
    """The stored runs; ValueError if the file has other columns than `Run`, OSError if there is none."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            if table.fieldnames != [field.name for field in dataclasses.fields(Run)]:
                raise ValueError
            return [
                Run(**{name: value if name in TEXTS else json.loads(value) for name, value in line.items()})
                for line in table
            ]
    except (TypeError, ValueError):
        raise ValueError(f"{path} was not written by this version of benchmark.py: move it away") from None


# ------------------------------------------------------------------------------------------------ statistics, the table


def good_runs(runs: list[Run], row: Row) -> list[Run]:
    return [run for run in runs if run.row == row and not run.error]


def measured_rows(runs: list[Run], *programs: str) -> list[Row]:
    """The rows (of these programs, or of all) with at least one run that went well, in their order."""
    found = dict.fromkeys(run.row for run in runs if not run.error)
    return [row for row in found if not programs or row.program in programs]


def largest(runs: list[Run], program: str) -> Row | None:
    """The program's row with the most processes (and threads); None if no run of it went well."""
    return max(measured_rows(runs, program), key=lambda row: (row.processes, row.threads), default=None)


def ratio(runs: list[Run], row: Row | None, to: Row | None) -> float | None:
    """images/s of `row` divided by that of `to`: the median over the repeats in which both went well.

    A ratio is taken within a repeat, whose runs are close in time: the machine may change between repeats.
    """
    speeds = {(run.row, run.repeat): run.speed for run in runs if not run.error}
    pairs = [(speed, speeds.get((to, repeat))) for (found, repeat), speed in speeds.items() if found == row]
    return statistics.median([speed / other for speed, other in pairs if other] or [0]) or None


def of_limit(runs: list[Run], row: Row) -> float | None:
    return ratio(runs, row, row._replace(program=LIMIT)) if row.program != LIMIT else None


def _figure(value: float | None, form: str) -> str:
    return NONE if value is None or value == math.inf else form.format(value)


def _median(values: list[float | None], form: str) -> str:
    """The median as text; None is a value that was never reached."""
    return _figure(statistics.median(math.inf if value is None else value for value in values or [None]), form)


def _cells(runs: list[Run], row: Row, target: float) -> list[str]:
    """The row's cells after its name, processes and precision."""
    good = good_runs(runs, row)
    failed = [run.error for run in runs if run.row == row and run.error]
    if not good:
        words = failed[0] if failed[0].startswith(NOT_INSTALLED) else f"failed: {failed[0]}"
        return [words.replace("|", "\\|"), *[NONE] * 6]
    speeds = [run.speed for run in good]
    speed = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
    if failed:
        speed += f"; {len(failed)} of {len(failed) + len(good)} runs failed: {failed[0]}".replace("|", "\\|")
    return [
        speed,
        _figure(ratio(runs, row, largest(runs, BASE)), "{:.2f}"),
        _figure(of_limit(runs, row), "{:.0%}"),
        _median([run.first_step_s for run in good], "{:.1f}"),
        _median([run.time_to(target) for run in good if run.correct], "{:.1f}"),
        _median([run.accuracies[-1] for run in good if run.correct], "{:.2f}"),
        _median([run.memory_mib for run in good], "{:.0f}"),
    ]


def table(runs: list[Run], target: float | None = None) -> str:
    """Markdown.  target: per cent, by default that of the data set."""
    target = target or TARGETS[runs[0].dataset]
    heads = ["script", "processes x threads", "precision", "images/s: median (least to greatest)", "speed-up"]
    heads += ["of the limit", "first step, s", f"{target:g} % after, s", "accuracy, %", "memory per process, MiB"]
    found = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in dict.fromkeys(run.row for run in runs):
        how = [row.title, f"{row.processes} x {row.threads}", row.precision]
        found.append(f"| {' | '.join(how + _cells(runs, row, target))} |")
    return "\n".join(found) + "\n"


def in_short(runs: list[Run], script: str) -> str:
    """The script's largest row in a few words."""
    row = largest(runs, script)
    if not row:
        return "not measured"
    speed = statistics.median(run.speed for run in good_runs(runs, row))
    times = ratio(runs, row, largest(runs, BASE))
    processes = f"{row.processes} process{'es' * (row.processes > 1)}"
    return f"{speed:,.0f} images/s, {processes}" + (f", {times:.2f} times" if times else "")


def gpus(runs: list[Run]) -> int:
    """How many the machine had, from its name: "2 x NVIDIA ..." or "2 cores of ..."."""
    found = re.match(r"(\d+) x ", runs[0].machine)
    return int(found[1]) if found else 0


def findings(runs: list[Run]) -> str:
    """A sentence for each of mnist_ddp.py and mnist_amp.py: beside the baselines and the limit, as many processes."""
    found = []
    for row in filter(None, (largest(runs, DDP), largest(runs, AMP))):
        others = measured_rows(runs, *(program for program in TITLES if program != LIMIT))
        beside = [f"{ratio(runs, row, other):.2f} times those of {other.title}" for other in others]
        limit = of_limit(runs, row)
        beside += [f"{100 * limit:.0f} % of the compute-only limit"] if limit else []
        if beside:
            how = f"`{row.program}` ({row.processes} processes, {row.precision})"
            found.append(f"The images/s of {how} are {', '.join(beside)}.\n")
    return "".join(found)


def conditions(runs: list[Run]) -> str:
    first, last = min(run.date for run in runs)[:10], max(run.date for run in runs)[:10]
    repeats, run = max(run.repeat for run in runs), runs[0]
    when = first if first == last else f"{first} to {last}"
    taken = f"{run.epochs} epoch{'s' * (run.epochs > 1)} of {run.dataset}, {repeats} run{'s' * (repeats > 1)} of each"
    return f"{taken}, in alternation, {when}. {run.machine}. {run.versions}.\n"


def markdown(runs: list[Run], target: float | None = None) -> str:
    """The whole report: results/benchmark.md."""
    return "\n".join(filter(None, (table(runs, target), findings(runs), conditions(runs))))


# --------------------------------------------------------------------------------------------------------- the picture

# Okabe and Ito's colours, which colour-blind people tell apart; the markers do so in print.
COLOURS = ["#444444", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"]
MARKERS = "osD^vP*"
OTHERS = "#BBBBBB"  # the baselines
PLAIN = "baselines/plain_ddp.py"


def picture(runs: list[Run], target: float | None = None) -> bytes:
    """PNG: time to accuracy, images/s beside the limit, speed-up against processes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    target = target or TARGETS[runs[0].dataset]
    scripts = dict.fromkeys(run.program for run in runs if run.program not in TITLES)
    styles = {program: {"color": OTHERS, "marker": "."} for program in TITLES}
    for script, colour, marker in zip(scripts, itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False):
        styles[script] = {"color": colour, "marker": marker}
    with rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(15, 5), dpi=110, layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1.2, 0.75])
        _draw_accuracy(left, runs, target, styles)
        _draw_speed(middle, runs, styles)
        _draw_scaling(right, runs, styles)
        figure.supxlabel(f"{runs[0].dataset}; {runs[0].machine}; N x M: processes x threads", fontsize=10, color="0.35")
        content = io.BytesIO()
        figure.savefig(content, format="png")
    return content.getvalue()


def _draw_accuracy(axes: Any, runs: list[Run], target: float, styles: dict) -> None:
    """A line for each script and the plain loop: the medians over the repeats."""
    lowest = highest = target
    for program in (program for program in styles if program not in TITLES or program == PLAIN):
        row = largest(runs, program)
        if not row:
            continue
        good = good_runs(runs, row)
        seconds = [statistics.median(times) for times in zip(*(run.epoch_s for run in good), strict=True)]
        percent = [statistics.median(values) for values in zip(*(run.accuracies for run in good), strict=True)]
        after = _median([run.time_to(target) for run in good], "{:.0f}")
        label = f"{row.title}: {after} s" if after != NONE else row.title
        axes.plot(seconds, percent, label=label, linewidth=2.5, markersize=8, **styles[program])
        lowest, highest = min(lowest, *percent), max(highest, *percent)
    axes.axhline(target, color="0.4", linestyle=":", linewidth=1.5, zorder=0)
    axes.set(title=f"Time to {target:g} % accuracy", xlabel="seconds since the command", ylabel="test accuracy, %")
    axes.set_xlim(left=0)
    lowest = max(lowest, target - 5)
    height = highest - lowest + 0.1
    axes.set_ylim(lowest - 0.5 * height, highest + 0.07 * height)  # the legend has room below
    axes.grid(alpha=0.3)
    if axes.lines[1:]:
        axes.legend(loc="lower right", framealpha=0.9, edgecolor="none", fontsize=10)


def _draw_speed(axes: Any, runs: list[Run], styles: dict) -> None:
    """A bar for each row, with the least and the greatest; a black line where its limit is."""
    shown = list(dict.fromkeys(run.row for run in runs if run.program != LIMIT))
    for place, row in enumerate(shown):
        speeds = [run.speed for run in good_runs(runs, row)]
        if not speeds:
            error = next(run.error for run in runs if run.row == row)
            axes.text(0, place, f" {NOT_INSTALLED if error.startswith(NOT_INSTALLED) else 'failed'}", va="center")
            continue
        middle = statistics.median(speeds)
        colour = styles[row.program]["color"]
        axes.barh(place, middle, color=colour, height=0.65)
        spread = [[middle - min(speeds)], [max(speeds) - middle]]
        axes.errorbar(middle, place, xerr=spread, color="black", capsize=3, linewidth=1.2)
        dark = row.program not in TITLES
        axes.text(0, place, f" {middle:,.0f}", va="center", color="white" if dark else "black", weight="bold")
        limits = [run.speed for run in good_runs(runs, row._replace(program=LIMIT))]
        if limits:
            ends = [place - 0.42, place + 0.42]
            axes.plot([statistics.median(limits)] * 2, ends, color="black", linewidth=3, label="compute-only limit")
    axes.set_yticks(range(len(shown)), [f"{row.title}  {row.processes} x {row.threads}" for row in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(shown) - 0.4, -1.3)  # the first at the top, the legend above it
    axes.set_axisbelow(True)
    axes.set(title="Throughput", xlabel="images/s in training: median, least and greatest")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3, axis="x")
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles[:1], labels[:1], loc="upper right", framealpha=0.9, edgecolor="none", fontsize=10)


def _draw_scaling(axes: Any, runs: list[Run], styles: dict) -> None:
    """mnist_ddp.py and its limit, with the same number of threads for each process: one more is one more device.

    Both relative to the limit of one process: a script that is slow in one process would seem to scale well.
    """
    most = largest(runs, DDP)
    axes.set(title="Speed-up of mnist_ddp.py", xlabel="processes", ylabel="images/s, relative to one process")
    if not most:
        return
    top = most.processes
    axes.plot([1, top], [1, top], color="0.5", linestyle="--", label="ideal")
    one = most._replace(processes=1)
    if good_runs(runs, one._replace(program=LIMIT)):
        one = one._replace(program=LIMIT)
        axes.set_ylabel("images/s, relative to the limit of one process")
    limit = {"color": "black", "marker": "|", "linewidth": 1.5, "markersize": 14}
    for program, style in (LIMIT, limit), (DDP, {"linewidth": 2.5, "markersize": 8, **styles[DDP]}):
        same = [row for row in measured_rows(runs, program) if row.threads == most.threads and row.precision == "fp32"]
        points = sorted((row.processes, ratio(runs, row, one)) for row in same if ratio(runs, row, one))
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), label="compute-only limit" if program == LIMIT else DDP, **style)
        for processes, times in points if program == DDP else []:
            axes.annotate(f"{times:.2f}", (processes, times), (10, -4), textcoords="offset points", weight="bold")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(0.85, top + 0.25 * max(1, top - 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", framealpha=0.9, edgecolor="none", fontsize=10)
