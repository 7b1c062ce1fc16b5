"""Exercise 11: the tokens' way back from the experts.   python -m exercises.check return_tokens"""

import torch
from torch import distributed as torch_dist

import distributed as dist


def return_tokens(outputs: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts' outputs for this rank's tokens, [its tokens, features]: row i is that of token i, times weights[i].

    Rank r has expert r.  `chosen` (int64) has the expert of each of this rank's tokens, `weights` the factor of its
    output.  On the way to the experts each rank has sorted its tokens, order = chosen.argsort(stable=True), and sent
    each expert its part.  `outputs`, [rows that came, features], is what this rank's expert has computed: first the
    rows of rank 0's tokens, then those of rank 1's, each part in the order in which it came.  Now they must go back.  A
    rank may have no token, and an expert may get none.

    torch_dist.all_to_all_single(received, rows, received_counts, sent_counts) sends the first sent_counts[0] rows to
    rank 0, the next sent_counts[1] to rank 1, and so on; received_counts[r] rows come from rank r.  Both are lists of
    int.  Without them each rank gets an equal part.  No gradient is needed.
    """
    raise NotImplementedError
