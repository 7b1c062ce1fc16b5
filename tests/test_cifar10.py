"""cifar10_ddp.py as a program: what it computes and leaves behind, and that no way of ending it changes the result.

Runs are forked from a process that has imported all they need (world.py); the data set is a small one.
"""

import csv
import math
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from world import ROOT, WORLDS, forker, shell

import checkpoint
import cifar10_ddp
import data
import distributed as dist

SCRIPT = "cifar10_ddp.py"
BATCH, STEPS = 96, 10  # of an epoch, with 960 examples
FLAGS = ("--dataset", "synthetic", "--width", 2, "--batch-size", BATCH, "--epochs", 2)

# Before the script: a small data set in place of the digits.
SMALL = """
import os, torch, data
def load(name=None, data_dir=None, limit=None, colour=True):
    generator = torch.Generator().manual_seed(0)
    def images(count):
        labels = torch.randint(10, (count,), generator=generator)
        noise = torch.randint(100, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return data.Images(noise + 15 * labels.view(-1, 1, 1, 1).byte(), labels, (0.5,) * 3, (0.25,) * 3)
    return images(limit or int(os.environ.get("TRAIN", 960))), images(limit or int(os.environ.get("TEST", 400)))
data.load = load
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


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cwd" / "runs" / "cifar10"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """reference(nproc): an uninterrupted run's result and folder; don't change it."""
    made = {}

    def reference(nproc):
        if nproc not in made:
            cwd = tmp_path_factory.mktemp("reference") / "cwd"
            result = start_in(cwd, *FLAGS, "--nproc", nproc).wait()
            assert result.code == 0 and result.err == "", result.err
            made[nproc] = result, cwd / "runs" / "cifar10"
        return made[nproc]

    return reference


def last(folder):
    path, damaged = checkpoint.newest(folder)
    assert not damaged
    return checkpoint.read(path)


def rows(folder):
    """metrics.csv, without what depends on the machine's speed."""
    with open(folder / "metrics.csv", newline="") as file:
        table = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    for row in table:
        assert row.pop("training_images_per_s") >= 0
    return table


def same_end(one, other):
    """Bit by bit: weights, momenta and metrics."""
    states = [last(folder)["parts"] for folder in (one, other)]
    weights = [list(state["model"].items()) for state in states]
    momenta = [[(i, s["momentum_buffer"]) for i, s in state["optimizer"]["state"].items()] for state in states]
    for ours, theirs in weights, momenta:
        assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(ours, theirs, strict=True))
    assert rows(one) == rows(other)
    return True


