"""The pieces of code in docs/recipes.md and docs/troubleshooting.md do what is said of them, on two or three ranks."""

import contextlib
import copy
import itertools
import multiprocessing
import os
import random
import re
import secrets
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.nn
import torch.nn.functional as F
from test_variables import srun_command
from torch import distributed as torch_dist
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.tensorboard import SummaryWriter
from world import ROOT, error_of, free_port, run, shell

import distributed as dist
from checkpoint import Keeper

SECTIONS = [
    section
    for page in ("troubleshooting", "recipes")
    for section in re.split(r"^###? ", (ROOT / f"docs/{page}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
]
CODE = {
    section.partition("\n")[0]: code
    for section in SECTIONS
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
}


def after(heading, *change, **names):
    """The names that are defined when the section's code has run; `change`: with these words in place of those."""
    names |= {"dist": dist, "torch": torch, "os": os}
    code = CODE[heading].replace(*change) if change else CODE[heading]
    assert not change or code != CODE[heading]
    exec(code, names)
    return names


def mapped(heading, folder):
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    if dist.is_primary():
        torch.save(torch.arange(30), "images.pt")
    dist.barrier()
    loader = after(heading, DataLoader=DataLoader, batch_size=5)["loader"]
    maps = Path("/proc/self/maps")
    assert not maps.exists() or "images.pt" in maps.read_text()
    return sorted(torch.cat(dist.gather(torch.cat(list(loader)))).tolist()) == list(range(30))


def metric(heading, folder):
    import torchmetrics

    number = dist.get_rank() + 1
    mean = after(heading, torchmetrics=torchmetrics, results=[(float(number), number)])["mean"]
    return mean.item() == pytest.approx((1 + 4 + 9) / (1 + 2 + 3))


class CheckpointedTwice(nn.Linear):
    def forward(self, inputs):
        for _ in range(2):
            inputs = checkpoint(super().forward, inputs.requires_grad_(), use_reentrant=True)
        return inputs


def static_graph(heading, folder):
    torch.manual_seed(0)
    model, inputs = CheckpointedTwice(4, 4), torch.randn(6, 4)
    model(inputs.clone()).pow(2).mean().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    model = after(heading, model=model)["model"]
    model(inputs[dist.get_rank() :: 3].clone()).pow(2).mean().backward()
    return torch.allclose(model.module.weight.grad, expected, atol=1e-6)


def whole_weights(heading, folder):
    from torch.distributed import fsdp, init_device_mesh

    torch.manual_seed(0)
    model = nn.Linear(4, 7)
    expected = model.weight.detach().clone()
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    after(heading, model=model)
    dist.barrier()
    return torch.equal(torch.load("model.pt")["weight"], expected)


def equal_ranks(heading, folder):
    model = nn.Linear(2, 2)
    dist.sync_params(model.parameters())
    names = [after(heading, model=model)["names"]]
    with torch.no_grad():
        model.bias[1] += dist.get_rank() == 1
    return [*names, after(heading, model=model)["names"]] == [[], ["bias"]]


def one_log(heading, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = after(heading, SummaryWriter=SummaryWriter, loss=torch.tensor(float(dist.get_rank())), step=7)["writer"]
    if dist.is_primary():
        writer.close()
    dist.barrier()
    log = EventAccumulator("runs/first").Reload()
    return len(os.listdir("runs/first")) == 1 and [(x.step, x.value) for x in log.Scalars("loss")] == [(7, 1.0)]


class Encoder(nn.Linear):
    def encode(self, inputs):
        return F.linear(inputs, self.weight, self.bias).relu()


class Averages(nn.BatchNorm1d):
    """BatchNorm's averages of what passes, unchanged."""

    def __init__(self, width):
        super().__init__(width, affine=False)

    def forward(self, inputs):
        super().forward(inputs)
        return inputs


def other_method(heading, folder):
    from torch.distributed import fsdp, init_device_mesh

    torch.manual_seed(0)
    whole, inputs, mesh = Encoder(4, 7), torch.randn(2, 4), init_device_mesh("cpu", (3,))
    model = copy.deepcopy(whole)
    fsdp.fully_shard(model, mesh=mesh)
    mixed = "got mixed torch.Tensor and DTensor, need to convert all"
    assert mixed in error_of(model.encode, inputs)
    for is_whole in False, True:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fsdp.fully_shard(net[0], mesh=mesh)
        if is_whole:
            fsdp.fully_shard(net, mesh=mesh)
        net(inputs).sum().backward()
        said = str(error_of(nn.utils.clip_grad_norm_, net.parameters(), 1.0))
        assert is_whole != ("_foreach_norm" in said and mixed in said)
    weight = model.weight.detach()
    said = error_of(whole.weight.detach().clone().lerp_, weight, 0.5)
    assert "lerp_" in said and mixed in said
    weight.clone().lerp_(weight, 0.5)
    return torch.allclose(after(heading, model=model, inputs=inputs, fsdp=fsdp)["features"], whole.encode(inputs))


def average(heading, folder):
    """Of four steps in two runs; the averages and their number go on."""

    def run_of(loader):
        model = dist.prepare_ddp_model(nn.BatchNorm1d(1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def train_step(batch):
            with torch.no_grad():
                dist.unwrap_model(model).weight.fill_(batch)
                dist.unwrap_model(model).running_mean.fill_(dist.get_rank() + 5)

        names = {"model": model, "optimizer": optimizer, "loader": loader, "train_step": train_step, "Keeper": Keeper}
        made = after(heading, **names)
        return made["step"], made["ema"].module.weight.item(), made["ema"].module.running_mean.item()

    expected = 1
    for weight in 2, 300, 400:
        expected = 0.999 * expected + 0.001 * weight
    assert run_of([1, 2]) == (2, pytest.approx(0.999 * 1 + 0.001 * 2), 5)
    dist.barrier()
    return run_of([300, 400]) == (4, pytest.approx(expected), 5)


class Embedding(nn.Linear):
    """With a learned temperature."""

    def __init__(self):
        super().__init__(5, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))


def contrastive(heading, folder):
    """The gradient is that of one process with all pairs; without the factor it is a third of that."""
    torch.manual_seed(0)
    net, pairs = Embedding(), torch.randn(12, 2, 5, dtype=torch.float64)
    mine = pairs[4 * dist.get_rank() :][:4]
    embedded = net(pairs)
    F.cross_entropy(net.scale * embedded[:, 0] @ embedded[:, 1].T, torch.arange(12)).backward()

    def ratios(page):
        """Of the gradients (bias, temperature, weights) to those of one process, after this way to the loss."""
        model = dist.prepare_ddp_model(copy.deepcopy(net))
        model.zero_grad()
        page(model(mine), dist.unwrap_model(model).scale)
        found = dict(dist.unwrap_model(model).named_parameters())
        return [(found[name].grad / param.grad).mean().item() for name, param in sorted(net.named_parameters())]

    def right(embedded, scale, *change):
        after(heading, *change, images=scale * embedded[:, 0], texts=embedded[:, 1], F=F)

    def without_the_factor(embedded, scale):
        right(embedded, scale, "(loss * dist.get_world_size())", "loss")

    def late_temperature(embedded, scale):
        change = "whole(images)", "scale * whole(images)"
        after(heading, *change, images=embedded[:, 0], texts=embedded[:, 1], F=F, scale=scale)

    def with_torchs_own_gather(embedded, scale):
        texts = torch.cat(torch_dist.nn.functional.all_gather(embedded[:, 1].contiguous()))
        labels = torch.arange(4) + 4 * dist.get_rank()
        F.cross_entropy(scale * embedded[:, 0] @ texts.T, labels).backward()

    assert ratios(right) == pytest.approx([1, 1, 1])
    assert ratios(with_torchs_own_gather) == pytest.approx([1, 1, 1])
    assert ratios(without_the_factor) == pytest.approx([1 / 3] * 3)
    return ratios(late_temperature) == pytest.approx([1, 3, 1])


def count_messages(state, bucket):
    """A hook of DDP: averages as it does."""
    state.append(bucket.index())
    work = torch_dist.all_reduce(bucket.buffer().div_(3), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def accumulated(heading, folder):
    """With static_graph; (messages, whether the gradient is the mean) of three steps and of other places."""
    inputs = torch.arange(36.0).pow(2).view(3, 3, 2, 2)  # ranks, micro-batches
    expected = inputs.mean((0, 1, 2))
    found = []

    def steps(flags, *change, **options):
        messages, model = [], dist.prepare_ddp_model(nn.Linear(2, 1, bias=False), **options)
        model.register_comm_hook(messages, count_messages)
        for is_first in flags:
            model.zero_grad()
            names = {"model": model, "micro_batches": inputs[dist.get_rank()], "is_first_step": is_first}
            after(heading, *change, contextlib=contextlib, loss_fn=torch.mean, **names)
            found.append((len(messages), torch.allclose(model.module.weight.grad[0], expected)))
            messages.clear()

    steps([True, False, False], static_graph=True)
    steps([False])
    steps([False], "number == len(micro_batches)", "False")  # the last one inside
    line = "    with contextlib.nullcontext() if averages else no_sync():\n        loss = loss_fn("
    forward_outside = f"{line}model(inputs))", f"    outputs = model(inputs)\n{line}outputs)"
    steps([False], *forward_outside)
    error = error_of(steps, [False], static_graph=True)
    assert "expect_autograd_hooks_ INTERNAL ASSERT FAILED" in error, error
    return found == [(3, True), (1, True), (1, True), (1, True), (0, False), (3, True)]


def shard_and_whole(make):
    """A model that FSDP shards, after its backward pass, and the same in one process with all examples."""
    from torch.distributed import fsdp, init_device_mesh

    torch.manual_seed(0)
    model, inputs = make(), torch.randn(12, 6)
    whole = copy.deepcopy(model)
    (whole(inputs).pow(2).sum() / 3).backward()
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    model(inputs[dist.get_rank() :: 3]).pow(2).sum().backward()
    return model, whole


def norms(heading, folder):
    model, whole = shard_and_whole(lambda: nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3)))
    expected = [param.grad.norm().item() for param in whole.parameters()]
    clipped = [norm / sum(x**2 for x in expected) ** 0.5 for norm in expected]  # to a length of 1
    shares = [param.grad.norm().item() for param in model.parameters()]
    names = after(heading, model=model)
    assert all(share < norm - 1e-3 for share, norm in zip(shares, expected, strict=True))
    if torch.__version__ >= (2, 13):  # the total norm, of what is clipped now, is the whole at once
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(1, rel=1e-4)
    return [*names["of_each"].values(), names["norm"].item()] == pytest.approx(
        [*clipped, sum(x**2 for x in expected) ** 0.5], rel=1e-4
    )


def muon(heading, folder):
    from torch.distributed.tensor import distribute_tensor

    def orthogonal(matrix):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        return left @ right

    model, whole = shard_and_whole(lambda: nn.Linear(6, 9, bias=False))
    names = {"param": model.weight, "orthogonal": orthogonal, "distribute_tensor": distribute_tensor}
    update, expected = after(heading, **names)["update"], orthogonal(whole.weight.grad)
    assert torch.allclose(update.full_tensor(), expected, atol=1e-4) and len(update.to_local()) == 3
    rows = orthogonal(model.weight.grad.to_local())
    assert (torch.cat(dist.gather(rows)) - expected).norm() > 0.3 * expected.norm()
    if hasattr(torch.optim, "Muon"):
        start = whole.weight.detach().clone()
        for weight in model.weight, whole.weight:
            torch.optim.Muon([weight], lr=0.1, weight_decay=0).step()
        distance = (model.weight.full_tensor() - whole.weight).norm()
        assert distance < 0.05 * (whole.weight - start).norm()  # it computes in bfloat16
    return True


def stream(heading, folder):
    """Two workers for each of three ranks: each example once if the files are equal; full batches, as many on each."""
    names = {"IterableDataset": IterableDataset, "get_worker_info": get_worker_info, "DataLoader": DataLoader}
    names |= {"random": random, "itertools": itertools, "seed": 1, "epoch": 2, "batch_size": 5}

    def batches(lengths, *change):
        files = [range(100 * number, 100 * number + length) for number, length in enumerate(lengths)]
        numbers = after(heading, *change, files=files, read=iter, examples=sum(lengths), **names)["batches"]
        return files, dist.gather(torch.stack([*numbers]))

    files, found = batches([5] * 6)
    assert sorted(torch.cat(found).flatten().tolist()) == sorted(itertools.chain(*files))
    _, found = batches([5] * 6, "seed + epoch", "seed + epoch + dist.get_rank()")
    assert len(set(torch.cat(found).flatten().tolist())) < 30  # some are read twice
    assert [rank.shape for rank in batches([6, 14, 5, 5, 10, 5, 30])[1]] == [(5, 5)] * 3
    # Without workers: torch waits 10 s for workers that have failed.
    return "2 files for 3 readers" in error_of(batches, [50] * 2, "num_workers=2", "num_workers=0")


def once_and_in_equal_steps(heading, folder):
    """17 examples, 4 in a step: each once, from any step on; the gradients are those of one process."""
    n, rows = dist.get_world_size(), torch.arange(1.0, 18).view(17, 1)
    names = {"IterableDataset": IterableDataset, "get_worker_info": get_worker_info, "DataLoader": DataLoader}
    names |= {"itertools": itertools, "epoch": 0, "read_all": lambda epoch: iter(rows), "size": 4}
    for first in 0, 2:
        seen, net = [], dist.prepare_ddp_model(nn.Linear(1, 1, bias=False))
        model = nn.Sequential(net)
        model.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        after(heading, model=model, losses=lambda outputs: outputs[:, 0], first=first, **names)
        steps = range(first, 5)
        assert len(seen) == len(steps)
        for step, mine in zip(steps, seen, strict=True):
            assert torch.equal(torch.cat(dist.gather(mine)).sort(0).values, rows[4 * step : 4 * step + 4])
            assert torch.equal(mine, rows[4 * step : 4 * step + 4][dist.get_rank() :: n])
        expected = sum(rows[4 * step : 4 * step + 4].mean() for step in steps)
        assert net.module.weight.grad.item() == pytest.approx(expected.item())
    return True


class Draws(Dataset):
    """Each example is three random numbers: of torch, Python and numpy."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), random.random(), numpy.random.random()], dtype=torch.float64)


def worker_seeds(heading, folder):
    def epochs(first, last, *change):
        torch.manual_seed(0)
        seen, sampler = [], dist.data_sampler(Draws())
        names = {"dataset": Draws(), "batch_size": 2, "sampler": sampler, "seed": 5, "train_step": seen.append}
        after(heading, *change, DataLoader=DataLoader, first_epoch=first, epochs=last, **names)
        return torch.stack(seen).view(last - first, -1, 3)

    def different(numbers):
        return [len(numbers[..., kind].unique()) for kind in range(3)] == [numbers[..., 0].numel()] * 3

    both = epochs(0, 2)
    assert different(torch.cat(dist.gather(both)))
    assert torch.equal(epochs(1, 2)[0], both[1])
    persistent = "num_workers=2", "num_workers=2, persistent_workers=True"
    return not torch.equal(epochs(0, 2, *persistent)[1], both[1])


def skipped(heading, folder):
    """The last rank has a nan in its batch of step 2, and as its loss in step 3: neither counts on any rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    values = torch.arange(1.0, 1 + 6 * n).view(6, n, 1, 1).repeat(1, 1, 2, 1) / 100  # of steps and ranks
    values[2, n - 1] = float("nan")
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    model = dist.prepare_ddp_model(nn.Sequential(Averages(1), net))
    factors = iter([1, 1, float("nan") if rank == n - 1 else 1, 1, 1])  # of the steps with a forward pass
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    after(
        heading,
        loader=values[:, rank],
        model=model,
        optimizer=optimizer,
        loss_fn=lambda outputs: outputs.mean() * next(factors),
    )
    expected = -sum(values[step].mean() for step in (0, 1, 4, 5))
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    weights = torch.cat(dist.gather(net.weight))
    return torch.allclose(weights, expected.expand(n, 1))


def scored(heading, folder):
    """On shares of unequal sizes; two loops are the reference."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    truth = torch.rand(50) < torch.linspace(0.1, 0.9, 50)  # the later ranks have more of them
    scores = (truth * 0.3 + torch.rand(50)).mul(8).round() / 8 + torch.arange(50) / 40  # with ties
    guess = scores > scores.median()
    mine = slice(50 * rank // n, 50 * (rank + 1) // n)
    made = after(heading, scores=scores[mine], truth=truth[mine], guess=guess[mine])
    pairs = [(one > other) + (one == other) / 2 for one in scores[truth] for other in scores[~truth]]
    assert made["auc"].item() == pytest.approx(float(sum(pairs) / len(pairs)))
    precision, recall = (guess & truth).sum() / guess.sum(), (guess & truth).sum() / truth.sum()
    assert made["f1"] == pytest.approx((2 * precision * recall / (precision + recall)).item())
    centred = [values.double() - values.double().mean() for values in (scores, truth)]
    expected = (centred[0] * centred[1]).sum() / (centred[0].norm() * centred[1].norm())
    return made["correlation"].item() == pytest.approx(expected.item(), rel=1e-5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)

    def forward(self, numbers):
        return self.head(self.embed(numbers))


def tied(heading, folder):
    from safetensors.torch import load_file, load_model

    net, other = Tied(), Tied()
    after(heading, net=net, train_step=lambda: nn.init.constant_(net.embed.weight, 7))
    after(heading, 'save_model(net, "model.safetensors")', "pass", net=other, train_step=bool)  # a new process loads it
    assert list(load_file("model.safetensors")) == ["embed.weight"] and len([*other.parameters()]) == 1
    assert "Missing key(s)" in error_of(load_model, Tied(), "model.safetensors")
    return (other.embed.weight == 7).all() and (other.head.weight == 7).all()


def part_of_an_optimizer(heading, folder):
    """A layer of equal shape is put in front, and the last one has another shape: that between keeps its state."""

    def trained(net, start=bool):
        model, optimizer = dist.prepare_ddp_model(net), torch.optim.Adam(net.parameters(), 0.1)
        names = after(heading, model=model, optimizer=optimizer)
        start(names)
        model(torch.ones(2, 3) + dist.get_rank()).pow(2).mean().backward()
        optimizer.step()
        return names, optimizer

    def load(names):
        names["load"]("old.pt")
        taken.extend(name for name, param in second.named_parameters() if param in names["optimizer"].state)

    taken = []
    first = nn.Sequential(OrderedDict(body=nn.Linear(3, 3), head=nn.Linear(3, 2)))
    second = nn.Sequential(OrderedDict(stem=nn.Linear(3, 3), body=nn.Linear(3, 3), head=nn.Linear(3, 5)))
    names, optimizer = trained(first)
    if dist.is_primary():
        names["save"]("old.pt")
    dist.barrier()
    old = copy.deepcopy(optimizer.state[first.body.weight]["exp_avg"])
    _, optimizer = trained(second, load)
    new = optimizer.state[second.body.weight]
    steps = [optimizer.state[layer.weight]["step"].item() for layer in second]
    assert steps == [1, 2, 1] and torch.allclose(new["exp_avg"], 0.9 * old + 0.1 * second.body.weight.grad)
    return taken == ["body.weight", "body.bias"]


FOLDERS_OF_RANKS = "torch.distributed.checkpoint: a different number of ranks"


def adam_run(is_alone=False, lr=0.01):
    """A model, its Adam and a function that makes steps: with any number of ranks the same weights.

    Three ranks shard it, two have DDP.
    """
    from torch.distributed import fsdp, init_device_mesh

    torch.manual_seed(0)
    model, rank, n = (
        nn.Sequential(Averages(6), nn.Linear(6, 9), nn.Linear(9, 3)),
        dist.get_rank(),
        dist.get_world_size(),
    )
    inputs = torch.randn(12, 6)
    if is_alone:
        rank, n = 0, 1
    elif n == 3:
        fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (n,)))
    else:
        model = dist.prepare_ddp_model(model)
    inputs = inputs[rank::n]
    optimizer = torch.optim.Adam(model.parameters(), lr)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            optimizer.step()
        return model

    return model, optimizer, train


def same_weights(model, other):
    """Of a model that may be sharded and of one that is not; on all ranks, as it is a collective."""
    from torch.distributed.tensor import DTensor

    whole = [param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters()]
    return all(torch.allclose(one, two, atol=1e-5) for one, two in zip(whole, other.parameters(), strict=True))


def another_number_of_ranks(heading, folder):
    """The first call trains and saves, the second one, on other ranks, goes on, with the rate that was saved."""
    is_first = not Path("step-3").exists()
    dist.barrier()
    model, optimizer, train = adam_run(lr=0.01 if is_first else 0.5)
    names = after(heading, model=model, optimizer=optimizer)
    if is_first:
        train(3)
        rank_0s = [buffer.clone() for buffer in model.buffers()] if dist.is_primary() else None
        names["save"](3)
        if rank_0s:
            torch.save(rank_0s, "buffers.pt")
        return True
    assert names["load"](3) == 3
    assert all(map(torch.equal, model.buffers(), torch.load("buffers.pt")))
    train(3)
    return same_weights(model, adam_run(is_alone=True)[2](6))


def in_the_background(heading, folder):
    model, optimizer, train = adam_run()
    train(3)
    names = after(FOLDERS_OF_RANKS, model=model, optimizer=optimizer)
    given = {"train_step": lambda: train(20), "dcp": names["dcp"], "state_of": names["state_of"]}
    after(heading, step=3, **given)
    assert names["load"](3) == 3 and Path("step-3/.metadata").exists()
    assert same_weights(model, adam_run(is_alone=True)[2](3))
    Path("step-4").write_text("no folder")
    with pytest.raises(names["dcp"].CheckpointException, match="FileExistsError") as error:
        after(heading, step=4, **given)
    return not isinstance(error.value, Exception)


def one_file(heading, folder):
    model, optimizer, train = adam_run()
    train(3)
    names = after(FOLDERS_OF_RANKS, model=model, optimizer=optimizer)
    names["save"](3)
    expected = adam_run(is_alone=True)[2](5)
    if dist.is_primary():
        alone, its_optimizer, its_train = adam_run(is_alone=True, lr=0.5)
        after(heading, model=alone, optimizer=its_optimizer)
        its_train(2)
        assert same_weights(alone, expected)
    dist.barrier()
    train(1)
    assert names["load"](4) == 3
    train(2)
    return same_weights(model, expected)


def by_length(heading, folder):
    """Neighbours in length share a step: of each three one is on each rank.  None is read twice, and all in turn."""
    lengths = torch.randperm(95, generator=torch.Generator().manual_seed(0)).tolist()
    read = set()
    for epoch in range(6):
        names = {"DataLoader": DataLoader, "random": random, "seed": 1, "epoch": epoch, "batch_size": 5}
        loader = after(heading, lengths=lengths, texts=lengths, **names)["loader"]
        ranks = torch.stack(dist.gather(torch.stack([*loader])))  # [ranks, steps, texts]
        steps = ranks.permute(1, 2, 0).flatten(1)  # each step's texts, from the shortest
        assert torch.equal(steps, steps.sort(1).values) and (steps[:, -1] - steps[:, 0] < 15 + 5).all()
        assert steps[:, 0].tolist() != sorted(steps[:, 0].tolist())
        assert len(steps.flatten().unique()) == 90
        read |= {*steps.flatten().tolist()}
    return len(read) == 95


def saved(heading, folder):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    keeper = Keeper(folder / "run", model=model)
    tested = torch.tensor([[0, 4], [4, 4], [2, 4]][dist.get_rank()])
    assert after(heading, keeper=keeper, tested=tested, best=0.4, step=7)["best"] == 0.5
    assert after(heading, keeper=keeper, tested=tested.clone().fill_(1), best=1.0, step=8)["best"] == 1.0
    return sorted(path.name for path in (folder / "run").glob("*.pt")) == ["step-7-score-0.5.pt"]


def same_global_batch(heading, folder):
    """Three epochs of a sampler, with passes of two examples: the weights of one process with whole batches of 12."""
    torch.manual_seed(0)
    net, rows = nn.Linear(3, 1), torch.randn(29, 3)
    alone, n = copy.deepcopy(net), dist.get_world_size()
    names = {"contextlib": contextlib, "DataLoader": DataLoader, "dataset": rows, "seed": 4, "fits": 2}
    names |= {"losses": lambda outputs: outputs.pow(2), "global_batch": 12}
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    after(heading, model=dist.prepare_ddp_model(net), optimizer=optimizer, **names)
    order = torch.randperm(29, generator=torch.Generator().manual_seed(4))
    optimizer = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    for batch in rows[order[:24]].split(12):
        optimizer.zero_grad()
        alone(batch).pow(2).mean().backward()
        optimizer.step()
    assert f"{n} processes can't share a batch of 7" in refusal(heading, model=net, optimizer=None, **names)
    return torch.allclose(net.weight, alone.weight, atol=1e-6)


def refusal(heading, **names):
    with pytest.raises(SystemExit) as end:
        after(heading, **names | {"global_batch": 7})
    return str(end.value)


def exact_evaluation(heading, folder):
    """35 examples in batches of 32: unequal shares, and the last rank's buffers are others before."""
    torch.manual_seed(0)
    net, inputs, labels = (
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)),
        torch.randn(35 * 3, 4),
        torch.arange(105) % 3,
    )
    net[0].running_mean.fill_(0.5)
    expected = F.cross_entropy(copy.deepcopy(net).eval()(inputs), labels).item()
    net[0].running_mean += dist.get_rank()
    model = dist.prepare_ddp_model(net, sync_buffers=False)
    test_set = [*zip(inputs, labels, strict=True)]
    made = after(heading, model=model, test_set=test_set, DataLoader=DataLoader, F=F)
    return made["count"] == 105 and made["test_loss"] == pytest.approx(expected, rel=1e-5) and model.training


def faster(heading, folder):
    """With a compiler that compiles nothing, because C++ takes half a minute; a step is that of one plain process."""
    torch.manual_seed(0)
    net, inputs = nn.Linear(4, 2), torch.randn(6, 4)
    alone = copy.deepcopy(net)
    change = "torch.compile(model)", 'torch.compile(model, backend="eager")'
    made = after(heading, *change, model=net, lr=0.1)
    made["model"](inputs[dist.get_rank() :: 3]).pow(2).mean().backward()
    made["optimizer"].step()
    alone(inputs).pow(2).mean().backward()
    torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9).step()
    return torch.allclose(net.weight, alone.weight, atol=1e-6)


