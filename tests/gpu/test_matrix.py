"""The scripts on one, two and three GPUs: they print the losses that as many processes on the CPU print.

Where the GPUs are simulated, the CPU computes; so the losses are the CPU's, and what is seen is the control flow: which
device, which process, which message, which wait.  There each message of the second GPU is 50 ms late: who reads a
result before it is there gets another loss.  Speed, memory, rounding and the true NCCL are not seen.
"""

import functools
import importlib.util
import json
import re

import pytest
from world import FEW_DIGITS, ROOT, skip_if_refused

SHORT = ("--dataset", "synthetic", "--dry-run", "--batch-size", "48")
LATE = {"SIM_NCCL_DELAY": "0,0.05,0"}
FLAGS = {"min_DDP.py": (), "cifar10_ddp.py": (*SHORT, "--width", "2")}

TELL = """
import torch

class Autocast(torch.autocast):
    def __init__(self, device_type, dtype):
        print(f"autocast {device_type} {dtype}", flush=True)
        super().__init__(device_type, dtype)

class GradScaler(torch.amp.GradScaler):
    def scale(self, loss):
        scaled = super().scale(loss)
        print("loss as it is" if scaled is loss else "loss scaled", flush=True)
        return scaled

torch.autocast, torch.amp.GradScaler = Autocast, GradScaler
"""


def losses(run):
    """Those of the epochs' lines: with --dry-run the mean over all ranks and two steps."""
    assert run.code == 0, run.err[-3000:]
    found = re.findall(r"^epoch .* loss (\S+)", run.out, re.MULTILINE)
    assert found, run.out
    return [float(loss) for loss in found]


@pytest.fixture(scope="module")
def short(machine):
    """short(script, *flags) is a short run."""

    def short(script, *flags, before="", **options):
        flags = (*FLAGS.get(script, SHORT), *flags)
        return machine.run(*script.split(), *flags, before=FEW_DIGITS + before, **options)

    return short


@pytest.fixture(scope="module")
def exact(short):
    """exact(script, n): the losses of n processes on the CPU.  Each is run once."""

    @functools.cache
    def exact(script, n):
        return losses(short(script, gpus=(), NPROC=n, CUDA_VISIBLE_DEVICES=""))

    return exact


@pytest.mark.parametrize("script", ["mnist_single.py", "mnist_dataparallel.py", "mnist_ddp.py"])
def test_one_gpu(machine, short, exact, script):
    run = short(script, gpus=("8.0",))
    like = "mnist_ddp.py" if script == "mnist_ddp.py" else "mnist_single.py"
    assert "synthetic on cuda" in run.out and losses(run) == machine.approx(exact(like, 1))


NAMES = "by_hand", "overlap", "zero", "fsdp_by_hand", "fsdp"
LIKE_DDP = ["mnist_ddp.py", *(f"-m variants.mnist_{name}" for name in NAMES)]
OTHERS = ["cifar10_ddp.py", *(f"-m variants.mnist_{name}" for name in ("accumulate", "local_sgd", "tensor_parallel"))]
PIPELINES = ["-m variants.mnist_pipeline", "-m variants.mnist_pipeline_1f1b"]
SCRIPTS = [*LIKE_DDP, *OTHERS, *PIPELINES, "-m variants.mnist_context_parallel"]
MESH = "-m variants.mnist_mesh"  # four processes are two models of two GPUs each


@pytest.mark.parametrize(
    ("script", "n"),
    [(script, 2) for script in (*SCRIPTS, MESH)]
    + [pytest.param(script, 3, marks=pytest.mark.slow) for script in ("mnist_ddp.py", "-m variants.mnist_zero")]
    + [pytest.param(MESH, 4, marks=pytest.mark.slow)],
)
def test_several_gpus(machine, short, exact, script, n):
    """Not here: Horovod, XLA, and (the simulation lacks scaled_dot_product_attention) the transformer and experts."""
    skip_if_refused(script.removeprefix("-m variants."))
    run = short(script, gpus=("8.0",) * n, **LATE)
    assert f"distributed: {n} processes, {machine.backend(n)}, cuda" in run.out, run.err[-3000:]
    assert losses(run) == machine.approx(exact("mnist_ddp.py" if script in LIKE_DDP else script, n))


