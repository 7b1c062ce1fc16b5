"""cifar10_ddp.py as a program: what it leaves behind, and that no way of ending it changes the result.

Runs are forked from a process that has imported all they need (world.py); the data set is a small one.
"""

import contextlib
import csv
import functools
import hashlib
import importlib.util
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import tarfile
import threading
import time
import types
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import test_data
import torch
from filelock import FileLock
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_scripts import in_float16, refused
from torchvision import datasets
from world import ROOT, WORLDS, forker, shell
from world import launched as of_processes

import checkpoint
import cifar10_ddp
import data
import distributed as dist

SCRIPT = "cifar10_ddp.py"
TRAIN, TEST, BATCH = 960, 400, 96  # ten steps an epoch
FLAGS = ("--dataset", "synthetic", "--width", 2, "--batch-size", BATCH, "--epochs", 2)

# Before the script: fewer digits.
SMALL = f"""
import os, data
digits = data._digits
counts = {{1: int(os.environ.get("TRAIN", {TRAIN})), 2: int(os.environ.get("TEST", {TEST}))}}
data._digits = lambda count, seed: digits(counts[seed], seed)
"""


def start_in(cwd, *args, before="", **environment):
    return forker().start(SCRIPT, *args, cwd=cwd, before=SMALL + before, **environment)


@pytest.fixture
def start(tmp_path):
    """start(*args): the script in tmp_path/cwd; `wait` for it before the next."""
    return lambda *args, **options: start_in(tmp_path / "cwd", *args, **options)


@pytest.fixture
def run(start):
    return lambda *args, **options: start(*args, **options).wait()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """reference(nproc): an uninterrupted run's result and folder; don't change it."""
    made = {}

    def reference(nproc):
        if nproc not in made:
            cwd = tmp_path_factory.mktemp("reference") / "cwd"
            result = start_in(cwd, *FLAGS, "--nproc", nproc).wait()
            assert result.code == 0 and result.err == "", result.err
            made[nproc] = result, the_folder(cwd)
        return made[nproc]

    return reference


@pytest.fixture
def finished(reference, tmp_path):
    """A copy of an uninterrupted run's folder, at runs/NAME below tmp_path/cwd; returns runs/NAME."""
    folder = reference(1)[1]
    shutil.copytree(folder, tmp_path / "cwd" / "runs" / folder.name)
    return Path("runs", folder.name)


def the_folder(cwd):
    (folder,) = (path for path in (cwd / "runs").iterdir() if path.is_dir())
    return folder


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def without_speed(rows):
    return [{name: value for name, value in row.items() if name != "training_images_per_s"} for row in rows]


