"""variants/: the same training as mnist_ddp.py, so the same weights, losses and counts; what each adds is counted."""

import contextlib
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_scripts import BATCH, FOURTEEN, banner, epochs, refused
from torch import nn
from torch.distributed import fsdp
from torch.profiler import ProfilerActivity, profile
from world import ROOT, WORLDS, forker, shell
from world import launched as of_processes

import data
import distributed as dist
import mnist_ddp
from variants import (
    mnist_accumulate,
    mnist_by_hand,
    mnist_fsdp,
    mnist_local_sgd,
    mnist_overlap,
    mnist_pipeline,
    mnist_tensor_parallel,
    mnist_zero,
    sharded,
)

VARIANTS = ["mnist_by_hand", "mnist_accumulate", "mnist_fsdp", "mnist_overlap", "mnist_zero"]
SYNTHETIC = ("--dataset", "synthetic")
NO_BATCHNORM = "from torch import nn; nn.BatchNorm2d = lambda channels: nn.Identity()"
FEW = """
import data
digits = data._digits
data._digits = lambda count, seed: digits(103, seed)
"""
CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path):
    """run(name, *args): as `python -m variants.name args`, or the root's `python name.py args`, in tmp_path/cwd."""

    def start(name, *args, **options):
        command = [f"{name}.py"] if name == "mnist_ddp" else ["-m", f"variants.{name}"]
        return forker().run(*command, *args, cwd=tmp_path / "cwd", **options)

    return start


def without_memory(result, n):
    """mnist_fsdp.py's output without its last lines, one for each rank, which are checked here."""
    lines = result.out.splitlines(keepends=True)
    pattern = r"rank (\d) holds (\d+) bytes of parameters \(DDP: 116136\), (\d+) of optimizer state; peak memory .+ MiB"
    found = [re.fullmatch(pattern, line.strip()) for line in lines[-n:]]
    assert all(found), result
    assert [int(match[1]) for match in found] == list(range(n))
    for part in (2, 3):  # 29034 float32 numbers, shared out; none is held twice
        assert sum(int(match[part]) for match in found) == 4 * 29034 == 116136
    return result._replace(out="".join(lines[:-n]))


# --------------------------------------------------------------------------------------------------------- good runs


@pytest.mark.slow
@pytest.mark.parametrize("name", [*VARIANTS, "mnist_local_sgd"])
def test_uneven_evaluation(run, name):
    """With 3 processes the ranks evaluate 3, 3 and 2 batches: a collective in the forward pass would hang."""
    flags = ("--epochs", 2, "--batch-size", 7, "--nproc", 3)
    result = run(name, *SYNTHETIC, *flags, before=FOURTEEN)
    result = without_memory(result, 3) if name == "mnist_fsdp" else result
    assert [epoch.count for epoch in epochs(result, banner("mnist_ddp.py", 3, 7), 2)] == [14, 14]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", VARIANTS)  # local SGD is another algorithm
def test_dry_run_prints_what_ddp_prints(run, name):
    n = 3
    dry = (*SYNTHETIC, "--dry-run", "--batch-size", BATCH, "--nproc", n, "--seed", 1)  # of the order, too
    before = NO_BATCHNORM if name == "mnist_accumulate" else ""  # which sees smaller batches
    expected = epochs(run("mnist_ddp", *dry, before=before), banner("mnist_ddp.py", n))[0]
    result = run(name, *dry, before=before)
    result = without_memory(result, n) if name == "mnist_fsdp" else result
    (epoch,) = epochs(result, banner("mnist_ddp.py", n))
    assert epoch.loss == pytest.approx(expected.loss, abs=2e-4)
    assert epoch.count == expected.count and abs(epoch.correct - expected.correct) <= 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_torchrun(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "variants.mnist_fsdp")
    result = shell(
        *torchrun, *SYNTHETIC, "--dry-run", "--batch-size", BATCH, cwd=tmp_path, timeout=110, PYTHONPATH=ROOT
    )
    assert epochs(without_memory(result, 2), banner("mnist_ddp.py", 2))[0].count == 2 * BATCH


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_bfloat16_computes_almost_what_float32_computes(run):
    dry = (*SYNTHETIC, "--dry-run", "--batch-size", BATCH)
    exact, rough = (without_memory(run("mnist_fsdp", *dry, "--param-dtype", d), 2) for d in ("float32", "bfloat16"))
    exact, rough = (epochs(result, banner("mnist_ddp.py", 2))[0].loss for result in (exact, rough))
    assert rough == pytest.approx(exact, rel=0.05) and rough != exact


