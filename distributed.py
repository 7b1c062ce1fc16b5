"""Distributed training in one file: copy it into your project.  It needs Python 3.10, torch 2.4 and nothing else.

    import distributed as dist

    def main_worker(gpu, world_size, lr):             # runs once per process
        dist.init_process_group(gpu, world_size)
        model = dist.prepare_ddp_model(Net().to(dist.get_device()))
        sampler = dist.data_sampler(dataset)          # shares the data out; sampler.set_epoch(epoch) each epoch
        ...
        dist.print_primary(dist.reduce(loss))         # the average over all processes
        dist.cleanup()

    if __name__ == "__main__":
        dist.launch(main_worker, 0.1)

    python train.py                                   # one process per visible GPU; one process without a GPU
    CUDA_VISIBLE_DEVICES=0,1 python train.py          # choose the GPUs
    NPROC=2 python train.py                           # choose the number of processes
    torchrun --nproc_per_node=2 train.py              # or srun, or mpirun: launch starts nothing then

One process is always a valid world: every function then works without a process group.  Rank, world size, local rank,
backend and sampler mean what they mean in torch.distributed.  Collectives must be called by every rank, in one order.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import inspect
import itertools
import math
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from typing import Any, NamedTuple

import torch
from torch import distributed as torch_dist
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

INIT_TIMEOUT = 120  # seconds for all ranks to come together; the environment's DIST_INIT_TIMEOUT overrides it
PATIENCE = 10  # seconds of these before rank 0 says for whom it waits
TIMEOUT = 600  # seconds for one collective; DIST_TIMEOUT overrides it
GRACE = 3  # seconds between SIGTERM and SIGKILL when `launch` ends the others after a failure; DIST_GRACE overrides it
STOP_GRACE = 30  # the same when `launch` was told to stop, for a checkpoint to be saved; DIST_GRACE overrides it, too
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_store = None  # rank 0 serves it to the others, so it must live as long as the process
_places: list[str] = []  # each rank's machine, as the roll-call has it
_outer_error: BaseException | None = None  # the exception that was being handled when the group was joined


# ---------------------------------------------------------------------------------------------- who am I, and where?


def seconds(name: str, default: float) -> float:
    """The limit of this name from the environment, else the default.  ValueError, in one line, if it is no number."""
    text = os.environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e9:  # nan, too, is refused
        raise ValueError(f"{name} is {text}: give a number of seconds ({name}={default}), or unset it")
    return value


def _check_limits() -> None:
    """Before anything starts: an error while processes are being ended would leave some of them behind."""
    for name, default in ("DIST_INIT_TIMEOUT", INIT_TIMEOUT), ("DIST_TIMEOUT", TIMEOUT), ("DIST_GRACE", GRACE):
        seconds(name, default)


class World(NamedTuple):
    """A process's place among the others, and who started it."""

    starter: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


_given = World()  # as init_process_group was told, where no launcher speaks


# Each launcher's variables for the rank, the world size, the local rank and the local world size.  The first launcher
# that speaks wins: mpirun and torchrun run inside SLURM jobs, and torchrun inside mpirun, not the other way round.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun (Open MPI)": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpirun (MPICH)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def _world() -> World:
    """This process's place: from the launcher's variables, else what `init_process_group` was told, else World().

    What srun and mpirun say is repeated in torchrun's variables, for all that read those (torch, data.py): RANK,
    WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.  DIST_LAUNCHER notes whose words they were.
    """
    world = _described()
    if world.starter in _LAUNCHERS and "RANK" not in os.environ:
        os.environ |= dict(zip(_LAUNCHERS["torchrun"], map(str, world[1:]), strict=True))
        os.environ["DIST_LAUNCHER"] = world.starter
    return world if world.starter else _given


