"""Shows what DDP does beyond averaging gradients: it averages them while the backward pass goes on.

    python -m experiments.overlap    # writes overlap.png and .md to experiments/results/; a minute on two idle cores

Two processes, gloo, on the CPU.  A model is trained with DDP, by hand as variants/mnist_by_hand.py does it, and with
hooks as variants/mnist_overlap.py does it, in turns.  The picture shows one step of each, from torch.profiler's events:
LAYERS linear layers, 4 MiB of gradients each.  Of PROFILED steps it is the one of median length.  The table has the
times of other steps, without the profiler.
"""

import copy
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages, before torch is imported

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import SequentialSampler

import data
import distributed as dist
import mnist_ddp
from experiments import measured
from variants import mnist_overlap

LAYERS, WIDTH, BATCH = 16, 1024, 128
STEPS = 20  # timed, of each
PROFILED = 5  # more, of each; an odd number
WAYS = ["DDP", "by hand", "with hooks"]
HEAD = ["model", "gradients", *(f"step, {way}" for way in WAYS), *(f"{way} / DDP" for way in WAYS[1:])]
HEAD += [f"all-reduce during backward: {WAYS[0]}", *WAYS[1:]]
COLOURS = {"forward": "0.75", "backward": "tab:blue", "all-reduce": "tab:orange"}


class Span(NamedTuple):
    kind: str  # one of COLOURS
    start: float  # ms since the step's start
    end: float


class Measured(NamedTuple):
    times: list[float]  # of the steps, in ms, on the slowest rank
    spans: list[Span]  # of one more step, of median length, on this rank


def by_hand_step(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, "mean")
    model.zero_grad()


def with_hooks_step(model: nn.Module, inputs: torch.Tensor) -> None:
    """The model's hooks start the all-reduces."""
    model(inputs).square().mean().backward()
    for p in model.parameters():
        p.work.wait()
    model.zero_grad()


