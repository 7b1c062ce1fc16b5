"""equivalence/: what it says of programs whose truth is known, with two processes and three."""

import json
import os
import re
import signal

import pytest
from world import ROOT, forker, processes_in, wait_for

from ddp_by_diff.equivalence import limits
from demos.ways import WAYS

pytestmark = pytest.mark.timeout(240)

SAME_UP_TO = r"THE SAME as one process, up to rounding, in the 3 steps compared .differences below {} would not be .*"
SAME = SAME_UP_TO.format("1e-05")
DIFFERENT = "DIFFERENT from one process in: "
BATCH = "DIFFERENT from one process: "
STATE = BATCH + "training reads what does not change as in one process: "
TOGETHER = BATCH + "the loss, a layer or the step depends on the composition or the size of the batch"
UNSEEN = r"INCONCLUSIVE: one batch: a step may use more than weights, buffers and the batches seen .*"
EXCEPT = r"THE SAME as one process, except for {}, in the 3 steps compared .apart from that, differences below {} .*"
NORM = EXCEPT.format("BatchNorm .its statistics are not those of one batch.", "1e-05")
DROPOUT = EXCEPT.format("dropout .each process draws its own masks.", "1e-05")
NOT_AVERAGED = "the gradients{} are not averaged; each rank's optimizer receives only its own rank's gradients"
OWN = NOT_AVERAGED.format("")
# One process has the flags of the whole, or its flags give it fewer examples than all ranks have.
WITH = "one process with {} .with the same flags, it would take {}."
THAT = "one process that takes {} examples in a step .with the same flags, it takes {}."
DIFFERENT_THAT = f"DIFFERENT from {THAT} in: "
TOGETHER_THAT = TOGETHER.replace("one process", THAT.format(24, 8))
SAME_WITH, SAME_THAT = (f"THE SAME as {other}, up to rounding, in the 3 steps .*" for other in (WITH, THAT))
TOLD = (
    "INCONCLUSIVE: .*one batch: one process takes {} examples per step by itself, all ranks {}, and the loss may be .*"
)
NONE_TWICE = r"8 \+ 8 \+ 8 per step, none of them on two ranks .checked for 3 steps."
NONE_ALIKE = NONE_TWICE.replace("checked", "checked by their content")
FORGOTTEN = "WRONG: " + NOT_AVERAGED.format(" of 2 of 4 tensors .2.weight, 2.bias.")


def answer(*command, nproc=2, cwd=None, options=(), code=None, text="", **more):
    """The exit code, and what is printed by label.  text: a program, which gets `command` as its flags."""
    if text:
        (cwd / "train.py").write_text(text)
        command = ("train.py", *command)
    if nproc:
        options = ("--nproc", nproc, *options)
    done = forker().run(
        "-m", "ddp_by_diff.equivalence", *options, *command, path=[ROOT], cwd=cwd, COLUMNS=10000, **more
    )
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

dist.init_process_group({group})
rank, n = dist.get_rank(), dist.get_world_size()
SIZE = 24 // n

def average(tensors, times=1.0):
    for tensor in tensors:
        dist.all_reduce(tensor.grad)
        tensor.grad *= times / n

torch.manual_seed(0)
data = TensorDataset(torch.randn(480, 8), torch.randint(4, (480,)))
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
{begin}
loader = {loader}
model = {model}
optimizer = {optimizer}
{ready}
for epoch in range(5):
    for step, (x, y) in enumerate(loader):
        {before}
        loss = {loss}
        optimizer.zero_grad()
        {backward}
        {got}
        {step}
        {stepped}
"""
PARTS = {
    "group": '"gloo"',
    "loader": "DataLoader(data, SIZE, sampler=DistributedSampler(data))",
    "model": "nn.parallel.DistributedDataParallel(net)",
    "optimizer": "torch.optim.SGD(net.parameters(), 0.1)",
    "loss": "F.cross_entropy(model(x), y)",
    "backward": "loss.backward()",
    "step": "optimizer.step()",
}
PARTS |= dict.fromkeys(("begin", "ready", "before", "got", "stepped"), "")
AVERAGE = "average(net.parameters())"
CLIP = "; nn.utils.clip_grad_norm_(net.parameters(), 1e-3)"
CLAMP = "\nfor p in net.parameters(): p.grad.clamp_(-1e-4, 1e-4)"  # so that the norm is no longer what was clipped
FASTER = "optimizer.param_groups[0]['lr'] += 0.01"


def program(**parts):
    """The template with these parts; those inside of a step may have several lines."""
    for name in "before", "backward", "got", "step", "stepped":
        parts[name] = parts.get(name, PARTS[name]).replace("\n", "\n        ")
    return TEMPLATE.format(**PARTS | parts)


def case(verdict, lines=None, nproc=3, options=(), **parts):
    """verdict, lines: patterns of what is said, by label; the program has these parts."""
    nprocs = nproc if isinstance(nproc, tuple) else (nproc,)
    return {"verdict": verdict, **(lines or {})}, nprocs, options, program(**parts)


def contrast(gather=""):
    """A loss that compares each example with all others, of this rank or, gathered, of all."""
    begin = f"""
from torch.distributed.nn.functional import all_gather  # torch 2.4 makes a folder for it
def contrast(x):
    parts = []
    for part in model(torch.cat([x, x.roll(1, 1)])).chunk(2):
        part = part.contiguous()
        {gather}
        parts.append(part)
    return F.cross_entropy(parts[0] @ parts[1].T, torch.arange(len(parts[0])))"""
    return {"begin": begin, "loss": "contrast(x)"}


OBJECTS = """
import dataclasses, typing
class Pair(typing.NamedTuple): x: object; same: object
@dataclasses.dataclass(frozen=True)
class Batch: pair: object; more: dict; function: object
def sum_of(batch): return batch.pair.x + torch.from_numpy(batch.pair.same) + batch.more['x'][0]
class Net(nn.Sequential):
    def forward(self, batch): return super().forward(sum_of(batch)) - batch.pair.x[:, :4].sin()
def batch(x): return Batch(Pair(x, x.numpy()), {'x': [x], 'names': ['a']}, lambda: x)
torch.manual_seed(rank)
net, batches = Net(*net), [(batch(x), 0) for x in torch.randn(20, SIZE, 8)]"""
WORDS = """
class Net(nn.Sequential):
    def forward(self, batch):
        outputs, labels = super().forward(batch['ids']), batch['labels']
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction='sum') / len(labels)
net = Net(nn.Embedding(9, 8), nn.Linear(8, 4))
torch.manual_seed(rank)
def batch(*shape): return {'ids': torch.randint(1, 9, shape), 'labels': torch.randint(4, shape)}
batches = [(batch(SIZE, 5 + rank), 0) for _ in range(20)]"""
GRAPHS = """
class Net(nn.Sequential):
    def forward(self, nodes, edges): return super().forward(nodes * edges.sum())
net = Net(*net)
torch.manual_seed(rank)
batches = [(torch.randn(8 + rank, 8), torch.randn(2, 8 + rank)) for _ in range(20)]"""
COLLATE = """
def collate(items):
    most = max(1 + int(y) for _, y in items)
    rows = [F.pad(x[:1 + int(y)], (0, most - 1 - int(y)), value=1.0) for x, y in items]
    return torch.stack(rows), torch.stack([y for _, y in items])
def model(x):
    x = F.pad(x, (0, 8 - x.shape[1]), value=1.0)
    return wrapped(torch.where(torch.arange(8) < 4, x, 0))
wrapped = nn.parallel.DistributedDataParallel(net)"""
RAGGED = """
from torch.nn.utils.rnn import pad_sequence
items = [(x[:1 + k * k % 8], y) for k, (x, y) in enumerate(data)]
def collate(pairs):
    return pad_sequence([x for x, _ in pairs], True), torch.stack([y for _, y in pairs])"""
WHOLE = """
class Whole(TensorDataset):
    def __getitems__(self, rows): return self[rows]
data = Whole(*(one[:48] for one in data.tensors))
whole = DataLoader(data, SIZE, sampler=DistributedSampler(data), collate_fn=tuple)
batches = iter(whole)"""
NEXT = """
try:
    x, y = next(batches)
except StopIteration:
    batches = iter(whole)
    x, y = next(batches)"""
PART = """
from torch.distributed.nn.functional import all_reduce
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        first, last = nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False)
        parts = first.weight.chunk(n)[rank], last.weight.chunk(n, 1)[rank]
        self.a, self.b = (nn.Parameter(part.clone()) for part in parts)
    def forward(self, x): return all_reduce((x @ self.a.T).tanh() @ self.b.T)
net = Part(); SIZE = 24"""
BIAS = """
class Biased(Part):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4)) if rank == 0 else None
    def forward(self, x): return super().forward(x) + Summed.apply(self.bias if rank == 0 else torch.zeros(4))
class Summed(torch.autograd.Function):  # each rank adds its bias once
    @staticmethod
    def forward(ctx, x): x = x.clone(); dist.all_reduce(x); return x
    @staticmethod
    def backward(ctx, gradient): return gradient * n  # the loss of each rank is divided by n
net = Biased(); SIZE = 24"""
TENSOR_PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
net, mesh = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4)), init_device_mesh('cpu', (n,))
net = parallelize_module(net, mesh, {'0': ColwiseParallel(), '2': RowwiseParallel()})"""
EXPERTS = """
from torch.distributed._functional_collectives import all_to_all_single_autograd
def exchange(x): return all_to_all_single_autograd(x, None, None, dist.group.WORLD)
class Experts(nn.Module):  # row k of each example goes to expert k
    def __init__(self):
        super().__init__()
        self.first, weight = nn.Linear(8, 8), torch.randn(6, 8, 4)
        self.experts = nn.Parameter(weight.chunk(n)[rank].clone())
    def forward(self, x):
        rows = self.first(x).unsqueeze(0) * torch.arange(1, 7).view(6, 1, 1)
        rows = exchange(rows).view(n, 6 // n, -1, 8)
        return exchange(torch.einsum('reki,eio->reko', rows, self.experts).reshape(6, -1, 4)).tanh().sum(0)
net = Experts()"""
SEQUENCE = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
    def forward(self, x):
        if inside: x = x.chunk(n, 1)[rank]
        keys, values = Gathered.apply(self.key(x)), Gathered.apply(self.value(x))
        return F.softmax(self.query(x) @ keys.mT, -1) @ values
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)
    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if not forgets: dist.all_reduce(gradient)
        return gradient.chunk(n, 1)[rank]
net = Attention()
batches = [(torch.randn(4, 12, 8), torch.randn(4, 12, 8)) for _ in range(20)]"""
MINE = """
data = TensorDataset(*data[:40])
class Mine:
    def __iter__(self): return iter(random.Random(rank).sample(range(40), 40))
    def __len__(self): return 40"""
STREAM = """
class Stream(IterableDataset):
    def __iter__(self): return (data[(k + 4 * rank) % 480] for k in range(480))"""
MICRO = """
import copy
smooth = copy.deepcopy(net)
batches = iter(DataLoader(data, 8, sampler=DistributedSampler(data)))
a, b = next(batches)"""
TIMES = "class Net(nn.Sequential):\n    def forward(self, x, k): return super().forward(x) * k\nnet = Net(*net)"
COARSE = """
class Coarse(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in net.parameters(): p -= 0.1 * ((1 + 0.01 * n) * p.grad.bfloat16()).float()"""
EITHER = """
class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 4), nn.Linear(8, 4), 0
    def forward(self, x):
        self.calls += 1 + rank
        return self.first(x) if self.calls % 2 else self.first(x) + self.second(x)
