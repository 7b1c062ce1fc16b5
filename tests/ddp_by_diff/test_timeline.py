"""timeline/: what it records of programs whose messages, memory and delays are known; what it says; what it draws.

Most programs run in the kept world's three ranks, and each is recorded once for all tests.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import io
import json
import pickle
import re
import statistics
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from world import FEW_DIGITS, ROOT, chromium, forker, run, skip_if_refused, wait_for

import data
import distributed as dist
from ddp_by_diff.instruments.hooks import Hooks
from ddp_by_diff.instruments.meeting import Place
from ddp_by_diff.instruments.program import Finished
from ddp_by_diff.timeline import draw, lanes, profiler, record, waits
from ddp_by_diff.timeline.data import KINDS, Block, Message, Span
from ddp_by_diff.timeline.picture import picture_of, step_to_draw
from ddp_by_diff.timeline.steps import table_of, waits_for
from ddp_by_diff.timeline.trace import trace_of
from mnist_ddp import ConvNet

N, SIDE, BATCH, STEPS = 3, 8, 30, 4
WEIGHTS = sum(p.numel() for p in ConvNet(1, SIDE).parameters())
BUFFERS = sum(b.nbytes for b in ConvNet(1, SIDE).buffers())
DELAY = 30_000_000  # ns


# ------------------------------------------------------------------------------------------------------- recordings


def options(steps=STEPS, shown=1, out="timeline"):
    return argparse.Namespace(steps=steps, steps_shown=shown, out=out, timeout=60, command=["program.py", "--flag"])


def _recorded(program, *args):
    """On each rank: runs program(*args) under a recorder; its recording, and torch's own trace."""
    traces, export = [], torch.profiler.profile.export_chrome_trace

    def kept(profiler, file):
        export(profiler, file)
        traces.append(json.loads(Path(file).read_text()))

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(torch.profiler.profile, "export_chrome_trace", kept)
        recorder = record.Recorder(Place(dist.get_rank(), dist.get_world_size()), STEPS)
        with Hooks([recorder]).installed(), contextlib.suppress(Finished):
            program(*args)
        found = recorder.notes(is_own_thread=True)
    return pickle.dumps((found, traces[0] if dist.is_primary() else None))


@functools.cache
def recorded(program, *args):
    """(The recordings of all ranks, rank 0's trace)."""
    ranks = [pickle.loads(one) for one in run(_recorded, N, program, *args)]
    return [found for found, _ in ranks], ranks[0][1]


def recordings(program, *args):
    return copy.deepcopy(recorded(program, *args)[0])  # a picture changes them


def picture(program, *args, shown=1):
    return picture_of(recordings(program, *args), options(shown=shown))[0]


def said(picture):
    return dict(picture["findings"])


def variant(name, flags=""):
    """Main of a script, with small images, in the group that is there."""
    module = importlib.import_module(name)
    pixels = torch.randint(256, (12 * BATCH, 1, SIDE, SIDE), dtype=torch.uint8, generator=torch.manual_seed(1))
    images = data.Images(pixels, torch.arange(12 * BATCH) % 10, (0.5,), (0.5,))
    with pytest.MonkeyPatch.context() as patch:
        flags = f"--dataset synthetic --epochs 2 --batch-size {BATCH} --lr 0.05 {flags}"
        patch.setattr(sys, "argv", [name, *flags.split()])
        patch.setattr(dist, "init_process_group", lambda **kwargs: None)
        patch.setattr(data, "load", lambda *args: (images, images))
        module.main(dist.get_rank(), dist.get_world_size(), module.parse_args())


