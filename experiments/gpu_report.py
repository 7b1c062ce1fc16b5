"""What a machine with GPUs shows, in one text file to send in: ten minutes or less.

    python doctor.py --report              # the same as  python -m experiments.gpu_report
    python doctor.py --report my.txt       # another file than gpu_report.txt

Runs the doctor, the tests in tests/gpu, the equivalence proof and the benchmark, one after the other; each is stopped
when its time is over, and what it has said until then is kept.  The file has no name, address or path of the machine
(see `without_names`): read it before you send it.  Exit code 0 if all of it went well, 1 if not, 2 if there is no GPU.
"""

import argparse
import contextlib
import datetime
import getpass
import os
import re
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from experiments import benchmark_results
from experiments.measured import ROOT

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


# -------------------------------------------------------------------------------------------- what must not be sent in


def known_names() -> list[tuple[str, str]]:
    """(a name of this machine or its user, what stands for it), the longest first."""
    names = {str(ROOT): ".", sysconfig.get_path("stdlib"): "python"}
    names |= {folder: "site-packages" for folder in [*site.getsitepackages(), sysconfig.get_path("purelib")]}
    names |= {name: "HOST" for name in (socket.gethostname(), socket.getfqdn())}
    with contextlib.suppress(Exception):  # a user without a name
        names[getpass.getuser()] = "USER"
    return sorted(((name, word) for name, word in names.items() if name), key=lambda pair: -len(pair[0]))


def without_names(text: str) -> str:
    """The text without what tells who or where: names, addresses, serial numbers, paths outside of this project."""
    for name, word in known_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word, text, flags=re.IGNORECASE)
    text = re.sub(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UUID", text, flags=re.IGNORECASE)
    text = re.sub(r"\b(?:[0-9a-f]{2}:){5,}[0-9a-f]{2}\b", "ADDRESS", text, flags=re.IGNORECASE)  # of a network card
    text = re.sub(r"(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])", _address, text, flags=re.IGNORECASE)
    text = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", lambda m: m[0] if m[0] == "127.0.0.1" else "ADDRESS", text)
    return re.sub(r"(?<![\w.%~-])(?<!https:/)~?(?:/[\w.+@%~-]+)+/?", "PATH", text)


def _address(m: re.Match) -> str:
    """IPv6; but a time of day such as 12:30:05, and `::` in the name of a test, are none."""
    is_time = re.fullmatch(r"\d{1,2}:\d{2}:\d{2}", m[0])
    return m[0] if is_time or m[0].strip(":") == "" else "ADDRESS"


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