def scalars(folder):
    """What TensorBoard shows: a list of (step, value) for each tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def shows_its_metrics(folder):
    """TensorBoard has every epoch of metrics.csv once, with its value as a float32."""
    table, shown = rows(folder), scalars(folder)
    assert [row["epoch"] for row in table] == list(range(1, len(table) + 1))
    assert {tag.replace("/", "_", 1) for tag in shown} | {"epoch"} == set().union(*table)
    for tag, points in shown.items():
        name = tag.replace("/", "_", 1)
        assert points == [(row["epoch"], torch.tensor(row[name]).item()) for row in table if name in row], tag
    return True


def same_end(folder, expected):
    """Bit by bit what the uninterrupted run has, but for the speed; and nothing half or stale is left."""
    ours, theirs = (checkpoint.read(path / "last.pt") for path in (folder, expected))
    for name, tensor in theirs["parts"]["model"].items():
        assert torch.equal(ours["parts"]["model"][name], tensor), name
    momenta = [state["parts"]["optimizer"]["state"] for state in (ours, theirs)]
    assert momenta[0].keys() == momenta[1].keys() != set()
    for key, momentum in momenta[1].items():
        assert torch.equal(momenta[0][key]["momentum_buffer"], momentum["momentum_buffer"])
    assert ours["parts"]["scheduler"]["last_epoch"] == theirs["parts"]["scheduler"]["last_epoch"]
    assert without_speed(rows(folder)) == without_speed(rows(expected))
    assert without_speed(ours["history"]) == without_speed(rows(expected))
    assert shows_its_metrics(folder)
    names = [sorted(p.name for p in f.iterdir() if "tfevents" not in p.name) for f in (folder, expected)]
    assert names[0] == names[1]
    for path in folder.glob("*.pt"):
        checkpoint.read(path)
    return True


# ------------------------------------------------------------------------------------------- what a run leaves behind

EPOCH = re.compile(
    r"epoch (\d)/(\d)  loss (\d+\.\d{4})  ([1-9]\d*) images/s  train (\d+\.\d\d%)  "
    r"test (\d+\.\d\d%) \((\d+)/(\d+)\)  top-3 (\d+\.\d\d%)  top-5 (\d+\.\d\d%)"
)


def agrees(table, lines, train=TRAIN, test=TEST):
    """The lines printed are those of metrics.csv, and the accuracies are whole numbers of examples."""
    assert len(table) == len(lines)
    for number, (row, line) in enumerate(zip(table, lines, strict=True), 1):
        epoch, last, loss, speed, train_top1, test_top1, right, count, top3, top5 = EPOCH.fullmatch(line).groups()
        assert (int(epoch), int(last)) == (number, len(table))
        assert int(count) == test and row["test_top1"] == int(right) / test
        assert (loss, speed) == (f"{row['training_loss']:.4f}", f"{row['training_images_per_s']:.0f}")
        shown = [f"{row[name]:.2%}" for name in ("train_top1", "test_top1", "test_top3", "test_top5")]
        assert shown == [train_top1, test_top1, top3, top5]
        for name, total in ("train", train), ("test", test):
            accuracies = [row[f"{name}_top{k}"] for k in (1, 3, 5)]
            assert 0 <= accuracies[0] <= accuracies[1] <= accuracies[2] <= 1
            for accuracy in accuracies:
                assert accuracy * total == pytest.approx(round(accuracy * total), abs=1e-9)
    return True


@pytest.mark.slow
def test_folder(reference):
    result, folder = reference(2)
    assert re.fullmatch(r"resnet9-gloo-2-\d{8}-\d{6}", folder.name)
    first, *lines, done = result.out.splitlines()
    assert first == "distributed: 2 processes, gloo, cpu"
    assert lines[0] == "resnet9, 6,772 parameters, on synthetic, cpu, float32"
    assert lines[1] == f"global batch 96 = 2 x 48; everything is in runs/{folder.name}"
    assert re.fullmatch(r"done in \d+\.\d s", done)
    table = rows(folder)
    assert len(table) == 2 and agrees(table, lines[2:])
    # 20 steps, of which the first 4 rise: at the 10th there are 11 of 16 to go, at the last one.
    assert [row["training_lr"] for row in table] == pytest.approx([0.4 * 11 / 16, 0.4 * 1 / 16])

    log = (folder / "log.txt").read_text()
    logged = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)", line)[1] for line in log.splitlines()]
    assert logged == [*lines, done]
    best = [f"best-{row['test_top1']:.4f}-step-{10 * row['epoch']:.0f}.pt" for row in table]
    files = [".lock", "config.json", "curves.png", "last.pt", "log.txt", "metrics.csv", "previous.pt", *best]
    (events,) = folder.glob("events.out.tfevents.*")
    assert sorted(path.name for path in folder.iterdir()) == sorted([*files, events.name])
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]  # no note for a launcher

    last = checkpoint.read(folder / "last.pt")
    assert (last["step"], last["epoch"], last["batch"]) == (20, 2, 0)
    assert checkpoint.read(folder / "previous.pt")["step"] == 10
    assert [checkpoint.read(folder / name)["step"] for name in best] == [10, 20]
    config = json.loads((folder / "config.json").read_text())
    assert config == last["config"]
    expected = {"dataset": "synthetic", "model": "resnet9", "width": 2, "epochs": 2, "batch_size": 96, "processes": 2}
    assert expected.items() <= config.items() and config["global_batch"] == 96
    assert shows_its_metrics(folder)


@pytest.mark.slow
def test_each_process_draws_for_itself(reference):
    """Dropout must not be the same in all of them."""
    first, second = checkpoint.read(reference(2)[1] / "last.pt")["random"]
    assert not torch.equal(first["cpu"], second["cpu"])


@pytest.mark.slow
def test_curves(reference):
    with Image.open(reference(1)[1] / "curves.png") as picture:
        assert picture.format == "PNG" and picture.size == (1200, 700)
        colours = {colour[:3]: count for count, colour in picture.getcolors(1 << 24)}
    assert colours[255, 255, 255] > 0.7 * 1200 * 700
    for drawn in (31, 119, 180), (255, 127, 14), (0, 0, 0):  # the lines of both sets, and text
        assert colours[drawn] > 200


@pytest.mark.slow
def test_last_has_the_accuracy_that_was_printed(reference):
    # Evaluated here, by other code.
    _, folder = reference(1)
    model = cifar10_ddp.resnet9(2)
    model.load_state_dict(checkpoint.read(folder / "last.pt")["parts"]["model"])
    images, labels = data._digits(TEST, seed=2)
    images = torch.nn.functional.pad(images, [2] * 4).repeat(1, 3, 1, 1)
    with torch.no_grad():
        logits = model.eval()((images / 255 - 0.21) / 0.16)
    row = rows(folder)[-1]
    order = logits.argsort(dim=1, descending=True)
    for k in 1, 3, 5:
        right = (order[:, :k] == labels.view(-1, 1)).sum().item()
        assert right / TEST == pytest.approx(row[f"test_top{k}"], abs=1.5 / TEST)  # another order of sums may tip one
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert loss == pytest.approx(row["test_loss"], rel=1e-4)


def by_hand(n, epochs, batch, lr, factors, weight_decay, smoothing, seed, count):
    """The recipe without torch.optim: the mean loss of each epoch, then the weights and the momenta, by name.

    factors: of the learning rate, one for each step.  Each of the n processes has every n-th example of a batch.
    """
    digits = data.Images(*data._digits(count, seed=1), (0.21,) * 3, (0.16,) * 3)
    digits.images = torch.nn.functional.pad(digits.images, [2] * 4).repeat(1, 3, 1, 1)
    augmented = data.Augmented(digits, seed)
    torch.manual_seed(seed)
    model = cifar10_ddp.build("resnet9", 2).to(memory_format=torch.channels_last).train()
    weights, momenta, losses, factors = dict(model.named_parameters()), {}, [], iter(factors)
    for epoch in range(epochs):
        augmented.set_epoch(epoch)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        of_epoch = []
        for images, labels in data.batches(data.loader(augmented, batch, order), torch.device("cpu")):
            gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            for rank in range(n):  # each normalises its own share, and the gradients are averaged
                surprise = -model(images[rank::n]).log_softmax(1)  # of each class
                right = surprise.gather(1, labels[rank::n].view(-1, 1)).mean()
                loss = (1 - smoothing) * right + smoothing * surprise.mean()
                of_epoch.append(loss.item())
                for name, gradient in zip(weights, torch.autograd.grad(loss, weights.values()), strict=True):
                    gradients[name] += gradient / n
            rate = lr * next(factors)
            for name, weight in weights.items():
                gradient = gradients[name] + weight_decay * weight.data
                momenta[name] = 0.9 * momenta.get(name, torch.zeros_like(weight)) + gradient
                weight.data -= rate * (gradient + 0.9 * momenta[name])  # Nesterov: as if the next step's momentum
        losses.append(sum(of_epoch) / len(of_epoch))
    return losses, {name: weight.data for name, weight in weights.items()}, momenta


@pytest.mark.slow
def test_recipe(run, tmp_path):
    """Compares with the same steps written out by hand: SGD with Nesterov's momentum, weight decay, warm-up, decay and
    label smoothing, each with a value that shows after a few steps."""
    flags = {"--epochs": 2, "--batch-size": 16, "--lr": 0.1, "--weight-decay": 0.05, "--label-smoothing": 0.4}
    flags |= {"--warmup": 0.375, "--seed": 3, "--width": 2, "--nproc": 2, "--dataset": "synthetic"}
    result = run(*(text for flag in flags.items() for text in flag), TRAIN=64, TEST=16)
    assert result.code == 0 and result.err == "", result.err
    # Eight steps, of which three rise; from the third on, five fall to zero, which the step after the last would have.
    factors = [1 / 3, 2 / 3, 3 / 3, 5 / 5, 4 / 5, 3 / 5, 2 / 5, 1 / 5]
    losses, weights, momenta = by_hand(
        2, epochs=2, batch=16, lr=0.1, factors=factors, weight_decay=0.05, smoothing=0.4, seed=3, count=64
    )
    folder = the_folder(tmp_path / "cwd")
    assert [row["training_loss"] for row in rows(folder)] == pytest.approx(losses, rel=1e-4)
    assert [row["training_lr"] for row in rows(folder)] == pytest.approx([0.1 * factors[3], 0.1 * factors[7]])
    parts = checkpoint.read(folder / "last.pt")["parts"]
    for number, name in enumerate(weights):
        torch.testing.assert_close(parts["model"][name], weights[name], rtol=1e-3, atol=1e-5)
        momentum = parts["optimizer"]["state"][number]["momentum_buffer"]
        torch.testing.assert_close(momentum, momenta[name], rtol=1e-3, atol=1e-4)


def _train(model, loader, optimizer, scheduler, device, dtype, scaler):
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    for images, labels in data.batches(loader, device):
        cifar10_ddp.train_step(images, labels, dtype, 0.0, **parts)


@pytest.mark.parametrize("n", [1, 2])
def test_loss_scaling(n):
    of_processes(in_float16, n, _train)


@pytest.mark.slow
def test_every_example_is_evaluated_once(run, tmp_path):
    # Neither 200 nor 500 divides by 3, and no batch divides anything.
    flags = ("--dataset", "synthetic", "--width", 2, "--batch-size", 97, "--epochs", 1)
    result = run(*flags, "--nproc", 3, TRAIN=200, TEST=500)
    assert result.code == 0 and result.err == "", result.err
    assert "global batch 96 = 3 x 32; " in result.out
    lines = [line for line in result.out.splitlines() if line.startswith("epoch")]
    assert agrees(rows(the_folder(tmp_path / "cwd")), lines, train=200, test=500)


@pytest.mark.parametrize(("stop", "count"), [(False, 12), (True, 5)])
def test_an_evaluation_ends_early_once_this_process_was_told_to_stop(stop, count):
    images = torch.zeros(12, 1, 2, 2, dtype=torch.uint8)
    loader = data.loader(data.Images(images, torch.zeros(12, dtype=torch.int64), (0.0,), (1.0,)), 5, range(12))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 10))
    told = types.SimpleNamespace(asked=stop)
    assert cifar10_ddp.evaluate(model, loader, torch.device("cpu"), torch.float32, told).count == count


def _progress(rank, n, folder):
    keeper, reporter = checkpoint.Keeper(folder), types.SimpleNamespace(history=["first epoch"])
    new = functools.partial(cifar10_ddp.Progress, keeper, reporter, 10, device=torch.device("cpu"))
    progress = new(state={})
    progress.add_batch(100.0, 7)
    progress.next_epoch()
    for _ in range(3):
        progress.add_batch(torch.tensor(rank + 1.0), 2)
    assert progress.mean_loss() == pytest.approx((n + 1) / 2)  # of the ranks' 1, 2, ...; twice: nothing has changed
    assert progress.mean_loss() == pytest.approx((n + 1) / 2)
    progress.save()
    state = keeper.restore(folder / "last.pt")
    assert (state["step"], state["epoch"], state["batch"], state["history"]) == (13, 1, 3, ["first epoch"])
    again = new(state=state)
    assert str(again) == "epoch 2, batch 3 of 10" and again.sums.tolist() == [6 * (rank + 1), 6]
    state["sums"] = torch.ones(n + 1, 2)  # of one process more
    again = new(state=state)
    assert dist.reduce(again.sums, "sum").tolist() == [n + 1] * 2


@WORLDS
def test_progress(tmp_path, n):
    of_processes(_progress, n, tmp_path)


@pytest.mark.slow
def test_dry_run(run, tmp_path):
    result = run("--dataset", "synthetic", "--width", 2, "--batch-size", 7, "--dry-run")
    assert result.code == 0 and result.err == "", result.err
    assert "global batch 6 = 2 x 3; " in result.out  # two processes where there is no GPU
    folder = the_folder(tmp_path / "cwd")
    assert agrees(rows(folder), result.out.splitlines()[3:-1], train=12, test=12)
    assert checkpoint.read(folder / "last.pt")["step"] == 2


NOTE_AUGMENTATION = """
import torch
batches = data.batches
def noted(loader, device):
    if isinstance(loader.dataset, data.Augmented):
        sampler = loader.sampler
        torch.save([sampler.seed, sampler.epoch, loader.dataset.draws], f"epoch-{sampler.epoch}")
    return batches(loader, device)