def small(folder=None):
    """DDP of two layers in several buckets; or with a delay in rank 1's forward."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    for step in range(12):
        if folder and rank == 1:  # it is late by DELAY after the others have computed all of their gradients
            files = [folder / f"{step} {other}" for other in (0, 2)]
            hook = net[0].register_forward_pre_hook(
                lambda *_, files=files: wait_for(lambda: all(f.exists() for f in files)) or time.sleep(DELAY / 1e9)
            )
        elif folder:
            file = folder / f"{step} {rank}"
            hook = net[0].bias.register_post_accumulate_grad_hook(lambda _, file=file: file.touch())
        inputs = torch.full((5, 4), 1.0 + rank)
        nn.functional.mse_loss(model(inputs), torch.zeros(5, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if folder:
            hook.remove()


def two_of_each():
    """Two models with an optimizer each, as GANs have them, and two batches for each step.

    Rank 2 gets a message in a group of some ranks, in which it has the number 1.
    """
    outer = torch.distributed.new_group([0, 2])
    models = [dist.prepare_ddp_model(nn.Linear(4, 2)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    own, scale = torch.Generator().manual_seed(dist.get_rank()), nn.Linear(4, 4)
    options = {"shuffle": True, "generator": own, "collate_fn": lambda rows: scale(torch.stack(rows)).detach()}
    batches = iter(torch.utils.data.DataLoader(torch.randn(100, 4), batch_size=4, **options))
    for _ in range(12):
        pairs = [(model, next(batches)) for model in models]
        for (model, batch), optimizer in zip(pairs, optimizers, strict=True):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.is_primary():
            torch.distributed.send(torch.ones(3), 2, group=outer)
        elif dist.get_rank() == 2:
            torch.distributed.recv(torch.ones(3), 0, group=outer)


# ------------------------------------------------------------------------------------------------------------- time


def test_a_delay_is_the_others_waiting_and_its_rank_is_named(tmp_path):
    found, _ = picture_of(recordings(small, tmp_path), options())
    waited = dict(found["ranks"][0]["waits_for"])
    assert waited[1] >= 0.5 * DELAY  # on a busy machine rank 0, too, may go on late
    slept = [end - begin for what, begin, end in found["ranks"][1]["parts"] if what == "forward"]
    assert max(slept) >= DELAY
    assert said(found)["waiting"].startswith("last to arrive: rank 1 in 4 of 4 steps (the others waited ")
    for one in recordings(small, tmp_path)[::2]:  # DDP waits in C++, at the end of backward: on all other ranks
        parts = lanes.parts_of(one["lane"], one["cuts"][one["first"]], one["cuts"][-1])
        after = {next_to.what for part, next_to in zip(parts, parts[1:], strict=False) if part.what == "waiting"}
        assert "backward" in after, "its last copies come after the wait"
        assert sum(part.length for part in parts if part.what == "waiting") >= STEPS * 0.5 * DELAY


class SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(DELAY / 1e9)
        return gradient


def after_ddp():
    """A layer outside DDP, whose backward begins when DDP has sent its last message."""
    layer, model = nn.Linear(4, 4), nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD([*layer.parameters(), *model.parameters()], 0.1)
    for _ in range(12):
        model(SleepsInBackward.apply(layer(torch.ones(5, 4)))).sum().backward()
        optimizer.step()


@pytest.mark.skipif(not profiler.HAS_MESSAGE_HOOKS, reason="torch 2.14 tells when a backward has computed all")
def test_ddp_waits_only_when_all_is_computed():
    for steps in table_of(recordings(after_ddp)).ranks.values():
        assert all(step.spent["backward"] > 0.9 * DELAY for step in steps)


def two_ddps_in_one_backward():
    """As in a GAN: DDP waits twice in one backward, first for rank 1, which is late."""
    models = [nn.parallel.DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2)]
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], 0.1)
    for _ in range(12):
        loss = models[1](models[0](torch.ones(5, 4))).sum()
        if dist.get_rank() == 1:
            time.sleep(DELAY / 1e9)
        loss.backward()
        optimizer.step()


def second_message():
    """A hook of DDP that sends again where the first message has arrived, as PowerSGD does; rank 1 is late."""

    def hook(_, bucket):
        def again(future):
            torch.distributed.all_reduce(torch.ones(5))
            return future.value()[0]

        return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(12):
        loss = model(torch.ones(5, 4)).sum()
        if dist.get_rank() == 1:
            time.sleep(DELAY / 1e9)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("program", [two_ddps_in_one_backward, second_message])
def test_each_wait_of_ddp_is_seen(program):
    table = table_of(recordings(program))
    for rank in (0, 2):
        assert statistics.median(step.spent["waiting"] for step in table.ranks[rank]) > 0.5 * DELAY


def functional(is_compiled):
    """Rank 1 comes late to a functional collective, which waits in C++."""

    def mean(values):
        return functional_collectives.all_reduce(values, "sum", torch.distributed.group.WORLD) / N

    if is_compiled:
        mean = torch.compile(mean, backend="aot_eager", fullgraph=True)
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(12):
        layer(torch.ones(5, 4)).sum().backward()
        if dist.get_rank() == 1:
            time.sleep(DELAY / 1e9)
        layer.weight.grad = mean(layer.weight.grad)
        optimizer.step()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_waits_for_functional_collectives(is_compiled):
    table = table_of(recordings(functional, is_compiled))
    for rank in (0, 2):
        assert statistics.median(step.spent["waiting"] for step in table.ranks[rank]) > 0.5 * DELAY


def compiled(what):
    """A compiled model alone, DDP around one or inside of one, or a compiled step with its backward."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    how = {"backend": "aot_eager"}
    inner = torch.compile(net, fullgraph=True, **how) if what in ("alone", "inside") else net
    model = inner if what == "alone" else nn.parallel.DistributedDataParallel(inner)
    model = torch.compile(model, **how) if what == "around" else model

    def step(inputs):
        model(inputs).sum().backward()

    step = torch.compile(step, **how) if what == "step" else step
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for inputs in torch.utils.data.DataLoader(torch.ones(60, 4), 5):
        step(inputs)
        optimizer.step()


