"""equivalence/: what it says of programs whose truth is known, with two processes and three."""

import os
import re
import signal
from typing import NamedTuple

import pytest
import torch
from world import ROOT, forker, processes_in, shell, wait_for

from demos.ways import WAYS
from equivalence import batches, limits

pytestmark = pytest.mark.timeout(240)

SAME = "THE SAME as one process, up to rounding; a difference above 1e-05 would have been seen"
DIFFERENT = "DIFFERENT from one process in: "
BATCH = "DIFFERENT from one process: the loss, or a layer, depends on which examples are in a batch together"
NORM = "THE SAME, but for BatchNorm: each process normalises its own share; else a difference above 1e-05 .*"
DROPOUT = "THE SAME, but for dropout, which draws other numbers in each process; else a difference above .*"
OWN = "each rank's optimizer gets the gradients of its own share"


def answer(*command, nproc=2, cwd=None, options=(), code=None, **more):
    """Its exit code, and its lines by label; a longer line is one."""
    if nproc:
        options = ("--nproc", nproc, *options)
    done = forker().run(ROOT / "equivalence", *options, *command, cwd=cwd, COLUMNS=10000, **more)
    lines = {}
    for line in done.out.splitlines():
        lines.setdefault(line[:13].strip(), line[14:])
    assert code in (None, done.code), done
    assert "Traceback" not in done.err or done.code == 2, done.err
    return done.code, lines, done.err


# ------------------------------------------------------------------------------ one template, many programs

TEMPLATE = """
import os, random, sys, time, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
import torch.distributed as dist

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
SIZE = 24 // n

def average(tensors, times=1.0):
    for tensor in tensors:
        dist.all_reduce(tensor.grad)
        tensor.grad *= times / n

torch.manual_seed(0)
data = TensorDataset(torch.randn(480, 8), torch.randint(4, (480,)))
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
RATE = 0.1
#BEGIN
sampler = DistributedSampler(data)
loader = DataLoader(data, SIZE, sampler=sampler)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), RATE)
#READY
for epoch in range(3):
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        #LOSS
        optimizer.zero_grad()
        loss.backward()
        #GOT
        optimizer.step()
        #STEPPED
torch.save(net.state_dict(), f"weights{rank}.pt")
"""
BY_HAND = ("model = nn.parallel.DistributedDataParallel(net)", "model = net")
CLIP = "nn.utils.clip_grad_norm_(net.parameters(), 1e-3)"
CLAMP = "[p.grad.clamp_(-1e-4, 1e-4) for p in net.parameters()]"  # so that the norm is no longer what was clipped
CONTRAST = ("F.cross_entropy(model(x), y)", "contrast(x)")
DRAWN = "loader = [(torch.randn(SIZE, 8), torch.randint(4, (SIZE,))) for _ in range(20)]"


CODES = {"THE SAME": 0, "AVERAGING RIGHT": 0, "DIFFERENT": 1, "NOT FOUND OUT": 2}


class Case(NamedTuple):
    verdict: str  # a pattern, as in `lines`
    lines: dict = {}  # noqa: RUF012  by label
    changes: tuple = ()  # (part of the template, what stands there instead)
    nproc: int = 3
    options: tuple = ()


def begin(*lines):
    return ("#BEGIN", "\n".join(lines))


def inside(place, *lines):
    return (f"#{place}", "\n        ".join(lines))


def contrast(gather):
    loss = f"""
from torch.distributed.nn.functional import all_gather  # torch 2.4 makes a folder for it
def contrast(x):
    parts = []
    for part in model(torch.cat([x, x.roll(1, 1)])).chunk(2):
        part = part.contiguous()
        {gather}
        parts.append(part)
    return F.cross_entropy(parts[0] @ parts[1].T, torch.arange(len(parts[0])))
for epoch in range(3):"""
    return ("for epoch in range(3):", loss)


def averages(text):
    return inside("GOT", text)


