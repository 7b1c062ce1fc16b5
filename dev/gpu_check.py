"""Tests this project on a machine with GPUs, in at most 8 minutes, without a network.

    python -m dev.gpu_check                     # all GPUs that torch sees
    python -m dev.gpu_check --out FOLDER        # for each part's output, the picture and the trace
    python -m dev.gpu_check mnist picture       # only the parts whose names begin so
    python -m dev.gpu_check --dry-run           # two batches of each program: to see that all of it runs

It ends with a table in Markdown, for docs/results.md or an issue.  What fails is said, and the rest runs.
Exit code 0 if all of it was right, else 1; 2 if there is no GPU.
"""

import argparse
import datetime
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 470  # seconds for all parts together
PACKAGES = "torch torchvision numpy PIL filelock tqdm tensorboard matplotlib pytest pytest_timeout"
DESCRIBE = """
import json, torch
cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
names = [f"{card.name} ({card.major}.{card.minor}, {card.total_memory >> 20} MiB)" for card in cards]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
print(json.dumps({"cards": names, "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}))
"""


class Part(NamedTuple):
    name: str
    command: list[str]
    limit: int  # seconds
    environment: dict[str, str]
    read: Callable[[str], str]  # of the output, what stands in the table; "" if it isn't there


class Answer(NamedTuple):
    text: str
    seconds: float
    is_right: bool


# ----------------------------------------------------------------------------------------- the machine


def describe() -> dict:
    """The GPUs, and the versions of torch and of NVIDIA's libraries.  Ends the program if there is no GPU."""
    code, output = run([sys.executable, "-c", DESCRIBE], 120, {})
    if code:
        sys.exit(f"gpu_check: torch can't be used (pip install -r requirements.txt):\n{output}")
    found = json.loads(output.splitlines()[-1])
    if not found["cards"]:
        print("gpu_check: torch sees no GPU: python -m ddp_by_diff.doctor says more", file=sys.stderr)
        raise SystemExit(2)
    question = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    has_smi = shutil.which(question[0])
    code, output = run(question, 30, {}) if has_smi else (1, "")
    found["driver"] = "unknown (no nvidia-smi)" if code else output.split()[0]
    return found


def headline(found: dict) -> str:
    cards = ", ".join(f"{found['cards'].count(card)} x {card}" for card in sorted({*found["cards"]}))
    versions = f"driver {found['driver']}, CUDA {found['cuda']}, NCCL {found['nccl']}, torch {found['torch']}"
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return f"`python -m dev.gpu_check`: {cards}, {versions}, {system}, {datetime.date.today()}"


def lacking() -> list[str]:
    """The packages that are not installed; the parts that need them will fail."""
    missing = [name for name in PACKAGES.split() if not importlib.util.find_spec(name)]
    lines = [f"not installed: {name} (pip install -r requirements.txt)" for name in missing]
    if not shutil.which("g++"):
        lines.append("not installed: g++, which torch.compile and the simulated GPUs need")
    return lines


# ------------------------------------------------------------------------------------------- the parts


def all_parts(cards: int, folder: Path, is_dry: bool) -> list[Part]:
    """The parts in the order in which they run; the longest comes last."""
    shared = {"NPROC": "2", "DIST_BACKEND": "gloo"}  # two processes on one card
    several = {} if cards > 1 else shared
    first_card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    on_one = shared | {"CUDA_VISIBLE_DEVICES": first_card}
    data = ["--dataset", "synthetic"]
    parts = [Part("equivalence of min_DDP", ["-m", "ddp_by_diff.equivalence", "min_DDP.py"], 90, several, verdict)]
    for script in "mnist_single", "mnist_ddp", "mnist_amp", "cifar10_ddp":
        for how, environment in ("one process per card", {}), ("two on one card, gloo", on_one):
            if script == "mnist_single" and environment:
                continue
            command = [f"{script}.py", *data, *(["--dry-run", "--batch-size", "40"] if is_dry else ["--epochs", "3"])]
            if script == "cifar10_ddp":
                command += ["--run-dir", str(folder / f"cifar10_{len(parts)}")]
            parts.append(Part(f"{script}, {how}", command, 60, environment, speed))
    picture = [
        "-m",
        "ddp_by_diff.timeline",
        "--steps",
        "5",
        "--out",
        str(folder / "step"),
        "mnist_ddp.py",
        *data,
        "--epochs",
        "1",
    ]
    parts.append(Part("picture of a step", picture, 90, several, lambda _: written(folder, "step.svg")))
    tests = ["-m", "pytest", "-o", "addopts=", "-m", "gpu", "-rfEs", "-q", "tests/gpu"]  # works without pytest-xdist
    tests += ["-k", "test_one_gpu"] if is_dry else []
    parts.append(Part("tests/gpu", tests, 300, {}, counts))
    return parts


