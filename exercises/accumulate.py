"""Exercise 7: gradient accumulation, one message per step.   python -m exercises.check accumulate"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn


def accumulate(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, parts: int) -> None:
    """Make each p.grad the gradient of the mean of F.mse_loss over the examples of all ranks.

    The batch is too large for the memory: call backward for one micro-batch after the other (inputs.chunk(parts)).
    All ranks have equally many examples, but the last chunk may be smaller than the others.  The model is DDP's, which
    averages over the ranks in each backward, but not inside `with model.no_sync():`.  Let it average once.  With
    one process it is a plain model, without no_sync.
    """
    raise NotImplementedError
