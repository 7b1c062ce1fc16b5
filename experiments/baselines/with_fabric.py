"""The same training written with Lightning Fabric: setup, setup_dataloaders, backward, all_reduce.

OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 -m experiments.baselines.with_fabric --dataset synthetic
"""

import os
import time

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from experiments.baselines.common import epoch_line, load, make_model, parse_args


def main(args):
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(accelerator=accelerator, strategy="ddp", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    fabric.launch()
    train_set, test_set, options = load(args)
    batch_size = args.batch_size // fabric.world_size
    train_loader, test_loader = fabric.setup_dataloaders(
        DataLoader(train_set, batch_size, shuffle=True, **options), DataLoader(test_set, batch_size, **options)
    )
    model = make_model(args)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))

    for epoch in range(1, args.epochs + 1):
        model.train()
        sums = torch.zeros(4, dtype=torch.float64, device=fabric.device)  # loss, images, correct, tested
        started = time.perf_counter()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        sums.cpu()  # waits for the device
        seconds = time.perf_counter() - started

        model.eval()
        with torch.no_grad():
            for images, labels in test_loader:
                sums[2] += (model(images).argmax(1) == labels).sum()
                sums[3] += len(labels)
        loss, seen, correct, count = fabric.all_reduce(sums, reduce_op="sum").tolist()
        line = epoch_line(epoch, args.epochs, loss / seen, int(correct), int(count), seen / seconds)
        fabric.print(line, flush=True)
    if torch.distributed.is_initialized():  # Fabric leaves the group to the interpreter's end, which sometimes aborts
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
