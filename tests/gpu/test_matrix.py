"""The scripts on one and two GPUs, over nccl and gloo, in each precision.

Where the GPUs are simulated, the CPU computes; so the losses are the CPU's, and what is seen is the control flow: which
device, which process, which message.  Speed, memory, rounding and the true NCCL are not seen.
"""

import functools
import importlib.util
import re

import pytest
from world import FEW_DIGITS, ROOT

SHORT = ("--dataset", "synthetic", "--dry-run", "--batch-size", "40")

TELL = f"""
import torch
from torch.nn import functional
{FEW_DIGITS}
def told(*args, plain=functional.cross_entropy, **flags):
    loss = plain(*args, **flags)
    print(f"a step's loss {{loss.item()}}", flush=True)
    return loss

functional.cross_entropy = told

class Autocast(torch.autocast):
    def __init__(self, device_type, dtype):
        print(f"autocast {{device_type}} {{dtype}}", flush=True)
        super().__init__(device_type, dtype)

class GradScaler(torch.amp.GradScaler):
    def scale(self, loss):
        scaled = super().scale(loss)
        print("loss as it is" if scaled is loss else "loss scaled", flush=True)
        return scaled

torch.autocast, torch.amp.GradScaler = Autocast, GradScaler
"""

OVER = """
import functools
import distributed

distributed.init_process_group = functools.partial(distributed.init_process_group, "{}")
"""


def losses(run):
    """Of all steps of all ranks, in increasing order."""
    assert run.code == 0, run.err[-3000:]
    return sorted(float(loss) for loss in re.findall(r"a step's loss (\S+)", run.out))


@pytest.fixture(scope="module")
def short(machine):
    """short(script, *gpus) is a short run, with the loss of each step.  TensorFloat-32, with few digits, is off."""

    def short(script, *flags, gpus, before="", **environment):
        flags = (*SHORT, *flags)
        return machine.run(
            *script.split(), *flags, gpus=gpus, before=TELL + before, NVIDIA_TF32_OVERRIDE="0", **environment
        )

    return short


@pytest.fixture(scope="module")
def exact(short):
    """exact(script, n): the losses of n processes on the CPU.  Each is run once."""

    @functools.cache
    def exact(script, n):
        found = losses(short(script, gpus=(), NPROC=n, CUDA_VISIBLE_DEVICES=""))
        assert len(found) >= 2 * n
        return found

    return exact


@pytest.mark.parametrize("script", ["mnist_single.py", "mnist_dataparallel.py", "mnist_ddp.py"])
def test_one_gpu(short, exact, script):
    run = short(script, gpus=("8.0",))
    like = "mnist_ddp.py" if script == "mnist_ddp.py" else "mnist_single.py"
    assert "synthetic on cuda" in run.out and losses(run) == pytest.approx(exact(like, 1), abs=1e-5)


@pytest.mark.parametrize(
    ("script", "backend", "like"),
    [
        ("mnist_ddp.py", "nccl", "mnist_ddp.py"),
        ("mnist_ddp.py", "gloo", "mnist_ddp.py"),
        ("-m variants.mnist_by_hand", "nccl", "mnist_ddp.py"),
        ("-m variants.mnist_fsdp", "nccl", "mnist_ddp.py"),
        ("-m variants.mnist_accumulate", "nccl", "-m variants.mnist_accumulate"),
    ],
)
def test_two_gpus(short, exact, script, backend, like):
    """Each step's loss on each rank."""
    run = short(script, gpus=("8.0", "8.0"), before="" if backend == "nccl" else OVER.format(backend))
    assert f"distributed: 2 processes, {backend}, cuda" in run.out, run.err[-3000:]
    assert losses(run) == pytest.approx(exact(like, 2), abs=1e-5)


def test_data_parallel_uses_all_gpus(short, exact):
    run = short("mnist_dataparallel.py", gpus=("8.0", "8.0"))
    assert "DataParallel on 2 GPUs" in run.out
    assert losses(run) == pytest.approx(exact("mnist_single.py", 1), abs=0.1)  # BatchNorm sees half a batch on each


@pytest.mark.parametrize(
    ("gpus", "dtype", "scale"),
    [(("8.0", "8.0"), "bfloat16", "loss as it is"), (("7.5", "8.0"), "float16", "loss scaled")],
)
def test_mixed_precision_fits_all_cards(short, exact, gpus, dtype, scale):
    """bf16 on one rank and float16 with a scaler on the other would give loss nan."""
    run = short("mnist_amp.py", gpus=gpus)
    told = set(re.findall("autocast.*|loss as it is|loss scaled", run.out))
    assert told == {f"autocast cuda torch.{dtype}", scale}, run.err[-3000:]
    assert losses(run) == pytest.approx(exact("mnist_ddp.py", 2), rel=0.02)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_apex(short, exact, level):
    if importlib.util.find_spec("apex") is None:
        pytest.skip("apex is not installed: python mnist_apex.py says how")
    run = short("mnist_apex.py", "--opt-level", level, gpus=("8.0", "8.0"))
    assert losses(run) == pytest.approx(exact("mnist_ddp.py", 2), rel=0.02)


def test_the_smallest_program(machine):
    run = machine.run("min_DDP.py", gpus=("8.0", "8.0"))
    assert run.code == 0 and "distributed: 2 processes, nccl, cuda" in run.out, run.err[-3000:]


def test_a_checkpoint_moves_between_cards_and_to_the_cpu(machine, tmp_path):
    command = ["cifar10_ddp.py", "--dataset", "synthetic", "--amp", "--width", "2", "--epochs", "1"]
    command += ["--batch-size", "12", "--checkpoint-every", "10", "--run-dir", tmp_path]
    for gpus in ("8.0", "8.0"), ("7.5", "7.5"), ():
        visible = {} if gpus else {"CUDA_VISIBLE_DEVICES": "", "NPROC": "2"}
        run = machine.run(*command, gpus=gpus, before=FEW_DIGITS, **visible)
        assert run.code == 0 and ("batch 10 of 12" in run.out) == (gpus != ("8.0", "8.0")), run.err[-3000:]
        (finished,) = tmp_path.glob("step-12-score-*.pt")
        finished.unlink()  # the next goes on from step 10, in this run's precision


def test_a_timeline(machine, tmp_path):
    run = machine.run("timeline", "--steps=2", f"--out={tmp_path}/t", ROOT / "min_DDP.py", gpus=("8.0", "8.0"))
    assert run.code == 0 and "cuda" in (tmp_path / "t.svg").read_text(), run.err[-3000:]
    for line in "weights   2 tensors equal on all ranks", "gradients equal on all ranks: the mean of the ranks' own":
        assert line in re.sub(r"\n +", " ", run.out)
