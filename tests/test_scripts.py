"""The scripts as programs: what they print, what they count, that they learn, and how they refuse bad input."""

import functools
import importlib
import math
import re
import socket
import sys
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from world import ROOT, forker, shell
from world import launched as of_processes

import data
import distributed as dist
import mnist_amp
import mnist_apex

MNIST_SCRIPTS = ["mnist_single.py", "mnist_dataparallel.py", "mnist_ddp.py", "mnist_amp.py"]
DDP_SCRIPTS = ["mnist_ddp.py", "mnist_amp.py"]
LAUNCHED_SCRIPTS = ["min_DDP.py", *DDP_SCRIPTS]
DRY = ("--dataset", "synthetic", "--dry-run")


BATCH = 50  # of the dry runs: by three, 16 each


def dry(script):
    return () if script == "min_DDP.py" else (*DRY, "--batch-size", BATCH)


NOTE_WEIGHTS = """
import hashlib, os, torch
step = torch.optim.SGD.step
def noted(self, *args, **kwargs):
    step(self, *args, **kwargs)
    weights = b"".join(p.detach().numpy().tobytes() for group in self.param_groups for p in group["params"])
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(hashlib.sha256(weights).hexdigest() + "\\n")
torch.optim.SGD.step = noted
"""


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """dry_run(script, world_size): the result of a dry run, and the hash of each rank's weights after each step.

    As nobody says otherwise, with two processes; with --nproc if it is another number.  Each is run once only.
    """

    @functools.cache
    def dry_run(script, world_size):
        folder = tmp_path_factory.mktemp("dry_run")
        nproc = ("--nproc", world_size) if script in LAUNCHED_SCRIPTS and world_size != 2 else ()
        notes = folder / "notes"
        result = forker().run(script, *dry(script), *nproc, cwd=folder / "cwd", before=NOTE_WEIGHTS, NOTES=notes)
        return result, Counter(notes.read_text().split())

    return dry_run


@pytest.fixture
def run(tmp_path):
    """run(script, *args): as `python script args` in tmp_path/cwd, see Forker.start."""
    return lambda script, *args, **options: forker().run(script, *args, cwd=tmp_path / "cwd", **options)


class Epoch(NamedTuple):
    loss: float
    correct: int
    count: int


def epochs(result, before, total=1):
    """The epochs that a good run printed; the lines around them must be `before` and the time, and nothing else."""
    assert result.code == 0, result.err
    assert result.err == ""  # no progress bar and no warning, where stderr is no terminal
    *head, last = result.out.splitlines()
    head, lines = head[: len(before)], head[len(before) :]
    assert head == before
    assert re.fullmatch(r"done in \d+\.\d s", last)
    assert len(lines) == total
    found = []
    for number, line in enumerate(lines, 1):
        pattern = (
            rf"epoch {number}/{total}  loss (\d+\.\d{{4}})  accuracy (\d+\.\d\d%) \((\d+)/(\d+)\)  [1-9]\d* images/s"
        )
        loss, percent, correct, count = re.fullmatch(pattern, line).groups()
        assert percent == f"{int(correct) / int(count):.2%}"
        found.append(Epoch(float(loss), int(correct), int(count)))
    return found


def banner(script, world_size, batch_size=BATCH):
    used = f"synthetic on cpu, batch size {batch_size}"
    if script == "mnist_single.py":
        return [used]
    if script == "mnist_dataparallel.py":
        return ["DataParallel on 0 GPUs (with fewer than two it calls the model directly)", used]
    share = batch_size // world_size
    used = f"synthetic on cpu, global batch {share * world_size} = {world_size} x {share}"
    return [f"distributed: {world_size} process{'es' if world_size > 1 else ''}, gloo, cpu", used]


# --------------------------------------------------------------------------------------------------------- good runs


@pytest.mark.parametrize("script", MNIST_SCRIPTS[:2])
def test_one_process(dry_run, script):
    (epoch,) = epochs(dry_run(script, 1)[0], banner(script, 1))
    assert epoch.count == 2 * BATCH  # two batches


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_ddp(dry_run, script, world_size):
    result, weights = dry_run(script, world_size)
    (epoch,) = epochs(result, banner(script, world_size))
    assert epoch.count == {1: 100, 3: 96}[world_size]  # two whole batches: 96 = 2 x 3 x 16
    # Each rank has other data: without DistributedDataParallel the weights part at the first step.
    assert len(weights) == 2 and set(weights.values()) == {world_size}


