"""What equivalence/ says of a program on two GPUs is what it says of it on the CPU."""

import re

import pytest
from world import ROOT

TRAIN = """
import sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import distributed as dist

def main(rank, n):
    dist.init_process_group()
    device = dist.get_device()
    torch.manual_seed(0)
    x = torch.randn(600, 8)
    if "data_on_gpu" in sys.argv:
        x = x.to(device)
    dataset = TensorDataset(x, x.argmax(1))
    norm = torch.nn.BatchNorm1d(64) if "batch_norm" in sys.argv else torch.nn.Tanh()
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), norm, torch.nn.Linear(64, 8)).to(device)
    model = dist.prepare_ddp_model(model) if n > 1 else torch.nn.DataParallel(model)  # on all GPUs that it finds
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for a, b in DataLoader(dataset, 30 // n, sampler=dist.data_sampler(dataset)):
        loss = F.cross_entropy(model(a.to(device)), b.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if __name__ == "__main__":
    dist.launch(main)
"""
SAME = "THE SAME as one process, up to rounding, in the 3 steps compared"
BUT_FOR_NORM = "THE SAME as one process, except for BatchNorm"


@pytest.mark.parametrize(
    ("what", "verdict"), [("data_on_cpu", SAME), ("data_on_gpu", SAME), ("batch_norm", BUT_FOR_NORM)]
)
def test_two_gpus_and_one(machine, tmp_path, what, verdict):
    (tmp_path / "train.py").write_text(TRAIN)
    run = machine.run("-m", "ddp_by_diff.equivalence", tmp_path / "train.py", what, gpus=("8.0", "8.0"), path=[ROOT])
    assert run.code == 0 and re.sub(r"\n +", " ", run.out).startswith(f"verdict       {verdict}"), run.out + run.err


COMMANDS = {  # of README, docs/class.md, docs/collectives.md and docs/mistakes.md; what each prints
    "ddp_by_diff.equivalence min_DDP.py": r"verdict +THE SAME.*on 2 processes \(over gloo, with 1 visible GPU\)",
    "ddp_by_diff.equivalence -m demos.ways sum": r"verdict +DIFFERENT.*averaging +WRONG: 2 times",
    "ddp_by_diff.equivalence -m demos.mistakes no_ddp wrong": "verdict +DIFFERENT",
    "demos.collectives all_reduce": r"rank 2: \[100, 200, 300\] -> \[111, 222, 333\]",
    "demos.mistakes no_ddp wrong": "difference between the ranks' weights: 0.33",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_pages_run_on_a_machine_with_one_gpu(machine, command):
    run = machine.run("-m", *command.split(), gpus=("8.0",), cwd=ROOT, COLUMNS=200)
    assert re.search(COMMANDS[command], run.out, re.DOTALL), run.out + run.err


def test_a_program_that_asks_for_nccl_gets_the_line_to_type_on_a_machine_with_one_gpu(machine, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("init_process_group()", 'init_process_group("nccl")'))
    run = machine.run("-m", "ddp_by_diff.equivalence", tmp_path / "train.py", gpus=("8.0",), path=[ROOT])
    assert run.code == 2 and run.err.splitlines()[-1].endswith('type init_process_group("gloo") in a copy of it')
