# Copied from the project ddp-by-diff.  SPDX-License-Identifier: MIT
"""What a training script calls: rank, device, process group, collectives, sampler, DDP model, launch.

    import torch
    from torch.utils.data import DataLoader

    import distributed as dist                        # distributed.py, not torch.distributed

    def main_worker(local_rank, world_size, epochs):  # runs once per process; launch passes the first two
        dist.init_process_group()
        model = dist.prepare_ddp_model(Net().to(dist.get_device()))  # averages the gradients over all processes
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = dist.data_sampler(dataset)          # this process's share of the data
        loader = DataLoader(dataset, batch_size=64 // world_size, sampler=sampler)  # 64 in all processes together
        for epoch in range(epochs):
            sampler.set_epoch(epoch)                  # a different order in each epoch
            loss = train(model, loader, optimizer)    # you write Net, dataset and train, which returns a tensor
            loss = dist.reduce(loss)                  # the mean over all processes
            dist.print_primary(f"epoch {epoch}  loss {loss:.4f}")
        dist.cleanup()

    if __name__ == "__main__":
        dist.launch(main_worker, 10)

    python train.py                                   # one process per visible GPU; two without a GPU
    NPROC=3 CUDA_VISIBLE_DEVICES= python train.py     # three processes, on the CPU
    NPROC=2 DIST_BACKEND=gloo python train.py         # two processes that may share one GPU: slow, and right
    torchrun --nproc_per_node=2 train.py              # torchrun starts the processes; so do srun, and mpirun

Copy distributed_launcher.py, too: with it `launch` starts processes for `python train.py`, srun and mpirun are
understood, and missing ranks are named.  Without it this file is complete for one process, under torchrun, and under
every launcher that sets torch's variables.  Both files need Python 3.10, torch 2.4 and numpy.

A collective is a call in which all ranks exchange data: all_reduce, reduce, gather, sync_params, barrier, and also the
backward pass of a DDP model.  A rank waits in it until all others have called it.  So every rank must make the same
calls in the same order: none inside `if dist.is_primary():`.
"""

import hashlib
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import distributed as torch_dist
from torch import nn
from torch.utils.data import Dataset, DistributedSampler, Sampler

try:
    if __package__:
        from . import distributed_launcher as launcher
    else:
        import distributed_launcher as launcher
except ImportError as problem:
    if "'distributed_launcher'" not in str(problem):  # it is there, and lacks something, such as numpy
        raise
    launcher = None
if launcher:
    launcher.translate_variables()  # srun's and mpirun's, into torchrun's

# ---------------------------------------------------------------------------------------------- rank, device, print
# torchrun, `launch` and the translation above tell each process its place in environment variables.  On two machines
# with four GPUs each, and one process per GPU, WORLD_SIZE is 8.  RANK is 0 to 3 on the first machine and 4 to 7 on the
# second.  LOCAL_RANK is 0 to 3 on both.  Without these variables a process is the only one.


def get_rank() -> int:
    """This process's number among all: 0 to world size - 1."""
    return torch_dist.get_rank() if torch_dist.is_initialized() else int(os.environ.get("RANK", 0))


