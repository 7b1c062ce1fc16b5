"""mnist_horovod.py and mnist_xla.py: the same training under other engines, each in an environment of its own.

The slow tests make these environments: gigabytes, and minutes of compiling.  Ready-made ones are used instead if
HOROVOD_ENVIRONMENT and XLA_ENVIRONMENT name their folders.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from world import ENVIRONMENT, ROOT, SHELL, forker

SYNTHETIC = ("--dataset", "synthetic")
PACKAGES = {"mnist_horovod": "horovod", "mnist_xla": "torch_xla"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_one_line(name):
    if importlib.util.find_spec(PACKAGES[name]):
        pytest.skip(f"{PACKAGES[name]} is installed")
    done = forker().run("-m", f"variants.{name}", *SYNTHETIC)
    assert (done.code, done.out) == (2, "")
    said = re.fullmatch(r"mnist_\w+\.py: error: .+ is not installed.*: bash (variants/\S+\.sh) FOLDER\n", done.err)
    assert said and (ROOT / said[1]).is_file(), done.err
    assert forker().run("-m", f"variants.{name}", "--help").code == 0


@pytest.mark.parametrize("script", ["install_horovod.sh", "install_xla.sh"])
def test_an_installation_without_a_folder_is_refused(script):
    done = subprocess.run(["bash", ROOT / "variants" / script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stderr.startswith(f"usage: bash variants/{script} FOLDER"), done.stderr


# ------------------------------------------------------------------------------------------------ slow: they really run


def installed(script, folder, *packages):
    """The environment's folder; skips the test if packages can't be downloaded."""
    command = ["bash", ROOT / "variants" / script, folder, *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3300)
    if done.returncode and re.search("No matching distribution|NewConnectionError", done.stderr):
        pytest.skip(f"{script}: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " is installed: " in done.stdout.splitlines()[-1]
    return folder


@pytest.fixture(scope="module")
def horovod_environment(tmp_path_factory):
    if "HOROVOD_ENVIRONMENT" in os.environ:
        return Path(os.environ["HOROVOD_ENVIRONMENT"])
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("horovod") / "venv"
    subprocess.run(["python3", "-m", "venv", folder], check=True, timeout=300)
    packages = next(folder.glob("lib/python*/site-packages"))  # with this environment's torch: no second download of it
    (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
    return installed("install_horovod.sh", folder, "torch", "torchvision")


@pytest.fixture(scope="module")
def xla_environment(tmp_path_factory):
    if "XLA_ENVIRONMENT" in os.environ:
        return Path(os.environ["XLA_ENVIRONMENT"])
    folder = tmp_path_factory.mktemp("xla") / "venv"
    if shutil.disk_usage(folder.parent).free < 12 << 30:
        pytest.skip("torch_xla and its torch need 12 GB while they are installed")
    return installed("install_xla.sh", folder)


def run(environment, *command, **variables):
    """Returns (exit code, stdout, stderr) of a program of that environment."""
    env = ENVIRONMENT | {"PATH": f"{environment}/bin:{os.environ['PATH']}"} | variables
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    return done.returncode, done.stdout, done.stderr


def epochs(out):
    """[(loss, accuracy in percent), ...]"""
    return [(float(a), float(b)) for a, b in re.findall(r"loss ([\d.]+)  accuracy ([\d.]+)%", out)]


def ddp(*args):
    done = forker().run("mnist_ddp.py", *SYNTHETIC, *args, timeout=600, **SHELL)
    assert done.code == 0, done.err
    return epochs(done.out)


def assert_same_training(out, reference, loss):
    assert len(epochs(out)) == len(reference) == 3, out
    for (ours, _), (theirs, _) in zip(epochs(out), reference, strict=True):
        assert ours == pytest.approx(theirs, rel=loss)
    assert epochs(out)[-1][1] == pytest.approx(reference[-1][1], abs=0.2)


@pytest.mark.slow
@pytest.mark.install
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_horovod_trains_as_ddp_does(horovod_environment, processes):
    launch = ("horovodrun", "-np", str(processes), "--gloo", "python", "-m", "variants.mnist_horovod")
    code, out, err = run(horovod_environment, *launch, *SYNTHETIC)
    assert code == 0, out + err
    assert_same_training(out, ddp("--nproc", processes), loss=0.05)  # another layout: it rounds otherwise
    assert out.count("epoch 1/3") == 1, "rank 0 alone prints"


EXACT = """
import horovod.torch as hvd
import torch
import torch.nn.functional as F

hvd.init()


def weights(rank, size):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if size > 1:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        images, labels = torch.randn(8, 3, 8, 8, generator=generator), torch.randint(5, (8,), generator=generator)
        F.cross_entropy(model(images[rank::size].double()), labels[rank::size]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


print("difference", (weights(hvd.rank(), hvd.size()) - weights(0, 1)).abs().max().item())
"""


@pytest.mark.slow
@pytest.mark.install
@pytest.mark.timeout(4000)
def test_horovod_reaches_the_weights_of_one_process(horovod_environment, tmp_path):
    """In float64, with momentum and the scheduler, which reads and writes what DistributedOptimizer wraps."""
    (tmp_path / "exact.py").write_text(EXACT)
    code, out, err = run(horovod_environment, "horovodrun", "-np", "2", "--gloo", "python", tmp_path / "exact.py")
    assert code == 0, out + err
    found = [float(difference) for difference in re.findall(r"difference (\S+)", out)]
    assert len(found) == 2 and max(found) < 1e-12


@pytest.mark.slow
@pytest.mark.install
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("size", ["0", "1"])
def test_horovod_refuses_a_batch_that_is_too_small(horovod_environment, size):
    launch = ("horovodrun", "-np", "2", "--gloo", "python", "-m", "variants.mnist_horovod")
    code, out, err = run(horovod_environment, *launch, *SYNTHETIC, "--batch-size", size)
    message = {"0": "--epochs and --batch-size must be at least 1", "1": "--batch-size 1 is too small"}[size]
    assert code != 0 and message in out + err and "Traceback" not in out


@pytest.mark.slow
@pytest.mark.install
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("devices", [1, 2])
def test_xla_trains_as_ddp_does(xla_environment, devices):
    """BatchNorm sees the whole batch, as with one process of DDP: hence that reference for both."""
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    code, out, err = run(xla_environment, "python", "-m", "variants.mnist_xla", *SYNTHETIC, **variables)
    assert code == 0, out + err
    assert f"XLA: 1 process, {devices} device(s), CPU" in out
    assert_same_training(out, ddp("--nproc", 1), loss=0.05)


@pytest.mark.slow
@pytest.mark.install
@pytest.mark.timeout(4000)
def test_xla_is_one_process(xla_environment):
    variables = {"PJRT_DEVICE": "CPU", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    code, out, err = run(xla_environment, "python", "-m", "variants.mnist_xla", *SYNTHETIC, **variables)
    assert code == 2 and "start it with python, not with a launcher" in err