CASES = {
    "right": Case(SAME, {"weights": "right: .*", "one batch": "right: .* all 24 examples in one batch .*"}),
    "closure": Case(  # and a program without an end that catches everything
        SAME,
        changes=(
            BY_HAND,
            ("range(3)", "range(10**9)"),
            ("        loss = F", "        def closure():\n            optimizer.zero_grad(); loss = F"),
            ("        optimizer.zero_grad()\n        loss.backward()", "            loss.backward()"),
            inside("GOT", "    average(net.parameters()); return loss", "try:"),
            ("optimizer.step()", "    optimizer.step(closure)\n        except Exception: pass"),
        ),
    ),
    # ---- link 1: averaging
    "sum_then_clip": Case(
        DIFFERENT + "averaging",
        {"averaging": "WRONG: 3 times one process's gradients: summed, not averaged"},
        (BY_HAND, averages(f"average(net.parameters(), n); {CLIP}; {CLAMP}")),
    ),
    "average_then_clip": Case(
        SAME,
        {"averaging": "right: the optimizers get the mean of the ranks' gradients, changed as in one process .*"},
        (BY_HAND, averages(f"average(net.parameters()); {CLIP}; {CLAMP}")),
    ),
    "clip_then_sum": Case(
        DIFFERENT + "averaging",
        {"averaging": "WRONG: .* times one process's gradients"},
        (BY_HAND, averages(f"average(net.parameters()); {CLIP}; [p.grad.mul_(n) for p in net.parameters()]")),
    ),
    "forgotten_layer_and_clip": Case(
        DIFFERENT + "copies, averaging",
        {
            "averaging": f"WRONG: {OWN} of 2.weight, 2.bias .the other 2 of 4 tensors are right.: nobody averages them",
            "copies": "the ranks' weights differ after step 1: .*",
        },
        (BY_HAND, averages(f"average(net[0].parameters()); {CLIP}")),
    ),
    "lost": Case(
        DIFFERENT + "averaging",
        {"averaging": "WRONG: rank 1's and rank 2's examples don't count in the gradients"},
        (BY_HAND, averages("for p in net.parameters(): dist.broadcast(p.grad, 0)")),
    ),
    "first_pass": Case(
        DIFFERENT + "copies, averaging",
        {"averaging": "WRONG: the ranks' gradients differ, and only their mean is right: .*no_sync is set too late.*"},
        (
            averages("model.require_backward_grad_sync = False"),
            inside("LOSS", "model.require_backward_grad_sync = True"),
            (
                "loss.backward()",
                "loss.backward(); model.require_backward_grad_sync = False; F.cross_entropy(model(-x), y).backward()",
            ),
        ),
    ),
    "bfloat16": Case(
        "THE SAME as one process, up to rounding; a difference above 8e-03 would have been seen",
        {"averaging": "right: .* rounded on the way to bfloat16 .apart by .*; up to 8e-03 is rounding."},
        (
            BY_HAND,
            averages("for p in net.parameters(): p.grad = p.grad.bfloat16().float()"),
            ("optimizer.step()", "average(net.parameters()); optimizer.step()"),
        ),
    ),
    "two_of_each": Case(  # two optimizers, and two loaders: all ranks have the second one's examples
        DIFFERENT + "examples, copies, averaging",
        {
            "examples": ".*; 24 of 24 in 3 steps are on more than one rank: give each its share .*",
            "averaging": f"WRONG: {OWN} of Linear 2: weight, Linear 2: bias .*",
        },
        (
            begin("more = iter(DataLoader(TensorDataset(data.tensors[0] + 9), 8))"),
            ("#READY", "other = nn.Linear(8, 4); second = torch.optim.Adam(other.parameters())"),
            inside("LOSS", "(u,) = next(more)"),
            inside("STEPPED", "second.zero_grad(); F.cross_entropy(other(x), y).backward(); second.step()"),
        ),
    ),
    "changed": Case(  # as one process changes them; and a data set that makes batches itself
        SAME,
        {"averaging": "right: the optimizers get the mean of the ranks' gradients, changed as in one process .*"},
        (
            averages("for p in net.parameters(): p.grad.clamp_(-0.01, 0.01)"),
            begin(
                "class Whole(TensorDataset):",
                "    def __getitems__(self, rows): return self[rows]",
                "data = Whole(*data.tensors)",
            ),
            ("sampler=sampler)", "sampler=sampler, collate_fn=tuple)"),
        ),
    ),
    # ---- link 2: one batch
    "norm": Case(NORM, changes=(begin("net.insert(1, nn.BatchNorm1d(32))"),)),
    "frozen_norm": Case(  # dropout is the cause
        DROPOUT,
        changes=(
            begin("net.insert(1, nn.BatchNorm1d(32)); net.append(nn.Dropout(0.5)); torch.manual_seed(rank)"),
            ("loss =", "net[1].eval(); loss ="),
        ),
    ),
    "contrastive": Case(SAME, changes=(CONTRAST, contrast("part = torch.cat(all_gather(part))"))),
    "contrastive_without_gradient": Case(
        DIFFERENT + "averaging",
        {"averaging": "WRONG: 1/3 of one process's gradients: .* looks at all ranks' outputs.*"},
        (
            contrast(
                "all = [0] * n; dist.all_gather_object(all, part.detach()); all[rank] = part; part = torch.cat(all)"
            ),
            CONTRAST,
        ),
    ),
    "contrastive_of_each": Case(
        BATCH,
        {"averaging": "right: .*", "one batch": "different from all 24 in one batch .*"},
        (contrast("pass"), CONTRAST),
    ),
    "noise": Case(
        "NOT FOUND OUT: one batch: each step draws random numbers, and one process draws others",
        {"averaging": "right: .*", "weights": "right: .*", "one batch": "not found out: .*"},
        (("model(x)", "model(x + torch.randn_like(x))"), ("#READY", "torch.manual_seed(rank)")),
    ),
    "time_first": Case(  # (time, batch): the ranks' rows can't be joined
        "NOT FOUND OUT: one batch: rounding, or another order of the same examples, moves a gradient by .*",
        {"averaging": "right: .*", "weights": "right: .*"},
        (
            begin("net = nn.GRU(8, 4)", "torch.manual_seed(rank)"),
            ("sampler = DistributedSampler(data)\n", DRAWN.replace("SIZE, 8", "5, SIZE, 8") + "\n"),
            ("loader = DataLoader(data, SIZE, sampler=sampler)\n", ""),
            ("F.cross_entropy(model(x), y)", "model(x)[0][-1].square().mean()"),
        ),
    ),
    "own_collate": Case(  # pads with ones: the union is made by it
        SAME,
        changes=(
            begin(
                "def collate(items):",
                "    most = max(1 + int(y) for _, y in items)",
                "    rows = [F.pad(x[:1 + int(y)], (0, most - 1 - int(y)), value=1.0) for x, y in items]",
                "    return torch.stack(rows), torch.stack([y for _, y in items])",
                "def model(x):",
                "    x = F.pad(x, (0, 8 - x.shape[1]), value=1.0)",
                "    return wrapped(torch.where(torch.arange(8) < 4, x, 0))",
            ),
            ("sampler=sampler)", "sampler=sampler, collate_fn=collate, num_workers=1)"),
            ("model = nn.parallel", "wrapped = nn.parallel"),
        ),
    ),
    "skipped": Case(  # float16, whose first steps overflow
        "THE SAME as one process, up to rounding; .*",
        {"averaging": "right: the optimizers get the mean of the ranks' gradients .apart .*"},
        changes=(
            ("#READY", "scaler = torch.amp.GradScaler('cpu', init_scale=3e38)"),
            ("loss.backward()", "scaler.scale(loss).backward()"),
            ("optimizer.step()", "scaler.step(optimizer); scaler.update()"),
        ),
    ),
    "ragged": Case(  # a model that sees how a batch is padded
        "NOT FOUND OUT: one batch: examples have different shapes: how a batch is padded may be what differs",
        {"averaging": "right: .*", "weights": "right: .*"},
        (
            begin(
                "from torch.nn.utils.rnn import pad_sequence",
                "lengths = [1 + k * k % 8 for k in range(480)]",
                "items = [(x[:length], y) for (x, y), length in zip(data, lengths)]",
                "def collate(pairs):",
                "    return pad_sequence([x for x, _ in pairs], True), torch.stack([y for _, y in pairs])",
            ),
            ("sampler=sampler)", "sampler=sampler, collate_fn=collate)"),
            ("DataLoader(data", "DataLoader(items"),
            ("model(x)", "model(F.pad(x, (0, 8 - x.shape[1])) * x.shape[1])"),
            ("SIZE = 24 // n", "SIZE = 6 // n"),
        ),
    ),
    "slices": Case(  # of a global batch that each rank has
        SAME,
        {"examples": "24 [+] 24 [+] 24 in a step: of the same batch each rank takes its part"},
        (
            ("sampler = DistributedSampler(data)\n", ""),
            ("loader = DataLoader(data, SIZE, sampler=sampler)", "loader = DataLoader(data, 24)"),
            ("loss = F", "x, y = x[rank::n], y[rank::n]; loss = F"),
        ),
    ),
    "no_loader": Case(  # and its targets are not seen: one process has the same examples, in its own order
        SAME,
        {"examples": "8 [+] 8 [+] 8 in a step, none on two ranks in 3 steps .of an epoch not seen."},
        (
            ("sampler = DistributedSampler(data)\n", ""),
            ("loader = DataLoader(data, SIZE, sampler=sampler)", "loader = [(data[k][0][rank::n], 0) for k in BLOCKS]"),
            begin("BLOCKS = [slice(24 * k, 24 * k + 24) for k in range(20)]"),
            ("F.cross_entropy(model(x), y)", "(model(x) - x[:, :4].sin()).square().mean()"),
        ),
    ),
    "objects": Case(  # of the program's own classes; one process alone draws others
        SAME,
        {"examples": r"8 \+ 8 \+ 8 in a step, none on two ranks in 3 steps .of an epoch not seen."},
        (
            begin(
                "import dataclasses, typing",
                "class Pair(typing.NamedTuple): x: object; same: object",
                "@dataclasses.dataclass(frozen=True)",
                "class Batch: pair: object; more: dict; function: object",
                "def sum_of(batch): return batch.pair.x + torch.from_numpy(batch.pair.same) + batch.more['x'][0]",
                "class Net(nn.Sequential):",
                "    def forward(self, batch): return super().forward(sum_of(batch)) - batch.pair.x[:, :4].sin()",
                "def batch(x): return Batch(Pair(x, x.numpy()), {'x': [x], 'names': ['a']}, lambda: x)",
                "torch.manual_seed(rank)",
                "net, batches = Net(*net), [(batch(x), 0) for x in torch.randn(20, SIZE, 8)]",
            ),
            ("loader = DataLoader(data, SIZE, sampler=sampler)", "loader = batches"),
            ("F.cross_entropy(model(x), y)", "model(x).square().mean()"),
        ),
    ),
    # ---- link 3: weights
    "copies_and_norm": Case(  # weights are compared without BatchNorm, as one process has other gradients with it
        NORM.replace("1e-05", ".*"),
        {"averaging": "seen in the weights only: .*", "weights": "right: .*"},
        (
            begin("net.insert(1, nn.BatchNorm1d(32))"),
            (
                "#READY",
                "owned = [p.detach().clone() for p in net.parameters()]; optimizer = torch.optim.SGD(owned, 0.1)",
            ),
            inside("GOT", "for one, p in zip(owned, net.parameters()): one.grad = p.grad.clone()"),
            inside("STEPPED", "for one, p in zip(owned, net.parameters()): p.data.copy_(one)"),
            ("optimizer.zero_grad()", "net.zero_grad()"),
        ),
    ),
    "averaged_weights": Case(  # after a step that is linear in the gradients
        "THE SAME as one process, .*",
        {"averaging": OWN + ": .*; the weights are averaged after the step, which is the same"},
        (BY_HAND, inside("STEPPED", "for p in net.parameters(): dist.all_reduce(p.data); p.data /= n")),
    ),
    "warm_up": Case(  # each rank has data of its own
        SAME,
        {
            "weights": "right: .*; not in step 1, where nothing changes",
            "examples": r"8 \+ 8 \+ 8 in a step, none on two ranks in 3 steps .of an epoch not seen.",
        },
        (
            begin("data = TensorDataset(*(one[rank::n] for one in data.tensors))"),
            ("sampler=sampler", "shuffle=True"),
            ("RATE = 0.1", "RATE = 0.0"),
            inside("STEPPED", "optimizer.param_groups[0]['lr'] += 0.01"),
        ),
    ),
    "decay": Case(  # in a warm-up
        DIFFERENT + "options, weights",
        {"options": "weight_decay of 0.weight is 0.3 with 3 processes, 0.1 with one, in step 1"},
        (
            ("net.parameters(), RATE", "net.parameters(), RATE, weight_decay=0.1 * n"),
            ("RATE = 0.1", "RATE = 0.0"),
            inside("STEPPED", "optimizer.param_groups[0]['lr'] += 0.01"),
        ),
    ),
    "rates_of_ranks": Case(
        DIFFERENT + "copies, learning rate, weights",
        {"learning rate": "lr is 0.1 on rank 0, 0.2 on rank 1, of 0.weight, in step 1"},
        (("RATE = 0.1", "RATE = 0.1 + 0.1 * (rank == 1)"),),
    ),
    "schedule": Case(  # with a batch per rank: it counts an epoch's steps
        "NOT FOUND OUT: learning rate: .*; alone it takes 8 examples in a step, with all 24, .*",
        {"learning rate": '.* its schedule may count steps: give --alone="--size 24"'},
        (
            begin("SIZE = int(sys.argv[-1])"),
            inside(
                "STEPPED",
                "optimizer.param_groups[0]['lr'] = 0.1 / (1 + epoch * len(loader) + step) * 480 / len(loader)",
            ),
        ),
    ),
    "shared_optimizers": Case(  # each rank's has every n-th parameter, and sends it to the others
        SAME,
        {"averaging": "right: .*", "weights": "right: .*"},
        (
            ("#READY", "optimizer = torch.optim.Adam([*net.parameters()][rank::n])"),
            ("optimizer.zero_grad()", "net.zero_grad()"),
            inside("STEPPED", "for k, p in enumerate(net.parameters()): dist.broadcast(p.data, k % n)"),
        ),
    ),
    # ---- what the ranks' own notes say
    "teacher": Case(  # only rank 0's learns
        DIFFERENT + "copies",
        {"copies": "the ranks' weights differ after step 1: Sequential 2: 0.weight, .*"},
        (
            ("#READY", "import copy; teacher = copy.deepcopy(net).requires_grad_(False); teacher[0].weight *= 2"),
            ("loss = F.cross_entropy(model(x), y)", "loss = F.mse_loss(model(x), teacher(x))"),
            inside(
                "STEPPED",
                "if rank == 0: [p.lerp_(q.data, 0.5) for p, q in zip(teacher.parameters(), net.parameters())]",
            ),
        ),
    ),
    "parts": Case(  # the first layer's columns
        SAME,
        {"examples": "24 in a step, the same on all 3 ranks, which share one model", "gradients": "right: .*"},
        (
            begin(
                "from torch.distributed.nn.functional import all_reduce",
                "class Part(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                "        first, last = nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False)",
                "        parts = first.weight.chunk(n)[rank], last.weight.chunk(n, 1)[rank]",
                "        self.a, self.b = (nn.Parameter(part.clone()) for part in parts)",
                "    def forward(self, x): return all_reduce((x @ self.a.T).tanh() @ self.b.T)",
                "net = Part(); SIZE = 24",
            ),
            BY_HAND,
            ("DistributedSampler(data)", "DistributedSampler(data, num_replicas=1, rank=0)"),
            ("loss.backward()", "(loss / n).backward()"),
        ),
    ),
    "copies": Case(
        DIFFERENT + "copies",
        {"copies": "the ranks' weights differ from the start: 0.bias", "weights": "right: .*"},
        (BY_HAND, averages("average(net.parameters())"), begin("net[0].bias.data += rank")),
    ),
    "same_examples": Case(
        DIFFERENT + "examples",
        {"examples": ".*: all 3 ranks have the same, and do the same work 3 times: give each its share .*"},
        (("DistributedSampler(data)", "DistributedSampler(data, num_replicas=1, rank=0)"),),
    ),
    "own_order": Case(  # of all examples
        DIFFERENT + "examples",
        {"examples": ".* in 3 steps are on more than one rank: give each its share .*"},
        (
            ("#READY", "torch.manual_seed(rank)"),
            ("SIZE, sampler=sampler", "SIZE, sampler=Mine()"),
            begin(
                "data = TensorDataset(*data[:40])",
                "class Mine:",
                "    def __iter__(self): return iter(random.Random(rank).sample(range(40), 40))",
                "    def __len__(self): return 40",
            ),
        ),
    ),
    "split": Case(
        DIFFERENT + "examples",
        {"examples": r".* In an epoch \d+ of \d+ come on more than one rank: give each its share .*"},
        (begin("torch.manual_seed(rank); data = torch.utils.data.random_split(data, [400, 80])[0]"),),
    ),
    "stream": Case(
        "NOT FOUND OUT: examples: some may be on more than one rank",
        {"examples": ".* are on more than one rank .if the data have no equal examples."},
        (
            begin(
                "class Stream(IterableDataset):",
                "    def __iter__(self): return (data[(k + 4 * rank) % 480] for k in range(480))",
            ),
            ("DataLoader(data, SIZE, sampler=sampler)", "DataLoader(Stream(), SIZE)"),
        ),
    ),
    "buffers": Case(
        r"THE SAME as one process, up to rounding .but for buffers.; a difference above .*",
        {"buffers": "usual don't change as in one process .*"},
        (
            begin("net.register_buffer('usual', torch.zeros(8))"),
            inside("STEPPED", "net.usual.lerp_(x.mean(0), 0.1)"),
            (
                "nn.parallel.DistributedDataParallel(net)",
                "nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)",
            ),
        ),
    ),
    # ---- what is not found out, and what was measured all the same
    "NaN": Case(
        "NOT FOUND OUT: gradients: infinite or NaN in step 1 on rank 0",
        changes=(inside("LOSS", "loss = loss * float('nan')"),),
    ),
    "few": Case(
        "NOT FOUND OUT: .* 4 steps of an optimizer .rank 0: 3, rank 1: 3, rank 2: 3.: .* fewer --steps",
        changes=(inside("STEPPED", "if step == 2: break"), ("range(3)", "range(1)")),
    ),
    "fails_alone": Case(
        "NOT FOUND OUT: one batch, weights: the program failed in one process",
        {"averaging": "right: .*"},
        (inside("LOSS", "if n == 1: raise ValueError('not alone')"),),
    ),
    "begun_again": Case(  # the iterator that is at its end still lives when the next one begins
        SAME,
        changes=(
            begin("data = TensorDataset(*(one[:48] for one in data.tensors))"),
            (
                "for epoch in range(3):\n    for step, (x, y) in enumerate(loader):",
                "batches = iter(loader)\nfor epoch in range(8):\n    for step in range(1):\n"
                "        try:\n            x, y = next(batches)\n        except StopIteration:\n"
                "            batches = iter(loader)\n            x, y = next(batches)",
            ),
        ),
    ),
    # ---- what can't be seen
    "waits_alone": Case(
        "NOT FOUND OUT: one batch, weights: in one process the program waits for 3: give .* --alone=.*",
        {"averaging": "right: .*"},
        (('init_process_group("gloo")', 'init_process_group("gloo", world_size=3, rank=int(os.environ["RANK"]))'),),
    ),
    "fsdp1": Case(
        "NOT FOUND OUT: averaging, one batch, weights: the ranks have parts of .* .FSDP1. Use fully_shard.",
        changes=(
            begin("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP"),
            ("nn.parallel.DistributedDataParallel(net)", "FSDP(net, device_id=torch.device('cpu'))"),
            ("SGD(net", "SGD(model"),
        ),
    ),
    "another_thread": Case(
        "NOT FOUND OUT: no optimizer of torch.optim made a step that was seen. Steps inside .*, in another thread, .*",
        changes=(
            begin("import threading"),
            ("optimizer.step()", "t = threading.Thread(target=optimizer.step); t.start(); t.join()"),
        ),
    ),
    # ---- one question only
    "only": Case(
        "AVERAGING RIGHT: .*; a difference above 2e-06 would have been seen",
        {"note": "whether one process computes the same .one batch, weights. was not asked"},
        (inside("LOSS", "if n == 1: raise ValueError('not alone')"),),
        options=("--only", "averaging"),
    ),
    "only_sum": Case(
        "DIFFERENT from ranks that train one model with the mean of their gradients in: averaging",
        {"averaging": "the optimizers get 3 times the mean of the ranks' gradients"},
        (BY_HAND, averages("average(net.parameters(), n)")),
        options=("--only", "averaging"),
    ),
}
QUICK = ["right", "sum_then_clip", "forgotten_layer_and_clip", "norm", "noise", "objects", "decay", "own_order", "only"]
QUICK += ["closure"]


