"""The scripts as programs: what they print, what they count, that they learn, and how they refuse bad input."""

import contextlib
import functools
import importlib
import math
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from world import ROOT, forker, launched, run, shell

import data
import distributed as dist
import mnist_amp
import mnist_apex

CPU = torch.device("cpu")
ONE_PROCESS = ["mnist_single.py", "mnist_dataparallel.py"]
DDP = ["mnist_ddp.py", "mnist_amp.py"]
PLAIN = "mnist_ddp_plain.py"
BATCH = 50  # of the dry runs: by three, 16 each
DRY = ("--dataset", "synthetic", "--dry-run", "--batch-size", BATCH)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")

NOTE_STEPS = """
import hashlib, os, torch, torch.nn.functional as F
step, cross_entropy = torch.optim.SGD.step, F.cross_entropy
def noted_step(self, *args, **kwargs):
    step(self, *args, **kwargs)
    weights = b"".join(p.detach().numpy().tobytes() for group in self.param_groups for p in group["params"])
    with open(f"weights-{os.environ.get('RANK', 0)}", "a") as notes:
        print(hashlib.sha256(weights).hexdigest(), file=notes)
def noted_loss(*args):
    loss = cross_entropy(*args)
    with open(f"losses-{os.environ.get('RANK', 0)}", "a") as notes:
        print(loss.item(), file=notes)
    return loss
torch.optim.SGD.step, F.cross_entropy = noted_step, noted_loss
"""


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """dry_run(script, n): its lines, and how many ranks had the same weights after each step.  Each is run once."""

    @functools.cache
    def dry_run(script, n):
        folder = tmp_path_factory.mktemp("dry_run") / "cwd"
        nproc = ("--nproc", n) if script in DDP else ()
        lines = printed(forker().run(script, *DRY, *nproc, cwd=folder, before=NOTE_STEPS))
        return lines, Counter(" ".join(path.read_text() for path in folder.glob("weights-*")).split())

    return dry_run


def printed(result):
    """The lines of a good run, without the machine's own figures; nothing on stderr, where that is no terminal."""
    assert result.code == 0 and result.err == "", result.err
    *lines, last = re.sub(r"  [1-9]\d* images/s$", "", result.out, flags=re.MULTILINE).splitlines()
    assert re.fullmatch(r"done in \d+\.\d s", last)
    return lines


def figures(line):
    """Loss, right answers and examples of an epoch's line."""
    pattern = r"epoch \d+/\d+  loss (\d+\.\d{4})  accuracy (\d+\.\d\d%) \((\d+)/(\d+)\)"
    loss, percent, correct, count = re.fullmatch(pattern, line).groups()
    assert percent == f"{int(correct) / int(count):.2%}"
    return float(loss), int(correct), int(count)


# --------------------------------------------------------------------------------------------------------- good runs


def test_one_process(dry_run):
    """Nothing but the wrapper differs, and without GPUs that calls the model directly: the weights are bit-equal."""
    (single, weights), (parallel, same) = (dry_run(script, 1) for script in ONE_PROCESS)
    assert single[0] == f"synthetic on cpu, batch size {BATCH}" and figures(single[1])[2] == 2 * BATCH
    assert parallel == ["DataParallel on 0 GPUs (with fewer than two it calls the model directly)", *single]
    assert weights == same and len(weights) == 2


@pytest.mark.parametrize(("script", "n"), [("mnist_ddp.py", 1), ("mnist_ddp.py", 3), ("mnist_amp.py", 3)])
def test_ddp(dry_run, script, n):
    (first, banner, epoch), weights = dry_run(script, n)
    assert first == f"distributed: {n} process{'es' if n > 1 else ''}, gloo, cpu"
    share = BATCH // n
    assert banner == f"synthetic on cpu, global batch {share * n} = {n} x {share}"
    assert figures(epoch)[2] == 2 * share * n  # two whole batches
    assert len(weights) == 2 and set(weights.values()) == {n}  # each rank has other data: DDP makes them equal


