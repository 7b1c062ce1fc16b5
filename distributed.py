"""What a training script calls: rank, device, process group, collectives, sampler, DDP model, launch.

    from torch.utils.data import DataLoader

    import distributed as dist                        # distributed.py, not torch.distributed

    def main_worker(local_rank, world_size, epochs):  # runs once per process; launch passes the first two
        dist.init_process_group()
        model = dist.prepare_ddp_model(Net().to(dist.get_device()))  # averages the gradients over all processes
        sampler = dist.data_sampler(dataset)          # this process's share of the data
        loader = DataLoader(dataset, batch_size=64 // world_size, sampler=sampler)  # 64 of all processes together
        for epoch in range(epochs):
            sampler.set_epoch(epoch)                  # a different order in each epoch
            loss = train(model, loader)               # yours, as Net and dataset; returns a tensor
            loss = dist.reduce(loss)                  # the mean over all processes
            dist.print_primary(f"epoch {epoch}  loss {loss:.4f}")
        dist.cleanup()

    if __name__ == "__main__":
        dist.launch(main_worker, 10)

    python train.py                                   # one process per visible GPU; two without a GPU
    NPROC=3 python train.py                           # three processes
    CUDA_VISIBLE_DEVICES=0,1 python train.py          # these GPUs
    torchrun --nproc_per_node=2 train.py              # torchrun starts the processes; launch calls main_worker in each
    srun -n 2 python train.py                         # and so do srun, and mpirun -n 2

`python train.py` needs launcher.py beside this file; torchrun, srun and mpirun don't.  Both files need Python 3.10,
torch 2.4 and numpy, which torch's all_gather_object uses.

A collective is a call in which all ranks exchange data: all_reduce, reduce, gather, sync_params, barrier, and also the
backward pass of a DDP model.  A rank waits in it until all others have called it.  So every rank must make the same
calls in the same order: none inside `if dist.is_primary():`.
These five first compare the calls of all ranks; if they differ, every rank gets a RuntimeError that lists them.  The
check is one small message for each call.  In an inner loop torch.distributed.all_reduce, which checks nothing, is
cheaper.  With one process they need no process group.  No gradient flows through them.
A name that this file does not define is torch.distributed's: dist.broadcast, dist.new_group, dist.ReduceOp.
"""

import argparse
import hashlib
import importlib
import inspect
import os
import re
import signal
import socket
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as torch_dist
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

# ---------------------------------------------------------------------------------------------- rank, device, print
# Two machines with four GPUs each, one process per GPU: the world size is 8; the ranks are 0 to 3 on the first machine,
# 4 to 7 on the second; the local ranks are 0 to 3 on both.


def get_rank() -> int:
    """This process's number among all: 0 to world size - 1."""
    return torch_dist.get_rank() if torch_dist.is_initialized() else _read_place()[0]


def get_local_rank() -> int:
    """This process's number among those on this machine."""
    return _read_place()[2]


