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
import torchvision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from world import ROOT, forker, refused, shell

import checkpoint
import cifar10_ddp
import data

SCRIPT = "cifar10_ddp.py"
TRAIN, TEST = 61, 23  # examples
STEPS = 5  # of an epoch: 13 examples can't be shared by two processes, and 61 are not a multiple of 12
RECIPE = {"--epochs": 2, "--batch-size": 13, "--lr": 0.02, "--weight-decay": 0.05, "--label-smoothing": 0.4}
RECIPE |= {"--warmup": 0.375, "--seed": 3, "--width": 2, "--dataset": "synthetic"}
# With --lr 0.1 rounding errors grow, and test_recipe would see another training.
FLAGS = [text for flag in RECIPE.items() for text in flag]  # each has a value that shows after a few steps
FLAGS += ["--checkpoint-every", 2]

# Before the script: a small data set in place of the digits, and dropout, so that the random numbers count.
SMALL = f"""
import os, torch, data
def load(name=None, data_dir=None, limit=None, colour=True):
    generator = torch.Generator().manual_seed(0)
    def images(count):
        labels = torch.randint(10, (count,), generator=generator)
        noise = torch.randint(100, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return data.Images(noise + 15 * labels.view(-1, 1, 1, 1).byte(), labels, (0.5,) * 3, (0.25,) * 3)
    return images(limit or {TRAIN}), images(limit or {TEST})
class Flatten(torch.nn.Flatten):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.2, self.training))
data.load, torch.nn.Flatten = load, Flatten
"""


def start_in(cwd, *args, before="", **environment):
    return forker().start(SCRIPT, *args, cwd=cwd, before=SMALL + before, **environment)


@pytest.fixture
def run(tmp_path):
    """run(*args): the script in tmp_path/cwd."""
    return lambda *args, **options: start_in(tmp_path / "cwd", *args, **options).wait()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cwd" / "runs" / "cifar10"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run of two processes: its result and its folder, which nobody changes."""
    cwd = tmp_path_factory.mktemp("reference") / "cwd"
    result = start_in(cwd, *FLAGS, "--nproc", 2).wait()
    assert result.code == 0 and result.err == "", result.err
    return result, cwd / "runs" / "cifar10"


@pytest.fixture
def small(monkeypatch):
    """The data, and the network with dropout, in this process, too."""
    monkeypatch.setattr(data, "load", data.load)
    monkeypatch.setattr(torch.nn, "Flatten", torch.nn.Flatten)
    exec(SMALL)
    return data.load()


def last(folder):
    path, damaged = checkpoint.newest(folder)
    assert not damaged
    return checkpoint.read(path)


def rows(folder):
    """metrics.csv, without what depends on the machine's speed."""
    with open(folder / "metrics.csv", newline="") as file:
        table = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    for row in table:
        assert row.pop("training_images_per_s", 1) > 0
    return table


