"""Exercise 6: the mean of a loss over all ranks' tokens.   python -m exercises.check token_mean"""

import torch

import distributed as dist


def token_mean(losses: torch.Tensor) -> torch.Tensor:
    """The number on which this rank calls backward, so that all ranks take the step of one process with all tokens.

    `losses` (one dimension, float64) has the loss of each of this rank's tokens.  The loss of the step is the mean over
    the tokens of all ranks.  The ranks have different numbers of tokens; a rank may have none: then `losses` is empty,
    but it is connected with the model, as your result must be.  After backward the gradients are averaged over the
    ranks, as DDP does it.  No gradient comes from other ranks through dist.all_reduce and dist.reduce.
    """
    raise NotImplementedError