def _described() -> World:
    """The world that the environment describes; World() where no launcher speaks.  Half a description: ValueError."""
    env = os.environ
    for starter, names in _LAUNCHERS.items():
        given = {name: env[name] for name in names if name in env}
        if starter == "mpirun (MPICH)" and "SLURM_STEP_ID" in env and "MPI_LOCALRANKID" not in env:
            continue  # srun --mpi=pmi2 sets PMI_RANK, too
        if starter == "srun":
            if env.get("SLURM_STEP_NUM_TASKS", "1") == "1":  # a batch script, an interactive shell: nobody else comes
                continue
            each = re.sub(r"(\d+)\(x(\d+)\)", lambda m: ",".join([m[1]] * int(m[2])), given.get(names[3], "")).split(
                ","
            )
            node = env.get("SLURM_NODEID", "not set")
            if not node.isdigit() or int(node) >= len(each):
                raise ValueError(f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE lists {len(each)} node(s)")
            given[names[3]] = each[int(node)]  # of 2(x3),1: this node's tasks
        if not given:
            continue
        for name in names:
            if not given.get(name, "").isdigit():
                wrong = f"{name} is {given.get(name) or 'not set'}, but {starter} sets all of {', '.join(names)}"
                raise ValueError(f"{wrong}: start with {starter}, or unset {' '.join(given)}")
        world = World(starter, *(int(given[name]) for name in names))
        if not (world.local_rank <= world.rank < world.world_size >= world.local_world_size > world.local_rank):
            raise ValueError(f"these contradict each other: {given}; start with {starter}, or unset them")
        tasks, nodes = (env.get(f"SLURM_STEP_NUM_{what}", "1") for what in ("TASKS", "NODES"))
        if "mpirun" in starter and int(tasks) > int(nodes):  # one task per node is how mpirun itself comes there
            raise ValueError(f"SLURM_STEP_NUM_TASKS is {tasks}: that many mpiruns run side by side; leave srun out")
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
            if starter == "torchrun" and int(env.get(name, 1)) > int(env.get("GROUP_WORLD_SIZE", sys.maxsize)):
                wrong = f"{name} is {env[name]}: that many torchruns run side by side, each a world of its own"
                raise ValueError(f"{wrong}: start one per node with --nnodes, or leave torchrun out: launch needs none")
        if "DIST_STORE" in env:
            return world._replace(starter="launch")
        if starter == "torchrun" and "TORCHELASTIC_RUN_ID" not in env:  # translated by `_world`, or set by hand
            return world._replace(starter=env.get("DIST_LAUNCHER", starter))
        return world
    return World()


def _meeting_point(world: World) -> tuple[str, int]:
    """Rank 0's address and port: from the environment, else what srun's and mpirun's variables imply."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (address and port) and "run" not in world.starter.removeprefix("torchrun"):
        raise ValueError("MASTER_ADDR and MASTER_PORT must say where rank 0 is: set them, or start with launch")
    if not address and world.local_world_size == world.world_size:
        address = "127.0.0.1"
    elif not address and world.starter == "srun":
        address = re.sub(r"\[(\w+)[^]]*]", r"\1", os.environ["SLURM_STEP_NODELIST"]).split(",")[0]  # its first host
    elif not address:
        raise ValueError("MASTER_ADDR is not set: over several machines, mpirun needs -x MASTER_ADDR=HOST_OF_RANK_0")
    if not port and world.starter == "mpirun (MPICH)" and world.local_world_size < world.world_size:
        raise ValueError("MASTER_PORT is not set: over several machines, MPICH's mpirun needs -genv MASTER_PORT 29500")
    step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}" if world.starter == "srun" else ""
    run = (
        step or os.environ.get("PMIX_NAMESPACE") or str(os.getppid())
    )  # the same for all tasks, another for other runs
    return address, int(port or 20000 + zlib.crc32(run.encode()) % 10000)  # below the ports that systems give out


def get_rank() -> int:
    """This process's number among all: 0 to world size - 1."""
    return torch_dist.get_rank() if torch_dist.is_initialized() else _world().rank


def get_local_rank() -> int:
    """This process's number among those on this machine."""
    return _world().local_rank


def get_world_size() -> int:
    """The number of processes on all machines together."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else _world().world_size


def get_device() -> torch.device:
    """This process's device: the GPU with its local rank's number, or the CPU.  A process that sees one GPU uses it."""
    # device_count asks the driver's NVML; is_available would load CUDA, and no process could be forked any more.
    count = torch.cuda.device_count()
    return torch.device("cuda", get_local_rank() % count) if count else torch.device("cpu")


def is_primary() -> bool:
    """True on rank 0, which prints and saves."""
    return get_rank() == 0


def print_primary(*args: Any, **kwargs: Any) -> None:
    """`print` on rank 0, at once (flushed); nothing on the others.  Not a collective."""
    if is_primary():
        print(*args, **{"flush": True, **kwargs})


# -------------------------------------------------------------------------------------------------- the process group


def init_process_group(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    checked: bool = False,
) -> None:
    """Join the process group.  Every rank must call it; it returns when all have come.

    rank, world_size: not needed under `launch` or a launcher, where the environment has them; the local rank, which
        `launch` passes to worker_fn, will do.  A process that was started otherwise must say who it is.
    backend: "nccl" or "gloo"; None takes nccl for CUDA, else gloo.  Sets the CUDA device.
    timeout: seconds for all to come (INIT_TIMEOUT).  After 10 s rank 0 says who is missing; at the end TimeoutError.
    checked: torch compares every collective but DDP's own before it runs, and says who calls what: slower, for trials.
    """
    global _given, _outer_error, _places, _store
    world = _world()
    _outer_error = sys.exc_info()[1]
    if not world.starter:  # no launcher (mp.spawn, say): the caller says who this is, and one machine is assumed
        rank, world_size = rank or 0, world_size or 1
        if not 0 <= rank < world_size:
            raise ValueError(f"init_process_group: rank {rank} of {world_size}: ranks go from 0 to {world_size - 1}")
        world = _given = World("", rank, world_size, rank, world_size)
    elif rank not in (None, world.rank, world.local_rank) or world_size not in (None, world.world_size):
        raise ValueError(f"init_process_group({rank}, {world_size}), but this is {world}")
    rank, world_size, device = world.rank, world.world_size, get_device()
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError("backend nccl needs a CUDA GPU, and none is visible: use gloo")
    if checked:
        torch_dist.set_debug_level(torch_dist.DebugLevel.DETAIL)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _check_limits()
    timeout = timeout or seconds("DIST_INIT_TIMEOUT", INIT_TIMEOUT)
    if world.starter == "launch":
        _store = torch_dist.FileStore(os.environ["DIST_STORE"], world_size)
    elif world_size == 1 and not world.starter:
        _store = torch_dist.HashStore()
    elif not isinstance(_store, torch_dist.TCPStore):
        address, port = _meeting_point(world)
        if world_size == world.local_world_size and address == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # the host's name may lead elsewhere, or nowhere
        serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun serves it
        wait = timedelta(seconds=timeout)
        _store = torch_dist.TCPStore(address, port, world_size, serve, wait, wait_for_workers=False, multi_tenant=True)
    group = _store.add(f"{_attempt()} groups of {rank}", 1)
    store = torch_dist.PrefixStore(f"{_attempt()} group {group}", _store)  # a second group, other keys
    place = f"machine {os.environ.get('GROUP_RANK') or os.environ.get('SLURM_NODEID') or socket.gethostname()}"
    gpu = f"of {place}, {rank}"
    if backend == "nccl":  # torch 2.4 doesn't tell a GPU's uuid
        gpu = f"{socket.gethostname()}, GPU {getattr(torch.cuda.get_device_properties(device), 'uuid', gpu)}"
    _places = _roll_call(store, rank, world_size, timeout, place, gpu)
    options: dict = {"timeout": collective_timeout()}
    if backend == "nccl" and torch.__version__ >= (2, 7, 1):  # 2.6 and 2.7.0 hang with it (pytorch#153960)
        options["device_id"] = device  # connect at once, and to the right GPU
    torch_dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
    store.set(f"joined {rank}", "")  # nobody goes on, and perhaps leaves, while another is still connecting to it
    store.wait([f"joined {r}" for r in range(world_size)], timedelta(seconds=timeout))
    print_primary(f"distributed: {world_size} process{'es' * (world_size > 1)}, {backend}, {device.type}")


def collective_timeout() -> timedelta:
    """The time-out of one collective: what every group gets."""
    return timedelta(seconds=seconds("DIST_TIMEOUT", TIMEOUT))


def _attempt() -> str:
    """For the keys: torchrun's store outlives an attempt, with all that was written in it."""
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}"