def program(changes):
    text = TEMPLATE
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CASES])
def test_programs(name, tmp_path):
    case = CASES[name]
    (tmp_path / "train.py").write_text(program(case.changes))
    flags = ("--size", 24 // case.nproc) if name == "schedule" else ()
    code, lines, err = answer("train.py", *flags, nproc=case.nproc, cwd=tmp_path, options=case.options)
    verdict = lines.get("verdict", "")
    assert re.fullmatch(case.verdict, verdict), (lines, err)
    assert code == next(CODES[words] for words in CODES if verdict.startswith(words))
    for label, text in case.lines.items():
        assert re.fullmatch(text, lines.get(label, "")), (label, lines)


SAYS = {  # of the wrong ways: the verdict, and a line that names the cause
    "sum": ("averaging", "averaging", "WRONG: 3 times one process's gradients: summed, not averaged"),
    "divided_twice": ("averaging", "averaging", "WRONG: 1/3 of one process's .* divided by the number of processes.*"),
    "lr_times_processes": ("learning rate, weights", "learning rate", "0.[23] with 3 processes, 0.1 with one .*"),
    "uneven": ("averaging", "averaging", "WRONG: the shares count .*: the mean of means is not the mean .*"),
    "tokens": ("averaging", "averaging", "WRONG: the shares count .*: the mean of means is not the mean .*"),
    "no_sync": ("copies, averaging", "averaging", f"WRONG: {OWN}: nobody averages them"),
    "dropout_seed": (None, "note", "all ranks draw the same random numbers, .*: seed them differently"),
    "clip": (
        "averaging",
        "averaging",
        "WRONG: clip_grad_norm_ got other gradients on each rank: average them before .*",
    ),
    "forgotten_layer": ("copies, averaging", "averaging", f"WRONG: {OWN} of 2.weight, 2.bias .*: nobody .*"),
}


OTHERWISE_PLAIN = {"divided_twice", "lr_times_processes", "no_sync", "forgotten_layer"}  # the right way is no other


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ways(way):
    code, lines, _ = answer("-m", "demos.ways", way, nproc=3, cwd=ROOT)
    reasons, label, text = SAYS[way]
    assert (code, reasons) == (1, lines["verdict"].removeprefix(DIFFERENT)) or way == "dropout_seed", lines
    assert re.fullmatch(text, lines[label]), lines
    if way not in OTHERWISE_PLAIN:
        _, lines, _ = answer("-m", "demos.ways", way, "--right", nproc=3, cwd=ROOT, code=0)
        assert re.fullmatch(DROPOUT if way == "dropout_seed" else SAME, lines["verdict"]), lines
        assert "seed them differently" not in str(lines)


# -------------------------------------------------------------------------------------- how small a difference

LIMITS = {  # and what the verdict says of more
    "SPREAD": (limits.AVERAGED, "averaging"),
    "LOSS": (limits.ROUNDING * 24**0.5, "averaging"),  # link 2's; a factor is called one of averaging
    "STEP": (limits.UPDATED, "weights"),
}


@pytest.mark.slow
@pytest.mark.parametrize("large", [None, *LIMITS])
def test_ten_times_the_limit_is_found_and_a_third_of_it_is_not(large, tmp_path):
    sizes = {name: limit * (10 if name == large else 1 / 3) for name, (limit, _) in LIMITS.items()}
    changes = [
        BY_HAND,
        begin("RATE = 10.0", *[f"{name} = {size}" for name, size in sizes.items()]),
        inside("LOSS", "loss = loss * (1 + LOSS * (n == 1))"),
        inside("GOT", "average(net.parameters(), 1 + SPREAD * (n > 1))", "old = [p.clone() for p in net.parameters()]"),
        inside("STEPPED", "for p, q in zip(net.parameters(), old): p.data += STEP * (n > 1) * (p.data - q)"),
    ]
    (tmp_path / "train.py").write_text(program(changes))
    _, lines, _ = answer("train.py", nproc=3, cwd=tmp_path, code=0 if large is None else 1)
    assert lines["verdict"] == (SAME if large is None else DIFFERENT + LIMITS[large][1])


@pytest.mark.slow
@pytest.mark.parametrize(("times", "code"), [(10, 1), (1 / 3, 0)])
def test_the_limit_of_bfloat16(times, code, tmp_path):
    loss = f"loss = loss * (1 + {times * limits.MOST_COARSE} * (n == 1))"
    autocast = "F.cross_entropy(torch.autocast('cpu', torch.bfloat16)(model)(x), y)"
    (tmp_path / "train.py").write_text(program([("F.cross_entropy(model(x), y)", autocast), inside("LOSS", loss)]))
    answer("train.py", nproc=3, cwd=tmp_path, code=code)


# ------------------------------------------------------------------------------------------ nothing is touched

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


@pytest.mark.slow
def test_batches_in_advance_micro_batches_that_depend_on_the_processes_and_an_evaluation(tmp_path):
    (tmp_path / "train.py").write_text(MICRO)
    _, lines, _ = answer("train.py", nproc=4, cwd=tmp_path, code=0)
    assert lines["verdict"] == SAME and lines["examples"].startswith("8 + 8 + 8 + 8 in a step, none on two ranks")


ON_ITS_OWN = """
import distributed_launcher as launcher, runpy
def train(): runpy.run_path("train.py", run_name="__main__")
launcher.run(train, nproc=3)
"""
ENDLESS = """
class Endless:
    asked = 0
    generator = torch.Generator().manual_seed(rank)
    def __iter__(self):
        while True:
            Endless.asked += 1
            yield int(torch.randint(160, (), generator=self.generator)) * n + rank
"""


def test_the_program_computes_and_draws_what_it_does_on_its_own(tmp_path):
    """Bit by bit: the weights, and the states of the generators, its sampler's own, too."""
    drawn = "torch.save([torch.get_rng_state(), torch.tensor(random.getstate()[1])], f'drawn{rank}.pt')"
    drawn += "; torch.save(Endless.generator.get_state(), f'own{rank}.pt'); sys.exit()"
    changes = (
        begin(ENDLESS, "net.append(nn.Dropout(0.1)); random.seed(rank)"),
        ("sampler=sampler", "sampler=Endless(), num_workers=1"),
        inside("LOSS", "random.random()"),
        inside("STEPPED", f"if step == 2: {drawn}"),
    )
    (tmp_path / "train.py").write_text(program(changes))
    answer("train.py", nproc=3, cwd=tmp_path, code=2)  # it makes too few steps, so it comes to its end
    noted = {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")}
    (tmp_path / "own.py").write_text(ON_ITS_OWN)
    assert forker().run(tmp_path / "own.py", cwd=tmp_path, path=[ROOT]).code == 0
    assert len(noted) == 6
    assert noted == {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")}


def test_nothing_is_left(tmp_path):
    (tmp_path / "tmp").mkdir()
    child = "import multiprocessing; fork = multiprocessing.get_context('fork')\n"
    child += "fork.Process(target=time.sleep, args=(1000,)).start()"
    for code, text in (
        (0, child),
        (2, "if rank == 1: raise ValueError('as planned')"),
        (143, "time.sleep(1000 * (n == 1))"),
    ):
        mark = "open('alone', 'w').close() if n == 1 else None"
        (tmp_path / "train.py").write_text(program([("#READY", f"{mark}\n{text}")]))
        (tmp_path / "alone").unlink(missing_ok=True)
        job = forker().start(ROOT / "equivalence", "train.py", cwd=tmp_path, TMPDIR=tmp_path / "tmp")
        if code == 143:
            wait_for(lambda: (tmp_path / "alone").exists())
            os.kill(job.pid, signal.SIGTERM)
        done = job.wait()
        assert done.code == code, done
        assert ("rank 1 of 2 failed first" in done.err) == (code == 2)
        assert [path.name for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("pymp-")] == []
    assert processes_in(tmp_path) == []


def test_a_terminal_shows_which_step_of_which_run_and_not_what_the_program_prints(tmp_path):
    (tmp_path / "train.py").write_text(program([("#READY", "print('said', file=sys.stderr)")]))
    screen, terminal = os.openpty()
    os.set_blocking(screen, False)
    before = f"import os; os.dup2(os.open({os.ttyname(terminal)!r}, os.O_RDWR), 2)"
    answer("train.py", nproc=3, cwd=tmp_path, before=before, code=0)
    text = os.read(screen, 10000).decode()
    assert "said" not in text
    shown = re.findall(r"\requivalence: (\w+) process(?:es)?, (?:whole, )?step (\d) of 4", text)
    assert shown == [(who, str(step)) for who in ("3", "one") for step in range(1, 5)]
    os.close(screen)
    os.close(terminal)


def test_bad_flags_are_one_line(tmp_path):
    (tmp_path / "train.py").write_text("")
    for given in (
        "",
        "nothing.py",
        "--steps 1 train.py",
        "--nproc 1 train.py",
        "train.py --nproc 3",
        "--only x train.py",
        "--alone ' train.py",
    ):
        done = forker().run(ROOT / "equivalence", *given.split(), cwd=tmp_path)
        assert done.code == 2 and len(done.err.splitlines()) == 1, done
    done = forker().run(ROOT / "equivalence", "--nproc", 2, "train.py", cwd=tmp_path, RANK=0, WORLD_SIZE=2)
    said = "equivalence: error: a launcher has started the processes: leave out --nproc\n"
    assert (done.code, done.err) == (2, said)


def test_a_mistake_of_its_own_is_not_different(tmp_path):
    (tmp_path / "train.py").write_text(TEMPLATE)
    before = f"import tempfile; tempfile.tempdir = {str(tmp_path / 'nothing')!r}"
    _, _, err = answer("train.py", cwd=tmp_path, before=before, code=2)
    assert err.endswith("equivalence: this is a mistake of equivalence's own\n"), err


def test_notes_that_do_not_fit_on_the_disk_are_refused(tmp_path):
    (tmp_path / "train.py").write_text(TEMPLATE)
    _, _, err = answer("train.py", cwd=tmp_path, options=["--steps", 10**12], code=2)
    said = "equivalence: the notes of all ranks take up to .* GB, and .* GB are free on .*: give --steps 2\n"
    assert re.fullmatch(said, err), err


@pytest.mark.slow
def test_under_torchrun_from_any_folder(tmp_path):
    (tmp_path / "train.py").write_text(TEMPLATE)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "equivalence")
    done = shell(*torchrun, "--steps", 2, "train.py", cwd=tmp_path, OMP_NUM_THREADS=1)
    assert done.code == 0 and done.out.startswith("verdict       THE SAME as one process"), done


@pytest.mark.slow
def test_a_rank_without_steps(tmp_path):
    (tmp_path / "train.py").write_text(program([BY_HAND, ("optimizer.step()", "rank or optimizer.step()")]))
    _, lines, err = answer("train.py", cwd=tmp_path, options=["--patience", 20], code=2)
    assert re.fullmatch(r"NOT FOUND OUT: .* 4 steps of an optimizer \(rank 0: 4, rank 1: 0\): .*", lines["verdict"]), (
        lines
    )


# --------------------------------------------------------------------------------------------- its arithmetic


def test_batches_are_joined_and_told_apart():
    short = {"ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2]]), "names": ["a"]}
    long = {"ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[3, 4, 5]]), "names": ["b"]}
    whole = batches.join([short, long])
    assert whole["ids"].tolist() == [[1, 2, 0], [3, 4, 5]] and whole["labels"].tolist()[0] == [1, 2, -100]
    assert batches.join([short, long], only=0)["ids"].tolist() == [[1, 2, 0]]
    targets = [torch.tensor([[1, 2], [3, -100]]), torch.tensor([[4]])]  # in a tuple: of no name
    assert batches.join(targets).tolist() == [[1, 2], [3, -100], [4, -100]]
    graphs = [(torch.ones(n, 3), torch.ones(2, n), torch.zeros(7)) for n in (4, 5)]
    assert batches.rows_differ(graphs) == "4, 2, 7" and batches.rows_differ(targets) == ""
    rows, same = batches.join([(torch.ones(2, 1), torch.arange(7)), (torch.ones(3, 1), torch.arange(7))])
    assert rows.shape == (5, 1) and same.equal(torch.arange(7))
    assert batches.join([torch.ones(1, 2, 3), torch.ones(1, 4, 3)]).shape == (2, 4, 3)
    assert len(set(batches.digests_of_examples(whole))) == 2
    numbers = [torch.tensor(one) for one in ([0, 0, 1, 1, 2], [0, 2, 1, 1, 0], [0, 0, 1, 1])]
    assert [batches.counts_up(one) for one in numbers] == [True, False, False]
