"""Compare outputs and gradients with those of one process that has the whole batch; the shares are unequal."""

import torch

import distributed as dist
from exercises.checks import common

HINT = """
Three sums over all ranks: the number of examples, the inputs (for the mean), and the squares of inputs - mean (for
the variance).  Divide after the sum, not before, because the ranks' means can't be averaged.
"""
SHARES = {1: [12], 2: [7, 5], 3: [6, 4, 2]}
CASES = {"eps 1e-5": 1e-5, "eps 0.1": 0.1}


def data():
    """Return the whole batch, and the factors of a loss that is a sum of outputs times factors."""
    generator = torch.Generator().manual_seed(0)
    inputs = 2 + torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(12, 3, generator=generator, dtype=torch.float64)


def run(function, folder):
    rank, sizes = dist.get_rank(), SHARES[dist.get_world_size()]
    answer = {}
    for case, eps in CASES.items():
        inputs, factors = (tensor.split(sizes)[rank].clone() for tensor in data())
        before = inputs.clone()
        inputs.requires_grad_()
        outputs = function(inputs, eps)
        answer[f"outputs, {case}"] = common.as_answer(outputs)
        if isinstance(outputs, torch.Tensor) and outputs.requires_grad:
            (outputs * factors).sum().backward()
        answer[f"gradients, {case}"] = common.as_answer(inputs.grad)
        answer["inputs"] = common.as_answer(inputs.detach() - before)  # they must not change
    return answer


def normalise(x, means, variances, eps):
    return (x - means) / (variances + eps).sqrt()


def as_if(n, statistics, normalise=normalise):
    """Return all ranks' answers if each uses the mean and variance that `statistics` returns for (shares, rank)."""
    answers = [{} for _ in range(n)]
    for case, eps in CASES.items():
        inputs, factors = data()
        shares = [share.clone().requires_grad_() for share in inputs.split(SHARES[n])]
        outputs = [normalise(x, *statistics(shares, rank), eps) for rank, x in enumerate(shares)]
        loss = sum((out * f).sum() for out, f in zip(outputs, factors.split(SHARES[n]), strict=True))
        loss.backward()
        for answer, share, out in zip(answers, shares, outputs, strict=True):
            answer[f"outputs, {case}"] = common.as_answer(out)
            answer[f"gradients, {case}"] = common.as_answer(share.grad)
            answer["inputs"] = torch.zeros_like(share)
    return answers


def mean_and_variance(x, correction=0):
    return x.mean(0), x.var(0, correction=correction)


def of_all(shares, rank):
    return mean_and_variance(torch.cat(shares))


def constant(shares, rank):
    return tuple(value.detach() for value in of_all(shares, rank))


def through_own_share(shares, rank):
    """all_reduce without autograd: the values are the sums over all ranks, but the gradient is only this rank's."""
    count = sum(map(len, shares))

    def total(values):
        return values[rank] + (sum(values) - values[rank]).detach()

    mean = total([x.sum(0) for x in shares]) / count
    return mean, total([(x - mean).square().sum(0) for x in shares]) / count


def averaged(shares, rank):
    means, variances = zip(*map(mean_and_variance, shares), strict=True)
    return sum(means) / len(means), sum(variances) / len(variances)


def weighted(shares, rank):
    count = sum(map(len, shares))
    variance = sum(len(x) * x.var(0, correction=0) for x in shares) / count
    return torch.cat(shares).mean(0), variance


def judge(answers):
    n = len(answers)
    outputs_only = "the outputs are correct, but not the gradients: "
    wrong = {
        f"{outputs_only}mean and variance are constants for autograd": as_if(n, constant),
        f"{outputs_only}they lack the other ranks' part (use Total)": as_if(n, through_own_share),
        f"{outputs_only}the result isn't connected to the inputs": [
            answer | {part: None for part in answer if "gradients" in part} for answer in as_if(n, of_all)
        ],
        "each rank normalises by its own share": as_if(n, lambda shares, rank: mean_and_variance(shares[rank])),
        "means and variances of the shares are averaged, but the shares are unequal": as_if(n, averaged),
        "the mean is correct, but the variance is that of the shares, around their own means": as_if(n, weighted),
        "the variance divides by the number of examples - 1": as_if(
            n, lambda shares, rank: mean_and_variance(torch.cat(shares), correction=1)
        ),
        "eps is outside of the root": as_if(n, of_all, lambda x, mean, var, eps: (x - mean) / (var.sqrt() + eps)),
        "eps is left out": as_if(n, of_all, lambda x, mean, var, eps: (x - mean) / var.sqrt()),
    }
    return common.compare(answers, as_if(n, of_all), wrong)
