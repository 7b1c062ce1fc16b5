"""Is it the same as one process?  The table of docs/results.md, made by equivalence/ itself.

python -m experiments.equivalence                # all programs, with 3 processes: 5 minutes
python -m experiments.equivalence min_DDP sum    # some
python -m experiments.equivalence --save         # writes experiments/results/equivalence.md
"""

import argparse
import re
import tempfile

from demos.ways import WAYS
from experiments import measured
from tools import programs

PROCESSES = 3  # with two a wrong factor can look right: tests hold both
NONE = "–"  # a cell without a figure
MNIST = "--dataset synthetic --batch-size 198"
COMMANDS = {"min_DDP": "min_DDP.py"}
for name in "mnist_ddp", "mnist_ddp_plain", "mnist_amp":
    COMMANDS[name] = f"{name}.py {MNIST}"
COMMANDS["cifar10_ddp"] = "cifar10_ddp.py --dataset synthetic --width 4 --batch-size 96 --run-dir FOLDER"
for name in "by_hand", "overlap", "zero", "accumulate", "fsdp", "tensor_parallel", "pipeline", "mesh", "local_sgd":
    COMMANDS[name] = f"-m variants.mnist_{name} {MNIST}"
COMMANDS["mesh"] += " --tensor-parallel 1"
for name in WAYS:
    COMMANDS[name] = f"-m demos.ways {name}"


def look_at(command: str) -> dict[str, str]:
    """The lines by label; the first of those with the same."""
    with tempfile.TemporaryDirectory() as folder:
        words = command.replace("FOLDER", folder).split()
        start = ["-m", "equivalence", "--nproc", PROCESSES, *words]
        done = programs.shell(*start, timeout=900, COLUMNS=10000, OMP_NUM_THREADS=None)
    lines: dict[str, str] = {}
    for line in done.out.splitlines():
        lines.setdefault(line[:13].strip(), line[14:])
    return lines


def row(name: str) -> list[str]:
    lines = look_at(COMMANDS[name])
    apart = re.search(r".*apart by (\S+?); up to (\S+) is rounding", lines.get("one batch", lines.get("gradients", "")))
    said = lines.get("averaging", lines.get("gradients", ""))
    for label in "learning rate", "copies":
        said = lines.get(label, said)
    said = "" if said.startswith("right") else re.match(r"(WRONG: )?[^:(]*", said)[0].strip()
    verdict = lines.get("verdict", "it failed").replace(" from one process in:", " in")
    limit = re.search(r"a difference above (\S+) would have been seen", verdict)
    verdict = re.sub(r"( as one process|:|;|, which ).*", "", verdict)
    distance, rounding = apart.groups() if apart else (NONE, NONE)
    return [f"`{name}`", verdict, limit[1] if limit else NONE, distance, rounding, said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"(default: all) {' '.join(COMMANDS)}")
    parser.add_argument("--save", action="store_true", help="write the page's table")
    args = parser.parse_args()
    if not set(args.names) <= set(COMMANDS):
        parser.error(f"choose from {' '.join(COMMANDS)}")
    rows = [["program", "verdict", "seen above", "apart", "rounding, up to", "what it says"]]
    for name in args.names or COMMANDS:
        rows.append(row(name))
        print(*rows[-1], sep="  ", flush=True)
    runs = f"Three steps of each program, with {PROCESSES} processes."
    measured.report("equivalence", "python -m experiments.equivalence --save", runs, rows, args.save)


if __name__ == "__main__":
    main()
