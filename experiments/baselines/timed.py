"""Runs a training script unchanged, and prints a line when rank 0 has taken its first optimizer step.

    python -m experiments.baselines.timed mnist_ddp --dataset synthetic
    torchrun --nproc_per_node=2 -m experiments.baselines.timed experiments.baselines.plain_ddp --dataset synthetic

benchmark.py starts every program in this way: it notes when the line comes.  torch calls the hook after each step of
any optimizer; processes that are forked have it, too.
"""

import os
import runpy
import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from experiments.measured import FIRST_STEP


def first_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    hook.remove()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if int(os.environ.get("RANK", 0)) == 0:
        print(FIRST_STEP, flush=True)


if __name__ == "__main__":
    hook = register_optimizer_step_post_hook(first_step)
    sys.argv[:1] = []
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
