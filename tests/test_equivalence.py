"""equivalence/: what it says of programs whose truth is known, with two processes and three."""

import dataclasses
import json
import math
import os
import pickle
import re
import signal
from typing import NamedTuple

import numpy
import pytest
import torch
from world import ROOT, forker, processes_in, shell, wait_for

from demos.ways import WAYS
from equivalence import batches, loaders, vectors

pytestmark = pytest.mark.timeout(180)


def answer(*command, nproc=2, cwd=None, options=(), code=None, **more):
    """Its exit code, and its lines by label; a longer line is one."""
    done = forker().run(ROOT / "equivalence", "--nproc", nproc, *options, *command, cwd=cwd, COLUMNS=10000, **more)
    lines = {}
    for line in done.out.splitlines():
        lines.setdefault(line[:13].strip(), line[14:])
    assert code in (None, done.code), done
    assert "Traceback" not in done.err or done.code == 2, done.err
    return done.code, lines, done.err


SAYS = {  # of the wrong ways: the verdict, and a line that names the cause; {n}: the number of processes
    "sum": ("averaging, weights", "averaging", "WRONG: {n} times one process's gradients: summed, not averaged"),
    "divided_twice": ("averaging, weights", "averaging", "WRONG: 1/{n} of one process's .* divided .* twice"),
    "lr_times_processes": (
        "learning rate, weights",
        "learning rate",
        r"0.[23] with {n} processes, 0.1 with one .{n}.*",
    ),
    "uneven": ("averaging, weights", "averaging", "WRONG: the shares count .*: the mean of means is not the mean .*"),
    "tokens": ("averaging, weights", "averaging", "WRONG: the shares count .*: the mean of means is not the mean .*"),
    "no_sync": ("copies, averaging, weights", "averaging", "WRONG: each rank's .* own share: nobody averages them"),
    "dropout_seed": (None, "note", "all ranks draw the same random numbers, .*: seed them differently"),
    "clip": ("averaging, weights", "averaging", r"WRONG: clip_grad_norm_ got other gradients on each rank \(of .*"),
    "forgotten_layer": (
        "copies, averaging, weights",
        "averaging",
        r"WRONG: .* own share of 2.weight, 2.bias \(the other 2 of 4 tensors are right\): nobody averages them",
    ),
}


def check_wrong(way, n):
    code, lines, _ = answer("-m", "demos.ways", way, nproc=n, cwd=ROOT)
    reasons, label, text = SAYS[way]
    assert (code, lines["verdict"]) == (
        (1, f"DIFFERENT from one process in: {reasons}") if reasons else (0, DROPOUT)
    ), lines
    assert re.fullmatch(text.replace("{n}", str(n)), lines[label]), lines


DROPOUT = "THE SAME, but for dropout, which draws other numbers in each process"


def check_right(way, n):
    code, lines, _ = answer("-m", "demos.ways", way, "--right", nproc=n, cwd=ROOT)
    expected = DROPOUT if way == "dropout_seed" else "THE SAME as one process, up to rounding"
    assert (code, lines["verdict"]) == (0, expected), lines
    assert lines["averaging"].startswith("right: ") and lines["weights"].startswith("right: ")
    assert "seed them differently" not in str(lines)
    if way != "dropout_seed":
        assert re.match(r"right: that is the gradient of all 24 examples", lines["one batch"])


def test_a_wrong_way_is_named_and_a_right_one_the_same():
    check_wrong("sum", 3)
    check_right("tokens", 3)


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "sum"])
def test_all_wrong_ways(way):
    check_wrong(way, 3)


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "tokens"])
def test_all_right_ways(way):
    check_right(way, 3)


