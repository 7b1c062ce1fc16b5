# Copied from the project ddp-by-diff 1.0.  SPDX-License-Identifier: MIT
"""Helpers for distributed training with PyTorch: group, device, collectives, sampler, DDP, launch.

    import torch
    from torch.utils.data import DataLoader

    import distributed as dist                        # this file, not torch.distributed

    def main_worker(local_rank, world_size, epochs):  # runs once per process; launch passes the first two
        dist.init_process_group()
        model = dist.prepare_ddp_model(Net().to(dist.get_device()))  # DDP averages the gradients over all ranks
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = dist.data_sampler(dataset)          # this rank's share of the dataset
        loader = DataLoader(dataset, batch_size=64 // world_size, sampler=sampler)  # this rank's part of a batch of 64
        for epoch in range(epochs):
            sampler.set_epoch(epoch)                  # a different order in each epoch
            loss = train(model, loader, optimizer)    # you write Net, dataset and train, which returns a tensor
            loss = dist.reduce(loss)                  # the mean over all ranks
            dist.print_primary(f"epoch {epoch}  loss {loss:.4f}")
        dist.cleanup()

    if __name__ == "__main__":
        dist.launch(main_worker, 10)

    python train.py                                # one process per visible GPU; two without a GPU
    NPROC=3 CUDA_VISIBLE_DEVICES= python train.py  # three processes on the CPU
    NPROC=2 DIST_BACKEND=gloo python train.py      # two processes, which may share one GPU: slow, but correct
    torchrun --nproc_per_node=2 train.py           # or another launcher that sets torch's variables

Copy this file.  `launch` starts the processes with torch's elastic_launch, the engine of torchrun,
so its function must be at the top level of a file, and the call below `if __name__ == "__main__":`.
With distributed_launcher.py next to this file, notebooks, srun and mpirun work, too, Ctrl-C shows
where each rank is, and an error names the rank that failed first, or the ranks that are missing.
Both files need Python 3.10, torch 2.4 and numpy, or newer ones.

all_reduce, reduce, gather, sync_params, barrier and a DDP model's passes are collectives: a rank
that calls one waits until all others have called it.  So never call one on some ranks only, as
below `if dist.is_primary():`.
"""

import hashlib
import importlib.util
import inspect
import io
import os
import pickle
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import distributed as torch_dist
from torch import nn
from torch.distributed import ReduceOp
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

_name = f"{__package__}.distributed_launcher" if __package__ else "distributed_launcher"
# Its import translates srun's and mpirun's variables into torchrun's.
launcher = importlib.import_module(_name) if importlib.util.find_spec(_name) else None

# The group that init_process_group has made.  A strong reference would keep its port open after
# torch's own destroy_process_group.
_own_groups: weakref.WeakSet = weakref.WeakSet()
_kept: dict[str, torch_dist.Store] = {}  # the first store that `_open_store` has opened

# ------------------------------------------------------------------------------ rank, device, print
# torchrun and `launch` set these variables.  On two machines with four GPUs each, WORLD_SIZE is 8,
# RANK is 0 to 3 on the first and 4 to 7 on the second, and LOCAL_RANK is 0 to 3 on both.  Without
# them, there is only this one process.


def get_rank() -> int:
    """Return this process's rank: its index among all processes, from 0 to world size - 1."""
    return torch_dist.get_rank() if torch_dist.is_initialized() else int(os.environ.get("RANK", 0))


def get_world_size() -> int:
    """Return the world size: the number of processes on all machines together."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def get_local_rank() -> int:
    """Return LOCAL_RANK: this process's index on its machine; default: the rank modulo the GPUs."""
    return int(os.environ.get("LOCAL_RANK", get_rank() % max(1, torch.cuda.device_count())))


def get_device() -> torch.device:
    """Return the GPU whose index is the local rank (modulo the number of GPUs); else the CPU."""
    count = torch.cuda.device_count()  # is_available may start CUDA, which then fails in forked processes
    return torch.device("cuda", get_local_rank() % count) if count else torch.device("cpu")


def is_primary() -> bool:
    """Return True on rank 0, the process that prints and saves."""
    return get_rank() == 0


def print_primary(*args: Any, **kwargs: Any) -> None:
    """Call `print` on rank 0 only, and flush.  It is not a collective, so it never waits."""
    if is_primary():
        print(*args, **{"flush": True, **kwargs})


