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
    launcher.plan(1, backend)  # ValueError if this process can't use the backend
    if checked:
        torch_dist.set_debug_level(torch_dist.DebugLevel.DETAIL)
    options: dict = {"rank": world.rank, "world_size": world.world_size}
    options["timeout"] = timedelta(seconds=rendezvous.seconds("DIST_TIMEOUT"))  # of each collective
    gpu = ""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":  # one process per card; torch 2.4 doesn't tell which card it is
        gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        if torch.__version__ >= (2, 7, 1):  # 2.6 and 2.7.0 hang with it (pytorch#153960)
            options["device_id"] = device  # connect at once, and to the right GPU
    store = rendezvous.meet(world, gpu, timeout)
    torch_dist.init_process_group(backend, store=store, **options)
    rendezvous.wait_for_all(store, world, timeout)
    processes = "process" if world.world_size == 1 else "processes"
    print_primary(f"distributed: {world.world_size} {processes}, {backend}, {device.type}")


def cleanup() -> None:
    """Leave the process group, if there is one.

    With several processes it does nothing while an exception is being raised: the other ranks may be inside a
    collective, and leaving would wait for them for ever (pytorch/torchtitan#1342).
    """
    global _outer_error
    raised = sys.exc_info()[1]
    if not torch_dist.is_initialized() or (get_world_size() > 1 and raised not in (None, _outer_error)):
        return
    # Gloo's threads need Python to let go of their last tensors: too late, that aborts or hangs it (pytorch#179291).
    for _ in range(20):  # on a busy machine each of these sleeps is longer
        time.sleep(0.001)
    torch_dist.destroy_process_group()
    _outer_error = None


_OPS = {"sum": torch.sum, "mean": torch.sum, "min": torch.amin, "max": torch.amax, "product": torch.prod}
_HEADER = 528  # bytes: a hash, and the sizes of at most 64 dimensions, as torch's operations take no more
_SMALL = 512  # bytes: a tensor that is no larger travels with the header, and needs no collective of its own


def _comm_device() -> torch.device | None:
    """The device that the backend moves tensors on; None in a world of one.  Without a process group ValueError."""
    if get_world_size() == 1:
        return None
    return get_device() if torch_dist.get_backend() == "nccl" else torch.device("cpu")


def _copy(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor as the backends need it: contiguous, and no lazy conjugate or negative of another one."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device).copy_(tensor.detach())


def _check_same_call(call: str, shape: Iterable[int] = (), small: torch.Tensor | None = None) -> tuple[list, list]:
    """The ranks' shapes and small data if all make the same call; else RuntimeError on all, with a table of the calls.

    The backends don't check: gloo adds 3 elements to 5 and returns garbage.  It costs one all-gather of a message of
    fixed size: a hash of `call`, the shape (only its length must agree) and small, [at most _SMALL] uint8, padded.
    """
    digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "big")
    header = torch.tensor([digest, *shape]).view(torch.uint8)
    message = torch.zeros(_HEADER + _SMALL, dtype=torch.uint8, device=_comm_device())
    message[: len(header)] = header
    if small is not None:
        message[_HEADER : _HEADER + len(small)] = small
    table = message.new_empty(get_world_size(), len(message))
    torch_dist.all_gather(list(table), message)
    headers = table[:, : len(header)].contiguous().view(torch.int64).tolist()
    if any(others != digest for others, *_ in headers):
        calls = _exchange("the calls", torch.tensor(list(call.encode()), dtype=torch.uint8))
        lines = "".join(f"\n  rank {rank}: {bytes(called.tolist()).decode()}" for rank, called in enumerate(calls))
        raise RuntimeError(f"the ranks called different things, but all must call the same:{lines}")
    return [shape for _, *shape in headers], list(table[:, _HEADER:])