# ------------------------------------------------------------------------------------------------------ same weights

SAVE_WEIGHTS = """
import os, torch
step = torch.optim.SGD.step
def saved(self, *args, **kwargs):
    step(self, *args, **kwargs)
    if os.environ.get("RANK", "0") == os.environ["WHOSE"]:
        torch.save([p.detach().contiguous() for group in self.param_groups for p in group["params"]], "weights.pt")
torch.optim.SGD.step = saved
"""


def largest_difference(run, folder, n, name, *args, before=""):
    """max |dw| between the variant and mnist_ddp.py after an epoch, on the last rank."""
    weights = []
    for script, flags in ("mnist_ddp", ()), (name, args):
        options = {"before": SAVE_WEIGHTS + before, "WHOSE": n - 1}
        result = run(script, *SYNTHETIC, "--epochs", 1, "--nproc", n, *flags, **options)
        assert result.code == 0, result.err
        weights.append(torch.load(folder / "cwd" / "weights.pt"))
    assert len(weights[0]) == len(weights[1])
    return max((a - b).abs().max().item() for a, b in zip(*weights, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), [("mnist_by_hand", ()), ("mnist_accumulate", ("--accumulate", 3))])
def test_few_steps_give_the_weights_of_ddp(run, tmp_path, name, flags):
    """Without BatchNorm; the last batch of the epoch is smaller, and 3 divides none of them."""
    difference = largest_difference(run, tmp_path, 3, name, *flags, before=FEW + NO_BATCHNORM)
    assert difference <= 1e-6


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 24**2, 10))


def few_images(count):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return data.Images(images, torch.arange(count) % 10, (0.5,), (0.5,))


def trained(module, model, n, batch_size, *extra, params=None):
    """The module's train over 23 images per process, with SGD (of `params`); the batch size is one process's."""
    images = few_images(23 * n)
    loader = data.loader(images, batch_size, dist.data_sampler(images, distributed=True, shuffle=False))
    optimizer = torch.optim.SGD(params or model.parameters(), 0.01, momentum=0.9)
    steps = []
    scheduler = SimpleNamespace(step=lambda: steps.append(optimizer))
    sums = module.train(model, loader, optimizer, scheduler, CPU, *extra)
    return optimizer, dist.all_reduce(sums), len(steps)


def one_big_batch(n, count=23):
    """What all processes together must compute: plain training on the whole batches, here; count: of each process."""
    model, images = small_model(), few_images(count * n)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    total = 0.0
    for first in range(0, count * n, 10 * n):  # 10 of each process, then 10 and 3; rank r's are r, r + n, ...
        pixels, labels = images.images[first : first + 10 * n], images.labels[first : first + 10 * n]
        inputs = (pixels.float() - 255 * 0.5) / (255 * 0.5)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
    return model, total


def _by_hand(rank, n):
    model = small_model()
    if rank:
        nn.init.zeros_(model[0].weight)  # rank 0's are meant to win
    dist.sync_params(model.parameters())
    _, sums, steps = trained(mnist_by_hand, model, n, 10)
    _same_as_one(model.state_dict(), sums, steps, n)


def _same_as_one(state, sums, steps, n):
    expected, total = one_big_batch(n)
    assert steps == 3  # 10, 10 and 3 images of each process
    assert sums[1] == 23 * n and sums[0].item() == pytest.approx(total, rel=1e-5)
    assert max((state[name] - value).abs().max().item() for name, value in expected.state_dict().items()) <= 1e-6


@WORLDS
def test_by_hand_is_one_big_batch(n):
    of_processes(_by_hand, n)


