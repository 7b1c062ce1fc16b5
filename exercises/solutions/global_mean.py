"""A solution of exercise 3: see exercises/global_mean.py."""

import torch

import distributed as dist


def global_mean(numbers):
    total, count = dist.all_reduce(torch.tensor([numbers.sum(), len(numbers)], dtype=torch.float64))
    return total / count