def test_amp_computes_almost_what_ddp_computes(dry_run):
    amp, ddp = (figures(dry_run(script, 3)[0][-1])[0] for script in reversed(DDP))
    assert amp == pytest.approx(ddp, rel=0.05)
    assert amp != ddp  # bfloat16 has three digits: were they equal, autocast would be off


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_plain_torch_prints_what_the_helper_prints(dry_run, n, tmp_path):
    plain = shell(*TORCHRUN, f"--nproc_per_node={n}", ROOT / PLAIN, *DRY, cwd=tmp_path)
    assert printed(plain._replace(err="")) == dry_run("mnist_ddp.py", n)[0][1:]  # torchrun warns of its threads
    helper = shell(*TORCHRUN, f"--nproc_per_node={n}", ROOT / "mnist_ddp.py", *DRY, cwd=tmp_path)
    assert printed(helper._replace(err="")) == dry_run("mnist_ddp.py", n)[0]


FOURTEEN = "import data; digits = data._digits; data._digits = lambda count, seed: digits(14, seed)"


def test_every_test_example_once_and_the_seed_chooses_weights_and_order():
    """14 don't divide by 3: a padded sampler would make them 15."""
    flags = ("--dataset", "synthetic", "--epochs", 2, "--batch-size", 7, "--nproc", 3)
    runs = [printed(forker().run("mnist_ddp.py", *flags, "--seed", seed, before=FOURTEEN)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert [figures(line)[2] for lines in runs for line in lines[2:]] == [14] * 6


@pytest.mark.parametrize("module", ["mnist_single", "mnist_ddp", "mnist_amp", "mnist_ddp_plain"])
def test_an_evaluation_is_in_evaluation_mode_and_changes_nothing(module):
    module = importlib.import_module(module)
    digits, _ = data.load("synthetic", "", 10)
    model, modes = module.ConvNet(1, 28), []
    model.register_forward_pre_hook(lambda model, inputs: modes.append((model.training, torch.is_grad_enabled())))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    correct, count = module.evaluate(model, data.loader(digits, 4, range(10)), CPU).tolist()
    assert modes == [(False, False)] * 3 and 0 <= correct <= count == 10
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -------------------------------------------------------------------------------------------- steps, by closed forms


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


@pytest.mark.parametrize(("name", "n"), [("mnist_single", 1), ("mnist_ddp", 1), ("mnist_ddp", 3), (PLAIN[:-3], 3)])
def test_each_step_uses_the_gradient_of_its_own_batch_alone(name, n):
    run(three_steps, n, name)


def in_float16(rank, n):
    """Three steps in float16, of which the first overflows: in the last rank's first example the pixel is 2."""
    model, loader, optimizer = two_weights([2 if rank == n - 1 else 1, 1, 1])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    weights, scales = [], []

    def step():  # what the script calls after each step
        weights.append(dist.unwrap_model(model)[1].weight.flatten().tolist())
        scales.append(scaler.get_scale())

    mnist_amp.train(model, loader, optimizer, SimpleNamespace(step=step), CPU, torch.float16, scaler)
    # The first gradient, 2^16 x 1/2 x 2, is more than float16's 65504: all ranks skip the step, and halve the scale.
    # The other two fit; after two such steps the scale is doubled.
    assert scales == [2.0**15, 2.0**15, 2.0**16]
    w = 0.5 + 1 / (1 + math.exp(1))
    assert sum(weights, []) == pytest.approx([0, 0, 0.5, -0.5, w, -w], rel=1e-3)


@pytest.mark.parametrize("n", [1, 2])
def test_loss_scaling(n):
    launched(in_float16, n)


@pytest.mark.parametrize(
    ("cards", "flag", "expected"),
    [
        ([], None, torch.bfloat16),
        ([(8, 0), (9, 0)], None, torch.bfloat16),
        ([(8, 0), (7, 5)], None, torch.float16),  # a rank without loss scaling would get scaled gradients
        ([(7, 5)], "bfloat16", torch.bfloat16),
        ([(9, 0)], "float16", torch.float16),
    ],
)
def test_the_oldest_visible_card_chooses_the_precision(monkeypatch, cards, flag, expected):
    """The cards are made up, the device is the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: cards[index])
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "get_device", lambda: CPU)
    used = []
    monkeypatch.setattr(mnist_amp, "train", lambda *args: used.extend(args[-2:]) or torch.ones(2))
    args = SimpleNamespace(backend=None, seed=0, batch_size=5, dataset="synthetic", data_dir="", dry_run=True)
    mnist_amp.main(0, 1, SimpleNamespace(lr=0.1, epochs=1, dtype=flag, **vars(args)))
    dtype, scaler = used
    assert dtype == expected and scaler.is_enabled() == (expected == torch.float16)


def losses_of_plain_sgd(n):
    """Of min_DDP.py's steps, computed without DataLoader, sampler, optimizer and DDP, on the whole of each batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        points, model = torch.randn(1000, 8), nn.Linear(8, 8)
    losses = []
    for epoch in range(5):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(epoch))
        order = torch.cat([order, order[: -1000 % n]])  # equal shares
        for batch in order.split(40 // n * n):
            loss = nn.functional.cross_entropy(model(points[batch]), points[batch].argmax(1))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0.5 * gradient
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("n", "steps", "last_batch"), [(1, 25, 40), (3, 26, 27)])
def test_min_ddp(tmp_path, n, steps, last_batch):
    """1000 points: 25 batches of 40; with three processes 334 each are 25 batches of 13 and one of 9."""
    result = forker().run("min_DDP.py", "--nproc", n, cwd=tmp_path / "cwd", before=NOTE_STEPS)
    assert result.code == 0 and result.err == "", result.err
    _, *lines = result.out.splitlines()
    of_ranks = [[float(x) for x in file.read_text().split()] for file in (tmp_path / "cwd").glob("losses-*")]
    means = [sum(of_step) / n for of_step in zip(*of_ranks, strict=True)]
    assert means == pytest.approx(losses_of_plain_sgd(n), rel=1e-4)
    pattern = rf"epoch (\d)  loss (\d+\.\d{{4}})  right (\d+) of {last_batch} in the last batch"
    epochs, losses, right = zip(*(re.fullmatch(pattern, line).groups() for line in lines), strict=True)
    assert epochs == tuple("01234") and int(right[-1]) > 0.7 * last_batch
    assert [float(loss) for loss in losses] == pytest.approx(means[steps - 1 :: steps], abs=6e-5)


# --------------------------------------------------------------------------------------------------------- bad input


def refused(result, script, *words):
    """One line on stderr that starts with the script's name and has all the words; exit code 2; nothing else."""
    assert (result.code, result.out) == (2, ""), result
    assert re.fullmatch(rf"{re.escape(script)}: error: [^\n]+\n", result.err), result.err
    assert [word for word in words if word not in result.err] == []


PLACE = dict(RANK="0", WORLD_SIZE="3", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3")
BAD = [  # test_progression.py sees to it that all scripts check the same: so one row for each of the others
    ("mnist_ddp.py", "--epochs 0", {}, "--epochs", "at least 1"),
    ("mnist_ddp.py", "--epochs x", {}, "--epochs", "'x'"),
    ("mnist_ddp.py", "--batch-size -8", {}, "--batch-size"),
    ("mnist_ddp.py", "--lr 0", {}, "--lr", "greater than 0"),
    ("mnist_ddp.py", "--lr nan", {}, "--lr", "greater than 0"),
    ("mnist_ddp.py", "--lr inf", {}, "--lr", "finite"),
    ("mnist_ddp.py", "--dataset nope", {}, "--dataset", "nope", "mnist", "synthetic"),
    ("mnist_ddp.py", "--nope", {}, "--nope"),
    ("mnist_ddp.py", "--nproc 0", {}, "NPROC) is 0", "at least 1"),
    ("mnist_ddp.py", "--backend nccl", {}, "nccl", "GPU", "gloo"),
    ("mnist_ddp.py", "--nproc 2 --batch-size 1", {}, "--batch-size 1", "2 processes"),
    ("mnist_ddp.py", "--batch-size 2", {"NPROC": "3"}, "--batch-size 2", "3 processes"),
    ("mnist_ddp.py", "--nproc 3", PLACE, "launcher", "--nproc"),
    ("mnist_single.py", "--epochs -1", {}, "--epochs", "at least 1"),
    ("mnist_dataparallel.py", "--epochs 0", {}, "--epochs", "at least 1"),
    ("mnist_amp.py", "--dtype float64", {}, "--dtype", "float16", "bfloat16"),
    ("min_DDP.py", "--nproc x", {}, "--nproc", "'x'"),
    ("min_DDP.py", "", {"RANK": "0"}, "WORLD_SIZE"),
    (PLAIN, "", {}, "torchrun --nproc_per_node=2 mnist_ddp_plain.py"),
    (PLAIN, "--batch-size 2", PLACE, "at least the number of processes"),
]


@pytest.mark.parametrize("row", BAD, ids=lambda row: f"{row[0]} {row[1]}")
def test_bad_flags_and_variables(row):
    script, flags, environment, *words = row
    dry = () if script == "min_DDP.py" else DRY
    refused(forker().run(script, *dry, *flags.split(), **environment), script, *words)


@pytest.mark.parametrize("script", [*ONE_PROCESS, *DDP])
def test_data_that_cannot_be_had(script, tmp_path):
    """test_data.py has the other ways to fail; here the folder is a file."""
    (tmp_path / "file").write_text("")
    result = forker().run(script, "--data-dir", tmp_path / "file")
    refused(result, script, f"mnist can't be read from {tmp_path / 'file'}", "--dataset synthetic")


@pytest.mark.parametrize("script", ["min_DDP.py", *ONE_PROCESS, *DDP, PLAIN])
def test_help_gives_every_default(script):
    result = forker().run(script, "--help")
    assert result.code == 0 and result.err == ""
    flags = re.split(r"^  (?=-)", result.out, flags=re.MULTILINE)[1:]
    without = {re.search(r"--[\w-]+", text)[0] for text in flags if "(default: " not in text}
    assert without <= {"--help", "--dry-run"} and len(flags) >= 5


# -------------------------------------------------------------------------------------------------------------- Apex

APEXES = {  # files, and what is said
    "none": ({}, "not installed", "25.04"),
    "a clone that is not installed": ({"setup.py": "", "apex/__init__.py": ""}, "not installed", "25.04"),
    "another package": ({"__init__.py": "from no_such_module import nothing"}, "not NVIDIA's", "25.04"),
    "without amp": ({"__init__.py": "", "multi_tensor_apply/__init__.py": ""}, "no apex.amp", "25.04"),
    "without CUDA": ({"__init__.py": "", "multi_tensor_apply/__init__.py": "", "amp/__init__.py": ""}, "CUDA"),
}
HIDE_APEX = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name.split(".")[0] == "apex" else find(name, *args)
"""


@pytest.mark.parametrize("kind", APEXES)
def test_apex_that_cannot_be_used(tmp_path, kind):
    files, *words = APEXES[kind]
    for name, content in files.items():
        (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "apex" / name).write_text(content)
    before = HIDE_APEX if kind == "none" else ""  # even if this machine has one
    result = forker().run("mnist_apex.py", *DRY, path=[tmp_path], before=before)
    refused(result, "mnist_apex.py", *words, "mnist_amp.py")


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