def _roll_call(store: torch_dist.Store, rank: int, world_size: int, timeout: float, place: str, gpu: str) -> list[str]:
    """Wait for all ranks, and say which are missing: torch's own start-up waits without a word.  Returns the places."""
    keys = [f"rank {r}" for r in range(world_size)]
    store.set(keys[rank], f"{place}\n{gpu}")
    for patience in (min(PATIENCE, timeout), max(0.01, timeout - PATIENCE)):
        try:
            store.wait(keys, timedelta(seconds=patience))
            break
        except RuntimeError:  # DistStoreError, or plain from a FileStore
            missing = f"{', '.join(key for key in keys if not store.check([key]))} of {world_size}"
            if rank == 0 and patience == PATIENCE:
                print(f"distributed: waiting for {missing}", file=sys.stderr, flush=True)
    else:
        raise TimeoutError(f"init_process_group: {missing} did not come within {timeout:.0f} s")
    places, gpus = zip(*(store.get(key).decode().split("\n") for key in keys), strict=True)
    same = [key for key, other in zip(keys, gpus, strict=True) if gpu and other == gpu]
    if len(same) > 1:  # NCCL can't, and would say so less clearly
        raise RuntimeError(f"{' and '.join(same)} use the same GPU ({gpu}): one process per GPU, or backend gloo")
    return list(places)


def _lost(world: World) -> list[int]:
    """The ranks that can't be reached from here any more, after a collective has failed."""
    lost = list(range(world.world_size))
    deadline = time.monotonic() + 5
    try:  # over a new connection: on one that was cut, every call hangs
        store = torch_dist.TCPStore(*_meeting_point(world), is_master=False, timeout=timedelta(seconds=5))
        store.set(f"{_attempt()} still here {world.rank}", "")
        while lost and time.monotonic() < deadline:
            lost = [rank for rank in lost if not store.check([f"{_attempt()} still here {rank}"])]
            time.sleep(0.1)
        return lost
    except RuntimeError:  # rank 0's machine is out of reach, and so are the others
        return [rank for rank in lost if _places[rank] != _places[world.rank]] or [0]


def cleanup() -> None:
    """Leave the process group, if there is one.

    With several processes it does nothing while an exception is on its way: the other ranks may be inside a collective,
    and leaving would wait for them for ever (pytorch/torchtitan#1342).
    """
    global _given, _outer_error
    on_its_way = sys.exc_info()[1]
    if not torch_dist.is_initialized() or (get_world_size() > 1 and on_its_way not in (None, _outer_error)):
        return
    # Gloo's threads let go of their last tensors, for which they need Python: when they are joined (torch 2.4) that is
    # a deadlock, when Python ends it aborts the process (pytorch#179291).
    time.sleep(0.1)
    torch_dist.destroy_process_group()
    _given, _outer_error = World(), None


# -------------------------------------------------------------------------------------------------------- collectives

# For small tensors by torch's function, for others by the backend's operation.
_OPS = {
    "sum": (torch.sum, torch_dist.ReduceOp.SUM),
    "mean": (torch.sum, torch_dist.ReduceOp.SUM),
    "min": (torch.amin, torch_dist.ReduceOp.MIN),
    "max": (torch.amax, torch_dist.ReduceOp.MAX),
    "product": (torch.prod, torch_dist.ReduceOp.PRODUCT),
}


def _comm_device() -> torch.device | None:
    """The device that the backend moves tensors on; None in a world of one."""
    if get_world_size() == 1:
        return None
    if not torch_dist.is_initialized():
        raise RuntimeError(f"this is rank {get_rank()} of {get_world_size()}: call init_process_group first")
    return get_device() if torch_dist.get_backend() == "nccl" else torch.device("cpu")


def _copy(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor as the backends need it: contiguous, and no lazy conjugate or negative of another one."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.to(device, dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)


_DIMS = 9  # with the hash before them 80 bytes: behind these, data of every dtype is aligned
_SMALL = 512  # bytes: what is no larger travels with the check, and needs no collective of its own


def _check_same_call(
    call: str, shape: Sequence[int] = (), data: torch.Tensor | None = None
) -> tuple[list[list[int]], torch.Tensor]:
    """Every rank's shape and small data, if all ranks make the same call; otherwise RuntimeError on all, with a table.

    The backends don't check: gloo adds 3 elements to 5 and returns garbage, and a wrong dtype aborts the process.  It
    costs one all-gather of a message of fixed size: a hash of the call, the shape and the data, [n] uint8, if n <=
    _SMALL.  The data come back as [world size, _SMALL] uint8.  Shapes may differ, but not their length, which `call`
    must tell.
    """
    digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "big")
    header = torch.tensor([digest, *shape[:_DIMS], *[0] * (_DIMS - len(shape))]).view(torch.uint8)
    message = torch.zeros(len(header) + _SMALL, dtype=torch.uint8, device=_comm_device())
    message[: len(header)] = header
    if data is not None and len(data) <= _SMALL:
        message[len(header) : len(header) + len(data)] = data
    table = message.new_empty(get_world_size(), len(message))
    torch_dist.all_gather(list(table), message)
    rows = table[:, : len(header)].view(torch.int64).tolist()
    if all(row[0] == digest for row in rows) and len(shape) <= _DIMS:
        return [row[1 : 1 + len(shape)] for row in rows], table[:, len(header) :]
    calls: list = [None] * get_world_size()
    torch_dist.all_gather_object(calls, (call, list(shape)))
    if len({call for call, _ in calls}) > 1:
        lines = "".join(f"\n  rank {rank}: {call} {shape or ''}" for rank, (call, shape) in enumerate(calls))
        raise RuntimeError(f"the ranks called different things, but all must call the same:{lines}")
    return [shape for _, shape in calls], table[:, len(header) :]


