"""MNIST with what FSDP does, written by hand: each rank keeps a shard.  python -m variants.mnist_fsdp_by_hand

Add --dataset synthetic to train without a download.  docs/progression.md explains the steps.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import distributed as torch_dist
from torch import nn

import data
import distributed as dist  # this project's file, not torch.distributed

reduce_scatter = getattr(torch_dist, "reduce_scatter_single", torch_dist.reduce_scatter_tensor)  # before 2.13


class ConvNet(nn.Sequential):
    """Images [N, channels, side, side] -> logits [N, 10]: two convolutions, then a linear layer."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__(
            nn.Conv2d(channels, 16, 5, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (side // 4) ** 2, 10),
        )


def shard(layer):
    """Leave a shard of each parameter on this rank; hooks make the parameters whole while the layer computes."""
    for p in layer.parameters(recurse=False):
        p.flat = F.pad(p.detach().flatten(), (0, -p.numel() % dist.get_world_size()))  # so all shards are equally long
        p.whole = p.flat[: p.numel()].view_as(p)  # the flat vector in the shape that the layer needs
        p.shard = p.flat.chunk(dist.get_world_size())[dist.get_rank()].clone()
        p.register_post_accumulate_grad_hook(average)
    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(free)
    layer.register_full_backward_pre_hook(gather)
    free(layer)


def gather(layer, *_):
    if layer.training:  # in an evaluation, they are already whole
        for p in layer.parameters(recurse=False):
            p.flat.untyped_storage().resize_(p.flat.nbytes)
            torch_dist.all_gather(list(p.flat.chunk(dist.get_world_size())), p.shard)
            p.data = p.whole


def free(layer, *_):
    if layer.training:
        for p in layer.parameters(recurse=False):
            p.data = p.shard
            p.flat.untyped_storage().resize_(0)  # also of what backward has saved, until gather fills it again


def average(p):
    """Replace the gradient by this rank's shard of the average over all ranks, and free the whole parameter."""
    whole = F.pad(p.grad.flatten() / dist.get_world_size(), (0, len(p.flat) - p.numel()))
    p.data, p.grad = p.shard, torch.empty_like(p.shard)
    reduce_scatter(p.grad, whole)
    p.flat.untyped_storage().resize_(0)


def train(model, loader, optimizer, scheduler, device):
    """Train for one epoch; return the sum of the losses and the number of examples (float64, shape [2])."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
    return sums.cpu()  # waits for the device, so the measured time includes all of its work


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the number of correct answers and the number of examples (float64, shape [2])."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        sums[0] += (model(images).argmax(1) == labels).sum()
        sums[1] += len(labels)
    return sums.cpu()


def main(local_rank, world_size, args):
    dist.init_process_group()
    device = dist.get_device()  # the GPU whose index is local_rank, or the CPU; nothing else needs local_rank
    torch.manual_seed(args.seed)  # equal seeds give equal weights

    batch_size = args.batch_size // world_size  # each process's share
    global_batch = batch_size * world_size  # less than --batch-size if that can't be divided evenly
    train_set, test_set = data.load(args.dataset, args.data_dir, 2 * global_batch if args.dry_run else None)
    train_sampler = dist.data_sampler(train_set, seed=args.seed)  # different examples per rank, padded to equal shares
    test_sampler = dist.data_sampler(test_set, shuffle=False, pad=False)  # each example exactly once
    train_loader = data.loader(train_set, batch_size, train_sampler)
    test_loader = data.loader(test_set, batch_size, test_sampler)

    model = ConvNet(train_set.channels, train_set.side)
    model = model.to(device, memory_format=torch.channels_last)  # the faster layout for convolutions
    dist.sync_params(model.parameters())  # all processes start from rank 0's weights
    model.apply(shard)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    dist.print_primary(f"{args.dataset} on {device}, global batch {global_batch} = {world_size} x {batch_size}")

    started = time.perf_counter()
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)  # a different order in each epoch
        epoch_started = time.perf_counter()
        trained = train(model, train_loader, optimizer, scheduler, device)
        seconds = time.perf_counter() - epoch_started
        dist.sync_params(model.buffers())  # BatchNorm's averages differ between ranks, so all copy rank 0's
        model.apply(gather)  # whole until the next step, because ranks may have different numbers of test batches
        tested = evaluate(model, test_loader, device)
        dist.all_reduce(trained)  # in place, so these are now the sums over all processes
        dist.all_reduce(tested)
        loss, seen = trained.tolist()
        correct, count = tested.tolist()
        dist.print_primary(
            f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  "
            f"accuracy {correct / count:.2%} ({correct:.0f}/{count:.0f})  {seen / seconds:.0f} images/s"
        )
    dist.print_primary(f"done in {time.perf_counter() - started:.1f} s")
    dist.cleanup()


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="mnist", choices=data.DATASETS, help="dataset (default: %(default)s)")
    parser.add_argument("--data-dir", default="data", help="folder of the dataset (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=200, help="global batch size (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed for weights and order (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="run only one epoch of two batches, as a smoke test")
    parser.add_argument("--nproc", type=int, help="processes to start (default: one per GPU, or 2 without a GPU)")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1 or not 0 < args.lr < float("inf") or not 0 <= args.seed < 2**32:
        parser.error("--epochs and --batch-size must be at least 1, --lr positive and finite, --seed 0 to 2**32 - 1")
    if args.batch_size < dist.count_processes(args.nproc):
        parser.error("--batch-size must be at least the number of processes, because each needs an example")
    data.prepare(args.dataset, args.data_dir, error=parser.error)
    args.epochs = 1 if args.dry_run else args.epochs
    return args


if __name__ == "__main__":
    args = parse_args()
    dist.launch(main, args, nproc=args.nproc)