net = Either()"""
USUAL = """
class Centred(nn.Linear):
    def forward(self, x):
        y = super().forward(x - self.usual)
        m = x.mean(0)
        {}
        self.usual = 0.5 * self.usual + 0.5 * m
        return y
net[0] = Centred(8, 32)
net[0].{}"""
BUFFER = "register_buffer('usual', torch.zeros(8))"
CRITIC = {  # trains more often than the maker, whose gradients are then thrown away
    "model": "nn.parallel.DistributedDataParallel(net) if n > 1 else net",
    "begin": "maker = nn.Linear(8, 8)",
    "ready": "second = torch.optim.SGD(maker.parameters(), 0.1); maker = nn.parallel.DistributedDataParallel(maker)",
    "loss": "F.cross_entropy(model(maker(x)), y)",
    "stepped": "second.zero_grad()\nif step % 2: model(maker(x)).square().mean().backward(); second.step()",
}
MANY = {
    "begin": "data = TensorDataset(torch.rand(48, 4000, 8), torch.rand(48, 4000, 4))",
    "loss": "F.mse_loss(model(x), y)",
}
TYPED = "\nnet = nn.Sequential(nn.Linear(8, 32, dtype=torch.float32), nn.Tanh(), nn.Linear(32, 4, dtype=torch.float32))"


def flags(**sizes):
    """Lines of a program that read these flags by argparse: the first one is the batch of one process."""
    lines = ["import argparse", "parser = argparse.ArgumentParser()"]
    lines += [f"parser.add_argument('--{name}', type=int, default={size})" for name, size in sizes.items()]
    return "\n".join([*lines, "args, _ = parser.parse_known_args()", f"SIZE = args.{next(iter(sizes))}"])


FLIPS = """
class Flips(TensorDataset):
    def __getitem__(self, k):
        x, y = super().__getitem__(k)
        return (x.flip(0) if random.random() < 0.5 else x), y
