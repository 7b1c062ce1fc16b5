"""The same training written with Hugging Face Accelerate: prepare, backward, gather_for_metrics.

OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 -m experiments.baselines.with_accelerate --dataset synthetic
"""

import time

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from experiments.baselines.common import epoch_line, load, make_model, parse_args


def main(args):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    train_set, test_set, options = load(args)
    batch_size = args.batch_size // accelerator.num_processes
    train_loader = DataLoader(train_set, batch_size, shuffle=True, **options)
    test_loader = DataLoader(test_set, batch_size, **options)
    model = make_model(args)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    # Of all processes: the prepared scheduler takes as many steps at once as there are processes.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    prepared = accelerator.prepare(model, optimizer, scheduler, train_loader, test_loader)
    model, optimizer, scheduler, train_loader, test_loader = prepared

    for epoch in range(1, args.epochs + 1):
        model.train()
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # loss, images
        started = time.perf_counter()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        sums.cpu()  # waits for the device
        seconds = time.perf_counter() - started

        model.eval()
        correct, count = 0, 0
        with torch.no_grad():
            for images, labels in test_loader:
                right = accelerator.gather_for_metrics(model(images).argmax(1) == labels)
                correct, count = correct + right.sum().item(), count + len(right)
        loss, seen = accelerator.reduce(sums).tolist()
        accelerator.print(epoch_line(epoch, args.epochs, loss / seen, correct, count, seen / seconds), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(parse_args())