def schedule(heading, folder):
    """It has come to its end after this rank's steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)
    loader = DataLoader(range(30), 5, sampler=dist.data_sampler(range(30)))
    names = {"OneCycleLR": OneCycleLR, "optimizer": optimizer, "max_lr": 1.0, "epochs": 4, "loader": loader}
    made = after(heading, **names)["scheduler"]
    rates = [made.get_last_lr()[0]]
    for _ in range(4 * len(loader) - 1):
        optimizer.step()
        made.step()
        rates.append(made.get_last_lr()[0])
    return len(rates) == 8 and rates[-1] == min(rates) == pytest.approx(1 / 25 / 1e4) and max(rates) > 0.9


def one_seed(heading, folder):
    return len({seed.item() for seed in dist.gather(torch.tensor(after(heading, secrets=secrets)["seed"]))}) == 1


def one_folder(heading, folder):
    """Although a second passes between two ranks' looks at the clock."""
    time.sleep(1.1 * (dist.get_rank() == 1))
    made = after(heading, time=time, Path=Path)["folder"]
    dist.barrier()
    return os.listdir("runs") == [made.name]


CHECKS = {
    "A contrastive loss over the global batch": contrastive,
    "Gradient accumulation with no_sync": accumulated,
    "Gradient clipping, and the norm to print": norms,
    "A stream of files: IterableDataset": stream,
    "Texts of unequal lengths": by_length,
    "Saving the best checkpoint": saved,
    "A schedule that was written for Accelerate": schedule,
    "Muon with FSDP": muon,
    "A faster step on a GPU": faster,
    "DataLoader worker is killed by signal": mapped,
    "No backend type associated with device type cpu": metric,
    "Got mixed torch.Tensor and DTensor": other_method,
    "Expected to mark a variable ready only once": static_graph,
    "Only rank 0 saves, with FSDP": whole_weights,
    "Are my ranks still equal?": equal_ranks,
    "wandb or TensorBoard shows one run for each rank": one_log,
    "One seed or run name for all ranks": one_seed,
    "A run folder named by the clock": one_folder,
}
WITH_ANY_NUMBER = {
    "A stream: each example once, in equal steps": once_and_in_equal_steps,
    "Seeds of DataLoader workers": worker_seeds,
    "Skipping a bad batch on all ranks": skipped,
    "The same global batch on a different number of GPUs": same_global_batch,
    "An exact evaluation": exact_evaluation,
    "AUC, F1, correlation": scored,
    FOLDERS_OF_RANKS: another_number_of_ranks,
    "torch.distributed.checkpoint: in the background": in_the_background,
    "torch.distributed.checkpoint: one file, and back": one_file,
    "Part of an optimizer's state": part_of_an_optimizer,
    "Tied weights and safetensors": tied,
    "An average of the weights (EMA)": average,
}
CHECKS |= WITH_ANY_NUMBER


