"""Compare the averaged gradients with those of one process that has all tokens; a rank may have few, or none."""

import torch
from torch import nn

import distributed as dist
from exercises.checks import common

HINT = """
The mean is the sum of all ranks' losses, divided by the number of all ranks' tokens.  Each rank has its part of the
sum, but the number needs a collective.  DDP adds up the gradients, and divides by the number of ranks: by what must
you multiply to cancel this division?
"""
COUNTS = {"equal counts": (4, 4, 4), "unequal counts": (5, 2, 3), "a rank without tokens": (3, 0, 4)}


def network():
    torch.manual_seed(0)  # the same weights everywhere
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def losses_of(model, case, rank):
    """Return the loss of each of this rank's tokens."""
    generator = torch.Generator().manual_seed(10 * rank + len(case))
    tokens = torch.randn(COUNTS[case][rank], 3, generator=generator, dtype=torch.float64)
    return (model(tokens) - 1 - rank).square().flatten()


def part_of(case, name):
    return f"{case}, gradient of {name}"


def run(function, folder):
    answer = {}
    for case in COUNTS:
        model = network()
        loss = function(losses_of(model, case, dist.get_rank()))
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
        for name, p in model.named_parameters():
            is_connected = p.grad is not None
            gradient = p.grad if is_connected else torch.zeros_like(p)
            dist.all_reduce(gradient, "mean")  # as DDP does
            answer[part_of(case, name)] = common.as_answer(gradient) if is_connected else None
    return answer


def as_if(n, way):
    """Return all ranks' answers if each calls backward on way(the losses of all ranks, rank)."""
    answer = {}
    for case in COUNTS:
        model = network()
        losses = [losses_of(model, case, rank) for rank in range(n)]
        mean = sum(way(losses, rank) for rank in range(n)) / n
        mean.backward()
        answer |= {part_of(case, name): common.as_answer(p.grad) for name, p in model.named_parameters()}
    return [answer] * n


def without_gradients(answers, is_left_out):
    """Return the answers, with None for the gradients of the cases for which is_left_out(case, rank) is true."""
    changed = []
    for rank, answer in enumerate(answers):
        left_out = [case for case in COUNTS if is_left_out(case, rank)]
        changed.append({part: None if part.startswith(tuple(left_out)) else g for part, g in answer.items()})
    return changed


def judge(answers):
    n = len(answers)

    def count(losses):
        return sum(map(len, losses))

    right = as_if(n, lambda losses, rank: torch.cat(losses).mean())
    not_connected = "the result isn't connected to the losses"
    wrong = {
        "a mean of means: each token of a rank with few tokens counts too much": as_if(
            n, lambda losses, rank: losses[rank].mean()
        ),
        "a sum where a mean was meant": as_if(n, lambda losses, rank: losses[rank].sum()),
        "the average over the ranks divides by their number, so multiply by the world size before": as_if(
            n, lambda losses, rank: losses[rank].sum() / count(losses)
        ),
        "divided by the world size instead of multiplied": as_if(
            n, lambda losses, rank: losses[rank].sum() / count(losses) / n
        ),
        "n times too large: dist.reduce returns the mean of the ranks' numbers of tokens, unless op is sum": as_if(
            n, lambda losses, rank: losses[rank].sum() * n * n / count(losses)
        ),
        "multiplied by the world size, but divided by this rank's own number of tokens": as_if(
            n, lambda losses, rank: losses[rank].mean() * n
        ),
        f"{not_connected}: no gradient flows through reduce, gather and .item()": without_gradients(
            right, lambda case, rank: True
        ),
        f"on a rank without tokens {not_connected}, and DDP would wait for its backward": without_gradients(
            right, lambda case, rank: COUNTS[case][rank] == 0
        ),
    }
    return common.compare(answers, right, wrong)
