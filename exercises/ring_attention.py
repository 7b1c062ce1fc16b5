"""Exercise 12: attention to keys that come round a ring.   python -m exercises.check ring_attention"""

from collections.abc import Iterator

import torch


def ring_attention(
    q: torch.Tensor, parts: Iterator[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys of all ranks: return (output, logsumexp) of this rank's queries q, [queries, features].

    `for keys, values in parts:` brings the keys and values of one rank in each turn, both [its tokens, features], this
    rank's own first.  Don't change them, and don't keep them: when you ask for the next part, they are overwritten.

    The scores are q @ keys.mT * q.shape[-1] ** -0.5.  A query's weights are the softmax of its scores over all keys;
    the output is the sum of weights times values, [queries, features], and logsumexp is the logarithm of the sum of
    exp(score), [queries, 1].  Some scores are so large that exp overflows, and others are so small that it is 0, so
    subtract each query's largest score so far.  If a later part has a larger one, correct what you have summed before.
    No gradient is needed.
    """
    raise NotImplementedError
