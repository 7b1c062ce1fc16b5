"""What a training script calls: rank, device, process group, collectives, sampler, DDP model, launch.

    import distributed as dist

    def main_worker(local_rank, world_size, lr):      # runs once per process
        dist.init_process_group()
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

Copy it together with rendezvous.py and launcher.py: they need Python 3.10, torch 2.4 and nothing else.  One process is
always a valid world: every function then works without a process group.  Rank, world size, local rank, backend and
sampler mean what they mean in torch.distributed.  Collectives must be called by every rank, in the same order.
"""

import argparse
import hashlib
import inspect
import itertools
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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

_outer_error: BaseException | None = None  # the exception that was being handled when the group was joined


def get_rank() -> int:
    """This process's number among all: 0 to world size - 1."""
    return torch_dist.get_rank() if torch_dist.is_initialized() else rendezvous.world().rank


def get_local_rank() -> int:
    """This process's number among those on this machine."""
    return rendezvous.world().local_rank


def get_world_size() -> int:
    """The number of processes on all machines together."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else rendezvous.world().world_size


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

    rank, world_size: only for a process that neither `launch` nor a launcher has started (mp.spawn, say).
    backend: "nccl" or "gloo"; None takes nccl for CUDA, else gloo.  Sets the CUDA device.
    timeout: seconds for all to come (120).  After 10 s rank 0 says who is missing; at the end TimeoutError.
    checked: torch compares every collective but DDP's own before it runs, and says who calls what: slower, for trials.
    """
    global _outer_error
    _outer_error = sys.exc_info()[1]
    world = rendezvous.join(rank, world_size)
    device = get_device()
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError("backend nccl needs a CUDA GPU, and none is visible: use gloo")
    if checked:
        torch_dist.set_debug_level(torch_dist.DebugLevel.DETAIL)
    options: dict = {"timeout": collective_timeout()}
    gpu = ""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":  # one process per card; torch 2.4 doesn't tell which card it is
        gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        if torch.__version__ >= (2, 7, 1):  # 2.6 and 2.7.0 hang with it (pytorch#153960)
            options["device_id"] = device  # connect at once, and to the right GPU
    store = rendezvous.meet(world, gpu, timeout)
    torch_dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, **options)
    rendezvous.wait_for_all(store, world, timeout)
    processes = "process" if world.world_size == 1 else "processes"
    print_primary(f"distributed: {world.world_size} {processes}, {backend}, {device.type}")


def collective_timeout() -> timedelta:
    """How long a collective waits for the other ranks: DIST_TIMEOUT seconds (600)."""
    return timedelta(seconds=rendezvous.seconds("DIST_TIMEOUT"))


def cleanup() -> None:
    """Leave the process group, if there is one.

    With several processes it does nothing while an exception is being raised: the other ranks may be inside a
    collective, and leaving would wait for them for ever (pytorch/torchtitan#1342).
    """
    global _outer_error
    raised = sys.exc_info()[1]
    if not torch_dist.is_initialized() or (get_world_size() > 1 and raised not in (None, _outer_error)):
        return
    # Gloo's threads let go of their last tensors, for which they need Python: when they are joined (torch 2.4) that is
    # a deadlock, when Python ends it aborts the process (pytorch#179291).
    time.sleep(0.1)
    torch_dist.destroy_process_group()
    _outer_error = None


# -------------------------------------------------------------------------------------------------------- collectives

# For small tensors torch's function, for others the backend's operation.
_OPS = {
    "sum": (torch.sum, torch_dist.ReduceOp.SUM),
    "mean": (torch.sum, torch_dist.ReduceOp.SUM),
    "min": (torch.amin, torch_dist.ReduceOp.MIN),
    "max": (torch.amax, torch_dist.ReduceOp.MAX),
    "product": (torch.prod, torch_dist.ReduceOp.PRODUCT),
}
_DIMS = 9  # with the hash before them 80 bytes: behind these, data of every dtype is aligned
_SMALL = 512  # bytes: what is no larger travels with the check, and needs no collective of its own


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


def _check_same_call(
    call: str, shape: Sequence[int] = (), data: torch.Tensor | None = None
) -> tuple[list, torch.Tensor]:
    """Every rank's shape and small data, if all ranks make the same call; otherwise RuntimeError on all, with a table.

    The backends don't check: gloo adds 3 elements to 5 and returns garbage, and a wrong dtype aborts the process.  It
    costs one all-gather of a message of fixed size: a hash of `call`, the shape (which may differ, but not in its
    length) and the data, [n] uint8, if n <= _SMALL.  The data come back as [world size, _SMALL] uint8.
    """
    digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "big")
    header = torch.tensor([digest, *shape[:_DIMS], *[0] * (_DIMS - len(shape))]).view(torch.uint8)
    message = torch.zeros(len(header) + _SMALL, dtype=torch.uint8, device=_comm_device())
    message[: len(header)] = header
    if data is not None and len(data) <= _SMALL:
        message[len(header) : len(header) + len(data)] = data
    table = message.new_empty(get_world_size(), len(message))
    torch_dist.all_gather(list(table), message)
    headers = table[:, : len(header)].view(torch.int64).tolist()
    shapes = [row[1 : 1 + len(shape)] for row in headers]
    if len(shape) > _DIMS or any(row[0] != digest for row in headers):
        calls: list = [None] * get_world_size()
        torch_dist.all_gather_object(calls, (call, list(shape)))
        if len({call for call, _ in calls}) > 1:
            lines = "".join(
                f"\n  rank {rank}: {call} {shape or ''}".rstrip() for rank, (call, shape) in enumerate(calls)
            )
            raise RuntimeError(f"the ranks called different things, but all must call the same:{lines}")
        shapes = [shape for _, shape in calls]
    return shapes, table[:, len(header) :]


