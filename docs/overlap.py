"""Shows what DDP does beyond averaging gradients: it averages them while the backward pass goes on.

    python docs/overlap.py                # writes results/overlap.png and .md; a minute on two idle cores
    python docs/overlap.py --steps 40     # more of each: steadier medians

Two processes, gloo, on the CPU.  A model is trained with DDP and by hand, as variants/mnist_by_hand.py does it, in
turns.  The picture shows one step of each, from torch.profiler's events: LAYERS linear layers, 4 MiB of gradients each.
Of PROFILED steps it is the one of median length.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages, before torch is imported

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import distributed as dist  # noqa: E402
import mnist_ddp  # noqa: E402

LAYERS, WIDTH, BATCH = 16, 1024, 128
PROFILED = 5  # steps of each; an odd number
HEAD = [
    "| model | gradients | step, DDP | step, by hand | by hand / DDP | all-reduce during backward: DDP | by hand |",
    "|---|---|---|---|---|---|---|",
]
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
        p.grad = dist.all_reduce(p.grad, "mean")
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
        kind = "all-reduce" if event.name.startswith("gloo:") else kinds.get(event.name)
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


def worker(local_rank: int, world_size: int, model: nn.Module, inputs: torch.Tensor, steps: int) -> list | None:
    """On rank 0: what was measured, {"DDP": [of each rank], "by hand": [...]}."""
    dist.init_process_group()
    wrapped = dist.prepare_ddp_model(model)
    ways = {"DDP": lambda: ddp_step(wrapped, inputs), "by hand": lambda: by_hand_step(model, inputs)}
    times: dict[str, list] = {name: [] for name in ways}
    for number in range(steps + 3):  # the first three warm up
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


def draw(measured: dict, file: Path) -> None:
    """Two panels, DDP and by hand, with the same scale; for each rank a lane of computing and one of all-reduces."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 5), dpi=120, layout="constrained")
    panels = figure.subplots(len(measured), 1, sharex=True)
    for axes, (name, ranks) in zip(panels, measured.items(), strict=True):
        labels = []
        for rank, (_, found) in enumerate(ranks):
            for part, kinds in ("computes", ("forward", "backward")), ("all-reduces", ("all-reduce",)):
                lane = len(labels)
                labels.append(f"rank {rank} {part}")
                for span in found:
                    if span.kind in kinds:
                        bar = (span.start, span.end - span.start)
                        axes.broken_barh([bar], (lane - 0.4, 0.8), color=COLOURS[span.kind], edgecolor="white", lw=0.5)
            end = max(span.end for span in found if span.kind == "backward")
            axes.vlines(end, len(labels) - 2.5, len(labels) - 0.5, color="black", lw=1, ls=":")
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        share = statistics.mean(reduced_during_backward(found) for _, found in ranks)
        axes.set_title(
            f"{name}: {share:.0%} of the time of all-reduces is during the backward pass", loc="left", fontsize=10
        )
        axes.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("ms since the start of the step; dotted: the end of a rank's backward pass")
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each (default: %(default)s)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    models = {
        f"{LAYERS} linear layers, batch {BATCH} per process": (nn.Sequential(*layers), torch.randn(BATCH, WIDTH)),
        "the network of `mnist_ddp.py`, batch 100 per process": (mnist_ddp.ConvNet(1, 28), torch.randn(100, 1, 28, 28)),
    }
    results, rows = ROOT / "results", []
    results.mkdir(exist_ok=True)
    for name, (model, inputs) in models.items():
        measured = dist.launch(worker, model, inputs, args.steps, nproc=2)
        if not rows:
            draw(measured, results / "overlap.png")
        ddp, by_hand = (statistics.median(ranks[0].times) for ranks in measured.values())
        ratio = statistics.median(b / a for a, b in zip(*(r[0].times for r in measured.values()), strict=True))
        shares = [statistics.mean(reduced_during_backward(found) for _, found in ranks) for ranks in measured.values()]
        size = sum(p.nbytes for p in model.parameters()) / 2**20
        cells = [name, f"{size:.1f} MiB", f"{ddp:.1f} ms", f"{by_hand:.1f} ms", f"{ratio:.2f}"]
        rows.append(f"| {' | '.join([*cells, *(f'{share:.0%}' for share in shares)])} |")
    text = "\n".join(HEAD + rows) + "\n"
    (results / "overlap.md").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