data.batches = noted
"""


@pytest.mark.slow
def test_validate_every(run, tmp_path):
    flags = ("--dataset", "synthetic", "--width", 2, "--batch-size", 24, "--epochs", 3, "--seed", 5)
    result = run(*flags, "--validate-every", 2, "--nproc", 1, TRAIN=48, TEST=20, before=NOTE_AUGMENTATION)
    assert result.code == 0 and result.err == "", result.err
    digits = data.Augmented(data.Images(torch.zeros(48, 3, 32, 32), torch.zeros(48), (0,) * 3, (1,) * 3), seed=5)
    for epoch in range(3):  # another order and another augmentation each epoch
        digits.set_epoch(epoch)
        *of_sampler, draws = torch.load(tmp_path / "cwd" / f"epoch-{epoch}")
        assert of_sampler == [5, epoch] and torch.equal(draws, digits.draws)
        digits.set_epoch(epoch + 1)
        assert not torch.equal(draws, digits.draws)
    folder = the_folder(tmp_path / "cwd")
    with open(folder / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [bool(row["test_top1"]) for row in table] == [False, True, True]  # the last one always
    assert all(row["training_loss"] for row in table)
    assert [step for step, _ in scalars(folder)["test/top1"]] == [2, 3]
    assert [step for step, _ in scalars(folder)["training/loss"]] == [1, 2, 3]
    assert {path.stem.rpartition("-")[2] for path in folder.glob("best-*")} <= {"4", "6"}


# ------------------------------------------------------------------------------- stopped and resumed: the same result


@pytest.mark.slow
def test_resume_of_a_finished_run(run, reference, finished, tmp_path):
    result = run(*FLAGS, "--nproc", 1, "--resume", finished)
    assert result.code == 0 and result.err == "", result.err
    assert "epoch 1/2" not in result.out and "epoch 2/2" not in result.out
    assert same_end(tmp_path / "cwd" / finished, reference(1)[1])


# SIGTERM to the program itself (or to one process) when rank LAST gets its AT-th batch, of training and evaluation.
TERMINATE = """
import signal, time
batches, seen, script = data.batches, [], os.getpid()
def counted(loader, device):
    for batch in batches(loader, device):
        seen.append(1)
        if len(seen) == int(os.environ["AT"]) and os.environ.get("RANK", "0") == os.environ["LAST"]:
            os.kill(os.getpid() if os.environ.get("TO_ONE") else script, signal.SIGTERM)
            time.sleep(0.3)  # until all ranks know
        yield batch
