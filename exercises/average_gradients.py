"""Exercise 5: what DDP does, by hand.   python -m exercises.check average_gradients

Each rank has the same model, has trained on its own share of the batch (shares of the same size), and has called
backward.  Change each parameter's p.grad, so that all ranks take the step of one process with the whole batch.
A frozen parameter (requires_grad=False) has no gradient: its p.grad is None on all ranks.  Skip it.
dist.all_reduce(tensor, "mean") works in place; leave it out, or "sum" in its place, and see what the check says.
"""

import distributed as dist


def average_gradients(model):
    raise NotImplementedError


# A hint: scroll down.
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
# A loop over model.parameters(), with one line for each p.grad.  All ranks have the same parameters in the same order,
# so they make the same calls.  The mean over the batch is the mean of the shares' means, as the shares are equal.
