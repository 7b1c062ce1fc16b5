"""A solution of exercise 4: see exercises/gather_unequal.py."""

import torch
from torch import distributed as torch_dist

import distributed as dist


def gather_unequal(rows):
    world_size = dist.get_world_size()
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(world_size)]
    torch_dist.all_gather(counts, torch.tensor([len(rows)]))
    longest = int(max(counts))
    padded = torch.zeros(longest, *rows.shape[1:], dtype=rows.dtype)
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    torch_dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])