def in_a_folder_of_its_own(heading, folder):
    here = os.getcwd()
    os.chdir(folder)
    try:
        return CHECKS[heading](heading, folder)
    finally:
        os.chdir(here)


BY_HAND = "An editor's debugger on several ranks"  # it waits for an editor
WITH_PYTEST = "Tests on several ranks"  # tests/dev/test_distributed_testing.py
TESTED = [heading for heading in CODE if heading not in (BY_HAND, WITH_PYTEST)]
CASES = [(heading, n) for heading in TESTED for n in ((2, 3) if heading in WITH_ANY_NUMBER else (3,))]


@pytest.mark.parametrize("heading, n", CASES)
def test_the_code_of_a_section(heading, n, tmp_path):
    check = CHECKS[heading]
    for name, its_check in ("torchmetrics", metric), ("safetensors", tied):
        if check is its_check:
            pytest.importorskip(name)
    sharded = whole_weights, norms, muon, other_method, another_number_of_ranks, in_the_background, one_file
    if check in sharded and torch.__version__ < (2, 9):
        pytest.skip("FSDP on the CPU: see variants/sharded.py")
    if check in (stream, once_and_in_equal_steps) and multiprocessing.get_start_method() != "fork":
        pytest.skip("its class stands on a page, where another process can't import it")
    assert run(in_a_folder_of_its_own, n, heading, tmp_path) == [True] * n
    if check is another_number_of_ranks:
        assert run(in_a_folder_of_its_own, 5 - n, heading, tmp_path) == [True] * (5 - n)