def _overlap(rank, n):
    model, started = small_model(), []

    def start_late(p):  # so late that a step without the wait would use this process's gradient alone
        time.sleep(0.02 * rank)
        mnist_overlap.start_all_reduce(p)

    first, *others = model.parameters()
    first.register_post_accumulate_grad_hook(start_late)
    for p in others:
        p.register_post_accumulate_grad_hook(mnist_overlap.start_all_reduce)
    # Before the first layer has its gradient, the all-reduce of the last one's is under way.
    first.register_hook(lambda gradient: started.append(model[3].weight.work))
    _, sums, steps = trained(mnist_overlap, model, n, 10)
    assert len(set(started)) == steps
    _same_as_one(model.state_dict(), sums, steps, n)


@WORLDS
def test_overlap_is_one_big_batch(n):
    of_processes(_overlap, n)


def _zero(rank, n):
    model = small_model()
    weights = mnist_zero.flatten(model.parameters())
    assert len(weights) == {1: 23154, 3: 23154, 4: 23156}[n]  # the next multiple of n
    nn.utils.vector_to_parameters(weights, model.parameters())
    mine = weights.chunk(n)[rank]
    optimizer, sums, steps = trained(mnist_zero, model, n, 10, weights, mine, params=[mine])
    _same_as_one(model.state_dict(), sums, steps, n)
    (state,) = optimizer.state.values()
    assert state["momentum_buffer"].nbytes == 4 * len(weights) / n  # not those of all weights
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("n", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_zero_is_one_big_batch(n):
    of_processes(_zero, n)


def many_models(n, every):
    """Local SGD in one process: n models in turns, on 10, 10 and 3 images each; averaged every few steps."""
    images, models = few_images(23 * n), [small_model() for _ in range(n)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01, momentum=0.9) for model in models]
    for step, first in enumerate(range(0, 23, 10), 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            pixels, labels = (part[rank::n][first : first + 10] for part in (images.images, images.labels))
            optimizer.zero_grad()
            F.cross_entropy(model((pixels.float() - 255 * 0.5) / (255 * 0.5)), labels).backward()
            optimizer.step()
        if step % every == 0 or step == 3:
            states = [model.state_dict() for model in models]
            mean = {name: sum(state[name] for state in states) / n for name in states[0]}
            for model in models:
                model.load_state_dict(mean)
    return models[0]


def _local_sgd(rank, n):
    for every in 1, 2:
        model = small_model()
        _, sums, steps = trained(mnist_local_sgd, model, n, 10, every)
        assert steps == 3 and sums[1] == 23 * n
        expected = many_models(n, every).state_dict()
        assert max((value - expected[name]).abs().max() for name, value in model.state_dict().items()) <= 1e-6
        # The average after each step is DDP's, because SGD with momentum is linear; a later one is not.
        one, _ = one_big_batch(n)
        distance = max((value - expected[name]).abs().max() for name, value in one.state_dict().items())
        assert (distance > 1e-5) == (n > 1 and every > 1), (distance, every)


@WORLDS
def test_local_sgd_is_the_average_of_many_models(n):
    of_processes(_local_sgd, n)


def _accumulate(rank, n):
    for micro_batches in 1, 3, 4, 100:  # 10 = 4 + 4 + 2 = 3 + 3 + 3 + 1; 100: one image each
        model = dist.prepare_ddp_model(small_model())
        _, sums, steps = trained(mnist_accumulate, model, n, 10, micro_batches)
        _same_as_one(dist.unwrap_model(model).state_dict(), sums, steps, n)


@pytest.mark.slow
@WORLDS
def test_accumulation_is_one_big_batch(n):
    of_processes(_accumulate, n)


def _usual_form(rank, n, snippet):
    model, images = dist.prepare_ddp_model(small_model()), few_images(20 * n)
    model = model if n > 1 else Unsynced(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    steps = []
    sampler = dist.data_sampler(images, distributed=True, shuffle=False)
    names = {"model": model, "optimizer": optimizer, "scheduler": SimpleNamespace(step=lambda: steps.append(1)), "k": 2}
    names["loader"] = list(data.batches(data.loader(images, 5, sampler), CPU))
    exec(snippet, names | {"contextlib": contextlib, "F": F})
    assert len(steps) == len(names["loader"]) // 2 == 2
    expected, _ = one_big_batch(n, 20)
    state = dist.unwrap_model(model).state_dict() if n > 1 else model.model.state_dict()
    assert max((state[name] - value).abs().max().item() for name, value in expected.state_dict().items()) <= 1e-6


class Unsynced(nn.Module):
    """A model of one process, with DDP's no_sync."""

    def __init__(self, model):
        super().__init__()
        self.model, self.no_sync = model, contextlib.nullcontext

    def forward(self, x):
        return self.model(x)


@WORLDS
def test_the_usual_form_of_accumulation_is_one_big_batch(n):
    """As docs/progression.md has it: two batches of 5 per process are one step of 10."""
    page = (ROOT / "docs" / "progression.md").read_text(encoding="utf-8")
    snippet = re.search(r"\*\*The usual form\.\*\*.*?```python\n(.*?)```", page, re.DOTALL)[1]
    of_processes(_usual_form, n, snippet)


def _count_all_reduces(rank, n, module, extra, wrapped, names):
    model = small_model()
    model = dist.prepare_ddp_model(model) if wrapped else model
    trained(module, model, n, 10, *extra)  # DDP asks for more in its first iterations
    model.train()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        trained(module, model, n, 10, *extra)
    found = [event.name for event in prof.events()]
    return {name: found.count(name) for name in names}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_all_reduce_per_step(micro_batches):
    """Gloo's own, as the profiler sees them: 3 steps, and one for `trained`'s sums."""
    counted = of_processes(_count_all_reduces, 2, mnist_accumulate, (micro_batches,), True, ["gloo:all_reduce"])
    assert counted == {"gloo:all_reduce": 3 + 1}


def test_by_hand_reduces_each_parameter():
    """Without buckets: an all-gather for the check of each, and an all-reduce."""
    names = ["gloo:all_reduce", "gloo:all_gather"]
    counted = of_processes(_count_all_reduces, 2, mnist_by_hand, (), False, names)
    assert counted == {"gloo:all_reduce": 4 * 3 + 1, "gloo:all_gather": 4 * 3 + 1}  # 1: `trained`'s sums


# -------------------------------------------------------------------------------------------------------------- FSDP


def shard(model):
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3]):
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    return model


