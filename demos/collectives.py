"""The programs of docs/collectives.md: what each rank holds before and after a collective, in three processes.

python -m demos.collectives all_reduce
"""

import argparse
import time

import torch
from torch import distributed as torch_dist

import distributed as dist


def broadcast(mine):
    torch_dist.broadcast(mine, src=0)  # in place: rank 0 sends, and the others' numbers are overwritten
    return mine


def reduce(mine):
    torch_dist.reduce(mine, dst=0, op=torch_dist.ReduceOp.SUM)  # in place, but only rank 0 gets the sum
    return mine if torch_dist.get_rank() == 0 else None  # on the other ranks, `mine` is now undefined


def all_reduce(mine):
    torch_dist.all_reduce(mine, op=torch_dist.ReduceOp.SUM)  # in place; also MAX, MIN, PRODUCT, ...
    return mine


def gather(mine):
    parts = [torch.empty_like(mine) for _ in range(torch_dist.get_world_size())]  # space for the results
    torch_dist.gather(mine, parts if torch_dist.get_rank() == 0 else None, dst=0)
    return torch.cat(parts) if torch_dist.get_rank() == 0 else None


def all_gather(mine):
    parts = [torch.empty_like(mine) for _ in range(torch_dist.get_world_size())]
    torch_dist.all_gather(parts, mine)
    return torch.cat(parts)


def scatter(mine):
    part = torch.empty(1, dtype=torch.int64)
    torch_dist.scatter(part, list(mine.split(1)) if torch_dist.get_rank() == 0 else None, src=0)
    return part


def reduce_scatter(mine):
    part = torch.empty(1, dtype=torch.int64)
    torch_dist.reduce_scatter_tensor(part, mine, op=torch_dist.ReduceOp.SUM)
    return part


def all_to_all(mine):
    parts = torch.empty_like(mine)
    torch_dist.all_to_all_single(parts, mine)  # the first part goes to rank 0, the second to rank 1, ...
    return parts


def send_recv(mine):
    if torch_dist.get_rank() == 0:
        torch_dist.send(mine, dst=1)  # returns when the numbers are being sent
    if torch_dist.get_rank() == 1:
        torch_dist.recv(mine, src=0)  # in place; waits for them
    return mine


def barrier(mine):
    started = time.monotonic()
    time.sleep(mine.item())  # this rank arrives after 0, 1 or 2 seconds
    torch_dist.barrier()  # all ranks wait for the last one
    return torch.tensor([round(time.monotonic() - started)])  # it continues after this time


def tens(rank, world_size):
    """Return [1, 2, 3] on rank 0, [10, 20, 30] on rank 1, ..., so that a sum shows which ranks it contains."""
    return torch.arange(1, world_size + 1) * 10**rank


def one_number(rank, world_size):
    return tens(rank, world_size)[:1]


def only_rank_0(rank, world_size):
    return tens(rank, world_size) if rank == 0 else torch.tensor([], dtype=torch.int64)


def seconds(rank, world_size):
    return torch.tensor([rank])


COLLECTIVES = {  # the function, and what makes its argument
    "broadcast": (broadcast, tens),
    "reduce": (reduce, tens),
    "all_reduce": (all_reduce, tens),
    "gather": (gather, one_number),
    "all_gather": (all_gather, one_number),
    "scatter": (scatter, only_rank_0),
    "reduce_scatter": (reduce_scatter, tens),
    "all_to_all": (all_to_all, tens),
    "send_recv": (send_recv, tens),
    "barrier": (barrier, seconds),
}


def before_and_after(name):
    """Return for each rank a pair of lists: its numbers before and after the collective (None: no result)."""
    function, numbers = COLLECTIVES[name]
    mine = numbers(torch_dist.get_rank(), torch_dist.get_world_size())
    before = mine.tolist()
    torch_dist.barrier()
    after = function(mine)
    pairs = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(pairs, (before, None if after is None else after.tolist()))
    return pairs


def worker(local_rank, world_size, name):
    dist.init_process_group(backend="gloo")
    for rank, (before, after) in enumerate(before_and_after(name)):
        dist.print_primary(f"rank {rank}: {before} -> {'no result' if after is None else after}")
    dist.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("collective", choices=COLLECTIVES, help="the collective to run")
    parser.add_argument("--nproc", type=int, default=3, help="number of processes (default: %(default)s)")
    args = parser.parse_args()
    if args.nproc < 2:
        parser.error(f"--nproc {args.nproc}: a collective needs at least two processes, so type --nproc 2")
    dist.launch(worker, args.collective, nproc=args.nproc)
