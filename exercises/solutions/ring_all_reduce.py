"""A solution of exercise 2: see exercises/ring_all_reduce.py."""

import torch
from torch import distributed as torch_dist

import distributed as dist


def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = tensor.tensor_split(n)  # views of the tensor; some may be longer by one
    for step in range(n - 1):  # afterwards, part rank + 1 is the sum over all ranks
        received = torch.empty_like(parts[(rank - step - 1) % n])
        exchange(parts[(rank - step) % n], received)
        parts[(rank - step - 1) % n].add_(received)
    for step in range(n - 1):  # the finished parts go round
        exchange(parts[(rank + 1 - step) % n], parts[(rank - step) % n])


def exchange(part, received):
    """Send to the next rank, and receive from the previous one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sending = torch_dist.isend(part, (rank + 1) % n)  # with send, all ranks could wait for a recv
    torch_dist.recv(received, (rank - 1) % n)
    sending.wait()