FOURTEEN = """
import data
digits = data._digits
data._digits = lambda count, seed: digits(14, seed)
"""


@pytest.mark.parametrize("script", MNIST_SCRIPTS)
def test_an_evaluation_is_in_evaluation_mode(script):
    module, modes = importlib.import_module(script.removesuffix(".py")), []
    test_set = data.load("synthetic", "", 10)[1]
    model = module.ConvNet(test_set.channels, test_set.side)
    model.register_forward_pre_hook(lambda model, inputs: modes.append(model.training))
    loader = data.loader(test_set, 5, torch.utils.data.SequentialSampler(test_set))
    module.evaluate(model, loader, torch.device("cpu"))
    assert modes == [False] * math.ceil(len(test_set) / 5)


@pytest.mark.slow
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_every_test_example_once(run, script):
    # 14 don't divide by 3: a padded sampler would make them 15.
    flags = ("--dataset", "synthetic", "--epochs", 1, "--batch-size", 7, "--nproc", 3)
    result = run(script, *flags, before=FOURTEEN)
    assert epochs(result, banner(script, 3, 7))[0].count == 14


def test_one_process_is_the_same_in_single_and_dataparallel(dry_run):
    # Nothing but the wrapper differs, and without GPUs that calls the model directly.
    single, parallel = (epochs(dry_run(s, 1)[0], banner(s, 1)) for s in MNIST_SCRIPTS[:2])
    assert single == parallel
    assert dry_run(MNIST_SCRIPTS[0], 1)[1] == dry_run(MNIST_SCRIPTS[1], 1)[1]  # the weights after each step, bit by bit


@pytest.mark.slow
def test_seed(run, dry_run):
    results = dry_run("mnist_ddp.py", 2)[0], *(run("mnist_ddp.py", *dry("mnist_ddp.py"), "--seed", n) for n in (0, 1))
    first, again, other = (epochs(result, banner("mnist_ddp.py", 2)) for result in results)
    assert first == again != other


SAME_WEIGHTS = "import torch; seeded = torch.manual_seed; torch.manual_seed = lambda seed: seeded(0)"


@pytest.mark.slow
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_seed_chooses_the_order_too(run, script):
    results = [run(script, *dry(script), "--seed", seed, before=SAME_WEIGHTS) for seed in (0, 1)]
    first, other = (epochs(result, banner(script, 2)) for result in results)
    assert first != other


@pytest.mark.slow
def test_amp_computes_almost_what_ddp_computes(dry_run):
    amp, ddp = (epochs(dry_run(s, 2)[0], banner(s, 2))[0] for s in ("mnist_amp.py", "mnist_ddp.py"))
    assert amp.loss == pytest.approx(ddp.loss, rel=0.05)
    assert amp.loss != ddp.loss  # bfloat16 has three digits: were they equal, autocast would be off