# --------------------------------------------------------------------------------- init and cleanup


def init_process_group(
    backend: str | int | None = None,
    world_size: int | None = None,
    rank: int | str | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Join the process group.  Every rank must call this; it returns when all ranks have joined.

    It also calls torch.cuda.set_device(get_device()).  If another library (Ray Train, Accelerate)
    has made a group, that one is used, with its backend and timeout, and `cleanup` leaves it to its
    owner.

    Args:
        backend: "nccl", which needs a GPU for each process, or "gloo", which also works on CPUs and
            lets processes share a GPU.  Default: DIST_BACKEND, else nccl if there are GPUs, else
            gloo.
        world_size, rank: Only if you start the processes yourself: then also set MASTER_ADDR and
            MASTER_PORT.  They become WORLD_SIZE and RANK; if a launcher has set these, `rank` is
            ignored, because it may be a local rank.
        timeout: For joining and for each collective, in seconds or as a timedelta.  Default:
            DIST_TIMEOUT, else 600 s.
    """
    if isinstance(backend, int):  # the arguments of joh-fischer's helper: rank, world_size, backend
        return init_process_group(rank, world_size, backend, timeout)
    is_adopted = torch_dist.is_initialized()
    if torch_dist.group.WORLD in _own_groups:
        raise ValueError("init_process_group was called twice: call cleanup() before the second time")
    if is_adopted and rank not in (None, get_rank()):
        raise ValueError(f"init_process_group: rank is {rank}, but in the existing group it is {get_rank()}")
    if not is_adopted:
        if rank or (world_size or 1) > 1:  # started by hand: from here on as if by a launcher
            os.environ.setdefault("RANK", str(rank or 0))
            os.environ.setdefault("WORLD_SIZE", str(world_size or 1))
        check_variables()
    if world_size not in (None, get_world_size()):
        raise ValueError(f"init_process_group: world_size is {world_size}, but here it is {get_world_size()}")
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not is_adopted:
        backend, limit, rank, size = choose_backend(backend), get_timeout(timeout), get_rank(), get_world_size()
        # With a device_id, NCCL connects at once, and to the right GPU; torch 2.6 and 2.7.0 hang
        # (pytorch#153960).
        gpu = device if needs_gpus(backend) and torch.__version__ >= "2.7.1" else None
        store = _open_store(rank, size, limit)
        torch_dist.init_process_group(backend, timeout=limit, world_size=size, rank=rank, store=store, device_id=gpu)
        _own_groups.add(torch_dist.group.WORLD)
    barrier()  # without this, a rank that ends early closes connections that the others are still opening
    processes = "1 process" if get_world_size() == 1 else f"{get_world_size()} processes"
    owner = ", in another library's group" if is_adopted else ""
    print_primary(f"distributed: {processes}, {torch_dist.get_backend()}, {device.type}{owner}")


def _open_store(rank: int, world_size: int, limit: timedelta) -> torch_dist.Store:
    """Return the key-value store through which the ranks of a new group find each other."""
    if world_size == 1:
        return torch_dist.HashStore()
    if launcher:  # its store, unlike torch's own, knows which ranks are missing
        return launcher.meet(rank, world_size, limit)
    store, _, _ = next(torch_dist.rendezvous("env://", rank, world_size, timeout=limit))
    # Rank 0, or torchrun, serves one store for all groups of a run.  If it ended with the first
    # group, a rank that is early could still connect to it.  And torch would give all groups the
    # same keys, so that a rank could find an address that another one has left for the group
    # before.
    _kept.setdefault("store", store)
    return torch_dist.PrefixStore(str(store.add(f"groups of rank {rank}", 1)), store)


def choose_backend(backend: str | None = None) -> str:
    """Return the argument, else DIST_BACKEND, else nccl or gloo; ValueError if it can't be used."""
    has_nccl = torch.cuda.device_count() > 0 and torch_dist.is_nccl_available()
    backend = (backend or os.environ.get("DIST_BACKEND") or ("nccl" if has_nccl else "gloo")).lower()
    names = [part.rpartition(":")[2] for part in backend.split(",")]  # for torch's cpu:gloo,cuda:nccl
    if not has_nccl and any(map(needs_gpus, names)):
        raise ValueError(f"backend {backend} needs a visible CUDA GPU and a torch with NCCL: use gloo")
    if not all(map(torch_dist.is_backend_available, names)):
        raise ValueError(f"torch has no backend {backend} (DIST_BACKEND or an argument): choose nccl or gloo")
    return backend


def needs_gpus(backend: str) -> bool:
    """Return whether the backend needs a GPU for each process: nccl, and torch 2.14's nccl2, ..."""
    return backend.startswith("nccl")


def check_variables() -> None:
    """Raise ValueError if variables are missing, or contradictory (distributed_launcher.py)."""
    if launcher:
        launcher.check_variables()
    for name in "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS":  # Open MPI; MPICH and Cray; srun
        if "WORLD_SIZE" not in os.environ and os.environ.get(name, "1") != "1":
            raise ValueError(f"{name} is set, but not WORLD_SIZE: use torchrun, or copy distributed_launcher.py here")


def get_timeout(timeout: float | timedelta | None = None) -> timedelta:
    """Return the limit for joining and each collective: the argument, DIST_TIMEOUT, or 600 s."""
    given = (os.environ.get("DIST_TIMEOUT") or 600) if timeout is None else timeout
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if not str(seconds).replace(".", "", 1).isdecimal() or float(seconds) == 0:  # such as 10m, -1 or inf
        raise ValueError(f"the timeout (or DIST_TIMEOUT) is {given}: give seconds greater than 0, such as 600")
    return timedelta(seconds=float(seconds))


def cleanup() -> None:
    """Leave the group that init_process_group has made.  `launch` does this when worker_fn returns.

    With several processes it does nothing during an exception, because the other ranks may be
    blocked in a collective, and leaving the group could wait for them forever
    (pytorch/torchtitan#1342).
    """
    if sys.exc_info()[1] is None or get_world_size() == 1:
        _leave_group()


def _leave_group() -> None:
    if torch_dist.group.WORLD in _own_groups:
        time.sleep(0.02)  # gloo's threads free their tensors, or it may hang (pytorch#179291, torch 2.4.1)
        torch_dist.destroy_process_group()


# -------------------------------------------------------------------------------------- collectives
# Every rank must make the same call, with the same op, dtypes and (except in gather) shapes.  The
# backends don't compare calls: if 3 elements are added to 5, a rank may get garbage, hang or be
# killed.  So each call first sends a small message that compares them.  (What DDP, or
# torch.distributed, sends itself is not compared.)  If a rank makes no call, the others wait for it
# until the timeout; if its process has ended, they report a lost connection.  No gradient flows
# through these functions.  One process needs no group.  A mean is a sum that is divided afterwards,
# because torch 2.4's gloo has no AVG.
_OPS = {"sum": ReduceOp.SUM, "mean": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX}
_all_gather = getattr(torch_dist, "all_gather_single", torch_dist.all_gather_into_tensor)  # its name before 2.13


def all_reduce(tensor: torch.Tensor, op: str | ReduceOp = "sum") -> torch.Tensor:
    """Replace the tensor with its sum over all ranks (or another op), in place, and return it.

    op: "sum", "mean" (or "avg"), "min", "max", or torch's ReduceOp.  A NaN on any rank is in the
    result.  The dtype stays, so small dtypes may overflow.  Raises TypeError for bool, int16 and
    means of non-floats: use `reduce`.
    """
    op = _check_reduction("all_reduce", tensor, op)
    if tensor.dtype in (torch.bool, torch.int16) or (op == "mean" and not tensor.is_floating_point()):
        raise TypeError(f"all_reduce {op} doesn't support {tensor.dtype}: use dist.reduce(tensor, {op!r})")
    if get_world_size() > 1:
        data = _to_send(tensor)
        _share_nans(data, op)
        torch_dist.all_reduce(data, _OPS[op])
        if op == "mean":
            data /= get_world_size()
        if data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data)
    return tensor


