"""What mnist_ddp.py computes, and nothing else: its model and its training loop on ready batches.

    python -m experiments.baselines.limit --nproc 2 --dataset synthetic              # compute only
    python -m experiments.baselines.limit --nproc 2 --dataset synthetic --barrier    # the processes meet in each step

Each process keeps its share of the normalised batches in memory, and trains a copy of the model without DDP: no loader,
no gradients sent.  With --barrier one number is all-reduced in each step.  So a process waits for the slower ones, as
every data-parallel program must.  The line after an epoch is that of the scripts, without an accuracy.
"""

import time

import torch
import torch.nn.functional as F

import data
import distributed as dist
from experiments.baselines.common import make_parser
from mnist_ddp import ConvNet


def train(model, batches, optimizer, scheduler, barrier):
    """The loop of mnist_ddp.py, on batches that are on the device; its sums, [2] float64.

    barrier: a tensor to all-reduce in each step, or None.
    """
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        if barrier is not None:
            torch.distributed.all_reduce(barrier)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
    return sums.cpu()  # waits for the device


def main(local_rank, world_size, args):
    dist.init_process_group()
    device = dist.get_device()
    torch.manual_seed(args.seed)
    train_set, _ = data.load(args.dataset, args.data_dir, 2 * args.batch_size if args.dry_run else None)
    loader = data.loader(train_set, args.batch_size // world_size, dist.data_sampler(train_set, seed=args.seed))
    batches = list(data.batches(loader, device))

    model = ConvNet(train_set.channels, train_set.side).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(batches))
    barrier = torch.zeros(1, device=device) if args.barrier else None

    for epoch in range(args.epochs):
        dist.barrier()
        started = time.perf_counter()
        sums = train(model, batches, optimizer, scheduler, barrier)
        images_per_s = sums[1] / (time.perf_counter() - started)
        loss, seen, images_per_s = dist.all_reduce(torch.stack([*sums, images_per_s])).tolist()
        dist.print_primary(f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  {images_per_s:.0f} images/s")
    dist.cleanup()


def parse_args():
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--barrier", action="store_true", help="one number is all-reduced in each step")
    parser.add_argument("--nproc", type=int, help="processes (default: one per GPU; without a GPU, 2)")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    dist.launch(main, args, nproc=args.nproc)
