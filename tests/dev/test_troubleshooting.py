"""The section on lower accuracy of docs/troubleshooting.md: its causes lower it, and its tests find them."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from world import FEW_DIGITS, ROOT, forker, run

import data
import distributed as dist


def accuracy(*flags):
    done = forker().run("mnist_ddp.py", "--dataset", "synthetic", *flags)
    assert done.code == 0, done
    return float(re.findall(r"accuracy ([\d.]+)%", done.out)[-1])


@pytest.mark.slow
def test_a_global_batch_that_grew_lowers_the_accuracy_and_one_process_shows_it():
    right, grown = accuracy("--nproc", 2), accuracy("--nproc", 2, "--batch-size", 1600)
    assert right > grown + 20
    assert accuracy("--nproc", 1, "--batch-size", 1600) < right - 20


def test_the_last_learning_rate_tells_of_a_schedule_for_another_number_of_steps(tmp_path):
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    planted, stored = re.search(r"with `(.*?)` in place of `(.*?)` \|", page).groups()
    test = re.search(r"Print `(optimizer.*?)` before the first and before the last optimizer step", page)[1]
    source = (ROOT / "mnist_ddp.py").read_text(encoding="utf-8")
    last = "        scheduler.step()\n"
    assert source.count(stored) == source.count(last) == 1
    source = source.replace(last, f"        print('rate', {test})\n{last}")
    rates = {}
    for name, text in ("right", source), ("wrong", source.replace(stored, f"({planted})")):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        for n in 1, 3:
            flags = "--dataset", "synthetic", "--dry-run", "--batch-size", 30, "--nproc", n
            done = forker().run(tmp_path / f"{name}.py", *flags, path=[ROOT], before=FEW_DIGITS)
            assert done.code == 0, done
            rates[name, n] = float(re.findall("rate (.*)", done.out)[-1])
    assert rates["right", 1] == rates["right", 3] == rates["wrong", 1] != rates["wrong", 3]


def _train_and_evaluate(kind):
    """Train with six images in each step; return the accuracy that this rank measures, with its own averages."""
    torch.manual_seed(0)
    train_set, test_set = data.load("synthetic", "data", limit=6000)
    norm = nn.BatchNorm1d(128) if kind == "BatchNorm" else nn.GroupNorm(8, 128)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), norm, nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    trained = dist.prepare_ddp_model(model, sync_buffers=False)
    loader = data.loader(train_set, 6 // dist.get_world_size(), dist.data_sampler(train_set, seed=0))
    for images, labels in data.batches(loader, torch.device("cpu")):
        F.cross_entropy(trained(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in data.batches(data.loader(test_set, 1000, range(len(test_set))), torch.device("cpu")):
            correct += (model(images).argmax(1) == labels).sum().item()
    return 100 * correct / len(test_set)


@pytest.mark.slow
def test_two_examples_on_each_rank_are_too_few_for_batchnorm_and_the_ranks_averages_differ():
    (one,), three = (run(_train_and_evaluate, n, "BatchNorm") for n in (1, 3))
    assert one > max(three) + 3 and len({*three}) > 1, (one, three)
    (one,), three = (run(_train_and_evaluate, n, "GroupNorm") for n in (1, 3))
    assert three == [pytest.approx(one, abs=3)] * 3 and len({*three}) == 1, (one, three)
