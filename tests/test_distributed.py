"""distributed.py: the same assertions in worlds of 1, 2 and 3 processes; every expected value is a closed form.

The worker functions run in real processes (gloo on the CPU); an assertion that fails there fails the run.
"""

import io
import math
import multiprocessing
import os
import pickle
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
from forked import ROOT, forker, shell
from torch import nn

import distributed as dist
import launcher

WORLDS = pytest.mark.parametrize("n", [1, 2, 3])


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


def _all_ops(rank, n):
    mine = torch.tensor([rank, 10.0 * rank], dtype=torch.float64)
    total = n * (n - 1) / 2
    expected = {"sum": total, "mean": total / n, "min": 0.0, "max": n - 1.0, "product": 0.0}
    for op, value in expected.items():
        answer = dist.all_reduce(mine, op)
        assert answer.tolist() == [value, 0.0 if op == "product" else 10 * value], op
        assert answer.dtype == torch.float64
    assert mine.tolist() == [rank, 10.0 * rank]  # untouched
    assert dist.all_reduce(mine).tolist() == [total, 10 * total]  # a sum by default
    assert dist.reduce(mine).tolist() == [total / n, 10 * total / n]  # a mean by default
    assert dist.all_reduce(torch.tensor(2.0), "product").item() == 2.0**n


@WORLDS
def test_reduce_and_all_reduce_answer_on_every_rank(n):
    run(_all_ops, n)


def _dtypes(rank, n):
    for op, least in ("sum", n), ("product", 1), ("min", 1), ("max", 1):  # of bool all results are int64
        answer = dist.all_reduce(torch.tensor([True, rank == 0]), op)
        assert answer.tolist() == [least, int(n == 1 or op in ("sum", "max"))] and answer.dtype == torch.int64, op
    assert dist.all_reduce(torch.tensor(2**40 + rank)).item() == n * 2**40 + n * (n - 1) // 2  # exact in int64
    mean = dist.reduce(torch.tensor(rank))
    assert mean.item() == pytest.approx((n - 1) / 2) and mean.dtype == torch.get_default_dtype()
    big = torch.tensor(60000.0, dtype=torch.float16)  # n of them overflow float16; their mean does not
    assert dist.reduce(big).item() == 60000.0 and dist.reduce(big).dtype == torch.float16
    assert dist.all_reduce(torch.tensor(1.0, dtype=torch.bfloat16)).item() == n
    assert dist.all_reduce(torch.empty(0, 3)).shape == (0, 3)
    transposed = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(dist.all_reduce(transposed), n * transposed)
    weight = torch.ones(2, requires_grad=True)
    assert not dist.all_reduce(weight).requires_grad
    with pytest.raises(ValueError, match="choose from sum, mean"):
        dist.all_reduce(weight, "median")


@WORLDS
def test_all_reduce_of_any_dtype_and_layout(n):
    run(_dtypes, n)


SMALL_INTEGERS = [(torch.uint8, 200), (torch.int8, -100), (torch.int16, 30_000), (torch.int32, 2_000_000_000)]


def _integers(rank, n):
    for dtype, value in SMALL_INTEGERS:
        mine = torch.tensor([value], dtype=dtype)
        mean = dist.reduce(mine)
        assert mean.tolist() == [value] and mean.dtype == torch.get_default_dtype(), dtype
        total, product = dist.all_reduce(mine), dist.all_reduce(torch.tensor([2], dtype=dtype), "product")
        assert total.tolist() == [n * value] and total.dtype == torch.int64, dtype  # as torch.sum has it
        assert product.tolist() == [2**n] and product.dtype == torch.int64, dtype
        for op in "min", "max":
            assert dist.all_reduce(mine, op).tolist() == [value] and dist.all_reduce(mine, op).dtype == dtype
    assert dist.reduce(torch.tensor(2**62)).item() == 2.0**62
    assert dist.reduce(torch.tensor([True, rank == 0])).tolist() == pytest.approx([1, 1 / n])


@WORLDS
def test_integers_do_not_overflow(n):
    run(_integers, n)


def _lazy(rank, n):
    """`conj` and `imag` of a conjugate only set a bit; the memory is the original's."""
    mine = torch.tensor([complex(1, rank)])
    conjugate, negative = mine.conj(), mine.conj().imag
    assert conjugate.is_conj() and negative.is_neg()
    assert [part.item() for part in dist.gather(conjugate)] == [complex(1, -r) for r in range(n)]
    assert [part.item() for part in dist.gather(negative)] == [-r for r in range(n)]
    assert dist.all_reduce(conjugate).item() == complex(n, -n * (n - 1) / 2)
    assert dist.all_reduce(negative).item() == -n * (n - 1) / 2
    assert mine.item() == complex(1, rank)
    dist.sync_params([conjugate])
    assert mine.item() == 1


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


@pytest.mark.parametrize("n", [2, 3])
def test_the_check_of_a_call_pickles_nothing(n):
    """It took longer than the reductions themselves (see tests/time_collectives.py), and numpy may be missing."""
    run(_without_pickling, n)


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


