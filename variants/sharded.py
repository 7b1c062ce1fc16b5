"""What mnist_fsdp.py needs beside its idea: a whole model for evaluation, and who holds how much.

    evaluate(sharded.whole(model, Net()))             # with all parameters on every rank, so without a collective
    print_primary(sharded.memory(model, optimizer))   # a line for each rank

Every rank must call these functions, with a model that `torch.distributed.fsdp.fully_shard` has sharded.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

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


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A line for each rank: the bytes of parameters and optimizer state that it holds, beside those that DDP holds."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = torch.tensor([local_bytes(model.parameters()), local_bytes(states)])
    whole = sum(param.numel() * param.element_size() for param in model.parameters())  # a DTensor's numel is global
    lines = []
    for rank, (params, state) in enumerate(row.tolist() for row in dist.gather(held)):
        lines.append(f"rank {rank} holds {params} bytes of parameters (DDP: {whole}), {state} of optimizer state")
    return "\n".join(lines)