@pytest.mark.parametrize("gpus", [("8.0", "8.0"), ("8.0",)], ids=["a GPU for each", "one for both"])
def test_gloo(machine, short, exact, gpus):
    run = short("mnist_ddp.py", gpus=gpus, NPROC=2, DIST_BACKEND="gloo")
    assert "distributed: 2 processes, gloo, cuda" in run.out, run.err[-3000:]
    assert losses(run) == machine.approx(exact("mnist_ddp.py", 2))


@pytest.mark.slow
def test_min_ddp(machine, short, exact):
    """250 steps of three processes."""
    assert losses(short("min_DDP.py", gpus=("8.0",) * 3)) == machine.approx(exact("min_DDP.py", 3))


@pytest.mark.slow
def test_plain_torch_under_torchrun(machine):
    """Its processes are new ones, which draw all digits."""
    machine.needs(2)  # nobody asks for DIST_BACKEND
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    run = machine.run(*torchrun, ROOT / "mnist_ddp_plain.py", *SHORT, gpus=("8.0",) * 2, **LATE)
    exact = machine.run("mnist_ddp.py", *SHORT, gpus=(), NPROC=2, CUDA_VISIBLE_DEVICES="")
    assert losses(run) == machine.approx(losses(exact))


def test_data_parallel_uses_all_gpus(machine, short, exact):
    run = short("mnist_dataparallel.py", gpus=("8.0",) * 2)
    assert f"DataParallel on {machine.visible(2)} GPUs" in run.out
    assert losses(run) == pytest.approx(exact("mnist_single.py", 1), rel=0.05)  # BatchNorm sees a part of the batch


@pytest.mark.parametrize("gpus", [("8.0", "8.0"), ("7.5", "8.0")])
def test_mixed_precision_fits_all_cards(machine, short, exact, gpus):
    """bf16 on one rank and float16 with a scaler on the other would give loss nan."""
    if machine.cards and gpus == ("7.5", "8.0"):
        pytest.skip("needs two cards, of compute capability 7.5 and 8.0; or none: then they are simulated")
    oldest = min(map(float, (machine.cards or gpus)[:2]))
    dtype, scale = ("bfloat16", "loss as it is") if oldest >= 8 else ("float16", "loss scaled")
    run = short("mnist_amp.py", gpus=gpus, before=TELL, **LATE)
    told = set(re.findall("autocast.*|loss as it is|loss scaled", run.out))
    assert told == {f"autocast cuda torch.{dtype}", scale}, run.err[-3000:]
    assert losses(run) == pytest.approx(exact("mnist_ddp.py", 2), rel=0.02)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_apex(short, exact, level):
    if importlib.util.find_spec("apex") is None:
        pytest.skip("apex is not installed: python mnist_apex.py says how")
    run = short("mnist_apex.py", "--opt-level", level, gpus=("8.0", "8.0"))
    assert losses(run) == pytest.approx(exact("mnist_ddp.py", 2), rel=0.02)


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
    run = machine.run(
        "-m", "ddp_by_diff.timeline", "--steps=2", f"--out={tmp_path}/t", ROOT / "min_DDP.py", gpus=("8.0", "8.0")
    )
    assert run.code == 0 and "cuda" in (tmp_path / "t.svg").read_text(), run.err[-3000:]
    assert "messages  per rank: 1 all-reduce, 288 B" in run.out and "warning" not in run.out, run.out


ALONE = """
import time, torch
from torch.utils.checkpoint import checkpoint
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to("cuda")
opt = torch.optim.SGD(net.parameters(), 0.1)
x = torch.ones(6, 8, device="cuda")
how = dict(use_reentrant=False)
for _ in range(60):
    {}
    opt.step()
    opt.zero_grad()
"""