PROGRAM = """
import os, random, sys, threading, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler
import torch.distributed as dist

what, value = sys.argv[-2], float(sys.argv[-1])
is_short = what in ("steps", "BatchNorm")  # epochs of one step
dist.init_process_group("gloo")
n = dist.get_world_size()
print("said with", n, file=sys.stderr)
if what == "float32": threading.Thread(target=time.sleep, args=(1000,)).start()  # it would never end
if what == "fails alone" and n == 1: raise ValueError("not alone")
if what == "waits alone" and n == 1: open("alone", "w").close(); time.sleep(1000)
if what == "ends alone" and n == 1: os._exit(3)
if what == "fails" and dist.get_rank() == 1: raise ValueError("as planned")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        norm = [nn.BatchNorm1d(32)] if what == "BatchNorm" else []
        self.inner = nn.Sequential(nn.Linear(8, 32), *norm, nn.Tanh(), nn.Linear(32, 4))
        if what == "buffer": self.register_buffer("usual", torch.zeros(8))
    def forward(self, x):  # a layer that sees how large the batch is
        if what == "buffer":
            usual = x.mean(0) / n
            if value: dist.all_reduce(usual)
            self.usual.lerp_(usual, 0.1)
        is_odd = what in ("float32", "bfloat16") and len(x) == 24
        return self.inner(x) * (1 + value * is_odd)

def contrastive(x, y):  # the examples of all ranks with each other
    from torch.distributed.nn.functional import all_gather  # torch 2.4 makes a folder for it
    x, y = (part.contiguous() for part in model(torch.cat([x, y])).chunk(2))
    if n > 1: x, y = (torch.cat(all_gather(part)) for part in (x, y))
    return nn.functional.cross_entropy(x @ y.T, torch.arange(len(x)))

torch.manual_seed(0)
data = TensorDataset(torch.randn(480, 8), torch.randint(4, (480,)))
net = Net()
if what == "copies" and dist.get_rank() == 1: net.inner[0].bias.data += value
model = nn.parallel.DistributedDataParallel(net) if n > 1 and what != "by hand" else net
if what == "copies" and dist.get_rank() == 1: net.inner[0].bias.data += value
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loose = torch.ones((), requires_grad=what == "loose")  # a parameter of no module
if what == "loose": optimizer.add_param_group({"params": [loose]})
if what == "BatchNorm": optimizer = torch.optim.AdamW(model.parameters(), 0.01)
if what == "own":  # as torch's ZeRO and old mixed precision
    owned = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = torch.optim.SGD(owned, 0.1 * value)
slow = [parameter.detach().clone() for parameter in net.parameters()]
others = [torch.optim.SGD(net.inner[:1].parameters(), 0.1)] if what == "two optimizers" else []
torch.manual_seed(dist.get_rank())
random.seed(dist.get_rank() + int(value))
noise = 0.0
for epoch in range(int(value) if is_short else 3):
    place = {"num_replicas": 1, "rank": 0} if what == "same" else {}
    sampler = DistributedSampler(data, shuffle=what != "same", **place)
    loader = DataLoader(data, 8 if what == "set size" else 24 // n, sampler=sampler)
    if what == "columns": loader.collate_fn = lambda items: tuple(torch.stack(part, -1) for part in zip(*items))
    own = range(dist.get_rank(), 480, n)
    if what == "subset": loader = DataLoader(torch.utils.data.Subset(data, own), 24 // n, shuffle=True)
    if what == "slice": loader = DataLoader(TensorDataset(*data[own]), 24 // n, shuffle=True)
    if what == "split":  # other examples on each rank
        split = torch.utils.data.random_split(data, [400, 80])[0]
        loader = DataLoader(split, 24 // n, sampler=DistributedSampler(split))
    if what == "numpy":
        loader.collate_fn = lambda items: tuple(torch.stack(part).numpy() for part in zip(*items))
    if what == "drawn": loader = [(torch.randn(24 // n, 8), torch.randint(4, (24 // n,))) for _ in range(20)]
    for x, y in loader:
        if what == "columns": x = x.T
        if what == "numpy": x, y = torch.from_numpy(x), torch.from_numpy(y)
        if what == "coin" and random.random() < 0.5: x = -x
        noise += 1.0  # changes from step to step, whatever the data are
        with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in what):
            loss = contrastive(x, x.roll(1, 1)) if "contrastive" in what else nn.functional.cross_entropy(model(x), y)
        if what == "loose": loss = loss + 1e-4 * loose**2
        if what == "zero": loss = loss * 0
        if what == "unsteady": loss = loss * noise
        if what == "set size": loss = loss * len(x) / value
        if what == "two optimizers": loss = loss * (1 + torch.rand(()))
        if what == "NaN": loss = loss * float("nan")
        if what == "by hand":
            gradients = torch.autograd.grad(loss, [*net.parameters()])
            for parameter, gradient in zip(net.parameters(), gradients):
                dist.all_reduce(gradient)
                parameter.grad = gradient / n
        else:
            loss.backward()
        if what == "own":
            for one, parameter in zip(owned, net.parameters()): one.grad = parameter.grad.clone()
        if what != "no step" or dist.get_rank() == 0: optimizer.step()
        if what == "two steps": optimizer.step()
        for other in others: other.step()
        if what == "lookahead" and noise % 3 == 0:
            for one, parameter in zip(slow, net.parameters()): parameter.data.copy_(one.lerp_(parameter.data, 0.5))
        if what == "own":
            for one, parameter in zip(owned, net.parameters()): parameter.data.copy_(one)
            net.zero_grad()
        optimizer.zero_grad()
        if is_short: break
        if what == "plain" and noise % 2 == 0:  # an evaluation that computes gradients
            for part, _ in DataLoader(data, 4, sampler=range(dist.get_rank(), 50, n)): net(part)
    if epoch == 7:  # when some of the shares are known
        with torch.no_grad(): net.inner(x)  # a part of the model gets no second names
torch.save(net.state_dict(), f"weights{dist.get_rank()}.pt")
"""
WEIGHTS = 4 * (8 * 32 + 32 + 32 * 4 + 4)  # bytes


@pytest.fixture
def train(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)

    def run(what, value=0, **options):
        return answer("train.py", what, value, cwd=tmp_path, **options)

    return run


@pytest.mark.parametrize(("what", "small", "large"), [("float32", 1e-7, 5e-6), ("bfloat16", 1e-3, 1e-1)])
@pytest.mark.slow
def test_the_yardstick_is_rounding(train, what, small, large):
    """A layer that makes this relative difference between a whole batch and its shares."""
    assert train(what, small, code=0)[1]["verdict"] == "THE SAME as one process, up to rounding"
    _, lines, _ = train(what, large, code=1)
    assert lines["verdict"].endswith("the loss, or a layer, depends on which examples are in a batch together")
    assert re.search(r"apart by \d", lines["one batch"])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["contrastive", "contrastive bfloat16"])
def test_a_loss_that_looks_at_other_ranks_examples(train, what):
    _, lines, _ = train(what, code=0)
    assert lines["verdict"] == "THE SAME as one process, up to rounding"
    assert lines["gradients"].startswith("right: one process's")


