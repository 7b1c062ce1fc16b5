"""The DDP loop of the usual tutorial: torchvision's data set, a transform per image, DataLoader, DistributedSampler.

OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 -m experiments.baselines.plain_ddp --dataset synthetic
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from experiments.baselines.common import epoch_line, load, make_model, parse_args


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # correct, tested
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        sums[0] += (model(images).argmax(1) == labels).sum()
        sums[1] += len(labels)
    return sums


def main(args):
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set, options = load(args)
    train_sampler = DistributedSampler(train_set, seed=args.seed)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    batch_size = args.batch_size // world_size
    train_loader = DataLoader(train_set, batch_size, sampler=train_sampler, pin_memory=cuda, **options)
    test_loader = DataLoader(test_set, batch_size, sampler=test_sampler, pin_memory=cuda, **options)

    model = make_model(args).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))

    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, images, correct, tested
        started = time.perf_counter()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        sums.cpu()  # waits for the device
        seconds = time.perf_counter() - started

        sums[2:] = evaluate(model, test_loader, device)
        dist.all_reduce(sums)
        loss, seen, correct, count = sums.tolist()
        if rank == 0:
            print(epoch_line(epoch, args.epochs, loss / seen, int(correct), int(count), seen / seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
