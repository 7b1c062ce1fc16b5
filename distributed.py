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
import inspect
import itertools
import math
import multiprocessing
import os
import pickle
import re
import shlex
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
from collections.abc import Callable, Iterable, Iterator
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
_NATIVE_THREADS = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0  # see _fork_is_safe
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_store = None  # rank 0 serves it to the others, so it must live as long as the process
_places: list[str] = []  # each rank's machine, as the roll-call has it


# ---------------------------------------------------------------------------------------------- who am I, and where?


class World(NamedTuple):
    """A process's place among the others, and who started it."""

    starter: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


# Each launcher's variables for the rank, the world size, the local rank and the local world size.  The first launcher
# that speaks wins: mpirun and torchrun run inside SLURM jobs, and torchrun inside mpirun, not the other way round.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun (Open MPI)": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpirun (MPICH)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def _world() -> World:
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
        return world._replace(starter="launch") if "DIST_STORE" in env else world
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

    rank, world_size: as `launch` passes them to worker_fn (the local rank will do: the environment has the other).
    backend: "nccl" or "gloo"; None takes nccl for CUDA, else gloo.  Sets the CUDA device.
    timeout: seconds for all to come (INIT_TIMEOUT).  After 10 s rank 0 says who is missing; at the end TimeoutError.
    checked: torch compares every collective but DDP's own before it runs, and says who calls what: slower, for trials.
    """
    global _store, _places
    world, device = _world(), get_device()
    if not world.starter:  # no launcher: the caller says who this is
        world = world._replace(rank=rank or 0, world_size=world_size or 1)
    elif rank not in (None, world.rank, world.local_rank) or world_size not in (None, world.world_size):
        raise ValueError(f"init_process_group({rank}, {world_size}), but this is {world}")
    rank, world_size = world.rank, world.world_size
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError("backend nccl needs a CUDA GPU, and none is visible: use gloo")
    if checked:
        torch_dist.set_debug_level(torch_dist.DebugLevel.DETAIL)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = float(timeout or os.environ.get("DIST_INIT_TIMEOUT", INIT_TIMEOUT))
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
    options = {"timeout": timedelta(seconds=float(os.environ.get("DIST_TIMEOUT", TIMEOUT)))}
    if backend == "nccl" and torch.__version__ >= (2, 7, 1):  # 2.6 and 2.7.0 hang with it (pytorch#153960)
        options["device_id"] = device  # connect at once, and to the right GPU
    torch_dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
    store.set(f"joined {rank}", "")  # nobody goes on, and perhaps leaves, while another is still connecting to it
    store.wait([f"joined {r}" for r in range(world_size)], timedelta(seconds=timeout))
    print_primary(f"distributed: {world_size} process{'es' * (world_size > 1)}, {backend}, {device.type}")


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
    """Leave the process group, if there is one.  Does nothing while an exception is on its way: the other ranks may be
    inside a collective, and leaving would wait for them for ever (pytorch/torchtitan#1342)."""
    if torch_dist.is_initialized() and sys.exc_info()[0] is None:
        # Gloo's threads let go of their last tensors, for which they need Python: when they are joined (torch 2.4) that
        # is a deadlock, when Python ends it aborts the process (pytorch#179291).
        time.sleep(0.1)
        torch_dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------------- collectives

_OPS = ("sum", "mean", "min", "max", "product")


def _wire() -> torch.device | None:
    """The device that the backend moves tensors on; None in a world of one."""
    if get_world_size() == 1:
        return None
    if not torch_dist.is_initialized():
        raise RuntimeError(f"this is rank {get_rank()} of {get_world_size()}: call init_process_group first")
    return get_device() if torch_dist.get_backend() == "nccl" else torch.device("cpu")


def _agree(call: str, detail: Any = "") -> list:
    """Every rank's detail, if all ranks make the same call; otherwise RuntimeError on all, with what each has called.

    The backends don't check: gloo adds 3 elements to 5 and returns garbage, and a wrong dtype aborts the process.
    """
    everyone: list = [None] * get_world_size()
    torch_dist.all_gather_object(everyone, (call, detail))
    if len({call for call, _ in everyone}) > 1:
        table = "".join(f"\n  rank {rank}: {call} {detail}" for rank, (call, detail) in enumerate(everyone))
        raise RuntimeError(f"the ranks called different things, but all must call the same:{table}")
    return [detail for _, detail in everyone]


def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """A new tensor with the sum (mean, min, max, product) over all ranks, on every rank; the input is untouched.

    Every rank must call it, with the same op, shape and dtype; otherwise RuntimeError on all, with what each sent.
    Any device; the result is on the input's.  bool counts as int64; the mean of integers has the default float dtype;
    float16 and bfloat16 are reduced in float32, then rounded once.
    """
    if op not in _OPS:
        raise ValueError(f"op={op!r}: choose from {', '.join(_OPS)}")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if wire := _wire():
        _agree(f"all_reduce {op} of {tensor.dtype} {list(tensor.shape)}")
        narrow = {torch.bool: torch.int64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
        result = result.to(wire, narrow.get(tensor.dtype, tensor.dtype))
        torch_dist.all_reduce(result, getattr(torch_dist.ReduceOp, "SUM" if op == "mean" else op.upper()))
    if op == "mean":
        result = result / get_world_size()
    dtype = torch.int64 if tensor.dtype == torch.bool and op != "mean" else tensor.dtype
    return result.to(tensor.device, dtype if dtype.is_floating_point or op != "mean" else result.dtype)


def reduce(tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
    """`all_reduce` that averages by default: what a caller prints as "the loss" is the mean over the ranks."""
    return all_reduce(tensor, op)


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order, on every rank: for torch.cat (torch.stack if they have no dimension).

    Every rank must call it.  Shapes may differ, even to zero rows; dtypes and numbers of dimensions may not, or all
    ranks get a RuntimeError with what each sent.  Any dtype and device; the results are on the input's device.
    """
    tensor = tensor.detach()
    if not (wire := _wire()):
        return [tensor.clone()]
    shapes = _agree(f"gather of {tensor.dtype} with {tensor.dim()} dimension(s)", list(tensor.shape))
    sizes = [math.prod(shape) * tensor.element_size() for shape in shapes]
    mine = tensor.to(wire).contiguous().flatten().view(torch.uint8)
    mine = nn.functional.pad(mine, (0, max(sizes) - len(mine)))  # the backends gather equal sizes only
    rows = [torch.empty_like(mine) for _ in shapes]
    torch_dist.all_gather(rows, mine)
    rows = [row[:size].view(tensor.dtype).view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]
    return [row.to(tensor.device) for row in rows]


def sync_params(params: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors, in place, by rank 0's.  Every rank must pass as many, of the same shapes and dtypes."""
    if wire := _wire():
        params = [param.detach() for param in params]
        _agree(f"sync_params of {[(param.dtype, *param.shape) for param in params]}")
        for param in params:
            values = param.to(wire).contiguous()
            torch_dist.broadcast(values, 0)
            param.copy_(values)


def barrier() -> None:
    """Wait until every rank has come here."""
    if wire := _wire():
        torch_dist.barrier(**({"device_ids": [wire.index]} if wire.type == "cuda" else {}))


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
    different numbers of batches wait for ever.  Here `eval()` brings all ranks' buffers to rank 0's, once, and forward
    broadcasts none.  The result is the same: rank 0's averages are always those of rank 0's batches.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs) if self.training else self.module(*inputs, **kwargs)
        except RuntimeError as problem:
            unused = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(problem))
            names = [name for name, param in self.module.named_parameters() if param.requires_grad]
            if not unused:
                raise
            unused = ", ".join(names[int(i)] for i in unused[1].split())
            fixes = "let the loss use them, or freeze them (requires_grad_(False)), or pass find_unused_parameters=True"
            raise RuntimeError(f"no gradient in the last step for {unused}: {fixes}") from problem

    def train(self, mode: bool = True) -> "_DDP":
        if self.training and not mode:
            sync_params(self.module.buffers())
        return super().train(mode)


def prepare_ddp_model(
    model: nn.Module, device_ids: list | None = None, sync_bn: bool = False, **kwargs: Any
) -> nn.Module:
    """The model as DistributedDataParallel, on GPUs and on the CPU; the model itself with one process.

    Every rank must call it, with the model on `get_device()`; all start from rank 0's weights.  `eval()` is then a
    collective: every rank must call it.  device_ids is accepted for old callers: the model's device is what counts.
    sync_bn: BatchNorm over the global batch, on CUDA only.  Without it each process normalises by its own share.
    kwargs go to DistributedDataParallel (find_unused_parameters=True, ...).
    """
    if not _wire():
        return model
    device = next(model.parameters()).device
    if sync_bn and device.type != "cuda":
        raise ValueError("sync_bn=True needs the model on CUDA: torch's SyncBatchNorm runs nowhere else")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if sync_bn else model
    if torch_dist.get_debug_level() == torch_dist.DebugLevel.DETAIL and "process_group" not in kwargs:
        torch_dist.set_debug_level(torch_dist.DebugLevel.OFF)  # DDP on a checked group crashes torch 2.15: a plain one
        kwargs["process_group"] = torch_dist.new_group()
        torch_dist.set_debug_level(torch_dist.DebugLevel.DETAIL)
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters  # torch 2.15 has renamed it
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    kwargs = {name: False, **kwargs} if "broadcast_buffers" not in kwargs else kwargs  # see _DDP
    return _DDP(model, device_ids=[device] if device.type == "cuda" else None, **kwargs)


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
        args.nproc = plan(world.local_world_size if world.starter else args.nproc, args.backend, on_cpu=2)
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

    The first process to fail ends all, and `launch` raises SystemExit with its error alone (exit code 1).  SIGINT,
    SIGTERM and SIGHUP to this process end all of them with exit code 130, 143 or 129, whatever stage they are in, and
    should this process be killed, they end themselves.  SIGUSR1 prints where each rank is, and goes on.
    """
    world = _world()
    if world.starter == "launch":
        raise RuntimeError("launch was called in a process that launch has started: call it once, in the main program")
    nproc = 1 if world.starter else plan(nproc, "gloo" if nproc else None)  # who asks for more may share GPUs
    if nproc > 1:
        return _supervise(worker_fn, args, nproc)
    if "TORCHELASTIC_RUN_ID" in os.environ or "mpirun" in world.starter:  # killed, they leave their processes behind
        threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()

    def call() -> Any:
        try:
            return worker_fn(world.local_rank, world.world_size, *args)
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None
        except RuntimeError as problem:
            several = world.local_world_size < world.world_size
            if not (several and re.search("gloo|NCCL|onnection|imed out", str(problem)) and (lost := _lost(world))):
                raise
            names = ", ".join(f"rank {rank} ({_places[rank]})" for rank in lost)
            raise RuntimeError(f"rank {world.rank} ({_places[world.rank]}) has lost {names}") from problem

    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun's own report then shows this error
        from torch.distributed.elastic.multiprocessing.errors import record

        call = record(call)
    result = call()
    cleanup()
    return result if world.rank == 0 else None


def _fork_is_safe() -> bool:
    """A forked child has its parent's locks, but none of its threads.

    So it must not follow CUDA (torch says so, and refuses), other Python threads, or torch's OpenMP pool, whose next
    use in the child never returns: a pool shows as more native threads than importing torch has left (one per core if
    numpy brought OpenBLAS).  macOS's own libraries break after a fork (bugs.python.org/issue33725).
    """
    if sys.platform != "linux" or torch.cuda.is_initialized() or torch.version.hip or threading.active_count() > 1:
        return False
    with open("/proc/self/maps") as maps:
        if "/libcuda.so" in maps.read():
            return False
    asked = [os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")]
    blas = next((int(number) for number in asked if number.isdigit()), len(os.sched_getaffinity(0)))
    expected = blas if "numpy" in sys.modules else 1
    return len(os.listdir("/proc/self/task")) <= min(_NATIVE_THREADS, expected)


def _supervise(worker_fn: Callable, args: tuple, nproc: int) -> Any:
    """Start nproc processes, see them through, end them all whatever happens; returns rank 0's result."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores // nproc)
    method = "fork" if _fork_is_safe() else "spawn"
    main_file = getattr(sys.modules["__main__"], "__file__", None) or ""
    if method == "spawn" and worker_fn.__module__ == "__main__" and not os.path.exists(main_file):
        if sys.platform != "linux" or torch.cuda.is_initialized():
            raise RuntimeError(
                f"a new process can't find {worker_fn.__name__}, defined in a notebook or shell, and this one can't be "
                "forked (CUDA is in use, or this isn't Linux): move it to a file, or restart and call launch first"
            )
        method, threads = "fork", 1  # a process with one thread never uses the pool
    context = multiprocessing.get_context(method)
    if method == "spawn":
        resource_tracker.ensure_running()  # Python starts it anyway, and that would unblock the signals blocked below
    folder = tempfile.mkdtemp(prefix="dist-")
    with socket.create_server(("127.0.0.1", 0)) as free:  # for a worker_fn that calls torch's own init_process_group
        port = free.getsockname()[1]
    environment = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(nproc))
    environment |= {"DIST_STORE": f"{folder}/store", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _LOOPBACK)
    processes, pipes, caught, handlers, guard = [], [], [], {}, None
    # Signals wait until all is ready for them; the processes inherit that, so none dies half-way into its start.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread handle signals
            for signum in _SIGNALS:
                # nohup's SIGHUP stays ignored.  SIGINT doesn't: a shell's `script &` ignores it unasked.
                if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                    handlers[signum] = signal.signal(signum, lambda number, frame: caught.append(number))
        for rank in range(nproc):
            receive, send = context.Pipe(duplex=False)
            mine = environment | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            job = (worker_fn, args, mine, threads, os.getpid(), send)
            processes.append(context.Process(target=_worker, args=job, name=f"rank {rank}"))
            processes[-1].start()
            send.close()
            pipes.append(receive)
        if method == "spawn":  # it imports for seconds before it can look after itself; `read` ends with this process
            pids = " ".join(str(process.pid) for process in processes)
            kill = f"read _; kill -9 {pids}; rm -r {shlex.quote(folder)}"
            guard = subprocess.Popen(
                ["sh", "-c", kill], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return _watch(processes, pipes, caught, folder)
    finally:
        _end([process for process in processes if process.pid], caught)
        if guard:
            guard.kill()
            guard.wait()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        shutil.rmtree(folder, ignore_errors=True)


def _end(processes: list, caught: list[int]) -> None:
    """SIGTERM to whoever handles it, to save a checkpoint, say; then SIGKILL to all, with what they have started.

    `caught` has the signal that is the reason, if one is; another one (a second Ctrl-C) ends the waiting.
    """

    def busy(process: multiprocessing.Process) -> bool:
        if process.exitcode is not None or sys.platform != "linux":
            return process.exitcode is None
        with open(f"/proc/{process.pid}/status") as status:
            caught = re.search(r"SigCgt:\s*(\w+)", status.read())  # a mask of the signals that it handles
        return bool(caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)

    for process in filter(busy, processes):
        os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + float(os.environ.get("DIST_GRACE", STOP_GRACE if caught else GRACE))
    while time.monotonic() < deadline and any(map(busy, processes)) and len(caught) < 2:
        time.sleep(0.01)
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # all at once, or its data loader workers would cry
        process.kill()
        process.join()


def _watch(processes: list, pipes: list, caught: list[int], folder: str) -> Any:
    """Wait for all processes; returns rank 0's result, or raises what ended the run."""
    world_size, reports, settled = len(processes), {}, False
    while True:
        # Not for the sentinels: a process's data loader workers hold its sentinel open after its death.
        connection.wait([pipe for pipe in pipes if not pipe.closed], timeout=0.02)
        while caught:
            if caught[0] != signal.SIGUSR1:
                print(f"launch: {signal.Signals(caught[0]).name}: ending {world_size} processes", file=sys.stderr)
                raise SystemExit(128 + caught[0])
            caught.pop(0)
            print(_where(processes, folder, reports), file=sys.stderr, flush=True)
        codes = [p.exitcode for p in processes]  # before the reports are read: who is gone has said what it had to say
        for rank, pipe in enumerate(pipes):
            if not pipe.closed and pipe.poll():
                with contextlib.suppress(EOFError), pipe:
                    reports[rank] = pickle.loads(pipe.recv_bytes())
        # A process that reports its error waits to be ended.  So whoever died without a report died before any other
        # could lose it, and is the cause; among reports it is the earliest.
        causes = [(when, rank, error) for rank, (when, error, _) in reports.items() if error]
        for rank, code in enumerate(codes):
            if code or (code == 0 and rank not in reports):
                name = signal.Signals(-code).name if code < 0 else f"os._exit({code})"
                hint = " (by hand, or by the kernel for want of memory: see dmesg)" if name == "SIGKILL" else ""
                causes.append((0.0, rank, f"ended by {name}{hint}" + " after its work" * (rank in reports)))
                with contextlib.suppress(OSError):
                    os.killpg(processes[rank].pid, signal.SIGKILL)  # its data loader workers, likewise
        if causes and not settled:
            settled = not time.sleep(0.2)  # its peers can notice a death before the parent does
        elif causes:
            _, rank, error = min(causes)
            done = [f"rank {r}" for r, (_, failed, _) in sorted(reports.items()) if not failed]
            if done and f"rank {rank}" not in done:
                error = f"{error.rstrip()}\n({', '.join(done)} had finished)"
            stuck = re.search("tim(ed|e) ?out|SIGABRT", error, re.IGNORECASE)
            where = _where(processes, folder, reports) if stuck else ""
            raise SystemExit(f"rank {rank} of {world_size} failed first: {error.rstrip()}\n{where}".rstrip())
        if None not in codes:
            return reports[0][2]


def _where(processes: list, folder: str, reports: dict) -> str:
    """A line for each rank that says where it stands: its main thread's innermost frame outside torch and this file."""
    stacks = [os.path.join(folder, f"stack{rank}") for rank in range(len(processes))]
    for process, stack in zip(processes, stacks, strict=True):
        open(stack, "w").close()  # what it said when it was last asked
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGUSR1)  # faulthandler answers, from C: inside a collective, too
    time.sleep(0.3)
    text = "where each rank stands:"
    libraries = (__file__, os.path.dirname(torch.__file__), sysconfig.get_path("stdlib"))
    for rank, (process, stack) in enumerate(zip(processes, stacks, strict=True)):
        state = "gone" if process.exitcode is not None else f"no answer (if it was stopped: kill -CONT {process.pid})"
        with open(stack) as file:  # the main thread comes last, innermost frame first; in a traceback it is the last
            dump = file.read().rpartition("hread 0x")[2] if rank not in reports else reports[rank][1] or ""
        frames = re.findall(r'File "(.+)", line (\d+),? in (.+)', dump)[:: -1 if rank in reports else 1]
        inner = ""
        for path, line, function in frames:
            if not path.startswith(libraries):
                state = f"{path}:{line}, {function}{inner}"
                break
            inner = f", in {function}"
        text += f"\n  rank {rank}: {state}"
    return text


