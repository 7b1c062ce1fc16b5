"""A solution of exercise 1: see exercises/shard.py."""

import torch

import distributed as dist


def shard(count, epoch):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))  # the same on all ranks
    return order[dist.get_rank() :: dist.get_world_size()].tolist()
