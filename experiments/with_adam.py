"""A script with a larger network, and with Adam in place of SGD: experiments/timelines.py records it.

python -m experiments.with_adam mnist_ddp --dataset synthetic
"""

import importlib
import sys

import torch
from torch import nn

import distributed as dist


class Wide(nn.Sequential):
    """Images [N, channels, side, side] -> logits [N, 10]: with more weights than activations."""

    def __init__(self, channels: int, side: int) -> None:
        layers = [nn.Linear(channels * side**2, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
        super().__init__(nn.Flatten(), *layers, nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


if __name__ == "__main__":
    script = importlib.import_module(sys.argv[1])
    del sys.argv[1]
    script.ConvNet = Wide
    torch.optim.SGD = lambda parameters, lr, momentum: torch.optim.Adam(parameters, lr)
    dist.launch(script.main, script.parse_args())