def test_an_optimizer_with_parameters_of_its_own_is_seen_in_the_weights(train):
    _, lines, _ = train("own", 1, nproc=3, code=0)
    assert lines["verdict"] == "THE SAME as one process, up to rounding" and lines["weights"].startswith("right: ")
    assert lines["averaging"].startswith("seen in the weights only: "), lines


def test_batches_that_no_loader_has_brought(train):
    _, lines, _ = train("drawn", nproc=3, code=0)
    assert lines["verdict"] == "THE SAME as one process, up to rounding"
    assert lines["examples"] == "8 + 8 + 8 in a step, none on two ranks"


def test_weights_that_the_program_keeps_itself(train):
    """As Lookahead does: only the first steps in one process have those of the several."""
    _, lines, _ = train("lookahead", nproc=3, code=0)
    assert lines["verdict"] == "THE SAME as one process, up to rounding", lines


@pytest.mark.parametrize("what", ["subset", "slice", "numpy"])
def test_data_sets_and_batches_of_the_programs_own(train, what):
    _, lines, _ = train(what, nproc=3, code=0)
    assert lines["verdict"] == "THE SAME as one process, up to rounding"
    assert lines["examples"] == "8 + 8 + 8 in a step, none on two ranks"
    assert "alone the program takes" not in lines["note"]


def test_random_numbers_of_python_are_seen(train):
    _, lines, _ = train("coin", 1, code=0)
    assert lines["verdict"] == "THE SAME, but for random numbers that each step draws"


def test_buffers_that_each_process_changes_by_its_own_examples(train):
    _, lines, _ = train("buffer", 1, nproc=3, code=0)
    assert lines["verdict"] == "THE SAME as one process, up to rounding" and "buffers" not in lines
    _, lines, _ = train("buffer", nproc=3, code=0)
    assert lines["verdict"] == "THE SAME as one process, up to rounding (but for buffers)"
    assert lines["buffers"].startswith("usual don't change as in one process (apart by ")


def test_examples_and_copies(train):
    _, lines, _ = train("same", nproc=3, code=1)
    assert "all 3 ranks have the same, and do the same work 3 times: give each its share" in lines["examples"]
    _, lines, _ = train("split", nproc=3, code=1)
    assert re.search(r"In an epoch \d+ of \d+ come on more than one rank: give each its share", lines["examples"])
    _, lines, _ = train("copies", 0.5, nproc=3, code=1)
    assert lines["copies"] == "the ranks' weights differ from the start: inner.0.bias"


def test_batchnorm_differs_by_design_and_a_short_program_runs_again(train):
    """AdamW's state is each step's own, BatchNorm's averages each rank's; a part of the model no second names."""
    _, lines, _ = train("BatchNorm", 12, nproc=3, code=0)
    assert lines["verdict"] == "THE SAME, but for BatchNorm: each process normalises its own share"
    assert lines["averaging"].startswith("right: ") and lines["weights"].startswith("right: ")


