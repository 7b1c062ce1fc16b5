"""Exercise 6: the mean of a loss over all ranks' tokens.   python -m exercises.check token_mean"""

import torch

import distributed as dist


def token_mean(losses: torch.Tensor) -> torch.Tensor:
    """This rank's loss: after its backward all ranks must make the step of one process that has all tokens.

    `losses` (one dimension, float64) has the loss of each of this rank's tokens.  The loss of the step is the mean over
    the tokens of all ranks.  The ranks have different numbers of tokens; a rank may have none: then `losses` is empty,
    but connected with the model, and your result must be connected, too.  After backward the gradients are averaged
    over the ranks, as DDP does it.  No gradient flows through dist.all_reduce and dist.reduce.
    """
    raise NotImplementedError
