"""What benchmark.py has measured: the runs, stored as CSV; the table and the sentences; the picture.

    runs = from_csv(Path("experiments/results/benchmark.csv"))
    print(markdown(runs))

Like measured.py it imports neither torch nor (before `picture`) matplotlib.
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import NamedTuple

from experiments import measured

BASE, DDP, AMP, LIMIT = "mnist_single.py", "mnist_ddp.py", "mnist_amp.py", "experiments/baselines/limit.py"
PLAIN = "experiments/baselines/plain_ddp.py"
PEERS = {
    PLAIN: "plain DDP loop",
    "experiments/baselines/with_ignite.py": "PyTorch-Ignite",
    "experiments/baselines/with_accelerate.py": "Accelerate",
    "experiments/baselines/with_fabric.py": "Lightning Fabric",
}
WHOLE = "--whole-batches"  # the flag of the peers that load as data.py does
WAYS = {"": "image by image", WHOLE: "in whole batches"}  # how a peer loads
WIDE = 0.2  # a range wider than this share of the median is measured again, and then marked
DATASETS = ("mnist", "cifar10", "synthetic")
NOT_INSTALLED = "not installed"  # how the error of a run without its library begins
NONE = "–"  # in a cell without a figure


class Row(NamedTuple):
    """A line of the table: a program, and how it is started."""

    program: str  # its path
    processes: int
    threads: int  # of each process
    precision: str  # fp32, bf16 or fp16
    flag: str = ""  # of the peers: "" or WHOLE

    @property
    def title(self) -> str:
        if self.program in PEERS:
            return f"{PEERS[self.program]}, {WAYS[self.flag]}"
        return "compute only" if self.program == LIMIT else Path(self.program).name

    @property
    def layout(self) -> str:
        """How many processes, with how many threads each."""
        return f"{self.processes} x {self.threads}"


@dataclasses.dataclass
class Run:
    """One run of a row's program: a line of benchmark.csv.  Seconds count from the start of the command."""

    program: str
    processes: int
    threads: int
    precision: str
    flag: str
    attempt: int  # 1; 2: measured again, because the range was wide
    repeat: int  # from 1; its seed is one less
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
        return Row(self.program, self.processes, self.threads, self.precision, self.flag)

    @property
    def speed(self) -> float:
        """images/s: without the first epoch, in which memory is allocated and DDP arranges its buckets."""
        return statistics.median(self.images_per_s[1:] or self.images_per_s)

    @property
    def accuracies(self) -> list[float]:
        """Per cent, after each epoch."""
        return [100 * correct / self.count for correct in self.correct]


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


def counted(runs: list[Run], row: Row) -> list[Run]:
    """The row's runs; if all of them were measured again, only those of that attempt."""
    of_row = [run for run in runs if run.row == row]
    attempts = [[run for run in of_row if run.attempt == attempt] for attempt in (1, 2)]
    return attempts[1] if len(attempts[1]) >= len(attempts[0]) else attempts[0]


def good_runs(runs: list[Run], row: Row) -> list[Run]:
    return [run for run in counted(runs, row) if not run.error]


def speeds(runs: list[Run], row: Row) -> list[float]:
    return [run.speed for run in good_runs(runs, row)]


def is_wide(runs: list[Run], row: Row) -> bool:
    found = speeds(runs, row)
    return bool(found) and max(found) - min(found) > WIDE * statistics.median(found)


def measured_rows(runs: list[Run], *programs: str) -> list[Row]:
    """The rows (of these programs, or of all) with at least one run that went well, in their order."""
    found = dict.fromkeys(run.row for run in runs if not run.error)
    return [row for row in found if not programs or row.program in programs]


def largest(runs: list[Run], program: str) -> Row | None:
    """The program's row with the most processes (and threads); None if no run of it went well."""
    return max(measured_rows(runs, program), key=lambda row: (row.processes, row.threads), default=None)


def fastest_limit(runs: list[Run]) -> Row | None:
    """The limit: the fastest way to train without loader and communication, whatever the number of processes."""
    return max(measured_rows(runs, LIMIT), key=lambda row: statistics.median(speeds(runs, row)), default=None)


def ratio(runs: list[Run], row: Row | None, to: Row | None) -> float | None:
    """The median images/s of `row` divided by that of `to`: what a reader gets from the table."""
    both = [speeds(runs, each) for each in (row, to)]
    return statistics.median(both[0]) / statistics.median(both[1]) if all(both) else None