JUDGE_ALSO = """  # the notes of a real run, each time with one thing changed
import copy, json
from equivalence import verdict
from equivalence.evidence import Evidence
from equivalence.plan import Test
from instruments.tensors import tensors_in

EVERY = [(rank, step) for rank in range(3) for step in range(3)]

def gradients(change, names=None, steps=(0, 1, 2), on=(0, 1, 2)):
    def edit(ranks, result):
        for rank in on:
            for step in steps:
                found = ranks[rank].steps[step].gradients
                for name in names or found:
                    share = result.steps[Test("share", step, 1)].raw[name]
                    found[name] = change(found[name], share)
    return edit

def whole_batch(size, steps=(0, 1, 2)):
    def edit(ranks, result):
        for step in steps:
            tests = [Test(kind, step) for kind in ("whole", "rounded", "again", "reseeded")]
            raws = [result.steps[test].raw for test in tests if test in result.steps]
            for name, tensor in raws[0].items():
                moved = torch.randn_like(tensor)
                moved *= size * tensor.norm() / moved.norm()
                for raw in raws: raw[name] = raw[name] + moved
    return edit

def lost_layer(ranks, result):
    for rank, step in EVERY:
        share = result.steps[Test("share", step, 0)].raw["inner.0.weight"]
        ranks[rank].steps[step].gradients["inner.0.weight"] = share / 3

def sign(ranks, result):
    for kind in "whole", "rounded", "again", "reseeded":
        share = result.steps[Test("share", 0, 1)].raw
        raw = result.steps[Test(kind, 0)].raw
        for name in raw: raw[name] -= 2 / 3 * share[name]

def clipped(ranks, result):
    gradients(lambda g, share: g * 1.5)(ranks, result)
    for rank, step in EVERY: ranks[rank].steps[step].norms = [2.0 if rank == 1 else 1.0]

def clipped_scalar(ranks, result):  # a tensor of one element has no other direction
    gradients(lambda g, share: g + share, ["inner.0.weight", "inner.0.bias", "inner.2.weight"])(ranks, result)
    for rank, step in EVERY: ranks[rank].steps[step].norms = [1.0 + rank]

def clipped_own(ranks, result):
    for rank, step in EVERY:
        found = ranks[rank].steps[step]
        found.norms = [1.0 + rank]
        for name in found.gradients:
            found.gradients[name] = result.steps[Test("share", step, rank)].raw[name] / 2

def clipped_layer(ranks, result):  # nobody averages it
    clipped_own(ranks, result)
    for rank, step in EVERY:
        found = ranks[rank].steps[step].gradients
        for name in found.keys() - {"inner.2.bias"}:
            found[name] = result.steps[Test("mean", step)].gradients[name] / (1 + rank)

def clipped_half(ranks, result):  # half of the layer is averaged
    clipped_layer(ranks, result)
    for rank, step in EVERY:
        mean = result.steps[Test("mean", step)].gradients["inner.2.bias"]
        ranks[rank].steps[step].gradients["inner.2.bias"] += mean / 2

def uneven_copies(ranks, result):
    gradients(lambda g, share: g + 0.1 * share)(ranks, result)
    ranks[2].steps[0].weights["inner.0.bias"] += 1

def then_copies(ranks, result):  # where they differ, the shares are not exact
    gradients(lambda g, share: 3 * g, steps=[0])(ranks, result)
    gradients(lambda g, share: torch.ones_like(g), steps=[2])(ranks, result)
    ranks[2].steps[1].weights["inner.0.bias"] += 1

def rates(ranks, result, rate=0.3):
    for rank in range(3): ranks[rank].steps[2].rates = [rate]

def schedule(ranks, result, rate=0.1001):
    rates(ranks, result, rate)
    result.notes.examples = {"loader 0": 25}  # 24 with three processes: an epoch has other steps

def longer(ranks, times):
    for rank in range(3):
        steps = ranks[rank].steps
        for name, before in steps[2].weights.items():
            steps[3].weights[name] = before + times * (steps[3].weights[name] - before)

def schedule_weights(ranks, result):  # rates that are 0.001 apart
    schedule(ranks, result)
    longer(ranks, 1.005)

def schedule_too_far(ranks, result):
    schedule(ranks, result)
    longer(ranks, 1.05)

def no_schedule(ranks, result): schedule(ranks, result, 0.11)

def no_schedule_weights(ranks, result):
    no_schedule(ranks, result)
    longer(ranks, 1.05)

def copies(ranks, result): ranks[2].steps[2].weights["inner.0.bias"] += 1

def update(ranks, result, times=1.01):
    for rank in range(3): ranks[rank].steps[3].weights["inner.0.bias"] *= times
    result.after[Test("rounded", 2)]["inner.0.bias"] *= times

def cancelled(ranks, result, left=0.0):  # Adam makes much of a gradient that is only rounding
    test = result.steps[Test("mean", 0)]
    test.raw = test.raw | {"inner.0.bias": test.raw["inner.0.bias"].clone()}
    test.raw["inner.0.bias"][0] *= left
    for rank in range(3):
        for step in 1, 2, 3: ranks[rank].steps[step].weights["inner.0.bias"][0] += 0.5

def not_cancelled(ranks, result): cancelled(ranks, result, 0.01)

def inner_steps(ranks, result):  # of LBFGS, each with its own rounding
    update(ranks, result, 1.0001)
    ranks[0].steps[0].is_repeated = True

def own_state(ranks, result):  # one process itself changes the weights as much otherwise
    update(ranks, result, 2)
    ranks[0].steps[0].is_repeated = True

def growing(ranks, result):  # a factor that is another one in each step
    for step in 0, 1, 2:
        for gradient in result.steps[Test("rounded", step)].raw.values(): gradient *= 2

def own_once(ranks, result):  # as in local SGD: in one step the weights are averaged
    for rank in range(3):
        ranks[rank].steps[1].gradients = dict(result.steps[Test("share", 1, rank)].raw)

def inside(ranks, result):  # backward, where the optimizer steps, and leaves no gradient
    for step in result.steps.values(): step.raw = {name: 0 * gradient for name, gradient in step.raw.items()}

def later(ranks, result): ranks[1].events["loader 0"][1] = ranks[0].events["loader 0"][0]  # in another epoch

def left_out(ranks, result): ranks[1].indices = ranks[0].indices

def shared(ranks, result): ranks[1].indices = ranks[2].indices = ranks[0].indices

def reseeded(ranks, result):
    whole_batch(0.1)(ranks, result)
    for gradient in result.steps[Test("reseeded", 0)].raw.values(): gradient *= 1.2
    for rank in range(3): ranks[rank].steps[0].draws = {"cpu"}

def one_seed(ranks, result):  # of torch, not of Python
    reseeded(ranks, result)
    for rank in range(3):
        states = ranks[rank].steps[0].states
        states[0] = states[0]._replace(cpu=ranks[0].steps[0].states[0].cpu)

def kink(ranks, result):
    whole_batch(0.5)(ranks, result)
    for gradient in result.steps[Test("rounded", 1)].raw.values(): gradient *= 1.5

EDITS = {
    "nothing": lambda ranks, result: None,
    "sum": gradients(lambda g, share: 3 * g),
    "twice": gradients(lambda g, share: g / 3),
    "factor": gradients(lambda g, share: 1.0001 * g),
    "own": gradients(lambda g, share: 0 * g + share, on=[1]),
    "lost": gradients(lambda g, share: g - share / 3),
    "lost layer": lost_layer,
    "NaN": gradients(lambda g, share: g * float("nan"), steps=[1], on=[2]),
    "layer": gradients(lambda g, share: 2 * g, ["inner.2.bias"], [1]),
    "other": gradients(lambda g, share: torch.ones_like(g)),
    "coarse": gradients(lambda g, share: g.bfloat16().float()),
    "others": gradients(lambda g, share: torch.randn_like(g)),
    "rounding": whole_batch(2e-7),
    "more than rounding": whole_batch(5e-6),
    "a corner": whole_batch(5e-3, [1]),
    "one step": whole_batch(5e-2, [1]),
    "sign": sign,
    "shared": shared,
    "inner_steps": inner_steps,
    **{f.__name__: f for f in (inside, own_state, growing, own_once, one_seed, kink)},
    "later": later,
    "cancelled": cancelled,
    "not_cancelled": not_cancelled,
    **{f.__name__: f for f in (clipped, clipped_scalar, clipped_own, clipped_layer, clipped_half, uneven_copies)},
    **{f.__name__: f for f in (schedule_weights, schedule_too_far, no_schedule_weights)},
    **{f.__name__: f for f in (then_copies, rates, schedule, no_schedule, copies, update, left_out, reseeded)},
}

original = verdict.judge

def judge(evidence):
    said = {}
    for name, edit in EDITS.items():
        plan, result = copy.deepcopy((evidence.plan, evidence.result))
        edit(plan.ranks, result)
        code, lines = original(Evidence(plan, result))
        said[name] = [[str(code), ""], *((line.label, line.text) for line in lines)]
    kept = list(evidence.result.after.values())
    for step in evidence.result.steps.values(): kept += [step.weights, step.forced, step.raw, step.gradients]
    said["bytes"] = sum({id(tensor): tensor.nbytes for tensor in tensors_in(kept)}.values())
    with open("said.json", "w") as file: json.dump(said, file)
    return original(evidence)

verdict.judge = judge
"""
DIFFERENT = "DIFFERENT from one process in: "
ROUNDING = " as one process, up to rounding"
BATCH = "DIFFERENT from one process: the loss, or a layer, depends on which examples are in a batch together"


