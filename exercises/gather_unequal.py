"""Exercise 4: the rows of all ranks, on every rank.   python -m exercises.check gather_unequal"""

import torch
from torch import distributed as torch_dist

import distributed as dist


def gather_unequal(rows: torch.Tensor) -> torch.Tensor:
    """Return one tensor with the rows of all ranks, in rank order, on every rank.

    Each rank has a tensor of shape [its own number of rows, columns]; columns and dtype are the same on all ranks, and
    a rank may have no rows.  torch_dist.all_gather(outputs, tensor) fills a list of tensors, but needs the same shape
    on all ranks.  dist.gather already does all this, so write it without dist.gather and all_gather_object.
    """
    raise NotImplementedError
