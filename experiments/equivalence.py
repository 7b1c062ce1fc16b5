"""Is it the same as one process?  The table of docs/results.md, made by equivalence/ itself.

python -m experiments.equivalence                # all programs, with 3 processes: 8 minutes
python -m experiments.equivalence min_DDP sum    # some
python -m experiments.equivalence --save         # writes experiments/results/equivalence.md
"""

import argparse
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

from demos.ways import WAYS
from experiments import measured

PROCESSES = 3  # with two a wrong factor can look right: tests hold both


class Program(NamedTuple):
    name: str
    command: str


def programs() -> list[Program]:
    found = [Program("min_DDP", "min_DDP.py")]
    for name in "mnist_ddp", "mnist_ddp_plain", "mnist_amp":
        found.append(Program(name, f"{name}.py --dataset synthetic --batch-size 198"))
    cifar10 = "cifar10_ddp.py --dataset synthetic --width 4 --batch-size 96 --run-dir FOLDER"
    found.append(Program("cifar10_ddp", cifar10))
    for name in "by_hand", "overlap", "zero", "accumulate", "fsdp", "tensor_parallel", "pipeline", "mesh", "local_sgd":
        flags = " --tensor-parallel 1" if name == "mesh" else ""
        found.append(Program(name, f"-m variants.mnist_{name} --dataset synthetic --batch-size 198{flags}"))
    for way in WAYS:
        found.append(Program(way, f"-m demos.ways {way}"))
    return found


def look_at(program: Program) -> dict[str, str]:
    """The lines by label; the first of those with the same."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "equivalence", "--nproc", str(PROCESSES)]
        command += [*program.command.replace("FOLDER", folder).split()]
        environment = measured.environment() | {"COLUMNS": "10000", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=measured.ROOT, env=environment, capture_output=True, text=True)
    lines: dict[str, str] = {}
    for line in done.stdout.splitlines():
        lines.setdefault(line[:13].strip(), line[14:])
    return lines


def row(program: Program) -> list[str]:
    lines = look_at(program)
    apart = re.search(r".*apart by (\S+?); up to (\S+) is rounding", lines.get("one batch", lines.get("gradients", "")))
    said = lines.get("averaging", lines.get("gradients", ""))
    for label in "learning rate", "copies":
        if label in lines:
            said = lines[label]
    said = "" if said.startswith("right") else re.match(r"(WRONG: )?[^:(]*", said)[0].strip()
    verdict = lines.get("verdict", "it failed").replace(" from one process in:", " in")
    limit = re.search(r"a difference above (\S+) would have been seen", verdict)
    verdict = re.sub(r"( as one process|:|;|, which ).*", "", verdict)
    distance, rounding = apart.groups() if apart else (measured.NONE, measured.NONE)
    return [f"`{program.name}`", verdict, limit[1] if limit else measured.NONE, distance, rounding, said]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="(default: all)")
    parser.add_argument("--save", action="store_true", help="write the page's table")
    args = parser.parse_args()
    known = {program.name: program for program in programs()}
    for name in args.names:
        if name not in known:
            parser.error(f"there is no program {name!r}: choose from {', '.join(known)}")
    chosen = [known[name] for name in args.names or known]
    rows = [["program", "verdict", "seen above", "apart", "rounding, up to", "what it says"]]
    for program in chosen:
        rows.append(row(program))
        print(*rows[-1], sep="  ", flush=True)
    how = f"Three steps of each program, with {PROCESSES} processes."
    conditions = measured.conditions("python -m experiments.equivalence --save", how)
    measured.report("equivalence", conditions, rows, args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
