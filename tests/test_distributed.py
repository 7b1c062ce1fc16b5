"""distributed.py: the same assertions in worlds of 1, 2 and 3 processes; every expected value is a closed form.

The worker functions run in real processes (gloo on the CPU); an assertion that fails there fails the run.
"""

import io
import itertools
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from forked import ROOT, SEVERAL, WORLDS, forker, shell
from torch import nn
from torch.profiler import ProfilerActivity, profile

import distributed as dist
import launcher


def run(worker, n, *args):
    """`worker(rank, n, *args)` in n processes that have joined a group."""
    if n > 1:
        return dist.launch(_joined, worker, args, nproc=n)
    context = multiprocessing.get_context("fork")  # a world of one in a process of its own: pytest's stays fit to fork
    with context.Pool(1) as pool:
        return pool.apply_async(_joined, (0, 1, worker, args)).get(60)


def _joined(rank, world_size, worker, args):
    dist.init_process_group(rank, world_size)
    result = worker(rank, world_size, *args)
    dist.cleanup()
    return result


# ------------------------------------------------------------------------------------------------------- collectives


def _in_place(rank, n):
    x = torch.ones(1) * rank
    dist.all_reduce(x)  # torch's idiom, under torch's usual name
    assert x.tolist() == [n * (n - 1) / 2]
    theirs = torch.ones(1) * rank
    torch.distributed.all_reduce(theirs)
    assert torch.equal(x, theirs)


@WORLDS
def test_all_reduce_leaves_the_sum_in_its_argument(n):
    run(_in_place, n)


SIZES = (0, 1, 64, 1000, 100_000)


def _every_op(rank, n):
    """A wrong operation, a division that is missing or a result that isn't copied back shows at some size."""
    ops = torch.distributed.ReduceOp
    names = {"sum": [ops.SUM], "mean": ["avg", ops.AVG], "min": [ops.MIN], "max": [ops.MAX], "product": [ops.PRODUCT]}
    for size in SIZES:
        base, total = torch.arange(size, dtype=torch.float64) / size, n * (n - 1) / 2
        product = math.prod(1.0 + r for r in range(n)) * torch.ones_like(base)
        expected = {"sum": n * base + total, "mean": base + total / n, "min": base, "max": base + n - 1}
        for op, others in names.items():
            for name in (op, *others) if size == 1 else (op,):
                mine = torch.full_like(base, 1.0 + rank) if op == "product" else base + rank
                before, memory, version = mine.clone(), mine.data_ptr(), mine._version
                reduced = dist.reduce(mine, name)
                assert reduced is not mine and torch.equal(mine, before) and mine._version == version
                assert dist.all_reduce(mine, name) is mine and mine.data_ptr() == memory
                value = expected.get(op, product)
                assert torch.allclose(mine, value, rtol=1e-15) and torch.allclose(reduced, value, rtol=1e-15), op
                assert mine.shape == reduced.shape and mine.dtype == reduced.dtype == torch.float64
    mine = torch.tensor([rank, 10.0 * rank])
    assert dist.reduce(mine).tolist() == [(n - 1) / 2, 5.0 * (n - 1)]  # a mean by default
    for wrong in "median", 0, ops.BAND:
        for function in dist.all_reduce, dist.reduce:
            with pytest.raises(ValueError, match="choose from sum, mean, min, max, product"):
                function(mine, wrong)


@WORLDS
def test_all_reduce_and_reduce_answer_on_every_rank(n):
    run(_every_op, n)


IN_PLACE = {
    torch.uint8: 2,
    torch.int8: -2,
    torch.int32: 2**20,
    torch.int64: 2**40,
    torch.float16: 0.5,
    torch.bfloat16: 0.5,
    torch.float32: 0.5,
    torch.float64: 0.5,
    torch.complex64: 0.5 + 1j,
    torch.complex128: 0.5 + 1j,
}
NOT_IN_PLACE = [torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn]


def _dtypes(rank, n):
    for dtype, value in IN_PLACE.items():
        mine = torch.tensor([value, value], dtype=dtype)
        assert dist.all_reduce(mine) is mine and mine.dtype == dtype and mine.tolist() == [n * value] * 2, dtype
        if dtype.is_complex:
            continue
        for op, expected in ("min", n * value), ("max", n * value), ("product", (n * value) ** n):
            if abs(expected) < 100:
                assert dist.all_reduce(mine.clone(), op).tolist() == [expected] * 2, (dtype, op)
    for dtype in NOT_IN_PLACE:
        mine = torch.ones(3).to(dtype)
        with pytest.raises(
            TypeError, match=rf"all_reduce can't put the sum into {dtype}: use dist\.reduce\(tensor, 'sum'\)"
        ):
            dist.all_reduce(mine)
        assert dist.reduce(mine, "sum").tolist() == [n] * 3  # as the message says
    for dtype in torch.uint8, torch.int64, torch.bool:
        with pytest.raises(TypeError, match=f"can't put the mean into {dtype}"):
            dist.all_reduce(torch.ones(3, dtype=dtype), "mean")
    for call, op in itertools.product((dist.all_reduce, dist.reduce), ("min", "max", "product")):
        with pytest.raises(TypeError, match=f"can't compute the {op} of complex numbers"):
            call(torch.ones(2, dtype=torch.complex64), op)
    with pytest.raises(TypeError, match=r"pass tensor\.to_dense\(\)"):
        dist.all_reduce(torch.eye(2).to_sparse())
    total = dist.all_reduce(torch.tensor([200], dtype=torch.uint8))
    assert total.item() == n * 200 % 256  # overflow is torch's own
    assert dist.all_reduce(torch.tensor(1)).item() == n  # and the group still works


@WORLDS
def test_all_reduce_keeps_the_dtype_and_refuses_what_cannot_be_done_in_place(n):
    run(_dtypes, n)


SMALL_INTEGERS = [(torch.uint8, 200), (torch.int8, -100), (torch.int16, 30_000), (torch.int32, 2_000_000_000)]


def _wide(rank, n):
    for size in 1, 1000:
        for dtype, value in SMALL_INTEGERS:
            mine = torch.full((size,), value, dtype=dtype)
            assert dist.reduce(mine).tolist() == [value] * size and dist.reduce(mine).dtype == torch.float64, dtype
            total, product = dist.reduce(mine, "sum"), dist.reduce(torch.full_like(mine, 2), "product")
            assert total.tolist() == [n * value] * size and total.dtype == torch.int64, dtype
            assert product.tolist() == [2**n] * size, dtype
            for op in "min", "max":
                assert dist.reduce(mine, op).tolist() == [value] * size
        big = torch.full((size,), 60000.0, dtype=torch.float16)  # n of them overflow float16; their mean does not
        assert dist.reduce(big).tolist() == [60000.0] * size and dist.reduce(big).dtype == torch.float16
    assert dist.reduce(torch.tensor([True, rank == 0])).tolist() == pytest.approx([1, 1 / n])
    assert dist.reduce(torch.tensor([True, rank == 0]), "sum").tolist() == [n, 1]
    assert dist.reduce(torch.tensor(complex(1, rank))).item() == pytest.approx(complex(1, (n - 1) / 2))
    loss = torch.ones(2, requires_grad=True).sum() * rank
    assert dist.reduce(loss).item() == n - 1 and not dist.reduce(loss).requires_grad


