"""MNIST with a 1F1B pipeline, which keeps fewer activations (torch >= 2.8).  python -m variants.mnist_pipeline_1f1b

Add --dataset synthetic to train without a download.  docs/progression.md explains the steps.
"""

import argparse
import functools
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

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


def train(model, loader, optimizer, scheduler, device):
    """Train for one epoch; return the sum of the losses and the number of examples (float64, shape [2])."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        losses = []  # of the micro-batches; only the last rank has them
        # The first stage reads the images; each other stage receives its input from the rank before it.
        inputs = (images.clone(memory_format=torch.contiguous_format),) if dist.is_primary() else ()
        pipeline(model, len(images), F.cross_entropy).step(*inputs, target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if losses:
            sums[0] += torch.stack(losses).mean().detach() * len(labels)
            sums[1] += len(labels)
    return sums.cpu()  # waits for the device, so the measured time includes all of its work


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the number of correct answers and the number of examples (float64, shape [2])."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in data.batches(loader, device):
        inputs = (images.clone(memory_format=torch.contiguous_format),) if dist.is_primary() else ()
        logits = pipeline(model, len(images)).step(*inputs)
        if logits is not None:  # only the last rank has them
            sums[0] += (logits.argmax(1) == labels).sum()
            sums[1] += len(labels)
    return sums.cpu()


def main(local_rank, world_size, args):
    dist.init_process_group()
    device = dist.get_device()  # the GPU whose index is local_rank, or the CPU; nothing else needs local_rank
    torch.manual_seed(args.seed)  # equal seeds give equal weights

    batch_size = args.batch_size  # all processes read the same images
    train_set, test_set = data.load(args.dataset, args.data_dir, 2 * batch_size if args.dry_run else None)
    train_sampler = dist.data_sampler(train_set, distributed=False, seed=args.seed)
    test_sampler = dist.data_sampler(test_set, distributed=False, shuffle=False)
    train_loader = data.loader(train_set, batch_size, train_sampler)
    test_loader = data.loader(test_set, batch_size, test_sampler)

    model = ConvNet(train_set.channels, train_set.side)
    cuts = {1: [0, 10], 2: [0, 4, 10], 3: [0, 4, 8, 10]}[world_size]
    model = nn.Sequential(*model)[cuts[dist.get_rank()] : cuts[dist.get_rank() + 1]]  # this rank's stage
    model = model.to(device)  # not channels_last, the faster layout, because gloo can't send it
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    dist.print_primary(f"{args.dataset} on {device}, batch size {batch_size}, {world_size} stage(s)")

    started = time.perf_counter()
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)  # a different order in each epoch
        epoch_started = time.perf_counter()
        trained = train(model, train_loader, optimizer, scheduler, device)
        seconds = time.perf_counter() - epoch_started
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


@functools.cache  # shapes are fixed, so a smaller last batch needs a pipeline of its own
def pipeline(model, count, loss_fn=None):
    """Return the schedule for a batch of `count` images; without loss_fn, it only runs forward passes."""
    stage = PipelineStage(model, dist.get_rank(), dist.get_world_size(), dist.get_device())
    micro_batches = max(n for n in (1, 2, 4) if count % n == 0)  # of equal size
    if loss_fn and micro_batches >= dist.get_world_size():  # 1F1B needs a micro-batch for each stage
        return Schedule1F1B(stage, micro_batches, loss_fn)
    return ScheduleGPipe(stage, micro_batches, loss_fn)


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
    if dist.count_processes(args.nproc) > 3:
        parser.error("the model is divided into at most three stages: start at most 3 processes")
    if torch.__version__ < (2, 8):
        parser.error(f"the pipeline hangs before torch 2.8, and this is {torch.__version__}: upgrade torch")
    data.prepare(args.dataset, args.data_dir, error=parser.error)
    args.epochs = 1 if args.dry_run else args.epochs
    return args


if __name__ == "__main__":
    args = parse_args()
    dist.launch(main, args, nproc=args.nproc)
