"""Exercise 2: the sum over all ranks, in a ring.   python -m exercises.check ring_all_reduce"""

import torch
from torch import distributed as torch_dist

import distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Replace the tensor (one dimension, float64) with the sum of all ranks' tensors, on every rank.

    Use only torch_dist.send, isend, recv and irecv.  Each rank sends only to the next rank, rank + 1, and the last one
    to rank 0.  Each message is one of the n parts into which n ranks divide the tensor, and each rank sends 2 * (n - 1)
    messages.  The tensor may have fewer elements than there are ranks.  With one process, there is nothing to do.
    """
    raise NotImplementedError
