"""mnist_ddp.py with activation checkpointing: experiments/timelines.py records it.

python -m experiments.checkpointed --dataset synthetic
"""

import torch
from torch.utils.checkpoint import checkpoint_sequential

import distributed as dist
import mnist_ddp


class Checkpointed(mnist_ddp.ConvNet):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(self, 2, images, use_reentrant=False)


if __name__ == "__main__":
    mnist_ddp.ConvNet = Checkpointed
    dist.launch(mnist_ddp.main, mnist_ddp.parse_args())
