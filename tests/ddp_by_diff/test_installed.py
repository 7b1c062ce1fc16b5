"""The wheel: built, installed into a fresh environment, and its commands run on a program in another folder."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from world import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN = """
import sys, torch
import data, distributed, doctor, replay, timeline
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    examples = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 4))
    sampler = torch.utils.data.DistributedSampler(examples)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in torch.utils.data.DataLoader(examples, 8, sampler=sampler):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    assert {module.OWNER for module in (data, distributed, doctor, replay, timeline)} == {"the program"}
    assert not {"equivalence", "instruments", "distributed_launcher"} & set(sys.modules)
    dist.destroy_process_group()

if __name__ == "__main__": main()
"""
OWNED = "OWNER = 'the program'\n"


def call(*command, cwd=None):
    run = subprocess.run([*map(str, command)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    return run.returncode, run.stdout + run.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The folder of an environment's commands: a new one, in which our wheel is, and this one's torch can be found."""
    folder = tmp_path_factory.mktemp("installed")
    code, said = call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "wheel", ROOT)
    if code:
        pytest.skip(f"the wheel can't be built (pip needs hatchling from its index): {said[-300:]}")
    call(sys.executable, "-m", "venv", folder / "environment")
    place = folder / "environment" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (place / "torch_of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    (place / "distributed").mkdir()
    (place / "distributed/__init__.py").write_text(OWNED)  # Dask's package has this name
    before = set(place.iterdir())
    pip = [folder / "environment/bin/python", "-m", "pip"]
    assert call(*pip, "install", "-q", "--no-deps", *(folder / "wheel").iterdir())[0] == 0
    brought = {path.name for path in set(place.iterdir()) - before}
    assert {name for name in brought if not name.endswith(".dist-info")} == {"ddp_by_diff"}
    yield folder / "environment/bin"
    assert call(*pip, "uninstall", "-q", "-y", "ddp-by-diff")[0] == 0
    assert set(place.iterdir()) == before and not list((folder / "environment/bin").glob("ddp-*"))


@pytest.fixture
def train(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    for name in "data", "doctor", "replay", "timeline":
        (tmp_path / f"{name}.py").write_text(OWNED)
    return tmp_path


def test_the_commands_run_from_any_folder(environment, train):
    torchrun = [environment / "python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for tool in ["--no-python", environment / "ddp-timeline"], ["-m", "ddp_by_diff.timeline"]:
        code, said = call(*torchrun, *tool, "train.py", cwd=train)
        assert code == 0 and "1 all-reduce, 144 B" in said, said
        assert (train / "timeline.svg").exists() and (train / "timeline.json").exists()
    code, said = call(*torchrun, "--no-python", environment / "ddp-equivalence", "train.py", cwd=train)
    assert code == 0 and "THE SAME" in said, said
    code, said = call(*torchrun, "--no-python", environment / "ddp-replay", "train.py", cwd=train)
    assert code == 0 and "= model gradients" in said and (train / "replay.html").exists(), said
    code, said = call(environment / "ddp-doctor", cwd=train)
    assert code == 0 and "an all-reduce over all devices returns the correct sum" in said, said


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_ranks_that_a_command_starts_find_the_tools(environment, train, method):
    """Spawned where the process has threads; both tools start the ranks of a program that has no launcher."""
    line = "import torch; torch.ones(2000, 2000) @ torch.ones(2000, 2000)\n" if method == "spawn" else ""
    for name in "distributed.py", "distributed_launcher.py":
        (train / name).write_text((ROOT / name).read_text())
    (train / "own.py").write_text(line + (ROOT / "min_DDP.py").read_text())
    code, said = call(environment / "ddp-equivalence", "own.py", cwd=train)
    assert code == 0 and "THE SAME" in said, said
    code, said = call(environment / "ddp-timeline", "own.py", cwd=train)
    assert code == 0 and "all-reduce" in said, said
    code, said = call(environment / "ddp-replay", "own.py", cwd=train)
    assert code == 0 and "= model gradients" in said, said
    code, said = call(environment / "ddp-timeline", "nothing.py", cwd=train)
    assert code == 2 and said == "ddp-timeline: error: there is no file nothing.py\n", said
