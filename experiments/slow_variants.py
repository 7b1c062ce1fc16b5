"""What a script sends and keeps: it runs with each process behind a link of its own, whose bytes are counted.  Linux.

    sudo python -m experiments.slow_variants 0 mnist_ddp --dataset synthetic             # no limit
    sudo python -m experiments.slow_variants 10 variants.mnist_local_sgd --every 16      # 10 Mbit/s for each rank
    sudo python -m experiments.studies variant_costs                                     # all of SCRIPTS: 3 minutes
    sudo python -m experiments.studies slow_variants                                     # all of SLOWED: 5 minutes

The links are those of slow_link.py.  The bytes are the interface's own count of what has left it: with the headers of
TCP, IP and Ethernet, and with the acknowledgements of what came in.  The last line is JSON.
"""

import argparse
import importlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import distributed as dist
from experiments import measured, slow_link
from experiments.measured import Study, write_table
from variants import sharded

STEPS = 32  # counted, after the first: a multiple of local SGD's steps between two averages
SCRIPTS = [
    "mnist_ddp",
    "variants.mnist_by_hand",
    "variants.mnist_overlap",
    "variants.mnist_zero",
    "variants.mnist_local_sgd --every 8",
    "variants.mnist_fsdp",
    "variants.mnist_compile",
    "variants.mnist_tensor_parallel",
    "variants.mnist_pipeline",
]
SLOWED = {  # Mbit/s, 0 is no limit: scripts
    0: ["mnist_ddp"],
    10: ["mnist_ddp", *(f"variants.mnist_local_sgd --every {every}" for every in (4, 16, 64))],
}


def bytes_sent() -> int:
    """Since the link was made, by this process: the line of the interface in the kernel's table."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == slow_link.LINK:
            return int(figures.split()[8])
    raise RuntimeError(f"no interface {slow_link.LINK}")


def worker(local_rank: int, world_size: int, bridge: int, rate: float, name: str, args: Any, folder: str) -> None:
    """One rank: runs the script's main, and writes what it has counted to a file in the folder."""
    slow_link.link_to_bridge(local_rank, bridge)
    slow_link.set_rate(rate)
    sent, state = [], 0

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal state
        sent.append(bytes_sent())
        state = sharded.local_bytes(value for of_param in optimizer.state.values() for value in of_param.values())

    hook = register_optimizer_step_post_hook(count)
    importlib.import_module(name).main(local_rank, world_size, args)
    hook.remove()
    counted = {"sent": (sent[STEPS] - sent[0]) / STEPS, "all": bytes_sent(), "state": state}
    Path(folder, str(local_rank)).write_text(json.dumps(counted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rate", type=float, help="Mbit/s that may leave a rank; 0: no limit")
    parser.add_argument("script", choices=sorted({script.split()[0] for script in SCRIPTS}), metavar="SCRIPT")
    args, flags = parser.parse_known_args()
    if args.rate and not 1 <= args.rate <= 100_000:
        parser.error("the rate must be from 1 to 100000 Mbit/s, or 0")
    tools = [tool for tool in ("ip", "tc", "nsenter") if not shutil.which(tool)]
    if tools:
        parser.error(f"{', '.join(tools)} not found: on Debian and Ubuntu, apt-get install iproute2 util-linux")
    sys.argv = [args.script, *flags]
    script_args = importlib.import_module(args.script).parse_args()
    try:
        slow_link.make_bridge()
    except OSError as problem:
        parser.error(problem.strerror)
    with tempfile.TemporaryDirectory() as folder:
        dist.launch(worker, os.getpid(), args.rate, args.script, script_args, folder, nproc=script_args.nproc)
        ranks = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    mean = {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}
    print(json.dumps(mean))


# --------------------------------------------------------------------------------------------------------- two studies


def measure(point: dict, args: argparse.Namespace) -> dict:
    rate = point.get("rate", 0)
    flags = [*shlex.split(point["script"]), "--data-dir", os.path.abspath(args.data_dir), "--nproc", 2]
    flags += ["--epochs", 1] if "rate" in point else ["--dataset", "synthetic", "--epochs", 2]
    printed = measured.run(["python", "-m", "experiments.slow_variants", rate, *flags], OMP_NUM_THREADS="1")
    *_, last = measured.epochs(printed)
    found = json.loads(printed.splitlines()[-1])
    figures = {"images_per_second": round(last.images_per_s), "accuracy": f"{last.accuracy:.2f}"}
    return figures | {name: round(value) for name, value in found.items()}


def need_root() -> None:
    if os.geteuid() != 0:
        sys.exit("it needs root: sudo, or unshare --user --map-root-user")


def cost_points(args: argparse.Namespace) -> list[dict]:
    need_root()
    return [{"script": script} for script in SCRIPTS]


def slow_points(args: argparse.Namespace) -> list[dict]:
    need_root()
    return [{"script": script, "rate": rate} for rate, scripts in SLOWED.items() for script in scripts]


def command(row: dict[str, str]) -> str:
    return f"`{row['script'].removeprefix('variants.')}`"


def draw_costs(points: list[dict[str, str]]) -> None:
    rows = [["script", "bytes sent per step", "of DDP's", "optimizer state, bytes per process", "images/s"]]
    ddp = float(points[0]["sent"])
    for row in points:
        share = f"{100 * float(row['sent']) / ddp:.0f} %"
        rows.append([command(row), row["sent"], share, row["state"], row["images_per_second"]])
    write_table("variant_costs", rows, points)


def draw_slow(points: list[dict[str, str]]) -> None:
    rows = [["script", "Mbit/s per link", "MB sent per process", "images/s", "test accuracy after one epoch"]]
    for row in points:
        rate, megabytes = "no limit" if row["rate"] == "0" else row["rate"], f"{float(row['all']) / 1e6:.2f}"
        rows.append([command(row), rate, megabytes, row["images_per_second"], f"{row['accuracy']} %"])
    write_table("slow_variants", rows, points)


COSTS = Study(cost_points, measure, draw_costs)
SLOW = Study(slow_points, measure, draw_slow)

if __name__ == "__main__":
    main()