def with_average(model, value):
    """With a buffer, as BatchNorm has them."""
    model.register_buffer("average", torch.tensor(float(value)))
    return model


def _fsdp(rank, n, file):
    model = shard(with_average(small_model(), rank))
    optimizer, sums, steps = trained(mnist_fsdp, model, n, 10)
    weights = {name: param.full_tensor() for name, param in model.named_parameters()}
    _same_as_one(weights, sums, steps, n)
    held = sharded.local_bytes(model.parameters())
    whole = sum(value.nbytes for value in weights.values())
    assert dist.all_reduce(torch.tensor(held)).item() == whole  # nothing twice
    plain = sharded.whole(model, with_average(small_model(), -1.0))
    assert plain.average == model.average == 0  # rank 0's
    assert all(torch.equal(param, weights[name]) for name, param in plain.named_parameters())
    assert sharded.local_bytes(model.parameters()) == held  # still sharded
    if rank == 0:
        plain(torch.zeros(1, 1, 28, 28)).sum().backward()  # a collective would hang: nobody else calls it
    sharded.save(file, model, optimizer)
    momentum = _momentum(optimizer)
    if rank == 0:  # by a file: tensors as arguments would start a thread in pytest's process
        torch.save(weights | {"momentum": momentum}, file.with_suffix(".expected"))


def _momentum(optimizer):
    parts = [optimizer.state[param]["momentum_buffer"].full_tensor() for param in optimizer.param_groups[0]["params"]]
    return torch.cat([part.flatten() for part in parts])


