"""A script of the course with another network: dev/timelines.py records it.

python -m dev.networks Wide mnist_ddp --dataset synthetic --lr 0.001
"""

import importlib
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import distributed as dist
from mnist_ddp import ConvNet


class Checkpointed(ConvNet):
    """The scripts' own network, with activation checkpointing."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(self, 2, images, use_reentrant=False)


class Wide(nn.Sequential):
    """A network with more weights than activations.  Its first four layers, a pipeline stage, have half of them."""

    def __init__(self, channels: int, side: int) -> None:
        pixels, width = channels * side**2, 1024
        first = [nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, width)]
        second = [nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, pixels)]
        super().__init__(*first, *second, nn.ReLU(), nn.Linear(pixels, 10))


if __name__ == "__main__":
    network, name = sys.argv[1:3]
    del sys.argv[1:3]
    script = importlib.import_module(name)
    script.ConvNet = {"Checkpointed": Checkpointed, "Wide": Wide}[network]
    if network == "Wide":  # Adam keeps two numbers for each weight
        torch.optim.SGD = lambda parameters, lr, momentum: torch.optim.Adam(parameters, lr)
    dist.launch(script.main, script.parse_args())
