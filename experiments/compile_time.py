"""How long torch.compile compiles, and what it gains: two processes on the CPU, the network of mnist_ddp.py.

    python -m experiments.compile_time        # writes experiments/results/compile.md; a minute on two idle cores

Nothing that was compiled before is used.  Each call is timed: the first of its kind compiles, the median of the next
ones is what remains.
"""

import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import distributed as dist
import mnist_ddp
from experiments import measured

CALLS = 20
HEAD = ["way", "call", "first call", "later calls", "graphs compiled so far"]


def compiled_first(model: torch.nn.Module) -> torch.nn.Module:
    return dist.prepare_ddp_model(torch.compile(model))


def ddp_first(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(dist.prepare_ddp_model(model))


WAYS = {
    "mnist_ddp.py, not compiled": dist.prepare_ddp_model,
    "mnist_compile.py: torch.compile, then DDP": compiled_first,
    "DDP, then torch.compile": ddp_first,
}


def seconds(call: Callable[[], object]) -> float:
    """On the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    call()
    return dist.reduce(torch.tensor(time.perf_counter() - started), "max").item()


def worker(local_rank: int, world_size: int, way: str, folder: str) -> list[list[str]]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, str(local_rank))
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    model = WAYS[way](mnist_ddp.ConvNet(1, 28).to(memory_format=torch.channels_last))

    def train(count: int) -> None:
        model.train()
        F.cross_entropy(model(torch.rand(count, 1, 28, 28)), torch.zeros(count, dtype=torch.int64)).backward()
        model.zero_grad()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(torch.rand(100, 1, 28, 28))

    calls = {"train, 100 images": lambda: train(100), "train, the last 67": lambda: train(67), "evaluate": evaluate}
    rows = []
    for name, call in calls.items():
        first, *later = (seconds(call) for _ in range(1 + CALLS))
        graphs = str(counters["stats"]["unique_graphs"])
        rows.append([way, name, f"{first:.2f} s", f"{1000 * statistics.median(later):.0f} ms", graphs])
    dist.cleanup()
    return rows


def main() -> None:
    rows = [HEAD]
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            rows += dist.launch(worker, way, folder, nproc=2)
    machine = measured.machine()
    text = measured.table(rows) + f"\nMeasured on: {machine.name}, torch {machine.torch}, {datetime.date.today()}.\n"
    measured.write(measured.RESULTS / "compile.md", text.encode())
    print(text, end="")


if __name__ == "__main__":
    main()
