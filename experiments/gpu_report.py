"""What a machine with GPUs shows, in one text file to send in: ten minutes or less.

    python doctor.py --report              # the same as  python -m experiments.gpu_report
    python doctor.py --report my.txt       # another file than gpu_report.txt

Runs the doctor, the tests in tests/gpu, the equivalence proof and the benchmark, one after the other; each is stopped
when its time is over, and what it has said until then is kept.  The file has no name, address or path of the machine
(redact.py takes them out): read it before you send it.  Exit code 0 if all went well, 1 if not, 2 if there is no GPU.
"""

import argparse
import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from experiments import benchmark_results
from experiments.measured import ROOT
from experiments.redact import without_names

SIMULATED = "Simulated GPU"  # how tests/simulated_gpus names its cards
ALL = 600  # seconds for all parts; the tests, which come last, have what the others leave


class Part(NamedTuple):
    """A program of the report."""

    title: str
    command: list[str]  # after `python`
    limit: float  # seconds


class Outcome(NamedTuple):
    code: int | None  # None: stopped when its time was over
    text: str  # what it printed, stdout and stderr together
    seconds: float


def parts(folder: str) -> list[Part]:
    """What is run before the tests; the programs that store results store them in this folder."""
    return [
        Part("doctor", ["doctor.py"], 60),
        Part("equivalence", ["-m", "experiments.equivalence", "--steps", "20", "--output", folder], 120),
        Part("benchmark", ["-m", "experiments.benchmark", "--repeats", "1", "--epochs", "2", "--output", folder], 150),
    ]


def tests(limit: float) -> Part:
    """The tests in tests/gpu.  They end by themselves after the first that is ready when a minute is left."""
    command = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    return Part("tests", [*command, f"--session-timeout={limit - 60:.0f}"], limit)


def run(part: Part) -> Outcome:
    """Run it in a process group of its own, which ends with it, with its time, or with Ctrl-C; say so before."""
    print(f"{part.title}: at most {part.limit:.0f} s", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(part.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Outcome(code, output.read(), time.monotonic() - started)


# ----------------------------------------------------------------------------------------------------------- the report


def summary(outcomes: dict[str, Outcome], folder: str) -> str:
    """A line for the table of docs/gpu_reports.md."""
    described = re.findall(r"^ +\d+: (.+?), (\d+\.\d+), ", outcomes["doctor"].text, re.MULTILINE)
    cards = [f"{name} ({capability})" for name, capability in described]
    gpus = ", ".join(f"{cards.count(card)} x {card}" for card in dict.fromkeys(cards))
    tests = re.findall(r"(\d+ (?:passed|failed|skipped).*?) in [\d.]+s", outcomes["tests"].text)  # pytest's last line
    speeds = [
        f"{run.row.title} {run.processes}: {run.speed:.0f}"
        for run in benchmark_results.from_csv(Path(folder, "benchmark.csv"))
        if not run.error and run.images_per_s
    ]
    if SIMULATED in gpus:
        speeds = ["not measured: the CPU computes"]
    verdicts = [said(outcomes[title]) for title in ("doctor", "equivalence")]
    cells = [
        datetime.date.today().isoformat(),
        gpus or "?",
        torch.__version__,
        verdicts[0],
        tests[-1] if tests else said(outcomes["tests"]),
        verdicts[1],
        ", ".join(speeds) or said(outcomes["benchmark"]),
    ]
    return "| " + " | ".join(cells) + " |"


def said(outcome: Outcome) -> str:
    if outcome.code is None:
        return f"not ready after {outcome.seconds:.0f} s"
    return "all is well" if outcome.code == 0 else f"exit code {outcome.code}"


def report(outcomes: dict[str, Outcome], folder: str) -> str:
    lines = [
        "A report of tests on GPUs, written by  python doctor.py --report",
        "",
        "| date | GPUs | torch | doctor | tests/gpu | equivalence | images/s, by number of processes |",
        "|---|---|---|---|---|---|---|",
        summary(outcomes, folder),
    ]
    for title, outcome in outcomes.items():
        lines += ["", f"== {title}: {said(outcome)}, {outcome.seconds:.0f} s", "", outcome.text.rstrip()]
    return without_names("\n".join(lines)) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="doctor.py --report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path, default="gpu_report.txt", help="(default: %(default)s)")
    path = parser.parse_args(argv).path
    if not torch.cuda.device_count():
        print("doctor.py --report is for machines with GPUs, and torch sees none: python doctor.py", file=sys.stderr)
        return 2
    try:
        path.open("a").close()  # now, not after ten minutes
    except OSError as problem:
        print(f"doctor.py --report: can't write {path} ({problem.strerror})", file=sys.stderr)
        return 2
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {part.title: run(part) for part in parts(folder)}
        outcomes["tests"] = run(tests(ALL - (time.monotonic() - started)))
        path.write_text(report(outcomes, folder), encoding="utf-8")
    print(f"{path} is written. Read it; then open an issue, and attach it. Thank you!")
    return int(any(outcome.code != 0 for outcome in outcomes.values()))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