def scalars(folder, tag):
    """What TensorBoard shows."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


# --------------------------------------------------------------------------------------------- what a run computes


@pytest.mark.slow
def test_folder(reference):
    result, folder = reference(2)
    files = {re.sub(r"events\..*", "events", path.name) for path in folder.iterdir()} - {".lock"}
    table = rows(folder)
    scored = {f"step-{STEPS * row['epoch']:.0f}-score-{row['test_top1']}.pt" for row in table}
    assert files == {"log.txt", "metrics.csv", "events", "curves.png", *scored}
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    logged = [line.split("  ", 1)[1] for line in (folder / "log.txt").read_text().splitlines()]
    assert logged == result.out.splitlines()[1:]  # the first is the helper's
    for name in table[0].keys() - {"epoch"}:
        values = [(row["epoch"], pytest.approx(row[name], rel=1e-6)) for row in table]
        assert scalars(folder, name.replace("_", "/", 1)) == values
    line = f"test {table[1]['test_top1']:.2%}  top-3 {table[1]['test_top3']:.2%}  top-5 {table[1]['test_top5']:.2%}"
    assert f"epoch 2/2  loss {table[1]['training_loss']:.4f}  " in result.out and line in result.out
    random_states = [state["cpu"] for state in last(folder)["random"]]
    assert not torch.equal(*random_states)  # each process draws its own


@pytest.mark.slow
def test_every_example_is_evaluated_once(run, folder):
    """Compares with an evaluation in one process; neither 200 nor 500 divides by 3, and no batch divides anything."""
    sizes = {"TRAIN": 200, "TEST": 500}
    result = run("--dataset", "synthetic", "--width", 2, "--batch-size", 97, "--epochs", 1, "--nproc", 3, **sizes)
    assert result.code == 0 and "global batch 96 = 3 x 32" in result.out, result.err
    model = cifar10_ddp.resnet9(2)
    model.load_state_dict(last(folder)["parts"]["model"])
    (row,) = rows(folder)
    for name, count in ("train", 200), ("test", 500):
        images = small_data(200, 500)[name == "test"]
        with torch.no_grad():
            logits = model.eval()((images.images / 255 - 0.5) / 0.25)
        order = logits.argsort(dim=1, descending=True)
        for k in 1, 3, 5:
            right = (order[:, :k] == images.labels.view(-1, 1)).sum().item()
            ours = row[f"{name}_top{k}"] * count
            assert ours == pytest.approx(round(ours), abs=1e-9)  # of just so many examples
            assert ours == pytest.approx(right, abs=1.01)  # another rounding may tip one
        assert row[f"{name}_loss"] == pytest.approx(F.cross_entropy(logits, images.labels).item(), rel=1e-4)


def small_data(train, test):
    names = {}
    loaded = data.load
    exec(SMALL, names)
    data.load = loaded
    os.environ |= {"TRAIN": str(train), "TEST": str(test)}
    try:
        return names["load"]()
    finally:
        del os.environ["TRAIN"], os.environ["TEST"]


@pytest.mark.parametrize(("asked", "weight", "batches"), [(False, 1.0, 3), (True, 1.0, 1), (False, math.nan, 3)])
def test_an_evaluation_ends_early_once_told_and_its_loss_is_finite(asked, weight, batches):
    images = data.Images(torch.zeros(12, 1, 2, 2, dtype=torch.uint8), torch.zeros(12).long(), (0.0,), (1.0,))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 10))
    torch.nn.init.constant_(model[1].bias, weight)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    arguments = (
        model,
        data.loader(images, 5, range(12)),
        torch.device("cpu"),
        torch.float32,
        SimpleNamespace(asked=asked),
    )
    if math.isnan(weight):
        with pytest.raises(SystemExit, match="the loss is nan"):
            cifar10_ddp.evaluate(*arguments)
    else:
        assert cifar10_ddp.evaluate(*arguments)["loss"] == pytest.approx(math.log(10))
    assert len(seen) == batches


def by_hand(n, batch, lr, factors, weight_decay, smoothing, seed, images):
    """The recipe without torch.optim and DDP: the mean loss of each epoch, and the weights, by name.

    factors: of the learning rate, one for each step of each epoch.
    """
    augmented = data.Augmented(images, seed)
    torch.manual_seed(seed)
    model = cifar10_ddp.build("resnet9", 2).to(memory_format=torch.channels_last).train()
    weights, momenta, means = dict(model.named_parameters()), {}, []
    for epoch, rates in enumerate(factors):
        augmented.set_epoch(epoch)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        batches, losses = data.batches(data.loader(augmented, batch, order), torch.device("cpu")), []
        for factor, (pixels, labels) in zip(rates, batches, strict=True):
            gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            for rank in range(n):  # each process has every n-th example of a batch, and normalises its own share
                surprise = -model(pixels[rank::n]).log_softmax(1)
                right = surprise.gather(1, labels[rank::n].view(-1, 1)).mean()
                loss = (1 - smoothing) * right + smoothing * surprise.mean()
                losses.append(loss.item())
                for name, gradient in zip(weights, torch.autograd.grad(loss, weights.values()), strict=True):
                    gradients[name] += gradient / n
            for name, weight in weights.items():
                gradient = gradients[name] + weight_decay * weight.data
                momenta[name] = 0.9 * momenta.get(name, 0) + gradient
                weight.data -= lr * factor * (gradient + 0.9 * momenta[name])  # Nesterov's
        means.append(sum(losses) / len(losses))
    return means, {name: weight.data for name, weight in weights.items()}


@pytest.mark.slow
def test_recipe(run, folder):
    """Each flag has a value that shows after a few steps."""
    flags = {"--epochs": 2, "--batch-size": 16, "--lr": 0.1, "--weight-decay": 0.05, "--label-smoothing": 0.4}
    flags |= {"--warmup": 0.375, "--seed": 3, "--width": 2, "--nproc": 2, "--dataset": "synthetic"}
    result = run(*(text for flag in flags.items() for text in flag), TRAIN=64, TEST=16)
    assert result.code == 0 and result.err == "", result.err
    # Eight steps, of which three rise; then they fall to zero, which the step after the last would have.
    factors = [[1 / 3, 2 / 3, 3 / 3, 5 / 5], [4 / 5, 3 / 5, 2 / 5, 1 / 5]]
    losses, weights = by_hand(2, 16, 0.1, factors, 0.05, 0.4, 3, small_data(64, 16)[0])
    assert [row["training_loss"] for row in rows(folder)] == pytest.approx(losses, rel=1e-4)
    assert [row["training_lr"] for row in rows(folder)] == pytest.approx([0.1 * 4 / 5, 0])
    for name, weight in weights.items():
        torch.testing.assert_close(last(folder)["parts"]["model"][name], weight, rtol=1e-3, atol=1e-5)


@WORLDS
def test_global_batches_do_not_depend_on_the_number_of_processes(monkeypatch, n):
    """The k-th batches of all ranks, interleaved, are the k-th slice of the one order; a restart skips whole ones."""
    images, share, skip = small_data(120, 1)[0], 4, 3
    augmented = data.Augmented(images, 7)
    augmented.set_epoch(5)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(7 + 5))
    whole = list(data.batches(data.loader(augmented, n * share, order.tolist()), torch.device("cpu")))
    monkeypatch.setenv("WORLD_SIZE", str(n))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n))
    of_ranks = []
    for rank in range(n):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        sampler = dist.data_sampler(augmented, seed=7)
        sampler.set_epoch(5, skip=skip * share)
        of_ranks.append(list(data.batches(data.loader(augmented, share, sampler, drop_last=True), torch.device("cpu"))))
    for expected, *parts in zip(whole[skip:], *of_ranks, strict=True):
        for one, several in zip(expected, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.stack(several, dim=1).flatten(0, 1))


@pytest.mark.slow
def test_mixed_precision(run, reference, folder):
    result = run(*FLAGS, "--nproc", 2, "--amp", "--dtype", "float16")
    assert result.code == 0 and "cpu, float16, " in result.out, result.err
    assert last(folder)["parts"]["scaler"]["scale"] > 1
    expected = rows(reference(2)[1])
    assert [row["training_loss"] for row in rows(folder)] == pytest.approx(
        [row["training_loss"] for row in expected], rel=0.1
    )
    max(folder.glob("step-20*")).unlink()
    result = run(*FLAGS, "--nproc", 2, "--amp")  # goes on in the checkpoint's precision, not in bfloat16
    assert result.code == 0 and "cpu, float16, " in result.out and "epoch 2, batch 0 of 10" in result.out


def test_dry_run_leaves_nothing(run, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    result = run("--dataset", "synthetic", "--width", 2, "--batch-size", 8, "--dry-run", TMPDIR=temporary)
    assert result.code == 0 and "epoch 1/1" in result.out, result.err
    assert [path for path in temporary.iterdir() if path.name != "torchinductor_root"] == []
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.mark.slow
def test_validate_every(run, folder):
    assert run(*FLAGS[:-1], 3, "--validate-every", 2, "--model", "resnet9", "--nproc", 1).code == 0
    assert [("test_top1" in row, "train_top5" in row) for row in rows(folder)] == [
        (False,) * 2,
        (True,) * 2,
        (True,) * 2,
    ]
    assert sorted(path.name.partition("-score")[0] for path in folder.glob("step-*.pt")) == ["step-20", "step-30"]


# --------------------------------------------------------------------------------- ended and continued: the same result

# SIGTERM to the program itself (or to one process) when the last rank gets its AT-th batch, of training and evaluation.
TERMINATE = """
import signal, time
batches, seen, script = data.batches, [], os.getpid()
def counted(loader, device):
    for batch in batches(loader, device):
        seen.append(1)
        if len(seen) == int(os.environ["AT"]) and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid() if os.environ.get("TO_ONE") else script, signal.SIGTERM)
            time.sleep(0.3)  # until all ranks know
        yield batch
