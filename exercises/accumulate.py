"""Exercise 7: gradient accumulation, one message per step.   python -m exercises.check accumulate

The batch is too large for the memory: call backward for one micro-batch after the other (inputs.chunk(parts)).  Then
each p.grad must be the gradient of the mean of F.mse_loss over the examples of all ranks, as if in one go.  All ranks
have equally many examples, but the last chunk may be smaller than the others.  The model is DDP's, which averages
over the ranks in each backward, but not inside `with model.no_sync():`.  Once per call is enough.
With one process it is a plain model, without no_sync.
"""

import contextlib

import torch.nn.functional as F


def accumulate(model, inputs, targets, parts):
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
# backward adds to p.grad.  A chunk's mean loss counts for len(chunk) of len(inputs) examples: multiply by that
# fraction.  All but the last micro-batch stand inside no_sync(), with their forward pass: there DDP decides whether it
# averages.  contextlib.nullcontext() is a `with` that does nothing.
