"""What mnist_fsdp.py needs besides its idea: the whole model for the evaluation, and the memory that each rank needs.

    evaluate(sharded.whole(model, Net()))             # every rank has all parameters, so no collective is needed
    print_primary(sharded.memory(model, optimizer))   # a line for each rank

Every rank must call these functions, with a model that `torch.distributed.fsdp.fully_shard` has sharded.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

import distributed as dist

DTYPES = ("float32", "bfloat16")  # float16 would need a GradScaler


def check_torch(error: Callable[[str], None]) -> None:
    """If this torch is too old, call `error`, such as argparse's `parser.error`, with one line.

    Torch 2.6 has no fully_shard on the CPU.  In 2.7 and 2.8, gloo adds the gradients up although FSDP asks for their
    average, so training is wrong, without an error (pytorch#162338).
    """
    if torch.__version__ < (2, 9):
        error(f"FSDP needs torch 2.9 or newer here, and this is torch {torch.__version__}: upgrade it")


def whole(model: nn.Module, plain: nn.Module) -> nn.Module:
    """Return `plain`, which is not sharded, with all parameters of the model and this rank's buffers, for evaluation.

    The forward pass of a sharded model gathers parameters, so it is a collective, and a rank with fewer batches than
    the others would make them wait forever.  The forward pass of `plain` is not a collective.
    """
    # fully_shard has split each parameter along its first dimension; to_local returns this rank's shard.
    state = model.state_dict()
    for name, value in state.items():
        if hasattr(value, "to_local"):
            state[name] = torch.cat(dist.gather(value.to_local()))
    plain.load_state_dict(state, assign=True)  # uses the gathered tensors themselves, so there is no second copy
    return plain


def local_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of these tensors on this rank; a sharded tensor (DTensor) counts with this rank's shard."""
    found = [tensor for tensor in tensors if torch.is_tensor(tensor)]
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in found)


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a line for each rank: its bytes of parameters (compared with DDP's) and of optimizer state."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = torch.tensor([local_bytes(model.parameters()), local_bytes(states)])
    whole = sum(param.numel() * param.element_size() for param in model.parameters())  # a DTensor's numel is global
    lines = []
    for rank, (params, state) in enumerate(row.tolist() for row in dist.gather(held)):
        lines.append(f"rank {rank} holds {params} bytes of parameters (DDP: {whole}), {state} of optimizer state")
    return "\n".join(lines)
