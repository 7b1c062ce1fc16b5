"""The scripts on one and two GPUs, over nccl and gloo, in each precision.

Where the GPUs are simulated, the CPU computes; so the losses are the CPU's, and what is seen is the control flow: which
device, which process, which message.  Speed, memory, rounding and the true NCCL are not seen.
"""

import importlib.util
import re

import pytest

SHORT = ("--dataset", "synthetic", "--dry-run")


def epochs(run):
    """The (loss, accuracy) of each epoch that a script printed."""
    assert run.code == 0, run.err[-3000:]
    found = re.findall(r"epoch \d+/\d+  loss ([\d.]+)  accuracy ([\d.]+)%", run.out)
    assert found, run.out
    return [(float(loss), float(accuracy)) for loss, accuracy in found]


def on_the_cpu(machine, *command, nproc, **flags):
    return machine.run(*command, gpus=(), NPROC=nproc, CUDA_VISIBLE_DEVICES="", **flags)


TELL_LOSS = """
from torch.nn import functional

def told(*args, plain=functional.cross_entropy, **flags):
    loss = plain(*args, **flags)
    print(f"a step's loss {loss.item()}", flush=True)
    return loss

functional.cross_entropy = told
"""


def losses(run):
    """Of all steps of all ranks, in increasing order."""
    assert run.code == 0, run.err[-3000:]
    return sorted(float(loss) for loss in re.findall(r"a step's loss (\S+)", run.out))


@pytest.mark.parametrize(
    ("script", "n", "backend"),
    [
        ("mnist_ddp.py", 1, "nccl"),
        ("mnist_ddp.py", 2, "nccl"),
        ("mnist_ddp.py", 2, "gloo"),
        ("-m variants.mnist_by_hand", 2, "nccl"),
        ("-m variants.mnist_accumulate", 2, "nccl"),
        ("-m variants.mnist_fsdp", 2, "nccl"),
    ],
)
def test_fp32_is_the_cpus(machine, script, n, backend):
    """Each step's loss on each rank; TensorFloat-32, which has fewer digits, is off."""
    command = [*script.split(), *SHORT]
    flags = {"before": TELL_LOSS, "NVIDIA_TF32_OVERRIDE": "0"}
    run = machine.run(*command, "--backend", backend, gpus=("8.0",) * n, **flags)
    assert f"distributed: {n} process" in run.out and f"{backend}, cuda" in run.out, run.err[-3000:]
    exact = losses(on_the_cpu(machine, *command, nproc=n, **flags))
    assert len(exact) >= 2 * n and losses(run) == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_one_process_uses_the_first_gpu_or_all(machine, n):
    for script in "mnist_single.py", "mnist_dataparallel.py":
        run = machine.run(script, *SHORT, gpus=("8.0",) * n)
        assert "synthetic on cuda, batch size 200" in run.out, run.err[-3000:]
        same = script == "mnist_single.py" or n == 1  # DataParallel's BatchNorm sees half a batch on each of two
        exact = epochs(on_the_cpu(machine, script, *SHORT, nproc=1))[0][0]
        assert epochs(run)[0][0] == pytest.approx(exact, abs=1e-3 if same else 0.05)
    assert f"DataParallel on {n} GPUs" in run.out


TELL_DTYPE = """
import torch

class Autocast(torch.autocast):
    def __init__(self, device_type, dtype):
        print(f"autocast {device_type} {dtype}", flush=True)
        super().__init__(device_type, dtype)

torch.autocast = Autocast
"""


def autocasts(run):
    """What the ranks computed with."""
    return set(re.findall(r"autocast (\S+ \S+)", run.out))


@pytest.mark.parametrize(
    ("capability", "dtype", "n", "backend"),
    [("8.0", "bfloat16", 1, "nccl"), ("8.0", "bfloat16", 2, "nccl"), ("7.5", "float16", 2, "gloo")],
)
def test_mixed_precision_fits_the_card(machine, capability, dtype, n, backend):
    run = machine.run("mnist_amp.py", *SHORT, "--backend", backend, gpus=(capability,) * n, before=TELL_DTYPE)
    assert autocasts(run) == {f"cuda torch.{dtype}"}, run.err[-3000:]
    exact = epochs(on_the_cpu(machine, "mnist_ddp.py", *SHORT, nproc=n))
    assert epochs(run)[0][0] == pytest.approx(exact[0][0], rel=0.02)


def test_unlike_cards_agree_on_a_precision(machine):
    """bf16 on one rank and float16 with a scaler on the other would give loss nan."""
    run = machine.run("mnist_amp.py", *SHORT, gpus=("7.5", "8.0"), before=TELL_DTYPE)
    assert autocasts(run) == {"cuda torch.float16"}, run.err[-3000:]
    assert all(0 < loss < 10 for loss, _ in epochs(run))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_apex(machine, level):
    if importlib.util.find_spec("apex") is None:
        pytest.skip("apex is not installed: docs/troubleshooting.md says how")
    run = machine.run("mnist_apex.py", *SHORT, "--opt-level", level, gpus=("8.0",) * 2)
    exact = epochs(on_the_cpu(machine, "mnist_ddp.py", *SHORT, nproc=2))
    assert epochs(run)[0][0] == pytest.approx(exact[0][0], rel=0.02)


def test_the_smallest_program(machine):
    run = machine.run("min_DDP.py", gpus=("8.0", "8.0"))
    assert run.code == 0 and "distributed: 2 processes, nccl, cuda" in run.out, run.err[-3000:]


def test_a_checkpoint_moves_between_cards_and_to_the_cpu(machine, tmp_path):
    command = ["cifar10_ddp.py", "--dataset", "synthetic", "--amp", "--width", "2", "--epochs", "1"]
    command += ["--checkpoint-every", "20", "--run-dir", tmp_path]
    for gpus in ("8.0", "8.0"), ("7.5", "7.5"), ():
        visible = {} if gpus else {"CUDA_VISIBLE_DEVICES": "", "NPROC": "2"}
        run = machine.run(*command, gpus=gpus, **visible)
        assert run.code == 0 and ("batch 20 of 23" in run.out) == (gpus != ("8.0", "8.0")), run.err[-3000:]
        (finished,) = tmp_path.glob("step-23-score-*.pt")
        finished.unlink()  # the next goes on from step 20, in this run's precision