@WORLDS
def test_reduce_does_not_overflow(n):
    run(_wide, n)


def _layouts(rank, n):
    """Each rank has its own layout; the backends would add up the memory as it lies there."""
    values = torch.arange(24.0).view(2, 3, 4, 1)
    layouts = [
        values.clone(),
        values.clone().to(memory_format=torch.channels_last),
        torch.empty(1, 4, 3, 2).permute(3, 2, 1, 0),
    ]
    for op, factor in ("sum", n), ("mean", 1), ("max", 1):
        mine = layouts[rank].copy_(values)
        strides = mine.stride()
        dist.all_reduce(mine, op)
        assert torch.equal(mine, factor * values) and mine.stride() == strides, op
    whole = torch.ones(4, 4)
    dist.all_reduce(whole[:, 1])  # a column of a matrix, in place
    assert whole.sum(0).tolist() == [4, 4 * n, 4, 4]
    weight = nn.Parameter(torch.full((2,), float(rank)))  # a leaf, as when weights are averaged by hand
    assert dist.all_reduce(weight, "mean") is weight and weight.requires_grad and weight.grad_fn is None
    assert weight.tolist() == [(n - 1) / 2] * 2
    assert dist.all_reduce(torch.empty(0, 3)).shape == (0, 3)


@WORLDS
def test_all_reduce_of_any_layout(n):
    run(_layouts, n)


def _lazy(rank, n):
    """`conj` and `imag` of a conjugate only set a bit; the memory is the original's."""
    mine = torch.tensor([complex(1, rank)])
    conjugate, negative = mine.conj(), mine.conj().imag
    assert conjugate.is_conj() and negative.is_neg()
    assert [part.item() for part in dist.gather(conjugate)] == [complex(1, -r) for r in range(n)]
    assert [part.item() for part in dist.gather(negative)] == [-r for r in range(n)]
    assert dist.reduce(conjugate, "sum").item() == complex(n, -n * (n - 1) / 2)
    assert dist.reduce(negative, "min").item() == 1 - n and mine.item() == complex(1, rank)
    total = n * (n - 1) / 2
    assert dist.all_reduce(negative).item() == -total and mine.item() == complex(1, total)  # a view of `mine`
    assert dist.all_reduce(conjugate).item() == complex(n, -n * total)
    dist.sync_params([conjugate])


@WORLDS
def test_lazily_conjugated_and_negated_tensors(n):
    run(_lazy, n)


def _many_dimensions(rank, n):
    shape = [1] * 9 + [rank + 1]  # more than a fingerprint has room for
    assert [list(part.shape) for part in dist.gather(torch.zeros(shape))] == [[1] * 9 + [r + 1] for r in range(n)]
    assert dist.all_reduce(torch.ones(shape[:9])).sum().item() == n
    parts = dist.gather(torch.full((rank,), 1 + 1j, dtype=torch.complex128))
    assert [part.tolist() for part in parts] == [[1 + 1j] * r for r in range(n)]


@WORLDS
def test_more_dimensions_than_a_fingerprint_has(n):
    run(_many_dimensions, n)


def _without_pickling(rank, n):
    def pickles(*args):
        raise AssertionError("an object was pickled")

    torch.distributed.all_gather_object = pickles
    mine = torch.arange(10.0)
    assert dist.reduce(mine).tolist() == mine.tolist()
    assert len(dist.gather(mine[rank:])) == n
    dist.sync_params([mine])
    with pytest.raises(RuntimeError, match=rf"\n  rank {n - 1}: gather of torch.float64 with 1 dimension"):
        dist.gather(mine.to(torch.float64 if rank == n - 1 else torch.float32))
    with pytest.raises(RuntimeError, match=rf"\n  rank {n - 1}: sync_params of (?s:.*)torch.float64"):
        dist.sync_params([mine] * 50 + [mine.double()] * rank)  # the table is longer than what travels in one message


@SEVERAL
def test_the_check_of_a_call_pickles_nothing(n):
    """It took longer than the reductions themselves, and numpy may be missing."""
    run(_without_pickling, n)


def _no_tensors(rank, n):
    model = nn.Linear(1, 1)
    for call, value, says in [
        (dist.reduce, 0.5, r"reduce takes tensors, not float: type torch\.tensor\(0\.5\)$"),
        (dist.all_reduce, 3, r"all_reduce takes tensors, not int: type torch\.tensor\(3\)$"),
        (dist.all_reduce, None, "all_reduce takes tensors, not NoneType: is it the .grad of a parameter that has none"),
        (dist.gather, [1.0], r"gather takes tensors, not list: type torch\.tensor\(\.\.\.\)$"),
        (dist.sync_params, model, r"sync_params takes tensors, not Linear: type model\.parameters\(\)$"),
        (dist.sync_params, model.state_dict(), "sync_params takes tensors, not str: "),
    ]:
        with pytest.raises(TypeError, match=says):
            call(value)
    if n > 1:
        table = rf"\n  rank 0: reduce mean of torch.float32 \[\](?s:.*)\n  rank {n - 1}: reduce of float$"
        with pytest.raises(RuntimeError, match=table):
            dist.reduce(0.5 if rank == n - 1 else torch.tensor(0.5))


@WORLDS
def test_what_is_no_tensor_is_refused_on_all_ranks(n):
    run(_no_tensors, n)


def _uneven(rank, n):
    mine = torch.full((rank + 1, 2), rank)
    rows = torch.cat(dist.gather(mine))
    assert rows[:, 0].tolist() == [r for r in range(n) for _ in range(r + 1)]
    assert [part.shape for part in dist.gather(torch.zeros(rank, 2 + rank))] == [(r, 2 + r) for r in range(n)]
    assert torch.stack(dist.gather(torch.tensor(float(rank)))).tolist() == [float(r) for r in range(n)]
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        parts = dist.gather(torch.ones(rank + 1, dtype=dtype))
        assert [len(part) for part in parts] == list(range(1, n + 1))
        assert all(part.dtype == dtype and bool((part == 1).all()) for part in parts)
    grid = torch.arange(6).view(2, 3).t() + rank
    assert all(torch.equal(part, grid - rank + r) for r, part in enumerate(dist.gather(grid)))
    assert [part.tolist() for part in dist.gather(torch.empty(0))] == [[]] * n


def test_results_are_new_in_a_world_of_one_too():
    mine = torch.ones(2)
    for result in dist.gather(mine)[0], dist.reduce(mine):
        assert torch.equal(result, mine) and result.data_ptr() != mine.data_ptr()
    assert dist.all_reduce(mine) is mine  # in place


