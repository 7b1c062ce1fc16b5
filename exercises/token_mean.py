"""Exercise 6: the mean of a loss over all ranks' tokens.   python -m exercises.check token_mean"""

import torch

import distributed as dist


def token_mean(losses: torch.Tensor) -> torch.Tensor:
    """Return this rank's loss, so that all ranks make the step of one process that has all tokens.

    `losses` (one dimension, float64) holds the loss of each of this rank's tokens.  The loss of the step is the mean
    over the tokens of all ranks, which have different numbers of tokens.  A rank may have none: then `losses` is empty,
    but connected to the model (by autograd), and your result must be connected, too.  After backward, the gradients are
    averaged over the ranks, as with DDP.  No gradient flows through dist.all_reduce and dist.reduce.
    """
    raise NotImplementedError