@pytest.mark.parametrize("what", ["alone", "inside", "around", "step"])
def test_a_compiled_program(what):
    found = recordings(compiled, what)
    for steps in table_of(found).ranks.values():
        assert all(len(step.messages) == (0 if what == "alone" else 1) for step in steps)
        if what != "step":
            assert all({"forward", "backward"} <= step.spent.keys() for step in steps)
    assert what != "step" or "forward and backward not seen" in said(picture(compiled, what))["warning"]


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(DELAY / 1e9)
        return torch.ones(4)


def with_an_evaluation():
    """After every second step; it loads for twice DELAY, and sleeps for twice DELAY between its calls of the model.

    A teacher, which needs no gradients either, is a part of each step.
    """
    teacher, model = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, (inputs,) in enumerate(torch.utils.data.DataLoader(torch.ones(12, 1, 4))):
        with torch.no_grad():
            targets = teacher(inputs)
            time.sleep(DELAY / 1e9)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if step % 2:
            with torch.no_grad():
                for inputs in torch.utils.data.DataLoader(Slow()):
                    model(inputs)
                    time.sleep(DELAY / 1e9)


def test_an_evaluation_is_neither_loading_nor_forward():
    for steps in table_of(recordings(with_an_evaluation)).ranks.values():
        assert len(steps) == STEPS and sum(step.spent["evaluation"] > 0 for step in steps) == STEPS / 2
        for step in steps:
            assert step.spent["evaluation"] == 0 or step.spent["evaluation"] > 3.9 * DELAY  # the last sleep: other
            assert step.spent["forward"] > 0 and step.spent["loading"] < DELAY


def test_operators_are_found_in_torchs_tables():
    """FX keeps wait_tensor in a set, by its hash."""
    wait_tensor = torch.ops._c10d_functional.wait_tensor
    table = {wait_tensor, wait_tensor.default}
    with Hooks([record.Recorder(Place(0, 1), STEPS)]).installed():
        assert wait_tensor in table and wait_tensor.default in table


def test_operations_are_noted_if_asked():
    if not profiler.HAS_MESSAGE_HOOKS:
        pytest.skip("before torch 2.14 they tell of messages")
    for ops in (False, True):
        recorder, layer = record.Recorder(Place(0, 1), STEPS, ops), nn.Linear(4, 2)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        with Hooks([recorder]).installed(), contextlib.suppress(Finished):
            while True:
                with torch.profiler.record_function("[memory]"):  # as torch calls something else
                    layer(torch.ones(5, 4)).sum().backward()
                optimizer.step()
        names = {event["name"] for event in recorder.notes(is_own_thread=True)["trace"]}
        assert "Optimizer.step#SGD.step" in names and ("aten::linear" in names) == ops


# --------------------------------------------------------------------------------------------------- messages, memory