def verdict(output: str) -> str:
    found = re.search(r"^verdict +(.+)", output, re.MULTILINE)
    return found[1] if found else ""


def speed(output: str) -> str:
    """The images/s of the last epoch: in the first epochs libraries are loaded and memory is allocated."""
    found = re.findall(r"(\d+) images/s", output)
    return f"{int(found[-1]):,} images/s" if found else ""


def written(folder: Path, pattern: str) -> str:
    return ", ".join(sorted(file.name for file in folder.glob(pattern)))


def counts(output: str) -> str:
    return ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", output.splitlines()[-1]))


# ------------------------------------------------------------------------------------------------ runs


def run(command: list[str], limit: float | None, environment: dict[str, str]) -> tuple[int | None, str]:
    """Run a command; returns its exit code (None if the time was up) and its output."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks of `launch` end with it
        return None, process.communicate()[0]
    finally:
        if process.poll() is None:  # Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)


def check(part: Part, folder: Path, left: float) -> Answer:
    """Run a part; its output goes into the folder."""
    started = time.monotonic()
    if left < 5:
        return Answer("NOT RUN: the time was up", 0, False)
    limit = None if left == math.inf else min(part.limit, left)
    code, output = run([sys.executable, *part.command], limit, part.environment)
    seconds = time.monotonic() - started
    name = re.sub(r"\W+", "_", part.name)
    (folder / f"{name}.log").write_text(output, encoding="utf-8")
    lines = output.strip().splitlines() or ["no output"]
    text = part.read("\n".join(lines))
    if code == 0 and text:
        return Answer(text, seconds, True)
    print("\n".join(lines[-15:]), flush=True)
    if code is None:
        return Answer(f"NOT FINISHED in {limit:.0f} s ({name}.log)", seconds, False)
    return Answer(f"FAILED: {text or lines[-1][:100]} ({name}.log)", seconds, False)


def table(answers: dict[str, Answer]) -> str:
    rows = ["| part | result | seconds |", "|---|---|---|"]
    for name, answer in answers.items():
        text = answer.text.replace("|", "\\|")
        rows.append(f"| {name} | {text} | {answer.seconds:.0f} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_check", help="a folder (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="two batches of each program, without limits of time")
    parser.add_argument("names", nargs="*", help="of parts, or how they begin (default: all)")
    args = parser.parse_args()
    folder = Path(args.out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--out {args.out}: there are files in it, which would be taken for new ones: choose another")
    deadline = time.monotonic() + (math.inf if args.dry_run else LIMIT)
    found = describe()
    title = headline(found)
    print(title, *lacking(), sep="\n", flush=True)
    answers = {}
    for part in all_parts(len(found["cards"]), folder, args.dry_run):
        if args.names and not part.name.startswith(tuple(args.names)):
            continue
        answer = check(part, folder, deadline - time.monotonic())
        answers[part.name] = answer
        print(f"{part.name}: {answer.text} ({answer.seconds:.0f} s)", flush=True)
    text = f"{title}\n\n{table(answers)}\n"
    print(f"\n{text}", flush=True)
    (folder / "table.md").write_text(text, encoding="utf-8")
    return int(not all(answer.is_right for answer in answers.values()))


if __name__ == "__main__":
    sys.exit(main())