def get_world_size() -> int:
    """The number of processes on all machines together."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def get_local_rank() -> int:
    """LOCAL_RANK: this process's number among those on this machine.

    If it is not set: the rank modulo the number of GPUs, so a machine's ranks take its GPUs in turn; 0 without a GPU.
    """
    return int(os.environ.get("LOCAL_RANK", get_rank() % max(1, torch.cuda.device_count())))


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
    """`print` on rank 0 only, flushed at once.  Not a collective."""
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
    backend: the library that moves the data: "nccl" between GPUs, or "gloo", with which processes may share a GPU.
        None: DIST_BACKEND, or nccl with GPUs, else gloo.
    rank, world_size: leave them out if `launch`, torchrun, srun or mpirun starts your processes.  If you start them
        yourself, give them, and set MASTER_ADDR and MASTER_PORT.  init_process_group(rank, world_size) works, too.
        They become RANK and WORLD_SIZE until `cleanup`.  If RANK is already set, `rank` is ignored.
    timeout: seconds, or a timedelta (None: DIST_TIMEOUT, or 600 s), for joining and for each collective.  Joining:
        distributed_launcher.py names the missing ranks on stderr after 10 s, and in a TimeoutError when the time is up.
        A collective: when the time is up, gloo raises an error; NCCL ends the process, about a minute later.
    ValueError, in one line, if the variables contradict each other, or world_size contradicts WORLD_SIZE.
    """
    if isinstance(backend, int):
        backend, rank = None, backend
    if not torch_dist.is_initialized():
        _forget_group()  # torch's own destroy_process_group has ended the last group
    limit = get_timeout(timeout)
    backend = choose_backend(backend)
    if rank is not None or world_size is not None:
        for name, number in ("RANK", rank or 0), ("WORLD_SIZE", world_size or 1):
            if name not in os.environ:
                os.environ[name] = str(number)
                _set_by_hand.append(name)
    try:
        check_variables()
        if world_size not in (None, get_world_size()):
            raise ValueError(f"init_process_group: world_size is {world_size}, but WORLD_SIZE is {get_world_size()}")
        _join(backend, limit)
    except BaseException:
        if not torch_dist.is_initialized():
            _forget_group()
        raise


def _join(backend: str, limit: timedelta) -> None:
    rank, world_size, device = get_rank(), get_world_size(), get_device()
    options: dict = {"rank": rank, "world_size": world_size, "timeout": limit}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if needs_gpus(backend) and torch.__version__ >= (2, 7, 1):  # 2.6 and 2.7.0 hang with it (pytorch#153960)
        options["device_id"] = device  # connect at once, and to the right GPU
    torch_dist.init_process_group(backend, store=_meet(rank, world_size, limit), **options)
    barrier()  # without this, a rank that ends early closes connections that the others are still opening
    processes = "process" if world_size == 1 else "processes"
    print_primary(f"distributed: {world_size} {processes}, {backend}, {device.type}")


_set_by_hand: list[str] = []  # the variables that init_process_group has set


def _meet(rank: int, world_size: int, limit: timedelta) -> torch_dist.Store:
    """The store of a new group: a table, served by one process, in which the ranks leave their addresses.

    The store ends with the group, because the next group may have other processes, or another address.  torchrun and
    `launch` serve one table for a whole run, so the table counts the groups, and each group has its own part.
    """
    if world_size == 1:
        return torch_dist.HashStore()
    if launcher:
        table = launcher.open_store(rank, world_size, limit)
    else:
        table, *_ = next(torch_dist.rendezvous("env://", rank, world_size, timeout=limit))
    count = f"groups of rank {rank}"
    store = torch_dist.PrefixStore(f"group {table.add(count, 0)}", table)
    if launcher:
        launcher.wait_for_all_ranks(store, rank, world_size, limit)
        launcher.note_joined(table)
    table.add(count, 1)  # only when all ranks are here: a rank that tries once more looks in the same part
    return store


def choose_backend(backend: str | None = None) -> str:
    """The backend: the argument, or DIST_BACKEND, or nccl with GPUs, else gloo.  ValueError if it can't be used."""
    has_nccl = torch.cuda.device_count() > 0 and torch_dist.is_nccl_available()
    backend = (backend or os.environ.get("DIST_BACKEND") or ("nccl" if has_nccl else "gloo")).lower()
    names = [part.rpartition(":")[2] for part in backend.split(",")]  # torch's own way to have two: cpu:gloo,cuda:nccl
    if not has_nccl and any(map(needs_gpus, names)):
        raise ValueError(f"backend {backend} needs a visible CUDA GPU and a torch that was built with it: use gloo")
    if not all(torch_dist.is_backend_available(name) for name in names):
        raise ValueError(f"torch has no backend {backend} (DIST_BACKEND or an argument): choose nccl or gloo")
    return backend


