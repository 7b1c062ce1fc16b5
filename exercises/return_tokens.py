"""Exercise 11: return the tokens from the experts.   python -m exercises.check return_tokens"""

import torch
from torch import distributed as torch_dist

import distributed as dist


def return_tokens(outputs: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the experts' outputs for this rank's tokens, [its tokens, features]: row i is token i's, times weights[i].

    Rank r has expert r.  `chosen` (int64) holds the expert of each of this rank's tokens, and `weights` the factor of
    its output.  On the way to the experts, each rank has sorted its tokens, order = chosen.argsort(stable=True), and
    has sent each expert its part.  `outputs`, [rows received, features], is what this rank's expert has computed: first
    the rows of rank 0's tokens, then those of rank 1's, each part in the order in which it was received.  Now they must
    return to their ranks.  A rank may have no tokens, and an expert may receive none.

    torch_dist.all_to_all_single(received, rows, received_counts, sent_counts) sends the first sent_counts[0] rows to
    rank 0, the next sent_counts[1] to rank 1, and so on, and receives received_counts[r] rows from rank r.  Both counts
    are lists of int.  Without them, each rank gets an equal part.  No gradient is needed.
    """
    raise NotImplementedError
