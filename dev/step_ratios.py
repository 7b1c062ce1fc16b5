"""How much faster or slower a training step gets by one change, on the GPU or, if there is none, on one CPU core.

    python -m dev.step_ratios                     # a minute or two, most of it for torch.compile
    python -m dev.step_ratios --rounds 3 fused

The network and the batch are those of mnist_ddp.py with one process.  All variants take turns, a short epoch each, so a
busy machine slows all of them; a ratio is the median of those of the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import data
import distributed as dist
from dev.measured import report
from mnist_ddp import ConvNet

CHANGES = {
    "fused": "`SGD(..., fused=True)`",
    "benchmark": "`torch.backends.cudnn.benchmark = True`",
    "bfloat16": "`torch.autocast(..., torch.bfloat16)`",
    "compile": "`torch.compile(model)`",
}
BATCH = 200


def prepare(change: str, steps: int, device: torch.device) -> Callable[[], float]:
    """Return a function that trains for some steps with this change, or with none, and returns ms per step."""
    torch.manual_seed(0)
    dataset, _ = data.load("synthetic", "", limit=steps * BATCH)
    loader = data.loader(dataset, BATCH, torch.utils.data.RandomSampler(dataset))
    model = ConvNet(dataset.channels, dataset.side).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=change == "fused" or None)
    forward = torch.compile(model) if change == "compile" else model

    def train() -> float:
        torch.backends.cudnn.benchmark = change == "benchmark"
        started = now(device)
        for images, labels in data.batches(loader, device):
            with torch.autocast(device.type, torch.bfloat16, enabled=change == "bfloat16"):
                loss = F.cross_entropy(forward(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return 1000 * (now(device) - started) / steps

    return train


def now(device: torch.device) -> float:
    """Seconds: of the clock when the GPU has finished its work, or of this process on the CPU."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="CHANGE", help=f"(default: all) {', '.join(CHANGES)}")
    parser.add_argument("--rounds", type=int, default=15, help="number of turns of each variant (default: 15)")
    args = parser.parse_args()
    if args.rounds < 1 or not set(args.changes) <= set(CHANGES):
        parser.error(f"--rounds must be at least 1, and each change one of {', '.join(CHANGES)}")
    device = dist.get_device()
    steps = 10 if device.type == "cpu" else 50
    torch.set_num_threads(1)
    variants = {change: prepare(change, steps, device) for change in ("", *(args.changes or CHANGES))}
    for train in variants.values():
        train()  # loads libraries, allocates memory, compiles
    times = [{change: train() for change, train in variants.items()} for _ in range(args.rounds)]
    rows = [["change", "ms per step", "ratio", "quartiles"]]
    for change in variants:
        ratios = sorted(one[change] / one[""] for one in times)
        quartiles = f"{ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f}"
        milliseconds = statistics.median(one[change] for one in times)
        text = CHANGES.get(change, "none")
        rows.append([text, f"{milliseconds:.3f}", f"{statistics.median(ratios):.3f}", quartiles])
    name = torch.cuda.get_device_name() if device.type == "cuda" else "one core of the CPU"
    command = " ".join(["python -m dev.step_ratios", *args.changes])
    report("step_ratios", command, f"On {name}; medians of {args.rounds} rounds of {steps} steps.", rows, save=False)


if __name__ == "__main__":
    main()
