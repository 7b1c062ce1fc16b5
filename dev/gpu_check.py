"""Tests this project on a machine with GPUs, in at most 8 minutes, without a network.

    python -m dev.gpu_check                         # all GPUs that torch sees
    python -m dev.gpu_check --report report.json    # also a report without names of people or machines, to send in
    python -m dev.gpu_check --out FOLDER            # for each part's output, the picture and the trace
    python -m dev.gpu_check mnist picture           # only the parts whose names begin so
    python -m dev.gpu_check --dry-run               # two batches of each program: to see that all of it runs

It prints a table in Markdown and, with --report, the row of this run for docs/results.md.  If a part fails, the others
still run.  Exit code 0 if every part succeeded, else 1; 2 if there is no GPU.
"""

import argparse
import collections
import datetime
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 470  # seconds for all parts together
PER_CARD = "one process per card"
SCRIPTS = "mnist_single", "mnist_ddp", "mnist_amp", "cifar10_ddp"
SPEEDS = [f"{script}, {PER_CARD}" for script in SCRIPTS]
COLUMNS = "equivalence of min_DDP", *SPEEDS, "ratios of a step", "tests/gpu"  # of the row
RATIOS = ("mnist_ddp", "mnist_single"), ("mnist_amp", "mnist_ddp")
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
    read: Callable[[str], dict]  # returns what the output says; {} if it doesn't


class Answer(NamedTuple):
    text: str  # for the table
    seconds: float
    found: dict  # for the report: what `read` returned, and "failed" if the part did


# ----------------------------------------------------------------------------------------- the machine


