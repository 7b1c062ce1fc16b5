"""Exercise 3: the mean of all ranks' numbers.   python -m exercises.check global_mean"""

import torch

import distributed as dist


def global_mean(numbers: torch.Tensor) -> torch.Tensor:
    """The mean of the numbers (one dimension, float64) of all ranks, on every rank.

    The ranks have different counts of numbers: a mean of the ranks' means would be wrong.  A rank may have none; all
    ranks together have at least one.  dist.all_reduce(tensor) overwrites a tensor by the sum over all ranks; all
    ranks must call it with the same shape.
    """
    raise NotImplementedError