data.batches = counted
"""


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    """stopped_once(nproc, at, ...): the result and the folder of a run that was told to stop; don't change it."""

    @functools.cache
    def stopped_once(nproc, at, *flags, **environment):
        cwd = tmp_path_factory.mktemp("stopped") / "cwd"
        environment |= {"before": TERMINATE, "AT": at, "LAST": nproc - 1}
        result = start_in(cwd, *(flags or FLAGS), "--nproc", nproc, **environment).wait()
        assert result.code == 143, result
        return result, the_folder(cwd)

    return stopped_once


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """stopped(nproc, at, ...): a run that was told to stop; returns its folder, the epoch and the batch it was at."""

    def stopped(nproc, at, *flags, **environment):
        result, original = stopped_once(nproc, at, *flags, **environment)
        assert re.fullmatch(r"(launch: SIGTERM: waiting for \d processes to save\n)?", result.err)
        folder = tmp_path / "cwd" / "runs" / original.name
        shutil.copytree(original, folder)
        pattern = r"SIGTERM: saved at epoch (\d), batch (\d+) of \d+; go on with --resume runs/(.+)"
        epoch, batch, name = re.fullmatch(pattern, result.out.splitlines()[-1]).groups()
        assert name == folder.name
        state = checkpoint.read(folder / "last.pt")
        assert (state["epoch"], state["batch"]) == (int(epoch) - 1, int(batch))
        return folder, int(epoch), int(batch)

    return stopped


# Every batch takes a second: then the speed is the global batch size, also of an epoch of which a part was trained.
CLOCK = """
import time
batches, seconds = data.batches, [0.0]
def timed(loader, device):
    for batch in batches(loader, device):
        seconds[0] += 1
        yield batch
data.batches, time.perf_counter = timed, lambda: seconds[0]
"""


# An epoch is 10 batches of training and 2 of evaluation.
SIGTERM = [(16, 2, {4, 5}), (11, 1, {10})]


@pytest.mark.slow
@pytest.mark.parametrize(("at", "epoch", "batches"), SIGTERM)
def test_sigterm_and_resume(run, reference, stopped, at, epoch, batches):
    folder, at_epoch, at_batch = stopped(2, at)
    assert at_epoch == epoch and at_batch in batches
    result = run(*FLAGS, "--nproc", 2, "--resume", f"runs/{folder.name}", before=CLOCK)
    assert result.code == 0 and result.err == "", result.err
    assert f"resuming runs/{folder.name}/last.pt at epoch {epoch}, batch {at_batch} of 10\n" in result.out
    assert same_end(folder, reference(2)[1])
    # Where nothing was left to train, no speed is made up.
    assert rows(folder)[epoch - 1].get("training_images_per_s") == (BATCH if at_batch < 10 else None)
    assert " 0 images/s" not in result.out


@pytest.mark.slow
def test_sigterm_to_one_process_stops_the_run(stopped):
    """All ranks save together, and the run ends with 143, as if the program itself had been told."""
    stopped(3, 11, TO_ONE=1)


@pytest.mark.slow
def test_resume_with_another_number_of_processes(run, reference, stopped, tmp_path):
    folder, _, batch = stopped(1, 17)
    first = checkpoint.read(folder / "last.pt")["sums"].sum(0)
    resume = ("--resume", f"runs/{folder.name}")
    result = run(*FLAGS, "--nproc", 2, *resume, before=TERMINATE, AT=2, LAST=1)
    assert result.code == 143, result.err
    assert "global batch 96 = 2 x 48; " in result.out
    state = checkpoint.read(folder / "last.pt")
    assert state["step"] == 10 + state["batch"] > 10 + batch and state["config"]["processes"] == 2
    loss, seen = state["sums"].sum(0).tolist()  # nothing that was summed up before is lost, or counted twice
    assert first[1] == 96 * batch and seen == 96 * state["batch"] and loss > first[0]

    result = run(*FLAGS, "--nproc", 1, *resume)
    assert result.code == 0 and result.err == "", result.err
    table, expected = rows(folder), rows(reference(1)[1])
    assert len(table) == 2 and without_speed(table[:1]) == without_speed(expected[:1])
    # The same examples in the same batches; but BatchNorm has seen halves of them.
    assert table[1]["training_loss"] == pytest.approx(expected[1]["training_loss"], rel=0.02)
    assert table[1]["training_lr"] == expected[1]["training_lr"]
    assert shows_its_metrics(folder)
    assert checkpoint.read(folder / "last.pt")["step"] == 20