def get_world_size() -> int:
    """The number of processes on all machines together."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else _read_place()[1]


def get_device() -> torch.device:
    """This process's device: the GPU with its local rank's number, modulo the number of visible GPUs, or the CPU.

    On a machine with GPUs, CUDA_VISIBLE_DEVICES= (nothing) chooses the CPU.
    """
    count = torch.cuda.device_count()  # torch.cuda.is_available may start CUDA; after that no process can be forked
    return torch.device("cuda", get_local_rank() % count) if count else torch.device("cpu")


def is_primary() -> bool:
    """True on rank 0, which prints and saves."""
    return get_rank() == 0


def print_primary(*args: Any, **kwargs: Any) -> None:
    """`print` on rank 0, at once (flushed); nothing on the others.  Not a collective."""
    if is_primary():
        print(*args, **{"flush": True, **kwargs})


# ------------------------------------------------------------------------------------------------- init and cleanup


def init_process_group(
    backend: str | int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Join the process group.  Every rank must call it; it returns when all have joined.

    With a GPU it also calls torch.cuda.set_device(get_device()).
    backend: the library that moves the data: "nccl" between GPUs, or "gloo".  None takes nccl with GPUs, else gloo.
    rank, world_size: leave them out if `launch`, torchrun, srun or mpirun starts your processes.  If you start them
        yourself, give them, and set MASTER_ADDR and MASTER_PORT.  init_process_group(rank, world_size) works, too.
    timeout: seconds, or a timedelta (None: DIST_TIMEOUT, or 600 s).  It limits two waits.  At the start: after 10 s a
        line on stderr names the ranks that are missing; when the time is up, TimeoutError names them.  In each
        collective: when the time is up, gloo raises an error, and NCCL ends the process; neither names a rank.
    """
    if isinstance(backend, int):
        backend, rank = None, backend
    limit = get_timeout(timeout)
    if (rank or world_size) and not _has_launcher():
        rank, world_size = rank or 0, world_size or 1
        if not 0 <= rank < world_size:
            raise ValueError(f"init_process_group: rank {rank} of {world_size}: ranks go from 0 to {world_size - 1}")
        if world_size > 1:
            _write_place(rank, world_size, rank, world_size)  # on one machine, as far as is known
    rank, world_size, _ = _read_place()
    backend = choose_backend(backend)
    options: dict = {"rank": rank, "world_size": world_size, "timeout": limit}
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl" and torch.__version__ >= (2, 7, 1):  # 2.6 and 2.7.0 hang with it (pytorch#153960)
        options["device_id"] = device  # connect at once, and to the right GPU
    store = _wait_for_all_ranks(rank, world_size, limit)
    torch_dist.init_process_group(backend, store=store, **options)
    barrier()  # or a rank that ends early would break the connections that others are still making
    processes = "process" if world_size == 1 else "processes"
    print_primary(f"distributed: {world_size} {processes}, {backend}, {device.type}")


def cleanup() -> None:
    """Leave the process group, if there is one.  `launch` does this when worker_fn has returned.

    While an exception is being handled it does nothing, if there are several processes: the other ranks may be inside
    a collective, and leaving would wait for them for ever (pytorch/torchtitan#1342).
    """
    _leave_group(has_failed=sys.exc_info()[1] is not None)


def _leave_group(has_failed: bool) -> None:
    if not torch_dist.is_initialized() or (has_failed and get_world_size() > 1):
        return
    destroy_process_group()


def destroy_process_group(group: Any = None) -> None:
    """torch's own, for programs that call it."""
    # Gloo's threads need Python's lock to free their last tensors: let them have it, or leaving may hang
    # (pytorch#179291; seen with torch 2.4.1).
    for _ in range(20):
        time.sleep(0.001)
    torch_dist.destroy_process_group(group)


# ------------------------------------------------------------------------------------------------------ collectives


def all_reduce(tensor: torch.Tensor, op: str | torch_dist.ReduceOp = "sum") -> torch.Tensor:
    """Overwrite the tensor with the sum (or another op) over all ranks, on every rank; returns it.  As torch's.

    Every rank must call it, with the same op, shape and dtype; otherwise RuntimeError on all, with what each called.
    op: "sum", "mean" (or "avg"), "min", "max", "product", or torch's ReduceOp.  A NaN on any rank is in the result.
    Any device works: with nccl a tensor of the CPU is moved to the GPU and back.  The dtype stays, so small dtypes may
    overflow.  TypeError for bool, int16 and the mean of integers: use `reduce`.
    """
    op = _op_name(op)
    _check_tensors("all_reduce", [tensor], _DTYPES)
    _check_same_call(f"all_reduce {op} of {tensor.dtype} {list(tensor.shape)}")
    if tensor.dtype not in _FLOATS and (op == "mean" or tensor.dtype not in _INTEGERS):
        raise TypeError(f"all_reduce can't put the {op} into {tensor.dtype}: use dist.reduce(tensor, {op!r})")
    return _reduce_in_place(tensor, op)


