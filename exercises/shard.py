"""Exercise 1: which examples of the data set does this rank train on?   python -m exercises.check shard"""

import torch

import distributed as dist


def shard(count: int, epoch: int) -> list[int]:
    """The indices of this rank's examples, of 0, 1, ... count - 1.

    All ranks together have every example exactly once, and no rank has two examples more than another, also if count
    doesn't divide.  Each epoch has an order of its own (shuffled), and the same call always returns the same indices.
    Leave torch's global generator as it is (no torch.manual_seed): dropout draws from it.  dist.get_rank() and
    dist.get_world_size() say who is asking.  All ranks call it; it needs no message.
    """
    raise NotImplementedError
