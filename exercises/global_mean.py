"""Exercise 3: the mean of the numbers of all ranks.   python -m exercises.check global_mean"""

import torch

import distributed as dist


def global_mean(numbers: torch.Tensor) -> torch.Tensor:
    """Return the mean of the numbers (one dimension, float64) of all ranks, on every rank.

    The ranks have different counts of numbers, so the mean of the ranks' means would be wrong.  A rank may have none,
    but all ranks together have at least one.  dist.all_reduce(tensor) replaces a tensor with the sum over all ranks,
    and all ranks must call it with the same shape.
    """
    raise NotImplementedError