def reduce(tensor: torch.Tensor, op: str | torch_dist.ReduceOp = "mean") -> torch.Tensor:
    """A new tensor with the mean over all ranks, the same on every rank: the number to print as "the loss".

    Not torch's reduce, which returns nothing and leaves the result on one rank.  Every rank must call it, with the
    same op, shape and dtype; otherwise RuntimeError on all, with what each called.
    The mean of the ranks' means is right if their shares are equal.  In an evaluation they may not be: there reduce
    the sum and the count with op="sum", and divide then.
    op: as for `all_reduce`.  Computed in float64 or int64.  The result has the input's shape and device, and the dtype
    of a floating-point input (so a float16 sum above 65504 is inf).  Of integers and bools means are float64, the
    others int64.
    """
    op = _op_name(op)
    _check_tensors("reduce", [tensor], _DTYPES)
    _check_same_call(f"reduce {op} of {tensor.dtype} {list(tensor.shape)}")
    is_float = tensor.is_floating_point()
    result = tensor.detach().to(torch.float64 if is_float or op == "mean" else torch.int64, copy=True)
    result = _reduce_in_place(result, op)
    return result.to(tensor.dtype) if is_float else result


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order, on every rank: for torch.cat, or torch.stack if they are scalars.

    Not torch's gather, which returns nothing.  Every rank must call it.  Shapes may differ, even to zero rows; if
    dtypes or numbers of dimensions do, RuntimeError on all ranks.  The results are new, on the input's device.
    """
    _check_tensors("gather", [tensor], _DTYPES)
    _check_same_call(f"gather of {tensor.dtype} with {tensor.dim()} dimension(s)")
    mine = tensor.detach().cpu().clone()  # pickle would send the whole storage of a view
    return [part.to(tensor.device) for part in _all_gather_object(mine)]


def sync_params(params: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Copy rank 0's values into the tensors, in place: sync_params(model.parameters()).

    Every rank must pass the same number of tensors, of the same shapes and dtypes; otherwise RuntimeError on all.
    """
    params = [params] if isinstance(params, torch.Tensor) or not isinstance(params, Iterable) else list(params)
    _check_tensors("sync_params", params)
    _check_same_call(f"sync_params of {[(param.dtype, *param.shape) for param in params]}")
    device = _comm_device()
    if device is None:
        return
    for param in params:
        values = param.detach().to(device).contiguous()
        torch_dist.broadcast(values.flatten().view(torch.uint8), 0)  # as bytes, so that every dtype works
        param.detach().copy_(values)


def barrier() -> None:
    """Wait until every rank has called it."""
    _check_same_call("barrier")


wait_for_everyone = barrier

# ---------------------------------------------------------------------------------------------- sampler, DDP model