def _load(rank, n, file):
    expected = torch.load(file.with_suffix(".expected"))
    torch.manual_seed(1 + rank)  # other weights
    model = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 24**2, 10))
    model = shard(with_average(model, 1 + rank))
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    sharded.load(file, model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), expected[name]), name
    assert torch.equal(_momentum(optimizer), expected["momentum"])
    assert optimizer.param_groups[0]["lr"] == 0.01 and model.average == 0
    sums = mnist_fsdp.train(model, data.loader(few_images(4), 2, range(4)), optimizer, optimizer, CPU)
    assert sums[1] == 4  # training goes on


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_by_three(tmp_path):
    file = tmp_path / "model.pt"
    of_processes(_fsdp, 2, file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.expected", "model.pt"]
    for n in 1, 3:
        of_processes(_load, n, file)
    plain = with_average(nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 24**2, 10)), 1)
    plain.load_state_dict(torch.load(file)["model"])  # an unsharded model takes it, too
    assert torch.equal(plain[3].weight, torch.load(file.with_suffix(".expected"))["3.weight"])


@pytest.mark.parametrize("n", [1, 3])
def test_fsdp_is_one_big_batch(n, tmp_path):
    of_processes(_fsdp, n, tmp_path / "model.pt")


# ----------------------------------------------------------------- tensor parallel, pipeline: the same batch on all


def whole_batches(model, optimizer, batch_size=10, module=mnist_tensor_parallel):
    """The module's train and evaluate over 23 images, the same on all ranks: batches of 10, 10 and 3."""
    images = few_images(23)
    loader = data.loader(images, batch_size, dist.data_sampler(images, distributed=False, shuffle=False))
    steps = []
    sums = module.train(model, loader, optimizer, SimpleNamespace(step=lambda: steps.append(1)), CPU)
    return torch.stack([sums, module.evaluate(model, loader, CPU)]), len(steps)


def convnet_in_one_process():
    """The weights and sums after training a whole ConvNet, and the model."""
    torch.manual_seed(0)
    model = mnist_ddp.ConvNet(1, 28)
    return *whole_batches(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), module=mnist_ddp), model


