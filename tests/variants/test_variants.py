"""variants/: main of each computes what main of mnist_ddp.py computes, in a few steps; and what each one adds.

Compared are weights, BatchNorm's averages and the printed lines, after each of two epochs, in float64
(FSDP's in float32, in which it adds up).
"""

import contextlib
import copy
import functools
import importlib
import io
import pickle
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from world import FEW_DIGITS, ROOT, error_of, forker, on_ranks, run, run_in_a_group_of_one, skip_if_refused, wait_for

import data
import distributed as dist
from exercises.checks.common import Messages
from mnist_ddp import ConvNet
from variants import (
    mnist_context_parallel,
    mnist_experts,
    mnist_fsdp_by_hand,
    mnist_local_sgd,
    mnist_overlap,
    mnist_transformer,
    sharded,
)

CPU = torch.device("cpu")
SIDE = 8  # pixels: convolutions cost time
WEIGHTS = sum(p.numel() for p in ConvNet(1, SIDE).parameters())  # without BatchNorm's averages
FLAGS = "--dataset synthetic --epochs 2 --batch-size 30 --lr 0.05 --seed 3"
PIPELINES = ("mnist_pipeline", "mnist_pipeline_1f1b")
SHARED_LAYERS = ("mnist_tensor_parallel", "mnist_context_parallel", *PIPELINES)  # all ranks have the same batch
SHARDED = ("mnist_fsdp", "mnist_mesh", "mnist_experts", *SHARED_LAYERS)


def images(count, seed=1, side=SIDE):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 1, side, side), dtype=torch.uint8, generator=generator)
    return data.Images(pixels, torch.arange(count) % 10, (0.5,), (0.5,))


def _main(name, flags, has_batchnorm, dtype, examples=69, tests=31):
    """parse_args and main of the script on this rank, in the group that is there.

    Returns what it evaluated, what it printed, the bytes of optimizer state, and those of the parameters that are here
    when the last layer starts.  Each of three processes trains on 23 images, in batches of 10, 10 and 3, and rank 0 has
    one batch more to evaluate.
    """
    rank, n, module = dist.get_rank(), dist.get_world_size(), importlib.import_module(name)
    states, modes, held, gathered = [], set(), [], []
    batches, seed, train, evaluate = data.batches, torch.manual_seed, module.train, module.evaluate

    def noted_train(model, loader, optimizer, *args):
        if name.endswith("fsdp"):
            model[-1].register_forward_pre_hook(lambda *_: gathered.append(sharded.local_bytes(model.parameters())))
        sums = train(model, loader, optimizer, *args)
        held[:] = [sharded.local_bytes(value for state in optimizer.state.values() for value in state.values())]
        return sums

    def noted_evaluate(model, *args):
        hook = model.register_forward_pre_hook(lambda *_: modes.add((model.training, torch.is_grad_enabled())))
        sums = evaluate(model, *args)
        hook.remove()
        states.append({key: value.clone() for key, value in dist.unwrap_model(model).state_dict().items()})
        return sums

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        for variable, value in dict(RANK=rank, WORLD_SIZE=n, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=n).items():
            patch.setenv(variable, str(value))
        patch.setattr(sys, "argv", [name, *FLAGS.split(), *flags.split()])
        for group, function in (dist, "cleanup"), (torch.distributed, "destroy_process_group"):
            patch.setattr(group, "init_process_group", lambda *args, **kwargs: None)
            patch.setattr(group, function, lambda: None)
        patch.setattr(data, "load", lambda *args: (images(examples), images(tests, seed=2)))
        patch.setattr(data, "batches", lambda *args: ((x.to(dtype), labels) for x, labels in batches(*args)))
        if not has_batchnorm:
            patch.setattr(nn, "BatchNorm2d", lambda channels: nn.Identity())
        if hasattr(module, "PATCH"):
            patch.setattr(module, "PATCH", 2)  # 16 tokens
        if not name.endswith(SHARDED):  # those start from shares of equal weights
            patch.setattr(torch, "manual_seed", lambda number: seed(number + rank))  # rank 0's weights are meant to win
        if name.endswith("overlap"):
            patch.setattr(module, "start_all_reduce", functools.partial(_start_late, module.start_all_reduce))
        patch.setattr(module, "train", noted_train)
        patch.setattr(module, "evaluate", noted_evaluate)
        args = module.parse_args()
        torch.set_default_dtype(dtype)
        try:
            module.main(rank, n, args)
        finally:
            torch.set_default_dtype(torch.float32)
    assert modes == {(False, False)}, "an evaluation is in evaluation mode, without gradients"
    return pickle.dumps((states, printed.getvalue(), *held, gathered))