data.batches = counted
"""


# An epoch is 10 batches of training and 2 of evaluation.
@pytest.mark.slow
@pytest.mark.parametrize(("at", "epoch", "batches"), [(16, 2, {4, 5}), (11, 1, {10})])
def test_sigterm_and_again(run, reference, folder, at, epoch, batches):
    result = run(*FLAGS, "--nproc", 2, before=TERMINATE, AT=at)
    assert result.code == 143 and re.fullmatch(r"(launch: SIGTERM: [^\n]*\n)?", result.err), result
    state = last(folder)
    assert state["epoch"] == epoch - 1 and state["batch"] in batches
    at = f"epoch {epoch}, batch {state['batch']} of 10"
    assert result.out.splitlines()[-1] == f"SIGTERM: saved at {at}; the same command continues"
    alone = folder.with_name("alone")  # a checkpoint that was copied into an empty folder
    alone.mkdir()
    shutil.copy(checkpoint.newest(folder)[0], alone)
    for path in folder, alone:
        result = run(*FLAGS, "--nproc", 2, "--run-dir", path)
        assert result.code == 0 and result.err == "" and f"{path}: {at}\n" in result.out, result
        assert same_end(path, reference(2)[1])


@pytest.mark.slow
def test_sigterm_to_one_process_stops_the_run(run, folder):
    result = run(*FLAGS, "--nproc", 3, before=TERMINATE, AT=11, TO_ONE=1)
    assert result.code == 143 and "SIGTERM: saved at epoch 1, batch 10" in result.out, result


@pytest.mark.slow
def test_another_number_of_processes(run, reference, folder):
    assert run(*FLAGS, "--nproc", 2, before=TERMINATE, AT=16).code == 143
    result = run(*FLAGS, "--nproc", 1)
    assert result.code == 0 and result.err == "", result.err
    (first, second), (expected_first, expected_second) = rows(folder), rows(reference(2)[1])
    assert first == expected_first
    # The same examples in the same batches; but BatchNorm has seen whole ones.
    assert second["training_loss"] == pytest.approx(expected_second["training_loss"], rel=0.02)
    assert second["training_lr"] == expected_second["training_lr"]


@pytest.mark.slow
def test_dropout_goes_on_with_the_same_random_numbers(run, tmp_path):
    flags = ("--dataset", "synthetic", "--model", "squeezenet1_1", "--batch-size", 8, "--epochs", 1, "--lr", 0.001)
    sizes = {"TRAIN": 24, "TEST": 8}
    assert run(*flags, "--run-dir", tmp_path / "whole", **sizes).code == 0
    assert run(*flags, "--run-dir", tmp_path / "stopped", **sizes, before=TERMINATE, AT=2).code == 143
    assert run(*flags, "--run-dir", tmp_path / "stopped", **sizes).code == 0
    assert same_end(tmp_path / "stopped", tmp_path / "whole")


# Rank 0 kills the launching process at the n-th of these moments: before a batch, or in the middle of a save.
KILL = """
import signal, time
left = {n}
def moment_of(function):
    def wrapper(*args, **options):
        global left
        left -= os.environ.get("RANK") == "0"
        if left == 0:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # the guard ends this process
        return function(*args, **options)
    return wrapper