def data_sampler(
    dataset: Dataset,
    distributed: bool = True,
    shuffle: bool = True,
    pad: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> DistributedSampler:
    """This rank's share of the data set, as a sampler for DataLoader; with one process the whole data set.

    distributed: False gives every rank the whole data set, as tensor parallelism needs it.
    shuffle: a new order each epoch, a function of (seed, epoch), if `sampler.set_epoch(epoch)` is called before each.
        `set_epoch(epoch, skip=n)` leaves out this rank's first n examples: to go on in the middle of an epoch.
    pad: of 10 examples on 4 ranks each rank gets 3; two come twice.  That is for training: a rank with fewer steps
        would leave the others waiting in backward().  With False the ranks get 3, 3, 2, 2, and every example comes
        exactly once: for evaluation.  Then ValueError if there are fewer examples than ranks.
    drop_last: instead of giving two examples twice, leave two out.  (DataLoader's drop_last leaves out a batch.)
    """
    replicas, rank = (get_world_size(), get_rank()) if distributed else (1, 0)
    sampler = _Sampler(dataset, replicas, rank, shuffle, seed, drop_last)
    if pad:
        return sampler
    if drop_last:
        raise ValueError("pad=False keeps every example, drop_last=True leaves some out: choose one")
    if len(dataset) < replicas:
        raise ValueError(f"pad=False: {len(dataset)} examples for {replicas} processes: each needs at least one")
    sampler.total_size = len(dataset)  # torch pads the indices up to it
    sampler.num_samples = len(range(rank, len(dataset), replicas))  # what len(sampler) says
    return sampler


def prepare_ddp_model(
    model: nn.Module, device_ids: Any = None, sync_bn: bool = False, sync_buffers: bool = True, **kwargs: Any
) -> nn.Module:
    """The model as torch's DistributedDataParallel, on GPUs and on the CPU; the model itself with one process.

    Each rank has a copy.  All start from rank 0's weights, and backward() averages the gradients, so they stay equal.
    Every rank must call it, with the model on `get_device()`.  The optimizer may be made before or after it.
    sync_bn: BatchNorm over the global batch, on CUDA only.  Without it each process normalises by its own share.
    sync_buffers: buffers are tensors that are not trained, such as BatchNorm's averages.  Each rank computes its own.
        With True DDP copies rank 0's to all, in each forward pass of the training, and in the first one of an
        evaluation under torch.no_grad().  (So each rank needs a batch there; after it their numbers may differ.)
        False saves these messages.  Then call `sync_params(model.buffers())` before each evaluation.
    kwargs go to DistributedDataParallel (find_unused_parameters=True, ...).  device_ids is accepted, and not needed.
    """
    if _comm_device() is None:
        return model
    if sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if not sync_buffers:
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # since torch 2.13
        kwargs[name] = False
        sync_params(model.buffers())  # at least once: broadcast_buffers=False would leave that out, too
    is_on_gpu = any(param.is_cuda for param in model.parameters())
    return nn.parallel.DistributedDataParallel(model, [get_device()] if is_on_gpu else None, **kwargs)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile; the names in its state dict don't begin with "module."."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


# ======================================================================================================================
# If you are here to learn, you may stop reading now.  What follows starts the processes, checks the calls, names the
# ranks that are missing, and reads the launchers' variables.
# ======================================================================================================================


def launch(worker_fn: Callable, *args: Any, nproc: int | None = None) -> Any:
    """Run `worker_fn(local_rank, world_size, *args)` once per process; returns what it returned on rank 0.

    Starts nproc (or NPROC) processes on this machine, by default one per visible GPU, or two without a GPU.  Under
    torchrun, srun or mpirun, or with one process, worker_fn is called here.
    The first started process that fails ends the run: SystemExit with its error, in a notebook RuntimeError.
    The processes are forked where that is safe, else spawned: then each imports the program anew.  So what worker_fn
    needs (a default dtype, globals) is set in it or passed to it.
    Each process that it starts has random numbers of its own (torch, Python, numpy): its seed is a number drawn from
    this process's torch generator, plus the rank.  Call torch.manual_seed before `launch`, and every run draws the
    same.  (Under a launcher nothing is seeded: there torch.manual_seed(0) gives all ranks the same numbers.)
    """
    get_timeout()
    if _has_launcher():
        if any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", _OPEN_MPI[0], _MPICH[2])):  # torchrun, mpirun
            torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # if it is killed, Linux kills this process
        return _call(worker_fn, args)
    nproc = count_processes(nproc, "gloo" if nproc else None)  # a number that was asked for may share GPUs
    if nproc == 1:
        return _call(worker_fn, args)
    try:
        launcher = importlib.import_module(f"{__package__}.launcher" if __package__ else "launcher")
    except ModuleNotFoundError:
        raise SystemExit(
            f"launch: to start {nproc} processes, copy launcher.py beside distributed.py; "
            f"or type torchrun --nproc_per_node={nproc} {sys.argv[0]}"
        ) from None
    return launcher.run(_call, (worker_fn, args), nproc, grace=_read_seconds("DIST_GRACE", None))


def _call(worker_fn: Callable, args: tuple) -> Any:
    """Call worker_fn; leave the process group if it succeeded."""
    has_failed = True  # sys.exc_info doesn't tell: `launch` may have been called inside `except`
    try:
        result = worker_fn(get_local_rank(), get_world_size(), *args)
        has_failed = False
    finally:
        _leave_group(has_failed)
    return result if is_primary() else None


def parse_args(parser: argparse.ArgumentParser, nproc: int = 2) -> argparse.Namespace:
    """`parser.parse_args()` with --nproc and --backend; what can't run is a `parser.error`: one line, exit code 2.

    If the script has a flag --batch-size, it must be at least the number of processes.  Pass args.nproc on:
    `launch(worker_fn, args, nproc=args.nproc)`.
    nproc: how many processes to start without a GPU, if neither --nproc nor NPROC is given.
    """
    default = f"(default: one per GPU; without a GPU, {nproc})"
    parser.add_argument("--nproc", type=int, help=f"processes on this machine {default}")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="(default: nccl for GPUs, else gloo)")
    args = parser.parse_args()
    try:
        get_timeout()
        _read_seconds("DIST_GRACE", None)
        choose_backend(args.backend)
        has_launcher = _has_launcher()
        processes = get_world_size() if has_launcher else count_processes(args.nproc, args.backend, nproc)
        if has_launcher and args.nproc is not None:
            raise ValueError(f"{processes} process(es) were started by a launcher: leave out --nproc")
        args.nproc = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if has_launcher else processes
        batch_size = getattr(args, "batch_size", None)
        if isinstance(batch_size, int) and batch_size < processes:
            raise ValueError(f"--batch-size {batch_size} is too small for {processes} processes: one example each")
        if has_launcher and processes > 1:
            _meeting_point()
    except ValueError as problem:
        parser.error(str(problem))
    return args


