"""What benchmark.py has measured: the runs, stored as CSV; the table and the sentences; the picture.

    runs = from_csv(Path("experiments/results/benchmark.csv"))
    print(markdown(runs))

Like measured.py it imports neither torch nor (before `picture`) matplotlib.
"""

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from experiments import measured

BASE, DDP, AMP, LIMIT = "mnist_single.py", "mnist_ddp.py", "mnist_amp.py", "experiments/baselines/limit.py"
TITLES = {
    LIMIT: "compute-only limit",
    "experiments/baselines/plain_ddp.py": "the plain DDP loop",
    "experiments/baselines/with_ignite.py": "PyTorch-Ignite",
    "experiments/baselines/with_accelerate.py": "Accelerate",
    "experiments/baselines/with_fabric.py": "Lightning Fabric",
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


def to_csv(path: Path, runs: list[Run]) -> None:
    """Texts as they are, all else as JSON: the lists have a figure for each epoch."""
    points = [dataclasses.asdict(run).items() for run in runs]
    measured.save(path, [{name: v if name in TEXTS else json.dumps(v) for name, v in point} for point in points])


def from_csv(path: Path) -> list[Run]:
    """The stored runs, none if there is no file; ValueError if the file has other columns than `Run`."""
    points = [point.items() for point in measured.read(path)]
    try:
        runs = [Run(**{name: v if name in TEXTS else json.loads(v) for name, v in point}) for point in points]
    except (AttributeError, TypeError, ValueError):
        runs = []
    if path.exists() and not runs:
        raise ValueError(f"{path} was not written by this version of benchmark.py: move it away")
    return runs


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
        return [words, *[NONE] * 6]
    speed = measured.spread([run.speed for run in good], "{:,.0f}")
    if failed:
        speed += f"; {len(failed)} of {len(failed) + len(good)} runs failed: {failed[0]}"
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
    rows = [heads]
    for row in dict.fromkeys(run.row for run in runs):
        rows.append([row.title, f"{row.processes} x {row.threads}", row.precision, *_cells(runs, row, target)])
    return measured.table(rows)


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
    """The whole report: experiments/results/benchmark.md."""
    return "\n".join(filter(None, (table(runs, target), findings(runs), conditions(runs))))


# --------------------------------------------------------------------------------------------------------- the picture

# Okabe and Ito's colours, which colour-blind people tell apart.
COLOURS = {BASE: "#444444", "mnist_dataparallel.py": "#CC79A7", DDP: "#E69F00", AMP: "#0072B2"}
OTHERS = "#BBBBBB"
PLAIN = "experiments/baselines/plain_ddp.py"


def picture(runs: list[Run], target: float | None = None) -> bytes:
    """PNG: time to accuracy, images/s beside the limit, speed-up against processes."""
    figure, (left, middle, right) = measured.new_picture(1, 1.2, 0.75, size=(15, 5))
    _draw_accuracy(left, runs, target or TARGETS[runs[0].dataset])
    _draw_speed(middle, runs)
    _draw_scaling(right, runs)
    figure.supxlabel(f"{runs[0].dataset}; {runs[0].machine}; N x M: processes x threads", fontsize=10, color="0.35")
    return measured.png(figure)


def _draw_accuracy(axes: Any, runs: list[Run], target: float) -> None:
    """A line for each script and the plain loop: the medians over the repeats."""
    for program in dict.fromkeys(run.program for run in runs if run.program not in TITLES or run.program == PLAIN):
        good = good_runs(runs, largest(runs, program))
        seconds = [statistics.median(times) for times in zip(*(run.epoch_s for run in good), strict=True)]
        percent = [statistics.median(values) for values in zip(*(run.accuracies for run in good), strict=True)]
        after = _median([run.time_to(target) for run in good], "{:.0f} s")
        label = f"{Row(program, 0, 0, '').title}: {after}"
        axes.plot(seconds, percent, "o-", color=COLOURS.get(program, OTHERS), label=label, linewidth=2.5)
    axes.axhline(target, color="0.4", linestyle=":", zorder=0)
    axes.set(title=f"Time to {target:g} % accuracy", xlabel="seconds since the command", ylabel="test accuracy, %")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=target - 2)
    axes.legend(loc="lower right", edgecolor="none")


def _draw_speed(axes: Any, runs: list[Run]) -> None:
    """A bar for each row, with the least and the greatest; a black line where its limit is."""
    shown = [row for row in measured_rows(runs) if row.program != LIMIT]
    for place, row in enumerate(shown):
        speeds = [run.speed for run in good_runs(runs, row)]
        middle = statistics.median(speeds)
        spread = [[middle - min(speeds)], [max(speeds) - middle]]
        axes.barh(place, middle, 0.65, color=COLOURS.get(row.program, OTHERS), xerr=spread, capsize=3)
        colour = "white" if row.program in COLOURS else "black"
        axes.text(0, place, f" {middle:,.0f}", va="center", color=colour, weight="bold")
        limits = [run.speed for run in good_runs(runs, row._replace(program=LIMIT))]
        if limits:
            axes.vlines(statistics.median(limits), place - 0.42, place + 0.42, color="black", linewidth=3)
    axes.set_yticks(range(len(shown)), [f"{row.title}  {row.processes} x {row.threads}" for row in shown])
    axes.invert_yaxis()  # the first at the top
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(title="Throughput; black lines: the compute-only limit", xlabel="images/s: median, least and greatest")


def _draw_scaling(axes: Any, runs: list[Run]) -> None:
    """mnist_ddp.py and its limit, with the same number of threads for each process: one more is one more device.

    Both relative to the limit of one process: a script that is slow in one process would seem to scale well.
    """
    axes.set(title="Speed-up of mnist_ddp.py", xlabel="processes", ylabel="images/s, relative to one process")
    most = largest(runs, DDP)
    if not most:
        return
    axes.plot([1, most.processes], [1, most.processes], "--", color="0.5", label="ideal")
    one = most._replace(processes=1)
    if good_runs(runs, one._replace(program=LIMIT)):
        one = one._replace(program=LIMIT)
        axes.set_ylabel("images/s, relative to the limit of one process")
    for program, colour, label in (LIMIT, "black", "compute-only limit"), (DDP, COLOURS[DDP], DDP):
        same = [row for row in measured_rows(runs, program) if (row.threads, row.precision) == most[2:]]
        points = sorted((row.processes, ratio(runs, row, one)) for row in same if ratio(runs, row, one))
        axes.plot([n for n, _ in points], [times for _, times in points], "o-", color=colour, label=label)
        for n, times in points:
            axes.annotate(f"{times:.2f}", (n, times), (8, -4), textcoords="offset points")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.2)
    axes.legend(loc="upper left", edgecolor="none")
