"""The compute-only limit of mnist_ddp.py: its model and its `train` on ready-made batches, nothing else.

    python baselines/limit.py --nproc 2 --dataset synthetic
    python baselines/limit.py --nproc 2 --dataset synthetic --amp     # of mnist_amp.py

Each process keeps its share of the normalised batches in memory, and trains a copy of the model without DDP: no loader,
no communication.  The processes only meet between the epochs, and add up their images/s.  --loader and --ddp put one of
the two back, so that its cost is seen.
"""

import sys
import time
from pathlib import Path

import torch
from common import make_parser

sys.path.append(str(Path(__file__).resolve().parent.parent))

import data  # noqa: E402
import distributed as dist  # noqa: E402
import mnist_amp  # noqa: E402
import mnist_ddp  # noqa: E402


def main(local_rank, world_size, args):
    dist.init_process_group(backend=args.backend)
    device = dist.get_device()
    torch.manual_seed(args.seed)
    train_set, _ = data.load(args.dataset, args.data_dir)
    sampler = dist.data_sampler(train_set, distributed=True)
    batches = data.loader(train_set, args.batch_size // world_size, sampler)
    if not args.loader:
        batches = list(data.batches(batches, device))
        data.batches = lambda loader, device: loader  # from here on `train` takes the batches as they are

    model = mnist_ddp.ConvNet(train_set.channels, train_set.side).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(batches))
    model = dist.prepare_ddp_model(model) if args.ddp else model
    step = (model, batches, optimizer, scheduler, device)
    before_ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    dtype = torch.float16 if before_ampere else torch.bfloat16  # as in mnist_amp.py
    autocast = torch.autocast(device.type, dtype)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        dist.barrier()
        started = time.perf_counter()
        sums = mnist_amp.train(*step, autocast, scaler) if args.amp else mnist_ddp.train(*step)
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