def _tensor_parallel(rank, n):
    expected_sums, expected_steps, expected = convnet_in_one_process()
    torch.manual_seed(0)
    model = mnist_tensor_parallel.ConvNet(1, 28)
    mnist_tensor_parallel.share_channels(model, rank, n)
    sums, steps = whole_batches(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
    assert steps == expected_steps == 3
    assert sums[0, 0].item() == pytest.approx(expected_sums[0, 0].item(), rel=1e-5)
    assert sums[:, 1].tolist() == [23, 23] and sums[1, 0] == expected_sums[1, 0]
    state, whole = model.state_dict(), expected.state_dict()
    assert ("9.bias" in state) == (rank == 0)
    for name, value in whole.items():
        layer, kind = name.split(".")
        if name in ("9.bias", "5.num_batches_tracked"):
            together = state.get(name, value)
        elif layer in ("4", "5"):
            together = torch.cat(dist.gather(state[name]))
        elif name == "9.weight":
            together = torch.cat(dist.gather(state[name].T)).T
        else:  # every rank has it
            copies = dist.gather(state[name])
            assert all(torch.equal(copy, copies[0]) for copy in copies), name
            together = state[name]
        assert together.shape == value.shape and (together - value).abs().max().item() <= 1e-6, name
    return [param.numel() for param in model.parameters()]


@WORLDS
def test_shared_channels_compute_what_one_process_computes(n):
    """All weights, BatchNorm's averages, losses and counts; 11, 11 and 10 channels on three ranks."""
    channels = -(-32 // n)
    first, norm = [16 * 25, 16], [16, 16]
    assert of_processes(_tensor_parallel, n) == [
        *(*first, *norm),
        *(channels * 16 * 25, channels, channels, channels),
        *(10 * channels * 49, 10),
    ]


def test_tensor_parallel_prints_what_one_process_prints(run):
    flags = (*SYNTHETIC, "--epochs", 2, "--batch-size", 7)
    expected = epochs(run("mnist_ddp", *flags, "--nproc", 1, before=FOURTEEN), banner("mnist_ddp.py", 1, 7), 2)
    used = [banner("mnist_ddp.py", 3)[0], "synthetic on cpu, batch size 7, the same on every rank"]
    found = epochs(run("mnist_tensor_parallel", *flags, "--nproc", 3, before=FOURTEEN), used, 2)
    for here, there in zip(found, expected, strict=True):
        assert here.loss == pytest.approx(there.loss, abs=2e-3)
        assert here.count == there.count == 14 and abs(here.correct - there.correct) <= 1


PARTS = {12: 4, 10: 2, 7: 1, 3: 1}  # micro-batches of a batch: of the same size, at most 4


def micro_batches_in_one_process(loader):
    """What all stages together must compute: the model, and the sum of the losses."""
    torch.manual_seed(0)
    model, total = mnist_ddp.ConvNet(1, 28).train(), 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for images, labels in data.batches(loader, CPU):
        parts = PARTS[len(labels)]
        for x, y in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            loss = F.cross_entropy(model(x), y)
            (loss / parts).backward()
            total += loss.item() * len(y)
        optimizer.step()
        optimizer.zero_grad()
    return model, total


def _pipeline(rank, n):
    images = few_images(27)
    cuts = {1: [0, 10], 2: [0, 4, 10], 3: [0, 4, 8, 10]}[n]
    for batch_size in 12, 10:  # 12, 12, 3 and 10, 10, 7
        loader = data.loader(images, batch_size, range(27))
        expected, total = micro_batches_in_one_process(loader)
        torch.manual_seed(0)
        model = nn.Sequential(*mnist_ddp.ConvNet(1, 28))[cuts[rank] : cuts[rank + 1]]
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        scheduler = SimpleNamespace(step=lambda: None)
        sums = dist.all_reduce(mnist_pipeline.train(model, loader, optimizer, scheduler, CPU))
        assert sums[1] == 27 and sums[0].item() == pytest.approx(total, rel=1e-5)
        whole = expected.state_dict()
        assert all((value - whole[name]).abs().max().item() <= 1e-6 for name, value in model.state_dict().items())
        tested = dist.all_reduce(mnist_pipeline.evaluate(model, loader, CPU))
        assert torch.equal(tested, mnist_ddp.evaluate(expected, loader, CPU))


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="it hung (pytorch#132644)")
@WORLDS
def test_a_pipeline_computes_what_its_micro_batches_compute_in_one_process(n):
    """Weights, BatchNorm's averages, losses and counts; the last batch of an epoch is smaller."""
    of_processes(_pipeline, n)


def test_a_pipeline_counts_every_example_once(run):
    used = [banner("mnist_ddp.py", 3)[0], "synthetic on cpu, batch size 8, 3 stage(s)"]
    flags = ("--epochs", 2, "--batch-size", 8, "--nproc", 3)
    found = epochs(run("mnist_pipeline", *SYNTHETIC, *flags, before=FOURTEEN), used, 2)
    assert [epoch.count for epoch in found] == [14, 14]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_pipeline_under_torchrun(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", "-m")
    flags = (*SYNTHETIC, "--dry-run", "--batch-size", BATCH)
    result = shell(*torchrun, "variants.mnist_pipeline", *flags, cwd=tmp_path, timeout=110, PYTHONPATH=ROOT)
    used = [banner("mnist_ddp.py", 3)[0], f"synthetic on cpu, batch size {BATCH}, 3 stage(s)"]
    assert epochs(result, used)[0].count == 2 * BATCH


def _parallelize_module(rank, n, snippet):
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10))

    images = few_images(23)
    model, expected = network(), network()
    exec(snippet, {"torch": torch, "model": model, "device": CPU, "world_size": n})
    assert model[1].weight.to_local().shape == (24 / n, 784)
    for trained in model, expected:
        optimizer = torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9)
        for _ in range(5):
            F.cross_entropy(trained(images.images / 255), images.labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    for here, there in zip(model.parameters(), expected.parameters(), strict=True):
        assert (here.full_tensor() - there).abs().max().item() <= 1e-6


@pytest.mark.slow
@WORLDS
def test_parallelize_module_computes_what_one_process_computes(n):
    """As docs/progression.md has it, with two linear layers."""
    page = (ROOT / "docs" / "progression.md").read_text(encoding="utf-8")
    snippet = re.search(r"\*\*The same with torch's own.*?```python\n(.*?)```", page, re.DOTALL)[1]
    of_processes(_parallelize_module, n, snippet)


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_it_prints_what_ddp_prints(run, tmp_path):
    """And it is compiled: for training and for evaluation.  103 examples: the last batches are smaller."""
    flags = (*SYNTHETIC, "--epochs", 2, "--batch-size", 22)
    expected = epochs(run("mnist_ddp", *flags, before=FEW), banner("mnist_ddp.py", 2, 22), 2)
    result = run("mnist_compile", *flags, before=FEW + COUNT_GRAPHS, TORCHINDUCTOR_CACHE_DIR=tmp_path, timeout=380)
    assert int((tmp_path / "cwd" / "graphs").read_text()) >= 2
    for here, there in zip(epochs(result._replace(err=""), banner("mnist_ddp.py", 2, 22), 2), expected, strict=True):
        assert here.loss == pytest.approx(there.loss, abs=5e-3) and abs(here.correct - there.correct) <= 2


COUNT_GRAPHS = """
import distributed
from torch._dynamo.utils import counters
cleanup = distributed.cleanup
def counted():
    if distributed.is_primary():
        open("graphs", "w").write(str(counters["stats"]["unique_graphs"]))
    cleanup()
distributed.cleanup = counted
"""


def test_no_compiler(run):
    result = run("mnist_compile", *SYNTHETIC, CXX="no-such-compiler", timeout=10)
    assert refused(result, "mnist_compile.py", "C++ compiler", "no-such-compiler is not found", "apt-get install g++")


def test_no_header_of_python(run):
    before = "import sysconfig; sysconfig.get_path = lambda name: '/nowhere'"
    result = run("mnist_compile", *SYNTHETIC, before=before, CXX="sh", timeout=10)
    assert refused(result, "mnist_compile.py", "Python.h", "apt-get install python3-dev")


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("mnist_by_hand", ["--epochs", "0"], ["--epochs", "at least 1"]),
        ("mnist_by_hand", ["--nproc", "0"], ["NPROC) is 0"]),
        ("mnist_accumulate", ["--accumulate", "0"], ["--accumulate 0", "at least 1"]),
        ("mnist_accumulate", ["--accumulate", "-2"], ["--accumulate -2", "at least 1"]),
        ("mnist_accumulate", ["--accumulate", "x"], ["--accumulate", "'x'"]),
        ("mnist_local_sgd", ["--every", "0"], ["--every 0", "at least 1"]),
        ("mnist_fsdp", ["--param-dtype", "float16"], ["--param-dtype", "'bfloat16'"]),
        ("mnist_fsdp", ["--nproc", "2", "--batch-size", "1"], ["--batch-size 1", "2 processes"]),
        ("mnist_tensor_parallel", ["--nproc", "33", "--batch-size", "40"], ["32 channels", "at most 32"]),
        ("mnist_pipeline", ["--nproc", "4"], ["three stages", "at most 3 processes"]),
    ],
)
def test_bad_value(run, name, args, words):
    assert refused(run(name, *SYNTHETIC, "--dry-run", *args, timeout=10), f"{name}.py", *words)


def test_a_torch_that_is_too_old(run):
    before = "import torch; torch.__version__ = torch.torch_version.TorchVersion('2.8.0+cpu')"
    result = run("mnist_fsdp", *SYNTHETIC, before=before, timeout=10)
    assert refused(result, "mnist_fsdp.py", "torch 2.9", "2.8.0", "upgrade")
    result = run("mnist_pipeline", *SYNTHETIC, before=before.replace("2.8.0", "2.7.1"), timeout=10)
    assert refused(result, "mnist_pipeline.py", "torch 2.8", "2.7.1", "upgrade")


@pytest.mark.slow
def test_from_a_shell():
    """As a user starts it: in the root, with -m; and in another folder, where there is no such module."""
    result = shell("-m", "variants.mnist_accumulate", *SYNTHETIC, "--dry-run", "--accumulate", "0")
    assert refused(result, "mnist_accumulate.py", "--accumulate 0") or sys.version_info >= (3, 14)
    elsewhere = shell("-m", "variants.mnist_accumulate", cwd=ROOT.parent)
    assert elsewhere.code == 1 and "No module named 'variants'" in elsewhere.err
    assert len(elsewhere.err.splitlines()) == 1