@pytest.mark.slow
def test_a_checkpoint_alone_starts_a_new_run(run, reference, stopped, tmp_path):
    folder, epoch, batch = stopped(1, 17)
    shutil.copy(folder / "last.pt", tmp_path / "cwd" / "mine.pt")
    shutil.rmtree(folder)
    result = run(*FLAGS, "--nproc", 1, "--resume", "mine.pt", "--output-dir", "runs")
    assert result.code == 0 and result.err == "", result.err
    assert f"resuming mine.pt at epoch {epoch}, batch {batch} of 10\n" in result.out
    ours, theirs = (checkpoint.read(f / "last.pt") for f in (the_folder(tmp_path / "cwd"), reference(1)[1]))
    for name, tensor in theirs["parts"]["model"].items():
        assert torch.equal(ours["parts"]["model"][name], tensor), name
    assert without_speed(rows(the_folder(tmp_path / "cwd"))) == without_speed(rows(reference(1)[1]))


@pytest.mark.slow
def test_dropout_goes_on_with_the_same_random_numbers(run, stopped, tmp_path):
    flags = ("--dataset", "synthetic", "--model", "squeezenet1_1", "--batch-size", 8, "--dry-run", "--nproc", 2)
    assert run(*flags, "--output-dir", "whole").code == 0
    (whole,) = (tmp_path / "cwd" / "whole").iterdir()
    folder, epoch, batch = stopped(2, 1, *flags[:-2])
    assert (epoch, batch) == (1, 1)
    result = run(*flags, "--resume", f"runs/{folder.name}")
    assert result.code == 0, result.err
    assert same_end(folder, whole)


# Rank 0's CPU has bf16 instructions, the others' have none; and each rank notes what it computes in.
MIXED_CPUS = """
import pathlib, torch
read_text, autocast = pathlib.Path.read_text, torch.autocast
def cpuinfo(self, *args, **kwargs):
    if str(self) != "/proc/cpuinfo":
        return read_text(self, *args, **kwargs)
    return os.environ["CPU"] if os.environ["RANK"] == "0" else ""
def noted(device, dtype, **options):
    with open("dtypes", "a") as file:
        file.write(f"{os.environ['RANK']} {dtype}\\n")
    return autocast(device, dtype, **options)
pathlib.Path.read_text, torch.autocast = cpuinfo, noted
"""


@pytest.mark.slow
def test_one_precision_for_all_ranks_and_for_the_whole_run(run, tmp_path):
    flags = ("--dataset", "synthetic", "--width", 2, "--batch-size", 8, "--dry-run", "--nproc", 2)
    result = run(*flags, "--amp", before=MIXED_CPUS, CPU="amx_bf16")
    assert result.code == 0, result.err
    dtypes = tmp_path / "cwd" / "dtypes"
    assert set(dtypes.read_text().splitlines()) == {"0 torch.bfloat16", "1 torch.bfloat16"}
    folder = the_folder(tmp_path / "cwd")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    dtypes.unlink()
    before_training = f"runs/{folder.name}/previous.pt"
    result = run(*flags, "--amp", "--resume", before_training, before=MIXED_CPUS, CPU="")
    assert result.code == 0, result.err
    assert set(dtypes.read_text().splitlines()) == {"0 torch.bfloat16", "1 torch.bfloat16"}


def children(pid):
    with contextlib.suppress(OSError):  # it has ended
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@pytest.mark.slow
def test_killed_again_and_again(start, reference, tmp_path):
    """SIGKILL at random moments, to the parent alone or to all, a checkpoint being written after every step."""
    seed = int(os.environ.get("SEED") or time.time_ns() % 10**6)
    print(f"to repeat this: SEED={seed}")
    chance, folder, flags = random.Random(seed), None, [*FLAGS, "--nproc", 2, "--checkpoint-every", 1]
    for number in range(3):
        # Killed with all of its processes, it can't remove its temporary folder.
        job = start(*flags, *(["--resume", f"runs/{folder.name}"] if folder else []), TMPDIR=tmp_path)
        while not (runs := list((tmp_path / "cwd").glob("runs/resnet9-*/last.pt"))) and not job.files[1].read_text():
            time.sleep(0.002)
        (folder,) = {path.parent for path in runs}
        deadline = time.monotonic() + chance.uniform(0, 1.2)
        while time.monotonic() < deadline:
            time.sleep(0.001)
        if number % 2:  # at the next write, if there is one: half a file is there
            while time.monotonic() < deadline + 1 and not (folder / ".last.pt.tmp").exists():
                time.sleep(0.0002)
        victims = [job.pid, *(children(job.pid) if chance.random() < 0.5 else [])]  # or they notice its death
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        assert job.wait().code in (-signal.SIGKILL, 0)  # it may have come to its end
    result = start(*flags, "--resume", f"runs/{folder.name}").wait()
    assert result.code == 0 and result.err == "", result.err
    assert same_end(folder, reference(2)[1])


@pytest.mark.slow
def test_an_epoch_that_was_reported_and_not_saved(run, reference, finished, tmp_path):
    # As if killed between the two.
    folder = tmp_path / "cwd" / finished
    (folder / "previous.pt").rename(folder / "last.pt")
    result = run(*FLAGS, "--nproc", 1, "--resume", finished)
    assert result.code == 0 and result.err == "", result.err
    assert "at epoch 2, batch 0 of 10\n" in result.out
    assert same_end(folder, reference(1)[1])


@pytest.mark.slow
def test_the_processes_of_a_killed_run_may_be_writing_still(start, reference, finished, tmp_path):
    # Here one is between the two renames: last.pt isn't there, and will be.  It is as good as ever, and stays.
    folder = tmp_path / "cwd" / finished
    with FileLock(folder / ".lock"):
        (folder / "last.pt").rename(folder / ".last.pt.tmp")
        job = start(*FLAGS, "--nproc", 1, "--resume", finished)
        time.sleep(0.6)
        (folder / ".last.pt.tmp").rename(folder / "last.pt")
    result = job.wait()
    assert result.code == 0 and result.err == "", result.err
    assert f"resuming {finished}/last.pt at epoch 3" in result.out
    assert same_end(folder, reference(1)[1])


