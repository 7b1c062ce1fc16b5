"""Compare four steps with those of one process on the whole batch; count all-reduces and forward passes."""

import itertools

import torch
import torch._dynamo  # DDP imports it, which takes seconds, so it is done here, once for all processes
import torch.nn.functional as F
from torch import nn

import distributed as dist
from exercises.checks import common

HINT = """
backward adds to p.grad.  Multiply a chunk's mean loss by its share of the examples, len(chunk) / len(inputs).
Run all micro-batches except the last one inside no_sync(), with their forward pass, because DDP decides there.
contextlib.nullcontext() is a context manager that does nothing.
"""
SHARE, LR = 10, 0.5
PARTS = (4, 3, 1, 6)  # 3 + 3 + 3 + 1, 4 + 4 + 2, all at once, and five times 2


def network():
    torch.manual_seed(0)  # the same weights everywhere
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def share(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randn(SHARE, size, generator=generator, dtype=torch.float64) for size in (3, 2))


def note(answer, model, step):
    for name, p in dist.unwrap_model(model).named_parameters():
        answer[f"step {step}, {PARTS[step]} parts, gradient of {name}"] = common.as_answer(p.grad)


def update(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= LR * p.grad
    model.zero_grad()


def run(function, folder):
    model, answer = dist.prepare_ddp_model(network()), {"messages": [], "passes": []}
    passes = note_passes(dist.unwrap_model(model))
    for step, parts in enumerate(PARTS):
        passes.clear()
        with common.Messages() as messages:
            function(model, *share(step, dist.get_rank()), parts)
        answer["messages"].append(messages.count("allreduce", "reduce", "allgather", "allreduce_coalesced"))
        answer["passes"].append(list(passes))
        note(answer, model, step)
        update(model)
    return answer


def note_passes(model):
    """Return a list to which each forward pass adds its number of examples, and each backward pass a 0."""
    passes = []
    model[0].register_forward_pre_hook(lambda layer, inputs: passes.append(len(inputs[0])))
    model[0].weight.register_hook(lambda gradient: passes.append(0))
    return passes


def train(n, combine):
    """Return all ranks' answers if `combine` makes their gradients from [rank][part] -> (gradients, examples).

    The last step is left out, because an error in that step alone has only one cause.
    """
    models, answers = [network() for _ in range(n)], [{} for _ in range(n)]
    for step, parts in enumerate(PARTS[:-1]):
        own = []
        for rank, model in enumerate(models):
            chunks = zip(*(tensor.chunk(parts) for tensor in share(step, rank)), strict=True)
            own.append([(gradient(model, x, y), len(x)) for x, y in chunks])
        for model, answer, gradients in zip(models, answers, combine(own), strict=True):
            for p, value in zip(model.parameters(), gradients, strict=True):
                p.grad = value
            note(answer, model, step)
            update(model)
    return answers


def gradient(model, x, y):
    return torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))


def one_process(n, steps):
    """Return all ranks' answers if one process trains on the whole batch at once."""
    model, answer = network(), {}
    for step in range(steps):
        inputs, targets = (torch.cat(tensors) for tensors in zip(*(share(step, r) for r in range(n)), strict=True))
        for p, value in zip(model.parameters(), gradient(model, inputs, targets), strict=True):
            p.grad = value
        note(answer, model, step)
        update(model)
    return [answer] * n


def add_up(terms):
    """[(factor, gradients)] -> gradients"""
    return [sum(values) for values in zip(*([f * value for value in grads] for f, grads in terms), strict=True)]


def judge(answers):
    n = len(answers)
    messages = [answer.pop("messages") for answer in answers]
    passes = [answer.pop("passes") for answer in answers][0]

    def weighted(parts):
        return add_up([(count / SHARE, grads) for grads, count in parts])

    def mean(ranks):
        return [add_up([(1 / n, grads) for grads in ranks])] * n

    not_weighted = "the parts' means are averaged, but the last part is smaller than the others"
    ways = {
        # Mistakes with the parts come first, because with one process nothing can be wrong with the ranks.
        not_weighted: lambda own: mean([add_up([(1 / len(p), grads) for grads, _ in p]) for p in own]),
        "a sum over the parts where a mean was meant": lambda own: mean(
            [add_up([(1, grads) for grads, _ in p]) for p in own]
        ),
        "only the last part's gradient is left": lambda own: mean([p[-1][0] for p in own]),
        "only the last part's gradient is left, and it is divided": lambda own: mean([weighted(p[-1:]) for p in own]),
        "each rank kept its own gradient": lambda own: [weighted(p) for p in own],
        f"each rank kept its own gradient, and {not_weighted}": lambda own: [
            add_up([(1 / len(p), grads) for grads, _ in p]) for p in own
        ],
        "a sum over the ranks where a mean was meant": lambda own: [add_up([(1, weighted(p)) for p in own])] * n,
    }
    wrong = {way: train(n, combine) for way, combine in ways.items()}
    problem = common.compare(answers, one_process(n, len(PARTS) - 1), wrong)
    if not problem and (problem := common.compare(answers, one_process(n, len(PARTS)), {})):
        return f"{problem}. chunk({PARTS[-1]}) of {SHARE} examples returns only 5 parts: count the returned ones"
    counts = [max(of_step) for of_step in zip(*messages, strict=True)]
    if not problem and n > 1 and max(counts) > 1:
        parts, count = next(pair for pair in zip(PARTS, counts, strict=True) if pair[1] > 1)
        return f"the gradients are correct, but {count} all-reduces were made for {parts} parts: 1 is enough"
    return problem or too_large(passes)


def too_large(passes):
    for parts, made in zip(PARTS, passes, strict=True):
        largest = -(-SHARE // parts)
        if max(made) > largest:
            text = f"the gradients are correct, but {max(made)} of {SHARE} examples are in one forward pass"
            return f"{text}: with {parts} parts it must be at most {largest}"
        if any(one and two for one, two in itertools.pairwise(made)):
            return "the gradients are correct, but two forward passes come before a backward: call backward for each"
    return ""