def wrong(text, reasons="averaging"):
    return f"{DIFFERENT}{reasons}", "averaging", f"WRONG: {text}"


JUDGED = {  # the verdict, a line, and what it says
    "nothing": (f"THE SAME{ROUNDING}", "weights", "right: .*"),
    "sum": wrong("3 times one process's gradients: summed, not averaged"),
    "twice": wrong("1/3 of one process's gradients: divided .* twice"),
    "factor": wrong("1.0001 times one process's gradients"),
    "own": wrong("the ranks' gradients differ: rank 0 has .*; rank 1 has .*"),
    "lost": wrong("rank 1's examples don't count in the gradients"),
    "lost layer": wrong(r"rank 1's and rank 2's examples don't count in the gradients of inner.0.weight \(the .*"),
    "NaN": (
        f"{DIFFERENT}gradients",
        "gradients",
        r"WRONG: infinite or NaN in step 2 on rank 2 \(inner.0.weight\), and not .*",
    ),
    "layer": wrong(r"2 times one process's gradients of inner.2.bias \(the other 3 .*\), in step 2 only"),
    "coarse": wrong(r"they are coarsely rounded \(by a communication hook that sends bfloat16\?\)"),
    "other": wrong("they are not made of the shares' gradients .*"),
    "others": wrong("the ranks' gradients differ, and are not made of the shares'"),
    "rounding": (f"THE SAME{ROUNDING}", "one batch", "right: .*"),
    "more than rounding": (BATCH, "one batch", "different from all 24 examples .*"),
    "a corner": (f"THE SAME{ROUNDING}", "one batch", "right: .*"),
    "one step": (BATCH, "one batch", "different from all 24 examples in one batch in step 2 .*"),
    "sign": (BATCH, "averaging", "right: .*"),
    "clipped": wrong(r"clip_grad_norm_ .* \(of length 1, 2, 1\): average .*"),
    "clipped_scalar": wrong(r"clip_grad_norm_ .* \(of length 1, 2, 3\): .*"),
    "clipped_own": (f"THE SAME{ROUNDING}", "averaging", "each rank's .* own share: nobody averages them"),
    "clipped_layer": (
        f"THE SAME{ROUNDING}",
        "averaging",
        r"each rank's .* of inner.2.bias \(the other 3 of 4 tensors differ at most in length\): nobody .*",
    ),
    "clipped_half": wrong("the ranks' gradients differ of inner.2.bias .*: rank 0 has .*"),
    "uneven_copies": wrong(
        "the shares count .*: as the ranks' weights differ, that may be right", "copies, averaging, weights"
    ),
    "then_copies": wrong(
        "3 times one process's gradients, in step 1, 3 only: summed, not averaged", "copies, averaging, weights"
    ),
    "rates": (
        f"{DIFFERENT}learning rate",
        "learning rate",
        r"0.3 with 3 processes, 0.1 with one \(3 times\), in step 3",
    ),
    "schedule": (f"THE SAME{ROUNDING}", "note", "alone .* 25 .*, with 3 processes 24: an epoch has more .*"),
    "schedule_weights": (f"THE SAME{ROUNDING}", "weights", r".* as in one process, but for the schedule's .*5e-03\)"),
    "schedule_too_far": (f"{DIFFERENT}weights", "weights", "they don't change as in one process .*"),
    "no_schedule_weights": (f"{DIFFERENT}learning rate, weights", "weights", "they don't change as in one process .*"),
    "no_schedule": (f"{DIFFERENT}learning rate", "learning rate", r"0.11 with .* \(1.1 times\), in step 3"),
    "copies": (f"{DIFFERENT}copies, weights", "copies", "the ranks' weights differ after step 2: inner.0.bias"),
    "update": (f"{DIFFERENT}weights", "weights", "they don't change as in one process .*"),
    "inner_steps": (f"THE SAME{ROUNDING}", "weights", "right: .*"),
    "inside": ("NOT FOUND OUT: .* an optimizer that steps inside backward can't be compared", "examples", ".*"),
    "cancelled": (f"THE SAME{ROUNDING}", "weights", "right: .*"),
    "not_cancelled": (f"{DIFFERENT}weights", "weights", "they don't change as in one process .*"),
    "own_state": ("NOT FOUND OUT: in one process the same step changes the weights otherwise .*", "weights", "they .*"),
    "kink": (BATCH, "one batch", "different .*"),
    "one_seed": ("THE SAME, but for random numbers that each step draws", "one batch", "different .*"),
    "growing": ("NOT FOUND OUT: the same step, computed again, has other gradients .*", "examples", ".*"),
    "own_once": wrong("each rank's .* own share, in step 2 only: nobody averages them"),
    "later": (f"THE SAME{ROUNDING}", "examples", r"8 \+ 8 \+ 8 in a step, none on two ranks"),
    "left_out": (f"{DIFFERENT}examples", "examples", ".* epoch 160 of 320 come .* leave out 160 of 480"),
    "shared": (f"{DIFFERENT}examples", "examples", ".* epoch 160 of 160 come .* leave out 320 of 480"),
    "reseeded": ("THE SAME, but for random numbers that each step draws", "one batch", "different .*"),
}