def _figure(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def _median(values: list[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return _figure(statistics.median(known) if known else None, form)


def _cells(runs: list[Run], row: Row) -> list[str]:
    """The row's cells after its name, processes and precision."""
    good = good_runs(runs, row)
    failed = [run.error for run in counted(runs, row) if run.error]
    if not good:
        words = failed[0] if failed[0].startswith(NOT_INSTALLED) else f"failed: {failed[0]}"
        return [words, *[NONE] * 5]
    speed = measured.spread(speeds(runs, row), "{:,.0f}") + " *" * is_wide(runs, row)
    if failed:
        speed += f"; {len(failed)} of {len(failed) + len(good)} runs failed: {failed[0]}"
    return [
        speed,
        _figure(ratio(runs, row, largest(runs, BASE)), "{:.2f}"),
        _figure(ratio(runs, row, fastest_limit(runs)), "{:.0%}"),
        _median([run.first_step_s for run in good], "{:.1f}"),
        _median([run.accuracies[-1] for run in good if run.correct], "{:.2f}"),
        _median([run.memory_mib for run in good], "{:.0f}"),
    ]


def table(runs: list[Run]) -> str:
    """Markdown."""
    heads = ["program", "processes x threads", "precision", "images/s: median (least to greatest)", "speed-up"]
    rows = [[*heads, "of the limit", "first step, s", "accuracy, %", "memory per process, MiB"]]
    for row in dict.fromkeys(run.row for run in runs):
        rows.append([row.title, row.layout, row.precision, *_cells(runs, row)])
    marked = any(is_wide(runs, row) for row in measured_rows(runs))
    note = f"\n\\* The range is wider than {WIDE:.0%} of the median, in a second series, too.\n"
    return measured.table(rows) + note * marked


def findings(runs: list[Run]) -> str:
    """mnist_ddp.py's images/s beside those of one process, of the limit, and of the loop in plain torch."""
    ddp, one, limit = largest(runs, DDP), largest(runs, BASE), fastest_limit(runs)
    if not ddp:
        return ""
    beside = [f"{ratio(runs, ddp, one):.2f} times those of `{one.program}` ({one.layout})"] if one else []
    beside += [f"{100 * ratio(runs, ddp, limit):.0f} % of the limit"] if limit else []
    for row in measured_rows(runs, PLAIN):
        beside.append(f"{ratio(runs, ddp, row):.2f} times those of the {PEERS[PLAIN]} that loads {WAYS[row.flag]}")
    return f"The images/s of `{ddp.program}` ({ddp.layout}) are {', '.join(beside)}.\n" if beside else ""


def conditions(runs: list[Run]) -> str:
    first, last = min(run.date for run in runs)[:10], max(run.date for run in runs)[:10]
    run = runs[0]
    when = first if first == last else f"{first} to {last}"
    numbers = sorted({len(counted(runs, row)) for row in measured_rows(runs)} or {0})
    repeats = f"{numbers[0]} to {numbers[-1]}" if numbers[1:] else numbers[0]
    taken = (
        f"{run.epochs} epoch{'s' * (run.epochs > 1)} of {run.dataset}, {repeats} run{'s' * (numbers[-1] > 1)} of each"
    )
    return f"{taken}, in alternation, {when}. {run.machine}. {run.versions}.\n"


def markdown(runs: list[Run]) -> str:
    """The whole report: experiments/results/benchmark.md."""
    return "\n".join(filter(None, (table(runs), findings(runs), conditions(runs))))


# --------------------------------------------------------------------------------------------------------- the picture

# Okabe and Ito's colours, which colour-blind people tell apart; they are of different lightness, too.
COLOURS = {BASE: "#444444", "mnist_dataparallel.py": "#CC79A7", DDP: "#E69F00", AMP: "#0072B2"}
PEER_COLOURS = {"": "#DDDDDD", WHOLE: "#AAAAAA"}
PHONE = 13  # points: a picture of this width is half as wide on a phone, and its text must still be read


def picture(runs: list[Run]) -> bytes:
    """PNG: a bar for each row, with the least and the greatest; a black line at the limit."""
    shown = [row for row in measured_rows(runs) if row.program != LIMIT]
    figure, (axes,) = measured.new_picture(1, size=(7, 2.6 + 0.42 * len(shown)))
    axes.grid(visible=False, axis="y")
    longest = max((statistics.median(speeds(runs, row)) for row in shown), default=0)
    for place, row in enumerate(shown):
        found = speeds(runs, row)
        middle = statistics.median(found)
        spread = [[middle - min(found)], [max(found) - middle]]
        colour = COLOURS.get(row.program, PEER_COLOURS[row.flag])
        axes.barh(place, middle, 0.7, color=colour, xerr=spread, capsize=3, ecolor="#777777")
        short = middle < 0.2 * longest  # then the figure stands after the bar
        colour = "white" if row.program in (BASE, AMP) and not short else "black"
        axes.text(max(found) if short else 0, place, f" {middle:,.0f}", va="center", color=colour, fontsize=PHONE)
    limit = fastest_limit(runs)
    if limit:
        fast = statistics.median(speeds(runs, limit))
        axes.axvline(fast, color="black", linewidth=3)
        axes.text(fast, -0.75, f"limit: {fast:,.0f} ", ha="right", va="bottom", fontsize=PHONE, weight="bold")
    names = [f"{row.title}  {row.layout}" for row in shown]
    axes.set_yticks(range(len(shown)), [name.replace(", ", ",\n", 1) for name in names], fontsize=PHONE - 2)
    axes.set_ylim(len(shown) - 0.4, -1.4)  # the first at the top, below the limit's name
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="x", labelsize=PHONE - 2)
    axes.set_xlabel("images per second (median, least, greatest)", fontsize=PHONE)
    figure.suptitle("How fast each program trains", fontsize=PHONE + 2)
    notes = (
        "1 x 2: one process with two threads.  2 x 1: two processes with one thread each.\n"
        "Black line: the median of the same training without loader and communication."
    )
    figure.supxlabel(f"{notes}\n{runs[0].machine}", fontsize=PHONE - 2, color="0.25")
    return measured.png(figure)
