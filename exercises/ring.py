"""An all-reduce by hand, around a ring, and how many bytes each rank sends.  python -m exercises.ring"""

import torch
from torch import distributed as torch_dist

import distributed as dist

WORLDS = (2, 3, 4, 7)
NUMBERS = 84 * 1000  # float32; 2, 3, 4 and 7 divide it, so that all parts are equal


def ring_all_reduce(tensor):
    """Overwrite the tensor with the sum over all ranks; returns the bytes that this rank has sent."""
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    parts = tensor.tensor_split(size)  # views: what is written to a part is written to the tensor
    sent = 0
    for step in range(2 * (size - 1)):
        outgoing, incoming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        received = torch.empty_like(incoming)
        send = torch_dist.P2POp(torch_dist.isend, outgoing, (rank + 1) % size)  # to the right neighbour
        receive = torch_dist.P2POp(torch_dist.irecv, received, (rank - 1) % size)  # from the left one
        for work in torch_dist.batch_isend_irecv([send, receive]):
            work.wait()
        incoming.copy_(incoming + received if step < size - 1 else received)  # first add up, then pass the sums on
        sent += outgoing.nbytes
    return sent


def compare(numbers):
    """The bytes that each rank has sent, and whether all ranks have the result of torch's all_reduce."""
    torch.manual_seed(torch_dist.get_rank())
    mine = torch.randint(-1000, 1000, (numbers,)).float()  # whole numbers: their sums are exact in any order
    theirs = mine.clone()
    torch_dist.all_reduce(theirs)
    sent = ring_all_reduce(mine)
    found = dist.gather(torch.tensor([sent, int(torch.equal(mine, theirs))]))
    return [row[0].item() for row in found], all(row[1].item() for row in found)


def worker(local_rank, world_size):
    dist.init_process_group(backend="gloo")
    sent, equal = compare(NUMBERS)
    size = 4 * NUMBERS
    result = "equal to all_reduce" if equal else "DIFFERENT FROM all_reduce"
    dist.print_primary(
        f"{world_size} ranks, {size} bytes: each sends {max(sent)} bytes, {max(sent) / size:.4f} of the data; "
        f"2 (N - 1) / N = {2 * (world_size - 1) / world_size:.4f}; {result}"
    )
    dist.cleanup()


if __name__ == "__main__":
    for nproc in WORLDS:
        dist.launch(worker, nproc=nproc)