def share(parameters):
    """Bytes of a rank's rows of each, padded as FSDP pads them."""
    return sum(4 * -(-len(p) // N) * p[0].numel() for p in parameters)


LAYERS = ConvNet(1, SIDE)
SMALL = 4 * (4 * 64 + 64 + 64 * 2 + 2)
PART = 4 * -(-WEIGHTS // N)
SHARDS = sum(4 * -(-p.numel() // N) for p in LAYERS.parameters())
OUTPUTS, CUT_1, CUT_2 = (4 * BATCH * floats for floats in (10, 16 * (SIDE // 2) ** 2, 32 * (SIDE // 4) ** 2))
GATHERED = [p for layer in (LAYERS[0], LAYERS[4], LAYERS[9]) for p in layer.parameters()]

MESSAGES = {  # of rank 0 in two steps: (how many, bytes) of each kind
    "small": {"allreduce": (6, 2 * SMALL)},  # three buckets
    "mnist_by_hand": {"allreduce": (20, 2 * 4 * WEIGHTS)},
    "mnist_overlap": {"allreduce": (20, 2 * 4 * WEIGHTS)},
    "mnist_zero": {"reducescatter": (2, 2 * N * PART), "allgather": (2, 2 * PART)},
    # Each of ten parameters is gathered in forward and in backward.
    "mnist_fsdp_by_hand": {"allgather": (40, 4 * SHARDS), "reducescatter": (20, 2 * N * SHARDS)},
    "mnist_accumulate": {"allreduce": (2, 2 * 4 * WEIGHTS)},  # DDP's one bucket, in the last of four micro-batches
    "mnist_local_sgd": {"allreduce": (10, 4 * WEIGHTS)},  # every second step
    "mnist_tensor_parallel": {"allreduce": (4, 2 * (CUT_1 + OUTPUTS))},
    # Forward gathers the root and three layers, backward these again.
    "mnist_fsdp": {
        "allgather": (14, 2 * (share(LAYERS.parameters()) + share(GATHERED))),
        "reducescatter": (8, 2 * N * share(LAYERS.parameters())),
    },
    "mnist_pipeline": {"send": (4, 2 * CUT_1), "recv": (4, 2 * CUT_1)},  # two micro-batches
}
FLAGS = {"mnist_local_sgd": ("--every 2",)}


def program_of(name):
    """What `recorded` takes."""
    skip_if_refused(name)
    return (small,) if name == "small" else (variant, f"variants.{name}", *FLAGS.get(name, ()))


def sums(recording, steps=2):
    """(how many, bytes) of each kind, in the first recorded steps of a rank."""
    counts, sizes = Counter(), Counter()
    for message in recording["messages"]:
        if 0 <= message.step - recording["first"] < steps and not message.is_check:
            counts[message.kind] += 1
            sizes[message.kind] += message.bytes or 0
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def are_expected(recording, name):
    """Without torch 2.14's hooks sizes are not seen, so the checks of calls can't be left out."""
    found, expected = sums(recording), MESSAGES[name]
    if profiler.HAS_MESSAGE_HOOKS:
        return found == expected
    text = said(picture(*program_of(name)))["messages"]
    assert "size not seen" in text or "no messages" in text  # every second step of local SGD has none
    return all(found[kind] == (expected[kind][0], 0) for kind in expected if kind != "allgather")


def checked():
    """dist.reduce compares the ranks' calls by a message of its own."""
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(12):
        layer(torch.ones(5, 4)).sum().backward()
        dist.reduce(torch.ones(1000))
        optimizer.step()


@pytest.mark.skipif(not profiler.HAS_MESSAGE_HOOKS, reason="torch 2.14 tells who calls")
def test_a_check_of_the_ranks_calls_is_no_message_of_the_program():
    text = said(picture(checked))["messages"]
    assert text.startswith("per rank: 1 check, 16 B; 1 all-reduce, "), text


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_in_closed_form_and_parts_that_add_up(name):
    found = recordings(*program_of(name))
    assert are_expected(found[0], name), sums(found[0])
    for steps in table_of(found).ranks.values():
        assert len(steps) == STEPS
        lists = []
        for step in steps:
            borders = [step.begin, *(right for *_, right in step.parts)]
            assert borders[-1] == step.end and [left for _, left, _ in step.parts] == borders[:-1]
            assert {"forward", "backward", "optimizer"} <= {*step.spent}
            assert sum(step.waits_for.values()) == step.spent["waiting"]
            assert all(m.begin <= m.until <= m.end for m in step.messages)
            lists.append([(message.kind, message.bytes, message.peer) for message in step.messages])
        period = 2 if name == "mnist_local_sgd" else 1
        assert lists[period:] == lists[:-period], "the steps agree in all but times"
        if name == "small":  # the loss is forward
            kinds = [part.what for part in steps[0].parts]
            assert ("forward", "backward") in zip(kinds, kinds[1:], strict=False), kinds
        if name == "mnist_zero":  # the step ends where the next batch is loaded, not after the optimizer
            assert [kind for kind, *_ in lists[0]] == ["reducescatter", "allgather"]


def test_a_step_lies_between_two_of_the_first_optimizer_and_begins_with_its_first_batch():
    for steps in table_of(recordings(two_of_each)).ranks.values():
        for step in steps:
            assert sum(part.what == "optimizer" for part in step.parts) == 2
            begun = [part.what for part in step.parts if part.what != "other"]
            assert begun[:3] == ["loading", "loading", "forward"] and step.parts[0].what == "loading"


@pytest.mark.skipif(not profiler.HAS_MESSAGE_HOOKS, reason="torch 2.14 tells to whom")
def test_a_message_in_a_group_goes_to_a_rank_of_the_program():
    sent = [one for one in recordings(two_of_each)[0]["messages"] if one.kind == "send"]
    assert {(message.peer, message.bytes) for message in sent} == {(2, 12)}


def test_messages_of_a_pipeline_are_arrows():
    found = picture(*program_of("mnist_pipeline"))
    sent = Counter((arrow["from"], arrow["to"]) for arrow in found["arrows"])
    assert sent == {(0, 1): 2, (1, 2): 2, (2, 1): 2, (1, 0): 2}
    assert all(0 <= arrow["begin"] < arrow["end"] <= found["end"] for arrow in found["arrows"])
    middle = sums(recordings(*program_of("mnist_pipeline"))[1])
    assert middle["send"] == middle["recv"] == (8, 2 * (CUT_1 + CUT_2))


def held(*program, rank=0):
    """The largest bytes of each kind."""
    curve = picture(*program)["ranks"][rank]["memory"]
    return {kind: max(curve[kind]) for kind in KINDS}


def test_memory_in_closed_form():
    by_hand, zero = held(variant, "variants.mnist_by_hand"), held(variant, "variants.mnist_zero")
    assert by_hand["weights"] == zero["weights"] - 4 * (-WEIGHTS % N) == 4 * WEIGHTS + BUFFERS
    assert by_hand["optimizer state"] == 4 * WEIGHTS  # its gradients: now and then one has a freed message's address
    assert zero["optimizer state"] == 4 * -(-WEIGHTS // N)
    fsdp = held(variant, "variants.mnist_fsdp_by_hand")
    assert (fsdp["weights"], fsdp["optimizer state"]) == (SHARDS + BUFFERS, SHARDS)
    assert held(small)["optimizer state"] == 2 * SMALL + 4 * 4  # two averages, and the numbers of steps
    assert held(small)["gradients"] == held(small)["weights"] == SMALL
    if profiler.HAS_MESSAGE_HOOKS:
        assert held(small)["communication buffers"] == SMALL  # DDP's buckets are a second copy of the gradients
        padded = 4 * N * -(-WEIGHTS // N)
        assert zero["gradients"] == padded + padded // N  # all, and this rank's averages
        assert zero["communication buffers"] == padded  # gloo's copy of them
        sent = [held(*program_of("mnist_pipeline"), rank=rank)["communication buffers"] for rank in range(N)]
        most = [2 * CUT_1, 2 * (CUT_1 + CUT_2), 2 * CUT_2]  # two micro-batches', if one waits; on torch 2.15 less
        assert all(0 < has <= limit for has, limit in zip(sent, most, strict=True))  # not what is allocated later
    # Activations: images; of each convolution its output, ReLU's, the pool's places (int64) and output; small ones.
    floats = 1 + (16 + 16) + (2 * 16 + 16) / 4 + (32 + 32) / 4 + (2 * 32 + 32) / 16
    pick = max if profiler.HAS_MESSAGE_HOOKS else min  # torch 2.4: now and then a rank has a copy more
    activations = pick(held(variant, "variants.mnist_by_hand", rank=rank)["activations"] for rank in range(N))
    assert 1 < activations / (4 * BATCH // N * SIDE**2 * floats) < (1.02 if profiler.HAS_MESSAGE_HOOKS else 1.3)


def test_what_is_noted_of_memory_is_not_in_torchs_trace():
    recorder, layer = record.Recorder(Place(0, 1), STEPS), nn.Linear(4, 2)
    with torch.profiler.profile() as profiler:
        recorder.note_memory("weights", layer.parameters())
    assert not profiler.events() and len(recorder.noted.tensors[0][1]) == 2


def test_the_kinds_of_memory_add_up_to_torchs_total():
    found, trace = recorded(small)
    allocations = [part for part in found[0]["memory"] if part.born > 0]
    begin = trace.get("baseTimeNanoseconds", 0)
    traced = [(begin + round(1000 * e["ts"]), e["args"]) for e in trace["traceEvents"] if e["name"] == "[memory]"]
    traced.sort(key=lambda event: event[0])
    for when, event in traced[:: len(traced) // 50]:
        mine = sum(one.bytes for one in allocations if one.born <= when < one.freed)
        before = next(event["Total Allocated"] - event["Bytes"] for _, event in traced)
        unknown = sum(e["Bytes"] for t, e in traced if t <= when) - mine  # what is older than the recording was freed
        assert before + mine + unknown == event["Total Allocated"] and unknown <= 0


# -------------------------------------------------------------------------------------------------- what is said


def test_no_message_ends_after_the_wait_for_it():
    """Gloo's thread may note an end late; no program does so each time."""

    def ends(*messages):
        return [message.end for message in waits.ended(messages, waited, [0])]

    late = Message("allreduce", issued=12, begin=12, end=35)
    waited = [Span("waiting", 20, 30), Span("waiting", 40, 45)]
    later = Message("allreduce", issued=28, begin=33, end=50)
    assert ends(late, later) == [30, 45], "each alone was issued before its wait"
    later = Message("allreduce", issued=13, begin=13, end=50)
    assert ends(late, later) == [35, 45], "none ends after the step's last wait"
    waited = [Span("waiting", 2, 9)]
    assert ends(late) == [35], "it is waited for in another step, or not at all"


def test_the_steps_in_which_workers_start_are_noted():
    for options, starts in (
        ({}, []),
        ({"num_workers": 1}, [0, 0]),
        ({"num_workers": 1, "persistent_workers": True}, [0]),
    ):
        recorder = record.Recorder(Place(0, 1), STEPS)
        loader = torch.utils.data.DataLoader(range(4), **options)
        with Hooks([recorder]).installed():
            assert [*loader, *loader]
        assert recorder.noted.worker_starts == starts


def test_the_time_without_a_core_is_noted_in_the_recorded_steps_at_most_once_in_a_millisecond():
    for one in recordings(small):
        times = [wait.time for wait in one["core_waits"]]
        assert one["cuts"][one["first"] - 1] < times[0] and times[-1] > one["cuts"][one["last"]]
        assert all(later - earlier > 1_000_000 for earlier, later in zip(times, times[1:], strict=False))
        totals = [wait.total for wait in one["core_waits"]]
        assert totals == sorted(totals)


def test_each_step_puts_off_the_timeout():
    hooks = Hooks(record.observers(Place(0, 1), STEPS))
    hooks.last_step = 0.0
    with hooks.installed():
        torch.optim.SGD([torch.ones(1)], 0.1).step()
    assert hooks.last_step > 0


def test_the_step_nearest_to_the_median_is_drawn_also_if_it_is_the_last():
    found = recordings(small)
    for one in found:
        steps = range(one["first"], one["last"] + 2)
        for step, at in zip(steps, (0, 10, 40, 100, 120), strict=True):  # they last 10, 30, 60, 20, and on rank 2 more
            one["cuts"][step] = one["cuts"][one["first"]] + at + (at == 120) * one["rank"]
    table = table_of(found)
    assert table.lengths == [10, 30, 60, 22], "the rank's where it took longest"
    assert step_to_draw(table, 1, []) == (found[0]["last"], 1)


def test_the_length_of_a_step_to_draw_is_that_of_all_ranks():
    """Rank 2 begins and ends its second step late: each rank takes 20 for it, but all together take 70."""
    found = recordings(small)
    start = found[0]["cuts"][found[0]["first"]]
    for one in found:
        times = (0, 60, 80, 81, 100) if one["rank"] == 2 else (0, 10, 30, 70, 100)
        steps = range(one["first"], one["last"] + 2)
        for step, at in zip(steps, times, strict=True):
            one["cuts"][step] = start + at
    table = table_of(found)
    assert table.lengths == [10, 20, 40, 30]
    assert step_to_draw(table, 1, []) == (table.first + 2, 1), "of 60, 70, 51 and 30 the lower median"


def test_time_that_is_waited_for_two_messages_counts_once():
    what = "allreduce", "", None, None, 4, 0
    messages = [Message(*what, 1, 0, 0, 60, 90), Message(*what, 2, 0, 30, 80, 90)]
    assert waits_for([Span("waiting", 0, 100)], messages) == {1: 60, 2: 20, None: 20}


def test_clocks_of_other_machines_are_aligned():
    plain, shifted, shift = recordings(small), recordings(small), 5 * 10**9
    other = shifted[2]
    other["machine"], other["cuts"] = "another", [cut + shift for cut in other["cuts"]]
    other["lane"] = [span.earlier(-shift) for span in other["lane"]]
    other["memory"] = [Block(one.kind, one.bytes, one.born + shift, one.freed + shift) for one in other["memory"]]
    other["messages"] = [message.earlier(-shift) for message in other["messages"]]
    other["trace"] = [event | {"begin": event["begin"] + shift} for event in other["trace"]]
    text = said(picture_of(shifted, options())[0])["clocks"]
    other = table_of(shifted).recordings[2]
    found = re.fullmatch(r"rank 2's clock was ([\d.]+) ms ahead of rank 0's.*give or take ([\d.]+) ms", text)
    ahead, uncertain = map(float, found.groups())

    def times(one):
        born = [part.born for part in one["memory"] if part.born > 0]
        begins = [message.begin for message in one["messages"]] + [event["begin"] for event in one["trace"]]
        return [*one["cuts"], *(span[1] for span in one["lane"]), *born, *begins]

    gaps = {abs(a - b) for a, b in zip(times(other), times(plain[2]), strict=True)}
    (gap,) = (gap / 1e6 for gap in gaps)  # the same for all
    assert gap == pytest.approx(abs(ahead - 5000), abs=0.06)  # rounded
    ends = [[m.end for m in one["messages"]] for one in (plain[0], plain[2])]
    spread = sorted(abs(a - b) / 1e6 for a, b in zip(*ends, strict=True))
    assert gap <= spread[-1] + 0.1 and uncertain <= 2 * spread[-1] + 0.1


# ------------------------------------------------------------------------------------------------- drawing, files


def test_the_trace_is_torchs_own_of_each_rank_on_one_clock():
    shown = picture(small)
    assert min(rank["cuts"][0] for rank in shown["ranks"]) == 0, "the picture's left end"
    trace = json.loads(json.dumps(trace_of(shown)))
    processes = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMsf" and isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
    for rank in range(N):
        mine = {pid for pid, name in processes.items() if name.startswith(f"rank {rank}")}
        spans = [event for event in trace["traceEvents"] if event["pid"] in mine and event["ph"] == "X"]
        assert all(-1 <= event["ts"] * 1000 <= 1.001 * shown["end"] for event in spans)
        names = Counter(event["name"] for event in spans)
        assert names["gloo:all_reduce"] == 3 and names["Optimizer.step#Adam.step"] == 1
        parts = shown["ranks"][rank]["parts"]
        own = [event for event in spans if event.get("cat") == "timeline"]
        assert [event["name"] for event in own] == [part.what for part in parts]
        assert sum(event["dur"] for event in own) == pytest.approx(sum(part.length for part in parts) / 1000)
        step, phase = (next(e for e in spans if e["name"] == n) for n in ("Optimizer.step#Adam.step", "optimizer"))
        assert step["ts"] <= phase["ts"] + 1 and phase["ts"] + phase["dur"] <= step["ts"] + step["dur"] + 1


def test_the_picture_is_whole_and_small():
    pictures = [picture(small), picture(variant, "variants.mnist_by_hand", shown=2)]
    shown = re.search("drawn: steps ([0-9]+) to ([0-9]+), ", said(pictures[1])["step"])
    assert int(shown[2]) == int(shown[1]) + 1
    pictures[0]["command"] += " \a\udc80"  # a flag may hold anything
    svg = draw.draw(pictures)
    root = ElementTree.fromstring(svg.encode())
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert {"title", "desc", "text", "path"} <= tags and not tags & {"script", "image", "use"}
    assert re.findall(r"(?:https?:|url\()[^\s\"')]*", svg) == [
        "http://www.w3.org/2000/svg",
        "url(#hatch",
        "url(#idle",
        "url(#head",
    ]
    assert len(svg) <= 60_000 and int(root.get("width")) <= 900
    assert svg.count(":var(") == len(re.findall(r"([\w-]+):#[0-9a-f]+;\1:var\(", svg)), "viewers that know no var()"
    drawn = {name for names in re.findall(r'<(?:path|text) class="([^"]*)"', svg) for name in names.split()}
    assert {"page", "f", "b", "o", "w", "m", "v"} <= drawn <= {*re.findall(r"\.(\w+)\{", svg)}
    words = " ".join(element.text or "" for element in root.iter() if element.tag.endswith("text"))
    assert words.count("rank 0") == 2 and "one step: " in words and "2 steps: " in words
    assert [line.split(":")[0] for line in root[1].text.split(". ")].count("memory") == 2
    assert "memory weights optimizer state gradients" in words  # the legend


def test_arrows_lie_beneath_the_labels_of_messages():
    shown = picture(small)
    shown["arrows"] = [{"from": 0, "to": 2, "begin": 0, "end": shown["end"]}]
    drawn = [element.get("class") for element in ElementTree.fromstring(draw.draw([shown]).encode())]
    assert "arrow" in drawn and drawn.index("arrow") < drawn.index("soft small over")


@pytest.mark.slow
def test_no_text_is_over_another(tmp_path):
    programs = (small,), (variant, "variants.mnist_overlap"), (variant, "variants.mnist_zero")
    (tmp_path / "three.svg").write_text(draw.draw([picture(*program) for program in programs]))
    with chromium() as page:
        page.get(f"file://{tmp_path}/three.svg")
        boxes = page.execute_script(
            "return [...document.querySelectorAll('text')]"
            ".map(text => [text.textContent, text.getBoundingClientRect().toJSON()])"
        )
    assert len(boxes) > 60
    for place, (text, a) in enumerate(boxes):
        assert a["left"] >= 0 and a["right"] <= draw.WIDTH, text
        for other, b in boxes[:place]:
            across = min(a["right"], b["right"]) - max(a["left"], b["left"])
            assert across <= 0 or min(a["bottom"], b["bottom"]) - max(a["top"], b["top"]) <= 3, (text, other)


PROGRAM = """
import os, signal, sys, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(int(sys.argv[1])):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("made", sys.argv[1:])
if "fail" in sys.argv:
    raise ValueError("as planned")
if "SIG" in sys.argv[-1]:
    os.kill(os.getpid(), getattr(signal, sys.argv[-1]))
    time.sleep(1000)
"""


def program(folder, *flags, options=(), text=PROGRAM, nproc=1, **more):
    (folder / "train.py").write_text(text)
    return forker().run(
        "-m", "ddp_by_diff.timeline", "--nproc", nproc, *options, "train.py", *flags, path=[ROOT], cwd=folder, **more
    )


def test_a_program_that_knows_nothing_of_it(tmp_path):
    done = program(tmp_path, 100, "--out", options=["--steps", 1, "--out", "mine"], nproc=2)
    assert done.code == 0 and " ".join(done.out.split()).count("Does each rank train on its own") == 1
    assert "made" not in done.out  # it was left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "mine.svg", "train.py"]
    spans = json.loads((tmp_path / "mine.json").read_text())["traceEvents"]
    assert len({event["pid"] for event in spans if event.get("cat") == "timeline"}) == 2
    assert "python -m ddp_by_diff.timeline train.py 100 --out" in (tmp_path / "mine.svg").read_text()
    assert max(len(line) for line in done.out.splitlines() if str(tmp_path) not in line) < 80


def test_a_program_that_has_left_its_group(tmp_path):
    script = ROOT / "mnist_ddp.py", "--dataset", "synthetic", "--dry-run"
    done = forker().run("-m", "ddp_by_diff.timeline", *script, path=[ROOT], cwd=tmp_path, before=FEW_DIGITS)
    assert done.code == 1 and "timeline: the program made 1 step;" in done.err and "Traceback" not in done.err, done


DRAWN = "timeline: rank 0 failed; what was recorded before is drawn"


@pytest.mark.parametrize(
    ("flags", "options", "code", "says"),
    [
        ((8,), ["--steps", 4], 0, "of 2 recorded steps"),  # fewer than asked for
        ((5,), ["--steps", 4], 1, "timeline: the program made 5 steps; --steps 4 records from step 7 on"),
        ((0,), [], 1, "timeline: no optimizer of torch.optim made a step"),
        ((3, "fail"), [], 1, "ValueError: as planned"),
        ((8, "SIGINT"), ["--steps", 4], 130, DRAWN),
        ((8, "SIGTERM"), ["--steps", 4], 143, DRAWN),
    ],
)
def test_a_program_with_too_few_steps(flags, options, code, says, tmp_path):
    done = program(tmp_path, *flags, options=options)
    assert done.code == code and says in done.out + done.err, done
    assert (tmp_path / "timeline.svg").exists() == (flags[0] == 8)
    assert "made ['" in done.out and ("Traceback" in done.err) == ("fail" in flags)
    assert "run_program" not in done.err, "the error begins at the program's own line"


def test_a_full_disk_is_one_line_after_what_was_found(tmp_path):
    (tmp_path / "timeline.json").symlink_to("/dev/full")
    done = program(tmp_path, 100, options=["--steps", 1])
    text = f"timeline: {tmp_path}/timeline.json can't be written: No space left on device\n"
    assert done.err.endswith(text) and "Traceback" not in done.err, done
    out = " ".join(done.out.split())
    assert done.code == 1 and "rank 0 forward" in out and f"written {tmp_path}/timeline.svg" in out


def test_a_reader_that_leaves_early_ends_nothing(tmp_path):
    before = "import os; reads, writes = os.pipe(); os.close(reads); os.dup2(writes, 1)"
    done = program(tmp_path, 100, options=["--steps", 1], before=before)
    assert "Traceback" not in done.err and "BrokenPipe" not in done.err, done
    assert (tmp_path / "timeline.json").exists()


@pytest.mark.parametrize(
    ("options", "variables", "says"),
    [
        (["--nproc", 0], {}, "nproc (or NPROC) is 0"),
        ([], {"RANK": "0", "WORLD_SIZE": "1"}, "timeline: error: set MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_processes_that_cannot_start_are_one_line(options, variables, says, tmp_path):
    """Bad flags: test_flags.py."""
    (tmp_path / "train.py").touch()
    command = "-m", "ddp_by_diff.timeline", *options, "train.py"
    done = forker().run(*command, path=[ROOT], cwd=tmp_path, **variables)
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1, done