os.fsync, os.replace = moment_of(os.fsync), moment_of(os.replace)
batches, pause = data.batches, moment_of(lambda: None)
def counted(loader, device):
    for batch in batches(loader, device):
        pause()
        yield batch
data.batches = counted
"""


@pytest.mark.slow
def test_killed_again_and_again(start, reference, folder):
    flags = (*FLAGS, "--nproc", 2, "--checkpoint-every", 3)
    for n in 2, 4, 5, 6, 9:  # in a batch, before the file is on the disk, before its name is there, ...
        assert start(*flags, before=KILL.replace("{n}", str(n))).wait().code == -signal.SIGKILL
    assert 0 < last(folder)["step"] < 2 * STEPS
    result = start(*flags).wait()
    assert result.code == 0 and result.err == "", result.err
    assert same_end(folder, reference(2)[1])


# Of the first start: rank 1 is killed in the second epoch.
KILL_ONCE = """
import signal
batches, seen = data.batches, []
def counted(loader, device):
    for batch in batches(loader, device):
        seen.append(1)
        if len(seen) == 16 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch
data.batches = counted
import runpy, sys
sys.argv[0] = sys.argv.pop(1)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_torchrun_restarts_it_after_a_kill(reference, tmp_path):
    (tmp_path / "killed.py").write_text(SMALL + KILL_ONCE)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1")
    script, folder = tmp_path / "killed.py", tmp_path / "run"
    flags = (*FLAGS, "--checkpoint-every", 3, "--run-dir", folder)
    result = shell(*torchrun, script, ROOT / SCRIPT, *flags, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert result.code == 0, result.err
    assert f"{folder}: epoch 2, batch 3 of 10\n" in result.out
    assert same_end(folder, reference(2)[1])


@pytest.fixture
def finished(reference, folder):
    """A copy of an uninterrupted run's folder."""
    shutil.copytree(reference(1)[1], folder)
    return folder


@pytest.mark.slow
def test_a_finished_run_says_so(run, finished):
    before = {path.name: path.read_bytes() for path in finished.glob("[!.]*")}
    result = run(*FLAGS, "--nproc", 1)
    assert result.code == 0 and result.err == ""
    assert "runs/cifar10 is finished: 2 epochs; for a new run choose another --run-dir\n" in result.out
    assert {path.name: path.read_bytes() for path in finished.glob("[!.]*")} == before


@pytest.mark.slow
def test_a_damaged_checkpoint(run, reference, finished):
    newest = max(finished.glob("step-20*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    result = run(*FLAGS, "--nproc", 1)
    assert result.code == 0 and "runs/cifar10: epoch 2, batch 0 of 10\n" in result.out
    (line,) = result.err.splitlines()
    assert line.startswith(f"runs/cifar10/{newest.name} is damaged") and "going on from runs/cifar10/step-10-" in line
    assert same_end(finished, reference(1)[1])
    assert [epoch for epoch, _ in scalars(finished, "test/top1")] == [1, 2]  # each once


# --------------------------------------------------------------------------------------------------------- one line


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run(run, folder, n):
    result = run(*FLAGS, "--nproc", n, "--lr", 1e30, "--checkpoint-every", 1)
    assert result.code == 1 and "the loss is nan: try a lower --lr" in result.err and "Traceback" not in result.err
    for path in folder.glob("*.pt"):
        assert math.isfinite(checkpoint.read(path)["sums"][0])


def test_full_disk(run, tmp_path):
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))"
    result = run(*FLAGS, "--nproc", 1, "--checkpoint-every", 1, before=limited)
    assert result.code == 1 and "Traceback" not in result.err
    error = r"cifar10_ddp.py: error: can't write runs/cifar10/step-1.pt \(\[Errno 27\] File too large\)\n"
    assert re.fullmatch(error, result.err), result.err


def test_a_second_run_in_the_folder(run, folder):
    keeper = checkpoint.Keeper(folder)
    result = run(*FLAGS, "--nproc", 2, before="import checkpoint; checkpoint.LOCK_TIMEOUT = 0.1")
    keeper.lock.release()
    assert result.code == 1 and "another run is writing to runs/cifar10: end it" in result.err
    assert "Traceback" not in result.err and list(folder.glob("*.pt")) == []


def test_batch_larger_than_the_data(run):
    result = run(*FLAGS, "--batch-size", 1000, "--nproc", 1)
    assert result.code == 1 and result.err == "--batch-size 1000 is too large for the 960 examples of synthetic\n"


def refused(result, *words):
    """One line on stderr that has all the words; exit code 2; nothing else."""
    assert result.code == 2 and result.out == "", result
    assert re.fullmatch(r"cifar10_ddp\.py: error: [^\n]+\n", result.err), result.err
    assert all(word in result.err for word in words), result.err
    return True


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "resnet19"], ["--model resnet19 is unknown", "resnet18"]),
        (["--width", "0"], ["--width", "at least 1"]),
        (["--dataset", "mnist"], ["--dataset", "mnist", "cifar10", "synthetic"]),
        (["--epochs", "0"], ["--epochs", "at least 1"]),
        (["--batch-size", "1", "--nproc", "2"], ["--batch-size 1", "2 processes"]),
        (["--checkpoint-every", "-1"], ["--checkpoint-every", "at least 1"]),
        (["--lr", "nan"], ["--lr", "greater than 0"]),
        (["--weight-decay", "-1"], ["--weight-decay"]),
        (["--warmup", "1.5"], ["--warmup", "from 0 to 1"]),
        (["--label-smoothing", "1"], ["--label-smoothing"]),
        (["--seed", "-1"], ["--seed from 0"]),
        (["--dtype", "float16"], ["--dtype", "add --amp"]),
        (["--clearml"], ["pip install clearml"]),
        (["--backend", "nccl"], ["nccl", "GPU", "gloo"]),
        (["--run-dir", "text.pt"], ["can't write to --run-dir text.pt (File exists): choose another"]),
        (["--run-dir", "foreign"], ["foreign/step-1.pt is damaged, or no checkpoint", "choose another --run-dir"]),
        (["--run-dir", "other"], ["other/step-1.pt was trained with other flags"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_value(run, tmp_path, args, words):
    cwd = tmp_path / "cwd"
    (cwd / "foreign").mkdir(parents=True)
    for path in cwd / "text.pt", cwd / "foreign" / "step-1.pt":
        path.write_text("not a checkpoint")
    checkpoint.Keeper(cwd / "other", {"model": "resnet9"}).save(1)
    no_clearml = "import importlib.util; importlib.util.find_spec = lambda name: None"
    before = no_clearml if args == ["--clearml"] else ""
    assert refused(run("--dataset", "synthetic", "--epochs", 2, *args, before=before), *words)


@pytest.mark.slow
def test_other_flags(run, finished):
    others = {"--epochs": (3, 2), "--lr": (0.1, 0.4), "--seed": (1, 0), "--width": (3, 2), "--batch-size": (48, 96)}
    others |= {"--weight-decay": (0, 0.0005), "--warmup": (0.1, 0.2), "--label-smoothing": (0, 0.1)}
    for flag, (other, right) in others.items():
        result = run(*FLAGS, "--nproc", 1, flag, other)
        assert refused(result, "/step-20-score-", "was trained with other flags: type ", f"{flag} {right}"), flag
    assert refused(run(*FLAGS, "--nproc", 1, "--amp"), "type no --amp")
    result = run(*FLAGS, "--nproc", 5)
    assert refused(result, "type --batch-size 96, which the processes must share equally")
    assert refused(run(*FLAGS[:2], *FLAGS[4:], "--nproc", 1, "--model", "resnet18"), "--model resnet9", "--width 2")


def test_help_gives_every_default(run):
    result = run("--help")
    assert result.code == 0 and result.out.count("(default: ") >= 16
