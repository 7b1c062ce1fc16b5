"""Exercise 2: the sum over all ranks, in a ring.   python -m exercises.check ring_all_reduce

Overwrite the tensor (one dimension, float64) by the sum of all ranks' tensors, on every rank.  Use only
torch_dist.send, isend, recv and irecv.  Each rank sends to the next one only, rank + 1, and the last one to rank 0.
Each message is one part of the tensor, cut into world size parts: with n ranks, 2 * (n - 1) messages per rank.
The size may be any, also less than the number of ranks.  With one process there is nothing to do.
"""

import torch
from torch import distributed as torch_dist

import distributed as dist


def ring_all_reduce(tensor):
    raise NotImplementedError


# A hint: scroll down.
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
# Two rounds of n - 1 steps.  In the first, each rank sends a part, receives a part, and adds it to its own: in step s
# rank r sends part r - s and receives part r - s - 1 (all modulo n).  After it, rank r has the whole sum of part r + 1.
# In the second round the finished parts go round, and overwrite: in step s rank r sends part r + 1 - s.
# tensor.tensor_split(n) returns n views, some of them empty for a small tensor.  If all ranks call send first, all wait
# for a recv: start with isend, then recv, then wait for what isend has returned.
