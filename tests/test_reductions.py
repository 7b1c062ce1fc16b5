"""The collectives of distributed.py: the same assertions on one rank and on three; expected values are closed forms."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp
from world import error_of, on_ranks

import distributed as dist

FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
INTEGERS = torch.uint8, torch.int8, torch.int32, torch.int64
DTYPES = *FLOATS, *INTEGERS, torch.int16, torch.bool

OPS = {  # and the result, if rank r passes base + r
    ("sum", "SUM", ReduceOp.SUM): lambda base, n: n * base + n * (n - 1) / 2,
    ("mean", "avg", ReduceOp.AVG): lambda base, n: base + (n - 1) / 2,
    ("min", ReduceOp.MIN): lambda base, n: base,
    ("max", ReduceOp.MAX): lambda base, n: base + n - 1,
}


def this_rank():
    return dist.get_rank(), dist.get_world_size()


@on_ranks(1, 3)
def test_every_op_under_every_name():
    rank, n = this_rank()
    for shape, (names, expected) in itertools.product([(), (0, 3), (2, 500)], OPS.items()):
        base = torch.arange(math.prod(shape), dtype=torch.float64).view(shape) % 5
        for op in names:
            mine = base + rank
            before, version, memory = mine.clone(), mine._version, mine.data_ptr()
            result = dist.reduce(mine, op)
            assert torch.equal(result, expected(base, n)) and result.dtype == torch.float64, (op, shape)
            assert torch.equal(mine, before) and mine._version == version
            assert result is not mine and (result.data_ptr() != memory or not base.numel())
            assert dist.all_reduce(mine, op) is mine and mine.data_ptr() == memory
            assert torch.equal(mine, expected(base, n)) and mine.shape == shape, (op, shape)
    mine = torch.tensor(float(rank))
    assert dist.reduce(mine).item() == (n - 1) / 2  # what one prints is a mean
    assert dist.all_reduce(mine).item() == n * (n - 1) / 2  # torch's name, torch's sum
    for wrong, function in itertools.product(("median", "", 0, None, ReduceOp.PRODUCT), (dist.all_reduce, dist.reduce)):
        error = error_of(function, mine, wrong)
        assert error == f"ValueError: op={wrong!r}: choose from sum, mean, min, max"


@on_ranks(1, 3)
def test_all_reduce_keeps_the_dtype_or_refuses():
    _, n = this_rank()
    for dtype in FLOATS + INTEGERS:
        expected = {"sum": [n, 2 * n], "min": [1, 2], "max": [1, 2]}
        for op, values in (expected | {"mean": [1, 2]} if dtype in FLOATS else expected).items():
            mine = torch.tensor([1, 2], dtype=dtype)
            assert dist.all_reduce(mine, op) is mine and mine.dtype == dtype and mine.tolist() == values, (dtype, op)
    assert dist.all_reduce(torch.tensor([200], dtype=torch.uint8)).item() == 200 * n % 256  # the dtype stays
    assert dist.all_reduce(torch.tensor(60000.0, dtype=torch.float16)).item() == (60000 if n == 1 else math.inf)
    too_small = [(torch.int16, "sum"), (torch.bool, "sum"), (torch.bool, "max")]
    for dtype, op in too_small + [(dtype, "mean") for dtype in (*INTEGERS, torch.bool)]:
        mine = torch.ones(2, dtype=dtype)
        error = error_of(dist.all_reduce, mine, op)
        assert error == f"TypeError: all_reduce {op} doesn't support {dtype}: use dist.reduce(tensor, {op!r})"
        assert dist.reduce(mine, op).tolist() == [n if op == "sum" else 1] * 2  # as the message says


@on_ranks(1, 3)
def test_views_and_tensors_with_gradients():
    """Each rank has a layout of its own: the backends alone would add up the memory as it lies there."""
    rank, n = this_rank()
    values = torch.arange(24.0).view(2, 3, 4, 1)
    channels_last, reverse = torch.empty(2, 4, 1, 3).permute(0, 3, 1, 2), torch.empty(1, 4, 3, 2).permute(3, 2, 1, 0)
    own = [torch.empty(2, 3, 4, 1), channels_last, reverse][rank]
    for op, factor in ("sum", n), ("mean", 1), ("max", 1):
        own.copy_(values)
        strides = own.stride()
        assert torch.equal(dist.reduce(own, op), factor * values)
        assert dist.all_reduce(own, op) is own and torch.equal(own, factor * values) and own.stride() == strides
    whole = torch.ones(4, 4)
    for op in "sum", "max":
        dist.all_reduce(whole[:, 1], op)  # a column, in the matrix
    assert whole.sum(0).tolist() == [4, 4 * n, 4, 4]
    weight = nn.Parameter(torch.full((2,), float(rank)))  # averaged by hand
    assert dist.all_reduce(weight, "mean") is weight and weight.tolist() == [(n - 1) / 2] * 2
    assert weight.requires_grad and weight.is_leaf
    loss = (weight * 2).sum()
    for result in dist.reduce(loss), *dist.gather(loss):
        assert result.item() == 2 * (n - 1) and result.shape == () and not result.requires_grad
    assert loss.requires_grad
    with torch.inference_mode():
        ones = torch.ones(2)
    assert dist.reduce(ones, "sum").tolist() == dist.all_reduce(ones).tolist() == [n, n]


# Its sum with some ones is right in 64 bits, and wrong in fewer.
LARGE = {torch.float16: 2048, torch.bfloat16: 256, torch.float32: 2**24, torch.float64: 2**52}
LARGE |= {torch.uint8: 255, torch.int8: 127, torch.int16: 2**15 - 1, torch.int32: 2**31 - 1, torch.bool: 1}
LARGE |= {torch.int64: 2**53 + 1}  # float64 hasn't got it


@on_ranks(1, 3)
def test_reduce_computes_in_64_bits():
    rank, n = this_rank()
    for dtype, large in LARGE.items():
        mine = torch.tensor([large if rank == 0 else 1, 1], dtype=dtype)
        smallest, total = large if n == 1 else 1, large + n - 1
        expected = {"sum": [total, n], "min": [smallest, 1], "max": [large, 1]}
        for op, values in expected.items():
            result = dist.reduce(mine, op)
            assert result.tolist() == values, (dtype, op)
            assert result.dtype == (dtype if dtype in FLOATS else torch.int64), (dtype, op)
        mean, exact = dist.reduce(mine), torch.tensor([total / n, 1], dtype=torch.float64)
        if dtype in FLOATS:
            assert torch.equal(mean, exact.to(dtype)) and mean.dtype == dtype
        elif dtype != torch.int64:
            assert torch.equal(mean, exact) and mean.dtype == torch.float64
    assert dist.reduce(torch.tensor([rank, -5])).tolist() == [(n - 1) / 2, -5]  # int64
    big = torch.tensor(60000.0, dtype=torch.float16)
    assert dist.reduce(big).item() == 60000  # but the sum is too large
    assert dist.reduce(torch.tensor([True, rank == 0])).tolist() == [1, 1 / n]


@on_ranks(1, 3)
def test_one_nan_is_in_every_answer_and_inf_is_a_number():
    rank, n = this_rank()
    for at, ((op, *_), expected) in itertools.product(range(n), OPS.items()):
        mine = torch.full((1000,), 1.0 + rank)
        if rank == at:
            mine[0], mine[1], mine[-1] = math.inf, -math.inf, math.nan
        for function, dtype in [(dist.reduce, torch.float32), *((dist.all_reduce, dtype) for dtype in FLOATS)]:
            plus, minus, *others, nan = function(mine.to(dtype, copy=True), op).tolist()  # plus, minus: infinity
            assert math.isnan(nan), (op, at, dtype)  # gloo's own minimum and maximum may drop it
            assert plus == (math.inf if op != "min" or n == 1 else 1 + (at == 0))  # or the least of the others
            assert minus == (-math.inf if op != "max" or n == 1 else n - (at == n - 1))
            assert others == [expected(1.0, n)] * 997


@on_ranks(1, 3)
def test_gather_is_in_rank_order_and_shapes_may_differ():
    rank, n = this_rank()
    for dtype in DTYPES:
        parts = dist.gather(torch.full((rank, 2), rank, dtype=dtype))  # none of rank 0
        assert [part.shape for part in parts] == [(r, 2) for r in range(n)] and {p.dtype for p in parts} == {dtype}
        expected = [[float(r > 0 if dtype == torch.bool else r)] * 2 for r in range(n) for _ in range(r)]
        assert torch.cat(parts).tolist() == expected, dtype
    parts = dist.gather(torch.zeros(2, rank + 1, 3 - rank))
    assert [part.shape for part in parts] == [(2, r + 1, 3 - r) for r in range(n)]
    assert torch.stack(dist.gather(torch.tensor(10 * rank))).tolist() == [10 * r for r in range(n)]
    parts = dist.gather(nn.Parameter(torch.ones(1)))
    assert not any(part.requires_grad or isinstance(part, nn.Parameter) for part in parts)

    mine = torch.arange(100_000.0)[rank : rank + 2]
    parts = dist.gather(mine)
    assert [part.tolist() for part in parts] == [[r, r + 1] for r in range(n)]
    assert [part.untyped_storage().nbytes() for part in parts] == [8] * n  # not all that it is a view of
    for part in parts:
        part.zero_()
    assert mine.tolist() == [rank, rank + 1]  # the results are new


@on_ranks(1, 3)
def test_sync_params_copies_rank_0s_values_in_place():
    rank, n = this_rank()
    for dtype, shape in itertools.product(DTYPES, [(), (0,), (2, 3)]):
        tensor = torch.full(shape, rank == 0, dtype=dtype)  # 1 on rank 0
        memory = tensor.data_ptr()
        dist.sync_params(tensor)
        assert tensor.tolist() == torch.ones(shape).tolist() and tensor.data_ptr() == memory, (dtype, shape)
    whole = torch.full((3, 4), float(rank))
    dist.sync_params([whole[:, 1], whole[0], whole.t()[3]])  # views of many layouts
    assert (whole == torch.tensor([[0, 0, 0, 0], [rank, 0, rank, 0], [rank, 0, rank, 0]])).all()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model(torch.randn(5, 3))
    held = list(model.parameters())
    assert dist.sync_params(model.parameters()) is None
    dist.sync_params(model.buffers())
    assert all(new is old and new.requires_grad for new, old in zip(model.parameters(), held, strict=True))
    for tensor in model.state_dict().values():
        assert all(torch.equal(part, tensor) for part in dist.gather(tensor))
    assert model[1].num_batches_tracked == 1


THREE, ALL, OUT = torch.zeros(3), "float32 [3]", "needs tensors, not"
MISMATCHES = {  # what the ranks call, and what one of them does; with the lines of the table
    "function": (lambda: dist.reduce(THREE), lambda: dist.gather(THREE), "reduce mean of torch", "gather of torch"),
    "op": (lambda: dist.all_reduce(THREE), lambda: dist.all_reduce(THREE, "max"), "all_reduce sum", "all_reduce max"),
    "dtype": (lambda: dist.all_reduce(THREE), lambda: dist.all_reduce(THREE.double()), ALL, "float64 [3]"),
    "size": (lambda: dist.all_reduce(THREE), lambda: dist.all_reduce(torch.zeros(5)), ALL, "float32 [5]"),
    "shape": (lambda: dist.reduce(THREE), lambda: dist.reduce(THREE.view(3, 1)), ALL, "float32 [3, 1]"),
    "gather's dtype": (lambda: dist.gather(THREE), lambda: dist.gather(THREE.int()), "float32", "int32"),
    "dimensions": (lambda: dist.gather(THREE), lambda: dist.gather(THREE.sum()), "1 dimension", "0 dimension"),
    "number": (lambda: dist.sync_params([THREE] * 2), lambda: dist.sync_params(THREE), "[3], torch", "float32 [3]"),
    "barrier": (lambda: dist.gather(THREE), dist.barrier, "gather of torch.float32", "barrier"),
    "no tensor": (lambda: dist.reduce(THREE), lambda: dist.reduce(0.5), ALL, "reduce mean of float"),
}


@on_ranks(3)
def test_ranks_that_call_different_things_get_one_error_on_all():
    here = dist.get_rank()
    for odd, (case, (*calls, usual, other)) in zip(itertools.cycle(range(3)), MISMATCHES.items(), strict=False):
        first, *table = str(error_of(calls[here == odd])).splitlines()
        assert first == "RuntimeError: the ranks made different calls, but all must make the same call:"
        assert len(table) == 3, case
        for rank, line in enumerate(table):
            assert line.startswith(f"  rank {rank}: ") and (other if rank == odd else usual) in line, (case, table)
        assert dist.all_reduce(torch.tensor(1)).item() == 3, "the group still works"


def dtensor():
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:  # torch 2.4
        from torch.distributed._tensor import Shard, distribute_tensor
    return distribute_tensor(torch.ones(3), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


FUNCTIONS = {"reduce mean": dist.reduce, "all_reduce sum": dist.all_reduce, "gather": dist.gather}
FUNCTIONS |= {"sync_params": dist.sync_params}


@on_ranks(3)
def test_what_is_refused_is_refused_on_all_ranks():
    """What one rank passes, or all (odd = 3): none of the ranks gets a result, and none waits for the others."""
    here = dist.get_rank()
    a_dtensor = "doesn't support DTensors: pass .full_tensor(), or this rank's .to_local()"
    refused = {
        "DTensor": (dtensor(), a_dtensor),
        "no tensor": (None, "needs tensors, not NoneType (use torch.as_tensor)"),
    }
    for (value, text), (name, function), odd in itertools.product(refused.values(), FUNCTIONS.items(), range(4)):
        value = [value] if name == "sync_params" else value
        error = str(error_of(function, value if odd in (here, 3) else THREE.clone()))
        assert error == f"TypeError: {name} {text}" if odd == 3 else error.startswith("RuntimeError: the ranks made")
    for odd in range(3):
        wrong = error_of(dist.reduce, THREE, "median" if odd == here else "sum")
        assert f"rank {odd}: reduce median of torch.float32 [3]" in wrong, wrong
    assert dist.all_reduce(torch.tensor(1)).item() == 3, "the group still works"


@on_ranks(3)
def test_a_tensor_of_a_rare_kind_is_reduced_correctly_or_is_an_error_on_all_ranks():
    """The backends' or torch's own error; never a wrong number."""
    complex_sum = [3 + 3j, 6]
    for op, expected in ("sum", complex_sum), ("mean", [1 + 1j, 2]):
        assert dist.reduce(torch.tensor([1 + 1j, 2]), op).tolist() == expected
    assert dist.all_reduce(torch.tensor([1 + 1j, 2])).tolist() == complex_sum
    rare = {
        "complex minimum": lambda: dist.reduce(torch.tensor([1 + 1j]), "min"),
        "meta": lambda: dist.all_reduce(THREE.to("meta")),
        "expanded": lambda: dist.all_reduce(torch.ones(1).expand(3)),
        "expanded parameter": lambda: dist.sync_params(torch.ones(1).expand(3)),
        "quantized": lambda: dist.all_reduce(torch.quantize_per_tensor(THREE, 1, 0, torch.quint8)),
        "lazy": lambda: dist.all_reduce(nn.LazyLinear(1).weight),
        "uint16": lambda: dist.all_reduce(torch.ones(2).to(torch.uint16)),
    }
    for case, call in rare.items():
        assert "Error: " in str(error_of(call)), case
        assert dist.all_reduce(torch.tensor(1)).item() == 3, f"the group still works after {case}"


@on_ranks(1, 3)
def test_a_tensor_is_reduced_in_its_own_memory_or_copied_back():
    rank, n = this_rank()
    column = torch.full((1, 5), 1.0 + rank)[:, 2]  # one element, with a stride of 5
    assert dist.reduce(column, "sum").tolist() == dist.all_reduce(column).tolist() == [n * (n + 1) / 2]
    for count in 1, 3000:  # contiguous views with torch's bit for "times -1"
        negative = torch._neg_view(torch.full((count,), 1.0 + rank))
        assert negative.is_neg() and dist.reduce(negative, "min").tolist() == [-n] * count
        assert dist.all_reduce(negative.clone(), "max").tolist() == [-1] * count


@on_ranks(1)
def test_what_is_no_tensor_is_a_type_error():
    for name, function in FUNCTIONS.items():
        for value in 0.5, nn.ReLU():
            error = error_of(function, [value] if name == "sync_params" else value)
            assert error == f"TypeError: {name} {OUT} {type(value).__name__} (use torch.as_tensor)"
    assert error_of(dist.sync_params, nn.Linear(1, 1).state_dict()).startswith(f"TypeError: sync_params {OUT} str (use")


def test_a_collective_before_init_process_group_is_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in dist.all_reduce, dist.reduce, dist.gather, dist.sync_params, lambda _: dist.barrier():
        with pytest.raises(ValueError, match="make sure to call init_process_group"):
            call(torch.ones(1))