@pytest.mark.parametrize("n", [2, 3])
def test_a_mismatch_is_one_error_on_all_ranks(n):
    for case, error in run(_mismatches, n).items():
        assert "rank 1: " in error, case


SIZES = (1, 64, 65, 1000)  # of 8 bytes each: up to 512 bytes travel with the check, more need a second collective


def _sizes(rank, n):
    for size in SIZES:
        mine = torch.arange(size, dtype=torch.float64) + rank
        base, total = torch.arange(size, dtype=torch.float64), n * (n - 1) / 2
        expected = {"sum": n * base + total, "mean": base + total / n, "min": base, "max": base + n - 1}
        for op, value in expected.items():
            answer = dist.all_reduce(mine, op)
            assert torch.allclose(answer, value, rtol=1e-15), (op, size)
            assert answer.untyped_storage().nbytes() == mine.nbytes
        assert dist.all_reduce(torch.full((size,), 2), "product").tolist() == [2**n] * size
        assert dist.all_reduce(torch.ones(size, dtype=torch.complex128) * 1j).tolist() == [n * 1j] * size
        uneven = torch.arange(size * 8 * rank)  # small on some ranks, large on others
        parts = dist.gather(uneven)
        assert [part.tolist() for part in parts] == [list(range(size * 8 * r)) for r in range(n)]
        parts[0].add_(1)
        assert n == 1 or parts[1].tolist() == list(range(size * 8))  # each has memory of its own
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)


@WORLDS
def test_small_and_large_tensors_take_different_roads_to_the_same_answer(n):
    run(_sizes, n)


def _nan(rank, n):
    for size in SIZES:
        for at in range(n):
            mine = torch.full((size,), float(rank))
            if rank == at:
                mine[-1] = math.nan
            for op in "min", "max", "sum":
                *others, last = dist.all_reduce(mine, op).tolist()
                assert math.isnan(last), (op, size, at)
                assert others == [{"min": 0, "max": n - 1, "sum": n * (n - 1) / 2}[op]] * (size - 1)


@WORLDS
def test_one_nan_is_in_every_answer(n):
    run(_nan, n)


def _large_mismatch(rank, n):
    for mine in torch.zeros(1000 + rank), torch.zeros(1000, dtype=torch.float64 if rank else torch.float32):
        with pytest.raises(RuntimeError, match="all must call the same"):
            dist.all_reduce(mine)
    with pytest.raises(RuntimeError, match="all must call the same"):
        dist.all_reduce(torch.zeros(1 if rank else 1000))  # small on one rank only
    assert dist.all_reduce(torch.tensor(1)).item() == n


@pytest.mark.parametrize("n", [2, 3])
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
    assert dist.reduce(x).tolist() == [1.0, 1.0] and dist.all_reduce(x) is not x
    assert [part.tolist() for part in dist.gather(x)] == [[1.0, 1.0]]
    model = nn.Linear(1, 1)
    assert dist.prepare_ddp_model(model, device_ids=[0]) is model
    assert dist.data_sampler([1, 2]) is None
    dist.sync_params(model.parameters())
    dist.barrier()
    dist.cleanup()


# ---------------------------------------------------------------------------------------------------------- samplers


