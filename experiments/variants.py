"""What each variant of mnist_ddp.py computes, and the bytes that it keeps on a rank: the table of docs/results.md.

    python -m experiments.variants                                # prints the table: about 5 minutes
    python -m experiments.variants mnist_zero mnist_fsdp          # only these
    python -m experiments.variants --save                         # writes it to experiments/results/, too

Two processes, 3 epochs of synthetic digits.  The bytes are those of the tensors after the first step, before the
gradients are freed; of two ranks the larger number.  Nothing in the table depends on the speed of the machine.
"""

import argparse
import contextlib
import importlib
import io
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import distributed as dist
from experiments import measured

VARIANTS = {  # module: flags
    "mnist_ddp": [],
    "variants.mnist_by_hand": [],
    "variants.mnist_overlap": [],
    "variants.mnist_zero": [],
    "variants.mnist_accumulate": ["--accumulate", "4"],
    "variants.mnist_fsdp": [],
    "variants.mnist_tensor_parallel": [],
    "variants.mnist_pipeline": [],
    "variants.mnist_local_sgd": ["--every", "8"],
    "variants.mnist_compile": [],
}
HEAD = ["program", "loss", "test accuracy, %", "parameters, bytes", "gradients, bytes", "optimizer state, bytes"]


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """On this rank.  Tensors that share their memory count once; of a sharded tensor only this rank's share counts."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors if tensor is not None]
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(memory.values())


def bytes_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Of parameters, gradients and the optimizer's state, [3] int64."""
    parameters = list(model.parameters())
    stepped = optimizer.param_groups[0]["params"]  # the same, but for ZeRO-1: its slice of them
    gradients = [tensor.grad for tensor in (*parameters, *stepped)]
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return torch.tensor([bytes_of(parameters), bytes_of(gradients), bytes_of(state)])


def worker(local_rank: int, world_size: int, module: str, args: argparse.Namespace) -> tuple[str, list[int]]:
    """One rank: runs the script's main.  Returns what it has printed, and the bytes after the first step."""
    script = importlib.import_module(module)
    train, held = script.train, []

    def train_and_count(model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, *rest: Any) -> Any:
        def count(*_: Any) -> None:
            hook.remove()
            held.extend(torch.stack(dist.gather(bytes_held(model, optimizer))).amax(0).tolist())

        hook = optimizer.register_step_post_hook(count)
        script.train = train  # the next epochs as they are
        return train(model, loader, optimizer, *rest)

    script.train = train_and_count
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        script.main(local_rank, world_size, args)
    return printed.getvalue(), held


def measure(module: str, dry_run: bool) -> list[str]:
    """The row of a variant."""
    sys.argv = [
        module,
        "--dataset",
        "synthetic",
        "--nproc",
        "2",
        *VARIANTS[module],
        *(["--dry-run"] if dry_run else []),
    ]
    args = importlib.import_module(module).parse_args()
    printed, held = dist.launch(worker, module, args, nproc=2)
    last = [epoch for epoch in map(measured.read_epoch, printed.splitlines()) if epoch][-1]
    command = " ".join([module.removeprefix("variants."), *VARIANTS[module]])
    return [f"`{command}`", f"{last.loss:.4f}", f"{last.accuracy:.2f}", *(f"{size:,}" for size in held)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [module.removeprefix("variants.") for module in VARIANTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"(default: all) {' '.join(names)}")
    parser.add_argument("--save", action="store_true", help="write the table to experiments/results/")
    parser.add_argument("--dry-run", action="store_true", help="two batches of each: only to see that it runs")
    args = parser.parse_args()
    if not set(args.names) <= set(names):
        parser.error(f"choose from {', '.join(names)}")
    if args.save and (args.names or args.dry_run):
        parser.error("--save takes all variants, without --dry-run")
    rows = [HEAD]
    for module, name in zip(VARIANTS, names, strict=True):
        if not args.names or name in args.names:
            print(name, flush=True)
            rows.append(measure(module, args.dry_run))
    line = measured.conditions("python -m experiments.variants --save", "Two processes, 3 epochs of synthetic digits.")
    measured.report("variants", line, rows, args.save)


if __name__ == "__main__":
    main()
