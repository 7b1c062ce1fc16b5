"""The programs of docs/mistakes.md: each mistake, wrong and right, in two processes.

python -m demos.mistakes set_epoch wrong
"""

import argparse
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import distributed as torch_dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

import distributed as dist

numbers = list(range(6))
answers = torch.tensor([1, 1, 1, 1, 0])  # of a model, for five test images: 1 is right, so four of five
images = list(range(1200))
loss = torch.tensor(0.5)
model = nn.Linear(2, 1)


class TwoHeads(nn.Module):
    """Uses one of its heads only."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1)
        self.unused = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Forward, backward and an optimizer step on this rank's own batch; returns this rank's loss."""
    inputs = torch.full((1, 2), 0.5 + dist.get_rank())
    loss = (model(inputs) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def zero_model() -> nn.Module:
    """A model whose weights are 0 at the start, so that its losses are the same everywhere."""
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def print_length(model: nn.Module) -> None:
    length = nn.utils.parameters_to_vector(model.parameters()).norm()  # the weights were 0
    dist.print_primary(f"the step has length {length:.6f}")


def print_difference(model: nn.Module) -> None:
    weights = dist.gather(nn.utils.parameters_to_vector(model.parameters()))
    dist.print_primary(f"largest difference between the ranks' weights: {(weights[0] - weights[1]).abs().max():.2f}")


def train_epoch(loader: DataLoader) -> None:
    """Train for an epoch; print the size of the global batch, and how many different images it has."""
    model = dist.prepare_ddp_model(zero_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        inputs = batch[:, None] / torch.tensor([1200.0, 2400.0])
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    last = torch.cat(dist.gather(batch))
    dist.print_primary(f"{len(loader)} steps of {len(last)} images, {len(last.unique())} of them different")


class Stream(IterableDataset):
    """A data set that can only be read from its beginning: as `read` does it."""

    def __init__(self, read: Callable[[], Iterator[int]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[int]:
        return self.read()


def print_stream(read: Callable[[], Iterator[int]]) -> None:
    """What all ranks together get, if each has two loader workers."""
    mine = torch.tensor(list(DataLoader(Stream(read), batch_size=None, num_workers=2)))
    dist.print_primary(f"examples of an epoch: {torch.cat(dist.gather(mine)).sort().values.tolist()}")


def no_ddp_wrong() -> None:
    model = zero_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        train_step(model, optimizer)  # on this rank's own batch, and nobody averages the gradients
    print_difference(model)


def no_ddp_right() -> None:
    model = dist.prepare_ddp_model(zero_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        train_step(model, optimizer)
    print_difference(model)


def no_sampler_wrong() -> None:
    torch.manual_seed(0)
    train_epoch(DataLoader(images, batch_size=10, shuffle=True))  # all images, in the same order on each rank


def no_sampler_right() -> None:
    torch.manual_seed(0)
    train_epoch(DataLoader(images, batch_size=10, sampler=dist.data_sampler(images)))


def set_epoch_wrong() -> None:
    sampler = dist.data_sampler(numbers)
    for epoch in range(3):
        dist.print_primary(f"epoch {epoch}: rank 0 trains on {list(sampler)}")


def set_epoch_right() -> None:
    sampler = dist.data_sampler(numbers)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        dist.print_primary(f"epoch {epoch}: rank 0 trains on {list(sampler)}")


def every_rank_wrong() -> None:
    print(f"epoch 1  loss {loss:.2f}")
    torch.save(model.state_dict(), "model.pt")  # two processes write one file at the same time


def every_rank_right() -> None:
    dist.print_primary(f"epoch 1  loss {loss:.2f}")
    if dist.is_primary():
        torch.save(model.state_dict(), "model.pt")


def collective_wrong() -> None:
    if dist.is_primary():
        mean = dist.reduce(loss)  # rank 0 waits for the others here, and they never come
        print(f"loss {mean:.2f}")
    time.sleep(60)  # the others are in the next epoch


def collective_right() -> None:
    mean = dist.reduce(loss)  # all ranks
    dist.print_primary(f"loss {mean:.2f}")


def padding_wrong() -> None:
    sampler = DistributedSampler(answers, shuffle=False)  # repeats an example, so that all ranks get equally many
    mine = answers[list(sampler)]
    correct, count = dist.all_reduce(torch.tensor([mine.sum(), len(mine)])).tolist()
    dist.print_primary(f"accuracy {correct / count:.1%} ({correct}/{count})")


def padding_right() -> None:
    sampler = dist.data_sampler(answers, shuffle=False, pad=False)  # each example once
    mine = answers[list(sampler)]
    correct, count = dist.all_reduce(torch.tensor([mine.sum(), len(mine)])).tolist()
    dist.print_primary(f"accuracy {correct / count:.1%} ({correct}/{count})")


def mean_of_means_wrong() -> None:
    mine = answers[dist.get_rank() :: 2]  # three answers on rank 0, two on rank 1
    accuracy = dist.reduce(mine.float().mean())
    dist.print_primary(f"accuracy {accuracy:.1%}")


def mean_of_means_right() -> None:
    mine = answers[dist.get_rank() :: 2]
    correct, count = dist.all_reduce(torch.tensor([mine.sum(), len(mine)])).tolist()
    dist.print_primary(f"accuracy {correct / count:.1%}")


def batch_size_wrong() -> None:
    loader = DataLoader(images, batch_size=200, sampler=dist.data_sampler(images))
    dist.print_primary(f"{len(loader)} steps of {dist.get_world_size() * loader.batch_size} images")


def batch_size_right() -> None:
    loader = DataLoader(images, batch_size=200 // dist.get_world_size(), sampler=dist.data_sampler(images))
    dist.print_primary(f"{len(loader)} steps of {dist.get_world_size() * loader.batch_size} images")


def unused_wrong() -> None:
    model = dist.prepare_ddp_model(TwoHeads())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def unused_right() -> None:
    model = TwoHeads()
    model.unused.requires_grad_(False)
    model = dist.prepare_ddp_model(model)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    dist.print_primary("two steps, no error")


def early_stop_wrong() -> None:
    model = dist.prepare_ddp_model(zero_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        if train_step(model, optimizer) < 0.1:  # this rank's own loss
            dist.print_primary(f"all ranks stop at step {step}")
            break
    dist.barrier()  # the other rank is still training


def early_stop_right() -> None:
    model = dist.prepare_ddp_model(zero_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        if dist.reduce(train_step(model, optimizer)) < 0.1:  # the mean over all ranks, the same number on each
            dist.print_primary(f"all ranks stop at step {step}")
            break
    dist.barrier()


def iterable_wrong() -> Iterator[int]:
    return iter(numbers)


def iterable_right() -> Iterator[int]:
    worker = get_worker_info()  # this process is one of its rank's loader workers
    first = dist.get_rank() * worker.num_workers + worker.id
    return itertools.islice(numbers, first, None, dist.get_world_size() * worker.num_workers)


def rank_0_works_wrong() -> None:
    if dist.is_primary():
        time.sleep(6)  # downloads, say, or evaluates
    dist.barrier()  # the others wait here, and a collective waits for DIST_TIMEOUT at most
    dist.print_primary("all go on")


def rank_0_works_right() -> None:
    patient = torch_dist.new_group(backend="gloo", timeout=timedelta(hours=1))  # on all ranks, once
    if dist.is_primary():
        time.sleep(6)
    torch_dist.barrier(patient)
    dist.print_primary("all go on")


def clip_wrong() -> None:
    model, scaler = dist.prepare_ddp_model(zero_model()), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    scaler.scale(5 * model(torch.ones(1, 2)).mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1)  # of gradients that are 65536 times too large
    scaler.step(optimizer)  # divides them by 65536
    print_length(model)


def clip_right() -> None:
    model, scaler = dist.prepare_ddp_model(zero_model()), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    scaler.scale(5 * model(torch.ones(1, 2)).mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1)
    scaler.step(optimizer)  # knows that they are divided already
    print_length(model)


def dropout_seed_wrong() -> None:
    torch.manual_seed(0)
    mask = F.dropout(torch.ones(16))  # what a dropout layer multiplies by
    different = torch.stack(dist.gather(mask)).unique(dim=0)
    dist.print_primary(f"{len(different)} different mask(s) on {dist.get_world_size()} ranks")


def dropout_seed_right() -> None:
    torch.manual_seed(dist.get_rank())
    mask = F.dropout(torch.ones(16))
    different = torch.stack(dist.gather(mask)).unique(dim=0)
    dist.print_primary(f"{len(different)} different mask(s) on {dist.get_world_size()} ranks")


MISTAKES = {
    "no_ddp": (no_ddp_wrong, no_ddp_right),
    "no_sampler": (no_sampler_wrong, no_sampler_right),
    "set_epoch": (set_epoch_wrong, set_epoch_right),
    "every_rank": (every_rank_wrong, every_rank_right),
    "collective": (collective_wrong, collective_right),
    "padding": (padding_wrong, padding_right),
    "mean_of_means": (mean_of_means_wrong, mean_of_means_right),
    "batch_size": (batch_size_wrong, batch_size_right),
    "unused": (unused_wrong, unused_right),
    "early_stop": (early_stop_wrong, early_stop_right),
    "iterable": (functools.partial(print_stream, iterable_wrong), functools.partial(print_stream, iterable_right)),
    "rank_0_works": (rank_0_works_wrong, rank_0_works_right),
    "clip": (clip_wrong, clip_right),
    "dropout_seed": (dropout_seed_wrong, dropout_seed_right),
}


def worker(local_rank: int, world_size: int, function: Callable, folder: str) -> None:
    os.chdir(folder)  # nothing that is saved stays
    dist.init_process_group(backend="gloo")
    function()
    dist.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mistake", choices=MISTAKES)
    parser.add_argument("way", choices=["wrong", "right"])
    args = parser.parse_args()
    wrong, right = MISTAKES[args.mistake]
    with tempfile.TemporaryDirectory() as folder:
        dist.launch(worker, wrong if args.way == "wrong" else right, folder, nproc=2)