def _result_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """As torch.sum and torch.mean have it: sums of integers are int64, their means are floating-point numbers."""
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    if op == "mean":
        return torch.get_default_dtype()
    return torch.int64 if op in ("sum", "product") or dtype == torch.bool else dtype


def _reduction_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """What `all_reduce` computes in: wide enough for no sum of small numbers to overflow."""
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype
    if dtype.is_complex:
        return torch.complex64 if dtype.itemsize < 8 else dtype
    if op == "mean":
        return torch.float64
    return torch.int64 if dtype.itemsize < 8 else dtype


def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """A new tensor with the sum (mean, min, max, product) over all ranks, on every rank; the input is untouched.

    Every rank must call it, with the same op, shape and dtype; otherwise RuntimeError on all, with what each sent.
    Any device; the result is on the input's.  Its dtype is the input's, but for integers as torch.sum and torch.mean
    have it: sums and products are int64 (so are all results of bool), means have the default float dtype.  Small types
    (float16, bfloat16, int8, ...) are reduced in a wider one and rounded once.
    """
    if op not in _OPS:
        raise ValueError(f"op={op!r}: choose from {', '.join(_OPS)}")
    device, dtype = _comm_device(), _result_dtype(tensor.dtype, op)
    if device is None:
        return _copy(tensor, tensor.device, dtype)
    result = _copy(tensor, device, _reduction_dtype(tensor.dtype, op))
    call = f"all_reduce {op} of {tensor.dtype} {list(tensor.shape)}"
    function, backends_op = _OPS[op]
    _, rows = _check_same_call(call, data=result.flatten().view(torch.uint8))
    if result.nbytes <= _SMALL:
        result = function(rows[:, : result.nbytes].view(result.dtype), 0).view(tensor.shape)
    else:
        torch_dist.all_reduce(result, backends_op)
    if op == "mean":
        result = result / get_world_size()
    return result.to(tensor.device, dtype)


def reduce(tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
    """`all_reduce` that averages by default: what a caller prints as "the loss" is the mean over the ranks."""
    return all_reduce(tensor, op)


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order, on every rank: for torch.cat (torch.stack if they have no dimension).

    Every rank must call it.  Shapes may differ, even to zero rows; dtypes and numbers of dimensions may not, or all
    ranks get a RuntimeError with what each sent.  Any dtype and device; the results are on the input's device.
    """
    device = _comm_device()
    if device is None:
        return [_copy(tensor, tensor.device)]
    data = _copy(tensor, device).flatten().view(torch.uint8)
    call = f"gather of {tensor.dtype} with {tensor.dim()} dimension(s)"
    shapes, rows = _check_same_call(call, tensor.shape, data)
    sizes = [math.prod(shape) * tensor.element_size() for shape in shapes]
    if max(sizes) > _SMALL:
        padded = nn.functional.pad(data, (0, max(sizes) - len(data)))  # the backends gather equal sizes only
        rows = [torch.empty_like(padded) for _ in shapes]
        torch_dist.all_gather(rows, padded)
    parts = [row[:size].view(tensor.dtype).view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]
    return [part.to(tensor.device, copy=True) for part in parts]


def sync_params(params: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors, in place, by rank 0's.  Every rank must pass as many, of the same shapes and dtypes."""
    device = _comm_device()
    if device is None:
        return
    params = [param.detach() for param in params]
    _check_same_call(f"sync_params of {[(param.dtype, *param.shape) for param in params]}")
    for param in params:
        values = _copy(param, device)
        torch_dist.broadcast(values, 0)
        param.copy_(values)


def barrier() -> None:
    """Wait until every rank has come here."""
    device = _comm_device()
    if device is not None:
        torch_dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


wait_for_everyone = barrier


# --------------------------------------------------------------------------------------------------- data and model


class _Sampler(DistributedSampler):
    """torch's sampler, without its padding where `pad` is false, and with a warning for a forgotten set_epoch."""

    def __init__(self, dataset: Dataset, shuffle: bool, pad: bool, seed: int) -> None:
        super().__init__(dataset, get_world_size(), get_rank(), shuffle=shuffle, seed=seed)
        self.passes = self.skip = 0
        if not pad:  # len(self), and what is left of total_size: torch pads the indices up to it
            self.total_size = len(dataset)
            self.num_samples = len(range(self.rank, len(dataset), self.num_replicas))

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        super().set_epoch(epoch)
        self.passes, self.skip = 0, skip

    def __len__(self) -> int:
        return max(0, self.num_samples - self.skip)

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        if self.shuffle and self.passes == 2:
            warnings.warn(
                "this epoch has the order of the last: call sampler.set_epoch(epoch) before each", stacklevel=2
            )
        return itertools.islice(super().__iter__(), self.skip, None)


def data_sampler(
    dataset: Dataset, distributed: bool | None = None, shuffle: bool = True, pad: bool = True, seed: int = 0
) -> DistributedSampler | None:
    """This rank's share of the data set, as a sampler for DataLoader.  None (use none) if not distributed.

    distributed: None means: if there is more than one process.  True gives a sampler for a world of one, too.
    shuffle: a new order each epoch, if `sampler.set_epoch(epoch)` is called before each; the same on every rank, a
        function of (seed, epoch). `set_epoch(epoch, skip=n)` leaves out the first n of this rank: to go on in an epoch.
    pad: for training. All ranks get equally many examples, a few of them twice where the number doesn't divide: a rank
        with one batch less would leave the others waiting. False is for evaluation: every example exactly once.
    """
    if distributed is None:
        distributed = get_world_size() > 1
    return _Sampler(dataset, shuffle, pad, seed) if distributed else None


class _DDP(nn.parallel.DistributedDataParallel):
    """DistributedDataParallel whose evaluation is exact and can't hang.

    torch's broadcasts the buffers (BatchNorm's running averages) in every forward, in evaluation too, so ranks with
    different numbers of batches wait for ever.  Here `eval()` brings all ranks' buffers to rank 0's, once, and a
    forward that records no gradient broadcasts none.  The result is the same: rank 0's averages are always those of
    rank 0's batches.  Where gradients are recorded they are averaged, in eval mode too.
    """

    def __init__(self, module: nn.Module, sync_on_eval: bool, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.sync_on_eval = sync_on_eval
        ignored = self.parameters_to_ignore
        # In DDP's own order, and as they are now: who freezes some later doesn't change DDP's numbers.
        params = [(name, param) for name, param in module.named_parameters() if name not in ignored]
        self.names = [name for name, param in params if param.requires_grad]

    def will_sync_module_buffers(self) -> bool:  # DDP asks this in every forward
        return torch.is_grad_enabled() and super().will_sync_module_buffers()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as problem:
            unused = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(problem))
            if not unused:
                raise
            unused = ", ".join(self.names[int(index)] for index in unused[1].split())
            fixes = "let the loss use them, or freeze them (requires_grad_(False)) before prepare_ddp_model, or pass it"
            raise RuntimeError(f"no gradient in the last step for {unused}: {fixes} find_unused_parameters=True") from (
                problem
            )

    def train(self, mode: bool = True) -> "_DDP":
        if self.training and not mode and self.sync_on_eval:
            sync_params(self.module.buffers())
        return super().train(mode)


def prepare_ddp_model(
    model: nn.Module, device_ids: list | None = None, sync_bn: bool = False, **kwargs: Any
) -> nn.Module:
    """The model as DistributedDataParallel, on GPUs and on the CPU; the model itself with one process.

    Every rank must call it, with the model on `get_device()`; all start from rank 0's weights.  `eval()` is then a
    collective (every rank must call it) that brings rank 0's buffers to all, unless broadcast_buffers=False is passed.
    device_ids is accepted for old callers: the model's device is what counts.
    sync_bn: BatchNorm over the global batch, on CUDA only.  Without it each process normalises by its own share.
    kwargs go to DistributedDataParallel (find_unused_parameters=True, ...).
    """
    if _comm_device() is None:
        return model
    device = next(model.parameters()).device
    if sync_bn and device.type != "cuda":
        raise ValueError("sync_bn=True needs the model on CUDA: torch's SyncBatchNorm runs nowhere else")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if sync_bn else model
    if torch_dist.get_debug_level() == torch_dist.DebugLevel.DETAIL and "process_group" not in kwargs:
        torch_dist.set_debug_level(torch_dist.DebugLevel.OFF)  # DDP on a checked group crashes torch 2.15: a plain one
        kwargs["process_group"] = torch_dist.new_group(timeout=collective_timeout())
        torch_dist.set_debug_level(torch_dist.DebugLevel.DETAIL)
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    old, new = "broadcast_buffers", "forward_sync_buffers"  # torch 2.15 has renamed it
    asked = kwargs.get(old, kwargs.get(new))
    if asked is None:
        kwargs[new if new in known else old] = False  # see _DDP
    return _DDP(model, asked is not False, device_ids=[device] if device.type == "cuda" else None, **kwargs)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel or DataParallel: its state dict's names have no "module." in front."""
    return model.module if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) else model


