"""variants/: main of each computes what main of mnist_ddp.py computes, in a few steps; and what each one adds.

Compared are weights, BatchNorm's averages and the printed lines, after each of two epochs, in float64
(FSDP's in float32, in which it adds up).
"""

import contextlib
import functools
import importlib
import io
import re
import time
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.profiler import ProfilerActivity, profile
from world import WORLDS, forker, run, wait_for

import data
import distributed as dist
import launcher
from variants import mnist_accumulate, mnist_fsdp, mnist_local_sgd, mnist_overlap, sharded

CPU = torch.device("cpu")
WEIGHTS = 29034  # numbers in the ConvNet, without BatchNorm's averages
FLAGS = {"dataset": "synthetic", "data_dir": "", "backend": "gloo", "dry_run": False}
FLAGS |= {"epochs": 2, "batch_size": 30, "lr": 0.05, "seed": 0}
SAME_BATCH = ("mnist_tensor_parallel", "mnist_pipeline")  # on all ranks
SHARDED = ("mnist_fsdp", *SAME_BATCH)


def images(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return data.Images(pixels, torch.arange(count) % 10, (0.5,), (0.5,))


# -------------------------------------------------------------------------------------------------- the same as DDP


def _main(name, flags, has_batchnorm, dtype, folder):
    """main of the script on this rank; to a file what it evaluated, what it printed, the bytes of optimizer state.

    Each process trains on 23 images, in batches of 10, 10 and 3, and rank 0 has one batch more to evaluate.
    """
    rank, module, states, optimizers = dist.get_rank(), importlib.import_module(name), [], []
    data.load = lambda *args: (images(69), images(31, seed=2))
    batches, data.batches = data.batches, lambda *args: ((x.to(dtype), labels) for x, labels in batches(*args))
    torch.set_default_dtype(dtype)
    if not has_batchnorm:
        nn.BatchNorm2d = lambda channels: nn.Identity()
    seed = torch.manual_seed
    if not name.endswith(SHARDED):  # those start from shares of equal weights
        torch.manual_seed = lambda number: seed(number + rank)  # other weights on each rank: rank 0's are meant to win
    train, evaluate = module.train, module.evaluate

    def noted_train(model, loader, optimizer, *args):
        optimizers[:] = [optimizer]
        return train(model, loader, optimizer, *args)

    def noted_evaluate(model, *args):
        sums = evaluate(model, *args)
        states.append({key.removeprefix("_orig_mod."): value for key, value in whole_state(model).items()})
        return sums

    def whole_state(model):
        return {key: value.clone() for key, value in dist.unwrap_model(model).state_dict().items()}

    module.train, module.evaluate = noted_train, noted_evaluate
    if name.endswith("overlap"):
        module.start_all_reduce = functools.partial(_start_late, module.start_all_reduce)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        module.main(rank, dist.get_world_size(), Namespace(**FLAGS | flags))
    held = sharded.local_bytes(value for state in optimizers[0].state.values() for value in state.values())
    torch.save((states, printed.getvalue(), held), folder / str(rank))


def _start_late(start_all_reduce, p):
    """So late that a step without the wait would use this process's gradient alone."""
    time.sleep(0.005 * dist.get_rank())
    start_all_reduce(p)


def outcome(n, name, flags, has_batchnorm, dtype, folder):
    """[(states, what it printed, bytes of optimizer state)] of n ranks."""
    launcher.run(_main, (name, flags, has_batchnorm, dtype, folder), n)
    return [torch.load(folder / str(rank)) for rank in range(n)]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """ddp(n, has_batchnorm, dtype): rank 0's outcome of mnist_ddp.py; each is run once."""
    return functools.cache(lambda n, *args: outcome(n, "mnist_ddp", {}, *args, tmp_path_factory.mktemp("ddp"))[0])


def losses_and_counts(printed):
    found = re.findall(r"loss (\S+)  accuracy \S+ \((\d+)/(\d+)\)", printed)
    return [(float(loss), int(correct), int(count)) for loss, correct, count in found]


def together(name, states):
    """One state of all ranks' states."""
    if name == "mnist_pipeline":  # each has some of the layers
        return {key: value for state in states for key, value in state.items()}
    if name != "mnist_tensor_parallel":
        for state in states:
            assert all(torch.equal(state[key], value) for key, value in states[0].items()), "the ranks differ"
        return states[0]
    state = dict(states[0])
    for key in state:
        if key.startswith(("4.", "5.")) and state[key].dim():  # the channels of a convolution and its BatchNorm
            state[key] = torch.cat([s[key] for s in states])
    state["9.weight"] = torch.cat([s["9.weight"].unflatten(1, (-1, 49)) for s in states], dim=1).flatten(1)
    return state


CASES = [
    ("mnist_by_hand", {}, True),
    ("mnist_overlap", {}, True),
    ("mnist_zero", {}, True),
    ("mnist_fsdp", {"param_dtype": "float32"}, True),
    ("mnist_accumulate", {"accumulate": 1}, True),
    ("mnist_accumulate", {"accumulate": 4}, False),  # BatchNorm would see micro-batches; 10 = 3 + 3 + 3 + 1
    ("mnist_local_sgd", {"every": 1}, True),  # an average of weights after each step: SGD with momentum is linear
    ("mnist_tensor_parallel", {}, True),
    ("mnist_pipeline", {}, False),
    pytest.param("mnist_compile", {}, True, marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
]


@WORLDS
@pytest.mark.parametrize(("name", "flags", "has_batchnorm"), CASES)
def test_it_computes_what_ddp_computes(ddp, tmp_path, n, name, flags, has_batchnorm):
    old = {"mnist_fsdp": (2, 9), "mnist_pipeline": (2, 8)}
    if torch.__version__ < old.get(name, (2, 4)):
        pytest.skip("the script refuses this torch")
    dtype, tolerance = (torch.float32, 2e-6) if name == "mnist_fsdp" else (torch.float64, 1e-10)
    reference = ddp(1 if name in SAME_BATCH else n, has_batchnorm, dtype)
    ranks = outcome(n, f"variants.{name}", flags, has_batchnorm, dtype, tmp_path)
    for epoch, expected in enumerate(reference[0]):
        state = together(name, [states[epoch] for states, *_ in ranks])
        assert state.keys() == expected.keys()
        assert max((state[key] - value).abs().max().item() for key, value in expected.items()) <= tolerance
    for ours, theirs in zip(losses_and_counts(ranks[0][1]), losses_and_counts(reference[1]), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4) and ours[2] == 31
    assert all(other == "" for _, other, _ in ranks[1:]), "rank 0 alone prints"
    held = [held for *_, held in ranks]
    if name == "mnist_zero":
        assert held == [8 * -(-WEIGHTS // n)] * n
    elif name in ("mnist_fsdp", "mnist_pipeline"):
        assert sum(held) == reference[2] and (n == 1 or max(held) < reference[2])
    elif name != "mnist_tensor_parallel":
        assert held == [reference[2]] * n


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="mnist_fsdp.py refuses this torch")
def test_bfloat16_computes_almost_what_float32_computes(ddp, tmp_path):
    rough = outcome(3, "variants.mnist_fsdp", {"param_dtype": "bfloat16"}, True, torch.float32, tmp_path)[0][1]
    exact, rough = (losses_and_counts(text)[0][0] for text in (ddp(3, True, torch.float32)[1], rough))
    assert rough == pytest.approx(exact, rel=0.05) and rough != exact


# ----------------------------------------------------------------------------------------------- what each one adds


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 24**2, 10))


def trained(module, model, *extra):
    """The module's train: three steps on this process's 23 images, with SGD, which is returned."""
    train_set = images(23 * dist.get_world_size())
    loader = data.loader(train_set, 10, dist.data_sampler(train_set, shuffle=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    module.train(model, loader, optimizer, SimpleNamespace(step=lambda: None), CPU, *extra)
    return optimizer


def _count_all_reduces(micro_batches):
    model = dist.prepare_ddp_model(small_model())
    trained(mnist_accumulate, model, micro_batches)  # DDP asks for more in its first iterations
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        trained(mnist_accumulate, model, micro_batches)
    return sum(event.name == "gloo:all_reduce" for event in prof.events())


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_accumulation_sends_once_per_step(micro_batches):
    """Gloo's own all-reduces, as the profiler sees them; the profiler is another process's."""
    assert run(_count_all_reduces, 3, micro_batches) == [3, 3, 3]


def _sends_while_backward_runs(file):
    """Rank 0 comes to the first layer before any other rank has started its first all-reduce."""
    model = small_model()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(mnist_overlap.start_all_reduce)
    if dist.is_primary():
        model[0].weight.register_hook(lambda gradient: file.touch())
    else:
        model[3].weight.register_hook(lambda gradient: wait_for(file.exists, 20))
        model[3].bias.register_hook(lambda gradient: wait_for(file.exists, 20))
    trained(mnist_overlap, model)


def test_overlap_sends_while_backward_runs(tmp_path):
    run(_sends_while_backward_runs, 3, tmp_path / "at the first layer")


def _local_sgd(every):
    """The largest distance from one process that trains all ranks' models in turns, and averages them."""
    n, model = dist.get_world_size(), small_model()
    trained(mnist_local_sgd, model, every)
    models, everything = [small_model() for _ in range(n)], images(23 * n)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01, momentum=0.9) for model in models]
    for step, first in enumerate(range(0, 23, 10), 1):
        for rank, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            pixels, labels = (part[rank::n][first : first + 10] for part in (everything.images, everything.labels))
            optimizer.zero_grad()
            F.cross_entropy(one((pixels.float() - 255 * 0.5) / (255 * 0.5)), labels).backward()
            optimizer.step()
        if step % every == 0 or step == 3:
            for same in zip(*(one.parameters() for one in models), strict=True):
                mean = sum(p.detach() for p in same) / n
                for p in same:
                    p.data.copy_(mean)
    pairs = zip(model.parameters(), models[0].parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("every", [1, 2, 8])
def test_local_sgd_is_the_average_of_many_models(every):
    assert max(run(_local_sgd, 3, every)) <= 1e-6


def sharded_model(value):
    model = small_model()
    model.register_buffer("average", torch.tensor(float(value)))  # as BatchNorm has them
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[0], model[3], model:
        fsdp.fully_shard(layer, mesh=mesh)
    return model


def full_state(model, optimizer):
    momentum = [optimizer.state[p]["momentum_buffer"].full_tensor() for p in model.parameters()]
    return [*(p.full_tensor().detach() for p in model.parameters()), *momentum, model.average]


def _save(file):
    model = sharded_model(dist.get_rank())
    optimizer = trained(mnist_fsdp, model)
    plain = small_model()
    plain.register_buffer("average", torch.tensor(-1.0))
    plain = sharded.whole(model, plain)
    assert plain.average == model.average == 0  # rank 0's
    if dist.is_primary():
        plain(torch.zeros(1, 1, 28, 28)).sum().backward()  # a collective would hang: nobody else calls it
    sharded.save(file, model, optimizer)
    expected = full_state(model, optimizer)
    if dist.is_primary():
        torch.save(expected, file.with_suffix(".expected"))


def _load(file):
    model = sharded_model(1 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    sharded.load(file, model, optimizer)
    expected = torch.load(file.with_suffix(".expected"))
    assert all(map(torch.equal, full_state(model, optimizer), expected))
    assert optimizer.param_groups[0]["lr"] == 0.01


def _joined(body, file):
    dist.init_process_group()
    body(file)


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="mnist_fsdp.py refuses this torch")
def test_a_checkpoint_of_three_ranks_is_loaded_by_one_and_by_two(tmp_path):
    file = tmp_path / "model.pt"
    for n, body in (3, _save), (1, _load), (2, _load):
        launcher.run(_joined, (body, file), n)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.expected", "model.pt"]
    plain = small_model()
    plain.load_state_dict(torch.load(file)["model"], strict=False)  # an unsharded model takes it, too
    assert torch.equal(plain[0].weight, torch.load(file.with_suffix(".expected"))[0])


# ---------------------------------------------------------------------------------------------------- the programs


def program(name, *args, **options):
    return forker().run("-m", f"variants.{name}", "--dataset", "synthetic", *args, **options)


@pytest.mark.parametrize("name", dict.fromkeys(case[0] for case in CASES[:-1]))
def test_a_dry_run(name):
    done = program(name, "--dry-run", "--batch-size", 50)
    assert (done.code, done.err) == (0, "") and losses_and_counts(done.out)[0][2] == 100, done
    held = re.findall(r"rank (\d) holds (\d+) bytes of parameters \(DDP: 116136\), (\d+) of optimizer state", done.out)
    assert [rank for rank, *_ in held] == (["0", "1"] if name == "mnist_fsdp" else [])
    assert not held or sum(int(bytes_) for _, bytes_, _ in held) == sum(int(state) for *_, state in held) == 116136


def torch_is(version):
    return f"import torch; torch.__version__ = torch.torch_version.TorchVersion('{version}+cpu')"


NO_HEADER = "import sysconfig, os; sysconfig.get_path = lambda name: '/nowhere'; os.environ['CXX'] = 'sh'"
REFUSED = [  # the script, flags, what is run before it, words of the line
    ("mnist_by_hand", ["--epochs", 0], "", ["--epochs", "at least 1"]),
    ("mnist_accumulate", ["--accumulate", 0], "", ["--accumulate 0", "at least 1"]),
    ("mnist_local_sgd", ["--every", 0], "", ["--every 0", "at least 1"]),
    ("mnist_fsdp", ["--param-dtype", "float16"], "", ["--param-dtype", "'bfloat16'"]),
    ("mnist_fsdp", [], torch_is("2.8.0"), ["torch 2.9", "2.8.0", "upgrade"]),
    ("mnist_pipeline", [], torch_is("2.7.1"), ["torch 2.8", "2.7.1", "upgrade"]),
    ("mnist_pipeline", ["--nproc", 4], "", ["three stages", "at most 3 processes"]),
    ("mnist_tensor_parallel", ["--nproc", 33, "--batch-size", 40], "", ["32 channels", "at most 32"]),
    ("mnist_compile", [], "import os; os.environ['CXX'] = 'no-compiler'", ["no-compiler is not found", "apt-get"]),
    ("mnist_compile", [], NO_HEADER, ["Python.h", "apt-get install python3-dev"]),
]


@pytest.mark.parametrize(("name", "args", "before", "words"), REFUSED)
def test_what_cannot_work_is_one_line(name, args, before, words):
    done = program(name, "--dry-run", *args, before=before)
    assert (done.code, done.out) == (2, "") and re.fullmatch(rf"{name}\.py: error: [^\n]+\n", done.err), done
    assert all(word in done.err for word in words), done.err