def _start_late(start_all_reduce, p):
    """So late that a step without the wait would use this process's gradient alone."""
    time.sleep(0.005 * dist.get_rank())
    start_all_reduce(p)


def outcome(n, *case):
    """What _main returns on each of n ranks."""
    found = run(_main, n, *case) if n > 1 else [run_in_a_group_of_one(_main, *case)]
    return [pickle.loads(one) for one in found]


@functools.cache
def ddp(n, has_batchnorm, dtype):
    """Rank 0's outcome of mnist_ddp.py; after each epoch all ranks have evaluated the same model."""
    ranks = outcome(n, "mnist_ddp", "", has_batchnorm, dtype)
    for states in zip(*(rank[0] for rank in ranks), strict=True):
        together("mnist_ddp", states)
    return ranks[0]


def losses_and_counts(printed):
    found = re.findall(r"loss (\S+)  accuracy \S+ \((\d+)/(\d+)\)", printed)
    return [(float(loss), int(correct), int(count)) for loss, correct, count in found]


def replicas(n, name, flags):
    """How many processes share out the batch."""
    if name in ("mnist_ddp", *SHARED_LAYERS):
        return 1
    return n // int(flags.split()[-1]) if name == "mnist_mesh" else n


def together(name, states, rows=1):
    """One state of all ranks' states; of a mesh those of the first row, if all rows are equal."""
    if name in PIPELINES:  # each has some of the layers
        return {key: value for state in states for key, value in state.items()}
    if name not in ("mnist_tensor_parallel", "mnist_mesh"):
        for state in states:
            assert all(torch.equal(state[key], value) for key, value in states[0].items()), "the ranks differ"
        return states[0]
    length = len(states) // rows
    for rank, state in enumerate(states):
        assert all(torch.equal(state[key], value) for key, value in states[rank % length].items()), "the rows differ"
    states = states[:length]
    state = dict(states[0])
    for key in state:
        if key.startswith(("4.", "5.")) and state[key].dim():  # the channels of a convolution and its BatchNorm
            state[key] = torch.cat([s[key] for s in states])
    shares = [s["9.weight"].unflatten(1, (-1, (SIDE // 4) ** 2)) for s in states]
    state["9.weight"] = torch.cat(shares, dim=1).flatten(1)
    return state


VARIANTS = [
    (3, "mnist_by_hand", "", True),
    (3, "mnist_overlap", "", True),
    (3, "mnist_zero", "", True),
    (3, "mnist_fsdp_by_hand", "", True),
    (2, "mnist_fsdp_by_hand", "", True),
    (1, "mnist_fsdp_by_hand", "", True),
    (3, "mnist_fsdp", "", True),
    (3, "mnist_accumulate", "--accumulate 1", True),
    (3, "mnist_accumulate", "", False),  # BatchNorm would see micro-batches; 10 = 3 + 3 + 3 + 1
    (1, "mnist_accumulate", "", False),
    (3, "mnist_local_sgd", "--every 1", True),  # an average of weights after each step: SGD with momentum is linear
    (3, "mnist_tensor_parallel", "", True),
    (4, "mnist_mesh", "--tensor-parallel 1", True),
    (4, "mnist_mesh", "--tensor-parallel 2", True),
    (4, "mnist_mesh", "--tensor-parallel 4", True),
    (3, "mnist_pipeline", "", False),
    (1, "mnist_pipeline", "", False),
    (3, "mnist_pipeline_1f1b", "", False),
    (2, "mnist_pipeline_1f1b", "", False),
    (1, "mnist_pipeline_1f1b", "", False),
]
SCRIPTS = [
    (3, "mnist_ddp", "", False),  # BatchNorm would see shares of the batch
    (3, "mnist_ddp_plain", "", True),
    (3, "mnist_amp", "", True),  # autocast leaves float64 alone
]


@pytest.mark.parametrize(("n", "name", "flags", "has_batchnorm"), [*SCRIPTS, *VARIANTS])
def test_it_computes_what_ddp_computes(n, name, flags, has_batchnorm):
    """Against mnist_ddp.py, in as many processes as share out the batch; mnist_ddp.py itself in one process."""
    skip_if_refused(name)
    dtype, tolerance = (torch.float32, 2e-6) if name == "mnist_fsdp" else (torch.float64, 1e-10)
    rows = replicas(n, name, flags)
    states, printed, held, _ = ddp(rows, has_batchnorm, dtype)
    script = name if (n, name, flags, has_batchnorm) in SCRIPTS else f"variants.{name}"
    ranks = outcome(n, script, flags, has_batchnorm, dtype)
    for epoch, expected in enumerate(states):
        state = together(name, [rank[0][epoch] for rank in ranks], rows)
        assert state.keys() == expected.keys()
        assert max((state[key] - value).abs().max().item() for key, value in expected.items()) <= tolerance
    for ours, theirs in zip(losses_and_counts(ranks[0][1]), losses_and_counts(printed), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4) and ours[2] == 31
    assert all(said == "" for _, said, *_ in ranks[1:]), "rank 0 alone prints"
    of_ranks = [bytes_ for *_, bytes_, _ in ranks]
    if name == "mnist_zero":
        assert of_ranks == [8 * -(-WEIGHTS // n)] * n
    elif name == "mnist_fsdp_by_hand":  # each parameter is padded by itself
        assert of_ranks == [8 * sum(-(-p.numel() // n) for p in ConvNet(1, SIDE).parameters())] * n
    elif name in ("mnist_fsdp", *PIPELINES):
        assert sum(of_ranks) == held and (n == 1 or max(of_ranks) < held)
    elif name not in ("mnist_tensor_parallel", "mnist_mesh"):
        assert of_ranks == [held] * n


@functools.cache
def transformer():
    return outcome(1, "variants.mnist_transformer", "--lr 0.003", True, torch.float64)[0]


@pytest.mark.parametrize(("name", "n"), [("mnist_transformer", 3), *(("mnist_context_parallel", n) for n in (2, 3, 4))])
def test_a_transformer_on_several_ranks_is_that_of_one(name, n):
    """Sharing out the batch, or each sequence: with three ranks 6, 5 and 5 tokens."""
    states, printed, *_ = transformer()
    ranks = outcome(n, f"variants.{name}", "--lr 0.003", True, torch.float64)
    for epoch, expected in enumerate(states):
        whole = together(name, [rank[0][epoch] for rank in ranks])
        assert whole.keys() == expected.keys()
        assert max((whole[key] - value).abs().max().item() for key, value in expected.items()) <= 1e-10
    for ours, theirs in zip(losses_and_counts(ranks[0][1]), losses_and_counts(printed), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def _ring(counts):
    """This rank's result and gradients of attention over shares of a sequence; large scores, of which exp overflows."""
    generator = torch.Generator().manual_seed(4)
    whole = [100 * torch.randn(2, 3, sum(counts), 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    upstream = torch.randn(2, 3, sum(counts), 4, generator=generator, dtype=torch.float64)
    rank = dist.get_rank()
    q, k, v = (tensor.split(counts, 2)[rank].clone().requires_grad_() for tensor in whole)
    result = mnist_context_parallel.RingAttention.apply(q, k, v, counts)
    result.backward(upstream.split(counts, 2)[rank])
    for tensor in whole:
        tensor.requires_grad_()
    expected = F.scaled_dot_product_attention(*whole)
    expected.backward(upstream)
    mine = [result, q.grad, k.grad, v.grad]
    theirs = [tensor.split(counts, 2)[rank] for tensor in (expected, *(tensor.grad for tensor in whole))]
    return [(one - other).abs().max().item() for one, other in zip(mine, theirs, strict=True)]


@pytest.mark.parametrize("counts", [[5], [3, 2], [1, 4, 2], [2, 1, 1, 3]])
def test_ring_attention_is_torchs_attention_to_all_tokens(counts):
    ranks = run(_ring, len(counts), counts) if len(counts) > 1 else [run_in_a_group_of_one(_ring, counts)]
    assert max(max(rank) for rank in ranks) < 1e-9


def _parts_in_turns(counts):
    """The ranks whose parts are here: in each turn, and after the last one."""
    part = torch.full((1, counts[dist.get_rank()], 1), dist.get_rank())
    here = [part.max().item()]
    for turn in range(len(counts)):
        part = mnist_context_parallel.pass_on(part, counts, turn)
        here.append(part.max().item())
    return here


def test_the_page_shows_the_ring_and_the_softmax_of_three_keys():
    page = (ROOT / "variants/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:turn|backward)[^|]+" + 3 * r"\|[ *]*rank (\d)[ *]*", page, re.MULTILINE)
    assert [[int(rank) for rank in row] for row in zip(*rows, strict=True)] == run(_parts_in_turns, 3, [6, 5, 5])
    code, shown = re.search(r"```python\n(from math .*?)```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names := {})
    scores, values = torch.tensor(names["keys"], dtype=torch.float64).T
    output = scores.requires_grad_().softmax(0) @ values
    output.backward()
    expected = [output.item(), scores.logsumexp(0).item(), *scores.grad.tolist()]
    numbers = re.findall(r"^output (\S+) +logsumexp (\S+)|d_score +(\S+)", shown, re.MULTILINE)
    assert [float(number) for row in numbers for number in row if number] == pytest.approx(expected, abs=6e-4)
    assert printed.getvalue() == shown


def _torchs_own():
    """Of torch's context_parallel: this rank's tokens, and how far its attention is from attention to all tokens."""
    from torch.distributed.tensor.experimental import context_parallel  # torch 2.4 has none

    tensors = [torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    expected = F.scaled_dot_product_attention(*tensors)
    mesh, tokens = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),)), torch.arange(16)
    with context_parallel(mesh, buffers=[*tensors, tokens], buffer_seq_dims=[2, 2, 2, 0]):
        places = tokens.tolist()
        result = F.scaled_dot_product_attention(*tensors)
    return places, (result - expected[:, :, places]).abs().max().item()


@pytest.mark.slow
@pytest.mark.timeout(300)  # torch imports its compiler for this
@pytest.mark.skipif(torch.__version__ < (2, 14), reason="variants/README.md speaks of 2.14")
def test_torchs_own_ring_deals_out_the_first_and_the_last_tokens():
    (first, far), (second, other) = run(_torchs_own, 2, limit=280)
    assert (first, second) == ([*range(4), *range(12, 16)], [*range(4, 12)]) and max(far, other) < 1e-5


# 72 images in batches of 24 are as many for each rank; of 25 to evaluate rank 0 has a batch more than the others.
EXPERTS = ("variants.mnist_experts", "--batch-size 24 --lr 0.003", True, torch.float64, 72, 25)


@functools.cache
def experts_alone():
    return outcome(1, *EXPERTS)[0]


@pytest.mark.parametrize("n", [2, 4])
def test_experts_on_several_ranks_are_those_of_one(n):
    states, printed, held, _ = experts_alone()
    ranks = outcome(n, *EXPERTS)
    for epoch, expected in enumerate(states):
        whole = {}
        for rank in ranks:
            for key, value in rank[0][epoch].items():
                assert torch.equal(whole.setdefault(key, value), value), f"the ranks differ: {key}"
        assert whole.keys() == expected.keys()
        assert max((whole[key] - value).abs().max().item() for key, value in expected.items()) <= 1e-10
    for ours, theirs in zip(losses_and_counts(ranks[0][1]), losses_and_counts(printed), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4) and ours[2] == 25
    assert all(bytes_ < held for *_, bytes_, _ in ranks), "each has the optimizer's state of its own experts only"


def _layer_of_experts():
    """What a layer sends in forward and backward, its balance loss, and which expert each token has chosen."""
    torch.manual_seed(0)
    layer, tokens = mnist_experts.Experts(), torch.randn(4, 6, mnist_experts.WIDTH)
    mine = tokens.chunk(dist.get_world_size())[dist.get_rank()].requires_grad_()
    with Messages() as messages:
        layer(mine).sum().backward()
    return messages.sent, layer.auxiliary_loss.item(), layer.router(mine).argmax(2).flatten().tolist()


def test_a_layer_of_experts_sends_each_token_to_its_expert_and_back():
    """One all-gather of counts and four all-to-alls; the mean of the ranks' balance losses is that of all tokens."""
    n, experts, width = 2, mnist_experts.EXPERTS, mnist_experts.WIDTH
    ranks = run(_layer_of_experts, n)
    (_, balance, _), chosen = run_in_a_group_of_one(_layer_of_experts), [choices for *_, choices in ranks]
    for rank, (sent, *_) in enumerate(ranks):
        arriving = sum(expert * n // experts == rank for choices in chosen for expert in choices)
        rows = [arriving, len(chosen[rank])] * 2  # in backward a gradient goes where its row has gone to, and back
        assert [elements for _, elements, _ in sent] == [experts, *[width * count for count in rows]]
        assert [kind.split("_")[0] for kind, *_ in sent] == ["allgather", *["alltoall"] * 4]
    assert sum(of_rank for _, of_rank, _ in ranks) / n == pytest.approx(balance, rel=1e-6)


def test_fsdp_gathers_one_layer_after_the_other_and_bfloat16_is_almost_float32():
    skip_if_refused("mnist_fsdp")
    ranks = outcome(3, "variants.mnist_fsdp", "--param-dtype bfloat16", True, torch.float32)
    exact, rough = (losses_and_counts(text)[0][0] for text in (ddp(3, True, torch.float32)[1], ranks[0][1]))
    assert rough == pytest.approx(exact, rel=0.05) and rough != exact
    assert max(max(gathered) for *_, gathered in ranks) < 4 * WEIGHTS, "all layers are here while the last one runs"
    found = re.findall(r"rank (\d) holds (\d+) bytes of parameters \(DDP: (\d+)\), (\d+) of optimizer", ranks[0][1])
    numbers, *held = zip(*([int(number) for number in row] for row in found), strict=True)
    assert numbers == (0, 1, 2) and [sum(held[0]), held[1][0], sum(held[2])] == [4 * WEIGHTS] * 3


def _fsdp_by_hand():
    """Of a step with uneven sizes: bytes kept, gathered and sent; how far AdamW's weights are from one process's."""
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0)).double()
    many = copy.deepcopy(one)
    inputs, targets = torch.randn(72, 7, dtype=torch.float64), torch.randn(72, dtype=torch.float64)
    many.apply(mnist_fsdp_by_hand.shard)
    gathered = []  # bytes of each layer's parameters, when a layer starts

    def note(*_):
        layers = many[0], many[1], many[3]
        gathered.append([sum(p.flat.untyped_storage().nbytes() for p in one.parameters()) for one in layers])

    for layer in many[0], many[1], many[3]:
        layer.register_forward_pre_hook(note)
    optimizers = [torch.optim.AdamW(model.parameters(), 0.05) for model in (one, many)]
    for step in range(6):
        batch, labels = inputs[12 * step : 12 * step + 12], targets[12 * step : 12 * step + 12]
        F.mse_loss(one(batch), labels).backward()
        with Messages() as messages:
            F.mse_loss(many(batch[rank::n]), labels[rank::n]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    note()
    kept = sum(p.nbytes for p in many.parameters())
    states = sharded.local_bytes(value for state in optimizers[1].state.values() for value in state.values())
    many.apply(mnist_fsdp_by_hand.gather)
    pairs = zip(many.parameters(), one.parameters(), strict=True)
    distance = max((a - b).abs().max().item() for a, b in pairs)
    return kept, states, gathered[-4:], messages.sent, distance


@pytest.mark.parametrize("n", [2, 3, 4])
def test_fsdp_by_hand_keeps_shards_and_gathers_one_layer_at_a_time(n):
    sizes = [[35, 5], [5, 5], [5, 1]]  # weight and bias of each layer
    shards = sum(-(-size // n) for layer in sizes for size in layer)
    layers = [8 * sum(n * -(-size // n) for size in layer) for layer in sizes]
    for kept, states, gathered, sent, distance in run(_fsdp_by_hand, n):
        assert (kept, states) == (8 * shards, 2 * 8 * shards + 6 * 4)  # Adam's moments, and the numbers of steps
        assert gathered == [[layers[0], 0, 0], [0, layers[1], 0], [0, 0, layers[2]], [0, 0, 0]]
        assert [kind.split("_")[0] for kind, *_ in sent] == ["allgather"] * 6 + 3 * (["allgather"] * 2 + ["reduce"] * 2)
        assert sum(elements for _, elements, _ in sent) == 2 * shards + shards
        assert distance < 1e-14


def _micro_batches(name, micro_batches):
    """How far a step's gradients are from one process's, and how many micro-batches' activations were kept at once."""
    script = importlib.import_module(f"variants.{name}")
    n, rank, count = dist.get_world_size(), dist.get_rank(), 3 * micro_batches
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).double()
    stage = copy.deepcopy(whole[4 * rank // n : 4 * (rank + 1) // n])
    inputs, labels = torch.randn(count, 8, dtype=torch.float64), torch.randint(8, (count,))
    F.cross_entropy(whole(inputs), labels).backward()
    kept = [0]
    stage.register_forward_hook(lambda *_: kept.append(kept[-1] + 1))
    stage.register_full_backward_hook(lambda *_: kept.append(kept[-1] - 1))
    for _ in range(2):  # the first step also runs forward to learn the shapes
        kept[:] = [0]
        stage.zero_grad()
        losses = []
        arguments = (inputs,) if rank == 0 else ()
        script.pipeline(stage, count, F.cross_entropy).step(*arguments, target=labels, losses=losses)
    assert len(losses) == (micro_batches if rank == n - 1 else 0)
    pairs = zip(stage.parameters(), whole[4 * rank // n : 4 * (rank + 1) // n].parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs), max(kept)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PIPELINES)
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow_and_one(name, n, micro_batches):
    """GPipe keeps all of them, and so does 1F1B if there are fewer micro-batches than stages."""
    skip_if_refused(name)
    case = name, micro_batches
    ranks = run(_micro_batches, n, *case) if n > 1 else [run_in_a_group_of_one(_micro_batches, *case)]
    for rank, (distance, kept) in enumerate(ranks):
        is_1f1b = name == "mnist_pipeline_1f1b" and micro_batches >= n
        assert distance < 1e-14 and kept == (min(micro_batches, n - rank) if is_1f1b else micro_batches)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * (SIDE - 4) ** 2, 10))


def trained(module, model, *extra):
    """The module's train: three steps on this process's 23 images, with SGD, which is returned."""
    train_set = images(23 * dist.get_world_size())
    loader = data.loader(train_set, 10, dist.data_sampler(train_set, shuffle=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    module.train(model, loader, optimizer, SimpleNamespace(step=lambda: None), CPU, *extra)
    return optimizer


@on_ranks(3)
def test_overlap_sends_while_backward_runs(tmp_path):
    """Rank 0 comes to the first layer before any other rank has started its first all-reduce."""
    model, file = small_model(), tmp_path / "at the first layer"
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(mnist_overlap.start_all_reduce)
    if dist.is_primary():
        model[0].weight.register_hook(lambda gradient: file.touch())
    else:
        model[3].weight.register_hook(lambda gradient: wait_for(file.exists, 20))
        model[3].bias.register_hook(lambda gradient: wait_for(file.exists, 20))
    trained(mnist_overlap, model)


@on_ranks(3)
def test_local_sgd_is_the_average_of_many_models():
    """After the second of three steps, and after the last: as one process that trains all ranks' models in turns."""
    n, model = dist.get_world_size(), small_model()
    trained(mnist_local_sgd, model, 2)
    models, everything = [small_model() for _ in range(n)], images(23 * n)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01, momentum=0.9) for model in models]
    for step, first in enumerate(range(0, 23, 10), 1):
        for rank, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            pixels, labels = (part[rank::n][first : first + 10] for part in (everything.images, everything.labels))
            optimizer.zero_grad()
            F.cross_entropy(one((pixels.float() - 255 * 0.5) / (255 * 0.5)), labels).backward()
            optimizer.step()
        if step > 1:
            for same in zip(*(one.parameters() for one in models), strict=True):
                mean = sum(p.detach() for p in same) / n
                for p in same:
                    p.data.copy_(mean)
    for ours, expected in zip(model.parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def small_transformer():
    torch.manual_seed(0)
    return mnist_transformer.Transformer(1, 14)  # four tokens


def _sharded(code, make, has_whole_batch):
    """The largest distance from one process on the whole batch, after three steps; the share of the weights here."""
    world_size = dist.get_world_size()
    model, plain, batch = make(), make(), images(24, side=14 if make is small_transformer else SIDE)
    exec(
        code, {"torch": torch, "model": model, "device": CPU, "world_size": world_size, "args": SimpleNamespace(lr=0.1)}
    )
    for one, step in (model, 1 if has_whole_batch else world_size), (plain, 1):
        mine = slice(dist.get_rank() % step, None, step)
        optimizer = torch.optim.SGD(one.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            F.cross_entropy(one(batch.images[mine] / 255), batch.labels[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    distance = max((getattr(a, "full_tensor", lambda a=a: a)() - b).abs().max().item() for a, b in pairs)
    return distance, sharded.local_bytes(model.parameters()) / sharded.local_bytes(plain.parameters())


def _clipped(code, clip):
    """The page's lines for tensor parallelism: how far its clipped gradients are from one process's, in three steps."""
    names = {"model": small_transformer(), "device": CPU, "world_size": dist.get_world_size(), "torch": torch}
    names["args"] = SimpleNamespace(lr=0.01)
    exec(code, names)
    model, plain, batch, distances = names["model"], small_transformer(), images(24, side=14), []
    optimizer = torch.optim.AdamW(plain.parameters(), 0.01)
    mixed = "got mixed torch.Tensor and DTensor"
    for _ in range(3):
        for one in model, plain:
            F.cross_entropy(one(batch.images / 255), batch.labels).mul(50).backward()  # so that it is clipped
        assert mixed in error_of(nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        assert mixed in error_of(torch.optim.AdamW(model.parameters(), foreach=True).step)  # as on a GPU
        exec(clip, names)
        assert nn.utils.clip_grad_norm_(plain.parameters(), 1.0) > 1
        pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
        distances += [(getattr(a, "full_tensor", lambda a=a: a)() - b).abs().max().item() for a, b in pairs]
        for one in names["optimizer"], optimizer:
            one.step()
            one.zero_grad()
    return max(distances)


def test_fsdp_on_the_mesh_of_the_page_is_one_process():
    skip_if_refused("mnist_fsdp")
    page = (ROOT / "variants/README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(from torch.distributed.device_mesh .*?)```", page, re.DOTALL)[1]
    found = run(_sharded, 4, code, small_model, False)
    assert all(distance <= 1e-6 and share == 1 / 2 for distance, share in found)


@pytest.mark.parametrize("n", [2, 4])
def test_a_transformer_by_fsdp_and_by_tensor_parallelism_of_the_page_is_one_process(n):
    skip_if_refused("mnist_fsdp")
    page = (ROOT / "variants/README.md").read_text(encoding="utf-8")
    by_fsdp, by_tensors = re.findall(r"```python\n(from torch import distributed as .*?)```", page, re.DOTALL)
    found = run(_sharded, n, by_fsdp, small_transformer, False)
    assert all(distance <= 1e-6 and share < 1.02 / n for distance, share in found)
    found = run(_sharded, n, by_tensors, small_transformer, True)
    assert all(distance <= 1e-6 and 1 / n < share < 0.8 for distance, share in found)
    clip = re.search(r"```python\n(from torch.distributed.tensor import DTensor.*?)```", page, re.DOTALL)[1]
    assert max(run(_clipped, n, by_tensors, clip)) < 1e-4  # of gradients with a norm of 1


def dry_run(*script, nproc, batch=50):
    """Its banner, and its losses and counts."""
    flags = ("--dataset", "synthetic", "--dry-run", "--batch-size", batch, "--nproc", nproc)
    before = f"import sys; sys.path.append({str(ROOT)!r})\n{FEW_DIGITS}"
    options = {"before": before, "timeout": 280, "TORCHINDUCTOR_COMPILE_THREADS": 1}  # no processes of its own
    done = forker().run(*script, *flags, **options)
    assert done.code == 0 and re.search(r"\ndone in \d+\.\d s\n", done.out), done
    return done.out.split("\n")[0], losses_and_counts(done.out)[0], done.err


@pytest.mark.parametrize(
    "name",
    sorted({case[1] for case in VARIANTS} - {"mnist_tensor_parallel"})
    + ["mnist_context_parallel", "mnist_experts", "mnist_transformer"],
)
def test_a_dry_run(name):
    """Context parallelism with one image in a step: the ranks share its tokens.  Tensor parallel: test_scripts.py."""
    skip_if_refused(name)
    nproc, batch = {"mnist_mesh": (4, 50), "mnist_context_parallel": (2, 1)}.get(name, (1, 50))
    banner, (*_, count), err = dry_run("-m", f"variants.{name}", nproc=nproc, batch=batch)
    processes = "1 process" if nproc == 1 else f"{nproc} processes"
    assert (banner, count, err) == (f"distributed: {processes}, gloo, cpu", 2 * batch, "")


@pytest.mark.slow
@pytest.mark.timeout(300)  # C++ takes long
def test_compiled_it_is_ddp(tmp_path):
    line, *_ = re.findall(r"\n(model = torch.compile\(model\).*\n)", (ROOT / "variants/README.md").read_text())
    wrapped = "    model = dist.prepare_ddp_model("
    program = (ROOT / "mnist_ddp.py").read_text().replace(wrapped, f"    {line}{wrapped}", 1)
    (tmp_path / "compiled.py").write_text(program)
    scripts = tmp_path / "compiled.py", ROOT / "mnist_ddp.py"
    compiled, plain = (dry_run(script, nproc=2) for script in scripts)
    assert compiled[:2] == (plain[0], pytest.approx(plain[1], abs=2e-4))


class OwnForward(nn.Module):
    """Six layers in a class with a forward of its own: nn.Sequential's stands in torch's files."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


def ends_of_backward(model, compile_first):
    """What the third step's backward pass ended, in order: a compiled graph, a bucket of DDP."""
    ended = []

    def noted(graph, inputs):
        return make_boxed_func(lambda *args: (ended.append("graph"), graph.forward(*args))[1])

    def hook(state, bucket):
        ended.append("bucket")
        return allreduce_hook(state, bucket)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=noted)
    inner = torch.compile(model, backend=backend) if compile_first else model
    ddp = nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=2)
    ddp.register_comm_hook(None, hook)
    outer = ddp if compile_first else torch.compile(ddp, backend=backend)
    for _ in range(3):
        ended.clear()
        outer(torch.ones(1, 512)).sum().backward()
    return ended


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="variants/README.md speaks of 2.14 and newer")
@on_ranks(2)
def test_compiled_gradients_are_sent_during_backward():
    """In both orders; a large bucket here is two layers of 1 MB.  DDP around an nn.Sequential compiles nothing."""
    for compile_first in True, False:
        layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        ended = ends_of_backward(OwnForward(layers), compile_first)
        assert ended.count("graph") == 4 and ended.index("bucket") < len(ended) - 1 - ended[::-1].index("graph"), ended
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    assert "graph" in ends_of_backward(layers, True) and "graph" not in ends_of_backward(layers, False)
    with torch._dynamo.config.patch(optimize_ddp=False):
        assert ends_of_backward(layers, True)[:2] == ["graph", "bucket"]
    torch._dynamo.reset()
