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

This file is complete for one process, under torchrun, and under every launcher that sets torch's variables.  With
launcher.py beside it, `python train.py`, srun and mpirun start several processes, too, and missing ranks are named.
Both files need Python 3.10, torch 2.4 and numpy, which torch's all_gather_object uses.

A collective is a call in which all ranks exchange data: all_reduce, reduce, gather, sync_params, barrier, and also the
backward pass of a DDP model.  A rank waits in it until all others have called it.  So every rank must make the same
calls in the same order: none inside `if dist.is_primary():`.
These five first compare the calls of all ranks; if they differ, every rank gets a RuntimeError that lists them.  The
check is one small message for each call.  In an inner loop torch.distributed.all_reduce, which checks nothing, is
cheaper.  A rank that waits for 30 s warns.  With one process they need no process group.  No gradient flows through
them.
A name that this file does not define is torch.distributed's: dist.broadcast, dist.new_group, dist.ReduceOp.
"""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import distributed as torch_dist
from torch import nn
from torch.utils.data import Dataset, DistributedSampler, Sampler

# ---------------------------------------------------------------------------------------------- rank, device, print
# Two machines with four GPUs each, one process per GPU: the world size is 8; the ranks are 0 to 3 on the first machine,
# 4 to 7 on the second; the local ranks are 0 to 3 on both.


def get_rank() -> int:
    """This process's number among all: 0 to world size - 1."""
    return torch_dist.get_rank() if torch_dist.is_initialized() else _find_place().rank


def get_world_size() -> int:
    """The number of processes on all machines together."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else _find_place().world_size


def get_local_rank() -> int:
    """This process's number among those on this machine."""
    return _find_place().local_rank


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


# A launcher tells each process its place by environment variables.  These are torchrun's; RANK and WORLD_SIZE are
# enough.  launcher.py translates those of srun and mpirun into them.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Other launchers' variables: one that each process has, and the one with the number of processes.
_UNKNOWN_LAUNCHERS = {
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "PALS_RANKID": "PMI_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
    "FLUX_TASK_RANK": "FLUX_JOB_SIZE",
    "JSM_NAMESPACE_RANK": "JSM_NAMESPACE_SIZE",
    "SLURM_STEP_NUM_TASKS": "SLURM_STEP_NUM_TASKS",  # srun's; a batch script is one process
}


class _Place(NamedTuple):
    rank: int
    world_size: int
    local_rank: int


_place: _Place | None = None  # noted when it is first asked for: a program may change the variables later


def _find_place() -> _Place:
    """This process's place, as its launcher says.  Without a launcher it is the only process."""
    global _place
    if _place is None and _has_launcher():
        _place = _read_variables()
    if _place is not None:
        return _place
    if torch_dist.is_initialized():  # by torch's own function
        rank = torch_dist.get_rank()
        return _Place(rank, torch_dist.get_world_size(), rank)
    for name, size in _UNKNOWN_LAUNCHERS.items():
        if name in os.environ and os.environ.get(size) != "1":  # each process would train alone
            hint = "" if _launcher() else "; for srun and mpirun copy launcher.py beside distributed.py"
            _refuse(
                f"{name} is set, but its launcher is not known: set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, "
                f"or start with torchrun{hint}"
            )
    return _Place(0, 1, 0)


def _has_launcher() -> bool:
    """Whether `launch` or a launcher has started this process.  srun's and mpirun's variables become torchrun's."""
    if any(name in os.environ for name in VARIABLES):
        return True
    return _launcher() is not None and _launcher().translate_variables()


def _read_variables() -> _Place:
    """What torchrun's variables say.  ValueError, in one line, if they are incomplete or contradictory."""
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if {"RANK", "WORLD_SIZE"} <= given.keys() and all(text.isdecimal() for text in given.values()):
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_world_size = int(given.get("LOCAL_WORLD_SIZE", world_size))
        local_rank = int(given.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count())))
        if rank < world_size and local_rank < local_world_size <= world_size:
            return _Place(rank, world_size, local_rank)
    said = " ".join(f"{name}={text}" for name, text in given.items())
    raise ValueError(f"{said}: set RANK and WORLD_SIZE to this process's place, or unset {' '.join(given)}")