def reduce(tensor: torch.Tensor, op: str | ReduceOp = "mean") -> torch.Tensor:
    """Return the mean over all ranks (or another op), as a new tensor on every rank.

    (torch's reduce is different.)  Use it for numbers to print, such as the loss.  Where ranks have
    different numbers of examples, reduce the sum and the count with op="sum", and then divide.  It
    computes in float64 or int64.  Floats and complex numbers keep their dtype; for integers and
    bools, a mean is float64 and every other result int64.
    """
    op = _check_reduction("reduce", tensor, op)
    is_float = tensor.is_floating_point() or tensor.is_complex()
    wide = torch.promote_types(tensor.dtype, torch.float64 if is_float or op == "mean" else torch.int64)
    data = tensor.detach().to(wide, copy=True)
    if get_world_size() > 1:
        data = _to_send(data)
        _share_nans(data, op)
        torch_dist.all_reduce(data, _OPS[op])
        if op == "mean":
            data /= get_world_size()
    return data.to(tensor.device, tensor.dtype if is_float else wide)


def _to_send(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as the backend needs it; a copy only if its device or layout differs."""
    device = get_device() if needs_gpus(torch_dist.get_backend()) else torch.device("cpu")
    return tensor.detach().to(device).resolve_neg().contiguous()


def _share_nans(data: torch.Tensor, op: str) -> None:
    """Write NaN where any rank has it, because the backends' min and max may drop it."""
    if op in ("min", "max") and data.is_floating_point():
        is_nan = data.isnan()
        torch_dist.all_reduce(is_nan.view(torch.uint8), ReduceOp.MAX)  # the view shares is_nan's memory
        data.masked_fill_(is_nan, torch.nan)


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a list of all ranks' tensors, in rank order, on every rank (unlike torch's gather).

    Shapes may differ, even down to zero rows; dtypes and numbers of dimensions may not.  The
    results are new tensors.
    """
    _check_same_call("gather", tensor, is_any_shape=True)
    mine = tensor.detach().cpu().clone()  # pickle would send the whole storage of a view
    parts = [mine] * get_world_size()
    if len(parts) > 1:
        torch_dist.all_gather_object(parts, mine)
    return [part.to(tensor.device) for part in parts]


def sync_params(params: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Broadcast rank 0's values into these tensors, such as model.buffers(), in place."""
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    _check_same_call("sync_params", *params)
    if get_world_size() > 1:
        for param in params:
            data = _to_send(param)
            torch_dist.broadcast(data.view(-1).view(torch.uint8), 0)  # as bytes, so that every dtype works
            if data.data_ptr() != param.data_ptr():
                param.detach().copy_(data)


