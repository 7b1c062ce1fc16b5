"""Two studies of the variants: losses and accuracies, and what each process of FSDP holds.  See studies.py.

    python -m experiments.compare_variants variants.mnist_fsdp --dry-run    # one point of the second

Started so, it runs a script and prints what each rank holds after the first step.  torch calls the hook after each step
of any optimizer; processes that are forked have it, too.
"""

import argparse
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import distributed as dist
from experiments import measured
from experiments.measured import Study, write_table
from variants import sharded

COMMANDS = [  # two processes each
    "python mnist_ddp.py --nproc 2",
    "python -m variants.mnist_by_hand --nproc 2",
    "python -m variants.mnist_overlap --nproc 2",
    "python -m variants.mnist_zero --nproc 2",
    "python -m variants.mnist_local_sgd --nproc 2 --every 8",
    "python -m variants.mnist_compile --nproc 2",
    "python -m variants.mnist_accumulate --nproc 2 --accumulate 4",
    "python -m variants.mnist_fsdp --nproc 2",
    "python -m variants.mnist_fsdp --nproc 2 --param-dtype bfloat16",
    "python -m variants.mnist_tensor_parallel --nproc 2",
    "python -m variants.mnist_pipeline --nproc 2",
    "OMP_NUM_THREADS=1 horovodrun -np 2 --gloo python -m variants.mnist_horovod",
    "PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python -m variants.mnist_xla",
]
# The folders of the environments that variants/install_horovod.sh and install_xla.sh have made.
ENVIRONMENTS = {"mnist_horovod": "HOROVOD_ENVIRONMENT", "mnist_xla": "XLA_ENVIRONMENT"}


def commands(args: argparse.Namespace) -> list[dict]:
    return [{"command": command, "dataset": dataset} for dataset in ("synthetic", "mnist") for command in COMMANDS]


def train(point: dict, args: argparse.Namespace) -> dict:
    path = measured.environment()["PATH"]
    for name, variable in ENVIRONMENTS.items():
        if name in point["command"]:
            if variable not in os.environ:
                raise RuntimeError(f"set {variable} to the folder of its environment")
            path = f"{Path(os.environ[variable], 'bin').absolute()}:{path}"
    flags = ["--dataset", point["dataset"], "--data-dir", os.path.abspath(args.data_dir), "--epochs", 3]
    epochs = measured.epochs(measured.run(["env", f"PATH={path}", *shlex.split(point["command"]), *flags]))
    losses = ", ".join(f"{epoch.loss:.4f}" for epoch in epochs)
    return {"losses": losses, "accuracies": ", ".join(f"{epoch.accuracy:.2f}" for epoch in epochs)}


def draw_variants(points: list[dict[str, str]]) -> None:
    rows = [["command", "data", "loss in epochs 1, 2, 3", "test accuracy after epochs 1, 2, 3"]]
    for row in sorted(points, key=lambda row: (row["dataset"] == "mnist", COMMANDS.index(row["command"]))):
        rows.append([f"`{row['command']}`", row["dataset"], row["losses"], f"{row['accuracies']} %"])
    write_table("variants", rows, points)


VARIANTS = Study(commands, train, draw_variants)


# ------------------------------------------------------------------------------------------- what each process holds

PARTS = ("parameters", "gradients", "optimizer state")
SCRIPTS = ("mnist_ddp", "variants.mnist_fsdp")


def worlds(args: argparse.Namespace) -> list[dict]:
    return [{"processes": n, "script": script} for n in (1, 2, 4) for script in SCRIPTS]


def print_bytes(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """The smallest and the largest number of bytes of any rank, for each of PARTS."""
    hook.remove()
    params = optimizer.param_groups[0]["params"]
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [sharded.local_bytes(part) for part in (params, [param.grad for param in params], states)]
    ranks = torch.stack(dist.gather(torch.tensor(held)))
    for name, sizes in zip(PARTS, ranks.T.tolist(), strict=True):
        dist.print_primary(f"{name}: {min(sizes)}" + (f" to {max(sizes)}" if max(sizes) > min(sizes) else ""))


def hold(point: dict, args: argparse.Namespace) -> dict:
    flags = ["--dataset", "synthetic", "--dry-run", "--nproc", point["processes"]]
    printed = measured.run(["python", "-m", "experiments.compare_variants", point["script"], *flags])
    lines = [line.split(": ") for line in printed.splitlines() if line.startswith(PARTS)]
    return dict(lines)


def draw_bytes(points: list[dict[str, str]]) -> None:
    rows = [
        ["processes", *(f"{part}: {name}" if name == "DDP" else name for part in PARTS for name in ("DDP", "FSDP"))]
    ]
    for ddp, fsdp in zip(points[::2], points[1::2], strict=True):
        rows.append([ddp["processes"], *(row[part] for part in PARTS for row in (ddp, fsdp))])
    write_table("fsdp_bytes", rows, points)


BYTES = Study(worlds, hold, draw_bytes)

if __name__ == "__main__":
    hook = register_optimizer_step_post_hook(print_bytes)
    sys.argv[:1] = []
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
