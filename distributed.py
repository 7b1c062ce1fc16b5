"""What a training script calls: rank, device, process group, collectives, sampler, DDP model, launch.

    from torch.utils.data import DataLoader

    import distributed as dist

    def main_worker(local_rank, world_size, epochs):  # runs once per process
        dist.init_process_group()
        model = dist.prepare_ddp_model(Net().to(dist.get_device()))  # averages the gradients over all processes
        sampler = dist.data_sampler(dataset)          # this process's share of the data
        loader = DataLoader(dataset, batch_size=64 // world_size, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)                  # a different order in each epoch
            loss = train(model, loader)
            dist.print_primary(f"epoch {epoch}  loss {dist.reduce(loss):.4f}")  # the mean over all processes
        dist.cleanup()

    if __name__ == "__main__":
        dist.launch(main_worker, 10)

    python train.py                                   # one process per visible GPU; one process without a GPU
    CUDA_VISIBLE_DEVICES=0,1 python train.py          # choose the GPUs; NPROC=2 chooses the number of processes
    torchrun --nproc_per_node=2 train.py              # or srun, or mpirun: launch starts nothing then

Copy it together with rendezvous.py and launcher.py: they need Python 3.10, torch 2.4 and nothing else.  Every rank must
call the same collectives in the same order.  With one process they work without a process group.
"""

import argparse
import hashlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as torch_dist
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

if __package__:
    from . import launcher, rendezvous
else:
    import launcher
    import rendezvous


def get_rank() -> int:
    """This process's number among all: 0 to world size - 1."""
    return torch_dist.get_rank() if torch_dist.is_initialized() else rendezvous.get_world().rank


def get_local_rank() -> int:
    """This process's number among those on this machine."""
    return rendezvous.get_world().local_rank