def barrier() -> None:
    """Wait until every rank has called barrier."""
    _check_same_call("barrier")  # it returns nowhere until all ranks have called it


wait_for_everyone = barrier  # its name in joh-fischer/distributed-pytorch


def _check_reduction(function: str, tensor: Any, op: Any) -> str:
    """Compare the ranks' calls of all_reduce or reduce, and return the op's name in _OPS."""
    name = str(getattr(op, "name", op)).lower()  # torch's ReduceOps have a name
    name = "mean" if name == "avg" else name
    _check_same_call(f"{function} {name}", tensor)
    if name not in _OPS:  # after the comparison, so that no rank waits for one that has raised this
        raise ValueError(f"op={op!r}: choose from {', '.join(_OPS)}")
    return name


def _check_same_call(function: str, *values: Any, is_any_shape: bool = False) -> None:
    """Raise RuntimeError on all ranks, with a table, if their calls differ; TypeError if no tensor.

    Values are not compared: if one rank reduces the loss first and another the accuracy, the
    results are wrong.
    """
    kinds = ", ".join(_describe(value, is_any_shape) for value in values)
    call = f"{function} of {kinds}" if values else function
    if get_world_size() > 1:
        digest = hashlib.blake2b(call.encode(), digest_size=16).digest()
        mine = _to_send(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        hashes = mine.new_empty(get_world_size() * 16)
        _wait(_all_gather(hashes, mine, async_op=True))
        if not torch.equal(hashes, mine.repeat(get_world_size())):
            calls = [call] * get_world_size()
            torch_dist.all_gather_object(calls, call)
            table = "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(calls))
            raise RuntimeError(f"the ranks made different calls, but all must make the same call:{table}")
    # Only now, when all ranks have made this call: all of them raise, and none waits for another.
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{function} needs tensors, not {type(value).__name__} (use torch.as_tensor)")
        if hasattr(value, "full_tensor"):
            raise TypeError(f"{function} doesn't support DTensors: pass .full_tensor(), or this rank's .to_local()")


def _wait(work: Any) -> None:
    """Wait for a message, and let Python run signal handlers meanwhile, unlike work.wait() alone.

    A rank waits longest where the calls are compared, so a rank that must save at SIGTERM does so
    here.
    """
    pause = 0.0001  # seconds
    while not work.is_completed():
        time.sleep(pause)
        pause = min(1.1 * pause, 0.01)
    work.wait()  # raises the error, if there was one


def _describe(value: Any, is_any_shape: bool) -> str:
    """Return what must be equal on all ranks: dtype and shape; of what is no tensor, its type."""
    if not isinstance(value, torch.Tensor) or hasattr(value, "full_tensor"):
        return type(value).__name__
    return f"{value.dtype} {f'with {value.dim()} dimension(s)' if is_any_shape else list(value.shape)}"


# ------------------------------------------------------------------------------- sampler, DDP model


def data_sampler(
    dataset: Dataset,
    distributed: bool = True,
    shuffle: bool = True,
    pad: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> DistributedSampler:
    """Return a sampler for DataLoader that gives this rank its share; with one process, everything.

    Call `sampler.set_epoch(epoch)` before each epoch; set_epoch(epoch, skip=n) leaves out this
    rank's first n examples.  Raises ValueError for pad=False with drop_last=True, and if either is
    used with fewer examples than ranks.

    Args:
        distributed: If False, every rank gets the whole dataset, as tensor parallelism requires.
        shuffle: The order depends only on (seed, epoch), so all ranks agree on it if they have the
            same seed.
        pad: If True, repeat examples until all shares have the same size, because in training a
            rank with fewer steps would leave the others waiting in backward().  Of 10 examples,
            each of 4 ranks gets 3, and two are repeated.  If False, they get 3, 3, 2 and 2: each
            example is used exactly once, as an evaluation requires.
        drop_last: Leave examples out (two of the 10) instead of repeating some.
    """
    if isinstance(dataset, (Sampler, IterableDataset)) or not isinstance(dataset, Sized):
        part = "x[: len(x) // world_size * world_size][rank::world_size], where x is the list of indices or examples"
        raise TypeError(f"data_sampler needs a dataset, not a {type(dataset).__name__}: give each rank {part}")
    replicas, rank = (get_world_size(), get_rank()) if distributed else (1, 0)
    if drop_last and not pad:
        raise ValueError("pad=False keeps every example, drop_last=True leaves some out: choose one")
    if len(dataset) < replicas and (drop_last or not pad):
        raise ValueError(f"{len(dataset)} examples for {replicas} processes: each needs at least one")
    sampler = _Sampler(dataset, replicas, rank, shuffle, seed, drop_last)
    if not pad:
        sampler.total_size = len(dataset)  # torch pads the indices up to it
        sampler.num_samples = len(range(rank, len(dataset), replicas))  # what len(sampler) says
    return sampler


class _Sampler(DistributedSampler):
    """A DistributedSampler that can start inside an epoch, and warns if set_epoch was forgotten."""

    passes = skip = 0  # how often this epoch was read to its end; how many examples to leave out first

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        if skip < 0:
            raise ValueError(f"set_epoch: skip is {skip}: give a number of examples, 0 or more")
        super().set_epoch(epoch)
        self.passes, self.skip = 0, skip

    def __len__(self) -> int:
        return max(0, self.num_samples - self.skip)

    def __iter__(self) -> Iterator[int]:
        if self.passes == 1 and self.shuffle and is_primary():
            warnings.warn("call sampler.set_epoch(epoch) before each epoch, or the order repeats", stacklevel=2)
        yield from list(super().__iter__())[self.skip :]
        self.passes += 1


def prepare_ddp_model(
    model: nn.Module, device_ids: Any = None, sync_bn: bool = False, sync_buffers: bool = True, **kwargs: Any
) -> nn.Module:
    """Return the model in torch's DistributedDataParallel; with one process, the model itself.

    Every rank must call this with the model on `get_device()`.  All copies start from rank 0's
    weights, and backward() averages their gradients, so they stay identical.  The optimizer may be
    created before or after this call.

    Args:
        device_ids: Ignored; DDP gets `get_device()`.
        sync_bn: Let BatchNorm normalise over the global batch instead of each rank's own
            (SyncBatchNorm, CUDA only).
        sync_buffers: Each rank computes its own buffers, such as BatchNorm's running averages.  If
            True, DDP copies rank 0's to all ranks in every forward pass with gradients, and in the
            first one without, so each rank needs a batch there.  If False, call
            `sync_params(model.buffers())` before each evaluation.
        kwargs: Further arguments of DistributedDataParallel, such as find_unused_parameters=True.
    """
    if get_world_size() == 1:
        return model
    if sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if not sync_buffers:
        kwargs["forward_sync_buffers" if torch.__version__ >= "2.13" else "broadcast_buffers"] = False
        sync_params(model.buffers())  # once: broadcast_buffers=False leaves that out, too
    is_on_gpu = any(param.is_cuda for param in model.parameters())
    model = nn.parallel.DistributedDataParallel(model, [get_device()] if is_on_gpu else None, **kwargs)
    if launcher:
        launcher.count_forward_passes(model)  # for the report of a hang
    return model


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, DataParallel and torch.compile, to save it without "module."."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):  # Apex's, too
        model = getattr(model, "_orig_mod" if type(model).__name__ == "OptimizedModule" else "module")
    return model


# ------------------------------------------------------------------------------------------- launch


def launch(worker_fn: Callable, *args: Any, nproc: int | None = None) -> Any:
    """Run `worker_fn(local_rank, world_size, *args)` once per process, and return rank 0's result.

    Starts nproc processes (default: NPROC, else one per visible GPU, or two without a GPU).  The
    tensors in the result are on the CPU.  With one process, and where a launcher or a library has
    started them, worker_fn is called in this process.

    The processes are spawned: they import the program again, so set globals in worker_fn.  If one
    fails, the others are terminated, and ChildFailedError has its traceback.
    (distributed_launcher.py forks where that is safe, and raises SystemExit.)
    """
    count = count_processes(nproc)
    if count == get_world_size():  # one process, or others have started them
        return _call(worker_fn, args)
    if launcher:
        return launcher.run(_call, (worker_fn, args), count)
    try:
        pickle.dumps((worker_fn, args))
        program = inspect.getsource(sys.modules["__main__"])  # a shell or notebook has none
    except Exception as problem:  # pickle raises many kinds
        _refuse(f"{problem}: put worker_fn at the top level of a file, or copy distributed_launcher.py here")
    if "__main__" not in program:  # each new process would start processes while it imports the program
        _refuse('write  if __name__ == "__main__":  above the call of launch, because new processes import the program')
    from torch.distributed.launcher import LaunchConfig, elastic_launch  # torchrun's engine

    here: dict = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count, run_id="launch", max_restarts=0, **here)
    saved = elastic_launch(config, _call_and_save)(worker_fn, args)[0]
    return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=False)