@pytest.mark.slow
def test_a_corrupt_last_checkpoint(run, reference, finished, tmp_path):
    folder = tmp_path / "cwd" / finished
    for best in folder.glob("best-*"):
        best.unlink()
    spoilt = bytearray((folder / "last.pt").read_bytes())
    spoilt[len(spoilt) // 2] ^= 1
    (folder / "last.pt").write_bytes(spoilt)
    result = run(*FLAGS, "--nproc", 1, "--resume", finished)
    assert result.code == 0, result.err
    pattern = rf"{finished}/last\.pt is corrupt, or no checkpoint \(.+\): going on from {finished}/previous\.pt\n"
    assert re.fullmatch(pattern, result.err)
    assert "at epoch 2, batch 0 of 10\n" in result.out
    (folder / "last.pt.corrupt").unlink()
    for best in reference(1)[1].glob("best-*-step-10.pt"):  # the one that was taken away above
        shutil.copy(best, folder)
    assert same_end(folder, reference(1)[1])


UNDER_TORCHRUN = f"""
import os, runpy, signal, sys
sys.path.insert(0, {str(ROOT)!r})
{SMALL}
import checkpoint
agreed, calls = checkpoint.Preemption.agreed, []
def counted(self):
    calls.append(1)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" and len(calls) == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    return agreed(self)
checkpoint.Preemption.agreed = counted
runpy.run_path({str(ROOT / SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_torchrun_restarts_it_after_a_kill(reference, tmp_path):
    # The 11 calls of the first epoch, and 4 of the second.
    (tmp_path / SCRIPT).write_text(UNDER_TORCHRUN)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2")
    result = shell(*torchrun, SCRIPT, *FLAGS, "--checkpoint-every", 2, cwd=tmp_path)
    assert result.code == 0, result.err
    folder = the_folder(tmp_path)
    assert re.search(rf"resuming runs/{folder.name}/last\.pt at epoch 2, batch 2 of 10\n", result.out)
    assert same_end(folder, reference(2)[1])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]  # the note for torchrun is gone


@WORLDS
@pytest.mark.parametrize("skip", [0, 3])
def test_global_batches_do_not_depend_on_the_number_of_processes(monkeypatch, n, skip):
    """The k-th batches of all ranks, interleaved, are the k-th slice of the one order; a restart skips whole ones."""
    count, share, epoch, seed = 120, 4, 5, 7
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    augmented = data.Augmented(data.Images(images, torch.arange(count), (0.5,) * 3, (0.5,) * 3), seed)
    augmented.set_epoch(epoch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))  # as torch has it
    draws = augmented.draws.clone()
    assert [len(column.unique()) for column in draws.T] == [9, 9, 2]
    monkeypatch.setenv("WORLD_SIZE", str(n))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n))
    of_ranks = []
    for rank in range(n):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        sampler = dist.data_sampler(augmented, distributed=True, seed=seed)
        loader = data.loader(augmented, share, sampler, drop_last=True)
        assert len(loader) == count // n // share
        sampler.set_epoch(epoch, skip=skip * share)
        assert len(loader) == count // n // share - skip
        of_ranks.append(list(data.batches(loader, torch.device("cpu"))))
    for number, parts in enumerate(zip(*of_ranks, strict=True), skip):
        expected = order[number * n * share : (number + 1) * n * share]
        labels = torch.stack([labels for _, labels in parts], dim=1).flatten()
        assert torch.equal(labels, expected)
        pictures = torch.stack([pictures for pictures, _ in parts], dim=1).flatten(0, 1)
        for picture, index in zip(pictures, expected.tolist(), strict=True):
            row, column, flip = draws[index].tolist()
            padded = torch.nn.functional.pad(images[index], [4] * 4)
            crop = padded[:, row : row + 32, column : column + 32]
            crop = crop.flip(-1) if flip else crop
            assert torch.equal(picture, (crop.float() - 127.5) / 127.5)


# --------------------------------------------------------------------------------------------------------- bad input

BAD = [
    (["--model", "resnet19"], ["--model resnet19 is unknown", "resnet18"]),
    (["--model", "qqq"], ["--model qqq is unknown", "resnet9"]),
    (["--model", "alexnet"], ["--model alexnet can't take pictures of 32 x 32", "resnet18"]),
    (["--model", "inception_v3"], ["--model inception_v3 can't take pictures of 32 x 32"]),  # and warns, on its way
    (["--model", "resnet18", "--width", "4"], ["--width is for resnet9 alone"]),
    (["--width", "0"], ["--width", "at least 1"]),
    (["--dataset", "mnist"], ["--dataset", "mnist", "cifar10", "synthetic"]),
    (["--epochs", "0"], ["--epochs", "at least 1"]),
    (["--batch-size", "0"], ["--batch-size"]),
    (["--batch-size", "1", "--nproc", "2"], ["--batch-size 1", "2 processes"]),
    (["--validate-every", "0"], ["--validate-every", "at least 1"]),
    (["--checkpoint-every", "-1"], ["--checkpoint-every", "at least 1"]),
    (["--lr", "nan"], ["--lr", "greater than 0"]),
    (["--weight-decay", "-1"], ["--weight-decay"]),
    (["--warmup", "1.5"], ["--warmup", "from 0 to 1"]),
    (["--label-smoothing", "1"], ["--label-smoothing"]),
    (["--nproc", "0"], ["NPROC) is 0", "at least 1"]),
    (["--backend", "nccl"], ["nccl", "GPU", "gloo"]),
    (["--resume", "nope"], ["can't read nope (No such file or directory)"]),
    (["--resume", "empty"], ["there is no checkpoint in empty"]),
    (["--resume", "text.pt"], ["text.pt is corrupt, or no checkpoint"]),
    (["--resume", "weights.pt"], ["weights.pt is no checkpoint of this program"]),
    (["--resume", "other/last.pt"], ["other/last.pt is a checkpoint of another program"]),
    (["--output-dir", "text.pt"], ["text.pt", "File exists"]),
    (["--output-dir", "text.pt/runs"], ["text.pt", "Not a directory"]),
]


@pytest.mark.parametrize(("args", "words"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_bad_value(run, tmp_path, args, words):
    cwd = tmp_path / "cwd"
    (cwd / "empty").mkdir(parents=True)
    (cwd / "text.pt").write_text("not a checkpoint")
    torch.save({"weight": torch.zeros(2)}, cwd / "weights.pt")
    checkpoint.Keeper(cwd / "other", {"model": "resnet9"}, model=torch.nn.Linear(1, 1)).save(1)
    width = () if "--width" in args or "--model" in args else ("--width", 2)
    assert refused(run("--dataset", "synthetic", "--epochs", 2, *width, *args), SCRIPT, *words)


OTHER = [
    (["--epochs", "3"], "--epochs 2"),
    (["--lr", "0.1"], "--lr 0.4"),
    (["--seed", "1"], "--seed 0"),
    (["--amp"], "no --amp"),
    (["--dry-run"], "no --dry-run"),
    (["--width", "3"], "--width 2"),
    (["--batch-size", "48"], "--batch-size 96"),
    (["--weight-decay", "0"], "--weight-decay 0.0005"),
    (["--warmup", "0.1"], "--warmup 0.2"),
    (["--label-smoothing", "0"], "--label-smoothing 0.1"),
    (["--dataset", "cifar10"], "--dataset synthetic"),
    (["--nproc", "5"], "96, which 5 processes can't share equally"),
]


@pytest.mark.slow
def test_resume_with_other_flags(run, finished):
    no_download = "data.prepare = lambda *args, **options: None"
    for args, words in OTHER:
        result = run(*FLAGS, "--nproc", 1, "--resume", finished, *args, before=no_download)
        assert refused(result, SCRIPT, f"{finished}/last.pt was trained with", words), args
    flags = ("--dataset", "synthetic", "--batch-size", BATCH, "--epochs", 2)
    result = run(*flags, "--model", "resnet18", "--resume", finished)
    assert refused(result, SCRIPT, "resume it with", "--model resnet9", "--width 2")


@pytest.mark.slow
def test_resume_of_a_corrupt_file_names_a_good_one(run, finished, tmp_path):
    folder = tmp_path / "cwd" / finished
    (folder / "previous.pt").write_bytes((folder / "previous.pt").read_bytes()[:-1])
    words = f"{finished}/previous.pt is corrupt, or no checkpoint (", f"; a good one is {finished}/last.pt"
    assert refused(run(*FLAGS, "--resume", f"{finished}/previous.pt"), SCRIPT, *words)
    for path in folder.glob("*.pt"):
        path.write_text("?")
    words = (f"{finished}/{name} is corrupt, or no checkpoint (" for name in ("last.pt", "previous.pt"))
    assert refused(run(*FLAGS, "--resume", finished), SCRIPT, *words)


def test_output_dir_that_can_not_be_written_to(run, tmp_path):
    folder = tmp_path / "cwd" / "locked"
    folder.mkdir(parents=True)
    folder.chmod(0o555)
    # For root every folder is writable; os.access asks for the real user.
    somebody = "if os.getuid() == 0: os.setresuid(65534, 0, 0)"
    result = run(*FLAGS, "--output-dir", "locked", before=somebody)
    assert refused(result, SCRIPT, "can't write to locked", "--output-dir")
    assert list(folder.iterdir()) == []


def test_batch_larger_than_the_data(run):
    result = run(*FLAGS, "--batch-size", TRAIN + 1, "--nproc", 1)
    assert result.code in (1, 2) and "Traceback" not in result.err
    assert f"--batch-size {TRAIN + 1} is too large" in result.err and result.err.count("\n") == 1


FULL_DISK = """
import checkpoint, resource
write, last = checkpoint.write, []
def full(path, *args, **kwargs):
    last.extend([path] * (path.name == "last.pt"))
    if len(last) == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    return write(path, *args, **kwargs)
checkpoint.write = full
"""


@pytest.mark.slow
def test_full_disk(run, tmp_path):
    result = run(*FLAGS, "--nproc", 2, "--checkpoint-every", 1, before=FULL_DISK, DIST_GRACE=0.2)
    folder = the_folder(tmp_path / "cwd")
    last = folder / "last.pt"
    where = r"rank [01] of 2 failed first: "  # all ranks say the same
    assert result.code == 1
    what = f"can't write {last} (File too large); {last} is as it was"
    assert re.match(where + re.escape(f"{SCRIPT}: error: {what}"), result.err) and result.err.count("\n") == 1
    assert f"--resume runs/{folder.name}" in result.err
    assert checkpoint.read(folder / "last.pt")["step"] == 2  # saved at 0, 1 and 2
    assert not list(folder.glob(".*.tmp"))


def test_help_gives_every_default(run):
    result = run("--help")
    assert result.code == 0 and result.err == ""
    flags = {
        re.search(r"--[\w-]+", text)[0]: text for text in re.split(r"^  (?=-)", result.out, flags=re.MULTILINE)[1:]
    }
    given = {"--dataset": "cifar10", "--batch-size": "512", "--lr": "0.4", "--model": "resnet9", "--output-dir": "runs"}
    given |= {"--epochs": "24", "--weight-decay": "0.0005", "--warmup": "0.2", "--label-smoothing": "0.1"}
    for flag, value in given.items():
        assert f"(default: {value})" in " ".join(flags[flag].split())
    without = {flag for flag, text in flags.items() if "(default: " not in " ".join(text.split())}
    assert without == {"--help", "--dry-run", "--amp", "--resume", "--clearml"}


# ----------------------------------------------------------------------------------------------------------- ClearML

HIDE_CLEARML = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name.split(".")[0] == "clearml" else find(name, *args)
"""


def test_clearml_that_is_not_installed(run):
    assert refused(run(*FLAGS, "--clearml", before=HIDE_CLEARML), SCRIPT, "--clearml", "pip install clearml")


@pytest.mark.skipif(not importlib.util.find_spec("clearml"), reason="clearml is not installed")
def test_clearml_offline(run, tmp_path):
    flags = ("--dataset", "synthetic", "--width", 2, "--batch-size", 8, "--dry-run", "--clearml", "--nproc", 2)
    result = run(*flags, CLEARML_OFFLINE_MODE=1, CLEARML_CACHE_DIR=tmp_path, HOME=tmp_path)
    assert result.code == 0, result.err
    assert shows_its_metrics(the_folder(tmp_path / "cwd"))


# ------------------------------------------------------------------------------------- the data: tests/test_data.py's


@pytest.fixture
def server(monkeypatch):
    """A server that has a small archive of CIFAR-10's format; torchvision knows it by its checksums."""

    def part(first, count):
        pixels = np.full((count, 3072), first, dtype=np.uint8)
        pixels[:, 1024:2048] = 7  # green
        return pickle.dumps({"data": pixels, "labels": list(range(first, first + count))})

    source = datasets.CIFAR10
    files = {name: part(number, 2) for number, (name, _) in enumerate([*source.train_list, *source.test_list])}
    files[source.meta["filename"]] = pickle.dumps({source.meta["key"]: list("abcdefghij")})
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{source.base_folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), test_data.Handler)
    server.packed, server.gets, server.delay = {source.filename: packed.getvalue()}, [], 0
    server.over, server.fault, server.faulty, server.daemon_threads = threading.Event(), "", source.filename, True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setattr(source, "url", f"http://127.0.0.1:{server.server_address[1]}/{source.filename}")
    monkeypatch.setattr(source, "tgz_md5", hashlib.md5(packed.getvalue()).hexdigest())
    for name in "train_list", "test_list":
        monkeypatch.setattr(source, name, [[file, md5[file]] for file, _ in getattr(source, name)])
    monkeypatch.setattr(source, "meta", source.meta | {"md5": md5[source.meta["filename"]]})
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_download(tmp_path, server, capfd):
    data.prepare("cifar10", str(tmp_path / "new"))
    assert len(server.gets) == 1 and capfd.readouterr().out == ""
    folder = tmp_path / "new" / "cifar-10-batches-py"
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    assert {path.name for path in folder.iterdir()} - {".lock"} == {*batches, "test_batch", "batches.meta"}
    train, test = data.load("cifar10", str(tmp_path / "new"))
    assert train.images.shape == (10, 3, 32, 32) and test.images.shape == (2, 3, 32, 32)
    assert train.images.dtype == torch.uint8 and train.images.is_contiguous(memory_format=torch.channels_last)
    assert train.labels.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5] and test.labels.tolist() == [5, 6]
    assert train.images[:, :, 3, 5].tolist() == [[n, 7, n] for n in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)]  # red, green, blue
    assert len(train.mean) == len(train.std) == 3
    (folder / "data_batch_3").unlink()
    data.prepare("cifar10", str(tmp_path / "new"))  # fetches what is missing
    assert len(data.load("cifar10", str(tmp_path / "new"))[0]) == 10

    (folder / "data_batch_2").write_bytes(b"?")
    with pytest.raises(data.DataError) as raised:
        data.prepare("cifar10", str(tmp_path / "new"))
    text = str(raised.value)
    assert f"{folder / 'data_batch_2'} is corrupt: delete it" in text and "--dataset synthetic" in text


