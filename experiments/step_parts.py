"""Where the time of a step of mnist_ddp.py goes, beside computing.

    python -m experiments.step_parts        # about a minute; benchmark.py does the same, and writes the table

Separate runs differ by more than these parts cost.  So all ways of communicating are measured inside the same two
processes, in blocks of steps that alternate: A B C D E A B C D E ...  The first round is not counted.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import distributed as torch_dist
from torch import nn

import data
import distributed as dist
from experiments import measured
from mnist_ddp import ConvNet

ROUNDS, STEPS = 13, 25  # blocks of each way, and steps in a block
BATCH = 200  # of all processes together


def send_nothing(model: nn.Module) -> None:
    pass


def wait_for_all(model: nn.Module) -> None:
    torch_dist.all_reduce(torch.zeros(1, device=dist.get_device()))


def average_in_one_message(model: nn.Module) -> None:
    gradients = torch.cat([param.grad.flatten() for param in model.parameters()])
    torch_dist.all_reduce(gradients)
    parts = gradients.div_(dist.get_world_size()).split([param.numel() for param in model.parameters()])
    for param, part in zip(model.parameters(), parts, strict=True):
        param.grad.copy_(part.view_as(param))


WAYS = {  # title: what happens between backward and the optimizer's step, and the arguments for DDP, or None
    "no communication": (send_nothing, None),
    "a barrier: one number is all-reduced": (wait_for_all, None),
    "all gradients as one message": (average_in_one_message, None),
    "DDP without BatchNorm's buffers": (send_nothing, {"sync_buffers": False}),
    "DDP as mnist_ddp.py has it": (send_nothing, {}),
}


def make_step(after_backward: Callable, ddp: dict | None, images: torch.Tensor, labels: torch.Tensor) -> Callable:
    """A function that trains a model of its own for one step."""
    torch.manual_seed(0)
    model = ConvNet(images.shape[1], images.shape[2]).to(images.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)  # every step computes with similar numbers
    model = model if ddp is None else dist.prepare_ddp_model(model, **ddp)

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        after_backward(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def worker(local_rank: int, world_size: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds per step of each way, a figure for each round; on each rank its own."""
    dist.init_process_group()
    train_set, _ = data.load("synthetic", "", BATCH)
    loader = data.loader(train_set, BATCH // world_size, dist.data_sampler(train_set))
    images, labels = next(iter(data.batches(loader, dist.get_device())))
    functions = {title: make_step(*way, images, labels) for title, way in WAYS.items()}
    times: dict[str, list[float]] = {title: [] for title in WAYS}
    for number in range(rounds + 1):
        for title, step in functions.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                step()
            if images.is_cuda:
                torch.cuda.synchronize()
            if number > 0:
                times[title].append(1000 * (time.perf_counter() - started) / steps)
    dist.cleanup()
    return times


def rows(times: dict[str, list[float]]) -> list[list[str]]:
    """The table: the median of all blocks, and what each way takes more than the one above it."""
    found = [["in each step", "ms per step", "more than the row above, ms"]]
    before = None
    for title, values in times.items():
        median = statistics.median(values)
        found.append([title, measured.spread(values, "{:.1f}"), "" if before is None else f"{median - before:+.1f}"])
        before = median
    return found


def measure(rounds: int = ROUNDS, steps: int = STEPS, command: str = "python -m experiments.step_parts") -> tuple:
    """The line and the rows of the table."""
    processes = torch.cuda.device_count() or 2
    times = dist.launch(worker, rounds, steps, nproc=processes)
    how = f"Blocks of {steps} steps of each: {rounds}, in alternation; median, least and greatest."
    return measured.conditions(command, f"Processes: {processes}. {how}"), rows(times)


if __name__ == "__main__":
    measured.report("step_parts", *measure(), save=False)