def _call_and_save(worker_fn: Callable, args: tuple) -> bytes:
    """Be a rank of elastic_launch.  As bytes, the result's GPU tensors don't start CUDA there."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // get_world_size()))
    file = io.BytesIO()
    torch.save(_call(worker_fn, args), file)
    return file.getvalue()


def count_processes(nproc: int | None = None) -> int:
    """Return how many processes `launch` runs; end the program if they can't run."""
    if torch_dist.is_initialized():
        return get_world_size()
    gpus = torch.cuda.device_count()
    count = str(os.environ.get("NPROC") or gpus or 2) if nproc is None else str(nproc)
    try:  # init_process_group would raise the same errors, but in each process
        check_variables()
        backend = choose_backend()
        get_timeout()
    except ValueError as problem:
        _refuse(str(problem))
    if "WORLD_SIZE" in os.environ:
        return get_world_size()
    if not count.isdecimal() or int(count) < 1:
        _refuse(f"nproc (or NPROC) is {count}: start at least 1 process")
    if needs_gpus(backend) and int(count) > gpus:
        _refuse(f"{count} processes, but {gpus} visible GPU(s): start {gpus}, or share GPUs (DIST_BACKEND=gloo)")
    return int(count)


def _call(worker_fn: Callable, args: tuple) -> Any:
    """Call worker_fn in this process, and leave the process group after it."""
    try:
        result = worker_fn(get_local_rank(), get_world_size(), *args)
    except BaseException as error:
        if launcher:
            launcher.note_forward_passes(error)
        cleanup()  # with one process a notebook's cell can then be run again
        raise
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
        raise SystemExit(f"worker_fn returned a {type(result).__name__}, so nothing has run: pass a plain function")
    _leave_group()  # not cleanup: `launch` may have been called inside `except`
    return result if is_primary() else None


def _refuse(problem: str) -> NoReturn:
    """End the program with one line and exit code 2; in a notebook, raise RuntimeError."""
    if hasattr(sys, "ps1") or (launcher and launcher.must_go_on()):
        raise RuntimeError(problem)
    print(f"distributed: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)