def ddp_step(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    model.zero_grad()


def spans(step: Callable[[], None]) -> list[Span]:
    """Profile the step: the matrix products and convolutions of forward and backward, and gloo's transfers."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("the step"):
        step()
    events = profiler.events()
    (whole,) = (event.time_range for event in events if event.name == "the step")
    kinds = {"aten::addmm": "forward", "aten::mm": "backward"}
    kinds |= {"aten::convolution": "forward", "aten::convolution_backward": "backward"}
    found = []
    for event in events:
        # Not gloo:broadcast: that is DDP's, of BatchNorm's buffers before the forward pass.
        is_reduce = event.name.startswith(("gloo:all_reduce", "gloo:all_gather"))  # by hand with the check's all-gather
        kind = "all-reduce" if is_reduce else kinds.get(event.name)
        if kind:
            at = event.time_range
            found.append(Span(kind, (at.start - whole.start) / 1000, (at.end - whole.start) / 1000))
    return found


def reduced_during_backward(found: list[Span]) -> float:
    """Of the time in which all-reduces run: the share before the last backward operation has ended."""
    end = max(span.end for span in found if span.kind == "backward")
    # The transfers' spans may overlap each other: count each moment once.
    edges = sorted((span.start, span.end) for span in found if span.kind == "all-reduce")
    total = early = until = 0.0
    for start, stop in edges:
        start = max(start, until)
        if stop > start:
            total += stop - start
            early += max(0.0, min(stop, end) - start)
            until = stop
    return early / total


def worker(local_rank: int, world_size: int, model: nn.Module, inputs: torch.Tensor) -> dict[str, list[Measured]]:
    """What was measured: {"DDP": [of each rank], "by hand": [...], "with hooks": [...]}."""
    dist.init_process_group()
    wrapped, hooked = dist.prepare_ddp_model(copy.deepcopy(model)), copy.deepcopy(model)
    for p in hooked.parameters():
        p.register_post_accumulate_grad_hook(mnist_overlap.start_all_reduce)
    steps = (ddp_step, wrapped), (by_hand_step, model), (with_hooks_step, hooked)
    ways = {name: functools.partial(step, *args, inputs) for name, (step, *args) in zip(WAYS, steps, strict=True)}
    times: dict[str, list] = {name: [] for name in ways}
    for number in range(STEPS + 3):  # the first three warm up
        for name, step in ways.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            seconds = dist.all_reduce(torch.tensor(time.perf_counter() - started), "max")
            if number >= 3:
                times[name].append(1000 * seconds.item())
    result = {}
    for name, step in ways.items():
        profiled = []
        for _ in range(PROFILED):
            dist.barrier()
            profiled.append(spans(step))
        everyone: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(everyone, profiled)
        lengths = [max(span.end for found in of_ranks for span in found) for of_ranks in zip(*everyone, strict=True)]
        middle = lengths.index(statistics.median(lengths))
        result[name] = [Measured(times[name], of_rank[middle]) for of_rank in everyone]
    dist.cleanup()
    return result


def draw(found: dict[str, list[Measured]]) -> bytes:
    """A panel for each of WAYS, with the same scale; for each rank a lane of computing and one of all-reduces."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    panels = figure.subplots(len(found), 1, sharex=True)
    for axes, (name, ranks) in zip(panels, found.items(), strict=True):
        for rank, (_, of_rank) in enumerate(ranks):
            for kind, start, end in of_rank:
                lane = 2 * rank + (kind == "all-reduce")
                axes.barh(lane, end - start, left=start, color=COLOURS[kind], edgecolor="white", lw=0.5)
            end = max(span.end for span in of_rank if span.kind == "backward")
            axes.vlines(end, 2 * rank - 0.5, 2 * rank + 1.5, color="black", lw=1, ls=":")
        lanes = [f"rank {rank} {what}" for rank in range(len(ranks)) for what in ("computes", "all-reduces")]
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        share = statistics.mean(reduced_during_backward(of_rank) for _, of_rank in ranks)
        title = f"{name}: {share:.0%} of the time of all-reduces is during the backward pass"
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("ms since the start of the step; dotted: the end of a rank's backward pass")
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False)
    return measured.png(figure)


def convnet_step() -> tuple[nn.Module, torch.Tensor]:
    """The network of mnist_ddp.py and a batch of one process, in its layout.  data.loader makes glibc keep memory."""
    digits, _ = data.load("synthetic", "", limit=100)
    inputs, _ = next(data.batches(data.loader(digits, 100, SequentialSampler(digits)), torch.device("cpu")))
    return mnist_ddp.ConvNet(1, 28).to(memory_format=torch.channels_last), inputs


def main() -> None:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    models = {
        f"{LAYERS} linear layers, batch {BATCH} per process": (nn.Sequential(*layers), torch.randn(BATCH, WIDTH)),
        "the network of `mnist_ddp.py`, batch 100 per process": convnet_step(),
    }
    rows = [HEAD]
    for name, (model, inputs) in models.items():
        found = dist.launch(worker, model, inputs, nproc=2)
        if len(rows) == 1:
            measured.write(measured.RESULTS / "overlap.png", draw(found))
        ddp, *others = times = [ranks[0].times for ranks in found.values()]
        ratios = [statistics.median(b / a for a, b in zip(ddp, other, strict=True)) for other in others]
        shares = [statistics.mean(reduced_during_backward(of_rank) for _, of_rank in r) for r in found.values()]
        cells = [name, f"{sum(p.nbytes for p in model.parameters()) / 2**20:.1f} MiB"]
        cells += [f"{statistics.median(of_way):.1f} ms" for of_way in times]
        rows.append([*cells, *(f"{ratio:.2f}" for ratio in ratios), *(f"{share:.0%}" for share in shares)])
    measured.write_table("overlap", rows, [measured.here()], f"Median of {STEPS} steps. ")
    print((measured.RESULTS / "overlap.md").read_text(), end="")


if __name__ == "__main__":
    main()
