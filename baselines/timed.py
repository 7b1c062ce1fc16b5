"""Runs a training script unchanged, and prints a line when rank 0 has taken its first optimizer step.

    python baselines/timed.py mnist_ddp.py --dataset synthetic
    torchrun --nproc_per_node=2 baselines/timed.py baselines/plain_ddp.py --dataset synthetic

benchmark.py starts every program in this way: it notes when the line comes.  torch calls the hook after each step of
any optimizer; processes that are forked have it, too.
"""

import os
import runpy
import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

FIRST_STEP = "first optimizer step"


def first_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    hook.remove()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if int(os.environ.get("RANK", 0)) == 0:
        print(FIRST_STEP, flush=True)


if __name__ == "__main__":
    hook = register_optimizer_step_post_hook(first_step)
    sys.argv[:1] = []
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