def get_timeout(timeout: float | timedelta | None = None) -> timedelta:
    """The limit of a collective, from seconds or a timedelta; None: DIST_TIMEOUT, or 10 minutes."""
    if timeout is None:
        timeout = _read_seconds("DIST_TIMEOUT", 600)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not 0 < seconds <= 1e9:
        raise ValueError(f"the timeout is {timeout}: give seconds (timeout=600, DIST_TIMEOUT=600) greater than 0")
    return timedelta(seconds=seconds)


def _read_seconds(name: str, default: float | None) -> float | None:
    """An environment variable; ValueError, in one line, if it is set to something else than a number of seconds."""
    text = os.environ.get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= 1e9:  # nan is refused, too
        raise ValueError(f"{name} is {text}: give a number of seconds ({name}=30), or unset it")
    return seconds


def count_processes(nproc: int | None = None, backend: str | None = None, without_gpu: int = 2) -> int:
    """How many processes `launch` starts here.  ValueError, in one line, if they couldn't run."""
    gpus = torch.cuda.device_count()
    if nproc is None:
        nproc = os.environ.get("NPROC") or gpus or without_gpu
    if not str(nproc).isdecimal() or int(nproc) < 1:
        raise ValueError(f"nproc (or NPROC) is {nproc}: start at least 1 process")
    if gpus and int(nproc) > gpus and choose_backend(backend) == "nccl":
        raise ValueError(f"{nproc} processes, but {gpus} visible GPU(s): start {gpus}, or share them with backend gloo")
    return int(nproc)


def choose_backend(backend: str | None = None) -> str:
    """nccl if it can be used here, else gloo; ValueError, in one line, if nccl was asked for and can't be used."""
    has_nccl = torch.cuda.device_count() > 0 and torch_dist.is_nccl_available()
    if backend == "nccl" and not has_nccl:
        raise ValueError("backend nccl needs a visible CUDA GPU and a torch that was built with it: use gloo")
    return backend or ("nccl" if has_nccl else "gloo")


