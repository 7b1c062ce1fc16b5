"""The helpers in a package of one's own, as in a folder: it trains, saves and resumes, under python and torchrun.

Beside it stands another package that is called distributed, as Dask's is: whoever imports that one fails.
"""

import shutil

import pytest
from forked import ROOT, forker, shell

import checkpoint

HELPERS = ["distributed.py", "rendezvous.py", "launcher.py", "checkpoint.py", "data.py", "report.py"]

TRAIN = """
import sys
from pathlib import Path

import torch
from torch import nn

from . import checkpoint as ckpt
from . import data, report
from . import distributed as dist


def main_worker(local_rank, world_size, last_step):
    dist.init_process_group()
    start = ckpt.from_primary(report.find_start("runs", "runs/net" if last_step > 3 else None, {"lr": 0.1}))
    folder = start.folder or Path("runs/net")
    stop = ckpt.Preemption()
    train_set, _ = data.load("synthetic", "", limit=8 * world_size)
    sampler = dist.data_sampler(train_set, distributed=True)
    loader = data.loader(train_set, 8, sampler)
    torch.manual_seed(0)
    model = dist.prepare_ddp_model(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(dist.get_device()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    keeper = ckpt.Keeper(folder, {"lr": 0.1}, model=model, optimizer=optimizer)
    state = keeper.restore(start.path)
    reporter = report.Report(folder, keeper.config, state.get("history"))
    report.note_run(folder)
    for step in range(state.get("step", 0) + 1, last_step + 1):
        sampler.set_epoch(step)
        ((images, labels),) = data.batches(loader, dist.get_device())
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reporter.add({"epoch": step, "training_loss": dist.reduce(loss.detach()).item()})
        assert not stop.agreed()
        keeper.save(step, history=reporter.history)
    reporter.close()
    reporter.log(f"{len(reporter.history)} steps")
    dist.cleanup()


if __name__ == "__main__":
    dist.launch(main_worker, int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path):
    for helper in HELPERS:
        (tmp_path / "mine").mkdir(exist_ok=True)
        shutil.copy(ROOT / helper, tmp_path / "mine")
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "train.py").write_text(TRAIN)
    for name in "distributed", "checkpoint", "report", "launcher", "rendezvous":
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('this is another {name}')")
    return tmp_path


def start(folder, launcher, n, steps):
    if launcher == "python":
        return shell("-m", "mine.train", steps, cwd=folder, NPROC=n)
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}")
    return shell(*torchrun, "-m", "mine.train", steps, cwd=folder)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_it_trains_saves_and_resumes(folder, launcher, n):
    first = start(folder, launcher, n, 3)
    assert first.code == 0, first.err
    assert first.out.splitlines()[-1] == "3 steps"
    state = checkpoint.read(folder / "runs" / "net" / "last.pt")
    assert state["step"] == 3 and len(state["random"]) == n and len(state["history"]) == 3
    again = start(folder, launcher, n, 5)
    assert again.code == 0, again.err
    assert again.out.splitlines()[-1] == "5 steps"
    resumed = checkpoint.read(folder / "runs" / "net" / "last.pt")
    assert resumed["step"] == 5 and resumed["history"][:3] == state["history"] and len(resumed["history"]) == 5
    losses = [row["training_loss"] for row in resumed["history"]]
    assert losses[4] < losses[0]
    left = {path.name.partition(".tfevents")[0] for path in (folder / "runs" / "net").iterdir()}
    files = {"config.json", "curves.png", "last.pt", "log.txt", "metrics.csv", "previous.pt", "events.out", ".lock"}
    assert left == files


def test_every_helper_can_be_imported_from_a_package(folder):
    names = [helper.removesuffix(".py") for helper in HELPERS]
    (folder / "program.py").write_text(f"from mine import {', '.join(names)}\nprint(checkpoint.dist is distributed)")
    done = forker().run(folder / "program.py", cwd=folder)
    assert (done.code, done.out) == (0, "True\n"), done.err


def test_every_helper_can_be_imported_from_a_folder(tmp_path):
    for helper in HELPERS:
        shutil.copy(ROOT / helper, tmp_path)
    names = [helper.removesuffix(".py") for helper in HELPERS]
    (tmp_path / "program.py").write_text(f"import {', '.join(names)}\nprint(checkpoint.dist is distributed)")
    done = forker().run(tmp_path / "program.py", cwd=tmp_path)
    assert (done.code, done.out) == (0, "True\n"), done.err


WITHOUT_NUMPY = """
import sys
from pathlib import Path

sys.modules["numpy"] = None  # importing it fails; torch can do without

import torch

import checkpoint
import distributed as dist


def worker(local_rank, world_size):
    dist.init_process_group()
    keeper = checkpoint.Keeper("run", model=torch.nn.Linear(2, 2))
    keeper.save(1, mine=torch.ones(2))
    state = keeper.restore(Path("run/last.pt"))
    dist.print_primary(state["mine"].tolist(), checkpoint.from_primary(Path("a")))
    dist.cleanup()


if __name__ == "__main__":
    dist.launch(worker)
"""


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_checkpoints_need_no_numpy(tmp_path, n):
    (tmp_path / "program.py").write_text(WITHOUT_NUMPY)
    done = shell(tmp_path / "program.py", cwd=tmp_path, PYTHONPATH=ROOT, NPROC=n)
    assert done.code == 0 and done.out.splitlines()[-1] == "[1.0, 1.0] a", done.err