def test_unwrap_model_knows_both_wrappers():
    model = nn.Linear(1, 1)
    assert dist.unwrap_model(nn.DataParallel(model)) is dist.unwrap_model(model) is model


@WORLDS
def test_gather_of_uneven_shapes_in_rank_order_on_every_rank(n):
    run(_uneven, n)


MISMATCHES = ["shape", "dtype", "op", "gather dtype", "gather dims", "other call", "params"]


def _mismatch(rank, n, case):
    tensors = {
        "shape": torch.zeros(3 + 2 * (rank == 1)),
        "dtype": torch.zeros(3, dtype=torch.float64 if rank == 1 else torch.float32),
        "op": torch.zeros(3),
        "gather dtype": torch.zeros(3, dtype=torch.int64 if rank == 1 else torch.float32),
        "gather dims": torch.zeros((3, 1) if rank == 1 else 3),
        "other call": torch.zeros(3),
        "params": torch.zeros(3 + rank),
    }
    calls = {
        "op": lambda x: dist.all_reduce(x, "max" if rank == 1 else "sum"),
        "gather dtype": dist.gather,
        "gather dims": dist.gather,
        "other call": dist.gather if rank == 1 else dist.reduce,
        "params": lambda x: dist.sync_params([x]),
    }
    with pytest.raises(RuntimeError, match="all must call the same") as error:
        calls.get(case, dist.all_reduce)(tensors[case])
    lines = str(error.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == [f"rank {r}" for r in range(n)]
    assert len({line.split(":")[1] for line in lines[1:]}) >= 2  # the table shows the difference
    assert dist.all_reduce(torch.tensor(1)).item() == n  # and the group still works
    return str(error.value)


def _mismatches(rank, n):
    return {case: _mismatch(rank, n, case) for case in MISMATCHES}


@SEVERAL
def test_a_mismatch_is_one_error_on_all_ranks(n):
    for case, error in run(_mismatches, n).items():
        assert "rank 1: " in error, case


def _uneven_sizes(rank, n):
    for size in 1, 64, 1000:
        uneven = torch.arange(size * 8 * rank)
        parts = dist.gather(uneven)
        assert [part.tolist() for part in parts] == [list(range(size * 8 * r)) for r in range(n)]
        parts[0].add_(1)
        assert n == 1 or parts[1].tolist() == list(range(size * 8))  # each has memory of its own
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)


@WORLDS
def test_gather_of_small_and_large_tensors(n):
    run(_uneven_sizes, n)


def _nan(rank, n):
    for size in 1, 1000:
        for at in range(n):
            mine = torch.full((size,), float(rank))
            if rank == at:
                mine[-1] = math.nan
            for op in "min", "max", "sum":
                for reduced in dist.reduce(mine, op), dist.all_reduce(mine.clone(), op):
                    *others, last = reduced.tolist()
                    assert math.isnan(last), (op, size, at)  # gloo's own minimum and maximum may drop it
                    assert others == [{"min": 0, "max": n - 1, "sum": n * (n - 1) / 2}[op]] * (size - 1)


@WORLDS
def test_one_nan_is_in_every_answer(n):
    run(_nan, n)


def _messages(rank, n):
    """A check of fixed size, and then the data: the check carries none of it."""
    names = ("gloo:all_reduce", "gloo:all_gather", "gloo:broadcast")
    counts = {}
    for size in 1, 100_000:
        x = torch.ones(size)
        for call in (
            dist.all_reduce,
            dist.reduce,
            dist.gather,
            lambda x: dist.sync_params([x]),
            lambda x: dist.barrier(),
        ):
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
                call(x)
            events = [event for event in prof.events() if event.name in names]
            counts.setdefault(size, []).append([sum(event.name == name for event in events) for name in names])
    return counts


def test_a_check_is_one_message_more_than_the_data():
    expected = [[1, 1, 0], [1, 1, 0], [0, 3, 0], [0, 1, 1], [0, 1, 0]]  # gather sends the shapes, too
    assert run(_messages, 2) == {1: expected, 100_000: expected}


def _large_mismatch(rank, n):
    for mine in torch.zeros(1000 + rank), torch.zeros(1000, dtype=torch.float64 if rank else torch.float32):
        with pytest.raises(RuntimeError, match="all must call the same"):
            dist.all_reduce(mine)
    with pytest.raises(RuntimeError, match="all must call the same"):
        dist.all_reduce(torch.zeros(1 if rank else 1000))  # small on one rank only
    assert dist.all_reduce(torch.tensor(1)).item() == n


@SEVERAL
def test_a_mismatch_of_large_tensors(n):
    run(_large_mismatch, n)


def _sync(rank, n):
    a, b = torch.full((3,), float(rank)), torch.full((2, 2), rank).t()
    dist.sync_params([a, b])
    assert a.tolist() == [0.0] * 3 and b.tolist() == [[0, 0], [0, 0]]
    weight = nn.Parameter(torch.full((2,), float(rank)))
    dist.sync_params(p for p in [weight])
    assert weight.tolist() == [0.0, 0.0] and weight.requires_grad
    dist.barrier()
    dist.wait_for_everyone()


@WORLDS
def test_sync_params_and_barrier(n):
    run(_sync, n)


def _not_joined(rank, n):
    dist.all_reduce(torch.ones(1))


def test_a_collective_before_init_process_group_is_an_error():
    with pytest.raises(SystemExit, match="make sure to call init_process_group"):
        dist.launch(_not_joined, nproc=2)


def test_without_launch_everything_works_with_one_process():
    x = torch.ones(2)
    assert (dist.get_rank(), dist.get_local_rank(), dist.get_world_size(), dist.is_primary()) == (0, 0, 1, True)
    assert dist.reduce(x).tolist() == [1.0, 1.0] and dist.reduce(x) is not x and dist.all_reduce(x) is x
    assert [part.tolist() for part in dist.gather(x)] == [[1.0, 1.0]]
    model = nn.Linear(1, 1)
    assert dist.prepare_ddp_model(model, device_ids=[0]) is model
    assert list(dist.data_sampler([1, 2], shuffle=False)) == [0, 1]
    dist.sync_params(model.parameters())
    dist.barrier()
    dist.cleanup()


# ---------------------------------------------------------------------------------------------------------- samplers


