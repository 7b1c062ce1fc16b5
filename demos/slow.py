"""A program for timeline to examine: rank 1, or each rank, is 60 ms late in one part of its step.

python -m ddp_by_diff.timeline -m demos.slow forward
python -m ddp_by_diff.timeline -m demos.slow loading --every-rank --workers 2
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distributed as dist

PARTS = ("loading", "forward", "backward", "nothing")
SECONDS = 0.06


class Points(Dataset):
    def __init__(self, is_slow):
        self.is_slow = is_slow

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if self.is_slow and index % 50 == 0:
            time.sleep(SECONDS)
        return torch.full((20,), index / 10_000), index % 3


def main(local_rank, world_size, part, every_rank, workers):
    dist.init_process_group()
    is_late = every_rank or dist.get_rank() == 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    if is_late and part == "forward":
        model[0].register_forward_hook(lambda *_: time.sleep(SECONDS))
    if is_late and part == "backward":
        model[1].register_full_backward_hook(lambda *_: time.sleep(SECONDS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = dist.prepare_ddp_model(model)
    rows = range(dist.get_rank() * 50, 10_000, 1)  # each batch has one index that can be divided by 50
    loader = DataLoader(Points(is_late and part == "loading"), batch_size=50, sampler=rows, num_workers=workers)
    for points, labels in loader:
        F.cross_entropy(model(points), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS, help="the part of the step that is slow")
    parser.add_argument("--every-rank", action="store_true", help="all ranks are late, not only rank 1")
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers of each rank (default: %(default)s)")
    args = parser.parse_args()
    dist.launch(main, args.part, args.every_rank, args.workers)
