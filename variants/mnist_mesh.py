"""MNIST with data and tensor parallelism: a mesh of processes.  python -m variants.mnist_mesh --nproc 4

Add --dataset synthetic to train without a download.  docs/progression.md explains the steps.
"""

import argparse
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
    device = dist.get_device()  # the GPU whose index is local_rank, or the CPU
    torch.manual_seed(args.seed)  # equal seeds give equal weights

    replicas = world_size // args.tensor_parallel  # copies of the model
    mesh = torch.distributed.init_device_mesh(
        device.type, (replicas, args.tensor_parallel), mesh_dim_names=("data", "tensor")
    )
    replica = mesh.get_local_rank("data")
    batch_size = args.batch_size // replicas  # the processes that share a model use the same images
    train_set, test_set = data.load(args.dataset, args.data_dir, 2 * args.batch_size if args.dry_run else None)
    train_sampler = torch.utils.data.DistributedSampler(train_set, replicas, replica, seed=args.seed)
    test_sampler = range(replica, len(test_set), replicas)  # every image exactly once
    train_loader = data.loader(train_set, batch_size, train_sampler)
    test_loader = data.loader(test_set, batch_size, test_sampler)

    model = ConvNet(train_set.channels, train_set.side)
    share_channels(model, mesh.get_local_rank("tensor"), args.tensor_parallel)
    model[4].group = model[9].group = mesh.get_group("tensor")  # the ranks that add up with this one, see below
    model = model.to(device, memory_format=torch.channels_last)  # the faster layout for convolutions
    model = dist.prepare_ddp_model(model, process_group=mesh.get_group("data"))  # averages over the copies
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    dist.print_primary(f"{args.dataset} on {device}, batch size {batch_size} on every rank")

    started = time.perf_counter()
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)  # a different order in each epoch
        epoch_started = time.perf_counter()
        trained = train(model, train_loader, optimizer, scheduler, device)
        seconds = time.perf_counter() - epoch_started
        tested = evaluate(model, test_loader, device)
        dist.all_reduce(trained.div_(args.tensor_parallel))  # all processes of a model have counted the same images
        dist.all_reduce(tested.div_(args.tensor_parallel))
        loss, seen = trained.tolist()
        correct, count = tested.tolist()
        dist.print_primary(
            f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  "
            f"accuracy {correct / count:.2%} ({correct:.0f}/{count:.0f})  {seen / seconds:.0f} images/s"
        )
    dist.print_primary(f"done in {time.perf_counter() - started:.1f} s")
    dist.cleanup()


def share_channels(model, rank, world_size):
    """Keep this rank's share of the 32 channels, in the second convolution, its BatchNorm and the linear layer."""
    conv, linear = model[4], model[9]
    mine = torch.arange(32).tensor_split(world_size)[rank]  # with three ranks 11, 11 and 10 channels
    conv.weight, conv.bias = nn.Parameter(conv.weight[mine]), nn.Parameter(conv.bias[mine])
    model[5] = nn.BatchNorm2d(len(mine))  # needs no communication, because each channel is normalised by itself
    linear.weight = nn.Parameter(linear.weight.unflatten(1, (32, -1))[:, mine].flatten(1))
    linear.bias = linear.bias if rank == 0 else None  # on one rank only, because the ranks' outputs are added
    conv.register_full_backward_hook(sum_input_gradients)  # Megatron-LM's f
    linear.register_forward_hook(sum_outputs)  # Megatron-LM's g


def sum_input_gradients(layer, input_gradients, output_gradients):
    total = input_gradients[0].clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=layer.group)  # because the ranks of the group have used the same input
    return (total,)


def sum_outputs(layer, inputs, output):
    torch.distributed.all_reduce(output.detach(), group=layer.group)  # in place, unseen by autograd


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
    parser.add_argument("--tensor-parallel", type=int, default=2, help="processes per model (default: %(default)s)")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1 or not 0 < args.lr < float("inf") or not 0 <= args.seed < 2**32:
        parser.error("--epochs and --batch-size must be at least 1, --lr positive and finite, --seed 0 to 2**32 - 1")
    if args.batch_size < dist.count_processes(args.nproc):
        parser.error("--batch-size must be at least the number of processes, because each needs an example")
    if args.tensor_parallel not in range(1, 33) or dist.count_processes(args.nproc) % args.tensor_parallel:
        parser.error(f"--tensor-parallel {args.tensor_parallel} must be 1 to 32 and divide the number of processes")
    data.prepare(args.dataset, args.data_dir, error=parser.error)
    args.epochs = 1 if args.dry_run else args.epochs
    return args


if __name__ == "__main__":
    args = parse_args()
    dist.launch(main, args, nproc=args.nproc)