def test_what_is_wrong_is_named(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    answer("train.py", "plain", 0, nproc=3, cwd=tmp_path, code=0, before=JUDGE_ALSO, path=[ROOT])
    said = json.loads((tmp_path / "said.json").read_text())
    assert said.pop("bytes") == WEIGHTS * (9 * 3 + 9 + 2)  # of 9 tests 3 copies, of shares, again and reseeded 1
    assert said.keys() == JUDGED.keys()
    draws = [name for name, lines in said.items() if any("draws random numbers" in text for _, text in lines)]
    assert sorted(draws) == ["one_seed", "reseeded"]
    seeds = [name for name, lines in said.items() if any("seed them differently" in text for _, text in lines)]
    assert seeds == ["one_seed"]
    for name, lines in said.items():
        assert any("alone the program takes" in text for _, text in lines) == ("schedule" in name)  # 25, not 24
    for name, (verdict, label, text) in JUDGED.items():
        lines = dict(reversed(said[name]))  # the first of those with one label
        assert re.fullmatch(verdict, lines["verdict"]) and re.fullmatch(text, lines.get(label, "")), (name, lines)


MICRO = """
import copy, torch
from torch import nn
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(768, 8), torch.randint(4, (768,)))
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
count = 4 // dist.get_world_size()  # micro-batches
batches = iter(DataLoader(data, 8, sampler=DistributedSampler(data)))
smooth = copy.deepcopy(model.module)
x, y = next(batches)
for step in range(18):
    if step % 2:  # an evaluation that computes gradients, of another model, too
        for part, _ in DataLoader(data, 16, sampler=range(dist.get_rank(), 50, dist.get_world_size())):
            model.module(part)
            smooth(part)
    for micro in range(count):
        loss = nn.functional.cross_entropy(model(x), y) / count
        x, y = next(batches)  # in advance
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_batches_in_advance_micro_batches_that_depend_on_the_processes_and_an_evaluation(tmp_path):
    (tmp_path / "train.py").write_text(MICRO)
    _, lines, _ = answer("train.py", nproc=4, cwd=tmp_path, code=0)
    assert lines["verdict"] == "THE SAME as one process, up to rounding"
    assert lines["examples"] == "8 + 8 + 8 + 8 in a step, none on two ranks"


@pytest.mark.slow
def test_a_batch_size_that_the_loss_is_divided_by(train):
    """With 8 examples on each rank one process gets 24, and divides by what its flags say."""
    _, lines, _ = train("set size", 8, nproc=3, code=2)
    assert re.fullmatch('NOT FOUND OUT: .*--alone="FLAGS" that set it to 24, .*', lines["verdict"]), lines
    train("set size", 8, nproc=3, options=["--alone='set size' 24"], code=0)


@pytest.mark.slow
def test_a_rank_without_steps(train):
    _, lines, err = train("no step", options=["--patience", 20], code=2)
    assert re.fullmatch(r"NOT FOUND OUT: .* 4 steps of an optimizer \(rank 0: 4, rank 1: 0\)", lines["verdict"]), lines
    assert "rank 1 made no step for 20 s" in err, err


NOT_FOUND = {
    "zero": (0, "NOT FOUND OUT: nothing is trained: .*", ""),
    "unsteady": (0, "NOT FOUND OUT: the same step, computed again, has other gradients .*", ""),
    "NaN": (0, "NOT FOUND OUT: gradients are infinite or NaN", ""),
    "two optimizers": (0, "NOT FOUND OUT: a step draws random numbers, other ones on each rank, .*", ""),
    "loose": (0, "NOT FOUND OUT: the optimizer has parameters of no module that was called: .*", ""),
    "columns": (0, "NOT FOUND OUT: a batch's 12 examples are the columns of its tensors, not their rows", ""),
    "two steps": (0, "NOT FOUND OUT: not each step of the optimizer loads a batch from the same place .*", ""),
    "coin": (0, "NOT FOUND OUT: the step draws random numbers, which may be why .*", ""),  # reseeded, the same side
    "steps": (3, "NOT FOUND OUT: the program made 3 steps, and 4 are needed: .* fewer --steps", ""),
    "fails alone": (0, r'NOT FOUND OUT: the program failed in one process.*--alone="FLAGS"', "ValueError: not alone"),
    "ends alone": (0, r'NOT FOUND OUT: the program failed in one process.*--alone="FLAGS"', "(exit|ended).* 3"),
    "fails": (0, "", "rank 1 of 2 failed first: (?s:.*)ValueError: as planned"),
}


@pytest.mark.parametrize("what", NOT_FOUND)
def test_what_could_not_be_found_out_is_said(train, what):
    value, verdict, error = NOT_FOUND[what]
    _, lines, err = train(what, value, code=2)
    assert re.fullmatch(verdict, lines.get("verdict", "")), lines
    assert re.search(error, err), err


INSIDE = """
import torch
import torch.distributed as dist

class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
    def forward(self): return self.weight

dist.init_process_group("gloo")
field = Field()
optimizer = torch.optim.SGD(field.parameters(), 0.1)
for _ in range(9):
    points = torch.randn(8, 3)
    (field() @ points.T - 1).square().mean().backward()
    dist.all_reduce(field.weight.grad)
    field.weight.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_examples_that_were_not_seen_are_not_the_same_on_all_ranks(tmp_path):
    (tmp_path / "train.py").write_text(INSIDE)
    _, lines, _ = answer("train.py", nproc=3, cwd=tmp_path, code=2)
    assert re.fullmatch("NOT FOUND OUT: no batch was seen: .*", lines["verdict"]), lines


def test_a_terminal_shows_which_step_of_which_run_and_not_what_the_program_prints(train):
    screen, terminal = os.openpty()
    os.set_blocking(screen, False)
    before = f"import os; os.dup2(os.open({os.ttyname(terminal)!r}, os.O_RDWR), 2)"
    train("by hand", nproc=3, before=before, code=0)
    text = os.read(screen, 10000).decode()
    assert "said with" not in text
    shown = re.findall(r"\requivalence: (\w+) process(?:es)?, step (\d+) of (\d+)", text)
    several = [("3", str(step), "4") for step in range(1, 5)]
    alone = 3 + 3 + 9 + 3 + 2  # whole, rounded, shares, means; again, reseeded
    assert shown == several + [("one", str(step), f"{alone + 1}") for step in range(1, alone + 2)]
    os.close(screen)
    os.close(terminal)


def test_notes_that_are_more_than_the_memory_are_refused(train, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 100 kB\n")
    before = "import equivalence.alone; equivalence.alone.MEMORY = 'meminfo'"
    _, lines, _ = train("plain", before=before, path=[ROOT], code=2)
    needed = 2 * WEIGHTS * (9 * 3 + 6 + 2) / 1e9
    text = f"its notes take {needed:.1f} GB, and 0.0 GB of memory are free: give --steps 2, .*"
    assert re.fullmatch(f"NOT FOUND OUT: {text}", lines["verdict"]), lines


ON_ITS_OWN = """
import distributed_launcher as launcher, runpy
def train(): runpy.run_path("train.py", run_name="__main__")
launcher.run(train, nproc=3)
"""


def test_the_program_computes_what_it_computes_on_its_own(train, tmp_path):
    train("steps", 3, nproc=3, code=2)  # it makes too few, so it comes to its end
    noted = [torch.load(tmp_path / f"weights{rank}.pt") for rank in range(3)]
    (tmp_path / "own.py").write_text(ON_ITS_OWN)
    assert forker().run(tmp_path / "own.py", "steps", 3, cwd=tmp_path, path=[ROOT]).code == 0
    for rank in range(3):
        own = torch.load(tmp_path / f"weights{rank}.pt")
        assert all(tensor.equal(noted[rank][name]) for name, tensor in own.items())


def test_nothing_is_left(train, tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text(PROGRAM)
    for what in "float32", "fails", "waits alone":
        job = forker().start(ROOT / "equivalence", "train.py", what, 0, cwd=tmp_path, TMPDIR=tmp_path / "tmp")
        if what == "waits alone":
            wait_for(lambda: (tmp_path / "alone").exists())
            os.kill(job.pid, signal.SIGTERM)
        assert job.wait().code == {"float32": 0, "fails": 2, "waits alone": 143}[what]
        assert [path.name for path in (tmp_path / "tmp").iterdir()] == []
    assert processes_in(tmp_path) == []


def test_bad_flags_are_one_line(tmp_path):
    (tmp_path / "train.py").write_text("")
    for given in "", "nothing.py", "--steps 1 train.py", "--nproc 1 train.py", "train.py --nproc 3":
        done = forker().run(ROOT / "equivalence", *given.split(), cwd=tmp_path)
        assert done.code == 2 and len(done.err.splitlines()) == 1, done
    done = forker().run(ROOT / "equivalence", "--nproc", 2, "train.py", cwd=tmp_path, RANK=0, WORLD_SIZE=2)
    said = "equivalence: error: a launcher has started the processes: leave out --nproc\n"
    assert (done.code, done.err) == (2, said)


@pytest.mark.slow
def test_under_torchrun_from_any_folder(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", ROOT / "equivalence")
    done = shell(*torchrun, "train.py", "by hand", 0, cwd=tmp_path, OMP_NUM_THREADS=1)
    assert done.code == 0 and done.out.startswith("verdict       THE SAME as one process"), done


# ------------------------------------------------------------------------------ its arithmetic


def test_vectors_and_their_fits():
    one, other = {"a": torch.tensor([1.0, 0.0])}, {"a": torch.tensor([0.0, 2.0])}
    target = vectors.combine([one, other], [3.0, 0.5])
    assert target["a"].tolist() == [3.0, 1.0]
    found = vectors.fit(target, [one, other])
    assert found.weights == pytest.approx([3.0, 0.5]) and found.left < 1e-12
    assert vectors.fit(target, [one]).left == pytest.approx(1 / 10**0.5)
    assert found.is_clear
    same = vectors.fit(one, [other, other])
    assert same.left == pytest.approx(1) and not same.is_clear
    assert vectors.median([4.0, 1.0, 3.0, 2.0]) == 3.0
    broken = {"a": torch.tensor([math.nan, 0.0])}
    assert vectors.fit(broken, [one]).left == vectors.fit(one, [one, broken]).left == math.inf
    tiny = [vectors.combine([part], [1e-9]) for part in (one, other)]
    assert vectors.distance(one, other) == vectors.distance(*tiny) == pytest.approx(5**0.5 / 2)


def test_batches_are_joined_split_and_told_apart():
    short = {"ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2]]), "names": ["a"]}
    long = {"ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[3, 4, 5]]), "names": ["b"]}
    whole = batches.join([short, long])
    assert whole["ids"].tolist() == [[1, 2, 0], [3, 4, 5]] and whole["labels"].tolist()[0] == [1, 2, -100]
    assert batches.count_examples(whole) == 2 and [part["ids"].tolist() for part in batches.split(whole, 2)] == [
        [[1, 2, 0]],
        [[3, 4, 5]],
    ]
    targets = [torch.tensor([[1, 2], [3, -100]]), torch.tensor([[4]])]  # in a tuple: of no name
    assert batches.join(targets).tolist() == [[1, 2], [3, -100], [4, -100]]
    graphs = [(torch.ones(n, 3), torch.ones(2, n), torch.zeros(7)) for n in (4, 5)]
    assert batches.why_not_joined(graphs) == "4, 2, 7" and batches.why_not_joined(targets) == ""
    rows, same = batches.join([(torch.ones(2, 1), torch.arange(7)), (torch.ones(3, 1), torch.arange(7))])
    assert rows.shape == (5, 1) and same.equal(torch.arange(7))
    columns = [(torch.ones(5, 4), torch.ones(5, 4, 2), torch.ones(4)), (torch.ones(4, 4),), (torch.ones(4),)]
    assert [batches.are_columns(one, 4) for one in columns] == [True, False, False]
    assert batches.join([torch.ones(1, 2, 3), torch.ones(1, 4, 3)]).shape == (2, 4, 3)
    assert len(set(batches.digests_of_examples(whole))) == 2
    assert batches.digest(batches.clone(short)) == batches.digest(short) != batches.digest(long)


class Counting(torch.utils.data.RandomSampler):
    asked = 0

    def __iter__(self):
        self.asked += 1
        return super().__iter__()


def test_a_sampler_is_asked_for_an_epochs_indices_without_a_trace():
    generator = torch.Generator().manual_seed(1)
    sampler = Counting(range(9), generator=generator)
    before = generator.get_state()
    batch_sampler = torch.utils.data.BatchSampler(sampler, 2, drop_last=False)
    assert sorted(loaders.indices_of(batch_sampler)) == [*range(9)]
    assert sampler.asked == 0 and generator.get_state().equal(before)


def test_data_sets_with_names_in_place_of_numbers_are_left_alone():
    known = loaders.Loaders()
    known.note_epoch("loader 0", [1, 0], torch.utils.data.Subset({"a": 1, "b": 2}, ["a", "b"]))
    assert known.indices == {}


@dataclasses.dataclass(frozen=True)
class Batch:
    images: torch.Tensor
    more: dict
    function: object = None


class Pair(NamedTuple):
    x: torch.Tensor
    y: numpy.ndarray


class Graph:
    def __init__(self, nodes):
        self.nodes = nodes


def test_a_batch_of_the_programs_own_classes_is_sent_without_them():
    ones, twos = torch.ones(2, 3), 2 * torch.ones(2, 3)

    def batch(x):
        return Batch(x, {"pair": Pair(x, x.numpy()), "list": [Graph(x), x], "names": ["a"]}, lambda: x)

    sent = pickle.dumps(batches.to_plain(batch(twos)))
    assert __name__.encode() not in sent
    own = batch(ones)
    made = batches.from_plain(pickle.loads(sent), own)
    pair, (graph, tensor) = made.more["pair"], made.more["list"]
    assert (type(made), type(pair), type(pair.y), type(graph)) == (Batch, Pair, numpy.ndarray, Graph)
    assert made.function is own.function and made.more["names"] == ["a"]
    for value in made.images, pair.x, torch.from_numpy(pair.y), graph.nodes, tensor:
        assert value.equal(twos)
    assert own.images.equal(ones) and own.more["list"][0].nodes.equal(ones)
