"""What the experiments share: starting a program, its accuracies, the machine's name, tables, result files.

A result file, experiments/results/NAME.md, has one line that says how it was measured, and one table.  It is written
only with --save.  tools/build.py copies it to the page with the marker `result: NAME`.
"""

import datetime
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import distributed_launcher as launcher

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
NOT_PASSED_ON = re.compile(  # they would change what is measured
    rf"NPROC|DIST_.*|OMP_NUM_THREADS|MALLOC_.*|GLIBC_TUNABLES|{'|'.join(launcher.LAUNCHER_VARIABLES)}"
)
EPOCH = re.compile(r"epoch \d+/\d+  loss \S+  accuracy (\S+)% \(\d+/\d+\)  \d+ images/s")
NONE = "–"  # a cell without a figure


# -------------------------------------------------------------------------------------------------- running a program


def read_accuracy(line: str) -> float | None:
    """Per cent, of a line such as `epoch 1/3  loss 0.1  accuracy 97.40% (1948/2000)  4581 images/s`; None of others."""
    found = EPOCH.fullmatch(line.rstrip())
    return float(found[1]) if found else None


def environment() -> dict[str, str]:
    """The user's, without what would change a measurement; what is printed comes at once."""
    kept = {name: value for name, value in os.environ.items() if not NOT_PASSED_ON.fullmatch(name)}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return kept | {"PYTHONUNBUFFERED": "1"}


def accuracies(command: Sequence) -> list[float]:
    """Run `python COMMAND` in the project's folder; returns those of its epochs, in per cent.

    RuntimeError, with what it has printed, if it fails or prints no epoch.
    """
    words = [sys.executable, *map(str, command)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    printed, found = [], []
    with subprocess.Popen(words, cwd=ROOT, env=environment(), **pipe) as process:
        for line in process.stdout:
            printed.append(line)
            accuracy = read_accuracy(line)
            if accuracy is not None:
                found.append(accuracy)
    if process.returncode or not found:
        raise RuntimeError(f"exit code {process.returncode}: {shlex.join(words)}\n{''.join(printed)}")
    return found


# -------------------------------------------------------------------------------------------------------- the machine


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def machine() -> str:
    """The devices as the system calls them, with the bfloat16 instructions that make mixed precision fast on a CPU."""
    gpus = torch.cuda.device_count()
    if gpus:
        return f"{gpus} x {torch.cuda.get_device_name(0)}"
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"model name\s*: (.+)", text)
    name = model[1].strip() if model else platform.processor() or "a CPU"
    bf16 = "with" if re.search("avx512_bf16|amx_bf16", text) else "without"
    return f"{cores()} cores of {name} ({bf16} bf16 instructions)"


def conditions(command: str, runs: str) -> str:
    """The line above a table."""
    place = f"{machine()}, {platform.system()} {platform.machine()}, torch {torch.__version__}"
    return f"`{command}`: {place}, {datetime.date.today()}. {runs}"


# ------------------------------------------------------------------------------------------------------------- tables


def table(rows: list[list[str]]) -> str:
    """In Markdown, with equal widths for a terminal; the first row is the head."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + len(widths) * "---|", *lines[1:]]) + "\n"


def spread(values: Sequence[float], form: str = "{:,.0f}") -> str:
    """The median, and the smallest and the largest value if there are several; `form` as for str.format."""
    if not values:
        return NONE
    median = form.format(statistics.median(values))
    if len(values) == 1:
        return median
    return f"{median} ({form.format(min(values))} to {form.format(max(values))})"


def report(name: str, line: str, rows: list[list[str]], save: bool) -> None:
    """Print a line and a table; write them to experiments/results/NAME.md if `save`."""
    text = f"{line}\n\n{table(rows)}"
    print(f"\n{text}", flush=True)
    if save:
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