def test_a_timeline_shows_when_kernels_run(simulated, tmp_path):
    """Not when they are launched: the host launches a step in a moment, and runs ahead of kernels of 3 ms each.

    What is idle is no kernel.  Without the recorder steps last as long.
    """
    (tmp_path / "train.py").write_text(ALONE.format("net(x).sum().backward()"))
    run = simulated.run("-m", "ddp_by_diff.timeline", "--steps=8", "train.py", cwd=tmp_path, SIM_KERNEL_US=3000)
    text = " ".join(run.out.split())
    found = re.search(r"rank 0 .*?forward ([\d.]+), backward ([\d.]+), optimizer ([\d.]+)", text)
    assert run.code == 0 and found, run.out + run.err[-3000:]
    idle = re.search(r"in ([\d.]+) of which the GPU has nothing to compute", text)
    kernels = sum(map(float, found.groups())) - float(idle[1] if idle else 0)
    assert round(kernels / 3) >= 6 and kernels == pytest.approx(3 * round(kernels / 3), abs=0.3), run.out
    medians = re.search(r"median ([\d.]+) ms of 8 recorded steps \(([\d.]+) ms of 4 without profiling\)", text)
    with_it, without = map(float, medians.groups())
    assert without == pytest.approx(with_it, rel=0.02) and without % 3 == pytest.approx(0, abs=0.1), run.out


def test_a_timeline_of_a_gpus_memory(simulated, tmp_path):
    """A layer of 512 x 512 with Adam: 1 MB of weights and of gradients, 2 MB of state; tanh keeps 1 MB."""
    program = ALONE.replace("Linear(8, 8)", "Linear(512, 512)").replace("ones(6, 8", "ones(512, 512")
    program = program.replace("optim.SGD", "optim.Adam").format("net(x).square().sum().backward()")
    (tmp_path / "train.py").write_text(program)
    run = simulated.run("-m", "ddp_by_diff.timeline", "--steps=4", "train.py", cwd=tmp_path, SIM_KERNEL_US=1000)
    text, weights = " ".join(run.out.split()), 4 * (512 * 512 + 512) / 1e6
    found = dict(re.findall(r"(weights|optimizer state|gradients|activations|allocator) ([\d.]+) MB", text))
    assert run.code == 0 and len(found) == 5, run.out + run.err[-3000:]
    megabytes = {kind: float(size) for kind, size in found.items()}
    expected = {"weights": weights, "optimizer state": 2 * weights, "gradients": weights}
    assert {kind: megabytes[kind] for kind in expected} == pytest.approx(expected, rel=0.1), run.out
    assert megabytes["activations"] >= 1 and megabytes["allocator"] > sum(expected.values())


def test_what_checkpointing_computes_again_is_forward_inside_backward(simulated, tmp_path):
    """It runs in autograd's own thread for the GPU."""
    twice = "checkpoint(net, checkpoint(net, x, **how), **how)"
    (tmp_path / "train.py").write_text(ALONE.format(f"{twice}.sum().backward()"))
    simulated.run("-m", "ddp_by_diff.timeline", "--steps=2", "train.py", cwd=tmp_path, SIM_KERNEL_US=3000)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    parts = [event["name"] for event in events if event.get("cat") == "timeline"]
    assert [what for what in parts if what in ("forward", "backward")][:4] == ["forward", "backward"] * 2, parts


def test_a_gpu_that_has_nothing_to_do_as_its_process_loads(simulated, tmp_path):
    loader = "torch.utils.data.DataLoader(range(60), collate_fn=lambda _: time.sleep(0.03))"
    (tmp_path / "train.py").write_text(ALONE.replace("range(60)", loader).format("net(x).sum().backward()"))
    run = simulated.run("-m", "ddp_by_diff.timeline", "--steps=8", "train.py", cwd=tmp_path, SIM_KERNEL_US=1000)
    assert re.search(r"why +the process spends [\d.]+ of [\d.]+ ms loading its next batch", run.out), run.out
    loading, length = map(float, re.search(r"spends ([\d.]+) of ([\d.]+) ms", run.out).groups())
    assert loading >= 20 and loading < length, "what was launched before still runs when the process begins to load"
