"""What mnist_fsdp.py needs beside its idea: a whole model for evaluation, a checkpoint, and who holds how much.

    evaluate(sharded.whole(model, Net()))             # with all parameters on every rank, so without a collective
    sharded.save("model.pt", model, optimizer)        # one file with the full state, whatever the number of processes
    sharded.load("model.pt", model, optimizer)

Every rank must call these functions, with a model that `torch.distributed.fsdp.fully_shard` has sharded.
"""

import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import checkpoint
import distributed as dist

DTYPES = ("float32", "bfloat16")  # float16 would need a GradScaler


def check_torch(error: Callable[[str], None]) -> None:
    """Call `error` with one line (argparse's `parser.error`, say), if this torch is too old.

    2.6 has no fully_shard on the CPU.  In 2.7 and 2.8 gloo adds the gradients up where FSDP asks for their average, and
    says nothing (pytorch#162338): training is wrong.
    """
    if torch.__version__ < (2, 9):
        error(f"FSDP on the CPU is right since torch 2.9, and this is {torch.__version__}: upgrade torch")


def whole(model: nn.Module, plain: nn.Module) -> nn.Module:
    """`plain`, which is not sharded, with all of the model's parameters and this rank's buffers: for evaluation.

    The forward pass of a sharded model gathers parameters: it is a collective, and a rank with fewer batches than the
    others would make them wait for ever.  That of `plain` is none.
    """
    # fully_shard has split each parameter along its first dimension; to_local is this rank's share.
    state = model.state_dict()
    for name, value in state.items():
        if hasattr(value, "to_local"):
            state[name] = torch.cat(dist.gather(value.to_local()))
    plain.load_state_dict(state, assign=True)  # the gathered tensors themselves, on their device: no second copy
    return plain


def local_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """The bytes of these tensors on this rank: of a sharded tensor (DTensor) the rank's share."""
    found = [tensor for tensor in tensors if torch.is_tensor(tensor)]
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in found)


def peak_memory() -> int:
    """The largest memory that this process has used so far, in bytes: on its GPU, or without one in main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A line for each rank: the bytes of parameters and optimizer state that it holds, beside those that DDP holds."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = local_bytes(model.parameters()), local_bytes(states), peak_memory()
    whole = sum(param.numel() * param.element_size() for param in model.parameters())  # a DTensor's numel is global
    lines = [
        f"rank {rank} holds {params} bytes of parameters (DDP: {whole}), {state} of optimizer state; "
        f"peak memory {peak / 2**20:.0f} MiB"
        for rank, (params, state, peak) in enumerate(row.tolist() for row in dist.gather(torch.tensor(held)))
    ]
    return "\n".join(lines)


def save(file: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gather the full state on rank 0, which writes it: {"model": ..., "optimizer": ...}, by parameter names.

    An unsharded model takes it as it is: `model.load_state_dict(torch.load(file)["model"])`.  The file appears at
    once, complete.  Raises CheckpointError on rank 0 if it can't be written.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    if dist.is_primary():
        checkpoint.write(Path(file), state)
    dist.barrier()  # whoever reads it next finds it


def load(file: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 reads what `save` has written, by any number of processes; each rank gets its share of it."""
    state = {"model": {}, "optimizer": {}}
    if dist.is_primary():
        state = torch.load(file, map_location="cpu", weights_only=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # Not set_state_dict: it takes an empty model state, as the other ranks have it, to mean that there is none to load.
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