data = Flips(*data.tensors)"""
DRAWN = """
many = TensorDataset(torch.randn(10**5, 8), torch.randint(4, (10**5,)))
torch.manual_seed(rank)
def drawn(): return many[torch.randint(10**5, (6,))]
def accumulate(x, y):
    loss, following = F.cross_entropy(model(x), y) / (4 // n), drawn()
    loss.backward()
    return following
ahead = drawn()"""
SATURATED = {  # without BatchNorm, all gradients are 0
    "begin": "net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))",
    "loss": "F.hardtanh(model(x * 1e9)).square().mean()",
}
PAIRS = """
class Pairs(torch.utils.data.Dataset):  # a number says only what kind of example is drawn
    def __len__(self): return 480
    def __getitem__(self, k):
        x, y = data[random.randrange(480)]
        return x + k % 2, y
pairs = Pairs()"""
TEXT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.last = nn.LSTM(8, 8), nn.Linear(8, 4)
    def forward(self, x, h, c):
        x, (h, c) = self.rnn(F.dropout(x, 0.5), (h, c))
        return self.last(x).flatten(0, 1), h.detach(), c.detach()
net, state = Net(), [torch.zeros(1, SIZE, 8)] * 2
texts = [(torch.randn(5, SIZE, 8), torch.randint(4, (5 * SIZE,))) for _ in range(20)]
torch.manual_seed(rank)
def loss_of(x, y):
    global state
    outputs, *state = model(x, *state)
    return F.cross_entropy(outputs, y)"""
OWN_NUMBERS = """
numbers = random.Random(rank)
def collate(rows):
    x, y = torch.utils.data.default_collate(rows)
    return x * (1 + numbers.random()), y"""
REWARDS = """
rewards, teacher = torch.randn(480), nn.Linear(8, 4)
torch.manual_seed(rank)
def loss_of(rows):
    x = data.tensors[0][rows]
    with torch.no_grad():
        target = rewards[rows] + teacher(x).amax(1)
    return F.mse_loss(model(x).amax(1), target)"""
FLAG, CONSTANT = flags(batch=8), "SIZE = 8"
SUM = "F.cross_entropy(model(x), y, reduction='sum') / SIZE"
ADDED = {"model": "net", "got": "average(net.parameters(), n)"}  # up, and not divided
FULL = """
class Full(nn.Linear):
    def forward(self, x):
        if len(x) > 8: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')
        return super().forward(x)
net[0] = Full(8, 32)"""
ITEMS = """
class Item:
    def __init__(self, pair): self.x, self.y = pair[0].expand(5, 8), pair[1]
class Items(torch.utils.data.Dataset):
    def __len__(self): return 480
    def __getitem__(self, k): return Item(data[k])
def whole(items): return torch.stack([one.x for one in items]).mean(1), torch.stack([one.y for one in items])
def listed(items): return [items, 0]"""
ANEW = """
class Anew:  # a new loader for each epoch
    epoch = 0
    def __iter__(self):
        self.epoch += 1
        return iter(DataLoader(data, SIZE, sampler=DistributedSampler(data, seed=self.epoch)))"""
DRAWS = """
class Draws(torch.utils.data.Dataset):
    def __len__(self): return 480
    def __getitem__(self, k): return torch.randn(8), torch.randint(4, ())
data = Draws()"""
MIXED = {"before": "x = 0.7 * x + 0.3 * x.flip(0)"}
ONE_SAMPLER = "DataLoader(data, SIZE, sampler=DistributedSampler(data, num_replicas=1, rank=0))"

CASES = {
    "right": case(SAME, {"weights": "ok: .*", "one batch": "ok: .* all 24 examples in one batch .*"}),
    "closure": case(  # and a program without an end that catches everything
        SAME,
        begin="import itertools",
        loader="itertools.cycle(DataLoader(data, SIZE, sampler=DistributedSampler(data)))",
        model="net",
        loss="0",
        backward="def closure():\n    optimizer.zero_grad(); loss = F.cross_entropy(model(x), y)\n    loss.backward()",
        got=f"    {AVERAGE}; return loss",
        step="try: optimizer.step(closure)\nexcept Exception: pass",
    ),
    # ---- the whole step: what the optimizer receives, and the state that goes on
    "clip_times_processes": case(
        DIFFERENT + "averaging",
        {"averaging": "WRONG: after clipping, the mean has length 0.00[23], but 0.001 in one process .*"},
        nproc=(2, 3),
        got="nn.utils.clip_grad_norm_(net.parameters(), 1e-3 * n)",
    ),
    "clip_by_hand": case(  # by this rank's number of examples, which is another one in one process
        DIFFERENT_THAT.format(24, 8) + "averaging",
        {"averaging": "WRONG: 3 times one process's gradients: .*"},
        begin="SIZE = 8",
        got="for p in net.parameters(): p.grad *= 24 / len(x)",
    ),
    "clip_own_part": case(  # each optimizer has every n-th parameter, and clips these by their norm alone
        DIFFERENT + "averaging",
        {"averaging": "WRONG: after clipping, .*"},
        model="net",
        optimizer="torch.optim.Adam([*net.parameters()][rank::n])",
        before="net.zero_grad()",
        got=AVERAGE + "; nn.utils.clip_grad_norm_([*net.parameters()][rank::n], 1e-3)",
        stepped="for k, p in enumerate(net.parameters()): dist.broadcast(p.data, k % n)",
    ),
    "clip_of_nothing": case(
        SAME,
        {"averaging": "ok: .*, not clipped .clipping was not active in these steps, so it was not tested. .*"},
        got="nn.utils.clip_grad_norm_(net.parameters(), 1e3 * n)",
    ),
    "usual": case(SAME, begin=USUAL.format("dist.all_reduce(m); m /= n", BUFFER)),
    "usual_of_each": case(
        STATE + "0.usual",
        {"averaging": "ok: .*", "buffers": "otherwise than in one process: 0.usual .*"},
        nproc=(2, 3),
        begin=USUAL.format("", BUFFER),
    ),
    "usual_that_is_no_buffer": case(
        TOGETHER + "; or training reads what does not change as in one process",
        nproc=(2, 3),
        begin=USUAL.format("", "usual = torch.zeros(8)"),
    ),
    "penalty": case(  # a graph that begins before a model is called
        SAME,
        model="net",
        loader="[(slice(rank * SIZE + 24 * k, (rank + 1) * SIZE + 24 * k), 0) for k in range(20)]",
        before="(x, y), penalty = data[x], sum(p.square().sum() for p in net.parameters())",
        loss="F.cross_entropy(model(x), y) + 0.01 * penalty",
        got=AVERAGE,
    ),
    "state": case(  # that a model returns, and gets again
        SAME,
        begin="net, state = nn.GRU(8, 4, batch_first=True), torch.zeros(1, SIZE, 4); torch.manual_seed(rank)",
        loader="[(torch.randn(SIZE, 5, 8), 0) for _ in range(20)]",
        loss="run(x).square().mean()",
        ready="""def run(x):
    global state
    outputs, state = model(x, state.detach())
    return outputs""",
    ),
    # ---- rounding is measured
    "many_numbers": case(SAME_UP_TO.format(r"\de-05"), nproc=(2, 3), **MANY),
    "many_typed": case(SAME_UP_TO.format(r"\de-05"), **MANY | {"begin": MANY["begin"] + TYPED}),
    "many_times": case(DIFFERENT + "averaging", **MANY, backward="(loss * (1.0005 if n > 1 else 1)).backward()"),
    "many_unmeasured": case(  # it fails in float64
        "INCONCLUSIVE: one batch: the difference may be rounding, of which a run in float64 gave no measure",
        {"averaging": "ok: .*", "to settle it": ".*float64.*"},
        **MANY | {"loss": "F.mse_loss(model(x), y) * {torch.float32: 1}[x.dtype]"},
    ),
    # ---- the same job: one process has the flags of the whole, or accuses nobody
    "flag": case(SAME_WITH.format("--batch 24", 8), begin=FLAG, loss=SUM),
    "flag_of_a_sum": case(
        "DIFFERENT from one process with --batch 24 .with the same flags, it would take 8. in: averaging",
        {"averaging": "WRONG: 3 times one process's gradients: the ranks' sum, not their mean"},
        begin=FLAG,
        loss=SUM,
        **ADDED,
    ),
    "flag_sets_the_rate": case(
        SAME_WITH.format("--batch 24", 8), begin=FLAG, optimizer="torch.optim.SGD(net.parameters(), 0.01 * SIZE * n)"
    ),
    "flag_sets_a_length": case(  # with the same flags, the run in one process fails
        SAME_WITH.format("--batch 24", 8),
        begin=FLAG,
        loss="(model(x)[torch.arange(SIZE), y] * torch.ones(SIZE)).mean()",
    ),
    "flag_that_alone_has": case(
        SAME_WITH.format("--batch 24", 8), begin=FLAG, loss=SUM, options=("--alone", "--batch 24")
    ),
    "flag_that_alone_keeps": case(TOLD.format(8, 24), begin=FLAG, loss=SUM, options=("--alone=--batch=8",)),
    "flags_of_two_batches": case(  # the same value: both grow; another one stays
        SAME_WITH.format("--train_batch 24 --eval_batch 24", 8),
        begin=flags(train_batch=8, eval_batch=8, log_batches=5),
        loss=SUM,
    ),
    "flag_for_a_number_of_batches": case(  # which happens to equal the batch
        SAME_WITH.format("--batch 24", 8),
        begin=flags(batch=8, warmup_batches=8),
        optimizer="torch.optim.SGD(net.parameters(), 0.1 / args.warmup_batches)",
    ),
    "clip_then_divide": case(
        DIFFERENT + "averaging",
        {"averaging": "WRONG: before clipping, 3 times one process's gradients: the ranks' sum, not their mean"},
        model="net",
        got="average(net.parameters(), n)" + CLIP + "\nfor p in net.parameters(): p.grad /= n",
    ),
    "collate_of_own_numbers": case(  # it makes another batch of the same examples
        SAME,
        begin=OWN_NUMBERS,
        loader="DataLoader(data, SIZE, sampler=DistributedSampler(data), collate_fn=collate, num_workers=1)",
    ),
    "without_gradients": case(  # then 0 would be compared with 0
        "INCONCLUSIVE: one batch: the tool's run without BatchNorm failed, or all its gradients are 0",
        {"to settle it": ".*GroupNorm.*"},
        **SATURATED,
        backward="(loss / n).backward()",
    ),
    "flips": case(  # the one process draws others for the same examples
        SAME_WITH.format("--batch 24", 8),
        begin=flags(batch=8) + FLIPS,
    ),
    "draws_in_advance": case(  # as nanoGPT does; each process accumulates its share of four batches
        SAME_UP_TO.format(".*"),
        {"examples": r"12 \+ 12 per step, none of them .*"},
        nproc=(2,),
        begin=DRAWN,
        loader="[(0, 0)] * 10",
        before="x, y = ahead",
        loss="0",
        backward="for k in range(4 // n): ahead = accumulate(*ahead)",
    ),
    "drawn_without_a_seed": case(  # torchrun's processes have random numbers of their own
        DIFFERENT + "examples",
        {"examples": r".*example \d+ of the data is not the same on rank 1 as on rank 0: .*"},
        begin="rows = list(range(480)); random.shuffle(rows); data = TensorDataset(*data[rows])",
    ),
    "flag_bs": case(SAME_WITH.format("--bs 24", 8), begin=flags(bs=8), loss=SUM),
    "flag_that_is_no_batch": case(  # but what the learning rate is for: it happens to be equal
        SAME_WITH.format("--batch 24", 8),
        begin=flags(batch=8, lr_per_batch=8),
        optimizer="torch.optim.SGD(net.parameters(), 0.1 * SIZE * n / args.lr_per_batch)",
    ),
    "flag_of_a_base": case(  # its name tells; here the rate lacks `n`, which larger flags would hide
        "DIFFERENT from one process with --batch 24 .with the same flags, .* 8. in: learning rate",
        begin=flags(batch=8, base_batch=8),
        optimizer="torch.optim.SGD(net.parameters(), 0.1 * SIZE / args.base_batch)",
    ),
    "flag_that_is_no_batch_and_a_wrong_rate": case(
        "DIFFERENT from one process with --batch 24 --lr_per_batch 24 .with the same flags, .* 8. in: learning rate",
        begin=flags(batch=8, lr_per_batch=8),
        optimizer="torch.optim.SGD(net.parameters(), 0.1 * n)",
    ),
    "flag_of_a_micro_batch": case(
        SAME_WITH.format("--batch 24", 8),
        begin=flags(batch=8, micro_batch=4),
        loss="0",
        backward="for a, b in zip(x.split(4), y.split(4)): (F.cross_entropy(model(a), b) * 4 / SIZE).backward()",
    ),
    "flag_and_accumulation": case(
        SAME_WITH.format("--batch 12", 4),
        {"examples": r"8 \+ 8 \+ 8 per step, .*"},
        begin=flags(batch=4),
        loss="F.cross_entropy(model(x), y, reduction='sum') / (2 * SIZE)",
        backward="if step % 2 == 0: model.zero_grad()\nloss.backward()",
        before="optimizer.zero_grad = lambda: None",
        step="step % 2 and optimizer.step()",
    ),
    "constant": case(SAME_THAT.format(24, 8), begin=CONSTANT),
    "constant_divides": case(TOLD.format(8, 24), {"averaging": "ok: .*"}, begin=CONSTANT, loss=SUM),
    "constant_of_all_divides": case(TOLD.format(8, 24), begin=CONSTANT, loss=f"{SUM} / n", **ADDED),
    "constant_divides_and_norm": case(
        TOLD.format(8, 24), begin=CONSTANT + "; net.insert(1, nn.BatchNorm1d(32))", loss=SUM
    ),
    "constant_and_a_penalty": case(  # so that no multiple of the mean is one process's gradient
        TOLD.format(8, 24), begin=CONSTANT, loss=SUM + " + sum(p.square().sum() for p in net.parameters())"
    ),
    "constant_of_a_sum_added_up": case(  # in both: an agreement of sums of unequal numbers
        TOLD.format(8, 24), begin=CONSTANT, loss=SUM, **ADDED
    ),
    "constant_and_a_mean_added_up": case(DIFFERENT_THAT.format(24, 8) + "averaging", nproc=3, begin=CONSTANT, **ADDED),
    "constant_and_a_mean_divided": case(
        DIFFERENT_THAT.format(24, 8) + "averaging",
        {"averaging": "WRONG: 1/3 of one process's gradients: .*"},
        begin=CONSTANT,
        loss="F.cross_entropy(model(x), y) / n",
    ),
    "constant_sets_the_rate": case(
        "INCONCLUSIVE: learning rate: one process takes 8 examples per step by itself, all ranks 24, .*",
        {"averaging": "ok: .*", "one batch": "ok: .*"},
        begin=CONSTANT,
        optimizer="torch.optim.SGD(net.parameters(), 0.01 * SIZE * n)",
    ),
    "constant_and_rates_that_undo_a_sum": case(
        SAME_THAT.format(24, 8),
        begin=CONSTANT,
        optimizer="torch.optim.SGD(net.parameters(), 0.3 / n, momentum=0.9)",
        **ADDED,
    ),
    "constant_and_pairs": case(TOGETHER_THAT, begin=CONSTANT, **MIXED),  # of a mean: the size is no cause
    "constant_and_pairs_of_a_sum": case(TOLD.format(8, 24), begin=CONSTANT, loss=SUM, **MIXED),
    "constant_and_state": case(  # that a batch size might move: a teacher, say
        "INCONCLUSIVE: one batch: one process takes 8 .*, and training reads what does not change .*: 0.usual",
        nproc=(2, 3),
        begin=CONSTANT + USUAL.format("", BUFFER),
    ),
    "no_memory": case(
        "INCONCLUSIVE: one batch: one process has no memory for the examples of all ranks",
        {"to settle it": "give the program a smaller batch size, in both runs"},
        begin=CONSTANT + FULL,
    ),
    # ---- numbers, and what has none
    "rate_of_a_sum": case(  # whose last digits depend on the order
        SAME_UP_TO.format(".*"),
        nproc=(2, 3),
        stepped="""part = x.abs().sum() / 1e3
dist.all_reduce(part)
optimizer.param_groups[0]['lr'] *= 1 - float(part)
optimizer.param_groups[0]['momentum'] = float(part)""",
    ),
    "inputs_with_gradients": case(
        SAME,
        loader="[(slice(24 * k + rank, 24 * k + 24, n), 0) for k in range(20)]",
        before="x = data.tensors[0][x].clone().requires_grad_()",
        loss="torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].square().mean()",
        model="net",
        got=AVERAGE,
    ),
    "one_graph": case(  # is the same on all ranks, and no batch
        SAME,
        begin="graph, labels = torch.randn(24, 8), torch.randint(4, (24,))",
        loader="[(k, 0) for k in range(20)]",
        loss="F.cross_entropy(model(graph)[rank::n], labels[rank::n])",
    ),
    "equal_examples": case(
        SAME,
        {"examples": NONE_TWICE[:-1] + ", and in an epoch."},
        begin="data = TensorDataset(torch.ones(480, 8), torch.ones(480).long())",
    ),
    "drawn_examples": case(
        SAME,
        {"examples": ".* per step; whether some are on two ranks is not known"},
        begin=DRAWS + "\nSIZE = 24 // n; torch.manual_seed(rank)",
        loader="DataLoader(data, SIZE)",
    ),
    "objects_in_a_list": case(
        "INCONCLUSIVE: one batch: a batch has parts that don't have one row for each example",
        {"examples": r"8 \+ 8 \+ 8 per step; whether some are on two ranks is not known"},
        begin=ITEMS,
        loader="DataLoader(Items(), SIZE, sampler=DistributedSampler(data), collate_fn=listed)",
        before="x, y = whole(x)",
    ),
    "mixed_pairs": case(TOGETHER, nproc=(2, 3), **MIXED),  # whose rows are known to be examples
    "maker_mixes_pairs": case(  # after another optimizer's step
        TOGETHER,
        **CRITIC
        | {"stepped": CRITIC["stepped"].replace("maker(x)", "maker(x + x.flip(0))").replace("if step % 2: ", "")},
    ),
    "same_batch_and_dropout": case(  # whose masks differ by rank
        DIFFERENT + "examples",
        {"averaging": "ok: the optimizers receive the mean of the ranks' gradients .*"},
        begin="net.append(nn.Dropout(0.5)); torch.manual_seed(rank)",
        loader="DataLoader(data, 24)",
    ),
    "fsdp2_and_attention": case(  # a layer's weights are used, and the layer is not called
        SAME,
        {"averaging": "ok: .*"},
        begin="""from torch.distributed.fsdp import fully_shard
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)
    def forward(self, x): return self.last(self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0])
net = Net()
if n > 1: fully_shard(net.attention)
if n > 1: fully_shard(net)""",
        model="net",
    ),
    # ---- stage 1: averaging
    "repeated": case(  # one process's optimizer can't be given several gradients in a step
        SAME_UP_TO.format(".*"),
        {
            "averaging": "ok: .*",
            "weights": "ok: the weights change as in one process .largest .*",
            "examples": r"8 \+ 8 \+ 8 per step; .*",
        },
        model="net",
        loader="[data[24 * k + 8 * rank : 24 * k + 8 * rank + SIZE] for k in range(20)]",
        optimizer="torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3, line_search_fn='strong_wolfe')",
        loss="0",
        backward="def closure():\n    optimizer.zero_grad(); loss = F.cross_entropy(model(x), y)\n    loss.backward()",
        got=f"    {AVERAGE}; loss = loss.detach(); dist.all_reduce(loss); return loss / n",
        step="optimizer.step(closure)",
    ),
    "zero": case(  # an optimizer inside an optimizer
        SAME,
        {"weights": "ok: with the same gradients, the weights change as in one process .*"},
        begin="from torch.distributed.optim import ZeroRedundancyOptimizer",
        optimizer="ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)",
    ),
    "divided_by_2": case(
        DIFFERENT + "averaging",
        {"averaging": "WRONG: .* the mean .*, which is 2 times what one process's optimizer receives"},
        nproc=2,
        got="average(net.parameters(), n / 2)",
    ),
    "sum_at_a_smaller_rate": case(
        SAME,
        {"averaging": "ok: 3 times one .*, but at other learning rates", "weights": "ok: .* options"},
        model="net",
        optimizer="torch.optim.SGD(net.parameters(), 0.3 / n, momentum=0.9)",
        got="average(net.parameters(), n)",
    ),
    "class_weights": case(  # each rank divides by the sum of its own examples' weights
        DIFFERENT + "averaging",
        {"averaging": r"WRONG in each step, such as step \d: the ranks are weighted 33.* examples, tokens .*"},
        loss="F.cross_entropy(model(x), y, torch.tensor([1.0, 2, 3, 4]))",
    ),
    "last_batch": case(
        DIFFERENT + "averaging",
        {"examples": r"11-12 \+ 10-12 per step, none .*", "averaging": "WRONG in step 2: .* examples, tokens .*"},
        nproc=2,
        loader="DataLoader(data, SIZE, sampler=range(rank, 45, n))",
    ),
    "sum_then_clip": case(  # which hides the factor
        SAME_UP_TO.format(".*"),
        {"averaging": "ok: after clipping, the gradients are those of one process; before, 3 times one process's .*"},
        model="net",
        got="average(net.parameters(), n)" + CLIP + CLAMP,
    ),
    "average_then_clip": case(
        SAME,
        {"averaging": "ok: the optimizers receive the mean of the ranks' gradients, changed as in one process .*"},
        model="net",
        got=AVERAGE + CLIP + CLAMP,
    ),
    "forgotten_layer_and_clip": case(
        DIFFERENT + "copies, averaging",
        {"averaging": FORGOTTEN, "copies": "the ranks' weights differ after step 1: .*"},
        model="net",
        got="average(net[0].parameters())" + CLIP,
    ),
    "bfloat16": case(
        SAME_UP_TO.format("8e-03"),
        {"averaging": "ok: .* sent as bfloat16 .largest difference .*, rounding threshold 8e-03."},
        model="net",
        got="for p in net.parameters(): g = p.grad.bfloat16(); dist.all_reduce(g); p.grad = g.float() / n",
    ),
    "bfloat16_of_each": case(  # the mean is in float32
        "INCONCLUSIVE: averaging: the difference may be rounding of messages in 16 bits",
        model="net",
        got=f"for p in net.parameters(): p.grad = p.grad.bfloat16().float()\n{AVERAGE}",
    ),
    "two_of_each": case(  # two optimizers, and two loaders: all ranks have the second one's examples
        DIFFERENT + "examples, copies, averaging",
        {
            "examples": "DataLoader with index 1; in an epoch, 480 of 480 are on more than one rank: give each .*",
            "averaging": "WRONG: " + NOT_AVERAGED.format(" of 2 of 6 tensors .Linear 2: weight, Linear 2: bias."),
        },
        begin="more = iter(DataLoader(TensorDataset(data.tensors[0] + 9), 8))",
        ready="other = nn.Linear(8, 4); second = torch.optim.Adam(other.parameters())",
        before="(u,) = next(more)",
        stepped="second.zero_grad(); F.cross_entropy(other(x), y).backward(); second.step()",
    ),
    "changed": case(  # as one process changes them; a data set that makes batches itself, of two in an epoch
        SAME,
        {"averaging": "ok: the optimizers receive the mean of the ranks' gradients, changed as in one process .*"},
        begin=WHOLE,
        loader="[(0, 0)] * 20",
        before=NEXT,
        got="for p in net.parameters(): p.grad.clamp_(-0.01, 0.01)",
    ),
    "hooks": case(  # of the program, that send messages
        DIFFERENT + "averaging",
        {"averaging": "WRONG: 3 times one process's gradients: the ranks' sum, not their mean", "one batch": "ok: .*"},
        begin="""def total(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient
for p in net.parameters(): p.register_hook(total)""",
        model="net",
    ),
    "first_of_two": case(  # not averaged: what comes after it in a step has other weights on each rank
        DIFFERENT + "copies, averaging",
        {"averaging": "WRONG: " + NOT_AVERAGED.format(" of .*"), "one batch": "ok: .*"},
        nproc=(2, 3),
        model="net",
        begin="other = nn.Linear(8, 8)",
        optimizer="torch.optim.SGD(other.parameters(), 1.0)",
        ready="second = torch.optim.SGD(net.parameters(), 0.1)",
        loss="F.cross_entropy(net(other(x)), y)",
        stepped=f"net.zero_grad(); F.cross_entropy(net(other(x)), y).backward(); {AVERAGE}; second.step()",
    ),
    "second_of_two": case(
        DIFFERENT + "copies, averaging",
        {"averaging": "WRONG: " + NOT_AVERAGED.format(" of 2 of 6 tensors .*")},
        ready="other = nn.Linear(8, 4); second = torch.optim.Adam(other.parameters())",
        stepped="second.zero_grad(); F.cross_entropy(other(x), y).backward(); second.step()",
    ),
    "critic": case(SAME, nproc=(2, 3), **CRITIC),
    "critic_forgotten": case(
        DIFFERENT + "copies, averaging",
        {"averaging": "WRONG: " + NOT_AVERAGED.format(" of 4 of 6 tensors .Sequential 2: 0.weight, .*")},
        **CRITIC | {"model": "net"},
    ),
    "third_step": case(
        DIFFERENT + "copies, averaging",
        {"averaging": f"WRONG in step 3: {OWN}", "copies": ".* differ after step 3: .*"},
        nproc=(2, 3),
        model="net",
        got=f"if step != 2: {AVERAGE}",
    ),
    # ---- stage 2: one batch
    "norm": case(NORM, begin="net.insert(1, nn.BatchNorm1d(32))"),
    "frozen_norm": case(  # dropout is the cause
        DROPOUT,
        begin="net.insert(1, nn.BatchNorm1d(32)); net.append(nn.Dropout(0.5)); torch.manual_seed(rank)",
        before="net[1].eval()",
    ),
    "contrastive": case(SAME, **contrast("part = torch.cat(all_gather(part))")),
    "contrastive_without_gradient": case(  # nor a factor
        DIFFERENT + "averaging",
        {
            "averaging": "WRONG: 1/3 of one .*: .* loss .a sum, or divided before., and the mean divides it by 3",
            "one batch": "ok: this sum .*",
        },
        **contrast(
            "all = [0] * n; dist.all_gather_object(all, part.detach()); all[rank] = part; part = torch.cat(all)"
        ),
    ),
    "coarse_optimizer": case(  # what it computes with other processes differs by more than rounding in float32
        "INCONCLUSIVE: weights: the optimizer computes in bfloat16 or float16",
        {"averaging": "ok: .*", "weights": "inconclusive: with the same gradients, .* do not change .*"},
        begin=COARSE,
        optimizer="Coarse(net.parameters(), 0.1)",
    ),
    "other_layers": case(  # that a counter of its own sets: a generator may, too
        UNSEEN,
        nproc=(2, 3),
        begin=EITHER,
        model="nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)",
    ),
    "own_generator": case(
        UNSEEN,
        ready="g = torch.Generator().manual_seed(rank)",
        loss="F.cross_entropy(model(x + torch.randn(x.shape, generator=g)), y)",
    ),
    "forgets_train": case(
        DIFFERENT + "layers",
        {"layers": "no dropout trains on rank 0 in step 1: call model.train.. there"},
        nproc=(2, 3),
        begin="net.append(nn.Dropout(0.5))",
        before="rank or net.eval()",
    ),
    "scale_of_no_model": case(  # it changes in each step, and one process's is set to the ranks'
        TOGETHER,
        {"one batch": ".*; each rank's examples, computed alone, give that rank's gradient"},
        begin=contrast()["begin"] + "\nscale = nn.Parameter(torch.ones(()))",
        model="net",
        optimizer="torch.optim.Adam([*net.parameters(), scale], 0.1)",
        loss="scale.exp() * contrast(x)",
        got="average([*net.parameters(), scale])",
    ),
    "queue_in_another_order": case(
        SAME,
        {"buffers": ""},
        begin="""net.register_buffer("queue", torch.zeros(24, 8))
def turned(x):
    parts = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(parts, x)
    return torch.cat(parts[::-1])""",
        stepped="net.queue.copy_(turned(x))",
    ),
    "sums_in_other_orders": case(  # on each rank, as a ring of sends makes them
        SAME_UP_TO.format(".*"),
        {"copies": "ok, up to rounding in .*; in a long run, copies may drift apart"},
        model="net",
        begin="def turned(parts): return sum((parts[rank - k] for k in range(1, n)), parts[rank])",
        got="""for p in net.parameters():
    parts = [torch.empty_like(p) for _ in range(n)]
    dist.all_gather(parts, p.grad)
    p.grad = turned(parts) / n""",
    ),
    "copies_drift": case(DIFFERENT + "copies", stepped="for p in net.parameters(): p.data *= 1 + 1e-7 * rank"),
    "numbers": case(
        TOGETHER + "; or on numbers that differ by rank",
        begin=TIMES,
        loader="[(slice(rank + 24 * k, 24 * k + 24, n), 0) for k in range(20)]",
        loss="F.cross_entropy(model(data[x][0], 1 + rank), data[x][1])",
    ),
    "numbers_and_other_batches": case(  # in one process, so that its batch is joined of the ranks'
        "INCONCLUSIVE: one batch: a batch has parts that don't have one row for each example",
        begin=TIMES,
        loader="[(slice(rank + 8 * n * k, 8 * n * (k + 1), n), 0) for k in range(20)]",
        loss="F.cross_entropy(model(data[x][0], 1 + rank), data[x][1])",
    ),
    "contrastive_of_each": case(
        TOGETHER,
        {"averaging": "ok: .*", "one batch": "WRONG: this mean differs from .* all 24 examples in one batch .*"},
        **contrast(),
    ),
    "pace": case(  # that a rank's number sets
        BATCH + "a rank's examples, computed in one process, don't give that rank's gradient",
        {"averaging": "ok: .*"},
        nproc=(2, 3),
        loss="(F.cross_entropy(model(x), y, reduction='none') ** (1 + rank)).mean()",
    ),
    "drawn_by_hand": case(  # one process computes the same rows, and nothing can be given to it
        UNSEEN,
        loader="[(slice(rank + 24 * k, 24 * k + 24, n), 0) for k in range(20)]",
        before="x, y = data[x]",
        loss="(model(x).sum(1) * (x[:, 0] - x[:, 0].mean())).mean()",
    ),
    "pairs_by_hand": case(  # of calls: one process makes all ranks' calls, in another order
        SAME,
        begin="a, b = data.tensors[0].unsqueeze(1).split(240)",
        loader="[(range(24 * k + rank, 24 * k + 24, n), 0) for k in range(10)]",
        model="net",
        loss="sum(model(a[k]).square().mean() * model(b[k]).sin().mean() for k in x) / SIZE",
        got=AVERAGE,
    ),
    "noise": case(
        "INCONCLUSIVE: one batch: each step draws random numbers, and one process draws others",
        {"averaging": "ok: .*", "weights": "ok: .*", "one batch": "inconclusive: .*"},
        ready="torch.manual_seed(rank)",
        loss="F.cross_entropy(model(x + torch.randn_like(x)), y)",
    ),
    "one_draw_of_all": case(  # which one process makes, too
        TOGETHER,
        {"note": ""},
        before="part = random.random(); x = part * x + (1 - part) * x.flip(0)",
        ready="random.seed(0)",
    ),
    "time_first": case(  # (time, batch): the ranks' rows can't be joined
        "INCONCLUSIVE: one batch: the same examples have a different gradient in a different order",
        {"averaging": "ok: .*", "weights": "ok: .*"},
        begin="net = nn.GRU(8, 4); torch.manual_seed(rank)",
        loader="[(torch.randn(5, SIZE, 8), 0) for _ in range(20)]",
        loss="model(x)[0][-1].square().mean()",
    ),
    "rewards_of_drawn_rows": case(  # neither a model nor a loss is given them
        "INCONCLUSIVE: one batch: the same examples have a different gradient in a different order",
        {"to settle it": "in a copy, let a DataLoader give all it uses, .*", "averaging": "ok: .*"},
        begin=REWARDS,
        loader="[(0, 0)] * 10",
        loss="loss_of(torch.randint(480, (SIZE,)))",
    ),
    "rewards_of_a_loader": case(  # what that says
        SAME,
        begin=REWARDS,
        loader="DataLoader(TensorDataset(torch.arange(480), data.tensors[1]), SIZE, sampler=DistributedSampler(data))",
        loss="loss_of(x)",
    ),
    "graphs": case(
        "INCONCLUSIVE: one batch: a batch has parts that don't have one row for each example",
        {"averaging": "ok: .*", "weights": "ok: .*"},
        begin=GRAPHS,
        loader="batches",
        loss="model(x, y).square().mean()",
    ),
    "own_collate": case(  # pads with ones: the union is made by it
        SAME,
        begin=COLLATE,
        loader="DataLoader(data, SIZE, sampler=DistributedSampler(data), collate_fn=collate, num_workers=1)",
        model="model",
    ),
    "skipped": case(  # float16, whose first steps overflow
        SAME_UP_TO.format(".*"),
        {"averaging": "ok: the optimizers receive the mean of the ranks' gradients .largest .*"},
        ready="scaler = torch.amp.GradScaler('cpu', init_scale=3e38)",
        backward="scaler.scale(loss).backward()",
        step="scaler.step(optimizer); scaler.update()",
    ),
    "ragged": case(  # a model that sees how a batch is padded
        TOGETHER,
        {"averaging": "ok: .*", "weights": "ok: .*"},
        begin=RAGGED,
        loader="DataLoader(items, 6 // n, sampler=DistributedSampler(data), collate_fn=collate)",
        loss="F.cross_entropy(model(F.pad(x, (0, 8 - x.shape[1])) * x.shape[1]), y)",
    ),
    "words": case(SAME, begin=WORDS, loader="batches", loss="model(x)"),
    "slices": case(  # of a global batch that each rank has; each has an optimizer for every n-th parameter
        SAME,
        {
            "examples": "24 [+] 24 [+] 24 per step: each rank takes its part of the same batch",
            "averaging": "ok: .*",
            "weights": "ok: .*",
        },
        loader="DataLoader(data, 24)",
        optimizer="torch.optim.Adam([*net.parameters()][rank::n])",
        before="net.zero_grad(); x, y = x[rank::n], y[rank::n]",
        stepped="for k, p in enumerate(net.parameters()): dist.broadcast(p.data, k % n)",
    ),
    "objects": case(  # of the program's own classes; one process alone draws others
        SAME,
        {"examples": NONE_ALIKE},
        begin=OBJECTS,
        loader="batches",
        loss="model(x).square().mean()",
    ),
    "micro": case(  # batches in advance; as many micro-batches as processes need; an evaluation with gradients
        SAME,
        {"examples": r"8 \+ 8 \+ 8 \+ 8 per step, none of them on two ranks .*"},
        nproc=4,
        begin=MICRO,
        loader="[(0, 0)] * 18",
        before="""if step % 2:
    for part, _ in DataLoader(data, 16, sampler=range(rank, 50, n)):
        net(part), smooth(part)""",
        loss="0",
        backward="""for _ in range(4 // n):
    loss = F.cross_entropy(model(a), b) * n / 4
    a, b = next(batches)
    loss.backward()""",
    ),
    # ---- stage 3: weights
    "copies_and_norm": case(  # weights are compared without BatchNorm, as one process has other gradients with it
        EXCEPT.format("BatchNorm .*", r"\de-05"),
        {"averaging": "ok: seen in the weights only, .*", "weights": "ok: .*"},
        begin="net.insert(1, nn.BatchNorm1d(32)); owned = [p.detach().clone() for p in net.parameters()]",
        optimizer="torch.optim.SGD(owned, 0.1)",
        before="net.zero_grad()",
        got="for one, p in zip(owned, net.parameters()): one.grad = p.grad.clone()",
        stepped="for one, p in zip(owned, net.parameters()): p.data.copy_(one)",
    ),
    "averaged_weights": case(  # after a step that is linear in the gradients
        SAME_UP_TO.format(r"\de-05"),  # measured, and not only below the hard limit
        {"averaging": "ok: a step begins with each rank's local gradients, and ends as with their mean"},
        model="net",
        stepped="for p in net.parameters(): dist.all_reduce(p.data); p.data /= n",
    ),
    "warm_up": case(  # each rank has data of its own; and a buffer of averages
        "THE SAME as one process .each rank has a dataset of its own: .*not compared., except for buffers, .*",
        {
            "weights": "ok: .*; not in step 1, where nothing changes",
            "examples": NONE_ALIKE,
            "buffers": "otherwise than in one process: usual .*, but all gradients agree in these steps",
        },
        begin="""data = TensorDataset(*(one[rank::n] for one in data.tensors))
net.register_buffer('usual', torch.zeros(8))""",
        loader="DataLoader(data, SIZE, shuffle=True)",
        model="nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)",
        optimizer="torch.optim.SGD(net.parameters(), 0.0)",
        stepped=FASTER + "; net.usual.lerp_(x.mean(0), 0.1)",
    ),
    "decay": case(  # in a warm-up
        DIFFERENT + "options",
        {"options": "weight_decay of 0.weight is 0.3 with 3 processes, 0.1 with one, in step 1"},
        optimizer="torch.optim.SGD(net.parameters(), 0.0, weight_decay=0.1 * n)",
        stepped=FASTER,
    ),
    "rates_of_ranks": case(
        DIFFERENT + "copies, learning rate",
        {"learning rate": "lr of 0.weight is 0.1 on rank 0, 0.2 on rank 1, in step 1"},
        optimizer="torch.optim.SGD(net.parameters(), 0.1 + 0.1 * (rank == 1))",
    ),
    "schedule": case(  # with a batch per rank: it counts an epoch's steps
        "INCONCLUSIVE: learning rate: one process takes 8 .* all ranks 24, .* the number of steps in an epoch; .*",
        {"learning rate": "inconclusive: .* with 3 processes, .* with one .*", "to settle it": 'give .*"--size 24"'},
        begin="SIZE = int(sys.argv[-1])",
        stepped="import math; optimizer.param_groups[0]['lr'] = math.cos(1.57 * (step + 1) / len(loader)) ** 2 / 10",
    ),
    "schedule_of_a_part": case(
        SAME_THAT.format(24, 8),
        {
            "not checked": "0.weight, 0.bias: no optimizer changed them in these steps",
        },
        begin="SIZE = 8",
        optimizer="torch.optim.SGD(net[2].parameters(), 0.1)",
        stepped=FASTER,
    ),
    # ---- what the ranks' own notes say
    "teacher": case(  # only rank 0's learns
        DIFFERENT + "copies",
        {
            "copies": ".* after step 1: Sequential 2: 0.weight, .*, which no optimizer trains",
            "one batch": ".* .step 1, .*",
        },
        ready="import copy; teacher = copy.deepcopy(net).requires_grad_(False); teacher[0].weight *= 2",
        loss="F.mse_loss(model(x), teacher(x))",
        stepped="""if rank == 0:
    for p, q in zip(teacher.parameters(), net.parameters()): p.lerp_(q.data, 0.5)""",
    ),
    "bias_on_one_rank": case(  # that a rank lacks it shows parts; the others have equal shapes with two ranks
        SAME,
        {"gradients": "ok: .*"},
        nproc=(2, 3),
        begin=PART + BIAS,
        loader=ONE_SAMPLER,
        model="net",
        backward="(loss / n).backward()",
    ),
    "bias_on_one_rank_and_unequal_copies": case(
        DIFFERENT + "copies",
        {"copies": "the ranks' weights differ from the start: 0.weight, 0.bias"},
        nproc=(2, 3),
        begin=PART + BIAS + "\ntorch.manual_seed(rank); net = nn.Sequential(nn.Linear(8, 8), net)",
        loader=ONE_SAMPLER,
        model="net",
        backward="(loss / n).backward()",
    ),
    "tensor_parallel": case(
        SAME,
        {"examples": "24 per step, the same on all ranks, which share one model", "gradients": "ok: .*"},
        nproc=(2, 3),
        begin=TENSOR_PARALLEL,
        loader="DataLoader(data, 24)",
        model="net",
    ),
    "tensor_parallel_times": case(
        DIFFERENT + "gradients",
        {"gradients": "WRONG: what the optimizers receive is [23] times one process's gradient"},
        nproc=(2, 3),
        begin=TENSOR_PARALLEL,
        loader="DataLoader(data, 24)",
        model="net",
        backward="(loss * n).backward()",
    ),
    "tensor_parallel_forgets": case(  # to add up what the layer before the parts gets
        DIFFERENT + "copies, gradients",
        {"copies": "the ranks' weights differ after step 1: 0.weight, 0.bias"},
        nproc=(2, 3),
        begin=PART + "\nnet = nn.Sequential(nn.Linear(8, 8), net)",
        loader=ONE_SAMPLER,
        model="net",
        backward="(loss / n).backward()",
    ),
    "norm_of_a_batch_that_all_have": case(  # a difference that is gone without it is no excuse
        DIFFERENT + "gradients",
        {"gradients": "WRONG: what the optimizers receive is 2 times one process's gradient"},
        begin=TENSOR_PARALLEL + "\nnet = nn.Sequential(nn.BatchNorm1d(8), *net)",
        loader="DataLoader(data, 24)",
        model="net",
        backward="(loss * (1 + (n > 1) * net[0].training)).backward()",
    ),
    "parts_that_fail_alone": case(  # and have equal shapes: whether they are copies is not known
        "INCONCLUSIVE: averaging, one batch, weights: the tool's own run failed: .*",
        begin=PART,
        loader=ONE_SAMPLER,
        model="net",
        ready="if n == 1: raise ValueError('not alone')",
    ),
    "experts": case(
        SAME,
        {"examples": r"\d+ [+] \d+.* per step", "gradients": "ok: .*"},
        nproc=(2, 3),
        begin=EXPERTS,
        model="net",
        got="average(net.first.parameters()); net.experts.grad /= n",
    ),
    "sequence": case(  # of which each rank has a part
        SAME,
        {"examples": r".* per step: each rank takes its part of the same batch", "averaging": "ok: .*"},
        nproc=(2, 3),
        begin="forgets = inside = False" + SEQUENCE,
        loader="batches",
        model="net",
        before="x, y = x.chunk(n, 1)[rank], y.chunk(n, 1)[rank]",
        loss="F.mse_loss(net(x), y)",
        got=AVERAGE,
    ),
    "sequence_inside": case(  # all of it comes into the model
        SAME,
        {"examples": ".* per step: each rank takes its part of the same batch"},
        nproc=(2, 3),
        begin="forgets, inside = False, True" + SEQUENCE,
        loader="DataLoader(batches, None)",
        model="net",
        loss="F.mse_loss(net(x), y.chunk(n, 1)[rank])",
        got=AVERAGE,
    ),
    "sequence_forgets": case(  # the gradients of other ranks' losses
        BATCH + "the ranks compute parts of one batch, and their gradients don't add up to the batch's",
        {"averaging": "ok: .*"},
        nproc=(2, 3),
        begin="forgets, inside = True, False" + SEQUENCE,
        loader="batches",
        model="net",
        before="x, y = x.chunk(n, 1)[rank], y.chunk(n, 1)[rank]",
        loss="F.mse_loss(net(x), y)",
        got=AVERAGE,
    ),
    "alike_by_chance": case(
        SAME_THAT.format(120, 60),
        {"examples": r"60 \+ 60 per step, \d+ of \d+ on two ranks .checked by their content for 3 steps."},
        nproc=2,
        begin="rows = torch.randn(4000, 8); torch.manual_seed(rank)",
        loader="[(rows[torch.randint(4000, (60,))], torch.randint(4, (60,))) for _ in range(9)]",
    ),
    "other_labels": case(  # on each rank
        DIFFERENT + "examples",
        {"examples": r".*, but example \d+ of the data is not the same on rank 1 as on rank 0: .*"},
        nproc=(2, 3),
        begin="data.tensors[1].copy_((data.tensors[1] + rank) % 4)",
    ),
    "same_examples": case(
        DIFFERENT_THAT.format(8, 24) + "examples",
        {"examples": ".*, but all ranks have the same examples, .*: the ranks' DistributedSamplers have .*"},
        loader=ONE_SAMPLER,
    ),
    "equal_pairs": case(  # drawn with one seed
        DIFFERENT_THAT.format(16, 24) + "examples, averaging",
        {"examples": "8 .* per step, but some ranks have the same examples, .*: let each rank draw its own .*"},
        begin=PAIRS,
        loader="DataLoader(pairs, SIZE, sampler=DistributedSampler(pairs, shuffle=False))",
        ready="random.seed(0)",
    ),
    "equal_texts": case(  # only the masks and so the states differ
        DIFFERENT + "examples",
        {"examples": ".* per step, but all ranks have the same rows, so the work is done again: .*"},
        nproc=(2, 3),
        begin=TEXT,
        loader="texts",
        loss="loss_of(x, y)",
    ),
    "short_epoch": case(  # it ends with the last compared step, and one example is padding
        SAME,
        {"examples": r".* per step, 1 of 71 on two ranks .*"},
        nproc=(2, 3),
        begin="data = TensorDataset(*data[:71])",
    ),
    "own_order": case(  # of all examples
        DIFFERENT + "examples",
        {"examples": ".* in 3 steps, .* are on more than one rank: give each rank its own share .*"},
        begin=MINE,
        loader="DataLoader(data, SIZE, sampler=Mine())",
        ready="torch.manual_seed(rank)",
    ),
    "split": case(
        DIFFERENT + "examples",
        {"examples": r".*; in an epoch, \d+ of \d+ are on more than one rank: the ranks' Subsets have different .*"},
        begin="torch.manual_seed(rank); data = torch.utils.data.random_split(data, [400, 80])[0]",
    ),
    "split_and_data_sampler": case(  # whose order is known, too
        DIFFERENT + "examples",
        {"examples": r".*; in an epoch, \d+ of \d+ are on more than one rank: the ranks' Subsets have different .*"},
        begin="import distributed; torch.manual_seed(rank); data = torch.utils.data.random_split(data, [400, 80])[0]",
        loader="DataLoader(data, SIZE, sampler=distributed.data_sampler(data))",
    ),
    "drawn_by_each_rank": case(  # as negatives are, for each epoch: nobody is accused in its first steps
        "THE SAME as one process .each rank has a dataset of its own: .*",
        begin="import distributed; torch.manual_seed(rank); data = TensorDataset(data[:][0], torch.randint(4, (480,)))",
        loader="DataLoader(data, SIZE, sampler=distributed.data_sampler(data))",
    ),
    "stream": case(
        DIFFERENT + "examples",
        {"examples": ".*; in 3 steps, .* are on more than one rank: give each rank its own share"},
        begin=STREAM,
        loader="DataLoader(Stream(), SIZE)",
    ),
    # ---- what is not found out, and what was measured all the same
    "NaN": case(
        "INCONCLUSIVE: gradients: infinite or NaN in step 1 on rank 0", backward="(loss * float('nan')).backward()"
    ),
    "NaN_later": case(  # rank 1 has it, and then no rank makes a step
        "INCONCLUSIVE: gradients: infinite or NaN in step 2 on rank 1; not all ranks made 4 steps .*",
        nproc=(2, 3),
        before="if step == 1 and rank == 1: x = x * float('nan')",
        step="epoch or step > 1 or optimizer.step()",
    ),
    "a_rank_without_steps": case(
        r"INCONCLUSIVE: .* 4 steps of an optimizer \(rank 0: 4, rank 1: 0\)",
        nproc=2,
        options=("--timeout", 20),
        model="net",
        step="rank or optimizer.step()",
    ),
    "fails_alone": case(
        "INCONCLUSIVE: one batch, weights: the tool's own run failed: ValueError: not alone",
        {"averaging": "ok: .*"},
        before="if n == 1: raise ValueError('not alone')",
    ),
    # ---- what can't be seen
    "waits_alone": case(
        "INCONCLUSIVE: one batch, weights: in one process the program waits for 3 processes: give .* --alone=.*",
        {"averaging": "ok: .*"},
        group='"gloo", world_size=3, rank=int(os.environ["RANK"])',
    ),
    "fsdp1": case(
        "INCONCLUSIVE: averaging, one batch, weights: the ranks' weights differ from the start, and the modules .*",
        begin="""from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
net[0] = nn.Linear(8, 32, bias=False)  # so that its parts are padded""",
        model="FSDP(net, device_id=torch.device('cpu'))",
        optimizer="torch.optim.SGD(model.parameters(), 0.1)",
    ),
    "another_thread": case(
        "INCONCLUSIVE: no step of an optimizer of torch.optim was seen",
        begin="import threading",
        step="t = threading.Thread(target=optimizer.step); t.start(); t.join()",
    ),
}
QUICK = ["right", "sum_then_clip", "forgotten_layer_and_clip", "norm", "noise", "objects", "decay", "own_order"]
QUICK += ["closure", "flag", "constant_divides"]
CODES = {"THE SAME": 0, "DIFFERENT": 1, "INCONCLUSIVE": 2}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CASES])
def test_programs(name, tmp_path):
    patterns, nprocs, options, text = CASES[name]
    for nproc in nprocs:
        flags = ("--size", 24 // nproc) if name == "schedule" else ()
        code, lines, err = answer(*flags, text=text, nproc=nproc, cwd=tmp_path, options=options)
        for label, pattern in patterns.items():
            assert re.fullmatch(pattern, lines.get(label, "")), (nproc, label, lines, err)
        assert code == next(CODES[words] for words in CODES if lines["verdict"].startswith(words))
        is_said = name == "waits_alone"  # in the reason itself
        assert ("to settle it" in lines or is_said) == (code == 2), lines
        assert "Traceback" not in err, err


AHEAD = """
class Ahead:
    def __iter__(self):
        ready = []
        for batch in DataLoader(data, SIZE, sampler=DistributedSampler(data)):
            ready.append(batch)
            if len(ready) > depth: yield ready.pop(0)
        yield from ready
data = TensorDataset(*data[:24 * epoch_steps])"""


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("epoch_steps", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_loader_that_reads_ahead(depth, epoch_steps, tmp_path):
    """As Accelerate's does; in the last steps of an epoch it loads nothing."""
    begin = f"depth, epoch_steps = {depth}, {epoch_steps}" + AHEAD
    for nproc in 2, 3:
        _, lines, _ = answer(text=program(begin=begin, loader="Ahead()"), nproc=nproc, cwd=tmp_path, code=0)
        assert re.fullmatch(SAME, lines["verdict"]) and re.match(
            " all 24 examples", lines["one batch"].split("of", 1)[1]
        ), lines


SAYS = {  # of the wrong ways: the verdict, and a line that names the cause
    "sum": ("averaging", "averaging", "WRONG: 3 times one process's gradients: the ranks' sum, not their mean"),
    "divided_twice": ("averaging", "averaging", "WRONG: 1/3 of one process's .* and the mean divides it by 3"),
    "lr_times_processes": ("learning rate", "learning rate", "0.[23] with 3 processes, 0.1 with one .*"),
    "uneven": ("averaging", "averaging", "WRONG.*: the ranks are weighted .*, but in one process .*"),
    "tokens": ("averaging", "averaging", "WRONG.*: the ranks are weighted .*, but in one process .*"),
    "no_sync": ("copies, averaging", "averaging", f"WRONG: {OWN}"),
    "dropout_seed": (
        None,
        "note",
        "all ranks draw the same random numbers in a step, so they have .* masks: seed them differently",
    ),
    "clip": (
        "averaging",
        "averaging",
        "WRONG: each rank clips its own gradients: average .*",
    ),
    "forgotten_layer": (
        "copies, averaging",
        "averaging",
        "WRONG: " + NOT_AVERAGED.format(" of 2 of 4 tensors .2.weight, 2.bias."),
    ),
}
RIGHT = "uneven", "tokens", "dropout_seed", "clip"  # the right ways of the others are a plain program


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ways(way):
    code, lines, _ = answer("-m", "demos.ways", way, nproc=3, cwd=ROOT)
    reasons, label, text = SAYS[way]
    assert (code, reasons) == (1, lines["verdict"].removeprefix(DIFFERENT)) or way == "dropout_seed", lines
    assert re.fullmatch(text, lines[label]), lines
    if way in RIGHT:
        _, lines, _ = answer("-m", "demos.ways", way, "--right", nproc=3, cwd=ROOT, code=0)
        assert re.fullmatch(DROPOUT if way == "dropout_seed" else SAME, lines["verdict"]), lines
        assert "seed them differently" not in str(lines)


# --------------------------------------------------------------------------------------------- one whole epoch

SET_EPOCH = "loader.sampler.set_epoch(epoch + 1)"  # inside of an epoch: for the next one
SHORT = "data = TensorDataset(*data[:475])"  # so the sampler pads, and a batch is shorter
UNEQUAL = """
first = range(260)  # rank 0 has more
rows = first if rank == 0 else range(260, 480)[rank - 1 :: n - 1]"""
TWICE = """
class Shard:
    def __init__(self, inner): self.inner = inner
    def __iter__(self): return (row for k, row in enumerate(self.inner) if k % n == rank)
    def __len__(self): return len(self.inner) // n"""
OVERLAP = "(data[(rank * 480 // n + k) % 480] for k in range(480 // n + SIZE // 2))"
DRAW = "torch.utils.data.RandomSampler"
SEED = "torch.manual_seed(rank)"
PERMUTED = """
class Share:
    def __iter__(self): return iter(torch.randperm(480)[rank::n].tolist())
    def __len__(self): return 480 // n"""
CLASSES = """
data = TensorDataset(*data[:96])
class Classes:  # 4 batches of all ranks together: 4 of the 8 examples of 6 of 12 classes
    made = 0
    def __iter__(self):
        g, Classes.made = torch.Generator().manual_seed(1000 * self.made), self.made + 1
        for classes in [*torch.randperm(12, generator=g).split(6), *torch.randperm(12, generator=g).split(6)]:
            drawn = [[int(k) + 12 * row for row in torch.randperm(8, generator=g)[:4].tolist()] for k in classes]
            yield sum(drawn[rank::n], [])
    def __len__(self): return 4"""
SIZES = "batches = [[j for j in range(24 * k, 24 * k + 24) if j % (n + 1) % n == rank] for k in range(20)]"
LISTED = "listed = torch.randperm(480, generator=torch.Generator().manual_seed(2)).tolist()"
LISTS = "DataLoader(data, batch_sampler=[listed[k : k + 24][rank::n] for k in range(0, 480, 24)])"
HALF = "data = torch.utils.data.Subset(data, range(rank, 240 if n > 1 else 480, n))"
ONCE = "examples were read, each once, on one rank"


def dealt(every):
    """A stream of which each rank takes one of so many examples."""
    rows = f"__import__('itertools').islice(data, rank, None, {every})"
    return {"begin": STREAM.partition("(data")[0] + rows, "loader": "DataLoader(Stream(), SIZE)", "before": ""}


EPOCHS = {  # the exit code, and what is said by label; of programs with these parts
    "right": (
        0,
        {"examples": "480 of 480 examples were read, each once, on one rank", "order": ".* has a different order"},
        {},
    ),
    "padded": (0, {"examples": r"475 of 475 examples were read, [12] of them again .padding."}, {"begin": SHORT}),
    "in_turn": (
        0,
        {"order": "the second epoch has the order of the first, which is not shuffled"},
        {"loader": "DataLoader(data, SIZE, sampler=DistributedSampler(data, shuffle=False))", "before": ""},
    ),
    "workers": (
        0,
        {"examples": "480 of 480 examples were read, each once, on one rank"},
        {"loader": "DataLoader(data, SIZE, sampler=DistributedSampler(data), num_workers=1, persistent_workers=True)"},
    ),
    "no_set_epoch": (1, {"order": ".* though it is shuffled: call sampler.set_epoch.epoch. .*"}, {"before": ""}),
    "batches_of_a_list": (0, {"order": ".* no DistributedSampler"}, {"begin": LISTED, "loader": LISTS, "before": ""}),
    "sharded_twice": (
        1,
        {"examples": r"(240|160) of 480 examples were read, (240|320) are never read: as if each rank took .*"},
        {
            "begin": TWICE,
            "loader": "DataLoader(data, SIZE, sampler=Shard(DistributedSampler(data)))",
            "before": SET_EPOCH.replace("sampler", "sampler.inner"),
        },
    ),
    "same_examples": (
        1,
        {"examples": "480 examples were read, the same on two ranks: give each rank its own share .*"},
        {"loader": "DataLoader(data, SIZE, shuffle=True)", "before": ""},
    ),
    "unequal": (  # rank 0 has more; nobody averages, so it does not wait
        2,
        {
            "verdict": "INCONCLUSIVE: batches: the ranks have unequal numbers of batches",
            "batches": r"inconclusive: \d\d . .*: rank \d has \d+, rank 0 \d+",
        },
        {"begin": UNEQUAL, "loader": "DataLoader(data, SIZE, sampler=rows)", "model": "net", "before": ""},
    ),
    "hangs": (  # in the last step of rank 0
        1,
        {"batches": r"\d+ . .* or more: rank \d has \d+, rank 0 \d+; ranks with more wait for the others forever"},
        {
            "begin": UNEQUAL,
            "loader": "DataLoader(data, SIZE, sampler=rows)",
            "before": "if rank and epoch: time.sleep(1000)",
        },
    ),
    "stream": (
        1,
        {"examples": "480 examples were read; 480 of 480 are on more than one rank: .*"},
        {"begin": STREAM, "loader": "DataLoader(Stream(), SIZE)", "before": ""},
    ),
    "stream_dealt_out": (0, {"examples": f"480 {ONCE}; 480 in one process"}, dealt("n")),
    "stream_with_gaps": (1, {"examples": rf".* {ONCE}; 480 in .*, so 1[26]0 are never read"}, dealt("n + (n > 1)")),
    "stream_with_gaps_alone": (
        2,
        {"verdict": "INCONCLUSIVE: examples: one process reads fewer: .*"},
        dealt("n + 1"),
    ),
    "stream_that_fails_alone": (
        2,
        {"verdict": ".*: one process reads fewer: .*"},
        dealt("n if n > 1 else 1 / 0"),
    ),
    "stream_twice": (
        2,
        {"verdict": "INCONCLUSIVE: examples: some were read more than once, and not as padding"},
        {
            "begin": STREAM.replace(
                "(data[(k + 4 * rank) % 480] for k in range(480))",
                "(data[k] for k in range(rank, 480, n) for _ in range(2))",
            ),
            "loader": "DataLoader(Stream(), SIZE)",
            "before": "",
        },
    ),
    "stream_overlaps": (  # a sampler pads, a stream does not
        2,
        {"verdict": "INCONCLUSIVE: examples: some are on more than one rank, or the data have equal examples"},
        {
            "begin": STREAM.replace("(data[(k + 4 * rank) % 480] for k in range(480))", OVERLAP),
            "loader": "DataLoader(Stream(), SIZE)",
            "before": "",
        },
    ),
    "subset_and_sampler": (
        1,
        {"examples": r"\d+ examples were read, \d+ are never read: as if each rank took its share .*"},
        {"begin": "data = torch.utils.data.Subset(data, range(rank, 480, n))"},
    ),
    "subsets_of_a_half": (  # no rank has the rest, but one process does
        1,
        {"examples": f"240 {ONCE}; 480 in one process, so 240 are never read"},
        {"begin": HALF, "loader": "DataLoader(data, SIZE)", "before": ""},
    ),
    "subsets": (
        0,
        {"examples": f"480 {ONCE}; 480 in one process"},
        {"begin": HALF.replace("240", "480"), "loader": "DataLoader(data, SIZE)", "before": ""},
    ),
    "replacement": (
        0,
        {"examples": "480 examples were read, drawn at random, so they were not counted"},
        {"loader": f"DataLoader(data, SIZE, sampler={DRAW}(data, True, 480 // n))", "before": "", "begin": SEED},
    ),
    "replacement_alike": (
        1,
        {"examples": r"1\d\d examples were read, the same on two ranks: let each rank draw its own examples .*"},
        {"loader": f"DataLoader(data, SIZE, sampler={DRAW}(data, True, 480 // n))", "before": ""},
    ),
    "drawn_again": (  # classes, of which some examples are drawn
        2,
        {"verdict": "INCONCLUSIVE: examples: some were read more than once, and not as padding"},
        {"begin": CLASSES, "loader": "DataLoader(data, batch_sampler=Classes())", "before": ""},
    ),
    "lost": (  # the last example of each rank, and its last batch is not full
        2,
        {"examples": r"inconclusive: 47[78] of 480 examples were read, [23] are never read"},
        {"begin": "rows = [*range(rank, 480, n)][:-1]", "loader": "DataLoader(data, SIZE, sampler=rows)", "before": ""},
    ),
    "left_out": (  # by the loader
        0,
        {"examples": r"4[5-8]\d of 479 examples were read, each once, on one rank"},
        {
            "begin": "data = TensorDataset(*data[:479]); rows = range(rank, 479, n)[: 479 // n]",
            "loader": "DataLoader(data, SIZE, sampler=rows, drop_last=True)",
            "before": "",
        },
    ),
    "other_sizes": (  # of the ranks' batches; all ranks leave after as many
        0,
        {"batches": r"20 . 20.*"},
        {"begin": SIZES, "loader": "DataLoader(data, batch_sampler=batches)", "before": ""},
    ),
    "second_epoch": (  # the ranks' generators go different ways
        1,
        {"examples": r"480 of 480 examples were read; but in the second epoch, \d+ of the first \d+ are on more .*"},
        {"begin": PERMUTED, "loader": "DataLoader(data, SIZE, sampler=Share())", "before": "rank or torch.rand(1)"},
    ),
    "two_loaders": (
        2,
        {"verdict": "INCONCLUSIVE: loaders: only one DataLoader was followed, and others, too, .*"},
        {"begin": "more = iter(DataLoader(data, 1))", "stepped": "next(more)"},
    ),
    "looks_at_the_data_first": (  # a shape, an average
        0,
        {"examples": "480 of 480 examples were read, each once, on one rank", "order": ".* has a different order"},
        {"ready": "next(iter(loader))\nfor x, y in loader: net(x)"},
    ),
    "evaluates": (  # the loop is not within no_grad
        0,
        {"order": ".* has a different order"},
        {"ready": "test = DataLoader(data, 100)", "stepped": "if step == 0: [net(a) for a, _ in test]"},
    ),
    "a_loader_for_each_epoch": (
        0,
        {"order": ".* has a different order"},
        {"begin": ANEW, "loader": "Anew()", "before": ""},
    ),
    "a_loader_for_each_epoch_after_another": (
        0,
        {"order": ".* has a different order"},
        {
            "begin": ANEW,
            "ready": "for (x,) in DataLoader(TensorDataset(torch.ones(32, 8)), 8): net(x)",
            "loader": "Anew()",
            "before": "",
        },
    ),
    "draws": (
        0,
        {"examples": "(960|1440) examples were read, drawn at random, so they were not counted"},
        {
            "begin": DRAWS + "\ndata = Draws()",
            "loader": "DataLoader(data, 480 // n)",
            "before": "",
            "ready": "torch.manual_seed(rank)",
        },
    ),
    "changes": (
        2,
        {"verdict": "INCONCLUSIVE: examples: the data have changed since their loader was made, .*"},
        {
            "begin": ANEW.replace("return", "data.tensors[0].add_(rank * torch.randn(8))\n        return"),
            "loader": "Anew()",
            "before": "",
        },
    ),
    "shards_of_unequal_length": (
        2,
        {"verdict": "INCONCLUSIVE: examples: each rank has a dataset of its own: .*"},
        {
            "begin": "data = TensorDataset(*(one[rank::n][: 160 - rank] for one in data.tensors))",
            "loader": "DataLoader(data, 8, shuffle=True)",
            "before": "",
        },
    ),
    "leaves": (
        2,
        {"verdict": "INCONCLUSIVE: batches: no rank has read its DataLoader to the end"},
        {"stepped": "if step == 9: break"},
    ),
    "in_the_loop": (
        2,
        {"verdict": "INCONCLUSIVE: no DataLoader gave batches to train with: .*"},
        {"loader": "[(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(20)]", "before": ""},
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "right" else pytest.mark.slow) for n in EPOCHS])
def test_one_epoch(name, tmp_path):
    code, patterns, parts = EPOCHS[name]
    for nproc in 2, 3:
        text = program(**{"before": SET_EPOCH, **parts})
        options = ("--epoch", "--timeout", 8 if name == "hangs" else 120)
        _, lines, err = answer(text=text, nproc=nproc, cwd=tmp_path, code=code, options=options)
        for label, pattern in patterns.items():
            assert re.fullmatch(pattern, lines.get(label, "")), (nproc, label, lines, err)
        assert ("made no step" in err) == (name == "hangs"), err
        if code == 1:
            assert lines["verdict"] == f"DIFFERENT from one process in an epoch in: {next(iter(patterns))}"


@pytest.mark.slow
def test_a_rank_that_reaches_the_end_first(tmp_path):
    text = program(begin=UNEQUAL, loader="DataLoader(data, SIZE, sampler=rows)").replace("range(5)", "range(1)")
    for nproc in 2, 3:
        _, lines, _ = answer(text=text, nproc=nproc, cwd=tmp_path, code=1, options=("--epoch",))
        assert re.fullmatch(".* or more: .*; ranks with more wait for the others forever", lines["batches"]), lines


# -------------------------------------------------------------------------------------- how small a difference

LIMITS = {  # and what the verdict says of more
    "spread": (limits.AVERAGED, "averaging"),
    "loss": (limits.ROUNDING * 24**0.5, "averaging"),  # link 2's; a factor is called one of averaging
    "step": (limits.UPDATED, "weights"),
}


@pytest.mark.slow
@pytest.mark.parametrize("large", [None, *LIMITS])
def test_ten_times_the_limit_is_found_and_a_third_of_it_is_not(large, tmp_path):
    sizes = {name: limit * (10 if name == large else 1 / 3) for name, (limit, _) in LIMITS.items()}
    text = program(
        model="net",
        optimizer="torch.optim.SGD(net.parameters(), 10.0)",
        backward=f"(loss * (1 + {sizes['loss']} * (n == 1))).backward()",
        got=f"average(net.parameters(), 1 + {sizes['spread']} * (n > 1)); old = [p.clone() for p in net.parameters()]",
        stepped=f"for p, q in zip(net.parameters(), old): p.data += {sizes['step']} * (n > 1) * (p.data - q)",
    )
    _, lines, _ = answer(text=text, nproc=3, cwd=tmp_path, code=0 if large is None else 1)
    assert re.fullmatch(SAME if large is None else DIFFERENT + LIMITS[large][1], lines["verdict"])


@pytest.mark.slow
@pytest.mark.parametrize(("times", "code"), [(10, 1), (1 / 3, 0)])
def test_the_limit_of_bfloat16(times, code, tmp_path):
    loss = "F.cross_entropy(torch.autocast('cpu', torch.bfloat16)(model)(x), y)"
    backward = f"(loss * (1 + {times * limits.MOST_COARSE} * (n == 1))).backward()"
    answer(text=program(loss=loss, backward=backward), nproc=3, cwd=tmp_path, code=code)


# ------------------------------------------------------------------------------------------ nothing is touched

ON_ITS_OWN = """
import distributed_launcher as launcher, runpy
def train(): runpy.run_path("train.py", run_name="__main__")
launcher.run(train, nproc=3)
"""
ENDLESS = """
class Endless:
    generator = torch.Generator().manual_seed(rank)
    def __iter__(self):
        while True:
            yield int(torch.randint(160, (), generator=self.generator)) * n + rank
net.append(nn.Dropout(0.1)); random.seed(rank)"""
DRAWN = """if step == 2:
    states = torch.get_rng_state(), torch.tensor(random.getstate()[1]), Endless.generator.get_state()
    torch.save([states, net.state_dict()], f'after{rank}.pt')
    sys.exit()"""


def test_the_program_computes_and_draws_what_it_does_on_its_own(tmp_path):
    """Bit by bit: the weights, and the states of the generators, its sampler's own, too."""
    loader = "DataLoader(data, SIZE, sampler=Endless(), num_workers=1)"
    text = program(begin=ENDLESS, loader=loader, before="random.random()", stepped=DRAWN)
    answer(text=text, nproc=3, cwd=tmp_path, code=2)  # it makes too few steps, so it comes to its end
    noted = {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")}
    (tmp_path / "own.py").write_text(ON_ITS_OWN)
    assert forker().run(tmp_path / "own.py", cwd=tmp_path, path=[ROOT]).code == 0
    assert len(noted) == 3
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
        (tmp_path / "train.py").write_text(program(ready=f"{mark}\n{text}"))
        (tmp_path / "alone").unlink(missing_ok=True)
        job = forker().start(
            "-m", "ddp_by_diff.equivalence", "train.py", path=[ROOT], cwd=tmp_path, TMPDIR=tmp_path / "tmp"
        )
        if code == 143:
            wait_for(lambda: (tmp_path / "alone").exists())
            os.kill(job.pid, signal.SIGTERM)
        done = job.wait()
        assert done.code == code, done
        assert ("rank 1 of 2 failed first" in done.err) == (code == 2)
        assert [path.name for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("pymp-")] == []
    assert processes_in(tmp_path) == []


def test_a_terminal_shows_which_step_of_which_run_and_not_what_the_program_prints(tmp_path):
    text = program(ready="print('said', file=sys.stderr)")
    screen, terminal = os.openpty()
    os.set_blocking(screen, False)
    before = f"import os; os.dup2(os.open({os.ttyname(terminal)!r}, os.O_RDWR), 2)"
    answer(text=text, nproc=3, cwd=tmp_path, before=before, code=0)
    seen = os.read(screen, 10000).decode()
    assert "said" not in seen
    shown = re.findall(r"\requivalence: (\w+) process(?:es)?, (?:all examples, )?step (\d) of 4", seen)
    assert shown == [(who, str(step)) for who in ("3", "one") for step in range(1, 5)]
    os.close(screen)
    os.close(terminal)


def test_the_answer_as_json(tmp_path):
    """Right, wrong, not found out, an error; in the folder where the command was given."""
    file, moves = tmp_path / "answer.json", "os.mkdir(f'of {rank} of {n}'); os.chdir(f'of {rank} of {n}')\n"
    for verdict, state, parts in (
        ("same", "right", {"begin": moves}),
        ("different", "wrong", {"backward": "(loss * n).backward()"}),
        ("not found out", "right", {"loss": "F.cross_entropy(model(x + torch.randn_like(x)), y)"}),
        ("not found out", None, {"stepped": "if step == 2: sys.exit()"}),
        ("error", None, {"begin": "raise ValueError('as planned')"}),
        ("error", None, {"begin": "torch.multiprocessing.spawn(print)"}),
    ):
        file.unlink(missing_ok=True)
        code, lines, _ = answer(text=program(**parts), cwd=tmp_path, options=("--json", file.name))
        found = json.loads(file.read_text())
        assert found["verdict"] == verdict and found["program"] == ["train.py"], found
        assert code == {"same": 0, "different": 1}.get(verdict, 2)
        if verdict != "error":
            assert found["text"] == lines["verdict"] and found["processes"] == 2
            links = {link["name"]: link for link in found["links"]}
            assert state is None or links["averaging"]["state"] == state, found
            assert all(
                (0 <= link["difference"] <= link["threshold"])
                for link in links.values()
                if link["difference"] and link["state"] == "right"
            ), found


UNPORTED = program(model="net", loader="DataLoader(data, 8, shuffle=True)").replace("dist.init_process_group", "str")
UNPORTED = UNPORTED.replace("dist.get_rank()", "0").replace("dist.get_world_size()", "3")
ADVICE = {  # a program, and one that follows what `to settle it` says (or --alone); what the verdict then begins with
    "the global batch": (program(begin=CONSTANT, loss=SUM), program(begin=FLAG, loss=SUM), "THE SAME"),
    "a rate": (
        program(begin=CONSTANT, optimizer="torch.optim.SGD(net.parameters(), 0.01 * SIZE * n)"),
        program(begin=FLAG, optimizer="torch.optim.SGD(net.parameters(), 0.01 * SIZE * n)"),
        "THE SAME",
    ),
    "a smaller batch": (program(begin=CONSTANT + FULL), program(begin="SIZE = 2" + FULL), "THE SAME"),
    "tensors": (
        program(
            begin=ITEMS,
            loader="DataLoader(Items(), SIZE, sampler=DistributedSampler(data), collate_fn=listed)",
            before="x, y = whole(x)",
        ),
        program(begin=ITEMS, loader="DataLoader(Items(), SIZE, sampler=DistributedSampler(data), collate_fn=whole)"),
        "THE SAME",
    ),
    "a fixed order": (CASES["other_layers"][3], CASES["right"][3], "THE SAME"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADVICE)
def test_an_advice_settles_it(name, tmp_path):
    before, after, verdict = ADVICE[name]
    assert "to settle it" in answer(text=before, nproc=3, cwd=tmp_path, code=2)[1]
    assert answer(text=after, nproc=3, cwd=tmp_path)[1]["verdict"].startswith(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["torch.manual_seed(0)", "torch.seed()"])
def test_a_program_that_sends_nothing(seed, tmp_path):
    _, lines, _ = answer(text=UNPORTED.replace("torch.manual_seed(0)", seed), cwd=tmp_path, code=1)
    assert re.fullmatch("DIFFERENT .*: no process has started a process group, so each .* on its own", lines["verdict"])


def test_bad_flags_are_one_line(tmp_path):
    (tmp_path / "train.py").write_text("")
    for given in (
        "",
        "nothing.py",
        "--steps 1 train.py",
        "--nproc 1 train.py",
        "train.py --nproc 3",
        "--json nowhere/file train.py",
        "--alone ' train.py",
    ):
        done = forker().run("-m", "ddp_by_diff.equivalence", *given.split(), path=[ROOT], cwd=tmp_path)
        assert done.code == 2 and len(done.err.splitlines()) == 1, done
    done = forker().run(
        "-m", "ddp_by_diff.equivalence", "--nproc", 2, "train.py", path=[ROOT], cwd=tmp_path, RANK=0, WORLD_SIZE=2
    )
    said = "equivalence: error: a launcher has started the processes: leave out --nproc\n"
    assert (done.code, done.err) == (2, said)


def test_a_mistake_of_its_own_is_not_different(tmp_path):
    before = f"import tempfile; tempfile.tempdir = {str(tmp_path / 'nothing')!r}"
    _, _, err = answer(text=program(), cwd=tmp_path, before=before, code=2)
    assert err.endswith("equivalence: this is a bug in equivalence itself: please report it\n"), err


SAVED = """
file = sys.argv[-1]  # the program itself, but for a flag
is_there = file.endswith(".pt") and os.path.exists(file)
if is_there: net.load_state_dict(torch.load(file))
dist.barrier()"""
RESUMES = {
    "begin": SAVED,
    "optimizer": "torch.optim.SGD(net.parameters(), 0.05 if is_there else 0.1)",
    "stepped": "if rank == 0: torch.save(net.state_dict(), file)",
}


def test_a_program_that_resumes(tmp_path):
    text, read = program(**RESUMES), "INCONCLUSIVE: one process began with weights that the ranks had later, .*"
    for flag, options, code, verdict in ("a.pt", ("--alone", "b.pt"), 0, SAME), ("c.pt", (), 2, read):
        _, lines, _ = answer(flag, text=text, nproc=3, cwd=tmp_path, code=code, options=options)
        assert re.fullmatch(verdict, lines["verdict"]), lines


@pytest.mark.slow
def test_under_torchrun_from_any_folder(tmp_path):
    (tmp_path / "train.py").write_text(program())
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "ddp_by_diff.equivalence")
    done = forker().run(*torchrun, "--steps", 2, "train.py", path=[ROOT], cwd=tmp_path)
    assert done.code == 0 and done.out.startswith("verdict       THE SAME as one process"), done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("mnist_transformer", "", "THE SAME as one process"),
        ("mnist_context_parallel", "", "each rank takes its part of the same batch"),
        ("mnist_experts", "", "gradients ok: the optimizers receive one process's gradients"),
        ("mnist_experts", "p.grad /= dist.get_world_size()", "2 times one process's gradient of blocks.0.mlp.experts"),
    ],
)
def test_a_sequence_or_experts_that_the_ranks_share(script, code, words, tmp_path):
    """The scripts of variants/; and without the line that `code` begins, in whose place nothing is done."""
    text = (ROOT / f"variants/{script}.py").read_text()
    assert code in text
    (tmp_path / "train.py").write_text(text.replace(code, "0") if code else text)
    program = (tmp_path / "train.py", "--dataset", "synthetic", "--epochs", 1)
    run = forker().run("-m", "ddp_by_diff.equivalence", *program, path=[ROOT])
    said = " ".join(run.out.split())
    assert run.code == (1 if code else 0) and words in said, run.out + run.err
