"""The smallest complete DDP program: random data, one linear layer, and every call that a real program needs.

python min_DDP.py                          # one process per visible GPU; two processes without a GPU
python min_DDP.py --nproc 3                # three processes
CUDA_VISIBLE_DEVICES=0,1 python min_DDP.py
torchrun --nproc_per_node=2 min_DDP.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distributed as dist  # this project's file, not torch.distributed


def main_worker(local_rank, world_size, args):
    dist.init_process_group()
    device = dist.get_device()  # the GPU whose index is local_rank, or the CPU
    torch.manual_seed(0)  # the same data and the same weights in every process

    points = torch.randn(1000, 8)
    dataset = TensorDataset(points, points.argmax(1))
    sampler = dist.data_sampler(dataset)  # each process gets its share of the examples
    loader = DataLoader(dataset, args.batch_size // world_size, sampler=sampler)

    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model = dist.prepare_ddp_model(model)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # a different order in each epoch
        for inputs, labels in loader:
            logits = model(inputs.to(device))
            loss = F.cross_entropy(logits, labels.to(device))
            loss.backward()  # DDP averages the gradients of all processes here
            optimizer.step()
            optimizer.zero_grad()
        correct = logits.argmax(1) == labels.to(device)
        loss = dist.reduce(loss)  # the mean over all processes; exact, because their batches have the same size
        correct = torch.cat(dist.gather(correct))  # of the last batch, from all processes
        dist.print_primary(f"epoch {epoch}  loss {loss:.4f}  last batch: {correct.sum()} of {len(correct)} correct")

    dist.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=40, help="global batch size (default: %(default)s)")
    parser.add_argument("--nproc", type=int, help="processes to start (default: one per GPU, or 2 without a GPU)")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    if args.batch_size < dist.count_processes(args.nproc):
        parser.error("--batch-size must be at least the number of processes, because each needs an example")
    dist.launch(main_worker, args, nproc=args.nproc)
