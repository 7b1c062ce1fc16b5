"""The compute-only limit of mnist_ddp.py: its model and its training loop on ready batches, nothing else.

    python -m experiments.baselines.limit --nproc 2 --dataset synthetic
    python -m experiments.baselines.limit --nproc 2 --dataset synthetic --amp     # of mnist_amp.py

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


def train(model, batches, optimizer, scheduler, dtype, scaler):
    """The loop of mnist_amp.py, on batches that are on the device; its sums, [2] float64."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for images, labels in batches:
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
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
    before_ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    half = torch.float16 if dist.reduce(torch.tensor(before_ampere), "max") else torch.bfloat16  # as in mnist_amp.py
    dtype = half if args.amp else torch.float32
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        dist.barrier()
        started = time.perf_counter()
        batches = data.batches(loader, device) if args.loader else ready
        sums = train(model, batches, optimizer, scheduler, dtype, scaler)
        images_per_s = sums[1] / (time.perf_counter() - started)
        loss, seen, images_per_s = dist.all_reduce(torch.stack([*sums, images_per_s])).tolist()
        dist.print_primary(f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  {images_per_s:.0f} images/s")
    dist.cleanup()


def parse_args():
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--amp", action="store_true", help="in mixed precision")
    parser.add_argument(
        "--loader", action="store_true", help="with mnist_ddp.py's loader in the place of ready batches"
    )
    parser.add_argument("--ddp", action="store_true", help="with DDP: the gradients are averaged in each step")
    return dist.parse_args(parser)


if __name__ == "__main__":
    args = parse_args()
    dist.launch(main, args, nproc=args.nproc)