def __getattr__(name: str) -> Any:
    """torch.distributed's, for a name that this file does not define: `import distributed as dist` takes the name that
    every tutorial gives to torch.distributed."""
    if name.startswith("_") or not hasattr(torch_dist, name):  # Python itself asks for names such as __path__
        raise AttributeError(f"neither {__file__} nor torch.distributed defines {name!r}")
    return getattr(torch_dist, name)


# ------------------------------------------------------------------------------------- sampler: skip, set_epoch


class _Sampler(DistributedSampler):
    """torch's sampler; it can start in the middle of an epoch, and warns of a forgotten set_epoch."""

    passes = skip = 0

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        if skip < 0:
            raise ValueError(f"set_epoch: skip is {skip}: it must be 0 or more examples")
        super().set_epoch(epoch)
        self.passes, self.skip = 0, skip

    def __len__(self) -> int:
        return max(0, self.num_samples - self.skip)

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        if self.shuffle and self.passes == 2 and is_primary():
            text = (
                "call sampler.set_epoch(epoch) before each epoch: this one repeats the last one's order "
                "(to evaluate, make it with shuffle=False)"
            )
            level, frame = 2, sys._getframe(1)  # the caller's line, not that of torch's DataLoader
            while frame.f_back and str(frame.f_globals.get("__name__")).startswith("torch."):
                level, frame = level + 1, frame.f_back
            warnings.warn(text, stacklevel=level)
        return iter(list(super().__iter__())[self.skip :])


# ------------------------------------------------------------------------------------------ collectives: their checks

_OPS = ("sum", "mean", "min", "max", "product")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # nccl and gloo reduce these, and the next
_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
_DTYPES = (*_FLOATS, *_INTEGERS, torch.int16, torch.bool)


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
    return get_device() if torch_dist.get_backend() == "nccl" else torch.device("cpu")


def _check_tensors(function: str, values: list, dtypes: tuple = ()) -> None:
    """TypeError if one is no tensor (of these dtypes); RuntimeError on all ranks if that is so on some ranks only."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dtype in (dtypes or [value.dtype]):
            continue
        kind = getattr(value, "dtype", type(value).__name__)
        _check_same_call(f"{function} of {kind}")  # or the others would wait for this rank
        hint = ""
        if value is None:
            hint = " (the .grad of a parameter without a gradient? skip it on all ranks)"
        elif isinstance(value, (int, float)):
            hint = f": make it a tensor, torch.tensor({value})"
        raise TypeError(f"{function} takes tensors of floats, integers or bools, not {kind}{hint}")


def _check_same_call(call: str) -> None:
    """RuntimeError on all ranks, with a table of the calls, unless all ranks make the same call.

    The backends don't check: gloo adds 3 elements to 5 and returns garbage.  The check is an all-gather of a hash.  It
    can't see that two equal calls are swapped: the loss before the accuracy on one rank, after it on another.
    """
    device = _comm_device()
    if device is None:
        return
    digest = hashlib.blake2b(call.encode(), digest_size=16).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    if (torch.stack(_all_gather(mine)) == mine).all():
        return
    lines = "".join(f"\n  rank {rank}: {called}" for rank, called in enumerate(_all_gather_object(call)))
    raise RuntimeError(f"the ranks called different things, but all must call the same:{lines}")


def _all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors, in rank order.  Shapes and dtypes must be equal."""
    rows = [torch.empty_like(tensor) for _ in range(get_world_size())]
    torch_dist.all_gather(rows, tensor)
    return rows


def _all_gather_object(value: Any) -> list:
    values = [value] * get_world_size()
    if len(values) > 1:
        torch_dist.all_gather_object(values, value)
    return values