# ------------------------------------------------------------------------------------------------- starting processes


def plan(nproc: int | None = None, backend: str | None = None, on_cpu: int = 1) -> int:
    """How many processes `launch` would start here.  ValueError, in one line, if they couldn't run.

    By default one per visible GPU, or `on_cpu` where there is none; the environment's NPROC overrides the default.
    """
    gpus = torch.cuda.device_count()
    if nproc is None:
        nproc = os.environ.get("NPROC") or gpus or on_cpu
    if not str(nproc).isdigit() or int(nproc) < 1:
        raise ValueError(f"nproc (or NPROC) is {nproc}: start at least 1 process")
    if backend == "nccl" and not gpus:
        raise ValueError("backend nccl needs a CUDA GPU, and none is visible: use gloo")
    if gpus and int(nproc) > gpus and backend != "gloo":
        raise ValueError(f"{nproc} processes, but {gpus} visible GPU(s): start {gpus}, or share them with backend gloo")
    return int(nproc)


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """`parser.parse_args()` for a script that calls `launch`: with the flags --nproc and --backend, checked.

    Without a GPU the default is two processes.  What can't run ends here, with `parser.error`: before any process is
    started.  If there is a flag --batch-size, it is taken as the global one, of which each process must get a share.
    """
    parser.add_argument("--nproc", type=int, help="processes on this machine (default: one per GPU; without a GPU, 2)")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="(default: nccl for GPUs, else gloo)")
    args = parser.parse_args()
    try:
        world = _world()
        if world.starter and args.nproc is not None:
            raise ValueError(f"{world.starter} has started {world.world_size} process(es): leave out --nproc")
        if world.starter:  # each may see a GPU of its own: whether two share one is for the roll-call to see
            plan(1, args.backend)
        args.nproc = world.local_world_size if world.starter else plan(args.nproc, args.backend, on_cpu=2)
        _check_limits()
        processes = world.world_size if world.starter else args.nproc
        if getattr(args, "batch_size", processes) < processes:
            raise ValueError(f"--batch-size {args.batch_size} is too small for {processes} processes: one example each")
    except ValueError as problem:
        parser.error(str(problem))
    return args


