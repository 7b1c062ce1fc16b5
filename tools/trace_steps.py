"""Three steps of mnist_ddp.py under torch's profiler; each rank writes FOLDER/trace<rank>.json.gz, for Perfetto.

python -m tools.trace_steps FOLDER --dataset synthetic
"""

import argparse
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import profile, schedule

import distributed as dist
import mnist_ddp

BEFORE, STEPS = 10, 3  # the first steps are slower: memory is allocated, libraries are loaded


def main(local_rank: int, world_size: int, args: argparse.Namespace, folder: str) -> None:
    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(f"{folder}/trace{dist.get_rank()}.json.gz")

    plan = schedule(wait=BEFORE - 2, warmup=2, active=STEPS, repeat=1)
    with profile(schedule=plan, on_trace_ready=write, record_shapes=True) as profiler:
        register_optimizer_step_post_hook(lambda *_: profiler.step())
        mnist_ddp.main(local_rank, world_size, args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


if __name__ == "__main__":
    folder = sys.argv.pop(1)
    args = mnist_ddp.parse_args()
    dist.launch(main, args, folder, nproc=args.nproc)
