"""The table of equivalence's verdicts in docs/results.md.

python -m dev.equivalence_table                # all programs, with 3 processes: 5 minutes
python -m dev.equivalence_table min_DDP sum    # two of them
python -m dev.equivalence_table --save         # writes dev/results/equivalence.md
"""

import argparse
import json
import re
import tempfile
from pathlib import Path

from demos.ways import WAYS
from dev import measured, programs

PROCESSES = 3  # with two a wrong factor can look right: tests hold both
OTHERWISE = {"experts": 4}  # processes that can share out four experts
NONE = "–"  # a cell without a figure
VERDICTS = {"same": "THE SAME", "different": "DIFFERENT", "not found out": "INCONCLUSIVE"}
MNIST = "--dataset synthetic --batch-size 198"  # 3 processes have equal shares
COMMANDS = {"min_DDP": "min_DDP.py"}
for name in "mnist_ddp", "mnist_ddp_plain", "mnist_amp":
    COMMANDS[name] = f"{name}.py {MNIST}"
COMMANDS["cifar10_ddp"] = "cifar10_ddp.py --dataset synthetic --width 4 --batch-size 96 --run-dir FOLDER"
for name in "by_hand", "overlap", "zero", "accumulate", "fsdp", "tensor_parallel", "pipeline", "mesh", "local_sgd":
    COMMANDS[name] = f"-m variants.mnist_{name} {MNIST}"
COMMANDS["mesh"] += " --tensor-parallel 1"
for name in "transformer", "context_parallel", "experts":
    COMMANDS[name] = f"-m variants.mnist_{name} {MNIST}"
COMMANDS["experts"] = COMMANDS["experts"].replace("198", "200")
for name in WAYS:
    COMMANDS[name] = f"-m demos.ways {name}"


def look_at(command: str, processes: int) -> dict:
    """The answer that equivalence writes with --json for this command."""
    with tempfile.TemporaryDirectory() as folder:
        words, file = command.replace("FOLDER", f"{folder}/run").split(), Path(folder, "answer.json")
        start = ["-m", "ddp_by_diff.equivalence", "--json", file, "--nproc", processes, *words]
        programs.shell(*start, timeout=900, COLUMNS=10000, OMP_NUM_THREADS=None)
        return json.loads(file.read_text(encoding="utf-8"))


def row(name: str) -> list[str]:
    found = look_at(COMMANDS[name], OTHERWISE.get(name, PROCESSES))
    links = {link["name"]: link for link in found.get("links", [])}
    wrong = [name for name, link in links.items() if link["state"] == "wrong"]
    causes = [link["but_for"] for link in links.values() if link["but_for"]]
    verdict = VERDICTS[found["verdict"]]
    verdict += f" in {', '.join(wrong)}" if wrong else f", except for {causes[0]}" if causes else ""
    batch = links.get("one batch", links.get("gradients", {}))
    figures = [
        found.get("notices") if found["verdict"] == "same" else None,
        batch.get("difference"),
        batch.get("threshold"),
    ]
    said = ""
    for label in "gradients", "averaging", "learning rate", "copies":
        text = links.get(label, {}).get("text", "")
        said = said if text.startswith("ok") else text or said
    said = re.match(r"(WRONG[^:]*: )?.*?(?=[:(]|[.] |$)", said)[0].strip()  # its first sentence, without figures
    return [f"`{name}`", verdict, *[NONE if number is None else f"{number:.0e}" for number in figures], said or NONE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"(default: all) {' '.join(COMMANDS)}")
    parser.add_argument("--save", action="store_true", help="write the page's table")
    args = parser.parse_args()
    if not set(args.names) <= set(COMMANDS):
        parser.error(f"choose from {' '.join(COMMANDS)}")
    rows = [["program", "verdict", "detects from", "difference", "threshold", "the line says"]]
    for name in args.names or COMMANDS:
        rows.append(row(name))
        print(*rows[-1], sep="  ", flush=True)
    runs = f"Three steps of each program, with {PROCESSES} processes (experts: 4)."
    measured.report("equivalence", "python -m dev.equivalence_table --save", runs, rows, args.save)


if __name__ == "__main__":
    main()
