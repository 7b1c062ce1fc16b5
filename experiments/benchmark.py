"""What each step buys: runs the scripts of the progression as a user would, and compares them.

    python -m experiments.benchmark --limit --baseline                 # the progression, the limit, and what others do
    python -m experiments.benchmark --repeats 1                        # quick: the progression, once
    python -m experiments.benchmark --limit --baseline --resume        # goes on after Ctrl-C

Writes benchmark.csv (a line per run), .md and .png to experiments/results/.  Each run is a process of its own that
starts the unchanged script.  The programs take turns (A B C A B C), so that a machine that slows down is fair to all.
Each turn has its own --seed.

images/s          training only, as the program prints it: the median over the epochs of a run, without the first epoch
                  if there are several; in the table the median, least and greatest over the repeats
speed-up          median images/s divided by those of mnist_single.py, which uses all cores in one process
the limit         baselines/limit.py trains without loader and communication.  It runs with each number of processes;
                  the fastest of these rows is the limit, in float32
first step        seconds from the start of the command (so with imports, data and starting processes) to the end of
                  the first optimizer step; the median
memory            the greatest peak resident set size of the command's processes (wait4's ru_maxrss), on the host

A row whose range is wider than a fifth of its median is measured once more.  If it is as wide again, it is marked.

Every program may use all cores: processes x threads = cores.  `launch` sees to that by itself; for the baselines
OMP_NUM_THREADS is set, as torchrun tells its users to.  Every program keeps the memory that a step frees: the scripts
by data.py; the baselines get the same two limits (MALLOC_LIMITS) as environment variables.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from experiments import measured
from experiments.benchmark_results import (
    AMP,
    BASE,
    DATASETS,
    DDP,
    LIMIT,
    NOT_INSTALLED,
    PLAIN,
    WAYS,
    Row,
    Run,
    counted,
    from_csv,
    is_wide,
    markdown,
    picture,
    to_csv,
)
from experiments.measured import ROOT, Machine

SCRIPTS = ["mnist_single.py", "mnist_dataparallel.py", "mnist_ddp.py", "mnist_amp.py"]
ONE_PROCESS = SCRIPTS[:2]  # the others take --nproc
DATAPARALLEL = SCRIPTS[1]  # without several GPUs it computes what its parent does: a row would show chance only
BASELINES = {  # the module that each needs, and the package that has it
    "experiments/baselines/plain_ddp.py": ("torch", "torch"),
    "experiments/baselines/with_ignite.py": ("ignite", "pytorch-ignite"),
    "experiments/baselines/with_accelerate.py": ("accelerate", "accelerate"),
    "experiments/baselines/with_fabric.py": ("lightning", "lightning"),
}
STOP_GRACE = 40  # seconds for a run to end after SIGTERM; torchrun takes up to 30
ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b(?<!ChildFailedError).*)", re.MULTILINE)
LOST = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")  # torchrun's words for a process that was killed


# ------------------------------------------------------------------------------------------------------ what to measure

# With torch, so not in this process.
PREPARE = "import sys, data; data.prepare(*sys.argv[1:], error=sys.exit)"
MALLOC_LIMITS = {  # what data.py sets with mallopt, as environment variables; in bytes
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(1024 * 2**20),
}


def look(dataset: str, data_dir: str, error: Callable[[str], None]) -> tuple[Machine, dict[str, str]]:
    """This machine, and MALLOC_LIMITS; the data set is prepared, too.

    What can't run is a call of `error` with one line.
    """
    command = [sys.executable, "-c", PREPARE, dataset, os.path.abspath(data_dir)]
    done = subprocess.run(command, cwd=ROOT, env=measured.environment(), capture_output=True, text=True)
    if done.returncode:
        error(reason(done.stderr, done.returncode))
    return measured.machine(), MALLOC_LIMITS


def conditions_of(args: argparse.Namespace) -> dict:
    """What all runs of a table have in common."""
    packages = ["torchvision"]
    packages += [package for module, package in BASELINES.values() if module != "torch" and find_spec(module)]
    versions = [f"Python {platform.python_version()}", f"torch {args.machine.torch}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return {
        "dataset": args.dataset,
        "epochs": args.epochs,
        "machine": args.machine.name,
        "versions": ", ".join(versions),
    }


def plan(args: argparse.Namespace, machine: Machine) -> list[Row]:
    """The lines of the table, in its order; each uses all cores."""
    most = max(args.nproc)
    share = max(1, machine.cores // most)  # of the greatest number of processes
    found = []
    for script in args.scripts:
        precision = machine.half if script == AMP else "fp16" if script == "mnist_apex.py" else "fp32"
        if script in ONE_PROCESS:
            found.append(Row(script, 1, machine.cores, precision))
        elif script == DDP:
            found += [Row(script, n, max(1, machine.cores // n), precision) for n in args.nproc]
        else:
            found.append(Row(script, most, share, precision))
    if args.limit:
        found += [row._replace(program=LIMIT) for row in found if row.program in (BASE, DDP)]
    if args.baseline:
        found += [Row(program, most, share, "fp32", flag) for flag in WAYS for program in BASELINES]
    return list(dict.fromkeys(found))


def repeats(row: Row, args: argparse.Namespace) -> int:
    """All for what `findings` quotes; at most three of the others."""
    quoted = row.program in (BASE, LIMIT, PLAIN) or (row.program == DDP and row.processes == max(args.nproc))
    return args.repeats if quoted else min(args.repeats, 3)


# ------------------------------------------------------------------------------------------------------------- one run


def command(row: Row, args: argparse.Namespace, seed: int = 0) -> tuple[list[str], dict[str, str]]:
    """The command that runs the row's program, and its environment."""
    timed = ["-m", "experiments.baselines.timed", row.program.removesuffix(".py").replace("/", ".")]
    flags = ["--dataset", args.dataset, "--data-dir", os.path.abspath(args.data_dir), "--epochs", str(args.epochs)]
    flags += ["--seed", str(seed)]
    threads = {"OMP_NUM_THREADS": str(row.threads)}
    if row.program in BASELINES:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={row.processes}"]
        flags += [row.flag] if row.flag else []
        return [sys.executable, *torchrun, *timed, *flags], measured.environment(**threads, **args.malloc)
    variables = args.malloc if row.program == LIMIT else {}  # the scripts' data.py does the same by itself
    if row.program not in ONE_PROCESS:
        flags += ["--nproc", str(row.processes)]
    if row.threads != max(1, args.machine.cores // row.processes):  # the number that `launch` chooses by itself
        variables = variables | threads
    return [sys.executable, *timed, *flags], measured.environment(**variables)


def reason(stderr: str, code: int) -> str:
    """Why a program failed, in one line: its first exception, or else its last words."""
    if found := ERROR.search(stderr):
        return found[1].strip()
    if found := LOST.search(stderr):
        return f"local rank {found[2]} ended with exit code {found[1]}"
    if words := stderr.strip():
        return words.splitlines()[-1].strip()
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}, without a word"


