"""timeline sees sends and receives that start in one batch: NCCL's old backend, and its new one (torch 2.14)."""

import pytest
import torch
from world import ROOT

PROGRAM = """
import torch
import distributed as dist
from torch import distributed as torch_dist

def work(rank, n):
    dist.init_process_group()
    device = dist.get_device()
    model = torch.nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(40):
        model(torch.ones(4, 8, device=device)).sum().backward()
        for _ in range(2):
            there = torch.ones(1000, device=device)
            send = torch_dist.P2POp(torch_dist.isend, there, 1 - rank)
            receive = torch_dist.P2POp(torch_dist.irecv, torch.empty_like(there), 1 - rank)
            for work in torch_dist.batch_isend_irecv([send, receive]):
                work.wait()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    dist.launch(work)
"""


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="the newer backend and the groups' hooks came with torch 2.14")
@pytest.mark.parametrize("newer", [0, 1])
def test_a_batch_of_sends(machine, tmp_path, newer):
    machine.needs(2)
    (tmp_path / "train.py").write_text(PROGRAM)
    command = ("-m", "ddp_by_diff.timeline", "--steps=2", f"--out={tmp_path}/t", tmp_path / "train.py")
    run = machine.run(*command, gpus=("8.0", "8.0"), path=[ROOT], TORCH_DIST_USE_NCCL2=newer)
    assert "messages  per rank: 2 sends, 8.0 kB together" in run.out, run.out + run.err[-3000:]
    assert ("when 4 of them ran was not seen" in run.out) == (not newer)  # the older one joins the launches
