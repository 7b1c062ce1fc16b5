"""MNIST with DDP and gradient accumulation: several micro-batches per step.  python -m variants.mnist_accumulate

Add --dataset synthetic to train without a download.  docs/progression.md explains the steps.
"""

import argparse
import contextlib
import time

import torch
import torch.nn.functional as F
from torch import nn

import data
import distributed as dist  # this project's file, not torch.distributed


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


def train(model, loader, optimizer, scheduler, device, accumulate):
    """Train for one epoch; return the sum of the losses and the number of examples (float64, shape [2])."""
    model.train()
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)  # with one process, the model is not wrapped in DDP
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        micro_batches = list(zip(images.chunk(accumulate), labels.chunk(accumulate), strict=True))
        for number, (x, y) in enumerate(micro_batches, 1):
            with no_sync() if number < len(micro_batches) else contextlib.nullcontext():  # the last one averages
                loss = F.cross_entropy(model(x), y) * len(y) / len(labels)  # its share of the mean over the batch
                loss.backward()
            sums[0] += loss.detach() * len(labels)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
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
    device = dist.get_device()  # the GPU whose index is local_rank, or the CPU
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
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    model = dist.prepare_ddp_model(model, sync_buffers=False)  # averages the gradients of all processes
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    dist.print_primary(f"{args.dataset} on {device}, global batch {global_batch} = {world_size} x {batch_size}")

    started = time.perf_counter()
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)  # a different order in each epoch
        epoch_started = time.perf_counter()
        trained = train(model, train_loader, optimizer, scheduler, device, args.accumulate)
        seconds = time.perf_counter() - epoch_started
        dist.sync_params(model.buffers())  # BatchNorm's averages differ between ranks, so all copy rank 0's
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
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches per step (default: %(default)s)")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1 or not 0 < args.lr < float("inf") or not 0 <= args.seed < 2**32:
        parser.error("--epochs and --batch-size must be at least 1, --lr positive and finite, --seed 0 to 2**32 - 1")
    if args.batch_size < dist.count_processes(args.nproc):
        parser.error("--batch-size must be at least the number of processes, because each needs an example")
    if args.accumulate < 1:
        parser.error(f"--accumulate {args.accumulate} must be at least 1")
    data.prepare(args.dataset, args.data_dir, error=parser.error)
    args.epochs = 1 if args.dry_run else args.epochs
    return args


if __name__ == "__main__":
    args = parse_args()
    dist.launch(main, args, nproc=args.nproc)