def get_world_size() -> int:
    """The number of processes on all machines together."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else rendezvous.get_world().world_size


def get_device() -> torch.device:
    """This process's device: the GPU with its local rank's number, or the CPU.  A process that sees one GPU uses it."""
    kind, count = launcher.devices()
    return torch.device(kind, get_local_rank() % count) if count else torch.device("cpu")


def is_primary() -> bool:
    """True on rank 0, which prints and saves."""
    return get_rank() == 0


def print_primary(*args: Any, **kwargs: Any) -> None:
    """`print` on rank 0, at once (flushed); nothing on the others.  Not a collective."""
    if is_primary():
        print(*args, **{"flush": True, **kwargs})


def init_process_group(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    checked: bool = False,
) -> None:
    """Join the process group.  Every rank must call it; it returns when all have come.

    rank, world_size: only for a process that neither `launch` nor a launcher has started (mp.spawn, say).
    backend: None takes nccl for CUDA and xccl for XPU (if torch has it), else gloo.  Sets the CUDA or XPU device.
    timeout: seconds for all to come (120).  After 10 s rank 0 says who is missing; at the end TimeoutError.
    checked: torch compares every collective but DDP's own before it runs, and an error lists what each rank has
        called: slower, for trials.  Not with send and recv: torch takes them for calls of all ranks.
    """
    if isinstance(rank, str):
        raise TypeError(f"init_process_group: the first argument is the rank: type backend={rank!r}")
    world = rendezvous.join(rank, world_size)
    device = get_device()
    backend = backend or launcher.default_backend()
    launcher.check_backend(backend)
    options: dict = {"rank": world.rank, "world_size": world.world_size}
    options["timeout"] = timedelta(seconds=rendezvous.seconds("DIST_TIMEOUT"))  # of each collective
    gpu = ""
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    if backend == "nccl":  # one process per card; torch 2.4 doesn't tell which card it is
        gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        if torch.__version__ >= (2, 7, 1):  # 2.6 and 2.7.0 hang with it (pytorch#153960)
            options["device_id"] = device  # connect at once, and to the right GPU
    store = rendezvous.meet(world, gpu, timeout)
    if checked:
        torch_dist.set_debug_level(torch_dist.DebugLevel.DETAIL)  # until the group is left
    torch_dist.init_process_group(backend, store=store, **options)
    rendezvous.wait_for_all(store, world, timeout)
    processes = "process" if world.world_size == 1 else "processes"
    print_primary(f"distributed: {world.world_size} {processes}, {backend}, {device.type}")


def cleanup() -> None:
    """Leave the process group, if there is one.

    With several processes it does nothing while an exception is being handled: the other ranks may be inside a
    collective, and leaving would wait for them for ever (pytorch/torchtitan#1342).  `launch` leaves when all is well.
    """
    _leave_group(failed=sys.exc_info()[1] is not None)


def _leave_group(failed: bool) -> None:
    if not torch_dist.is_initialized() or (failed and get_world_size() > 1):
        return
    # Gloo's threads take Python's lock to free their last tensors.  Sleeping lets them have it before the group is
    # destroyed; after that they abort the process, or hang (pytorch#179291).  On a busy machine each sleep is longer.
    for _ in range(20):
        time.sleep(0.001)
    torch_dist.destroy_process_group()
    torch_dist.set_debug_level_from_env()  # `checked` ends with its group


_OPS = ("sum", "mean", "min", "max", "product")
# The dtypes that nccl and gloo both reduce.  gloo also takes bools, and adds them up as bytes.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)


def all_reduce(tensor: torch.Tensor, op: str | torch_dist.ReduceOp = "sum") -> torch.Tensor:
    """Overwrite the tensor with the sum over all ranks, on every rank; returns the tensor.  As torch's, in place.

    Every rank must call it, with the same op, shape and dtype; otherwise RuntimeError on all, with what each called.
    op: "sum", "mean" (or "avg"), "min", "max", "product", or torch's ReduceOp.  A NaN on any rank is in the result.
    Any device and layout.  The dtype stays, so small dtypes may overflow.  TypeError where the result has no place in
    the tensor (bool; a mean of integers) or the backends can't compute it (int16, float8): use `reduce`.
    """
    op = _op_name(op)
    _check_tensors("all_reduce", [tensor])
    _check_same_call(f"all_reduce {op} of {tensor.dtype} {list(tensor.shape)}")
    if tensor.layout != torch.strided:
        raise TypeError("all_reduce can't work on a sparse tensor in place: pass tensor.to_dense()")
    if tensor.dtype not in _FLOATS and (op == "mean" or tensor.dtype not in _INTEGERS):
        raise TypeError(f"all_reduce can't put the {op} into {tensor.dtype}: use dist.reduce(tensor, {op!r})")
    return _reduce_in_place(tensor, op)


def reduce(tensor: torch.Tensor, op: str | torch_dist.ReduceOp = "mean") -> torch.Tensor:
    """A new tensor with the mean over all ranks, the same on every rank: what one prints as "the loss".

    Every rank must call it, with the same op, shape and dtype; otherwise RuntimeError on all, with what each called.
    op: as for `all_reduce`.  It is computed in 64 bits, so small dtypes don't overflow.  The result has the input's
    shape and device, and a floating-point input's dtype.  Of integers and bools means are float64, the others int64.
    """
    op = _op_name(op)
    _check_tensors("reduce", [tensor])
    _check_same_call(f"reduce {op} of {tensor.dtype} {list(tensor.shape)}")
    is_float = tensor.is_floating_point() or tensor.is_complex()
    wide = torch.float64 if is_float or op == "mean" else torch.int64
    if tensor.is_complex():
        wide = torch.complex128
    result = _reduce_in_place(_copy(tensor, tensor.device).to(wide), op)
    return result.to(tensor.dtype) if is_float else result


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order, on every rank: for torch.cat (torch.stack if they have no dimension).

    Every rank must call it.  Shapes may differ, even to zero rows; if dtypes or numbers of dimensions do, RuntimeError
    on all ranks.  Any dtype and device; the results are new, on the input's device.
    """
    _check_tensors("gather", [tensor])
    _check_same_call(f"gather of {tensor.dtype} with {tensor.dim()} dimension(s)")
    return _gather(tensor)


def sync_params(params: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors, in place, by rank 0's.

    Every rank must pass as many, of the same shapes and dtypes; otherwise RuntimeError on all ranks.
    """
    params = list(params) if isinstance(params, Iterable) else [params]
    _check_tensors("sync_params", params)
    _check_same_call(f"sync_params of {[(param.dtype, *param.shape) for param in params]}")
    device = _comm_device()
    if device is None:
        return
    for param in params:
        values = _copy(param, device)
        torch_dist.broadcast(values.flatten().view(torch.uint8), 0)  # gloo of torch 2.4 knows no complex numbers
        param.detach().copy_(values)


def barrier() -> None:
    """Wait until every rank has called it."""
    _check_same_call("barrier")


wait_for_everyone = barrier


def _op_name(op: Any) -> str:
    """One of _OPS, for a name or torch's ReduceOp."""
    name = str(getattr(op, "name", op)).lower()
    name = "mean" if name == "avg" else name
    if name not in _OPS:
        raise ValueError(f"op={op!r}: choose from {', '.join(_OPS)}")
    return name


def _comm_device() -> torch.device | None:
    """The device that the backend moves tensors on; None in a world of one.  Without a process group ValueError."""
    if get_world_size() == 1:
        return None
    return get_device() if torch_dist.get_backend() in launcher.BACKENDS.values() else torch.device("cpu")


def _check_tensors(function: str, values: list) -> None:
    """TypeError if one is no tensor; RuntimeError on all ranks if only some ranks pass that."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            _check_same_call(f"{function} of {kind}")
            number = value if isinstance(value, (int, float)) else "..."
            advice = "type model.parameters()" if function == "sync_params" else f"type torch.tensor({number})"
            if value is None:
                advice = "is it the .grad of a parameter that has none? Skip it on all ranks"
            raise TypeError(f"{function} takes tensors, not {kind}: {advice}")


def _check_same_call(call: str) -> None:
    """RuntimeError on all ranks, with a table of the calls, unless all ranks make the same call.

    The backends don't check: gloo adds 3 elements to 5 and returns garbage.  The check is an all-gather of a hash.  It
    can't see that two equal calls are swapped.
    """
    device = _comm_device()
    if device is None:
        return
    digest = hashlib.blake2b(call.encode(), digest_size=16).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    if (torch.stack(_all_gather(mine)) == mine).all():
        return
    calls = _gather(torch.tensor(list(call.encode()), dtype=torch.uint8))
    lines = "".join(f"\n  rank {rank}: {bytes(called.tolist()).decode()}" for rank, called in enumerate(calls))
    raise RuntimeError(f"the ranks called different things, but all must call the same:{lines}")


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new tensor as the backends need it: contiguous, and no lazy conjugate or negative of another one."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor.detach())


def _all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors, in rank order.  Shapes and dtypes must be equal, the tensors as `_copy` makes them."""
    rows = [torch.empty_like(tensor) for _ in range(get_world_size())]
    torch_dist.all_gather(rows, tensor)
    return rows


def _gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """`gather` without its check: first the shapes, then the data, padded, as the backends gather equal sizes only."""
    device = _comm_device()
    if device is None:
        return [_copy(tensor, tensor.device)]
    shapes = torch.stack(_all_gather(torch.tensor([tensor.nbytes, *tensor.shape], device=device))).tolist()
    longest = max(nbytes for nbytes, *_ in shapes)
    data = _copy(tensor, device).flatten().view(torch.uint8)
    rows = _all_gather(nn.functional.pad(data, (0, longest - len(data))))
    parts = []
    for row, (nbytes, *shape) in zip(rows, shapes, strict=True):
        part = row[:nbytes].view(tensor.dtype).view(shape)
        parts.append(part.to(tensor.device, copy=True))
    return parts


def _reduce_in_place(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """`all_reduce` without its checks."""
    if tensor.is_complex() and op not in ("sum", "mean"):
        raise TypeError(f"the backends can't compute the {op} of complex numbers: use dist.gather")
    device = _comm_device()
    if device is None:
        return tensor
    target = tensor.detach()  # also a parameter can be overwritten
    ready = target.device == device and target.is_contiguous() and not target.is_conj() and not target.is_neg()
    data = target if ready else _copy(target, device)
    if op in ("min", "max"):  # the backends' own may drop a NaN; torch's don't
        rows = torch.stack(_all_gather(data))
        data.copy_(rows.amin(0) if op == "min" else rows.amax(0))
    else:
        torch_dist.all_reduce(data, torch_dist.ReduceOp.PRODUCT if op == "product" else torch_dist.ReduceOp.SUM)
    if op == "mean":  # gloo of torch 2.4 has no AVG
        data /= get_world_size()
    if data is not target:
        target.copy_(data)
    return tensor


class _Sampler(DistributedSampler):
    """torch's sampler, without its padding where `pad` is false, and with a warning for a forgotten set_epoch."""

    def __init__(self, dataset: Dataset, distributed: bool, shuffle: bool, pad: bool, seed: int) -> None:
        replicas, rank = (get_world_size(), get_rank()) if distributed else (1, 0)
        super().__init__(dataset, replicas, rank, shuffle=shuffle, seed=seed)
        self.passes = self.skip = 0
        if not pad:  # len(self), and what is left of total_size: torch pads the indices up to it
            self.total_size = len(dataset)
            self.num_samples = len(range(rank, len(dataset), replicas))
        if not pad and len(dataset) < replicas:
            raise ValueError(f"pad=False: {len(dataset)} examples for {replicas} processes: each needs at least one")

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        super().set_epoch(epoch)
        self.passes, self.skip = 0, skip

    def __len__(self) -> int:
        return max(0, self.num_samples - self.skip)

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        if self.shuffle and self.passes == 2:
            text = (
                "call sampler.set_epoch(epoch) before each epoch: this one repeats the last one's order "
                "(to evaluate, make it with shuffle=False)"
            )
            warnings.warn(text, stacklevel=2)
        return iter(list(super().__iter__())[self.skip :])


def data_sampler(
    dataset: Dataset, distributed: bool = True, shuffle: bool = True, pad: bool = True, seed: int = 0
) -> DistributedSampler:
    """This rank's share of the data set, as a sampler for DataLoader; with one process the whole data set.

    distributed: False gives every rank the whole data set.
    shuffle: a new order each epoch, a function of (seed, epoch), if `sampler.set_epoch(epoch)` is called before each.
        `set_epoch(epoch, skip=n)` leaves out this rank's first n examples: to go on in the middle of an epoch.
    pad: for training.  All ranks get equally many examples, a few of them twice where the number doesn't divide: a rank
        with one batch less would leave the others waiting.  False is for evaluation: every example exactly once.
        ValueError if there are fewer examples than processes, as DDP needs at least one batch on each.
    """
    return _Sampler(dataset, distributed, shuffle, pad, seed)


def prepare_ddp_model(model: nn.Module, device_ids: Any = None, sync_bn: bool = False, **kwargs: Any) -> nn.Module:
    """The model as torch's DistributedDataParallel, on GPUs and on the CPU; the model itself with one process.

    Every rank must call it, with the model on `get_device()`; all start from rank 0's weights.  In evaluation, under
    torch.no_grad, DDP takes rank 0's buffers (BatchNorm's averages) once, in its first forward pass after training:
    ranks may then have different numbers of batches, at least one each.
    sync_bn: BatchNorm over the global batch, on CUDA only.  Without it each process normalises by its own share.
    kwargs go to DistributedDataParallel (find_unused_parameters=True, ...); device_ids need not be given.
    """
    if _comm_device() is None:
        return model
    if sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    device = next(model.parameters()).device
    level = torch_dist.get_debug_level()
    torch_dist.set_debug_level(torch_dist.DebugLevel.INFO)  # errors then name the parameters without a gradient
    try:
        if level == torch_dist.DebugLevel.DETAIL:  # DDP on a checked group crashes torch 2.15: a plain one
            limit = timedelta(seconds=rendezvous.seconds("DIST_TIMEOUT"))
            kwargs.setdefault("process_group", torch_dist.new_group(timeout=limit))
        return nn.parallel.DistributedDataParallel(model, [device] if device.type != "cpu" else None, **kwargs)
    finally:
        torch_dist.set_debug_level(level)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile: its state dict's names have no "module." in front."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def launch(worker_fn: Callable, *args: Any, nproc: int | None = None) -> Any:
    """Run `worker_fn(local_rank, world_size, *args)` once per device; returns what it returned on rank 0.

    Starts nproc (or NPROC) processes on this machine, by default one per visible GPU, and one without a GPU.  Under a
    launcher, or with one, worker_fn is called here.  The first to fail ends all: SystemExit with its error, in a
    notebook RuntimeError.  The processes are forked where that is safe, else spawned: then each imports the program
    anew.  So what worker_fn needs (a seed, a default dtype, globals) is set in it or passed to it.
    """
    return launcher.run(worker_fn, args, nproc, finish=_leave_group)


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """`parser.parse_args()` with --nproc (without a GPU: 2) and --backend; what can't run is a `parser.error`.

    Pass args.nproc on: `launch(worker_fn, args, nproc=args.nproc)`.
    """
    parser.add_argument("--nproc", type=int, help="processes on this machine (default: one per GPU; without a GPU, 2)")
    parser.add_argument(
        "--backend", choices=[*launcher.BACKENDS.values(), "gloo"], help="(default: nccl or xccl for GPUs, or gloo)"
    )
    args = parser.parse_args()
    try:
        rendezvous.check_limits()
        world = rendezvous.get_world()
        processes = world.world_size
        if world.launcher and args.nproc is not None:
            raise ValueError(f"{world.launcher} has started {processes} process(es): leave out --nproc")
        if world.launcher:
            launcher.check_backend(args.backend)
            args.nproc = world.local_world_size
        else:
            args.nproc = processes = launcher.plan(args.nproc, args.backend, on_cpu=2)
        batch_size = getattr(args, "batch_size", None)
        if isinstance(batch_size, int) and batch_size < processes:
            raise ValueError(f"--batch-size {batch_size} is too small for {processes} processes: one example each")
    except ValueError as problem:
        parser.error(str(problem))
    return args
