"""Which GPU each process gets, how processes start, and what is refused.  On real GPUs, or simulated ones."""

import json
import os
import shutil

import pytest
import torch
from test_variables import srun
from world import FEW_DIGITS, ROOT, free_port

WHO = """
import json
import os
import sys

import torch

here = os.getpid()  # in a forked process this is the parent's, in a spawned one its own
if sys.argv[1] == "tasks":  # become one of these: each has variables of its own before it imports anything of ours
    for task in map(json.loads, sys.argv[2:]):
        if os.fork() == 0:
            os.environ.update(task)
            sys.argv[1:] = ["who"]
            break
    else:
        sys.exit(max(os.wait()[1] for _ in sys.argv[2:]) > 0)

import distributed as dist


def who(local_rank, world_size):
    dist.init_process_group()
    device = dist.get_device()
    name = f"{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"
    total = dist.all_reduce(torch.ones(2, device=device)).tolist()
    start = "forked" if os.getpid() != here else "not forked"
    found = dist.get_rank(), str(device), name, total, start
    print("I am", json.dumps(found), flush=True)  # under a launcher `launch` returns it on rank 0 only
    return found


def first_three_steps(local_rank, world_size):
    from torch import nn
    dist.init_process_group()
    device = dist.get_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10))
    model = dist.prepare_ddp_model(model.to(device), sync_bn=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    images, labels = torch.randn(12, 1, 8, 8), torch.arange(12) % 10
    mine = slice(dist.get_rank(), None, world_size)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(images[mine].to(device)), labels[mine].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(dist.reduce(loss.detach()).item())
    return losses


if __name__ == "__main__":
    what, *args = sys.argv[1:]
    if what == "start_cuda_first":
        torch.zeros(1, device="cuda")
        what = "who"
    print(json.dumps(dist.launch(globals()[what], *args)))
"""


@pytest.fixture(scope="module")
def start(machine, tmp_path_factory):
    """start("who") runs the program above; it prints what `launch` has returned."""
    program = tmp_path_factory.mktemp("start") / "program.py"
    program.write_text(WHO)
    return lambda *args, gpus=("8.0", "8.0"), **options: machine.run(program, *args, gpus=gpus, path=[ROOT], **options)


def answer(run):
    assert run.code == 0, run.err[-3000:]
    return json.loads(run.out.splitlines()[-1])


@pytest.fixture(scope="module")
def uuids(machine, start):
    """Of the first two GPUs."""
    machine.needs(2)
    found = [answer(start("who", CUDA_VISIBLE_DEVICES=i))[2] for i in "01"]
    assert found[0] != found[1]
    return found


def test_every_form_of_cuda_visible_devices(start, uuids):
    first, second = uuids
    forms = {"1,0": (second, 2), f"GPU-{second}": (second, 1), "0,5": (first, 1)}
    for form, (name, count) in forms.items():
        rank, device, found, total, _ = answer(start("who", CUDA_VISIBLE_DEVICES=form))
        assert (rank, device, found, total) == (0, "cuda:0", name, [count, count]), form
    _, device, _, total, _ = answer(start("who", CUDA_VISIBLE_DEVICES=""))
    assert (device, total) == ("cpu", [2, 2])


def test_processes_are_forked_unless_cuda_was_started(start):
    """The driver's library is loaded on every machine with GPUs.  Only CUDA that was started forbids a fork."""
    for what, how in ("who", "forked"), ("start_cuda_first", "not forked"):
        assert answer(start(what))[3:] == [[2, 2], how]


RESULT = """
import json, os, torch
import distributed as dist
here = os.getpid()

def work(rank, n):
    dist.init_process_group()
    total = dist.reduce(torch.ones(2, device=dist.get_device()), "sum")
    contexts = [gpu for gpu in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(gpu)]
    return total, [found.tolist() for found in dist.gather(torch.tensor(contexts))]

def how(rank, n):
    return "forked" if os.getpid() != here else "spawned"

if __name__ == "__main__":
    total, contexts = dist.launch(work)
    print(json.dumps([str(total.device), total.tolist(), contexts, torch.cuda.is_initialized(), dist.launch(how)]))
"""