def _shares(rank, n, size):
    dataset = range(size)
    if size:
        padded = dist.data_sampler(dataset)
        lengths = [len(part) for part in dist.gather(torch.tensor(list(padded)))]
        assert lengths == [-(-size // n)] * n == [len(padded)] * n  # equal shares
    if size < n:
        with pytest.raises(ValueError, match=f"pad=False: {size} examples for {n} processes: each needs at least one"):
            dist.data_sampler(dataset, shuffle=False, pad=False)
        return
    exact = dist.data_sampler(dataset, shuffle=False, pad=False)
    mine = list(exact)
    assert mine == list(range(rank, size, n)) and len(exact) == len(mine) > 0
    everyone = torch.cat(dist.gather(torch.tensor(mine, dtype=torch.int64)))
    assert sorted(everyone.tolist()) == list(range(size))  # every example exactly once


def _all_shares(rank, n):
    for size in (0, 1, n - 1, n, n + 1, 5, 10, 1000):
        _shares(rank, n, size)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_every_example_once_or_equal_shares(n):
    run(_all_shares, n)


def _epochs(rank, n):
    sampler = dist.data_sampler(range(50), True, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        orders = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
    assert orders[0] != orders[1] and orders[0] == orders[2]
    with pytest.warns(
        UserWarning,
        match=r"sampler.set_epoch\(epoch\) before each epoch: .* \(to evaluate, make it with shuffle=False\)",
    ):
        list(sampler)
    unshuffled = dist.data_sampler(range(12), True, shuffle=False)
    unshuffled.set_epoch(0, skip=2)
    assert len(list(unshuffled)) == len(unshuffled) == 12 // n - 2
    unshuffled.set_epoch(1)  # the next epoch begins at its beginning
    assert len(list(unshuffled)) == len(unshuffled) == 12 // n
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(unshuffled) == list(unshuffled)  # no order to forget
    for pad in True, False:  # not distributed: every rank has the whole data set, as with joh-fischer's helper
        assert list(dist.data_sampler(range(6), False, shuffle=False, pad=pad)) == list(range(6))


@WORLDS
def test_set_epoch_reshuffles_and_is_missed(n):
    run(_epochs, n)


def _order_goes_on(rank, n):
    """60 examples, global batches of 12: whatever n is, the k-th has the same examples, also from the middle on."""

    def batches(seed, epoch, skip=0):
        sampler = dist.data_sampler(range(60), True, seed=seed)
        sampler.set_epoch(epoch, skip=skip * 12 // n)
        mine = torch.tensor(list(sampler), dtype=torch.int64)
        assert len(mine) == len(sampler) == (5 - skip) * 12 // n
        parts = [torch.stack(dist.gather(part), dim=1).flatten().tolist() for part in mine.split(12 // n)]
        return parts if skip < 5 else []

    generator = torch.Generator()
    order = torch.randperm(60, generator=generator.manual_seed(3 + 2)).tolist()  # torch's: by seed + epoch
    assert batches(3, 2) == [order[start : start + 12] for start in range(0, 60, 12)]
    for skip in range(6):
        assert batches(3, 2, skip) == batches(3, 2)[skip:]
    assert batches(4, 2) != batches(3, 2)


@WORLDS
def test_the_order_is_the_same_for_any_number_of_processes_and_goes_on_in_an_epoch(n):
    run(_order_goes_on, n)


# ------------------------------------------------------------------------------------------------------ DDP


def _fit(rank, n, dtype):
    """Ten steps on the same global batches, whatever the number of processes."""
    torch.manual_seed(1)
    x, y = torch.randn(120, 8, dtype=dtype), torch.randn(120, 3, dtype=dtype)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    if rank:  # DDP gives everyone rank 0's weights
        nn.init.zeros_(model[0].weight)
    model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sampler = dist.data_sampler(range(120), distributed=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in torch.tensor(list(sampler)).split(24 // n):
            F.mse_loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(weights, other) for other in dist.gather(weights))
    return weights


IN_32_BITS = pytest.param(torch.float32, 1e-6, marks=pytest.mark.slow)


@pytest.mark.parametrize(("dtype", "tolerance"), [IN_32_BITS, (torch.float64, 1e-12)])
def test_n_processes_reach_the_weights_of_one(dtype, tolerance):
    one = run(_fit, 1, dtype)
    for n in (2, 3, 4):
        assert (run(_fit, n, dtype) - one).abs().max() <= tolerance


class _Centred(nn.Module):
    """Its buffer is read in training, unlike BatchNorm's averages."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2, bias=False)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
        return self.linear(x - self.mean)


def _batchnorm():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def _train(model, rank, freeze_after=None):
    """Three steps, with other data on each rank; returns the losses."""
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(3):
        if step == freeze_after:  # as in fine-tuning
            dist.unwrap_model(model)[1].eval()
        loss = model(torch.randn(6, 4, generator=generator) * (rank + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _as_torchs_ddp(rank, n, make, freeze_after):
    ends = []
    for wrap in nn.parallel.DistributedDataParallel, dist.prepare_ddp_model:
        torch.manual_seed(rank)  # DDP gives everyone rank 0's weights
        model = wrap(make())
        losses = _train(model, rank, freeze_after)
        ends.append([*losses, *model.parameters(), *model.buffers()])
    for torchs, ours in zip(*ends, strict=True):
        assert torch.equal(torchs, ours)
    if n > 1:
        assert type(model) is nn.parallel.DistributedDataParallel


@WORLDS
@pytest.mark.parametrize(("make", "freeze_after"), [(_batchnorm, None), (_batchnorm, 1), (_Centred, None)])
def test_three_steps_are_torchs_ddp_bit_by_bit(n, make, freeze_after):
    run(_as_torchs_ddp, n, make, freeze_after)


def _evaluate(rank, n, make, into_evaluation, counts):
    """After training the ranks' buffers differ; then each evaluates counts[rank] batches, of one to three examples."""
    x = torch.arange(4.0 * sum(counts)).view(-1, 4).sin()
    torch.manual_seed(0)
    plain = make()
    model = dist.prepare_ddp_model(plain)
    ends = []
    for epoch in range(2):
        model.train()
        _train(model, 0)  # the same weights for any number of processes
        if rank:
            for buffer in plain.buffers():
                buffer.add_(1)
        evaluated = into_evaluation(model)
        first = sum(counts[:rank])
        with torch.inference_mode() if epoch else torch.no_grad():
            outputs = [evaluated(batch) for batch in x[first : first + counts[rank]].split(1)]
        ends.append(torch.cat(dist.gather(torch.cat(outputs).clone())))
        assert all(torch.equal(x, y) for x in plain.buffers() for y in dist.gather(x))
    return torch.stack(ends)


def _eval(model):
    return model.eval()


def _eval_of_the_inner_model(model):
    dist.unwrap_model(model).eval()
    return model


def _eval_of_the_compiled_model(model):
    return torch.compile(model, backend="eager").eval()


COUNTS = [(3, 2), (1, 3), (3, 1, 2), (1, 1, 4)]
OTHER_WAYS = [_eval_of_the_inner_model, _eval_of_the_compiled_model]
INTO_EVALUATION = [_eval, *(pytest.param(way, marks=pytest.mark.slow) for way in OTHER_WAYS)]


@pytest.mark.slow
@pytest.mark.parametrize("into_evaluation", INTO_EVALUATION)
@pytest.mark.parametrize("make", [_batchnorm, _Centred])
def test_evaluation_with_unequal_numbers_of_batches_is_exact_and_ends(make, into_evaluation):
    for counts in COUNTS:
        one = run(_evaluate, 1, make, _eval, (sum(counts),))
        many = run(_evaluate, len(counts), make, into_evaluation, counts)
        assert torch.allclose(many, one, rtol=0, atol=1e-6), counts


def _evaluate_a_data_set(rank, n):
    torch.manual_seed(2)
    x = torch.randn(10_000, 4)
    y = x.argmax(1)
    model = dist.prepare_ddp_model(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))
    model.eval()
    sampler = dist.data_sampler(x, shuffle=False, pad=False)
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in torch.tensor(list(sampler)).split(9):
            sums += torch.tensor([(model(x[batch]).argmax(1) == y[batch]).sum(), len(batch)])
    return dist.all_reduce(sums).tolist()


@pytest.mark.slow
def test_evaluation_is_exact_in_any_world_size():
    correct, count = run(_evaluate_a_data_set, 1)
    assert count == 10_000 and 0 < correct < count
    for n in (2, 3, 7):
        assert run(_evaluate_a_data_set, n) == [correct, count], n


def _eval_is_no_collective(rank, n):
    models = [dist.prepare_ddp_model(_batchnorm()) for _ in range(2)]
    for number, model in enumerate(models):
        for buffer in dist.unwrap_model(model).buffers():
            buffer.fill_(10 * number + rank)
    models[rank % 2].eval()  # another one on each rank
    if rank == 0:
        models[1].eval()
    for number, model in enumerate(models):
        assert all((buffer == 10 * number + rank).all() for buffer in model.buffers())
    assert dist.all_reduce(torch.tensor(1)).item() == n
    with torch.no_grad():  # on one rank alone: the model inside DDP
        if rank == n - 1:
            dist.unwrap_model(models[0])(torch.ones(2, 4))
    dist.cleanup()
    models[0].train().eval()  # after the end, too


@SEVERAL
def test_eval_is_no_collective(n):
    run(_eval_is_no_collective, n)


def _frozen(rank, n):
    """Gradients in eval mode, usual in fine-tuning, are averages, too."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    model = dist.prepare_ddp_model(model)
    model.eval()
    model(torch.full((1, 2), float(rank))).sum().backward()
    gradient = dist.unwrap_model(model)[0].weight.grad
    assert gradient.tolist() == pytest.approx(torch.full((1, 2), (n - 1) / 2 / (1 + 1e-5) ** 0.5))


@WORLDS
def test_gradients_in_eval_mode_are_averaged(n):
    run(_frozen, n)


def _options(rank, n):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13's
        model = dist.prepare_ddp_model(_batchnorm(), broadcast_buffers=False)
    dist.unwrap_model(model)[1].running_mean.fill_(rank)
    model(torch.ones(2, 4)).sum().backward()
    assert len({part[0].item() for part in dist.gather(dist.unwrap_model(model)[1].running_mean)}) == n
    group = [torch.distributed.new_group(ranks) for ranks in ([0], [1, 2])][rank > 0]
    model = dist.prepare_ddp_model(_batchnorm(), process_group=group)
    assert model.process_group is group


def test_options_go_to_torchs_ddp():
    run(_options, 3)


def _without_a_message_per_step(rank, n):
    """Of a model whose only buffers are BatchNorm's: the same training, without the broadcast in each step."""
    switch = "forward_sync_buffers" if torch.__version__ >= (2, 13) else "broadcast_buffers"
    ends = []
    for options, broadcasts in ({}, 2), ({switch: False}, 0):  # of float32 and int64, in the third step
        torch.manual_seed(0)
        model = dist.prepare_ddp_model(_batchnorm(), **options)
        _train(model, rank)
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            model(torch.ones(2, 4) * rank).sum().backward()
        assert [event.name for event in prof.events()].count("gloo:broadcast") == broadcasts
        if options:
            dist.sync_params(model.buffers())
        model.eval()
        with torch.no_grad():
            outputs = [model(torch.ones(1, 4)) for _ in range(1 + rank)]
        ends.append([outputs[0], *model.parameters(), *model.buffers()])
    for default, saved in zip(*ends, strict=True):
        assert torch.equal(default, saved)


@SEVERAL
def test_buffers_can_be_sent_once_per_evaluation(n):
    run(_without_a_message_per_step, n)


def _debug_levels(rank, n):
    levels, level = torch.distributed.DebugLevel, torch.distributed.get_debug_level
    before = level()
    for _ in range(2):
        dist.init_process_group(checked=True)
        assert level() == levels.DETAIL
        with pytest.raises(TypeError, match="no_such_option"):
            dist.prepare_ddp_model(nn.Linear(1, 1), no_such_option=1)
        assert level() == levels.DETAIL
        dist.cleanup()
        assert level() == before
    dist.init_process_group()  # not checked: torch's own calls aren't compared
    with pytest.raises(RuntimeError, match="requires at least one parameter|doesn't have any parameters|not needed"):
        model = nn.Linear(1, 1).requires_grad_(False)
        dist.prepare_ddp_model(model)
    assert level() == before
    assert "Wrapper" not in type(torch.distributed.group.WORLD._get_backend(torch.device("cpu"))).__name__


def test_a_checked_group_does_not_make_the_next_one_checked():
    dist.launch(_debug_levels, nproc=2)


def _message_from_0_to_1(rank, n):
    dist.init_process_group(checked=True)
    if rank < 2:
        torch.distributed.send(torch.ones(1), 1) if rank == 0 else torch.distributed.recv(torch.ones(1), 0)
    torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_torch_counts_a_message_between_two_ranks_as_a_call_of_all():
    """docs/troubleshooting.md says so.  If this fails, torch has been mended: then mnist_pipeline.py can be checked."""
    dist.launch(_message_from_0_to_1, nproc=2)
    with pytest.raises(SystemExit, match="Detected mismatch between collectives on ranks.*Sequence number: "):
        dist.launch(_message_from_0_to_1, nproc=3)


def _without_nccl(rank, n):
    torch.cuda.device_count, torch.cuda.set_device = lambda: n, lambda device: None
    torch.distributed.is_nccl_available = lambda: False
    dist.init_process_group()
    assert torch.distributed.get_backend() == "gloo"


def test_gpus_without_nccl_take_gloo():
    dist.launch(_without_nccl, nproc=2)


def _on_xpus(rank, n):
    """On simulated ones.  Nobody has run this on a real one."""
    chosen, has_xccl = [], False
    torch.cuda.device_count, torch.xpu.device_count, torch.xpu.set_device = lambda: 0, lambda: n, chosen.append
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("xpu")
    torch.distributed.is_xccl_available = lambda: has_xccl
    assert dist.get_device() == torch.device("xpu", rank)
    dist.init_process_group()
    assert torch.distributed.get_backend() == "gloo" and chosen == [torch.device("xpu", rank)]
    assert dist.all_reduce(torch.tensor(1)) == n
    with pytest.raises(ValueError, match="this torch was built without xccl: use gloo"):
        launcher.check_backend("xccl")
    has_xccl = True
    launcher.check_backend("xccl")
    assert launcher.default_backend() == "xccl" and launcher.plan() == n
    with pytest.raises(ValueError, match=f"{n + 1} processes, but {n} visible"):
        launcher.plan(n + 1)
    with pytest.raises(ValueError, match="nccl needs a CUDA GPU"):
        launcher.check_backend("nccl")
    assert not launcher.fork_is_safe() and not torch.cuda.is_initialized()


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch.accelerator starts drivers")
def test_other_accelerators_through_torch_accelerator():
    dist.launch(_on_xpus, nproc=2)


def _moved_inputs(rank, n):
    """DDP moves inputs to the model's GPU; to float64 stands in for that."""

    def moved(inputs, kwargs, *rest):
        return (tuple(x.double() for x in inputs),), (kwargs,)

    torch.nn.parallel.distributed._to_kwargs = moved
    model = dist.prepare_ddp_model(nn.Linear(2, 1).double())
    model.device_ids = [0]
    for mode in True, False:
        model.train(mode)
        assert model(torch.ones(1, 2)).dtype == torch.float64
        with torch.no_grad():
            assert model(torch.ones(1, 2)).dtype == torch.float64


def test_inputs_are_moved_in_both_modes():
    run(_moved_inputs, 2)


class _Partial(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def _unused(rank, n):
    model = dist.prepare_ddp_model(_Partial())
    with pytest.raises(RuntimeError, match=r"(?s)find_unused_parameters=True.* rank \d: spare\.bias, spare\.weight\n"):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    model = dist.prepare_ddp_model(_Partial(), find_unused_parameters=True)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def test_unused_parameters_are_named():
    run(_unused, 2)


class _Skips(nn.Sequential):
    def forward(self, x):
        return self[2](self[0](x))


def _unused_numbers(rank, n, case):
    """Names that look like numbers, in every wording of torch's message."""
    dist.init_process_group(checked=case == "checked")
    if case == "TORCH_DISTRIBUTED_DEBUG=INFO":
        torch.distributed.set_debug_level(torch.distributed.DebugLevel.INFO)
    model = dist.prepare_ddp_model(_Skips(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
    if case == "frozen too late":
        dist.unwrap_model(model)[1].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"did not receive grad for rank \d: 1\.bias, 1\.weight\n"):
        model(torch.ones(1, 2)).sum().backward()
    model = _Skips(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)  # as the message advises
    model = dist.prepare_ddp_model(model)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def _ignored(rank, n):
    """torch's own rule decides which parameters are ignored: it doesn't find those of the outermost module."""
    model = _Partial()
    model.top = nn.Parameter(torch.ones(1))
    model._ddp_params_and_buffers_to_ignore = ["top", "used.bias"]
    model = dist.prepare_ddp_model(model)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"did not receive grad for rank \d: spare\.bias, spare\.weight, \.top\n"):
        model(torch.ones(1, 2)).sum().backward()


def test_unused_parameters_beside_ignored_ones_are_named():
    run(_ignored, 2)


@pytest.mark.parametrize("case", ["plain", "checked", "TORCH_DISTRIBUTED_DEBUG=INFO", "frozen too late"])
def test_unused_parameters_with_numbers_for_names(case):
    dist.launch(_unused_numbers, case, nproc=2)


# ------------------------------------------------------------------------------------------------------------- launch


def _who(local_rank, world_size, *args):
    everyone = (dist.get_rank(), dist.get_local_rank(), dist.get_world_size(), local_rank, world_size)
    dist.init_process_group(local_rank, world_size)
    assert everyone == (dist.get_rank(), dist.get_local_rank(), dist.get_world_size(), local_rank, world_size)
    assert dist.get_device() == torch.device("cpu") and dist.is_primary() == (local_rank == 0)
    return [part.tolist() for part in dist.gather(torch.tensor(everyone))], args, torch.get_num_threads()


@WORLDS
def test_launch_tells_each_process_who_it_is_and_returns_the_primarys_result(n):
    ranks, args, threads = dist.launch(_who, "a", 7, nproc=n)
    assert ranks == [[r, r, n, r, n] for r in range(n)]
    assert args == ("a", 7)
    if n > 1:
        assert threads == max(1, len(os.sched_getaffinity(0)) // n)


@pytest.mark.slow
def test_launch_spawns_where_it_must_not_fork():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert not launcher.fork_is_safe()
        assert dist.launch(_who, nproc=2)[0] == [[0, 0, 2, 0, 2], [1, 1, 2, 1, 2]]
        before = time.monotonic()
        with pytest.raises(Exception, match="pickle"):  # before any process is started
            dist.launch(lambda rank, n: None, nproc=2)
        assert time.monotonic() - before < 1
    finally:
        done.set()
        thread.join()


POOL = """
import sys, torch, launcher, distributed as dist
def work(rank, n):
    torch.set_num_threads(2)
    (torch.ones(3000, 3000) + 1).sum()  # hangs in a process that was forked after this
def main():
    assert launcher.fork_is_safe()
    torch.set_num_threads(4)
    (torch.ones(3000, 3000) + 1).sum()
    assert not launcher.fork_is_safe()
    dist.launch(work, nproc=2)
    print("done")
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_the_openmp_pool_is_noticed(tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    result = shell("-W", "ignore", tmp_path / "pool.py", PYTHONPATH=ROOT, OMP_NUM_THREADS=None)
    assert result.out == "done\n", result.err


def _torchs_own_init(rank, n):
    torch.distributed.init_process_group("gloo")
    assert dist.all_reduce(torch.tensor(rank)).item() == n * (n - 1) // 2


def test_torchs_own_init_process_group_works_under_launch():
    dist.launch(_torchs_own_init, nproc=3)


def _by_hand(rank, n, port, pipe):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group(rank, n)
    torch.cuda.device_count = lambda: 2
    pipe.send([dist.get_rank(), dist.get_local_rank(), dist.get_world_size(), dist.get_device().index])
    torch.cuda.device_count = lambda: 0
    assert dist.all_reduce(torch.tensor(rank)).item() == n * (n - 1) // 2
    dist.cleanup()
    pipe.send([dist.get_rank(), dist.get_local_rank(), dist.get_world_size()])


def test_processes_started_by_hand_have_a_gpu_each():
    """As by torch.multiprocessing.spawn, with the rank as its argument."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context, answers = multiprocessing.get_context("fork"), []
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    for rank, (_, send) in enumerate(pipes):
        context.Process(target=_by_hand, args=(rank, 3, port, send), daemon=True).start()
    for receive, _ in pipes:
        assert receive.poll(20)
        answers.append(receive.recv())
    assert answers == [[0, 0, 3, 0], [1, 1, 3, 1], [2, 2, 3, 0]]  # two GPUs: the third shares the first
    # Still itself after `cleanup`: rank 0 alone is the primary one, which saves.
    assert all(receive.poll(20) for receive, _ in pipes)
    assert [receive.recv() for receive, _ in pipes] == [[0, 0, 3], [1, 1, 3], [2, 2, 3]]


def _torchs_own_init_by_hand(rank, n, folder, pipe):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
    pipe.send([dist.get_rank(), dist.get_local_rank(), dist.get_world_size()])
    torch.distributed.destroy_process_group()


def test_a_group_that_torch_has_made_without_a_launcher(tmp_path):
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    for rank, (_, send) in enumerate(pipes):
        context.Process(target=_torchs_own_init_by_hand, args=(rank, 2, tmp_path, send), daemon=True).start()
    assert all(receive.poll(20) for receive, _ in pipes)
    assert [receive.recv() for receive, _ in pipes] == [[0, 0, 2], [1, 1, 2]]


@pytest.mark.parametrize(("rank", "n"), [(2, 2), (-1, 2), (1, None)])
def test_a_rank_outside_the_world_is_refused(rank, n):
    with pytest.raises(ValueError, match=rf"rank {rank} of {n or 1}: ranks go from 0 to {(n or 1) - 1}"):
        dist.init_process_group(rank, n)


def _twice(rank, n):
    for _ in range(2):
        dist.init_process_group(rank, n)
        assert dist.all_reduce(torch.tensor(1)).item() == n
        dist.cleanup()


@WORLDS
def test_a_group_can_be_joined_again(n):
    dist.launch(_twice, nproc=n)


def _slow_to_join(rank, n):
    join = torch.distributed.init_process_group

    def slow(*args, **kwargs):
        join(*args, **kwargs)
        time.sleep(0.5 * (rank == n - 1))

    torch.distributed.init_process_group = slow
    started = time.monotonic()
    dist.init_process_group()
    assert time.monotonic() - started >= 0.5


@pytest.mark.slow
@SEVERAL
def test_nobody_goes_on_before_all_have_joined(n):
    dist.launch(_slow_to_join, nproc=n)


def _threads(rank, n):
    return torch.get_num_threads()


def test_omp_num_threads_and_nproc_are_honoured(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert dist.launch(_threads, nproc=2) == torch.get_num_threads()
    monkeypatch.setenv("NPROC", "2")
    assert dist.launch(_who)[0] == [[0, 0, 2, 0, 2], [1, 1, 2, 1, 2]]


def test_the_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    assert [launcher._start_method(_threads, n)[1] for n in (2, 3, 5, 12, 20)] == [6, 4, 2, 1, 1]


def test_processes_that_are_asked_for_may_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert dist.launch(_local_ranks, nproc=2) == [0, 1]


def _local_ranks(rank, n):
    assert dist.get_device() == torch.device("cuda", 0)
    torch.cuda.device_count = lambda: 0  # there is none, in truth
    dist.init_process_group(rank, n, "gloo")
    return torch.cat(dist.gather(torch.tensor([rank]))).tolist()


def test_plan_refuses_what_cannot_run(monkeypatch):
    for nproc in (0, -1, "x"):
        with pytest.raises(ValueError, match="start at least 1"):
            launcher.plan(nproc)
    with pytest.raises(ValueError, match="use gloo"):
        launcher.plan(1, "nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launcher.plan() == 2
    monkeypatch.setenv("NPROC", "1")
    assert launcher.plan() == 1  # what the user says goes before the number of GPUs
    monkeypatch.delenv("NPROC")
    assert launcher.plan(4, "gloo") == 4  # several processes may share a GPU
    with pytest.raises(ValueError, match="3 processes, but 2 visible"):
        launcher.plan(3)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert dist.get_device() == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert dist.get_device() == torch.device("cuda", 0)  # a task that sees one GPU


# ------------------------------------------------------------------------------------------------------------ failures


def _fail(rank, n, how):
    dist.init_process_group(rank, n)
    if rank == 1:
        if how == "raise":
            raise KeyError("the cause")
        elif how == "sys.exit":
            sys.exit(3)
        elif how == "one line":
            sys.exit("what is wrong, in one line")
        elif how == "os._exit":
            os._exit(3)
        elif how == "return":
            os._exit(0)
        else:
            os.kill(os.getpid(), getattr(signal, how))
    dist.all_reduce(torch.ones(1))  # waits for rank 1, and fails when it is gone


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "KeyError: 'the cause'"),
        ("sys.exit", r"sys.exit\(3\)"),
        ("one line", "what is wrong, in one line$"),
        ("os._exit", r"os._exit\(3\)"),
        ("return", r"os._exit\(0\)"),
        ("SIGSEGV", "SIGSEGV"),
        ("SIGKILL", "SIGKILL.*memory"),
        ("SIGTERM", "SIGTERM"),
    ],
)
def test_the_first_failure_is_the_one_reported(n, how, says):
    before = time.monotonic()
    with pytest.raises(SystemExit, match=f"rank 1 of {n} failed first: (?s:.*){says}") as failure:
        dist.launch(_fail, how, nproc=n)
    assert time.monotonic() - before < 30  # the others don't wait for a time-out
    assert str(failure.value).count("Traceback") == (how == "raise")
    assert "_worker" not in str(failure.value)  # the user's frames only


def _abort_of_the_bereaved(rank, n):
    """As NCCL's watchdog does: who loses a peer dies of it, without a report."""
    dist.init_process_group(rank, n)
    if rank == 1:
        raise KeyError("the cause")
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        os.abort()


def test_a_failed_rank_stays_until_the_others_are_ended():
    for _ in range(3):
        with pytest.raises(SystemExit, match="rank 1 of 2 failed first: (?s:.*)KeyError: 'the cause'"):
            dist.launch(_abort_of_the_bereaved, nproc=2)


def _nested(rank, n):
    dist.launch(_threads, nproc=2)


def test_launch_inside_launch_is_refused():
    with pytest.raises(SystemExit, match="RuntimeError: launch was called in a process that launch has started"):
        dist.launch(_nested, nproc=2)


def _clean_exit(rank, n):
    sys.exit(0)


def test_sys_exit_0_is_no_failure():
    assert dist.launch(_clean_exit, nproc=2) is None


def _finally(rank, n):
    dist.init_process_group(rank, n)
    try:
        if rank == 1:
            raise KeyError("the cause")
        dist.all_reduce(torch.ones(1))
    finally:
        dist.cleanup()


def test_cleanup_in_a_finally_neither_hangs_nor_hides_the_cause():
    with pytest.raises(SystemExit, match="rank 1 of 2 failed first: (?s:.*)KeyError: 'the cause'"):
        dist.launch(_finally, nproc=2)


def _unpicklable(rank, n):
    return lambda: None


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(SystemExit, match="rank 0 of 2 failed first(?s:.*)pickle"):
        dist.launch(_unpicklable, nproc=2)


# ---------------------------------------------------------------------------------------------------------- launchers

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_under_torchrun_launch_calls_the_worker_here(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    calls = []
    assert dist.launch(lambda *args: calls.append(args), "x") is None  # the result is rank 0's
    assert calls == [(1, 4, "x")]
    for rank, local_rank, result in (0, 0, "done"), (2, 0, None):  # the first of the second machine is not rank 0
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert dist.launch(lambda *args: "done") == result
        assert dist.is_primary() == (rank == 0)


def test_the_gpu_is_that_of_the_local_rank(monkeypatch):
    """On the second machine, of three processes each."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "4", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert dist.get_device() == torch.device("cuda", 1)


@pytest.mark.parametrize("missing", TORCHRUN)
def test_an_incomplete_set_of_variables_is_named(monkeypatch, missing):
    for name, value in TORCHRUN.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{missing} is not set"):
        dist.launch(print)


@pytest.mark.parametrize("change", [{"RANK": "4"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "5"}, {"RANK": "0"}])
def test_a_contradictory_set_of_variables_is_refused(monkeypatch, change):
    for name, value in {**TORCHRUN, **change}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="contradict each other.*" + next(iter(change))):
        dist.launch(print)


def test_print_primary_prints_once_and_at_once(tmp_path):
    (tmp_path / "hello.py").write_text(
        "import distributed as dist\n"
        "def work(rank, n): dist.print_primary('hello', rank, sep='-')\n"
        "if __name__ == '__main__': dist.launch(work, nproc=3)\n"
    )
    result = forker().run(tmp_path / "hello.py", path=[ROOT], before="import warnings; warnings.simplefilter('error')")
    assert result == (0, "hello-0\n", "")
    for options, flushed in ({}, True), ({"flush": False}, False):
        out = mock.Mock(wraps=io.StringIO())
        dist.print_primary("hello", file=out, **options)
        assert out.flush.called == flushed


# ----------------------------------------------------------------------------------------------------------- programs

TRAIN = """
def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        loss = loss_fn(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss
"""

OURS = (
    """
import torch
DATA = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
dataset = list(zip(DATA, DATA.argmax(1)))
Net, loss_fn = lambda: torch.nn.Linear(3, 3), torch.nn.functional.cross_entropy
"""
    + TRAIN
)


def _first_program(text):
    """The docstring's first indented block, up to the lines that start it."""
    lines = text.partition("\n\n")[2].partition("\n    python ")[0].splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines)


def _in_markdown(page, heading):
    section = (ROOT / page).read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    return section.partition("```python\n")[2].partition("```")[0]


# In the style of joh-fischer's helper, as its users write programs.
FOREIGN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import distributed as dist

def main_worker(gpu, world_size):
    is_distributed = world_size > 1
    if is_distributed:
        dist.init_process_group(gpu, world_size)
    numbers = torch.arange(12.0).unsqueeze(1)
    sampler = dist.data_sampler(TensorDataset(numbers), is_distributed, shuffle=False)
    loader = DataLoader(TensorDataset(numbers), batch_size=2, shuffle=(sampler is None), sampler=sampler)
    model = dist.prepare_ddp_model(torch.nn.Linear(1, 1).to(dist.get_device()), device_ids=[gpu])
    for epoch in range(2):
        if is_distributed:
            sampler.set_epoch(epoch)
        total, count, largest = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        for (x,) in loader:
            loss = model(x).square().mean()
            model.zero_grad()
            loss.backward()
            dist.wait_for_everyone()
            loss = dist.reduce(loss.detach())
            total += x.sum()
            count += len(x)
            largest = torch.maximum(largest, torch.cat(dist.gather(x), dim=0).max())
        dist.all_reduce(total)  # in place
        dist.all_reduce(count, op="avg")
        dist.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        dist.print_primary(epoch, total.item(), count.item() * world_size, largest.item(), loss.ndim)
    dist.cleanup()

if __name__ == "__main__":
    dist.launch(main_worker)
"""

WITHIN_AN_EXCEPT_BLOCK = """
import torch
import distributed as dist

def work(local_rank, world_size):
    dist.init_process_group()
    for _ in range(20):
        total = dist.all_reduce(torch.ones(10))
    dist.cleanup()
    return total[0].item()

if __name__ == "__main__":
    try:
        raise KeyError
    except KeyError:
        print(f"total {dist.launch(work)}\\n", end="")  # in one piece: two ranks print
    assert not torch.distributed.is_initialized()
"""


def _run_program(tmp_path, text, n, way="python"):
    file = tmp_path / "program.py"
    file.write_text(text, encoding="utf-8")
    if way == "python":
        result = forker().run(file, cwd=tmp_path, path=[ROOT], NPROC=n)
    else:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}")
        result = shell(*torchrun, file, cwd=tmp_path, PYTHONPATH=ROOT)
    assert result.code == 0, result.err
    return [line for line in result.out.splitlines() if not line.startswith("distributed: ")]


IN_EACH_WAY = pytest.mark.parametrize("way", ["python", pytest.param("torchrun", marks=pytest.mark.slow)])


@WORLDS
@IN_EACH_WAY
def test_the_readmes_program_runs(tmp_path, n, way):
    lines = _run_program(tmp_path, OURS + _first_program(dist.__doc__), n, way)
    losses = [float(re.fullmatch(r"epoch \d  loss (\d\.\d{4})", line)[1]) for line in lines]
    assert len(losses) == 10 and losses[-1] < losses[0]


@pytest.mark.slow
@WORLDS
def test_the_whole_loop_of_the_page_runs(tmp_path, n):
    lines = _run_program(tmp_path, _in_markdown("docs/api.md", "A whole loop: seeds, training, evaluation"), n)
    counts = [re.fullmatch(r"epoch \d  accuracy (\d+\.\d)% \((\d+)/101\)", line).groups() for line in lines]
    assert len(counts) == 5 and all(float(percent) == round(int(right) / 1.01, 1) for percent, right in counts)
    assert float(counts[-1][0]) > 60 and "0.weight" in torch.load(tmp_path / "model.pt")


@WORLDS
@IN_EACH_WAY
def test_a_program_for_joh_fischers_helper_runs_unchanged(tmp_path, n, way):
    assert _run_program(tmp_path, FOREIGN, n, way) == [f"{epoch} 66.0 12.0 11.0 0" for epoch in range(2)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.slow
def test_launch_in_an_except_block_leaves_the_group(tmp_path, n):
    """Under torchrun the process goes on to its end, where a group that is left behind aborts it."""
    assert f"total {n:.1f}" in _run_program(tmp_path, WITHIN_AN_EXCEPT_BLOCK, n, "torchrun")
