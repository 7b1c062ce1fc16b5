"""Writes the tables of the variants: losses and accuracies, and what each process of FSDP holds.

    python docs/variants.py --data-dir data               # all, one after the other: about 5 minutes on two idle cores
    python docs/variants.py mnist_fsdp --dataset mnist    # only these rows; the others stay as they are
    python docs/variants.py bytes                         # only results/fsdp_bytes.md

results/variants.md has a row for each command of COMMANDS and each data set, results/fsdp_bytes.md one for each number
of processes.  A row that can't be made here (no Horovod, say) is left as it is, and the program says why.
"""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import distributed as dist  # noqa: E402
from variants import sharded  # noqa: E402

COMMANDS = [  # two processes each; `python` is this Python
    "python mnist_ddp.py --nproc 2",
    "python -m variants.mnist_by_hand --nproc 2",
    "python -m variants.mnist_accumulate --nproc 2 --accumulate 4",
    "python -m variants.mnist_fsdp --nproc 2",
    "python -m variants.mnist_fsdp --nproc 2 --param-dtype bfloat16",
    "OMP_NUM_THREADS=1 horovodrun -np 2 --gloo python -m variants.mnist_horovod",
    "PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python -m variants.mnist_xla",
]
# The folders of the environments that variants/install_horovod.sh and install_xla.sh have made.
ENVIRONMENTS = {"mnist_horovod": "HOROVOD_ENVIRONMENT", "mnist_xla": "XLA_ENVIRONMENT"}
DATASETS = ["synthetic", "mnist"]
EPOCH = r"^(?:\[0\]<stdout>:)?epoch \d+/\d+  loss (\d+\.\d+)  accuracy (\d+\.\d+)%"
HEAD = ["| command | data | loss in epochs 1, 2, 3 | test accuracy after epochs 1, 2, 3 |", "|---|---|---|---|"]
BYTES_HEAD = [
    "| processes | parameters: DDP | FSDP | gradients: DDP | FSDP | optimizer state: DDP | FSDP |",
    "|---|---|---|---|---|---|---|",
]


def row(command: str, dataset: str, data_dir: str) -> str:
    """Run it for 3 epochs; RuntimeError with its last line if it fails."""
    programs = Path(sys.executable).parent
    for name, variable in ENVIRONMENTS.items():
        if name in command:
            if variable not in os.environ:
                raise RuntimeError(f"set {variable} to the folder of its environment")
            programs = Path(os.environ[variable], "bin").absolute()
    words = ["env", *shlex.split(command), "--dataset", dataset, "--data-dir", data_dir, "--epochs", "3"]
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no error message"])[-1])
    losses, accuracies = zip(*re.findall(EPOCH, done.stdout, re.MULTILINE), strict=True)
    return f"{key(command, dataset)} {', '.join(losses)} | {', '.join(accuracies)} % |"


def key(command: str, dataset: str) -> str:
    """How the row begins."""
    return f"| `{command}` | {dataset} |"


def update(file: Path, wanted: dict[tuple[str, str], str]) -> None:
    """Write the table with the new rows, in the order of COMMANDS; rows that are not among them stay."""
    old = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = []
    for dataset in DATASETS:
        for command in COMMANDS:
            before = [line for line in old if line.startswith(key(command, dataset))]
            rows += [wanted[command, dataset]] if (command, dataset) in wanted else before
    file.write_text("\n".join(HEAD + rows) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------- what each process holds


def held_after_a_step(local_rank: int, world_size: int, name: str, args: argparse.Namespace) -> list[list[int]]:
    """For each rank the bytes of parameters, gradients and optimizer state, after the first step of the script."""
    found = []
    step = torch.optim.SGD.step

    def counted(self: torch.optim.SGD, *arguments: object) -> None:
        step(self, *arguments)
        params = self.param_groups[0]["params"]
        states = [value for state in self.state.values() for value in state.values()]
        held = params, [param.grad for param in params], states
        if not found:
            found.extend(part.tolist() for part in dist.gather(torch.tensor([*map(sharded.local_bytes, held)])))

    with mock.patch.object(torch.optim.SGD, "step", counted):
        importlib.import_module(name).main(local_rank, world_size, args)
    return found


def bytes_table() -> str:
    rows = []
    for world_size in 4, 2, 1:  # one process is no new one: it would make this one unfit to be forked
        columns = []
        for name in "mnist_ddp", "variants.mnist_fsdp":
            command = [name, "--dataset", "synthetic", "--dry-run", "--nproc", str(world_size)]
            with mock.patch.object(sys, "argv", command):
                args = importlib.import_module(name).parse_args()
            columns.append(dist.launch(held_after_a_step, name, args, nproc=world_size))
        parts = [sorted({of_rank[part] for of_rank in ranks}) for part in range(3) for ranks in columns]
        cells = [str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}" for sizes in parts]
        rows.append(f"| {world_size} | {' | '.join(cells)} |")
    return "\n".join(BYTES_HEAD + rows[::-1]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of commands, or bytes (default: all)")
    parser.add_argument("--dataset", choices=DATASETS, help="(default: both)")
    parser.add_argument("--data-dir", default="data", help="(default: %(default)s)")
    args = parser.parse_args()
    results = ROOT / "results"
    results.mkdir(exist_ok=True)
    if not args.names or "bytes" in args.names:
        (results / "fsdp_bytes.md").write_text(bytes_table(), encoding="utf-8")
    code = 0
    for dataset in [args.dataset] if args.dataset else DATASETS:
        for command in COMMANDS:
            if args.names and not any(name in command for name in args.names):
                continue
            try:
                line = row(command, dataset, args.data_dir)
            except RuntimeError as problem:
                print(f"{key(command, dataset)} left as it is: {problem}", file=sys.stderr)
                code = 1
                continue
            print(line, flush=True)
            update(results / "variants.md", {(command, dataset): line})
    return code


if __name__ == "__main__":
    sys.exit(main())