def _reduce_in_place(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """`all_reduce` without its checks."""
    device = _comm_device()
    if device is None:
        return tensor
    data = tensor.detach().to(device).contiguous()  # the tensor itself, if it is as the backend needs it
    if op in ("min", "max"):  # the backends' own may drop a NaN; torch's don't
        rows = torch.stack(_all_gather(data))
        data.copy_(rows.amin(0) if op == "min" else rows.amax(0))
    else:
        torch_dist.all_reduce(data, torch_dist.ReduceOp.PRODUCT if op == "product" else torch_dist.ReduceOp.SUM)
    if op == "mean":  # gloo of torch 2.4 has no AVG
        data /= get_world_size()
    tensor.detach().copy_(data)
    return tensor


# -------------------------------------------------------------------------------------- roll-call: who is missing?

REPORT_MISSING_AFTER = 10  # seconds; then a line on stderr says which ranks are missing
_store: Any = None  # rank 0 may serve it to the others, so it lives as long as the process


def _wait_for_all_ranks(rank: int, world_size: int, limit: timedelta) -> torch_dist.Store:
    """Returns a store for their new process group.  torch's own start doesn't name the missing ranks."""
    global _store
    if world_size == 1:
        return torch_dist.HashStore()
    if _store is None:  # a second group finds the first one's
        _store = _open_store(rank, world_size, limit)
    group = _store.add(f"groups of rank {rank}", 1)
    store = torch_dist.PrefixStore(f"group {group}", _store)
    keys = [f"rank {number}" for number in range(world_size)]
    store.set(keys[rank], "here")

    def missing() -> str:
        if store.check(keys):
            return ""
        return f"{', '.join(key for key in keys if not store.check([key]))} of {world_size}"

    _wait_for(missing, rank, limit)
    return store


def _open_store(rank: int, world_size: int, limit: timedelta) -> torch_dist.Store:
    """Connect to the store of this run.  RuntimeError, in one line, if another process has this rank already."""
    address, port = _meeting_point()
    if address == "127.0.0.1":
        # On one machine Gloo and NCCL need no other interface; the host's name may lead elsewhere, or nowhere.
        interface = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" also what begins with this name
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def missing() -> str:
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError:
            return f"rank 0 at {address}:{port}"
        return ""

    if not is_server:
        _wait_for(missing, rank, limit)  # a TCPStore that connects too early prints torch's warnings
    advice = f"set MASTER_PORT to a free port, the same on all ranks of a run, and not {port}"
    try:
        store = torch_dist.TCPStore(
            address, port, world_size, is_server, limit, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RuntimeError(f"rank 0: port {port} is in use, perhaps by another run: {advice}") from None
    # Two runs that meet on one port have different names; torch 2.4's torchrun has one store for all attempts.
    names = [os.environ.get(name, "") for name in ("DIST_RUN", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    store = torch_dist.PrefixStore(f"run {' '.join(names)} of {world_size}", store)
    if store.add(f"processes with rank {rank}", 1) > 1:
        raise RuntimeError(f"rank {rank} of {world_size} is here already, perhaps of another run: {advice}")
    return store


def _wait_for(missing: Callable[[], str], rank: int, limit: timedelta) -> None:
    """Wait until `missing` returns "".  After 10 s a line on stderr names the ranks; at the limit TimeoutError does.

    Not by store.wait, which prints torch's warnings when it times out.
    """
    started = time.monotonic()
    pause = 0.001
    is_reported = False
    while ranks := missing():
        waited = time.monotonic() - started
        if waited > limit.total_seconds():
            raise TimeoutError(f"init_process_group: {ranks} did not come within {limit.total_seconds():.0f} s")
        if waited > REPORT_MISSING_AFTER and not is_reported:
            is_reported = True
            if rank == 0 or ranks.startswith("rank 0"):  # rank 0 speaks; if it is missing, all do
                print(f"distributed: waiting for {ranks}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _meeting_point() -> tuple[str, int]:
    """Rank 0's address and port."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"MASTER_ADDR={address or ''} and MASTER_PORT={port} must say where rank 0 is: set them "
            "(mpirun over several machines: -x MASTER_ADDR=HOST -x MASTER_PORT=29500), or start with launch or torchrun"
        )
    return address, int(port)


# ------------------------------------------------------------------------------------------ the launchers' variables

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
LAUNCHER_VARIABLES = (*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT", *_OPEN_MPI, *_MPICH, *_SRUN)


def _has_launcher() -> bool:
    """Whether `launch` or a launcher has started this process; then torchrun's variables are set."""
    _translate_variables()
    return any(name in os.environ for name in _TORCHRUN)


def _read_place() -> tuple[int, int, int]:
    """Rank, world size and local rank, as torchrun's variables say; without them this is the only process.

    RANK and WORLD_SIZE are enough.  ValueError, in one line, if they are incomplete or contradictory.
    """
    if not _has_launcher():
        if torch_dist.is_initialized():  # by torch's own function
            return torch_dist.get_rank(), torch_dist.get_world_size(), torch_dist.get_rank()
        return 0, 1, 0
    given = {name: os.environ[name] for name in _TORCHRUN if name in os.environ}
    if {"RANK", "WORLD_SIZE"} <= given.keys() and all(text.isdecimal() for text in given.values()):
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_world_size = int(given.get("LOCAL_WORLD_SIZE", world_size))
        local_rank = int(given.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count())))
        if rank < world_size and local_rank < local_world_size <= world_size:
            return rank, world_size, local_rank
    said = " ".join(f"{name}={text}" for name, text in given.items())
    raise ValueError(f"{said}: set RANK and WORLD_SIZE to this process's place, or unset {' '.join(given)}")


def _write_place(*place: int) -> None:
    for name, number in zip(_TORCHRUN, place, strict=True):
        os.environ[name] = str(number)


def _translate_variables() -> None:
    """If mpirun or srun has started this process, write its place into torchrun's variables, for all who read them.

    Precedence: torchrun's own, Open MPI, MPICH, srun, because mpirun runs inside SLURM jobs.  A given MASTER_ADDR or
    MASTER_PORT stays.  ValueError, in one line, if variables are missing.
    """
    env = os.environ
    if any(name in env for name in _TORCHRUN):
        return
    if any(name in env for name in _OPEN_MPI):
        names = _OPEN_MPI
    elif "MPI_LOCALRANKID" in env:  # srun --mpi=pmi2 sets PMI_RANK, but not this
        names = _MPICH
    elif env.get("SLURM_STEP_NUM_TASKS", "1") != "1":  # 1: a batch script, or an interactive shell
        names = _SRUN
    else:
        return
    host, run = "", env.get("PMIX_NAMESPACE", "")  # mpirun doesn't tell rank 0's host, MPICH names no run
    try:
        place = [int(env[name]) for name in names]
        if names is _SRUN:
            place.append(_count_srun_tasks_here())
            host = re.sub(r"\[(\w+)[^]]*]", r"\1", env["SLURM_STEP_NODELIST"]).split(",")[0]  # of node[08-09],other
            run = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"the launcher's variables are incomplete ({error}): start with it, or unset them") from None
    if place[1] == place[3]:  # all processes are on this machine
        host = "127.0.0.1"
        if names is not _SRUN and "MASTER_PORT" not in env:
            # A process's number, of which PMIX_NAMESPACE is made, too, is unique in its namespace: a container's.
            link = "/proc/self/ns/pid"
            run = f"{run or os.getppid()} {os.readlink(link) if os.path.lexists(link) else ''}"
    _write_place(*place)
    env["DIST_RUN"] = run  # the same for all ranks, different for other runs; "" if there is no such name
    if host:
        env.setdefault("MASTER_ADDR", host)
        env.setdefault("MASTER_PORT", str(20000 + zlib.crc32(run.encode()) % 10000))  # below the ephemeral ports


def _count_srun_tasks_here() -> int:
    """From a list with the tasks of each node, such as 2(x3),1."""
    counts = []
    for part in os.environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.removesuffix(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts[int(os.environ["SLURM_NODEID"])]