def launch(worker_fn: Callable, *args: Any, nproc: int | None = None) -> Any:
    """Run `worker_fn(local_rank, world_size, *args)` once per device; returns what it returned on rank 0.

    Under a launcher, this process is already one of several: worker_fn is called here (and other ranks return None).
    Otherwise `plan(nproc)` processes are started on this machine; with 1, worker_fn is called here.  They are forked
    where that is safe, else spawned; they meet in a private folder and talk over loopback, so no port is needed and
    nothing can be reached from outside.  Each gets its share of the CPU's cores, unless OMP_NUM_THREADS is set.

    The first process to fail ends all, and `launch` raises SystemExit with its error alone (exit code 1); in a notebook
    or shell, where that would end the session, RuntimeError with the same text.  SIGINT, SIGTERM and SIGHUP to this
    process end all of them with exit code 130, 143 or 129, whatever stage they are in; so does a process that ends
    itself with one of these codes.  Should this process be killed, they are, too.  SIGUSR1 prints where each rank is,
    and goes on; Ctrl-Z stops all of them until `fg`.
    """
    world = _world()
    _check_limits()
    if world.starter == "launch":
        raise RuntimeError("launch was called in a process that launch has started: call it once, in the main program")
    nproc = 1 if world.starter else plan(nproc, "gloo" if nproc else None)  # who asks for more may share GPUs
    if nproc > 1:
        return _supervise(worker_fn, args, nproc)
    if "TORCHELASTIC_RUN_ID" in os.environ or "mpirun" in world.starter:  # killed, they leave their processes behind
        threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    if world.starter and world.starter != "torchrun":  # for a worker_fn that calls torch's own init_process_group
        address, port = _meeting_point(world)
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def call() -> Any:
        try:
            return worker_fn(world.local_rank, world.world_size, *args)
        except KeyboardInterrupt:
            raise _stopped_by(signal.SIGINT) from None
        except RuntimeError as problem:
            several = world.local_world_size < world.world_size
            if not (several and re.search("gloo|NCCL|onnection|imed out", str(problem)) and (lost := _lost(world))):
                raise
            names = ", ".join(f"rank {rank} ({_places[rank]})" for rank in lost)
            raise RuntimeError(f"rank {world.rank} ({_places[world.rank]}) has lost {names}") from problem

    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun's own report then shows this error
        from torch.distributed.elastic.multiprocessing.errors import record

        call = record(call)
    try:
        result = call()
    finally:
        cleanup()
    return result if world.rank == 0 else None


def _interactive() -> bool:
    """In a notebook, IPython or Python's own shell, which SystemExit would end (or make complain)."""
    return hasattr(sys, "ps1")


def _stopped_by(number: int) -> BaseException:
    if number == signal.SIGINT and _interactive():
        return KeyboardInterrupt()
    return SystemExit(128 + number)


def _die_with(parent: int) -> None:
    """End this process and its group once `parent` is gone, even if it was killed and could tell no one."""
    while os.getppid() == parent:
        time.sleep(0.5)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


# Start.


def _cuda_was_used() -> bool:
    """Whether this process has loaded CUDA's driver (torch.cuda.is_available does): its children can't use CUDA."""
    if torch.cuda.is_initialized():
        return True
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps") as maps:
        return "/libcuda.so" in maps.read()


def _fork_is_safe() -> bool:
    """A forked child has its parent's locks, but none of its threads.

    So it must not follow CUDA (torch says so, and refuses), other Python threads, or native ones, such as torch's
    OpenMP pool, whose next use in the child never returns.  macOS's own libraries break after a fork
    (bugs.python.org/issue33725).
    """
    if sys.platform != "linux" or torch.version.hip or _cuda_was_used() or threading.active_count() > 1:
        return False
    if len(os.listdir("/proc/self/task")) > 1:
        # OpenBLAS, which numpy brings, ends its threads before every fork and starts them again when it needs them.
        # So after a first fork the threads that are left belong to somebody else.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of these very threads
            child = os.fork()
        if child == 0:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):  # the caller has SIGCHLD ignored
            os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _start_method(worker_fn: Callable, nproc: int) -> tuple[str, int | None]:
    """ "fork" or "spawn", and the number of threads for each process (None: as OMP_NUM_THREADS says)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores // nproc)
    if _fork_is_safe():
        return "fork", threads
    main_file = getattr(sys.modules["__main__"], "__file__", None) or ""
    if worker_fn.__module__ != "__main__" or os.path.exists(main_file):
        return "spawn", threads
    if sys.platform != "linux" or _cuda_was_used():
        raise RuntimeError(
            f"a new process can't find {worker_fn.__name__}, defined in a notebook or shell, and this one can't be "
            "forked (CUDA is in use, or this isn't Linux): move it to a file, or restart and call launch first"
        )
    return "fork", 1  # a process with one thread never uses the pool


_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REQUESTS = (signal.SIGUSR1, signal.SIGTSTP)
_SIGNALS = {*_STOPS, *_REQUESTS}
_GUARD = """
while read -r pid; do pids="$pids $pid"; done
for pid in $pids; do kill -9 $pid -$pid; done
sleep 0.1
rm -rf "$0"
"""  # the reading ends when nobody holds the other end of the pipe any more


class _Report(NamedTuple):
    """What a process says of its own end."""

    when: float
    error: str = ""
    stopped_by: int = 0  # the signal, if it ended itself with 128 + its number
    result: Any = None


def _supervise(worker_fn: Callable, args: tuple, nproc: int) -> Any:
    """Start nproc processes, watch them, end them all whatever happens; returns rank 0's result."""
    method, threads = _start_method(worker_fn, nproc)
    run = _Run(nproc)
    with run.signals_noted() as mask:
        try:
            run.start(method, threads, worker_fn, args)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            result = run.watch()
        finally:
            run.end()
    for number, _ in run.stops[:1]:  # too late for us, so it is for the caller
        os.kill(os.getpid(), number)
    return result


