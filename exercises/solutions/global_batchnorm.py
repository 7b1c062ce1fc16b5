"""A solution of exercise 8: see exercises/global_batchnorm.py."""

import torch

import distributed as dist


class Total(torch.autograd.Function):
    """Add up a tensor over all ranks, in autograd: each rank's input is a part of the losses of all ranks."""

    @staticmethod
    def forward(ctx, tensor):
        return dist.all_reduce(tensor.clone())

    @staticmethod
    def backward(ctx, gradient):
        return dist.all_reduce(gradient.clone())  # a copy, because autograd may still need the original


def global_batchnorm(inputs, eps=1e-5):
    count = dist.all_reduce(torch.tensor(len(inputs)))  # no gradient is needed
    centred = inputs - Total.apply(inputs.sum(0)) / count
    variance = Total.apply(centred.square().sum(0)) / count
    return centred / (variance + eps).sqrt()