def needs_gpus(backend: str) -> bool:
    """Whether the backend needs a GPU for each process: nccl does; torch 2.14 also has nccl2, nccl-lazy, ..."""
    return backend.startswith("nccl")


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SIZES = (  # other launchers put their number of processes into these
    "OMPI_COMM_WORLD_SIZE",  # Open MPI
    "PMI_SIZE",  # MPICH, Cray
    "MV2_COMM_WORLD_SIZE",  # MVAPICH
    "JSM_NAMESPACE_SIZE",  # IBM
    "FLUX_JOB_SIZE",
    "SLURM_STEP_NUM_TASKS",  # srun; a batch script is one process
)


def check_variables() -> None:
    """Check the launcher's variables: ValueError, in one line, if they are incomplete or contradict each other."""
    env = os.environ
    given = {name: env[name] for name in VARIABLES if name in env}
    if not given:
        for name in SIZES:
            if env.get(name, "1") != "1":  # each process would train alone
                raise ValueError(
                    f"{name} is {env[name]}, but RANK and WORLD_SIZE are not set: set them (and MASTER_ADDR, "
                    "MASTER_PORT), start with torchrun, or for srun and mpirun copy distributed_launcher.py here"
                )
        return
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_rank, local_size = int(given.get("LOCAL_RANK", 0)), int(given.get("LOCAL_WORLD_SIZE", world_size))
        is_right = 0 <= rank < world_size and 0 <= local_rank < local_size <= world_size
    except (KeyError, ValueError):
        is_right = False
    if not is_right:
        said = " ".join(f"{name}={text}" for name, text in given.items())
        raise ValueError(f"{said}: set RANK and WORLD_SIZE to this process's place, or unset {' '.join(given)}")
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if world_size > 1 and not (address and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(
            f"MASTER_ADDR={address} and MASTER_PORT={port} must say where rank 0 is: set them (mpirun over several "
            "machines: -x MASTER_ADDR=HOST -x MASTER_PORT=29500), or start with launch or torchrun"
        )


def get_timeout(timeout: float | timedelta | None = None) -> timedelta:
    """The limit for joining and for each collective, from seconds or a timedelta; None: DIST_TIMEOUT, or 600 s."""
    if timeout is None:
        timeout = os.environ.get("DIST_TIMEOUT") or 600
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError, OverflowError):
        seconds = 0
    if not 0.001 <= seconds <= 1e9:  # nan is refused, too
        raise ValueError(f"the timeout (or DIST_TIMEOUT) is {timeout}: give seconds greater than 0, such as 600")
    return timedelta(seconds=seconds)


def cleanup() -> None:
    """Leave the process group, if there is one.  `launch` does this when worker_fn has returned.

    While an exception is being handled it does nothing, if there are several processes: the other ranks may be inside
    a collective, and leaving would wait for them for ever (pytorch/torchtitan#1342).
    """
    if sys.exc_info()[1] is None or get_world_size() == 1:
        _leave_group()


def _leave_group() -> None:
    if torch_dist.is_initialized():
        # Gloo's threads need Python's lock to free their last tensors: let them have it, or leaving may hang
        # (pytorch#179291; seen with torch 2.4.1).
        time.sleep(0.02)
        torch_dist.destroy_process_group()
    _forget_group()


def _forget_group() -> None:
    """Unset the environment variables that init_process_group has set; count forward passes from 0 again."""
    global _passes
    _passes = 0
    while _set_by_hand:
        os.environ.pop(_set_by_hand.pop(), None)


