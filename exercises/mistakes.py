"""The programs of docs/mistakes.md: each mistake, wrong and right, in two processes.

python -m exercises.mistakes set_epoch wrong
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

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


def state_dict_wrong() -> None:
    ddp_model = dist.prepare_ddp_model(nn.Linear(2, 1))
    weights = ddp_model.state_dict()
    dist.print_primary(list(weights))
    nn.Linear(2, 1).load_state_dict(weights)


def state_dict_right() -> None:
    ddp_model = dist.prepare_ddp_model(nn.Linear(2, 1))
    weights = dist.unwrap_model(ddp_model).state_dict()
    dist.print_primary(list(weights))
    nn.Linear(2, 1).load_state_dict(weights)


MISTAKES = {
    "set_epoch": (set_epoch_wrong, set_epoch_right),
    "every_rank": (every_rank_wrong, every_rank_right),
    "collective": (collective_wrong, collective_right),
    "padding": (padding_wrong, padding_right),
    "mean_of_means": (mean_of_means_wrong, mean_of_means_right),
    "batch_size": (batch_size_wrong, batch_size_right),
    "unused": (unused_wrong, unused_right),
    "state_dict": (state_dict_wrong, state_dict_right),
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