def scalars(folder, tag):
    """What TensorBoard shows."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_folder(reference):
    result, folder = reference
    files = {re.sub(r"events\..*", "events", path.name) for path in folder.iterdir()} - {".lock"}
    table = rows(folder)
    scored = {f"step-{STEPS * row['epoch']:.0f}-score-{row['test_top1']}.pt" for row in table}
    assert files == {"log.txt", "metrics.csv", "events", "batches", "curves.png", "step-9.pt", *scored}
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    logged = [line.split("  ", 1)[1] for line in (folder / "log.txt").read_text().splitlines()]
    how, *logged = logged
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}, CUDA {torch.version.cuda}; 2 x CPU"
    assert " lr=0.02 seed=3 " in how and " weight_decay=0.05 " in how and how.endswith(versions), how
    assert logged == result.out.splitlines()[1:]  # the first is the helper's
    steps = [step for step, loss in scalars(folder / "batches", "training/loss_of_a_batch") if loss > 0]
    assert steps == list(range(1, 2 * STEPS + 1))  # of so short an epoch each
    for name in table[0].keys() - {"epoch"}:
        values = [(row["epoch"], pytest.approx(row[name], rel=1e-6)) for row in table]
        assert scalars(folder, name.replace("_", "/", 1)) == values
    line = f"test {table[1]['test_top1']:.2%}  top-3 {table[1]['test_top3']:.2%}  top-5 {table[1]['test_top5']:.2%}"
    assert f"epoch 2/2  loss {table[1]['training_loss']:.4f}  " in result.out and line in result.out
    assert "global batch 12 = 2 x 6" in result.out


def test_every_example_is_evaluated_once(reference, small):
    """Compares with an evaluation in one process; neither 61 nor 23 can be shared by two."""
    _, folder = reference
    model = cifar10_ddp.resnet9(2)
    model.load_state_dict(last(folder)["parts"]["model"])
    for name, images in zip(("train", "test"), small, strict=True):
        with torch.no_grad():
            logits = model.eval()((images.images / 255 - 0.5) / 0.25)
        order = logits.argsort(dim=1, descending=True)
        for k in 1, 3, 5:
            right = (order[:, :k] == images.labels.view(-1, 1)).sum().item()
            ours = rows(folder)[-1][f"{name}_top{k}"] * len(images)
            assert ours == pytest.approx(round(ours), abs=1e-9)  # of just so many examples
            assert ours == pytest.approx(right, abs=1.01)  # another rounding may tip one
        loss = F.cross_entropy(logits, images.labels).item()
        assert rows(folder)[-1][f"{name}_loss"] == pytest.approx(loss, rel=1e-4)


def in_one_process(n, batch, factors, images):
    """The recipe without DDP: the mean loss of each epoch, and the weights, by name.

    factors: of the learning rate, one for each step of each epoch.
    """
    seed = RECIPE["--seed"]
    augmented = data.Augmented(images, seed)
    torch.manual_seed(seed)
    model = cifar10_ddp.build("resnet9", 2).to(memory_format=torch.channels_last).train()
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": RECIPE["--weight-decay"]}
    optimizer, means = torch.optim.SGD(model.parameters(), **options), []
    random = [torch.Generator().manual_seed(seed + rank).get_state() for rank in range(n)]  # each process draws its own
    for epoch, rates in enumerate(factors):
        augmented.set_epoch(epoch)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        loader, losses = data.loader(augmented, batch, order, drop_last=True), []
        for factor, (pixels, labels) in zip(rates, data.batches(loader, torch.device("cpu")), strict=True):
            for rank in range(n):  # each process has every n-th example of a batch, and normalises its own share
                torch.set_rng_state(random[rank])
                logits = model(pixels[rank::n])
                random[rank] = torch.get_rng_state()
                loss = F.cross_entropy(logits, labels[rank::n], label_smoothing=RECIPE["--label-smoothing"])
                (loss / n).backward()
                losses.append(loss.item())
            optimizer.param_groups[0]["lr"] = RECIPE["--lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
        means.append(sum(losses) / len(losses))
    return means, dict(model.named_parameters())


def test_recipe(reference, small):
    _, folder = reference
    # Ten steps, of which four rise; then they fall to zero, which the step after the last would have.
    factors = [[1 / 4, 2 / 4, 3 / 4, 4 / 4, 6 / 6], [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]]
    losses, weights = in_one_process(2, 12, factors, small[0])
    assert [row["training_loss"] for row in rows(folder)] == pytest.approx(losses, rel=1e-4)
    assert [row["training_lr"] for row in rows(folder)] == pytest.approx([RECIPE["--lr"] * 5 / 6, 0])
    for name, weight in weights.items():
        torch.testing.assert_close(last(folder)["parts"]["model"][name], weight, rtol=1e-3, atol=1e-5)


def test_dry_run_leaves_nothing(run, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    result = run(*FLAGS, "--dry-run", "--nproc", 1, TMPDIR=temporary)
    assert result.code == 0 and "epoch 1/1" in result.out, result.err
    assert [path for path in temporary.iterdir() if path.name != "torchinductor_root"] == []
    assert list((tmp_path / "cwd").iterdir()) == []


# The last rank, when it gets its AT-th batch (of training and evaluation), sends SIGNAL to the program itself, or, if
# TO_ONE, to itself; then it waits until it is told, or ended.
END = """
import signal, time, checkpoint
batches, seen, stops, script = data.batches, [], [], os.getpid()
class Preemption(checkpoint.Preemption):
    def __init__(self):
        super().__init__()
        stops.append(self)
