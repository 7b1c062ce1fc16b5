"""Exercise 4: all ranks' rows, on every rank.   python -m exercises.check gather_unequal"""

import torch
from torch import distributed as torch_dist

import distributed as dist


def gather_unequal(rows: torch.Tensor) -> torch.Tensor:
    """One tensor with the rows of all ranks, those of rank 0 first, on every rank.

    Each rank has a tensor of shape [its own number of rows, columns]; columns and dtype are the same on all ranks.  A
    rank may have no row.  torch_dist.all_gather(outputs, tensor) fills a list of tensors, and needs the same shape on
    all ranks.  This is what dist.gather does: write it without dist.gather and all_gather_object.
    """
    raise NotImplementedError