def describe() -> dict:
    """Return the GPUs, the versions and this project's commit.  Ends the program if there is no GPU."""
    code, output = run([sys.executable, "-c", DESCRIBE], 120, {})
    if code:
        sys.exit(f"gpu_check: torch can't be used (pip install -r requirements.txt):\n{output}")
    found = json.loads(output.splitlines()[-1])
    cards = found.pop("cards")
    if not cards:
        print("gpu_check: torch sees no GPU; to find out why, type  python -m ddp_by_diff.doctor", file=sys.stderr)
        raise SystemExit(2)
    git = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]  # not a repository around this folder
    return {
        "gpus": dict(collections.Counter(cards)),
        "driver": first_word("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        **found,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": str(datetime.date.today()),
        "commit": first_word(*git, "describe", "--always", "--dirty", "--exclude=*"),
    }


def first_word(*command: str) -> str:
    """Return the first word that a program prints, or "unknown" if there is no such program, or it fails."""
    code, output = run([*command], 30, {}) if shutil.which(command[0]) else (1, "")
    return "unknown" if code else output.split()[0]


def names_of(gpus: dict[str, int]) -> str:
    return ", ".join(f"{number} x {card}" for card, number in gpus.items())


def versions(about: dict) -> str:
    template = "driver {driver}, CUDA {cuda}, NCCL {nccl}, torch {torch}, Python {python}, {system}, {date}"
    return f"{template}, commit {{commit}}".format(**about)


# ------------------------------------------------------------------------------------------- the parts


def all_parts(cards: int, folder: Path, is_dry: bool) -> list[Part]:
    """The parts in the order in which they run; the longest comes last."""
    shared = {"NPROC": "2", "DIST_BACKEND": "gloo"}  # two processes on one card
    several = {} if cards > 1 else shared
    first_card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    on_one = shared | {"CUDA_VISIBLE_DEVICES": first_card}
    data = ["--dataset", "synthetic"]
    parts = [Part("equivalence of min_DDP", ["-m", "ddp_by_diff.equivalence", "min_DDP.py"], 90, several, verdict)]
    for script in SCRIPTS:
        for how, environment in (PER_CARD, {}), ("two on one card, gloo", on_one):
            if script == "mnist_single" and environment:
                continue
            command = [f"{script}.py", *data, *(["--dry-run", "--batch-size", "40"] if is_dry else ["--epochs", "3"])]
            if script == "cifar10_ddp":
                command += ["--run-dir", str(folder / f"cifar10_{len(parts)}")]
            parts.append(Part(f"{script}, {how}", command, 60, environment, last_epoch))
    step = ["-m", "dev.step_ratios", *(["--rounds", "1", "fused"] if is_dry else ["--rounds", "7"])]
    parts.append(Part("ratios of a step", step, 90, {}, step_ratios))
    picture = ["-m", "ddp_by_diff.timeline", "--steps", "5", "--out", str(folder / "step")]
    picture += ["mnist_ddp.py", *data, "--epochs", "1"]
    parts.append(Part("picture of a step", picture, 90, several, lambda _: written(folder, "step.svg")))
    tests = ["-m", "pytest", "-o", "addopts=", "-m", "gpu", "-rfEs", "-q", "tests/gpu"]  # works without pytest-xdist
    tests += ["-k", "test_one_gpu"] if is_dry else []
    parts.append(Part("tests/gpu", tests, 300, {}, counts))
    return parts


def verdict(output: str) -> dict:
    found = re.search(r"^verdict +(.+)", output, re.MULTILINE)
    return {"verdict": found[1]} if found else {}


def last_epoch(output: str) -> dict:
    """Return the figures of the last epoch: in the first epochs libraries are loaded and memory is allocated."""
    last = re.findall(r"^epoch \d.*", output, re.MULTILINE)[-1:]
    patterns = {"loss": r"loss ([\d.]+)", "accuracy, %": r"(?:accuracy|test) ([\d.]+)%", "images/s": r"(\d+) images/s"}
    found = {name: re.search(pattern, "".join(last)) for name, pattern in patterns.items()}
    return {name: float(match[1]) for name, match in found.items()} if all(found.values()) else {}


def step_ratios(output: str) -> dict:
    found = re.findall(r"^\| `(.+?)` \| [\d.]+ \| ([\d.]+) \|", output, re.MULTILINE)
    return {"ratios of a step": {change: float(ratio) for change, ratio in found}} if found else {}


def written(folder: Path, pattern: str) -> dict:
    files = ", ".join(sorted(file.name for file in folder.glob(pattern)))
    return {"files": files} if files else {}


def counts(output: str) -> dict:
    found = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", output.splitlines()[-1])
    return {"tests": ", ".join(found)} if found else {}


def in_words(found: dict) -> str:
    if "loss" in found:
        return f"loss {found['loss']:.4f}, accuracy {found['accuracy, %']:.2f} %, {found['images/s']:,.0f} images/s"
    if "ratios of a step" in found:
        return ", ".join(f"{change} {ratio}" for change, ratio in found["ratios of a step"].items())
    return found.get("verdict") or found.get("tests") or found.get("files") or ""


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
        return Answer("NOT RUN: the time was up", 0, {"failed": "NOT RUN"})
    limit = None if left == math.inf else min(part.limit, left)
    code, output = run([sys.executable, *part.command], limit, part.environment)
    seconds = time.monotonic() - started
    name = re.sub(r"\W+", "_", part.name)
    (folder / f"{name}.log").write_text(output, encoding="utf-8")
    lines = output.strip().splitlines() or ["no output"]
    found = part.read("\n".join(lines))
    if code == 0 and found:
        return Answer(in_words(found), seconds, found)
    print("\n".join(lines[-15:]), flush=True)
    failed = f"NOT FINISHED in {limit:.0f} s" if code is None else f"FAILED (exit code {code})"
    text = f"{failed}: {in_words(found) or lines[-1][:100]} ({name}.log)"
    return Answer(text, seconds, found | {"failed": failed})


def report(about: dict, answers: dict[str, Answer]) -> dict:
    """Return what docs/results.md needs of a run; it is written in less than 3 kB.

    It quotes no error, because an error can name a folder or a machine.
    """
    parts = {name: answer.found | {"seconds": round(answer.seconds)} for name, answer in answers.items()}
    speeds = {name.removesuffix(f", {PER_CARD}"): part.get("images/s") for name, part in parts.items()}
    pairs = [(name, parent) for name, parent in RATIOS if speeds.get(name) and speeds.get(parent)]
    ratios = {f"{name} / {parent}": round(speeds[name] / speeds[parent], 2) for name, parent in pairs}
    cells = [f"{names_of(about['gpus'])}, a reader's run"]
    for name in COLUMNS:
        part = parts.get(name, {"failed": "NOT RUN"})
        cells.append(": ".join(filter(None, [part.get("failed"), in_words(part)])))
    cells.append(", ".join(f"{name}: {ratio}" for name, ratio in ratios.items()))
    cells.append(f"`{about['command']}`, {versions(about)}")
    return about | {"parts": parts, "ratios of images/s": ratios, "row": as_row(cells)}


def as_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def table(answers: dict[str, Answer]) -> str:
    rows = [as_row([name, answer.text, f"{answer.seconds:.0f}"]) for name, answer in answers.items()]
    return "\n".join(["| part | result | seconds |", "|---|---|---|", *rows])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_check", help="a folder (default: %(default)s)")
    parser.add_argument("--report", metavar="FILE", help="write a report for docs/results.md to this file")
    parser.add_argument("--dry-run", action="store_true", help="two batches of each program, without limits of time")
    parser.add_argument("names", nargs="*", help="names of parts, or how they begin (default: all parts)")
    args = parser.parse_args()
    if args.report and not Path(args.report).absolute().parent.is_dir():
        parser.error(f"--report {args.report}: there is no such folder")
    os.makedirs(args.out, exist_ok=True)
    if os.listdir(args.out):
        parser.error(f"--out {args.out}: there are files in it, which would be taken for new ones: choose another")
    return args


def main() -> int:
    args = parse_args()
    folder = Path(args.out).resolve()
    deadline = time.monotonic() + (math.inf if args.dry_run else LIMIT)
    command = " ".join(["python -m dev.gpu_check", *args.names, *(["--dry-run"] if args.dry_run else [])])
    about = {"command": command} | describe()
    title = f"`{command}`: {names_of(about['gpus'])}, {versions(about)}"
    print(title, flush=True)
    answers = {}
    for part in all_parts(sum(about["gpus"].values()), folder, args.dry_run):
        if args.names and not part.name.startswith(tuple(args.names)):
            continue
        answer = check(part, folder, deadline - time.monotonic())
        answers[part.name] = answer
        print(f"{part.name}: {answer.text} ({answer.seconds:.0f} s)", flush=True)
    text = f"{title}\n\n{table(answers)}\n"
    print(f"\n{text}", flush=True)
    (folder / "table.md").write_text(text, encoding="utf-8")
    if args.report:
        found = report(about, answers)
        Path(args.report).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        names = ["GPUs", *(name.partition(",")[0] for name in COLUMNS), "ratios of images/s", "command and versions"]
        print(f"The row of this run for docs/results.md; please send it in an issue ({args.report} has more):\n")
        print(as_row(names), "|---" * len(names) + "|", found["row"], sep="\n")
    return int(any("failed" in answer.found for answer in answers.values()))


if __name__ == "__main__":
    sys.exit(main())