def _worker(worker_fn: Callable, args: tuple, environment: dict, threads: int | None, parent: int, pipe: Any) -> None:
    """What runs in each started process."""
    os.setpgid(0, 0)  # a group of its own: Ctrl-C hits the parent alone, and what the process starts ends with it
    os.environ |= environment
    world, folder = _world(), os.path.dirname(environment["DIST_STORE"])
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    stack = open(os.path.join(folder, f"stack{world.rank}"), "a")  # noqa: SIM115  open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stack)
    threading.Thread(target=_die_with, args=(parent, folder), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if threads:
        torch.set_num_threads(threads)
    error = result = None
    try:
        result = worker_fn(world.local_rank, world.world_size, *args)
        cleanup()
        report = pickle.dumps((0.0, None, result if world.rank == 0 else None))
    except BaseException as problem:
        if isinstance(problem, SystemExit):
            text = problem.code if isinstance(problem.code, str) else f"it called sys.exit({problem.code!r})"
            error = text if problem.code else None
        else:
            problem = problem.with_traceback(problem.__traceback__.tb_next)  # without this function
            error = "\n\n" + "".join(traceback.format_exception(problem))
        report = pickle.dumps((time.monotonic(), error, None))
    sys.stdout.flush()
    with contextlib.suppress(OSError):  # the parent is gone
        pipe.send_bytes(report)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to save: `_end` needn't wait
    while error:  # until the parent ends all: were this process gone, the others would fail for want of it
        time.sleep(1)


def _die_with(parent: int, folder: str | None = None) -> None:
    """End this process and its group once `parent` is gone, even if it was killed and could tell no one."""
    while os.getppid() == parent:
        time.sleep(0.5)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