def lines(process: subprocess.Popen, limit: float) -> Iterator[str]:
    """What the process prints, line by line; TimeoutError if that has not ended after `limit` seconds."""
    rest, deadline = b"", time.monotonic() + limit
    while select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
        chunk = os.read(process.stdout.fileno(), 65536)
        if not chunk:
            return
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    raise TimeoutError(f"not finished after {limit:g} s (--timeout)")


def note(run: Run, text: str, seconds: float) -> None:
    """Take over what a line tells; seconds since the start of the command."""
    if text == measured.FIRST_STEP:
        run.first_step_s = round(seconds, 2)
    epoch = measured.read_epoch(text)
    if epoch:
        run.epoch_s.append(round(seconds, 2))
        run.loss.append(epoch.loss)
        run.images_per_s.append(epoch.images_per_s)
        if epoch.count:
            run.correct.append(epoch.correct)
            run.count = epoch.count


def end(process: subprocess.Popen) -> None:
    """Stop it and all that it has started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure(run: Run, args: argparse.Namespace, **more: str) -> None:
    """Fill in the figures of one run, or its error; more: environment variables."""
    module, package = BASELINES.get(run.program, ("torch", "torch"))
    if not find_spec(module):
        run.error = f"{NOT_INSTALLED}: pip install {package}"
        return
    line, variables = command(run.row, args, seed=run.repeat - 1)
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "stderr"), "w+", errors="replace") as stderr:
        started = time.monotonic()
        options = {"cwd": folder, "env": variables | more, "stdin": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=stderr, **options)
        try:
            for text in lines(process, args.timeout):
                note(run, text, time.monotonic() - started)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            run.memory_mib = round(usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10))  # bytes or KiB
        except TimeoutError as problem:
            run.error = str(problem)
        finally:
            if process.returncode is None:
                end(process)
            process.stdout.close()
        stderr.seek(0)
        if process.returncode and not run.error:
            run.error = reason(stderr.read(), process.returncode)
        elif not run.error and len(run.images_per_s) != args.epochs:
            run.error = f"it printed {len(run.images_per_s)} epoch lines instead of {args.epochs}"


# --------------------------------------------------------------------------------------------------------- the program


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", help="(default: the progression)")
    parser.add_argument("--nproc", nargs="+", type=int, help="numbers of processes (default: 1, 2, 4, ... devices)")
    parser.add_argument("--epochs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--dataset", default="synthetic", choices=DATASETS, help="(default: %(default)s)")
    parser.add_argument("--data-dir", default="data", help="data sets are kept here (default: %(default)s)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="of the rows that the summary names (default: %(default)s); at most 3 of the others",
    )
    parser.add_argument("--limit", action="store_true", help="add training without loader and communication")
    parser.add_argument("--baseline", action="store_true", help="add plain DDP, Ignite, Accelerate and Fabric")
    parser.add_argument("--resume", action="store_true", help="keep what --output has, and measure what is missing")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one run (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=measured.RESULTS, help="folder (default: experiments/results)")
    args = parser.parse_args()
    if min(args.epochs, args.repeats, *(args.nproc or [1])) < 1 or not args.timeout > 0:
        parser.error("--epochs, --repeats and --nproc must be at least 1, --timeout greater than 0")
    missing = [script for script in args.scripts or [] if Path(script).is_absolute() or not (ROOT / script).is_file()]
    if missing:
        parser.error(f"--scripts: there is no {missing[0]} in {ROOT}")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        parser.error(f"--output: can't make {args.output} ({problem.strerror})")
    args.machine, args.malloc = look(args.dataset, args.data_dir, parser.error)
    several_gpus = len(args.machine.gpus) > 1
    args.scripts = args.scripts or [name for name in SCRIPTS if several_gpus or name != DATAPARALLEL]
    devices = len(args.machine.gpus) or args.machine.cores
    args.nproc = sorted(set(args.nproc or [*(2**i for i in range(devices.bit_length())), devices]))
    args.runs = stored(args, parser.error) if args.resume else []
    return args


def stored(args: argparse.Namespace, error: Callable[[str], None]) -> list[Run]:
    """The good runs of --output; they must have been taken under the conditions of those to come."""
    path = args.output / "benchmark.csv"
    try:
        runs = [run for run in from_csv(path) if not run.error]
    except ValueError as problem:
        error(f"--resume: {problem}")
    for name, now in conditions_of(args).items():
        before = {getattr(run, name) for run in runs} - {now}
        if before:
            error(f"--resume: {path}: {name} was {before.pop()}, and is {now} now: take another --output")
    return runs


def turns(args: argparse.Namespace, rows: list[Row], attempt: int) -> list[tuple[Row, int, int]]:
    """Row, attempt, repeat: in alternation."""
    return [
        (row, attempt, repeat) for repeat in range(1, args.repeats + 1) for row in rows if repeat <= repeats(row, args)
    ]


def to_do(args: argparse.Namespace, rows: list[Row], runs: list[Run]) -> list[tuple[Row, int, int]]:
    """What is missing: the first attempts; when they are complete, the second ones of the rows with a wide range."""
    done = {(run.row, run.attempt, run.repeat) for run in runs}
    first = [turn for turn in turns(args, rows, 1) if turn not in done]
    if first:
        return first
    of_first = [run for run in runs if run.attempt == 1]
    again = [row for row in rows if is_wide(of_first, row)]
    return [turn for turn in turns(args, again, 2) if turn not in done]


def take_turns(args: argparse.Namespace, rows: list[Row]) -> Iterator[Run]:
    """Measure what is missing in args.runs, and yield each run; the caller adds it to args.runs."""
    started, number = time.monotonic(), 0
    while missing := to_do(args, rows, args.runs):
        row, attempt, repeat = missing[0]
        head = f"{len(missing)} runs to do: {row.title}, {row.layout}, {'again, ' * (attempt - 1)}repeat {repeat}"
        if number:
            head += f"; about {(time.monotonic() - started) / number * len(missing) / 60:.0f} min left"
        print(head, file=sys.stderr, flush=True)
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        run = Run(*row, attempt=attempt, repeat=repeat, date=date, **conditions_of(args))
        measure(run, args)
        number += 1
        yield run


def interrupt(number: int, frame: object) -> None:
    """Ctrl-C ends it with exit code 130, SIGTERM with 143."""
    raise KeyboardInterrupt(number)


def benchmark(args: argparse.Namespace) -> int:
    """Measure and report; returns the exit code."""
    rows, code = plan(args, args.machine), 0
    order = {row: place for place, row in enumerate(rows)}
    again = shlex.join(["python", "-m", "experiments.benchmark", *sys.argv[1:], *([] if args.resume else ["--resume"])])
    try:
        try:
            for run in take_turns(args, rows):
                args.runs.append(run)
                args.runs.sort(key=lambda run: (order.get(run.row, len(order)), run.attempt, run.repeat))
                to_csv(args.output / "benchmark.csv", args.runs)  # in the table's order; rows of before come last
        except KeyboardInterrupt as stop:
            code = 128 + (stop.args[0] if stop.args else signal.SIGINT)
            print(f"stopped; {len(args.runs)} runs are kept. To go on, type  {again}", file=sys.stderr)
        if args.runs:
            report = markdown(args.runs)
            measured.write(args.output / "benchmark.md", report.encode())
            measured.write(args.output / "benchmark.png", picture(args.runs))
            print(report, end="")
    except OSError as problem:
        sys.exit(f"benchmark.py: can't write to {args.output} ({problem.strerror}). Then go on with  {again}")
    of_rows = [run for row in rows for run in counted(args.runs, row)]
    return code or int(any(run.error and not run.error.startswith(NOT_INSTALLED) for run in of_rows))


def main() -> int:
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)  # a shell's `python -m experiments.benchmark &` ignores it unasked
    try:
        return benchmark(parse_args())
    except KeyboardInterrupt as stop:  # before or after the runs
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