# ------------------------------------------------------------------------------------------------------ collectives
# All ranks must make the same call, with the same op, dtypes and (except in gather) shapes; otherwise RuntimeError on
# all, with a table of what each rank called.  To find that out, each call first sends a small message; torch's own
# functions don't.  A small tensor travels in this message; a larger one follows in torch's own call.  If a function
# refuses a value, it does so after this message, on all ranks.  If a rank calls nothing, the others wait for it until
# the time-out; if it has ended, they report a lost connection.  No gradient flows through these functions.  With one
# process they need no process group.

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SUMMABLE = (*_FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64)  # nccl and gloo add up these
_DTYPES = (*_SUMMABLE, torch.int16, torch.bool)
_OPS = ("sum", "mean", "min", "max")


def all_reduce(tensor: torch.Tensor, op: str | torch_dist.ReduceOp = "sum") -> torch.Tensor:
    """Overwrite the tensor with the sum (or another op) over all ranks, on every rank; also returns it.

    op: "sum", "mean" (or "avg"), "min", "max", or ReduceOp.SUM, AVG, MIN, MAX.  A NaN on any rank is in the result.
    The dtype stays, so small dtypes may overflow.  TypeError for bool, int16 and the mean of integers: use `reduce`.
    """
    op = _op_name(op)
    rows = _check(f"all_reduce {op}", [tensor], is_written=True)
    _write(tensor, _reduce_in_place(tensor.detach(), op) if rows is None else _combine(rows, op))
    return tensor


def reduce(tensor: torch.Tensor, op: str | torch_dist.ReduceOp = "mean") -> torch.Tensor:
    """A new tensor with the mean over all ranks, the same on every rank: the number to print as "the loss".

    Not torch's reduce, which returns nothing and leaves the result on one rank.
    The mean of the ranks' means is right if their shares are equal.  In an evaluation they may not be: there reduce
    the sum and the count with op="sum", and divide then.
    op: as for `all_reduce`.  Computed in float64 or int64, so 10 MB of float32 take about 2.5 times as long as torch's
    all_reduce.  The result has the input's shape and device, and the dtype of a floating-point input.  For integers and
    bools a mean is float64, another op's result int64.
    """
    op = _op_name(op)
    rows = _check(f"reduce {op}", [tensor])
    is_float = tensor.is_floating_point()
    if rows is None:
        wide = torch.float64 if is_float or op == "mean" else torch.int64
        result = _reduce_in_place(tensor.detach().to(wide, copy=True), op)
    else:
        result = _combine(rows, op).to(tensor.device)
    return result.to(tensor.dtype) if is_float else result


def _combine(rows: torch.Tensor, op: str) -> torch.Tensor:
    """The sum (or another op) over the ranks' small tensors, [world size, *shape]: [*shape], float64 or int64."""
    rows = rows.to(torch.float64 if rows.is_floating_point() or op == "mean" else torch.int64)
    return {"sum": rows.sum, "mean": rows.mean, "min": rows.amin, "max": rows.amax}[op](0)


