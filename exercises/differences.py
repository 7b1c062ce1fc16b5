"""Where the helpers do more than torch.distributed.  NPROC=2 python -m exercises.differences"""

import torch

import distributed as dist


def worker(local_rank, world_size):
    dist.init_process_group()
    mine = torch.tensor([float(dist.get_rank())])
    mean = dist.reduce(mine)  # 1. a new tensor, on every rank; `mine` is as it was
    assert mean.item() == 0.5 and mine.item() == dist.get_rank()

    parts = dist.gather(torch.zeros(1 + dist.get_rank()))  # 2. a list, on every rank; shapes may differ
    assert [len(part) for part in parts] == [1, 2]

    try:
        dist.all_reduce(torch.zeros(3 + dist.get_rank()))  # 3. different shapes: an error on all ranks
    except RuntimeError as problem:
        dist.print_primary(problem)
    dist.cleanup()


if __name__ == "__main__":
    dist.launch(worker)
