"""Compare three steps of training with those of one process that has the whole batch."""

from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import distributed as dist
from exercises.checks import common

HINT = """
A loop over model.parameters(), with one line for each p.grad.  All ranks have the same parameters in the same order,
so they make the same calls.  The mean over the batch is the mean of the shares' means, because they are of equal size.
"""
STEPS, BATCH, LR = 3, 12, 0.5


def network():
    torch.manual_seed(0)  # the same weights everywhere
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    model[0].bias.requires_grad_(False)  # frozen
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(BATCH, size, generator=generator, dtype=torch.float64) for size in (3, 2))


def backward(model, step, rank, n):
    """Compute the gradients of this rank's share; one of them is stored column by column."""
    inputs, targets = (tensor[rank::n] for tensor in batch(step))
    model.zero_grad()
    F.mse_loss(model(inputs), targets).backward()
    model[2].weight.grad = model[2].weight.grad.t().contiguous().t()


def note(answer, model, step):
    answer |= {f"step {step}, gradient of {name}": common.as_answer(p.grad) for name, p in model.named_parameters()}


def update(model):
    with torch.no_grad():
        for p in model.parameters():
            if isinstance(p.grad, torch.Tensor):
                p -= LR * p.grad


def forbidden(*args, **kwargs):
    raise RuntimeError("DDP averages during backward, which has ended here, so average each p.grad, without DDP")


def run(function, folder):
    model, answer = network(), {}
    for step in range(STEPS):
        backward(model, step, dist.get_rank(), dist.get_world_size())
        with mock.patch.object(nn.parallel.DistributedDataParallel, "__init__", forbidden):
            function(model)
        note(answer, model, step)
        update(model)
    answer |= {f"{name} after {STEPS} steps": common.as_answer(p) for name, p in model.named_parameters()}
    return answer


def train(n, combine, average_weights=False):
    """Return all ranks' answers if `combine` makes each rank's gradients from all ranks' [rank][parameter].

    average_weights: the weights before each update are averaged, too.
    """
    models, answers = [network() for _ in range(n)], [{} for _ in range(n)]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            backward(model, step, rank, n)
        own = [[p.grad for p in model.parameters() if p.requires_grad] for model in models]
        combined = combine(own)
        if average_weights:
            set_to_mean(models)
        for model, answer, gradients in zip(models, answers, combined, strict=True):
            for p, gradient in zip([p for p in model.parameters() if p.requires_grad], gradients, strict=True):
                p.grad = gradient
            note(answer, model, step)
            update(model)
    for model, answer in zip(models, answers, strict=True):
        answer |= {f"{name} after {STEPS} steps": common.as_answer(p) for name, p in model.named_parameters()}
    return answers


def set_to_mean(models):
    with torch.no_grad():
        for same in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(same) / len(same)
            for p in same:
                p.copy_(mean)


def summed(own, factor=1.0):
    return [factor * sum(gradients) for gradients in zip(*own, strict=True)]


def judge(answers):
    n = len(answers)
    right = train(1, lambda own: own) * n  # one process, the whole batch
    ways = {
        "each rank kept its own gradient": lambda own: own,
        "a sum where a mean was meant": lambda own: [summed(own)] * n,
        "divided by the number of ranks twice": lambda own: [summed(own, 1 / n**2)] * n,
        "divided by the number of ranks, but never added up": lambda own: [[g / n for g in grads] for grads in own],
        "rank 0 alone has the mean, the others kept their own gradient": lambda own: [summed(own, 1 / n), *own[1:]],
        "all ranks have rank 0's gradient": lambda own: [own[0]] * n,
        "only the first parameter's gradient was averaged": lambda own: [
            [*summed(own, 1 / n)[:1], *gradients[1:]] for gradients in own
        ],
    }
    wrong = {way: train(n, combine) for way, combine in ways.items()}
    wrong["the weights were averaged, not the gradients"] = train(n, lambda own: own, average_weights=True)
    return common.compare(answers, right, wrong)
