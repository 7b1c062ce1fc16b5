"""What mnist_ddp.py computes, and nothing else: its model and its training loop on ready batches.

    python -m experiments.baselines.limit --nproc 2 --dataset synthetic

Each process keeps its share of the normalised batches in memory, and trains a copy of the model without DDP: no loader,
no communication.  The processes only meet between the epochs, and add up their images/s.  --loader and --ddp put one of
the two back, so that its cost is seen.
"""

import time

import torch
import torch.nn.functional as F

import data
import distributed as dist
import mnist_ddp
from experiments.baselines.common import make_parser


def train(model, batches, optimizer, scheduler):
    """The loop of mnist_ddp.py, on batches that are on the device; its sums, [2] float64."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
    return sums.cpu()  # waits for the device


def main(local_rank, world_size, args):
    dist.init_process_group(backend=args.backend)
    device = dist.get_device()
    torch.manual_seed(args.seed)
    train_set, _ = data.load(args.dataset, args.data_dir)
    sampler = dist.data_sampler(train_set)
    loader = data.loader(train_set, args.batch_size // world_size, sampler)
    ready = [] if args.loader else list(data.batches(loader, device))

    model = mnist_ddp.ConvNet(train_set.channels, train_set.side).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))
    model = dist.prepare_ddp_model(model) if args.ddp else model

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        dist.barrier()
        started = time.perf_counter()
        batches = data.batches(loader, device) if args.loader else ready
        sums = train(model, batches, optimizer, scheduler)
        images_per_s = sums[1] / (time.perf_counter() - started)
        loss, seen, images_per_s = dist.all_reduce(torch.stack([*sums, images_per_s])).tolist()
        dist.print_primary(f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  {images_per_s:.0f} images/s")
    dist.cleanup()


def parse_args():
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--loader", action="store_true", help="with mnist_ddp.py's loader in the place of ready batches"
    )
    parser.add_argument("--ddp", action="store_true", help="with DDP: the gradients are averaged in each step")
    return dist.parse_args(parser)


if __name__ == "__main__":
    args = parse_args()
    dist.launch(main, args, nproc=args.nproc)