def _reduce_in_place(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The sum (or another op) over the ranks' large tensors, in their dtype and, if possible, this tensor's memory."""
    device = _comm_device()
    if device is None:
        return tensor
    data = tensor.to(device).resolve_neg().contiguous()
    is_extreme = op in ("min", "max")
    if is_extreme and data.is_floating_point():
        is_nan = data.isnan()  # the backends' min and max may drop a NaN
        torch_dist.all_reduce(is_nan.view(torch.uint8), torch_dist.ReduceOp.MAX)  # a view: changes is_nan
    torch_dist.all_reduce(data, getattr(torch_dist.ReduceOp, op.upper() if is_extreme else "SUM"))
    if is_extreme and data.is_floating_point():
        data.masked_fill_(is_nan, torch.nan)
    if op == "mean":  # gloo of torch 2.4 has no AVG
        data /= get_world_size()
    return data.to(tensor.device)


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if values.data_ptr() != tensor.data_ptr():  # if equal, the values are there already
        tensor.detach().copy_(values)


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order, on every rank: for torch.cat, or torch.stack if they are scalars.

    Not torch's gather, which returns nothing.  Here shapes may differ, even to zero rows, but not dtypes or numbers of
    dimensions.  The results are new, on the input's device.
    """
    _check("gather", [tensor], is_any_shape=True)
    mine = tensor.detach().cpu().clone()  # pickle would send the whole storage of a view
    parts = [mine] * get_world_size()
    if len(parts) > 1:
        torch_dist.all_gather_object(parts, mine)
    return [part.to(tensor.device) for part in parts]


def sync_params(params: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Copy rank 0's values into the tensors, in place: sync_params(model.parameters()), or model.buffers()."""
    params = [params] if isinstance(params, torch.Tensor) or not isinstance(params, Iterable) else list(params)
    _check("sync_params", params, is_written=True)
    device = _comm_device()
    if device is None:
        return
    for param in params:
        values = torch.empty(param.shape, dtype=param.dtype, device=device).copy_(param.detach())
        torch_dist.broadcast(values.view(-1).view(torch.uint8), 0)  # as bytes, so that every dtype works
        _write(param, values)


def barrier() -> None:
    """Wait until every rank has called it."""
    _check("barrier", [])  # the check is itself a message between all ranks


wait_for_everyone = barrier  # its name in joh-fischer/distributed-pytorch


def _op_name(op: Any) -> str:
    """An op's name in _OPS, from a name or torch's ReduceOp; for an unknown op a text that `_check` refuses."""
    name = str(getattr(op, "name", op)).lower()
    name = "mean" if name == "avg" else name
    return name if name in _OPS else f"op={op!r}"


def _comm_device() -> torch.device | None:
    """The device whose tensors the backend moves; None with one process.  ValueError without a process group."""
    if get_world_size() == 1:
        return None
    return get_device() if needs_gpus(torch_dist.get_backend()) else torch.device("cpu")


def _check(call: str, values: list, is_any_shape: bool = False, is_written: bool = False) -> torch.Tensor | None:
    """Check a call: on all ranks RuntimeError if their calls differ, TypeError or ValueError if the call is refused.

    call: the function's name, and the op if there is one.  With an op: returns all ranks' values, as `_compare` does.
    """
    op = call.partition(" ")[2]
    problems: list = [ValueError(f"{op}: choose from {', '.join(_OPS)}")] if op and op not in _OPS else []
    kinds = []
    for value in values:
        kind, problem = _describe(call, value, is_any_shape, is_written)
        kinds.append(kind)
        if problem:
            problems.append(TypeError(f"{call} {problem}"))
    said = f"{call} of {', '.join(kinds)}" if kinds else call
    if problems:
        _compare(f"{said} ({problems[0]})")
        raise problems[0]
    return _compare(said, values[0] if op else None)


def _describe(call: str, value: Any, is_any_shape: bool, is_written: bool) -> tuple[str, str]:
    """A description of the value, which must be equal on all ranks; why the function can't take the value, or ""."""
    name = type(value).__name__
    if not isinstance(value, torch.Tensor):
        hint = "pass its parameters() or buffers()" if isinstance(value, nn.Module) else "use torch.as_tensor"
        hint = "the .grad of an unused parameter? skip it on all ranks" if value is None else hint
        return name, f"takes tensors, not {name} ({hint})"
    if hasattr(value, "full_tensor"):
        return "DTensor", "can't take a DTensor: pass .full_tensor(), the whole, or .to_local(), this rank's part"
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # a class of another kind, such as masked
        return name, f"takes plain tensors, not {name}: pass one that holds its values"
    if value.layout != torch.strided or value.is_nested:
        return f"{value.dtype}", "takes dense tensors: pass .to_dense()"
    if value.is_meta or isinstance(value, nn.parameter.UninitializedTensorMixin):
        return f"{value.dtype}", "takes tensors with values: this one is on the device meta, or of a lazy layer"
    kind = f"{value.dtype} with {value.dim()} dimension(s)" if is_any_shape else f"{value.dtype} {list(value.shape)}"
    if value.is_quantized or (value.dtype not in _DTYPES and call != "sync_params"):  # which sends bytes
        return kind, f"takes floats, integers or bools, not {value.dtype}"
    function, _, op = call.partition(" ")
    if function == "all_reduce" and (value.dtype not in _SUMMABLE or (op == "mean" and not value.is_floating_point())):
        return kind, f"can't be kept in {value.dtype}: use dist.reduce(tensor, {op!r})"
    if is_written and torch._debug_has_internal_overlap(value) == 1:  # surely; then torch's copy_ refuses it
        return kind, "can't write to elements that share their memory (expand?): pass .contiguous()"
    return kind, ""


WARN_AFTER = 30  # seconds, if a rank waits so long for the others
_let_others_run = getattr(os, "sched_yield", lambda: time.sleep(0))  # Windows has none
_DIGEST = 16  # bytes
_MESSAGE = 8192  # bytes that each rank gets in a check: with two ranks a digest and 1,000 float32 numbers from each


def _compare(call: str, numbers: torch.Tensor | None = None) -> torch.Tensor | None:
    """Compare the ranks' calls: RuntimeError on all ranks, with a table of the calls, if they differ.

    The backends don't check: if 3 elements are added to 5, one rank may get garbage, and another may be killed.  The
    message has a hash of the call and, if they fit, the numbers; its length is always the same.  Returns all ranks'
    numbers, or None.  Two calls of one kind in a different order are not noticed: loss, accuracy; accuracy, loss.
    """
    device = _comm_device()
    if device is None:
        return None
    world_size = get_world_size()
    size = max(1, _MESSAGE // _DIGEST // world_size) * _DIGEST
    digest = row = hashlib.blake2b(call.encode(), digest_size=_DIGEST).digest()
    if fits := numbers is not None and 0 < numbers.nbytes <= size - _DIGEST:
        values = torch.empty(numbers.shape, dtype=numbers.dtype).copy_(numbers.detach())
        row += values.view(-1).view(torch.uint8).numpy().tobytes()
    mine = torch.frombuffer(bytearray(row.ljust(size) * world_size), dtype=torch.uint8).to(device)
    table = torch.empty_like(mine)  # a row from each rank: gloo's all-to-all takes two thirds of its all-gather's time
    _wait(torch_dist.all_to_all_single(table, mine, async_op=True), call)
    received = table.cpu().numpy().tobytes()
    rows = [received[start : start + len(row)] for start in range(0, len(received), size)]
    if all(row.startswith(digest) for row in rows):
        if not fits:
            return None
        values = bytearray(b"".join(row[_DIGEST:] for row in rows))
        return torch.frombuffer(values, dtype=numbers.dtype).view(world_size, *numbers.shape)
    calls = [call] * world_size
    torch_dist.all_gather_object(calls, call)
    lines = "".join(f"\n  rank {rank}: {called}" for rank, called in enumerate(calls))
    raise RuntimeError(f"the ranks called different things, but all must call the same:{lines}")


def _wait(work: torch_dist.Work, call: str) -> None:
    """Wait for a message, and warn after 30 s.  Not by work.wait(seconds): after this time NCCL ends the process.

    The loop polls, because Python handles no signals in work.wait(), and waking a thread takes longer than a small
    message.  In the first millisecond the loop doesn't sleep; later it sleeps 2 % of the time waited, at most 10 ms.
    """
    started, is_said = time.monotonic(), False
    while not work.is_completed():
        waited = time.monotonic() - started
        if waited > WARN_AFTER and not is_said:
            is_said = True
            hint = "under plain python Ctrl-C shows where each rank stands"
            _warn(f"rank {get_rank()} has waited for {WARN_AFTER} s in {call}{_passes_in_words()}: {hint}")
        if waited < 1e-3:
            _let_others_run()
        else:
            time.sleep(min(waited / 50, 0.01))
    work.wait()  # raises the error, if there was one


def _warn(text: str) -> None:
    """Print a warning that names the program's line, not a line of this file or of torch."""
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
        `set_epoch(epoch, skip=n)` skips this rank's first n examples, to resume in the middle of an epoch.
    pad: of 10 examples on 4 ranks each rank gets 3; two come twice.  That is for training: a rank with fewer steps
        would leave the others waiting in backward().  With False the ranks get 3, 3, 2, 2, and every example comes
        exactly once: for evaluation.  Then ValueError if there are fewer examples than ranks.
    seed: the same on all ranks, or their shares overlap.
    drop_last: instead of giving two examples twice, leave two out.  (DataLoader's drop_last leaves out a batch.)
    """
    if isinstance(dataset, Sampler):
        raise TypeError(
            f"data_sampler takes a data set, not a {type(dataset).__name__}: draw the same indices on all ranks (with "
            "a generator of the same seed), and give the DataLoader equal shares of them: "
            "sampler=indices[: len(indices) // world_size * world_size][rank::world_size]"
        )
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
    """torch's DistributedSampler, which can start in the middle of an epoch, and warns of a forgotten set_epoch."""

    passes = 0  # how often this epoch was read to its end
    skip = 0

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        if skip < 0:
            raise ValueError(f"set_epoch: skip is {skip}: it must be 0 or more examples")
        super().set_epoch(epoch)
        self.passes, self.skip = 0, skip

    def __len__(self) -> int:
        return max(0, self.num_samples - self.skip)

    def __iter__(self) -> Iterator[int]:
        if self.passes == 1 and self.shuffle and is_primary():
            _warn(
                "call sampler.set_epoch(epoch) before each epoch: this epoch has the last epoch's order "
                "(for an evaluation make the sampler with shuffle=False)"
            )
        yield from list(super().__iter__())[self.skip :]
        self.passes += 1


def prepare_ddp_model(
    model: nn.Module, device_ids: Any = None, sync_bn: bool = False, sync_buffers: bool = True, **kwargs: Any
) -> nn.Module:
    """The model as torch's DistributedDataParallel, on GPUs and on the CPU; the model itself with one process.

    Each rank has a copy.  All start from rank 0's weights, and backward() averages the gradients, so they stay equal.
    Every rank must call it, with the model on `get_device()`.  The optimizer may be made before or after it.
    sync_bn: BatchNorm over the global batch, on CUDA only.  Without it each process normalises by its own share.
    sync_buffers: buffers are tensors that are saved but not trained, such as BatchNorm's averages.  Each rank computes
        its own.  True: DDP copies rank 0's to all ranks in each forward pass of the training, and in the first one of
        an evaluation under torch.no_grad(), for which each rank therefore needs a batch.  False: no such copies; call
        `sync_params(model.buffers())` before each evaluation.
    kwargs go to DistributedDataParallel (find_unused_parameters=True, ...).  device_ids is ignored.
    """
    if get_world_size() == 1:
        return model
    if sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if not sync_buffers:
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # since torch 2.13
        kwargs[name] = False
        sync_params(model.buffers())  # at least once: broadcast_buffers=False would leave that out, too
    is_on_gpu = any(param.is_cuda for param in model.parameters())
    model = nn.parallel.DistributedDataParallel(model, [get_device()] if is_on_gpu else None, **kwargs)
    model.register_forward_pre_hook(_count_pass)
    return model


_passes = 0  # the forward passes of DDP models that this rank has begun in training


def _count_pass(model: nn.Module, inputs: tuple) -> None:
    """Count a forward pass, for the report of a hang: a rank that has one batch less has made one pass less."""
    global _passes
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _passes += 1
        if launcher:
            launcher.note_progress(_passes_in_words())


def _passes_in_words() -> str:
    return f", after {_passes} forward passes" if _passes else ""


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile; the names in its state dict don't begin with "module."."""
    wrappers = [nn.parallel.DistributedDataParallel, nn.DataParallel]
    if dynamo := sys.modules.get("torch._dynamo"):  # torch.compile imports it
        wrappers.append(dynamo.OptimizedModule)
    while isinstance(model, tuple(wrappers)):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


# ----------------------------------------------------------------------------------------------------------- launch


def launch(worker_fn: Callable, *args: Any, nproc: int | None = None) -> Any:
    """Run `worker_fn(local_rank, world_size, *args)` once per process; returns what it returned on rank 0.

    Starts nproc (or NPROC) processes on this machine, by default one per visible GPU, or two without a GPU.  With one
    process, and under torchrun, srun and mpirun (nproc is ignored there), worker_fn is called in this process.
    The first started process that fails ends the run: SystemExit with its error; RuntimeError in a notebook, in a
    thread and in a process of multiprocessing.
    The processes are forked where that is safe, else spawned: then each imports the program anew.  So set what
    worker_fn needs (a default dtype, globals) inside it, or pass it.  Files that it leaves open are written, and atexit
    functions that it registers run, unless it is killed because another rank has failed.  It must close files that
    buffer in another way (gzip, zip, shelve).
    `launch` changes no random numbers: torch's, Python's and numpy's go on in each rank where they are in this process.
    So a seed that was set before holds in every rank, as under torchrun.  (Without a seed these ranks begin with equal
    random numbers, torchrun's with different ones.)  With one seed all ranks also have the same dropout masks.  For
    different masks seed again, after the model and random_split:  torch.manual_seed(seed + dist.get_rank())
    """
    count = count_processes(nproc)
    if count == 1 or "WORLD_SIZE" in os.environ:
        return _call(worker_fn, args)
    if launcher is None:
        _refuse(
            f"to start {count} processes, copy distributed_launcher.py beside distributed.py; "
            f"or type torchrun --nproc_per_node={count} {sys.argv[0]}"
        )
    return launcher.run(_call, (worker_fn, args, True), count)


def count_processes(nproc: int | None = None) -> int:
    """How many processes `launch(..., nproc=nproc)` runs; under a launcher its world size.

    If they can't run, the program ends here, with one line on stderr and exit code 2, or with RuntimeError.
    """
    gpus = torch.cuda.device_count()
    count = str(os.environ.get("NPROC") or gpus or 2) if nproc is None else str(nproc)
    try:
        check_variables()
        backend = choose_backend()
        get_timeout()
        if launcher:
            launcher.read_grace()
    except ValueError as problem:
        _refuse(str(problem))
    if "WORLD_SIZE" in os.environ:
        return get_world_size()
    if not count.isdecimal() or int(count) < 1:
        _refuse(f"nproc (or NPROC) is {count}: start at least 1 process")
    if needs_gpus(backend) and int(count) > gpus:
        _refuse(
            f"{count} processes, but {gpus} visible GPU(s): start {gpus}, hide the GPUs (CUDA_VISIBLE_DEVICES=), or "
            "let the processes share them (DIST_BACKEND=gloo)"
        )
    return int(count)


def _call(worker_fn: Callable, args: tuple, is_watched: bool = False) -> Any:
    """Call worker_fn in this process; leave the process group after it.  `launch` watches the ranks that it starts."""
    try:
        result = worker_fn(get_local_rank(), get_world_size(), *args)
    except BaseException as error:
        if not is_watched and _passes and hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(f"(rank {get_rank()}{_passes_in_words()})")
        cleanup()  # with one process a notebook's cell can then be run again
        raise
    _leave_group()  # not cleanup: `launch` may have been called inside `except`
    return result if is_primary() else None


def _refuse(problem: str) -> NoReturn:
    """End the program with one line on stderr and exit code 2; RuntimeError where `launch` raises it."""
    if launcher.must_go_on() if launcher else hasattr(sys, "ps1"):
        raise RuntimeError(problem)
    print(f"distributed: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)
