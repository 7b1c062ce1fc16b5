"""A solution of exercise 6: see exercises/token_mean.py."""

import torch

import distributed as dist


def token_mean(losses):
    count = dist.all_reduce(torch.tensor(len(losses)))  # the tokens of all ranks
    return losses.sum() * dist.get_world_size() / count  # DDP divides by the world size
