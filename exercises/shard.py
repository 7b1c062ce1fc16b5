"""Exercise 1: which examples of the data set does this rank train on?   python -m exercises.check shard"""

import torch

import distributed as dist


def shard(count: int, epoch: int) -> list[int]:
    """The indices of this rank's examples: its share of 0, 1, ... count - 1.

    All ranks together have every example exactly once, and the ranks' numbers of examples differ by at most one.  Each
    epoch has a different, shuffled order, and the same call always returns the same indices.  Leave torch's global
    generator as it is (no torch.manual_seed): dropout draws from it.  dist.get_rank() and dist.get_world_size() are
    this process's number and the number of processes.  All ranks call shard; it needs no message.
    """
    raise NotImplementedError
