"""A run that hangs, to ask it where its ranks stand.  NPROC=2 python -m exercises.hang"""

import time

import torch

import distributed as dist


def worker(local_rank, world_size):
    dist.init_process_group()
    if dist.get_rank() == 1:
        time.sleep(3600)  # for example a data loader that never returns
    dist.reduce(torch.tensor(0.5))


if __name__ == "__main__":
    dist.launch(worker)