@pytest.mark.parametrize("fault", ["truncated", "wrong", "unavailable", "stalled"])
def test_failing_server(tmp_path, server, monkeypatch, capfd, fault):
    monkeypatch.setattr(data, "DOWNLOAD_TIMEOUT", 0.3)
    server.fault = fault
    with pytest.raises(data.DataError) as raised:
        data.prepare("cifar10", str(tmp_path))
    text, folder = str(raised.value), tmp_path / "cifar-10-batches-py"
    assert text.startswith(f"CIFAR-10 is not in {folder} and can't be downloaded (") and "\n" not in text
    assert "copy the files of cifar-10-python.tar.gz" in text and "--dataset synthetic" in text
    assert {path.name for path in folder.iterdir()} <= {".lock"} and capfd.readouterr().out == ""
    server.fault = ""
    data.prepare("cifar10", str(tmp_path))


def test_missing_data(run, tmp_path):
    with socket.socket() as holder:  # bound, so that nobody else gets the port, and not listened on: it refuses
        holder.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{holder.getsockname()[1]}/"
        before = f"from torchvision import datasets; datasets.CIFAR10.url = {address!r}"
        result = run("--data-dir", tmp_path / "empty", "--width", 2, before=before)
    folder = tmp_path / "empty" / "cifar-10-batches-py"
    assert refused(result, SCRIPT, f"CIFAR-10 is not in {folder}", "refused", "--dataset synthetic")


def test_real_cifar10():
    folder = os.environ.get("CIFAR10_DIR") or ROOT.parent / "shared" / "data"
    if not Path(folder, "cifar-10-batches-py").exists():
        pytest.skip("no real CIFAR-10 here: set CIFAR10_DIR to a folder that holds cifar-10-batches-py")
    data.prepare("cifar10", str(folder))
    train, test = data.load("cifar10", str(folder))
    assert train.labels.bincount().tolist() == [5000] * 10 and test.labels.bincount().tolist() == [1000] * 10
    values = torch.arange(256).double() / 255
    # A copy stored as JPEG has other checksums; it costs 2e-4 of the mean and 2e-3 of the deviation.
    bounds = {"mean": 1e-4, "std": 1e-3} if datasets.CIFAR10.meta["md5"] else {"mean": 5e-4, "std": 3e-3}
    for channel in range(3):
        counts = train.images[:, channel].flatten().bincount(minlength=256).double()
        mean = (counts * values).sum() / counts.sum()
        std = ((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt()
        assert mean.item() == pytest.approx(train.mean[channel], abs=bounds["mean"])
        assert std.item() == pytest.approx(train.std[channel], abs=bounds["std"])