def _reduction_dtypes(dtype: torch.dtype, op: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtype to compute in, in which small numbers don't overflow, and the result's, as `all_reduce` has it."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64), dtype
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype, dtype
    if op == "mean":
        return torch.float64, torch.get_default_dtype()
    wide = torch.int64 if dtype.itemsize < 8 else dtype
    return wide, dtype if op in ("min", "max") and dtype != torch.bool else wide


def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """A new tensor with the sum (mean, min, max, product) over all ranks, on every rank; the input is untouched.

    Every rank must call it, with the same op, shape and dtype; otherwise RuntimeError on all, with what each sent.
    Any device; the result is on the input's.  Its dtype is the input's, but for integers as torch.sum and torch.mean
    have it: sums and products are int64 (of bool all results), means have the default float dtype.
    """
    if op not in _OPS:
        raise ValueError(f"op={op!r}: choose from {', '.join(_OPS)}")
    device = _comm_device()
    wide, dtype = _reduction_dtypes(tensor.dtype, op)
    if device is None:
        return _copy(tensor, tensor.device, dtype)
    result = _copy(tensor, device, wide)
    function, backends_op = _OPS[op]
    call = f"all_reduce {op} of {tensor.dtype} {list(tensor.shape)}"
    _, everyone = _check_same_call(call, data=result.flatten().view(torch.uint8))
    if result.nbytes <= _SMALL:
        result = function(everyone[:, : result.nbytes].view(wide), 0).view(tensor.shape)
    else:
        nan = None
        if op in ("min", "max") and wide.is_floating_point:  # gloo's minimum and maximum may drop a NaN
            nan = result.isnan().to(torch.uint8)
            torch_dist.all_reduce(nan, torch_dist.ReduceOp.MAX)
        torch_dist.all_reduce(result, backends_op)
        if nan is not None:
            result[nan.bool()] = math.nan
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
        function of (seed, epoch).  `set_epoch(epoch, skip=n)` leaves out this rank's first n: to go on in an epoch.
    pad: for training.  All ranks get equally many examples, a few of them twice where the number doesn't divide: a rank
        with one batch less would leave the others waiting.  False is for evaluation: every example exactly once.
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

    def _build_params_for_reducer(self) -> tuple:  # DDP calls this once: the parameters, as it will number them
        parameters, *rest = super()._build_params_for_reducer()
        names = {param: name for name, param in self.module.named_parameters()}
        self.names = [names[param] for param in parameters]
        return parameters, *rest

    def will_sync_module_buffers(self) -> bool:  # DDP asks this in every forward
        return self.training and torch.is_grad_enabled() and super().will_sync_module_buffers()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as problem:
            unused = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(problem))
            if not unused:
                raise
            names = ", ".join(self.names[int(index)] for index in unused[1].split())
            fixes = "let the loss use them, or freeze them (requires_grad_(False)) before prepare_ddp_model, or pass it"
            text = f"no gradient in the last step for {names}: {fixes} find_unused_parameters=True"
            raise RuntimeError(text) from problem

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


def no_sync(model: nn.Module, enabled: bool = True) -> AbstractContextManager:
    """For all micro-batches of a step but the last: forward and backward in it add up gradients, and average nothing.

    It is the `no_sync` of DistributedDataParallel, if enabled; with one process, where the model is not wrapped, it
    does nothing.  Every rank must enable it for the same backwards: those outside it are collectives.
    """
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    return model.no_sync() if enabled and wrapped else nullcontext()


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel or DataParallel: its state dict's names have no "module." in front."""
    return model.module if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) else model


# ------------------------------------------------------------------------------------------------- starting processes


def launch(worker_fn: Callable, *args: Any, nproc: int | None = None) -> Any:
    """Run `worker_fn(local_rank, world_size, *args)` once per device; returns what it returned on rank 0.

    Under a launcher, this process is already one of several: worker_fn is called here (and other ranks return None).
    Otherwise nproc (or NPROC) processes are started on this machine, by default one per visible GPU; with 1, worker_fn
    is called here.  They talk over loopback: nothing can be reached from outside.  Each gets its share of the CPU's
    cores, unless OMP_NUM_THREADS is set.

    The first process to fail ends all, and `launch` raises SystemExit with its error alone (exit code 1); in a notebook
    or shell RuntimeError with the same text.  SIGINT, SIGTERM and SIGHUP to this process end all of them with exit code
    130, 143 or 129; so does a process that ends itself with one of these codes.  Should this process be killed, they
    are, too.  SIGUSR1 prints where each rank is, and goes on; Ctrl-Z stops all of them until `fg`.
    """
    return launcher.run(worker_fn, args, nproc, finish=cleanup)


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """`parser.parse_args()` for a script that calls `launch`: with the flags --nproc and --backend, checked.

    Without a GPU the default is two processes.  What can't run ends here, with `parser.error`: before any process is
    started.  If there is a flag --batch-size, it is taken as the global one, of which each process must get a share.
    """
    return launcher.parse_args(parser)
