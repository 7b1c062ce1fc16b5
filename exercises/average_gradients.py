"""Exercise 5: what DDP does, by hand.   python -m exercises.check average_gradients"""

from torch import nn

import distributed as dist


def average_gradients(model: nn.Module) -> None:
    """Change each parameter's p.grad, so that all ranks make the step of one process with the whole batch.

    Each rank has the same model, has trained on its own share of the batch (all shares have the same size), and has
    called backward.  A frozen parameter (requires_grad=False) has no gradient, so its p.grad is None on all ranks: skip
    it.  dist.all_reduce(tensor, "mean") works in place.  Try what the check prints without that call, or with "sum".
    """
    raise NotImplementedError