def _shares(rank, n, size):
    dataset = range(size)
    exact = dist.data_sampler(dataset, distributed=True, shuffle=False, pad=False)
    mine = list(exact)
    assert mine == list(range(rank, size, n)) and len(exact) == len(mine)
    everyone = torch.cat(dist.gather(torch.tensor(mine, dtype=torch.int64)))
    assert sorted(everyone.tolist()) == list(range(size))  # every example exactly once
    if size:
        padded = dist.data_sampler(dataset, True)
        lengths = [len(part) for part in dist.gather(torch.tensor(list(padded)))]
        assert lengths == [-(-size // n)] * n == [len(padded)] * n  # equal shares


def _all_shares(rank, n):
    for size in (0, 1, 5, 10, 1000):
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
    with pytest.warns(UserWarning, match=r"sampler.set_epoch\(epoch\)"):
        list(sampler)
    unshuffled = dist.data_sampler(range(12), True, shuffle=False)
    unshuffled.set_epoch(0, skip=2)
    assert len(list(unshuffled)) == len(unshuffled) == 12 // n - 2
    unshuffled.set_epoch(1)  # the next epoch begins at its beginning
    assert len(list(unshuffled)) == len(unshuffled) == 12 // n
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(unshuffled) == list(unshuffled)  # no order to forget
    assert (dist.data_sampler(range(6)) is None) == (n == 1)
    assert dist.data_sampler(range(6), False) is None


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


def _evaluate(rank, n):
    """BatchNorm, an odd number of examples and small batches: ranks have different numbers of batches."""
    torch.manual_seed(2)
    x = torch.randn(10_000, 4)
    y = x.argmax(1)
    model = dist.prepare_ddp_model(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))
    inner = getattr(model, "module", model)
    model.train()
    model(x[rank::n]).sum().backward()  # the running averages of the ranks differ now
    inner[1].running_mean.fill_(rank)
    model.eval()  # and are rank 0's again
    assert inner[1].running_mean.tolist() == [0.0] * 8
    inner[1].running_var.fill_(1.0)
    sampler = dist.data_sampler(x, True, shuffle=False, pad=False)
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in torch.tensor(list(sampler)).split(9):
            sums += torch.tensor([(model(x[batch]).argmax(1) == y[batch]).sum(), len(batch)])
    return dist.all_reduce(sums).tolist()


def test_evaluation_is_exact_in_any_world_size():
    correct, count = run(_evaluate, 1)
    assert count == 10_000 and 0 < correct < count
    for n in (2, 3, 7):
        assert run(_evaluate, n) == [correct, count], n


def _frozen(rank, n):
    """Gradients in eval mode, usual in fine-tuning, are averages, too; without gradients no collective is called."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    model = dist.prepare_ddp_model(model, broadcast_buffers=True)
    model.eval()
    model(torch.full((1, 2), float(rank))).sum().backward()
    gradient = dist.unwrap_model(model)[0].weight.grad
    assert gradient.tolist() == pytest.approx(torch.full((1, 2), (n - 1) / 2 / (1 + 1e-5) ** 0.5))
    for mode in False, True:
        model.train(mode)
        with torch.no_grad():
            for _ in range(rank):  # another number on each rank
                model(torch.ones(4, 2))
    model = dist.prepare_ddp_model(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)), broadcast_buffers=True)
    model.eval()
    for _ in range(rank):  # buffers are not broadcast in eval mode, though gradients are recorded
        model(torch.ones(4, 2))
    assert dist.all_reduce(torch.tensor(1)).item() == n


@WORLDS
def test_gradients_in_eval_mode_are_averaged(n):
    run(_frozen, n)


def _buffers(rank, n):
    for options, expected in ({}, 0), ({"broadcast_buffers": True}, 0), ({"broadcast_buffers": False}, rank):
        model = dist.prepare_ddp_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), **options)
        mean = dist.unwrap_model(model)[1].running_mean
        mean.fill_(rank)
        model.eval()
        assert mean.tolist() == [expected] * 2, options
        if rank == 0:  # the second is no collective
            model.eval()
        assert dist.all_reduce(torch.tensor(1)).item() == n


@WORLDS
def test_eval_shares_buffers_unless_told_not_to(n):
    run(_buffers, n)


class _Centred(nn.Module):
    """Its buffer is read in training, unlike BatchNorm's averages."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return self.linear(x - self.mean)


def _centred(rank, n):
    ends = []
    for wrap in nn.parallel.DistributedDataParallel, dist.prepare_ddp_model:
        torch.manual_seed(0)
        model = wrap(_Centred())
        for step in range(3):
            x = torch.tensor([[1.0], [2.0 + rank]]) * (step + 1)
            loss = (model(x) - 1).square().mean()
            loss.backward()
            with torch.no_grad():
                dist.unwrap_model(model).linear.weight -= 0.1 * dist.unwrap_model(model).linear.weight.grad
            model.zero_grad()
        ends.append([*model.parameters(), *model.buffers()])
    for torchs, ours in zip(*ends, strict=True):
        assert torch.equal(torchs, ours)


@pytest.mark.parametrize("n", [2, 3])
def test_buffers_that_are_read_in_training_are_shared_in_each_step(n):
    run(_centred, n)


def _of_groups(rank, n):
    group = [torch.distributed.new_group(ranks) for ranks in ([0], [1, 2])][rank > 0]
    model = dist.prepare_ddp_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), process_group=group)
    mean = dist.unwrap_model(model)[1].running_mean
    mean.fill_(rank)
    if rank > 0:  # the other group need not call it
        model.eval()
    assert mean.tolist() == [min(rank, 1)] * 2
    ignoring = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["1.running_mean"])
    model = dist.prepare_ddp_model(ignoring)
    for buffer in ignoring[1].running_mean, ignoring[1].running_var:
        buffer.fill_(rank)
    model.eval()
    assert ignoring[1].running_mean.tolist() == [rank] * 2 and ignoring[1].running_var.tolist() == [0] * 2


def test_eval_shares_buffers_in_the_models_group_and_not_what_ddp_ignores():
    run(_of_groups, 3)


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


@pytest.mark.parametrize("n", [2, 3])
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


class _SlowToDie:
    """A process whose end shows a moment after its peers have noticed it."""

    def __init__(self, *exitcodes):
        self.exitcodes, self.pid = list(exitcodes), 2**22 + 1  # a pid that no process has

    @property
    def exitcode(self):
        return self.exitcodes.pop(0) if len(self.exitcodes) > 1 else self.exitcodes[0]


def test_a_death_that_shows_after_its_consequence_is_still_the_cause(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "_exit_code", lambda process: process.exitcode)
    run = launcher._Run(2)
    run.folder, run.processes = str(tmp_path), [_SlowToDie(None), _SlowToDie(None, -9)]
    report = launcher._Report(time.monotonic(), "\n\nRuntimeError: Connection closed by peer")
    (tmp_path / "report0").write_bytes(pickle.dumps(report))
    with pytest.raises(SystemExit, match="rank 1 of 2 failed first: ended by SIGKILL"):
        run.watch()


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