def counted(loader, device):
    for batch in batches(loader, device):
        seen.append(1)
        if len(seen) == int(os.environ["AT"]) and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid() if os.environ.get("TO_ONE") else script, int(os.environ["SIGNAL"]))
            limit = time.monotonic() + 60
            while not stops[0].asked and time.monotonic() < limit:
                time.sleep(0.01)
        yield batch
checkpoint.Preemption, data.batches = Preemption, counted
"""


def end_at(run, *flags, at, **environment):
    environment = {"SIGNAL": int(signal.SIGTERM), "AT": at} | environment
    result = run(*flags, before=END, **environment)
    if environment["SIGNAL"] == signal.SIGTERM:
        assert result.code == 143 and re.fullmatch(r"(launch: SIGTERM: [^\n]*\n)?", result.err), result
    return result


def test_ended_in_many_ways_and_again(run, reference, folder):
    """An epoch is 5 batches of training and 2 of evaluation."""
    flags = (*FLAGS, "--nproc", 2)
    assert end_at(run, *flags, at=4, SIGNAL=int(signal.SIGKILL)).code == -signal.SIGKILL
    # In the second epoch; then one process alone is told, in the evaluation.
    for start, at, to_one, saved in ("1, batch 2", 7, "", "2, batch 2"), ("2, batch 2", 4, 1, "2, batch 5"):
        result = end_at(run, *flags, at=at, TO_ONE=to_one)
        assert f"runs/cifar10: epoch {start} of 5\n" in result.out
        assert result.out.splitlines()[-1] == f"asked to stop: saved at epoch {saved} of 5; the same command resumes"
    result = run(*flags)
    assert result.code == 0 and result.err == "" and "epoch 2, batch 5 of 5\n" in result.out, result
    assert re.search(r"^epoch 2/2  loss \d\.\d{4}  train ", result.out, re.MULTILINE)  # no image, no speed
    ours, theirs = (last(path)["parts"] for path in (folder, reference[1]))
    for ended, expected in (ours["model"], theirs["model"]), (ours["optimizer"]["state"], theirs["optimizer"]["state"]):
        torch.testing.assert_close(ended, expected, rtol=0, atol=0)  # bit by bit
    assert rows(folder) == rows(reference[1])


def test_another_number_of_processes_and_a_damaged_checkpoint(run, reference, folder):
    shutil.copytree(reference[1], folder)
    newest = checkpoint.newest(folder)[0]
    os.truncate(newest, 1000)
    (folder / "metrics.csv").unlink()  # what it said is in the checkpoint, too
    result = run(*FLAGS, "--batch-size", 12, "--nproc", 1)
    assert result.code == 0 and "runs/cifar10: epoch 2, batch 4 of 5\n" in result.out
    (line,) = result.err.splitlines()
    assert line.startswith(f"{newest} is damaged") and line.endswith(f"from {folder}/step-9.pt")
    (first, second), (expected_first, expected_second) = rows(folder), rows(reference[1])
    assert first == expected_first
    # The same examples in the same batches; but BatchNorm has seen a whole one, and dropout has other numbers.
    assert second["training_loss"] == pytest.approx(expected_second["training_loss"], rel=0.01)
    assert second["training_lr"] == expected_second["training_lr"]
    assert [epoch for epoch, _ in scalars(folder, "test/top1")] == [1, 2]  # each once


def test_mixed_precision_goes_on_in_the_precision_of_the_checkpoint(run, reference, folder):
    """And is evaluated after the last epoch, although --validate-every is larger."""
    flags = (*FLAGS, "--nproc", 2, "--validate-every", 3, "--amp")
    end_at(run, *flags, "--dtype", "float16", at=7)
    result = run(*flags)  # not bfloat16
    assert result.code == 0 and "cpu, float16, " in result.out and "epoch 2, batch 2 of 5" in result.out, result
    assert "\nfloat16 is many times slower than bfloat16 on a CPU\n" in result.out
    assert last(folder)["parts"]["scaler"]["scale"] > 1
    ours, expected = ([row["training_loss"] for row in rows(path)] for path in (folder, reference[1]))
    assert ours == pytest.approx(expected, rel=0.02) and ours != expected
    assert ["test_top1" in row and "train_top5" in row for row in rows(folder)] == [False, True]
    assert len(list(folder.glob("step-*-score-*.pt"))) == 1


@pytest.mark.slow
def test_torchrun_restarts_it_after_a_kill(tmp_path):
    """It is killed in the second epoch; what is then left of it has fewer batches than AT."""
    script, folder = tmp_path / "killed.py", tmp_path / "run"
    script.write_text(f"{SMALL}{END}import runpy\nrunpy.run_path({str(ROOT / SCRIPT)!r}, run_name='__main__')\n")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1")
    environment = {"PYTHONPATH": str(ROOT), "AT": "11", "TO_ONE": "1", "SIGNAL": str(int(signal.SIGKILL))}
    result = shell(*torchrun, script, *FLAGS, "--run-dir", folder, cwd=tmp_path, **environment)
    assert result.code == 0, result.err
    assert f"{folder}: epoch 2, batch 2 of 5\n" in result.out and last(folder)["step"] == 2 * STEPS


def test_a_finished_run_says_so_and_refuses_other_flags(run, reference, folder, monkeypatch):
    shutil.copytree(reference[1], folder)
    before = {path.name: path.read_bytes() for path in folder.glob("[!.]*") if path.is_file()}
    (folder / "curves.png").unlink()  # killed before it was drawn
    result = run(*FLAGS, "--nproc", 2)
    assert result.code == 0 and result.err == ""
    assert "runs/cifar10 is finished: 2 epochs; for a new run choose another --run-dir\n" in result.out
    others = {"--epochs": 3, "--lr": 0.2, "--seed": 1, "--width": 3, "--weight-decay": 0, "--warmup": 0.1}
    others |= {"--label-smoothing": 0, "--batch-size": 48, "--model": "resnet18"}
    was = RECIPE | {"--batch-size": 12, "--model": "resnet9"}
    right = [f"{flag} {was[flag]}" for flag in others]
    flags = [*FLAGS, "--nproc", 2, *(text for flag in others.items() for text in flag)]
    monkeypatch.chdir(folder.parents[1])
    refused(SCRIPT, "/step-10-score-", "was trained with other flags: type ", *right, flags=flags)
    refused(SCRIPT, "type no --amp", flags=[*FLAGS, "--nproc", 2, "--amp"])
    another = "type --batch-size 12, with a number of processes"
    refused(SCRIPT, another, flags=[*FLAGS, "--nproc", 5])
    assert {path.name: path.read_bytes() for path in folder.glob("[!.]*") if path.is_file()} == before


def test_a_loss_that_is_not_finite_ends_the_run(run, folder):
    result = run(*FLAGS, "--nproc", 2, "--lr", 1e30, "--checkpoint-every", 1)
    assert result.code == 1 and "the loss is nan: try a lower --lr" in result.err and "Traceback" not in result.err
    for path in folder.glob("*.pt"):
        assert math.isfinite(checkpoint.read(path)["sums"][0])


def test_a_second_run_in_the_folder(run, folder):
    keeper = checkpoint.Keeper(folder)
    result = run(*FLAGS, "--nproc", 1, before="import checkpoint; checkpoint.LOCK_TIMEOUT = 0.1")
    keeper.lock.release()
    assert result.code == 1 and f"another run is writing to {folder}: end it" in result.err
    assert "Traceback" not in result.err and list(folder.glob("*.pt")) == []


def test_an_evaluation_ends_early_once_told():
    images = data.Images(torch.zeros(12, 1, 2, 2, dtype=torch.uint8), torch.zeros(12).long(), (0.0,), (1.0,))
    model, seen = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 10)), []
    torch.nn.init.zeros_(model[1].bias)
    model.register_forward_hook(lambda *_: seen.append(1))
    loader, stop = data.loader(images, 5, range(12)), SimpleNamespace(asked=True)
    found = cifar10_ddp.evaluate(model, loader, torch.device("cpu"), torch.float32, stop)
    assert found["loss"] == pytest.approx(math.log(10)) and len(seen) == 1
