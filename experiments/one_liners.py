"""What one more line of torch does, tried: activation checkpointing, HSDP, communication hooks, join.

    python -m experiments.one_liners      # writes experiments/results/one_liners.md; seconds; 2 and 4 processes

Everything is compared with DDP on the same batches.  All figures but the distances are counted: they are the same on
each machine.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed as torch_dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.checkpoint import checkpoint

import distributed as dist
from experiments import measured
from variants import sharded

WIDTH, BLOCKS, BATCH, CLASSES, STEPS = 64, 2, 32, 4, 100
HEAD = ["what", "processes", "what was counted", "with DDP alone", "with the line"]


class Net(nn.Module):
    """BLOCKS of three layers; the activations in a block can be computed again, in backward, instead of being kept."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.block() for _ in range(BLOCKS))
        self.recompute = recompute

    def block(self) -> nn.Module:
        return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


def batches(count: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share: the target is the largest of CLASSES linear functions of the input."""
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    matrix = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(0))
    for _ in range(count):
        x = torch.randn(BATCH, WIDTH, generator=random)
        yield x, (x @ matrix).argmax(1)


def train(model: nn.Module, count: int = STEPS) -> float:
    """The mean loss of the last ten steps, over all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    losses = []
    for x, y in batches(count):
        losses.append(F.cross_entropy(model(x), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return dist.reduce(torch.stack(losses[-10:]).detach().mean()).item()


def weights(model: nn.Module) -> torch.Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def ddp_weights() -> torch.Tensor:
    model = dist.prepare_ddp_model(Net())
    train(model)
    return weights(model)


def distance(model: nn.Module) -> str:
    """From DDP, on any rank."""
    return f"{dist.reduce((weights(model) - ddp_weights()).abs().max(), 'max'):.1g}"


# ------------------------------------------------------------------------------------ each returns rows of the table


def kept_for_backward(model: nn.Module) -> int:
    """The bytes of activations that the forward pass keeps; the parameters don't count."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, y = next(batches())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model(x), y)
    del loss  # until here all of it is kept, so no address is used twice
    return sum(kept.values())


def checkpointing() -> list[list[str]]:
    kept = [f"{kept_for_backward(Net(recompute)) / 1024:.0f} KiB" for recompute in (False, True)]
    model = dist.prepare_ddp_model(Net(recompute=True))
    train(model)
    name = "activation checkpointing"
    return [[name, "2", "activations kept for backward", *kept], [name, "2", "max abs(dw)", "0", distance(model)]]


def hsdp() -> list[list[str]]:
    mesh = torch_dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    whole = sharded.local_bytes(model.parameters())
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    train(model)
    held = sharded.local_bytes(model.parameters())
    rows = [["HSDP, 2 x 2", "4", "bytes of parameters on a rank", str(whole), str(held)]]
    return [*rows, ["HSDP, 2 x 2", "4", "max abs(dw)", "0", distance(model)]]


def reduced_bytes(model: nn.Module) -> tuple[float, float]:
    """Train; the bytes that are given to all_reduce in each step, and the last loss."""
    sizes, right = [], torch_dist.all_reduce

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        sizes.append(tensor.nbytes)
        return right(tensor, *args, **kwargs)

    torch_dist.all_reduce = counted  # the hooks call it by this name
    try:
        loss = train(model)
    finally:
        torch_dist.all_reduce = right
    return (sum(sizes) - 8) / STEPS, loss  # 8: train's own, of the loss in float64


def hooks() -> list[list[str]]:
    power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    kinds: dict[str, tuple[object, Callable]] = {
        "fp16_compress_hook": (None, default_hooks.fp16_compress_hook),
        "bf16_compress_hook": (None, default_hooks.bf16_compress_hook),
        "powerSGD_hook, rank 4": (power, powerSGD_hook.powerSGD_hook),
    }
    plain = dist.prepare_ddp_model(Net())
    plain.register_comm_hook(None, default_hooks.allreduce_hook)  # what DDP does without a hook
    usual, usual_loss = reduced_bytes(plain)
    rows = []
    for name, (state, hook) in kinds.items():
        model = dist.prepare_ddp_model(Net())
        model.register_comm_hook(state, hook)
        found, loss = reduced_bytes(model)
        rows.append([name, "2", "bytes reduced per step", f"{usual:.0f}", f"{found:.0f}"])
        rows.append([name, "2", f"loss after {STEPS} steps", f"{usual_loss:.3f}", f"{loss:.3f}"])
    return rows


def join() -> list[list[str]]:
    """Rank 1 has half as many batches: without join, rank 0 would wait for it."""
    model = dist.prepare_ddp_model(Net())
    mine = STEPS // (1 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps = 0
    with model.join():
        for x, y in batches(mine):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    found = ", ".join(str(of_rank.item()) for of_rank in dist.gather(torch.tensor(steps)))
    apart = torch.stack(dist.gather(weights(model)))
    apart = f"{(apart - apart[0]).abs().max():g}"
    rows = [["model.join()", "2", "steps of ranks 0, 1", "waits for ever", found]]
    return [*rows, ["model.join()", "2", "difference of the ranks' weights", "-", apart]]


def worker(local_rank: int, world_size: int) -> list[list[str]]:
    dist.init_process_group(backend="gloo")
    torch.set_num_threads(1)
    rows = []
    for way in (hsdp,) if world_size == 4 else (checkpointing, hooks, join):
        rows += way()
    dist.cleanup()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=measured.RESULTS, help="(default: experiments/results)")
    args = parser.parse_args()
    rows = [HEAD, *dist.launch(worker, nproc=2), *dist.launch(worker, nproc=4)]
    text = measured.table(rows) + f"\ntorch {torch.__version__}, gloo, on the CPU.\n"
    measured.write(args.output / "one_liners.md", text.encode())
    print(text, end="")


if __name__ == "__main__":
    main()