CELLS = """
import sys
from IPython.core.interactiveshell import InteractiveShell

for cell in sys.argv[1:]:
    InteractiveShell.instance().run_cell(cell)
"""


TRAIN = """
import distributed as dist

def main_worker(local_rank, world_size):
    dist.init_process_group()
    pass
    print(f"rank {dist.get_rank()} of {world_size} on {dist.get_device()}")

if __name__ == "__main__":
    dist.launch(main_worker)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_typed_in_a_notebook_to_debug_in_kubernetes_and_under_slurm(tmp_path):
    pytest.importorskip("IPython")
    bash = "import subprocess, sys; subprocess.run(['bash', '-c', sys.argv[1]])"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # torchrun is beside python
    both = ["rank 0 of 2 on cpu", "rank 1 of 2 on cpu"]

    def typed(heading):
        return re.findall(r"```(?:text|sh)\n(.*?)```", next(x for x in SECTIONS if x.startswith(heading)), re.DOTALL)

    def prints(program, *args, **variables):
        done = shell("-c", program, *args, cwd=tmp_path, path=[ROOT], PATH=path, **variables)
        words = *both, "rank 0 of 1 on cpu", "(Pdb) 1", "(Pdb) 2", "BdbQuit"
        return [word for word in words if word in done.out] or done

    assert prints(CELLS, *typed("A function in a notebook")) == both  # they write another train.py
    debug = next(x for x in SECTIONS if x.startswith("breakpoint"))
    with_one, torchrun = re.search("Debug with one process: `(.*?)`", debug)[1], re.search("`(torchrun .*?)`", debug)[1]
    for call, keys, line, expected in (
        ("breakpoint()", "p world_size\nc", with_one, ["rank 0 of 1 on cpu", "(Pdb) 1"]),
        ("torch.distributed.breakpoint()", "up\np world_size\nc", torchrun, [*both, "(Pdb) 2"]),
    ):
        (tmp_path / "train.py").write_text("import torch" + TRAIN.replace("pass", call))
        assert prints(bash, f"printf '{keys}\n' | {line}") == expected
    (tmp_path / "train.py").write_text(TRAIN)
    lines = typed("Kubernetes")[0].replace("29500", str(free_port())).replace("min_DDP.py", "train.py")
    assert prints(bash, f"{lines} wait") == both
    _, variables = srun_command()
    line = typed("srun torchrun")[0].replace("nodes=2", "nodes=1").replace("per_node=4", "per_node=2")
    line = line.replace("HOST:29500", f"localhost:{free_port()}")
    assert prints(bash, line, **variables) == both


def test_a_reduced_loss_has_no_gradient():
    """docs/troubleshooting.md: element 0 of tensors does not require grad."""
    heading = next(section.partition("\n")[0] for section in SECTIONS if section.startswith("element 0"))
    loss = torch.ones(1, requires_grad=True).sum()
    assert heading in error_of(dist.reduce(loss).backward)


def epochs_with_a_plateau(is_synced, is_reduced):
    """The validation losses and learning rates of this rank, which evaluates all examples with the unwrapped model."""
    torch.manual_seed(0)
    x = torch.randn(240, 8) * torch.linspace(0.1, 3, 240)[:, None]
    y = (x[:, 0] > 0).long()
    model = dist.prepare_ddp_model(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    seen = []
    for epoch in range(4):
        for inputs, labels in DataLoader([*zip(x, y, strict=True)], 4, sampler=dist.data_sampler(x, seed=epoch)):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if is_synced:
            dist.sync_params(model.buffers())
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(dist.unwrap_model(model)(x), y)
        model.train()
        scheduler.step(dist.reduce(loss) if is_reduced else loss)
        seen += [loss, torch.tensor(optimizer.param_groups[0]["lr"])]
    of_ranks = [values.tolist() for values in dist.gather(torch.stack(seen))]
    return [len(set(values)) for values in zip(*of_ranks, strict=True)]


def test_an_evaluation_by_every_rank_needs_equal_buffers_and_a_decision_one_number():
    """docs/porting.md, its rows on BatchNorm, on a mean over batches and on decisions."""
    assert max(run(epochs_with_a_plateau, 3, False, False)[0]) == 3  # each rank has evaluated a model of its own
    assert max(run(epochs_with_a_plateau, 3, True, True)[0]) == 1