def three_steps(rank, n, train):
    """Three steps of `train`, by numbers that are known: each step uses the gradient of its own batch alone.

    The model is one weight for each of two classes, (w, -w); the pixel of every example is 1, its class 0.  So the
    probability of class 1 is 1 / (1 + exp(2 w)), w grows by it times the learning rate 1, and the loss is minus the
    logarithm of the rest.
    """
    dataset = data.Images(
        torch.ones(3, 1, 1, 1, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), (0.0,), (1 / 255,)
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    nn.init.zeros_(model[1].weight)
    model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weights = []
    scheduler = SimpleNamespace(step=lambda: weights.append(dist.unwrap_model(model)[1].weight.flatten().tolist()))
    loss, seen = train(model, data.loader(dataset, 1, range(3)), optimizer, scheduler, torch.device("cpu")).tolist()

    w, expected, losses = 0.0, [], 0.0
    for _ in range(3):
        wrong = 1 / (1 + math.exp(2 * w))
        w, losses = w + wrong, losses - math.log(1 - wrong)
        expected += [w, -w]
    assert sum(weights, []) == pytest.approx(expected, rel=1e-5)
    assert (loss, seen) == (pytest.approx(losses, rel=1e-5), 3)


@pytest.mark.parametrize(("module", "n"), [("single", 1), ("dataparallel", 1), ("ddp", 1), ("ddp", 3)])
def test_each_step_uses_the_gradient_of_its_own_batch_alone(module, n):
    of_processes(three_steps, n, importlib.import_module(f"mnist_{module}").train)


def in_float16(rank, n, train):
    """Loss scaling, by numbers that are known: three steps of `train` in float16 on the CPU, of which one overflows.

    The model is one weight for each of two classes, the pixel of every example is 1, its class 0: the gradients are
    (p - 1, 1 - p), p being the probability of class 0, 1/2 at first.  In the last rank's first example the pixel is 2.
    """
    pixels = torch.tensor([2 if rank == n - 1 else 1, 1, 1], dtype=torch.uint8).view(3, 1, 1, 1)
    dataset = data.Images(pixels, torch.zeros(3, dtype=torch.int64), (0.0,), (1 / 255,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    nn.init.zeros_(model[1].weight)
    model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    weights, scales = [], []

    def step():  # what the scripts call after each step
        weights.append(dist.unwrap_model(model)[1].weight.flatten().tolist())
        scales.append(scaler.get_scale())

    loader, scheduler = data.loader(dataset, 1, range(3)), SimpleNamespace(step=step)
    train(model, loader, optimizer, scheduler, torch.device("cpu"), torch.float16, scaler)

    # The first gradient, 2^16 x 1/2 x 2, is more than float16's 65504: all ranks skip the step, and halve the scale.
    # The other two fit; after two such steps the scale is doubled.
    assert scales == [2.0**15, 2.0**15, 2.0**16]
    assert weights[0] == [0.0, 0.0]
    assert weights[1] == pytest.approx([0.5, -0.5], rel=1e-3)
    w = 0.5 + 1 / (1 + math.exp(0.5 - -0.5))  # 1 - p
    assert weights[2] == pytest.approx([w, -w], rel=1e-3)


@pytest.mark.parametrize("n", [1, 2])
def test_loss_scaling(n):
    of_processes(in_float16, n, mnist_amp.train)


# Rank 1's card is older than Ampere, rank 0's is not; the sums are the CPU's, and each rank notes its precision.
MIXED_CARDS = """
import os, sys, torch
import distributed as dist
class Card(str):
    type = "cuda"
get_device, autocast = dist.get_device, torch.autocast
dist.get_device = lambda: Card("cpu") if sys._getframe(1).f_code.co_name == "main" else get_device()
torch.cuda.get_device_capability = lambda device: (7, 5) if os.environ["RANK"] == "1" else (8, 0)
def noted(device_type, dtype):
    with open(f"dtype-{os.environ['RANK']}", "w") as file:
        file.write(f"{device_type} {dtype}")
    return autocast("cpu", torch.bfloat16)
torch.autocast = noted
"""


@pytest.mark.slow
def test_one_precision_for_different_cards(run, tmp_path):
    """Else the gradients of the rank without loss scaling are added to scaled ones: the loss is nan."""
    result = run("mnist_amp.py", *dry("mnist_amp.py"), before=MIXED_CARDS)
    assert result.code == 0, result.err
    noted = [(tmp_path / "cwd" / f"dtype-{rank}").read_text() for rank in range(2)]
    assert noted == ["cuda torch.float16"] * 2


NOTE_LOSSES = """
import os, torch.nn.functional as F
cross_entropy = F.cross_entropy
def noted(*args):
    loss = cross_entropy(*args)
    with open(f"losses-{os.environ.get('RANK', 0)}", "a") as file:
        print(loss.item(), file=file)
    return loss
F.cross_entropy = noted
"""


def losses_of_plain_sgd(world_size):
    """Of min_DDP.py's steps, computed without DataLoader, sampler, optimizer and DDP, on the whole of each batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        points, model = torch.randn(1000, 8), nn.Linear(8, 8)
    losses = []
    for epoch in range(5):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(epoch))
        order = torch.cat([order, order[: -1000 % world_size]])  # equal shares
        for batch in order.split(40 // world_size * world_size):
            loss = nn.functional.cross_entropy(model(points[batch]), points[batch].argmax(1))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0.5 * gradient
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("world_size", "steps", "last_batch"), [(1, 25, 40), (2, 25, 40), (3, 26, 27)])
def test_min_ddp(run, tmp_path, world_size, steps, last_batch):
    # 1000 points: 25 batches of 1 x 40 or 2 x 20; with three, 334 each are 25 batches of 13 and one of 9.
    result = run("min_DDP.py", "--nproc", world_size, before=NOTE_LOSSES)
    assert result.code == 0 and result.err == "", result.err
    first, *lines = result.out.splitlines()
    assert first == f"distributed: {world_size} process{'es' if world_size > 1 else ''}, gloo, cpu"
    assert len(lines) == 5
    losses = []
    for epoch, line in enumerate(lines):
        pattern = rf"epoch {epoch}  loss (\d+\.\d{{4}})  right (\d+) of {last_batch} in the last batch"
        loss, right = re.fullmatch(pattern, line).groups()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0] and int(right) > 0.7 * last_batch
    of_ranks = [(tmp_path / "cwd" / f"losses-{rank}").read_text().split() for rank in range(world_size)]
    last = [[float(loss) for loss in of_rank[steps - 1 :: steps]] for of_rank in of_ranks]
    assert losses == pytest.approx([sum(of_epoch) / world_size for of_epoch in zip(*last, strict=True)], abs=6e-5)
    steps_of_all = zip(*(map(float, of_rank) for of_rank in of_ranks), strict=True)
    means = [sum(of_step) / world_size for of_step in steps_of_all]
    assert means == pytest.approx(losses_of_plain_sgd(world_size), rel=1e-4)


def test_min_ddp_by_default(dry_run):
    """Two processes, with the same weights after each of 5 x 25 steps, though each has other data."""
    result, weights = dry_run("min_DDP.py", 2)
    assert result.code == 0 and result.out.startswith("distributed: 2 processes, gloo, cpu\n"), result.err
    assert len(weights) == 125 and set(weights.values()) == {2}


@pytest.mark.parametrize("script", ["min_DDP.py", *MNIST_SCRIPTS])
def test_help_gives_every_default(run, script):
    result = run(script, "--help")
    assert result.code == 0 and result.err == ""
    flags = {
        re.search(r"--[\w-]+", text)[0]: text for text in re.split(r"^  (?=-)", result.out, flags=re.MULTILINE)[1:]
    }
    if script in MNIST_SCRIPTS:  # the same flags in the same order
        common = ["--help", "--dataset", "--data-dir", "--epochs", "--batch-size", "--lr", "--seed", "--dry-run"]
        assert list(flags)[: len(common)] == common
    assert ("--nproc" in flags) == ("--backend" in flags) == (script in LAUNCHED_SCRIPTS)
    assert {flag for flag, text in flags.items() if "(default: " not in text} <= {"--help", "--dry-run"}


@pytest.mark.slow
def test_torchrun_gives_the_same_lines(run, tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    flags = dry("mnist_ddp.py")
    under_torchrun = shell(*torchrun, ROOT / "mnist_ddp.py", *flags, cwd=tmp_path)
    expected = banner("mnist_ddp.py", 2)
    assert epochs(under_torchrun, expected) == epochs(run("mnist_ddp.py", *flags, "--nproc", 2), expected)


# --------------------------------------------------------------------------------------------------------- bad input


def refused(result, script, *words):
    """One line on stderr that starts with the script's name and has all the words; exit code 2; nothing else."""
    assert result.code == 2, result
    assert result.out == ""
    assert re.fullmatch(rf"{re.escape(script)}: error: [^\n]+\n", result.err), result.err
    for word in words:
        assert word in result.err
    return True


def table(rows, scripts):
    return [pytest.param(s, args, words, id=f"{s} {' '.join(args)}") for args, words in rows for s in scripts]


COMMON = [
    (["--epochs", "0"], ["--epochs", "at least 1"]),
    (["--epochs", "-1"], ["--epochs", "at least 1"]),
    (["--epochs", "x"], ["--epochs", "'x'"]),
    (["--batch-size", "0"], ["--batch-size"]),
    (["--batch-size", "-8"], ["--batch-size"]),
    (["--batch-size", "1.5"], ["--batch-size", "'1.5'"]),
    (["--lr", "0"], ["--lr", "greater than 0"]),
    (["--lr", "-0.1"], ["--lr", "greater than 0"]),
    (["--lr", "nan"], ["--lr", "greater than 0"]),
    (["--lr", "inf"], ["--lr"]),
    (["--dataset", "nope"], ["--dataset", "nope", "mnist", "synthetic"]),
    (["--nope"], ["--nope"]),
]
LAUNCHED = [
    (["--nproc", "0"], ["NPROC) is 0", "at least 1"]),
    (["--nproc", "-1"], ["NPROC) is -1", "at least 1"]),
    (["--nproc", "x"], ["--nproc", "'x'"]),
    (["--backend", "nccl"], ["nccl", "GPU", "gloo"]),
    (["--backend", "nope"], ["--backend", "nope"]),
    (["--nproc", "2", "--batch-size", "1"], ["--batch-size 1", "2 processes"]),
]


# All rows for one script, one for each of the others: test_progression.py sees to it that they check the same.
BAD_VALUES = table(COMMON + LAUNCHED, ["mnist_ddp.py"]) + table(
    COMMON[:1], ["mnist_single.py", "mnist_dataparallel.py"]
)
BAD_VALUES += table(COMMON[:1] + LAUNCHED[:1], ["mnist_amp.py"]) + table(LAUNCHED, ["min_DDP.py"])


@pytest.mark.parametrize(("script", "args", "words"), BAD_VALUES)
def test_bad_value(run, script, args, words):
    assert refused(run(script, *dry(script), *args), script, *words)


@pytest.mark.parametrize(
    ("args", "environment", "words"),
    [
        ([], {"NPROC": "x"}, ["NPROC) is x"]),
        ([], {"NPROC": "0"}, ["NPROC) is 0"]),
        (["--batch-size", "2"], {"NPROC": "3"}, ["--batch-size 2", "3 processes"]),
        (
            ["--nproc", "2"],
            dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"),
            ["launcher", "--nproc"],
        ),
        ([], {"RANK": "0"}, ["WORLD_SIZE"]),
    ],
    ids=["NPROC=x", "NPROC=0", "NPROC above the batch", "--nproc under torchrun", "RANK alone"],
)
@pytest.mark.parametrize("script", LAUNCHED_SCRIPTS)
def test_bad_environment(run, script, args, environment, words):
    assert refused(run(script, *dry(script), *args, **environment), script, *words)


@pytest.mark.parametrize("script", LAUNCHED_SCRIPTS)
def test_more_processes_than_gpus(run, script):
    gpus = "torch.cuda.device_count = lambda: 2"
    result = run(script, *dry(script), "--nproc", 3, before=gpus)
    assert refused(result, script, "3 processes", "2 visible GPU", "gloo")


@pytest.mark.parametrize("script", MNIST_SCRIPTS)
def test_missing_data(run, script, tmp_path):
    folder = tmp_path / "empty"
    with socket.socket() as holder:  # bound, so that nobody else gets the port, and not listened on: it refuses
        holder.bind(("127.0.0.1", 0))
        mirror = f"http://127.0.0.1:{holder.getsockname()[1]}/"
        before = f"from torchvision import datasets; datasets.MNIST.mirrors = [{mirror!r}]"
        result = run(script, "--data-dir", folder, before=before)
    assert refused(result, script, f"MNIST is not in {folder / 'MNIST' / 'raw'}", "refused", "--dataset synthetic")
    assert [path.name for path in folder.rglob("*") if path.is_file()] in ([], [".lock"])


@pytest.mark.parametrize("script", MNIST_SCRIPTS)
def test_corrupt_data(run, script, tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images", "t10k-images"):
        (raw / f"{name}-idx3-ubyte").write_bytes(b"?")
        (raw / f"{name.replace('images', 'labels')}-idx1-ubyte").write_bytes(b"?")
    result = run(script, "--data-dir", tmp_path)
    assert refused(result, script, str(raw), "is corrupt", "--dataset synthetic")


@pytest.mark.parametrize("script", MNIST_SCRIPTS)
def test_data_dir_is_a_file(run, script, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    result = run(script, "--data-dir", file)
    assert refused(result, script, f"--data-dir {file}")


@pytest.mark.slow
def test_bad_value_from_a_shell(tmp_path):
    result = shell(ROOT / "mnist_ddp.py", *DRY, "--nproc", "0", cwd=tmp_path)
    assert refused(result, "mnist_ddp.py", "NPROC) is 0", "at least 1")


# -------------------------------------------------------------------------------------------------------------- Apex


def write(folder, files):
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


NVIDIAS = {"apex/__init__.py": "", "apex/multi_tensor_apply/__init__.py": ""}
APEXES = {
    "none": ({}, "not installed"),
    "a clone that is not installed": ({"apex/setup.py": "", "apex/apex/__init__.py": ""}, "not installed"),
    "another package": ({"apex/__init__.py": ""}, "not NVIDIA's"),
    # `pip install apex` gives one that can't even be imported: it needs an old version of another package
    "another package, broken": ({"apex/__init__.py": "from no_such_module import nothing"}, "not NVIDIA's"),
    "another module": ({"apex.py": ""}, "not NVIDIA's"),
    "without amp": (NVIDIAS, "no apex.amp"),
    "without CUDA": (NVIDIAS | {"apex/amp/__init__.py": ""}, "CUDA"),
}
HIDE_APEX = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name.split(".")[0] == "apex" else find(name, *args)
"""


@pytest.mark.parametrize("kind", APEXES)
def test_apex_that_cant_be_used(run, tmp_path, kind):
    files, words = APEXES[kind]
    write(tmp_path / "lib", files)
    hide = HIDE_APEX if kind == "none" else ""  # even if this machine has one
    result = run("mnist_apex.py", *DRY, path=[tmp_path / "lib"], before=hide)
    assert refused(result, "mnist_apex.py", words, "mnist_amp.py")
    assert ("25.04" in result.err) == (kind != "without CUDA")  # no other Apex would help there
    assert ("pip install --no-build-isolation ./apex" in result.err) == (kind != "without CUDA")


class ApexO1(TorchFunctionMode):
    """Apex's rule for arithmetic under --opt-level O1: of float types it can mix float16 and float32 only."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = {arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()}
        arithmetic = func.__name__.strip("_") in ("add", "iadd", "sub", "mul", "imul", "truediv", "eq")
        if arithmetic and len(found) > 1 and not found <= {torch.float16, torch.float32}:
            raise NotImplementedError(f"Do not know how to handle these types to promote: {found}")
        return func(*args, **(kwargs or {}))


def test_apex_o1_can_add_up_every_sum(tmp_path, monkeypatch):
    write(tmp_path, {"apex/__init__.py": "", "apex/amp.py": AMP})
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("apex", "apex.amp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    digits, _ = data.load("synthetic", "", limit=40)
    loader, device, model = data.loader(digits, 20, range(40)), torch.device("cpu"), mnist_apex.ConvNet(1, 28)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ApexO1():
        _, seen = mnist_apex.train(model, loader, optimizer, SimpleNamespace(step=lambda: None), device)
        _, count = mnist_apex.evaluate(model, loader, device)
    for name in ("apex", "apex.amp"):
        monkeypatch.delitem(sys.modules, name)
    assert seen == count == 40


AMP = """
import contextlib
calls = []
def initialize(model, optimizer, **options):
    calls.append(("initialize", options))
    step = optimizer.step
    optimizer.step = lambda: (calls.append(("step", optimizer.param_groups[0]["params"][0].grad.item())), step())
    return model, optimizer
@contextlib.contextmanager
def scale_loss(loss, optimizer):
    calls.append(("scale", loss.item()))
    yield loss * 8
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad /= 8
    calls.append(("unscale", loss.item()))
"""


def test_the_loop_keeps_apexs_order(tmp_path, monkeypatch):
    """Only the order of the calls, against a stand-in of a few lines; the real Apex was not run, it needs CUDA."""
    write(tmp_path, {"apex/__init__.py": "", "apex/amp.py": AMP})
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("apex", "apex.amp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp = importlib.import_module("apex.amp")
    amp.initialize(model, optimizer)
    pixel = data.Images(torch.full((1, 1, 1, 1), 3, dtype=torch.uint8), torch.zeros(1), (0.0,), (1 / 255,))
    monkeypatch.setattr(mnist_apex.F, "cross_entropy", lambda logits, labels: logits.square().sum())
    loader = data.loader(pixel, 1, [0])
    # (2 * 3)^2 = 36, its gradient 2 * 6 * 3 = 36
    mnist_apex.train(model, loader, optimizer, SimpleNamespace(step=lambda: None), torch.device("cpu"))

    calls = sys.modules["apex.amp"].calls
    for name in ("apex", "apex.amp"):
        monkeypatch.delitem(sys.modules, name)
    assert calls[1:] == [
        ("scale", 36.0),
        ("unscale", 36.0),
        ("step", 36.0),
    ]  # one step, after the gradient was unscaled
    assert model.weight.item() == 2.0 - 0.5 * 36.0