def _exchange(call: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors, in rank order, on the input's device; only their shapes may differ."""
    device = _comm_device()
    if device is None:
        return [_copy(tensor, tensor.device)]
    data = _copy(tensor, device).flatten().view(torch.uint8)
    shapes, rows = _check_same_call(call, tensor.shape, data if len(data) <= _SMALL else None)
    sizes = [torch.Size(shape).numel() * tensor.element_size() for shape in shapes]
    if max(sizes) > _SMALL:
        padded = nn.functional.pad(data, (0, max(sizes) - len(data)))  # the backends gather equal sizes only
        rows = [torch.empty_like(padded) for _ in shapes]
        torch_dist.all_gather(rows, padded)
    parts = [row[:size].view(tensor.dtype).view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]
    return [part.to(tensor.device, copy=True) for part in parts]


def _reduction_dtypes(dtype: torch.dtype, op: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtype to compute in, in which small numbers don't overflow, and the result's, as `all_reduce` has it."""
    if dtype.is_complex or dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32), dtype
    if op == "mean":
        return torch.float64, torch.get_default_dtype()
    wide = torch.int64 if dtype.itemsize < 8 else dtype
    return wide, dtype if op in ("min", "max") and dtype != torch.bool else wide


def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """A new tensor with the sum (mean, min, max, product) over all ranks, on every rank; the input is untouched.

    Every rank must call it, with the same op, shape and dtype; otherwise RuntimeError on all, with what each sent.
    The result is on the input's device.  It has the input's dtype; but of integers sums and products are int64 (of bool
    all results), as torch.sum has it, and means have the default float dtype.
    """
    if op not in _OPS:
        raise ValueError(f"op={op!r}: choose from {', '.join(_OPS)}")
    wide, dtype = _reduction_dtypes(tensor.dtype, op)
    call = f"all_reduce {op} of {tensor.dtype} {list(tensor.shape)}"
    device = _comm_device()
    if device is not None and tensor.nbytes > _SMALL and op in ("sum", "mean"):
        result = _copy(tensor, device, wide)
        _check_same_call(call)
        torch_dist.all_reduce(result)
    else:  # gloo's own minimum may drop a NaN; torch's doesn't
        result = _OPS[op](torch.stack(_exchange(call, tensor.to(wide))), 0)
    if op == "mean":
        result = result / get_world_size()
    return result.to(tensor.device, dtype)


def reduce(tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
    """`all_reduce` that averages by default: what a caller prints as "the loss" is the mean over the ranks."""
    return all_reduce(tensor, op)


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order, on every rank: for torch.cat (torch.stack if they have no dimension).

    Every rank must call it.  Shapes may differ, even to zero rows; if dtypes or numbers of dimensions do, RuntimeError
    on all ranks.  Any dtype and device; the results are on the input's device.
    """
    return _exchange(f"gather of {tensor.dtype} with {tensor.dim()} dimension(s)", tensor)


def sync_params(params: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors, in place, by rank 0's.  Every rank must pass as many, of the same shapes and dtypes."""
    device = _comm_device()
    if device is None:
        return
    params = [param.detach() for param in params]
    _check_same_call(f"sync_params of {[(param.dtype, *param.shape) for param in params]}")
    for param in params:
        values = _copy(param, device)
        torch_dist.broadcast(values.flatten().view(torch.uint8), 0)  # gloo of torch 2.4 knows no complex numbers
        param.copy_(values)


def barrier() -> None:
    """Wait until every rank has called it."""
    if _comm_device() is not None:
        _check_same_call("barrier")


wait_for_everyone = barrier


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
            warnings.warn("call sampler.set_epoch(epoch) first: this epoch repeats the last one's order", stacklevel=2)
        return iter(list(super().__iter__())[self.skip :])


def data_sampler(
    dataset: Dataset, distributed: bool | None = None, shuffle: bool = True, pad: bool = True, seed: int = 0
) -> DistributedSampler | None:
    """This rank's share of the data set, as a sampler for DataLoader.  None (use none) if not distributed.

    distributed: None means: if there is more than one process.  True gives a sampler for a world of one, too.
    shuffle: a new order each epoch, a function of (seed, epoch), if `sampler.set_epoch(epoch)` is called before each.
        `set_epoch(epoch, skip=n)` leaves out this rank's first n examples: to go on in the middle of an epoch.
    pad: for training.  All ranks get equally many examples, a few of them twice where the number doesn't divide: a rank
        with one batch less would leave the others waiting.  False is for evaluation: every example exactly once.
    """
    if distributed is None:
        distributed = get_world_size() > 1
    return _Sampler(dataset, shuffle, pad, seed) if distributed else None


class _DDP(nn.parallel.DistributedDataParallel):
    """DistributedDataParallel whose evaluation is exact and can't hang.

    torch's broadcasts rank 0's buffers (BatchNorm's running averages) in every forward, in evaluation too, so ranks
    with different numbers of batches wait for ever.  Here `eval()` does it, once.
    """

    def will_sync_module_buffers(self) -> bool | None:  # DDP asks this in every forward
        return self.sync_buffers and self.training and torch.is_grad_enabled() and super().will_sync_module_buffers()

    def train(self, mode: bool = True) -> "_DDP":
        if self.training and not mode and self.modules_buffers and self.sync_buffers is not False:
            if self.process_group.size() == get_world_size():
                _check_same_call("eval() of a DDP model")
            self._sync_buffers()  # DDP's: in its group, and without what it was told to ignore
        return super().train(mode)


def prepare_ddp_model(model: nn.Module, device_ids: Any = None, sync_bn: bool = False, **kwargs: Any) -> nn.Module:
    """The model as DistributedDataParallel, on GPUs and on the CPU; the model itself with one process.

    Every rank must call it, with the model on `get_device()`; all start from rank 0's weights.  `eval()` is then a
    collective, too: it brings rank 0's buffers to all ranks, unless broadcast_buffers=False is passed.
    sync_bn: BatchNorm over the global batch, on CUDA only.  Without it each process normalises by its own share.
    kwargs go to DistributedDataParallel (find_unused_parameters=True, ...); device_ids need not be given.
    """
    if _comm_device() is None:
        return model
    device = next(model.parameters()).device
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if sync_bn else model
    level = torch_dist.get_debug_level()
    torch_dist.set_debug_level(torch_dist.DebugLevel.INFO)  # errors then name the parameters without a gradient
    if level == torch_dist.DebugLevel.DETAIL:  # DDP on a checked group crashes torch 2.15: a plain one
        limit = timedelta(seconds=rendezvous.seconds("DIST_TIMEOUT"))
        kwargs.setdefault("process_group", torch_dist.new_group(timeout=limit))
    model = _DDP(model, [device] if device.type == "cuda" else None, **kwargs)
    # None: by eval() alone, as BatchNorm doesn't read its buffers in training.  True: in each step, too.  False: never.
    others = any(m._buffers and not isinstance(m, nn.modules.batchnorm._NormBase) for m in model.modules())
    model.sync_buffers = kwargs.get("broadcast_buffers", kwargs.get("forward_sync_buffers", others or None))
    torch_dist.set_debug_level(level)
    return model


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile: its state dict's names have no "module." in front."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def launch(worker_fn: Callable, *args: Any, nproc: int | None = None) -> Any:
    """Run `worker_fn(local_rank, world_size, *args)` once per device; returns what it returned on rank 0.

    Starts nproc (or NPROC) processes on this machine, by default one per visible GPU.  Under a launcher, or with one,
    worker_fn is called here.  The first to fail ends all: SystemExit with its error, in a notebook RuntimeError.
    """
    return launcher.run(worker_fn, args, nproc, finish=cleanup)


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """`parser.parse_args()` with --nproc (without a GPU: 2) and --backend; what can't run is a `parser.error`."""
    return launcher.parse_args(parser)