@pytest.mark.parametrize("helpers", [["distributed.py"], ["distributed.py", "distributed_launcher.py"]])
def test_a_result_on_a_gpu_comes_back_on_the_cpu_and_each_rank_has_used_its_own_gpu_only(machine, tmp_path, helpers):
    """If the launching process started CUDA, nothing could be forked after that."""
    machine.needs(2)
    for file in helpers:
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "program.py").write_text(RESULT)
    without_root = f"import sys; sys.path[:] = [folder for folder in sys.path if folder != {str(ROOT)!r}]"
    path = os.pathsep.join(filter(None, [str(ROOT / "tests/simulated_gpus"), os.environ.get("PYTHONPATH")]))
    run = machine.run(tmp_path / "program.py", gpus=("8.0", "8.0"), before=without_root, PYTHONPATH=path)
    found = answer(run)
    assert found == ["cpu", [2, 2], [[0], [1]], False, "forked" if len(helpers) == 2 else "spawned"]


def test_more_processes_than_gpus_share_them_over_gloo(start):
    """Without gloo they are refused: test_check.py."""
    run = start("who", NPROC=3, DIST_BACKEND="gloo")  # two of them on one card
    assert answer(run)[3] == [3, 3] and "3 processes, gloo, cuda" in run.out


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy", "nccl-lazy", "cpu:gloo,cuda:nccl"])
def test_nccl_by_each_name_that_torch_has_for_it(machine, start, name):
    machine.needs(2)
    if not all(map(torch.distributed.is_backend_available, (part.rpartition(":")[2] for part in name.split(",")))):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    run = start("who", DIST_BACKEND=name)
    assert answer(run)[3] == [2, 2] and f"2 processes, {name}, cuda" in run.out
    run = start("who", DIST_BACKEND=name, NPROC=3)
    if "gloo" not in name:
        assert run.code == 2 and "3 processes, but 2 visible GPU(s): start 2" in run.err, run.err
        run = start("who", DIST_BACKEND=name, CUDA_VISIBLE_DEVICES="")
        assert run.code == 2 and run.err.startswith(f"distributed: backend {name} needs a visible CUDA GPU"), run.err


def test_one_gpu_per_task_as_under_srun(start, uuids):
    port = str(free_port())
    tasks = []
    for rank in range(2):
        slurm = srun(rank, 2, rank, 1, "localhost") | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        tasks.append(json.dumps(slurm | {"CUDA_VISIBLE_DEVICES": str(rank)}))
    run = start("tasks", *tasks)
    assert run.code == 0, run.err[-3000:]
    for rank in range(2):
        assert f"I am {json.dumps([rank, 'cuda:0', uuids[rank], [2.0, 2.0], 'forked'])}\n" in run.out, run.out


def test_sync_batchnorm_is_one_process(machine, start):
    """SyncBatchNorm on two GPUs: the losses are those of one CPU process with the whole batch."""
    exact = answer(start("first_three_steps", gpus=(), CUDA_VISIBLE_DEVICES="", NPROC=1))
    assert answer(start("first_three_steps")) == machine.approx(exact)


def test_the_doctor_finds_two_gpus(machine):
    machine.needs(2)
    run = machine.run("-m", "ddp_by_diff.doctor", gpus=("8.0", "9.0"))
    assert run.code == 0, run.out + run.err
    assert all(text in run.out for text in ("2, CUDA_VISIBLE_DEVICES", "cuda:0 computes", "cuda:1 computes", "nccl"))
    assert "cuda:1 computes (Simulated GPU 9.0)" in run.out or machine.cards


def test_the_cells_of_the_notebook(machine, tmp_path):
    """All cells in one program, one after the other, as a kernel runs them; but for those that start other programs."""
    notebook = json.loads((ROOT / "mnist_notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    text = "\n".join(["import os", f"os.chdir({str(ROOT)!r})", *(cell for cell in cells if "python(" not in cell)])
    text = text.replace("epochs=3, batch_size=200", "epochs=1, batch_size=40").replace("dry_run=False", "dry_run=True")
    text = text.replace("except RuntimeError", "except SystemExit")  # a notebook gets the former, a program the latter
    (tmp_path / "cells.py").write_text(f"{text}\nprint('the end')\n")
    run = machine.run(tmp_path / "cells.py", path=[ROOT], before=FEW_DIGITS)
    assert run.code == 0 and run.out.endswith("the end\n"), run.err[-3000:]
    assert "on cuda:0, global batch" in run.out and "a mistake on rank 1" in run.out


def test_the_doctor_says_that_the_driver_is_too_old(simulated):
    run = simulated.run("-m", "ddp_by_diff.doctor", gpus=("8.0",), SIM_OLD_DRIVER=1)
    assert run.code == 1 and "-> nvidia-smi shows the driver's newest CUDA" in run.out, run.out + run.err