class _Run:
    """The processes of one `launch`."""

    def __init__(self, nproc: int) -> None:
        self.nproc, self.folder, self.guard, self.guard_pipe = nproc, "", None, -1
        self.processes, self.pipes = [], []
        self.reports: dict[int, _Report] = {}
        self.stops: list[tuple[int, float]] = []  # signals that end the run, and when they came
        self.requests: list[int] = []  # SIGUSR1 and Ctrl-Z
        self.grace = seconds("DIST_GRACE", GRACE)
        self.stop_grace = seconds("DIST_GRACE", STOP_GRACE)

    @contextlib.contextmanager
    def signals_noted(self) -> Iterator[set]:
        """Note signals instead of dying of them.  Blocked until the caller sets the mask that this yields.

        The processes inherit the block, so none dies half-way into its start.
        """

        def note(number: int, frame: Any) -> None:
            if number in _STOPS:
                self.stops.append((number, time.monotonic()))
            else:
                self.requests.append(number)

        handlers = {}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            if threading.current_thread() is threading.main_thread():  # Python lets no other thread handle signals
                for number in _SIGNALS:
                    # nohup's SIGHUP stays ignored.  SIGINT doesn't: a shell's `script &` ignores it unasked.
                    honour = (signal.SIGHUP, signal.SIGTSTP)
                    if _is_ours(number) and not (signal.getsignal(number) == signal.SIG_IGN and number in honour):
                        handlers[number] = signal.signal(number, note)
                if _is_ours(signal.SIGCHLD):  # ignored, it would make the kernel forget how a child has ended
                    handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            yield mask
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def start(self, method: str, threads: int | None, worker_fn: Callable, args: tuple) -> None:
        """Start the guard, then the processes.

        The guard kills them, with all that they have started, and removes the folder, should this process be killed.
        """
        context = multiprocessing.get_context(method)
        if method == "spawn":
            resource_tracker.ensure_running()  # Python starts it anyway, and that unblocks signals:
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # once more
        # Made when the guard already knows it: a SIGKILL in between would leave it behind.
        self.folder = os.path.join(tempfile.gettempdir(), f"dist-{os.urandom(8).hex()}")
        guards_end, self.guard_pipe = os.pipe()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True, "cwd": "/"}
        self.guard = subprocess.Popen(["/bin/sh", "-c", _GUARD, self.folder], stdin=guards_end, **quiet)
        os.close(guards_end)
        os.mkdir(self.folder, 0o700)
        with socket.create_server(("127.0.0.1", 0)) as free:  # for a worker_fn that calls torch's own init
            port = free.getsockname()[1]
        environment = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.nproc))
        environment |= {"DIST_STORE": f"{self.folder}/store", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _LOOPBACK)
        for rank in range(self.nproc):
            receive, send = context.Pipe(duplex=False)
            environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            guard_pipe = self.guard_pipe if method == "fork" else None  # spawn doesn't hand it down
            job = (worker_fn, args, dict(environment), threads, os.getpid(), guard_pipe, send)
            process = context.Process(target=_worker, args=job, name=f"rank {rank}")
            process.start()
            if method == "spawn":  # a forked process tells the guard itself: then none is without it for a moment
                os.write(self.guard_pipe, f"{process.pid}\n".encode())
            send.close()
            self.processes.append(process)
            self.pipes.append(receive)

    # Watch.

    def watch(self) -> Any:
        """Wait for all processes; returns rank 0's result, or raises what ended the run."""
        settled = False
        while True:
            # Not for the sentinels: a process's data loader workers hold its sentinel open after its death.
            connection.wait([pipe for pipe in self.pipes if not pipe.closed], timeout=0.02)
            self.answer_requests()
            if self.stops:
                number = self.stops[0][0]
                _say(f"launch: {signal.Signals(number).name}: ending {self.nproc} processes")
                self.grace = self.stop_grace
                raise _stopped_by(number)
            codes = [_exit_code(process) for process in self.processes]  # first: who is gone has said what it had to
            self.read_reports()
            causes = self.causes(codes)
            if causes and settled:
                raise self.failure(*min(causes))
            if causes:  # its peers can notice a death before this process does: look once more
                time.sleep(0.2)
                settled = True
            elif None not in codes:
                return self.reports[0].result

    def answer_requests(self) -> None:
        while self.requests:
            if self.requests.pop(0) == signal.SIGUSR1:
                _say(self.where())
            else:  # Ctrl-Z reaches this process alone: the others have groups of their own
                self.send(signal.SIGSTOP)
                noted = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTSTP)  # this process stops here, until `fg`
                signal.signal(signal.SIGTSTP, noted)
                self.send(signal.SIGCONT)

    def send(self, number: int) -> None:
        """Send a signal to all processes that still run, with all that they have started."""
        for process in self.processes:
            if _exit_code(process) is None:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # it has just been started, and has no group of its own yet
                    os.kill(process.pid, number)

    def read_reports(self) -> None:
        for rank, pipe in enumerate(self.pipes):
            if not pipe.closed and pipe.poll():
                with contextlib.suppress(EOFError), pipe:
                    self.reports[rank] = pickle.loads(pipe.recv_bytes())
                    if self.reports[rank].stopped_by:  # it was told to stop, so the run was
                        self.stops.append((self.reports[rank].stopped_by, time.monotonic()))

    def causes(self, codes: list) -> list[tuple[float, int, str]]:
        """When, which rank and what, for each process that has failed.

        A process that reports its error waits to be ended.  So whoever died without a report died before any other
        could lose it, and is the cause; among reports it is the earliest.
        """
        found = [(report.when, rank, report.error) for rank, report in self.reports.items() if report.error]
        for rank, code in enumerate(codes):
            if code is None or (rank in self.reports and code in (0, _UNKNOWN)):
                continue
            what = "and nobody knows how" if code == _UNKNOWN else f"by os._exit({code})"
            if code < 0:
                what = f"by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                what += " (by hand, or by the kernel for want of memory: see dmesg)"
            if rank in self.reports:
                what += " after its work"
            found.append((0.0, rank, f"ended {what}"))
            with contextlib.suppress(OSError):
                os.killpg(self.processes[rank].pid, signal.SIGKILL)  # its data loader workers, likewise
        return found

    # Explain.

    def failure(self, when: float, rank: int, error: str) -> BaseException:
        """What `launch` raises, with the error of the first process that failed."""
        done = [f"rank {r}" for r, report in sorted(self.reports.items()) if not report.error]
        if done and f"rank {rank}" not in done:
            error = f"{error.rstrip()}\n({', '.join(done)} had finished)"
        text = f"rank {rank} of {self.nproc} failed first: {error.rstrip()}"
        if re.search("tim(ed|e) ?out|SIG(ABRT|BUS|FPE|ILL|SEGV)", error, re.IGNORECASE):
            text += f"\n{self.where()}"
        return RuntimeError(text) if _interactive() else SystemExit(text)

    def where(self) -> str:
        """A line for each rank that says where it stands: its main thread's innermost frame outside torch and this."""
        asked = [rank for rank, process in enumerate(self.processes) if _exit_code(process) is None]
        for rank in asked:
            open(self.stack_file(rank), "w").close()  # what it said when it was last asked
            os.kill(self.processes[rank].pid, signal.SIGUSR1)  # faulthandler answers, from C: in a collective, too
        time.sleep(0.3)
        lines = ["where each rank stands:"]
        for rank, process in enumerate(self.processes):
            state = f"no answer (if it was stopped: kill -CONT {process.pid})" if rank in asked else "gone"
            with contextlib.suppress(FileNotFoundError), open(self.stack_file(rank)) as file:
                dump = file.read()
                if rank not in asked:  # a crash has left its last stack
                    dump = dump.rpartition("Fatal Python error")[2] if "Fatal Python error" in dump else ""
                # The main thread comes last, innermost frame first.
                frames = re.findall(r'File "(.+)", line (\d+),? in (.+)', dump.rpartition("hread 0x")[2])
                if rank in self.reports:  # in a traceback the innermost frame is the last
                    frames = re.findall(r'File "(.+)", line (\d+),? in (.+)', self.reports[rank].error)[::-1]
                state = _innermost(frames) or state
            lines.append(f"  rank {rank}: {state}")
        return "\n".join(lines)

    def stack_file(self, rank: int) -> str:
        return os.path.join(self.folder, f"stack{rank}")

    # End.

    def end(self) -> None:
        """SIGTERM to whoever handles it, to save a checkpoint, say; then SIGKILL to all and to what they started."""
        for process in filter(_handles_sigterm, self.processes):
            os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.grace
        while any(map(_handles_sigterm, self.processes)) and time.monotonic() < deadline and not self.told_again():
            self.answer_requests()
            time.sleep(0.01)
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # all at once, or its data loader workers would cry
            if _exit_code(process) is None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        if self.guard:
            self.guard.kill()
            self.guard.wait()
            os.close(self.guard_pipe)
        shutil.rmtree(self.folder, ignore_errors=True)

    def told_again(self) -> bool:
        """A person or a scheduler has lost patience.  GNU timeout and a closing terminal signal twice at once."""
        return len(self.stops) > 1 and self.stops[-1][1] - self.stops[0][1] >= 1


