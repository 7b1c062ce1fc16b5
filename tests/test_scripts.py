"""The scripts as programs: what they print, what they count, and that they learn."""

import contextlib
import importlib
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from world import FEW_DIGITS, forker, free_port, on_ranks, refused, run, shell

import data
import distributed as dist
import mnist_amp
import mnist_apex

CPU = torch.device("cpu")
BATCH = 50  # of the dry runs: by three, 16 each
DRY = ("--dataset", "synthetic", "--dry-run", "--batch-size", BATCH, "--seed", 1)


def printed(result):
    """The lines of a good run, without the machine's own figures; nothing on stderr, where that is no terminal."""
    assert result.code == 0 and result.err == "", result.err
    *lines, last = re.sub(r"  [1-9]\d* images/s$", "", result.out, flags=re.MULTILINE).splitlines()
    assert re.fullmatch(r"done in \d+\.\d s", last)
    return lines


def figures(line):
    """Loss and examples of an epoch's line."""
    pattern = r"epoch \d+/\d+  loss (\d+\.\d{4})  accuracy (\d+\.\d\d%) \((\d+)/(\d+)\)"
    loss, percent, correct, count = re.fullmatch(pattern, line).groups()
    assert percent == f"{int(correct) / int(count):.2%}"
    return float(loss), int(count)


@pytest.mark.parametrize("flags", [("--epochs", 2), ("--dry-run",)])
def test_one_process(flags):
    """Nothing but the wrapper differs, and without GPUs that calls the model directly."""
    is_dry = "--dry-run" in flags
    flags = ("--dataset", "synthetic", "--batch-size", BATCH, "--seed", 1, *flags)
    if is_dry:  # as a user starts it, with all digits
        single, before = shell("mnist_single.py", *flags), ""
    else:
        single, before = forker().run("mnist_single.py", *flags, before=FEW_DIGITS), FEW_DIGITS
    single = printed(single)
    assert single[0] == f"synthetic on cpu, batch size {BATCH}"
    assert [figures(line)[1] for line in single[1:]] == ([2 * BATCH] if is_dry else [150] * 2)
    parallel = printed(forker().run("mnist_dataparallel.py", *flags, before=before))
    assert parallel == ["DataParallel on 0 GPUs (with fewer than two, it calls the model directly)", *single]


AS_TORCHRUN_DOES = """
import os
os.environ |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
for rank in 2, 1, 0:
    if rank == 0 or os.fork() == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        break
"""


def test_ddp_plain_torch_and_amp():
    """Two whole batches each; what they compute: tests/variants/.  Under a real torchrun: tests/gpu/test_matrix.py."""
    ddp, amp = (
        printed(forker().run(f"{script}.py", *DRY, "--nproc", 3, before=FEW_DIGITS))
        for script in ("mnist_ddp", "mnist_amp")
    )
    under_torchrun = {"before": FEW_DIGITS + AS_TORCHRUN_DOES, "MASTER_PORT": free_port()}
    plain = printed(forker().run("mnist_ddp_plain.py", *DRY, **under_torchrun))
    head = ["distributed: 3 processes, gloo, cpu", "synthetic on cpu, global batch 48 = 3 x 16"]
    assert ddp[:2] == amp[:2] == head and figures(ddp[2])[1] == figures(amp[2])[1] == 2 * 48
    assert plain == ddp[1:]
    exact, rough = figures(ddp[2])[0], figures(amp[2])[0]
    assert rough == pytest.approx(exact, rel=0.05)
    assert rough != exact  # bfloat16 has three digits: were they equal, autocast would be off


def test_on_a_terminal_rank_0_alone_has_a_progress_bar():
    """One for the training, one for the evaluation; elsewhere there is none (`printed`)."""
    screen, terminal = os.openpty()
    subprocess.run(["stty", "cols", "80", "rows", "24"], stdin=terminal, check=True)  # else a bar has no room
    os.set_blocking(screen, False)
    before = f"{FEW_DIGITS}import os; os.dup2(os.open({os.ttyname(terminal)!r}, os.O_RDWR), 2)"
    script = "-m", "variants.mnist_tensor_parallel"  # its loader gives every rank the same, as if it were rank 0
    done = forker().run(*script, *DRY, "--nproc", 3, before=before)
    assert done.code == 0 and done.out.startswith("distributed: 3 processes, gloo, cpu\n"), done
    assert done.out.count(f"/{2 * BATCH})  ") == 1
    assert os.read(screen, 4096).count(b" 0/2 ") == 2
    os.close(screen)
    os.close(terminal)


def digits(count):
    return data.Images(torch.arange(count * 64).view(count, 1, 8, 8).byte(), torch.arange(count) % 10, (0.5,), (0.5,))