def _refuse(problem: str) -> NoReturn:
    """End the program with one line on stderr and exit code 2; in a notebook or an interactive shell RuntimeError."""
    if hasattr(sys, "ps1"):
        raise RuntimeError(problem)
    print(f"distributed: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)


@functools.cache
def _launcher() -> Any:
    """The module launcher, if it is this project's.  A program may have its own launcher.py, or none."""
    name = f"{__package__}.launcher" if __package__ else "launcher"
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin or "def wait_for_all_ranks(" not in Path(spec.origin).read_text():
        return None
    return importlib.import_module(name)


# ------------------------------------------------------------------------------------------------- init and cleanup

_store: torch_dist.Store | None = None  # all groups of this process use it; rank 0 may serve it to the others
_group_count = 0


def init_process_group(
    backend: str | int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Join the process group.  Every rank must call it; it returns when all have joined.

    With a GPU it also calls torch.cuda.set_device(get_device()).
    backend: the library that moves the data: "nccl" between GPUs, or "gloo".  None takes nccl with GPUs, else gloo.
    rank, world_size: leave them out if `launch` or a launcher starts your processes.  If you start them yourself, give
        them, and set MASTER_ADDR and MASTER_PORT.  init_process_group(rank, world_size) works, too.  ValueError if
        the launcher has started another number of processes.
    timeout: seconds, or a timedelta (None: DIST_TIMEOUT, or 600 s).  It limits two waits.  At the start: launcher.py
        names the missing ranks on stderr after 10 s, and in a TimeoutError when the time is up.  In each collective:
        when the time is up, gloo raises an error, and NCCL ends the process; neither names a rank.
    """
    global _place
    if isinstance(backend, int):
        backend, rank = None, backend
    limit = get_timeout(timeout)
    if (rank or world_size) and not _has_launcher():
        rank, world_size = rank or 0, world_size or 1
        if not 0 <= rank < world_size:
            raise ValueError(f"init_process_group: rank {rank} of {world_size}: ranks go from 0 to {world_size - 1}")
        if world_size > 1:
            _place = _Place(rank, world_size, rank)  # on one machine, as far as is known
    place = _find_place()
    if world_size and world_size != place.world_size:
        raise ValueError(f"init_process_group: world_size is {world_size}, but WORLD_SIZE is {place.world_size}")
    rank, world_size, _ = place
    device = get_device()
    has_nccl = device.type == "cuda" and torch_dist.is_nccl_available()
    if backend == "nccl" and not has_nccl:
        raise ValueError("backend nccl needs a visible CUDA GPU and a torch that was built with it: use gloo")
    backend = backend or ("nccl" if has_nccl else "gloo")
    options: dict = {"rank": rank, "world_size": world_size, "timeout": limit}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl" and torch.__version__ >= (2, 7, 1):  # 2.6 and 2.7.0 hang with it (pytorch#153960)
        options["device_id"] = device  # connect at once, and to the right GPU
    store = _meet(rank, world_size, limit)
    torch_dist.init_process_group(backend, store=store, **options)
    barrier()  # otherwise a rank that ends early would break connections that others are still making
    processes = "process" if world_size == 1 else "processes"
    print_primary(f"distributed: {world_size} {processes}, {backend}, {device.type}")


def _meet(rank: int, world_size: int, limit: timedelta) -> torch_dist.Store:
    """The store of a new process group, through which its ranks find each other."""
    global _store, _group_count
    if world_size == 1:
        return torch_dist.HashStore()
    launcher = _launcher()
    if _store is None and launcher:
        _store = launcher.open_store(rank, world_size, limit)
    elif _store is None:
        _store, *_ = next(torch_dist.rendezvous("env://", rank, world_size, timeout=limit))
    _group_count += 1
    store = torch_dist.PrefixStore(f"group {_group_count}", _store)  # it must not read what an earlier group has left
    if launcher:
        launcher.wait_for_all_ranks(store, rank, world_size, limit)
    return store


def get_timeout(timeout: float | timedelta | None = None) -> timedelta:
    """The limit of a collective, from seconds or a timedelta; None: DIST_TIMEOUT, or 10 minutes."""
    if timeout is None:
        timeout = os.environ.get("DIST_TIMEOUT") or 600
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= 1e9:  # nan is refused, too
        raise ValueError(f"the timeout (or DIST_TIMEOUT) is {timeout}: give seconds greater than 0, such as 600")
    return timedelta(seconds=seconds)


def cleanup() -> None:
    """Leave the process group, if there is one.  `launch` does this when worker_fn has returned.

    While an exception is being handled it does nothing, if there are several processes: the other ranks may be inside
    a collective, and leaving would wait for them for ever (pytorch/torchtitan#1342).
    """
    if sys.exc_info()[1] is None or get_world_size() == 1:
        destroy_process_group()


def destroy_process_group(group: Any = None) -> None:
    """torch's own, for programs that call it; nothing if there is no process group."""
    if not torch_dist.is_initialized():
        return
    # Gloo's threads need Python's lock to free their last tensors: let them have it, or leaving may hang
    # (pytorch#179291; seen with torch 2.4.1).
    time.sleep(0.02)
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
    _check_calls("all_reduce", [tensor], op)
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
    _check_calls("reduce", [tensor], op)
    is_float = tensor.is_floating_point()
    result = tensor.detach().to(torch.float64 if is_float or op == "mean" else torch.int64, copy=True)
    result = _reduce_in_place(result, op)
    return result.to(tensor.dtype) if is_float else result


def _reduce_in_place(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """What `all_reduce` and `reduce` do after their checks."""
    device = _comm_device()
    if device is None:
        return tensor
    data = tensor.detach().to(device).contiguous()  # the tensor itself, if it is as the backend needs it
    if op in ("min", "max"):  # the backends' own may drop a NaN; torch's don't
        rows = torch.stack(_all_gather(data, f"all_reduce {op}"))
        data.copy_(rows.amin(0) if op == "min" else rows.amax(0))
    else:
        torch_dist.all_reduce(data, torch_dist.ReduceOp.PRODUCT if op == "product" else torch_dist.ReduceOp.SUM)
    if op == "mean":  # gloo of torch 2.4 has no AVG
        data /= get_world_size()
    tensor.detach().copy_(data)
    return tensor


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order, on every rank: for torch.cat, or torch.stack if they are scalars.

    Not torch's gather, which returns nothing.  Every rank must call it.  Shapes may differ, even to zero rows; if
    dtypes or numbers of dimensions do, RuntimeError on all ranks.  The results are new, on the input's device.
    """
    _check_calls("gather", [tensor])
    mine = tensor.detach().cpu().clone()  # pickle would send the whole storage of a view
    parts = [mine] * get_world_size()
    if len(parts) > 1:
        torch_dist.all_gather_object(parts, mine)
    return [part.to(tensor.device) for part in parts]


def sync_params(params: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Copy rank 0's values into the tensors, in place: sync_params(model.parameters()).

    Every rank must pass the same number of tensors, of the same shapes and dtypes; otherwise RuntimeError on all.
    """
    params = [params] if isinstance(params, torch.Tensor) or not isinstance(params, Iterable) else list(params)
    _check_calls("sync_params", params)
    device = _comm_device()
    if device is None:
        return
    for param in params:
        values = param.detach().to(device).contiguous()
        torch_dist.broadcast(values.view(-1).view(torch.uint8), 0)  # as bytes, so that every dtype works
        param.detach().copy_(values)


def barrier() -> None:
    """Wait until every rank has called it."""
    _check_calls("barrier", [])  # the check is itself a message between all ranks


wait_for_everyone = barrier

# The checks of these five.

WARN_AFTER = 30  # seconds, if a rank waits so long for the others
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


def _check_calls(function: str, values: list, op: str = "") -> None:
    """RuntimeError on all ranks unless all make the same call; TypeError if a value is no tensor that can be sent."""
    kinds = []
    for value in values:
        if not isinstance(value, torch.Tensor):
            kinds.append(type(value).__name__)
        elif function == "gather":  # shapes may differ
            kinds.append(f"{value.dtype} with {value.dim()} dimension(s)")
        else:
            kinds.append(f"{value.dtype} {list(value.shape)}")
    call = f"{function} {op}".rstrip()
    _compare_calls(f"{call} of {', '.join(kinds)}" if kinds else call)
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise TypeError(f"{function} takes dense tensors: pass .to_dense()")
        if isinstance(value, torch.Tensor) and (value.dtype in _DTYPES or function == "sync_params"):
            continue
        kind, hint = getattr(value, "dtype", ""), ""
        if value is None:
            kind, hint = None, " (the .grad of a parameter without a gradient? skip it on all ranks)"
        elif not isinstance(value, torch.Tensor):
            kind, hint = type(value).__name__, ": make it a tensor, with torch.as_tensor"
        raise TypeError(f"{function} takes tensors of floats, integers or bools, not {kind}{hint}")


def _compare_calls(call: str) -> None:
    """RuntimeError on all ranks, with a table of the calls, unless all ranks make the same call.

    The backends don't check: gloo adds 3 elements to 5 and returns garbage.  The check is an all-gather of a hash.  It
    can't see that two equal calls are swapped: the loss before the accuracy on one rank, after it on another.
    """
    device = _comm_device()
    if device is None:
        return
    digest = hashlib.blake2b(call.encode(), digest_size=16).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    if (torch.stack(_all_gather(mine, call)) == mine).all():
        return
    calls = [call] * get_world_size()
    torch_dist.all_gather_object(calls, call)
    lines = "".join(f"\n  rank {rank}: {called}" for rank, called in enumerate(calls))
    raise RuntimeError(f"the ranks called different things, but all must call the same:{lines}")


def _all_gather(tensor: torch.Tensor, call: str) -> list[torch.Tensor]:
    """All ranks' tensors, in rank order; shapes and dtypes must be equal.  Warns of a long wait, in `call`."""
    rows = [torch.empty_like(tensor) for _ in range(get_world_size())]
    work = torch_dist.all_gather(rows, tensor, async_op=True)
    started = time.monotonic()
    with contextlib.suppress(RuntimeError):  # the time is up; or it has failed: then the second wait raises the error
        work.wait(timedelta(seconds=WARN_AFTER))
    if time.monotonic() - started >= WARN_AFTER:
        _warn(f"rank {get_rank()} has waited for {WARN_AFTER} s in {call}: Ctrl-C shows where each rank stands")
    work.wait()
    return rows


def _warn(text: str) -> None:
    """A warning that names the program's line, not one of this file or of torch."""
    frame = sys._getframe(1)
    while frame.f_back and (
        frame.f_code.co_filename == __file__
        or str(frame.f_globals.get("__name__")).startswith("torch.")
        or "__tracebackhide__" in frame.f_locals  # a tool's, such as timeline/
    ):
        frame = frame.f_back
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


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
    seed: the same on all ranks, or their shares overlap.
    drop_last: instead of giving two examples twice, leave two out.  (DataLoader's drop_last leaves out a batch.)
    TypeError for a Sampler in place of the data set, which would be ignored.
    """
    if isinstance(dataset, Sampler):
        raise TypeError(
            f"data_sampler takes a data set, not a {type(dataset).__name__}: draw the same indices on all ranks (with "
            "a generator of the same seed), and give the DataLoader sampler=indices[rank::world_size]"
        )
    replicas, rank = (get_world_size(), get_rank()) if distributed else (1, 0)
    if drop_last and not pad:
        raise ValueError("pad=False keeps every example, drop_last=True leaves some out: choose one")
    if len(dataset) < replicas and (drop_last or not pad):
        raise ValueError(f"{len(dataset)} examples for {replicas} processes: each needs at least one")
    sampler = _Sampler(dataset, replicas, rank, shuffle, seed, drop_last)
    if pad:
        return sampler
    sampler.total_size = len(dataset)  # torch pads the indices up to it
    sampler.num_samples = len(range(rank, len(dataset), replicas))  # what len(sampler) says
    return sampler


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
            _warn(
                "call sampler.set_epoch(epoch) before each epoch: this one repeats the last one's order "
                "(to evaluate, make it with shuffle=False)"
            )
        return iter(list(super().__iter__())[self.skip :])


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


# ----------------------------------------------------------------------------------------------------------- launch


def launch(worker_fn: Callable, *args: Any, nproc: int | None = None) -> Any:
    """Run `worker_fn(local_rank, world_size, *args)` once per process; returns what it returned on rank 0.

    Starts nproc (or NPROC) processes on this machine, by default one per visible GPU, or two without a GPU.  Under
    torchrun, srun or mpirun, or with one process, worker_fn is called here, and nproc is ignored.
    The first started process that fails ends the run: SystemExit with its error, in a notebook RuntimeError.
    The processes are forked where that is safe, else spawned: then each imports the program anew.  So what worker_fn
    needs (a default dtype, globals) is set in it or passed to it.  Files that it leaves open are written, and its
    atexit functions run; archives (gzip, zip) it must close.
    Each process that it starts has random numbers of its own (torch, Python, numpy): its seed is a number drawn from
    this process's torch generator, plus the rank.  Call torch.manual_seed before `launch`, and every run draws the
    same.  (Under a launcher nothing is seeded: there torch.manual_seed(0) gives all ranks the same numbers.)
    So what must be equal on all ranks needs a generator of its own:
    random_split(dataset, lengths, torch.Generator().manual_seed(0)).
    """
    count = count_processes(nproc, may_share_gpus=nproc is not None)
    if count == 1 or _has_launcher():
        return _call(worker_fn, args)
    if not _launcher():
        _refuse(
            f"to start {count} processes, copy launcher.py beside distributed.py; "
            f"or type torchrun --nproc_per_node={count} {sys.argv[0]}"
        )
    return _launcher().run(_call, (worker_fn, args), count)


def count_processes(nproc: int | None = None, may_share_gpus: bool = False) -> int:
    """How many processes `launch(..., nproc=nproc)` runs; under a launcher its world size.

    If they can't run, the program ends here, with one line on stderr and exit code 2; in a notebook RuntimeError.
    may_share_gpus: allow more processes than GPUs, for init_process_group("gloo"); NCCL needs a GPU for each.
    """
    gpus = torch.cuda.device_count()
    count = str(os.environ.get("NPROC") or gpus or 2) if nproc is None else str(nproc)
    try:
        get_timeout()
        world_size = get_world_size()
        if _launcher():
            _launcher().check_variables()
    except ValueError as problem:
        _refuse(str(problem))
    if _has_launcher():
        return world_size
    if not count.isdecimal() or int(count) < 1:
        _refuse(f"nproc (or NPROC) is {count}: start at least 1 process")
    if 0 < gpus < int(count) and torch_dist.is_nccl_available() and not may_share_gpus:
        _refuse(f"{count} processes, but {gpus} visible GPU(s): start {gpus}, or hide the GPUs: CUDA_VISIBLE_DEVICES=")
    return int(count)


def _call(worker_fn: Callable, args: tuple) -> Any:
    """Call worker_fn in this process; leave the process group after it."""
    try:
        result = worker_fn(get_local_rank(), get_world_size(), *args)
    except BaseException:
        cleanup()  # with one process a notebook's cell can then be run again
        raise
    destroy_process_group()  # not cleanup: `launch` may have been called inside `except`
    return result if is_primary() else None


def __getattr__(name: str) -> Any:
    """torch.distributed's, for a name that this file does not define: `import distributed as dist` takes the name that
    every tutorial gives to torch.distributed."""
    if name.startswith("_") or not hasattr(torch_dist, name):  # Python itself asks for names such as __path__
        raise AttributeError(f"neither {__file__} nor torch.distributed defines {name!r}")
    return getattr(torch_dist, name)