_UNKNOWN = 256  # an exit code that can't be


def _exit_code(process: multiprocessing.Process) -> int | None:
    """None while it runs, then as Process.exitcode has it.  It is left a zombie, so that no other gets its number."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.exitcode
    try:
        state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else has waited for it: the caller, who has SIGCHLD ignored, say
        return _UNKNOWN if process.exitcode is None else process.exitcode
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for this signal.  Only Linux tells."""
    with open(f"/proc/{pid}/status") as status:
        mask = re.search(r"SigCgt:\s*(\w+)", status.read())  # a bit for each signal that it handles
    return bool(mask and int(mask[1], 16) >> (number - 1) & 1)


def _handles_sigterm(process: multiprocessing.Process) -> bool:
    """Whether it runs, and SIGTERM would not simply end it."""
    if _exit_code(process) is not None:
        return False
    return sys.platform != "linux" or _catches(process.pid, signal.SIGTERM)


def _is_ours(number: int) -> bool:
    """Whether Python's signal module knows this signal's handler: it can't put back faulthandler's, for instance."""
    known = signal.getsignal(number)
    if known is None or sys.platform != "linux":
        return known is not None
    return callable(known) or not _catches(os.getpid(), number)


def _innermost(frames: list[tuple[str, str, str]]) -> str:
    """The innermost frame outside torch, Python and this file, of frames that begin with the innermost."""
    libraries = (__file__, os.path.dirname(torch.__file__), sysconfig.get_path("stdlib"))
    inner = ""
    for path, line, function in frames:
        if not path.startswith(libraries):
            return f"{path}:{line}, {function}{inner}"
        inner = f", in {function}"
    return ""


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the terminal may be gone: no reason to fail
        print(text, file=sys.stderr, flush=True)


def _worker(
    worker_fn: Callable,
    args: tuple,
    environment: dict,
    threads: int | None,
    parent: int,
    guard_pipe: int | None,
    pipe: Any,
) -> None:
    """What runs in each started process."""
    os.setpgid(0, 0)  # a group of its own: Ctrl-C hits the parent alone, and what the process starts ends with it
    if guard_pipe is not None:
        os.write(guard_pipe, f"{os.getpid()}\n".encode())
        os.close(guard_pipe)  # or the guard would wait for this process, too
    elif os.getppid() != parent:  # which was killed before it could tell the guard
        os._exit(1)
    os.environ |= environment
    world, folder = _world(), os.path.dirname(environment["DIST_STORE"])
    faulthandler.unregister(signal.SIGUSR1)  # the caller's
    for number in (*_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # Where multiprocessing keeps its sockets, those of DataLoader workers, too: killed, they can't remove them.
    multiprocessing.current_process()._config["tempdir"] = folder
    stack = open(os.path.join(folder, f"stack{world.rank}"), "a")  # noqa: SIM115  open for the life of the process
    faulthandler.enable(file=stack)
    faulthandler.register(signal.SIGUSR1, file=stack)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if threads:
        torch.set_num_threads(threads)
    try:
        result = worker_fn(world.local_rank, world.world_size, *args)
        cleanup()
        _flush()
        report = _Report(0.0, result=result if world.rank == 0 else None)
        message = pickle.dumps(report)
    except BaseException as problem:
        report = _report_of(problem)
        message = pickle.dumps(report)
        with contextlib.suppress(OSError):
            _flush()
    with contextlib.suppress(OSError):  # the parent is gone
        pipe.send_bytes(message)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to save: `end` needn't wait
    while report.error or report.stopped_by:  # until the parent ends all: or the others would fail for want of it
        time.sleep(1)


def _flush() -> None:
    with contextlib.suppress(AttributeError, ValueError):  # there is no stdout, or it was closed
        sys.stdout.flush()


def _report_of(problem: BaseException) -> _Report:
    if not isinstance(problem, SystemExit):
        problem = problem.with_traceback(problem.__traceback__.tb_next)  # without _worker
        return _Report(time.monotonic(), "\n\n" + "".join(traceback.format_exception(problem)))
    code = problem.code
    for number in _STOPS:
        if code == 128 + number:
            return _Report(time.monotonic(), stopped_by=number)
    text = code if isinstance(code, str) else f"it called sys.exit({code!r})"
    return _Report(time.monotonic(), text if code else "")
