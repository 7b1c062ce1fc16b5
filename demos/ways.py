"""Wrong ways of training with several processes, and their corrections, for equivalence to examine.

python -m ddp_by_diff.equivalence -m demos.ways sum             # equivalence names the mistake
python -m ddp_by_diff.equivalence -m demos.ways sum --right     # the corrected program
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributed as dist

WAYS = {  # what is wrong, and what corrects it
    "sum": "the gradients are added up; divide them by the number of processes",
    "divided_twice": "the loss is divided by the number of processes although DDP averages; don't divide it",
    "lr_times_processes": "the learning rate grows with the processes, but the global batch doesn't; don't scale it",
    "uneven": "the ranks have different numbers of examples; weight each loss by its share",
    "tokens": "each rank averages over its own number of tokens; divide the sum by the mean number over all ranks",
    "no_sync": "the last backward of a step is inside no_sync; put it outside",
    "dropout_seed": "all ranks have the same dropout masks; seed each rank differently",
    "clip": "each rank clips its own gradients; average them first",
    "forgotten_layer": "the last layer's gradients are not averaged; average all",
}


class Dropped(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))


def make_loader(rank, world_size, is_uneven):
    """Return a DataLoader of this rank's share of batches of 24 examples: points [n, 8], labels [n]."""
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(240, 8, generator=draw), torch.randint(4, (240,), generator=draw))
    shares = []
    for batch in torch.arange(240).split(24):
        share = batch[rank::world_size]
        if is_uneven:  # rank 0 has more examples
            share = batch.split([24 - 4 * (world_size - 1)] + [4] * (world_size - 1))[rank]
        shares.append(share.tolist())
    return DataLoader(dataset, batch_sampler=shares)


def average_gradients(model, world_size, skip=0, divide=True):
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) - skip]:
        dist.all_reduce(parameter.grad)
        if divide:
            parameter.grad /= world_size


def loss_of(way, is_right, model, points, labels, world_size):
    if way == "tokens":  # class 0 is padding, which doesn't count
        total = F.cross_entropy(model(points), labels, reduction="sum", ignore_index=0)
        count = (labels != 0).sum()
        if is_right:
            count = dist.reduce(count)  # the mean over the ranks
        return total / count
    loss = F.cross_entropy(model(points), labels)
    if way == "divided_twice" and not is_right:
        loss = loss / world_size
    if way == "uneven" and is_right:
        loss = loss * len(points) * world_size / 24
    return loss


def main(local_rank, world_size, way, is_right):
    dist.init_process_group()
    torch.manual_seed(0)  # the same weights on all ranks
    model = Dropped() if way == "dropout_seed" else nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    by_hand = way in ("sum", "clip", "forgotten_layer")
    trained = model if by_hand else dist.prepare_ddp_model(model)
    times = world_size if way == "lr_times_processes" and not is_right else 1
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * times)
    torch.manual_seed(dist.get_rank() if is_right else 0)  # for dropout
    for points, labels in make_loader(dist.get_rank(), world_size, way == "uneven"):
        optimizer.zero_grad()
        if way == "no_sync" and world_size > 1 and not is_right:
            with trained.no_sync():
                loss_of(way, is_right, trained, points, labels, world_size).backward()
        else:
            loss_of(way, is_right, trained, points, labels, world_size).backward()
        if way == "clip" and not is_right:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if by_hand and world_size > 1:
            skip = 2 if way == "forgotten_layer" and not is_right else 0
            average_gradients(model, world_size, skip, divide=way != "sum" or is_right)
        if way == "clip" and is_right:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    dist.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS, help="the mistake")
    parser.add_argument("--right", action="store_true", help="run the corrected program")
    args = parser.parse_args()
    dist.launch(main, args.way, args.right)