@pytest.mark.parametrize("name", ["mnist_single", "mnist_dataparallel", "mnist_apex"])
def test_an_evaluation_is_in_evaluation_mode_and_changes_nothing(name):
    """The others: tests/variants/test_variants.py."""
    module, modes = importlib.import_module(name), []
    model = module.ConvNet(1, 8)
    model.register_forward_pre_hook(lambda model, inputs: modes.append((model.training, torch.is_grad_enabled())))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    correct, count = module.evaluate(model, data.loader(digits(10), 4, range(10)), CPU).tolist()
    assert modes == [(False, False)] * 3 and 0 <= correct <= count == 10
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def two_weights(pixels):
    """A model of one weight for each of two classes, 0 at first; examples of one pixel each, of class 0.

    So with the weights (w, -w) and the pixel 1 the probability of class 1 is 1 / (1 + exp(2 w)), and at a learning rate
    of 1 a step adds it to w.
    """
    pixels = torch.tensor(pixels, dtype=torch.uint8).view(-1, 1, 1, 1)
    dataset = data.Images(pixels, torch.zeros(len(pixels), dtype=torch.int64), (0.0,), (1 / 255,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    nn.init.zeros_(model[1].weight)
    model = dist.prepare_ddp_model(model)
    return model, data.loader(dataset, 1, range(len(pixels))), torch.optim.SGD(model.parameters(), lr=1.0)


def three_steps(name):
    model, loader, optimizer = two_weights([1, 1, 1])
    weights = []
    scheduler = SimpleNamespace(step=lambda: weights.append(dist.unwrap_model(model)[1].weight.flatten().tolist()))
    sums = importlib.import_module(name).train(model, loader, optimizer, scheduler, CPU)
    w, expected, losses = 0.0, [], 0.0
    for _ in range(3):  # each step uses the gradient of its own batch alone
        wrong = 1 / (1 + math.exp(2 * w))
        w, losses = w + wrong, losses - math.log(1 - wrong)
        expected += [w, -w]
    assert sum(weights, []) == pytest.approx(expected, rel=1e-5)
    assert sums.tolist() == [pytest.approx(losses, rel=1e-5), 3]


@pytest.mark.parametrize(("name", "n"), [("mnist_single", 1), ("mnist_ddp", 3)])
def test_each_step_uses_the_gradient_of_its_own_batch_alone(name, n):
    run(three_steps, n, name)


@on_ranks(1, 3)
def test_loss_scaling():
    """Three steps in float16, of which the first overflows: in the last rank's first example the pixel is 2."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model, loader, optimizer = two_weights([2 if is_last else 1, 1, 1])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    weights, scales = [], []

    def step():  # what the script calls after each step
        weights.append(dist.unwrap_model(model)[1].weight.flatten().tolist())
        scales.append(scaler.get_scale())

    mnist_amp.train(model, loader, optimizer, SimpleNamespace(step=step), CPU, torch.float16, scaler)
    # The last rank's first gradient, 2^16 x 1/2 x 2, is more than float16's 65504, as is an average with it: all ranks
    # skip the step, and halve the scale.  The other two fit; after two such steps the scale is doubled.
    assert scales == [2.0**15, 2.0**15, 2.0**16]
    w = 0.5 + 1 / (1 + math.exp(1))
    assert sum(weights, []) == pytest.approx([0, 0, 0.5, -0.5, w, -w], rel=1e-3)


def losses_of_plain_sgd():
    """Of min_DDP.py's last steps, computed on whole batches, without sampler, optimizer and DDP."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        points, model = torch.randn(1000, 8), nn.Linear(8, 8)
    losses = []
    for epoch in range(5):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(epoch))
        order = torch.cat([order, order[:2]])  # equal shares: 334 each are 25 batches of 13 and one of 9
        for batch in order.split(39):
            loss = nn.functional.cross_entropy(model(points[batch]), points[batch].argmax(1))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0.5 * gradient
        losses.append(loss.item())
    return losses


def test_min_ddp():
    result = forker().run("min_DDP.py", "--nproc", 3)
    assert result.code == 0 and result.err == "", result.err
    _, *lines = result.out.splitlines()
    pattern = r"epoch (\d)  loss (\d+\.\d{4})  last batch: (\d+) of 27 correct"
    epochs, losses, right = zip(*(re.fullmatch(pattern, line).groups() for line in lines), strict=True)
    assert epochs == tuple("01234") and int(right[-1]) > 0.7 * 27
    assert [float(loss) for loss in losses] == pytest.approx(losses_of_plain_sgd(), abs=6e-5)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "not installed"),
        (["setup.py", "apex/__init__.py"], "not installed"),  # a clone
        (["__init__.py"], "not NVIDIA's"),
        (["__init__.py", "multi_tensor_apply/__init__.py"], "no apex.amp"),
        (["__init__.py", "multi_tensor_apply/__init__.py", "amp/__init__.py"], "CUDA"),
    ],
)
def test_apex_that_cannot_be_used(tmp_path, monkeypatch, files, words):
    for name in files:
        (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "apex" / name).write_text("raise ImportError('only looked at, and not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    if not files:  # even if this machine has one
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused("mnist_apex.py", words, "mnist_amp.py", flags=DRY)


def test_the_loop_keeps_apexs_order(monkeypatch):
    """Against a stand-in, as the real Apex needs CUDA.  The model is 2 x, the pixel 3, the loss a square."""
    calls, model = [], nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(lambda *args: calls.append(("step", model.weight.grad.item())))

    @contextlib.contextmanager
    def scale_loss(loss, optimizer):
        calls.append(("scale", loss.item()))
        yield loss * 8
        model.weight.grad /= 8

    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace(amp=SimpleNamespace(scale_loss=scale_loss)))
    pixel = data.Images(torch.full((1, 1, 1, 1), 3, dtype=torch.uint8), torch.zeros(1), (0.0,), (1 / 255,))
    monkeypatch.setattr(mnist_apex.F, "cross_entropy", lambda logits, labels: logits.square().sum())
    scheduler = SimpleNamespace(step=lambda: calls.append(("schedule", model.weight.grad)))
    sums = mnist_apex.train(model, data.loader(pixel, 1, [0]), optimizer, scheduler, CPU)
    # (2 * 3)^2 = 36, its gradient 2 * 6 * 3 = 36: one step, after the gradient was unscaled, which is then dropped
    assert calls == [("scale", 36.0), ("step", 36.0), ("schedule", None)]
    assert model.weight.item() == 2.0 - 0.5 * 36.0 and sums.tolist() == [36.0, 1.0]
