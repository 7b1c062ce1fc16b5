"""Training steps over a slowed network on one machine, beside what a formula says.  Linux only, as root, with iproute2.

    sudo python -m experiments.slow_link                                          # the table: 2 minutes
    unshare --user --map-root-user python -m experiments.slow_link mlp            # one model; where users may do that
    sudo python -m experiments.slow_link --save                                   # writes experiments/results/, too

Each rank is a process in a network namespace of its own, with one Ethernet link to a bridge.  `tc ... tbf` lets only so
many Mbit/s leave each link.  Nothing of the machine's own network is touched.  The namespaces end with the processes.

Steps without a limit are measured in alternation with the slowed ones.  Their time is all that the formula is told:
computing, and what the cores work for sending.  Nothing is fitted to the slowed steps.
"""

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional

import cifar10_ddp
import distributed as dist
from experiments import measured
from mnist_ddp import ConvNet

LINK = "eth"  # the name of a rank's end of its link
LINKS = {  # model, ranks: Mbit/s
    ("convnet", 2): (10, 100),
    ("resnet9", 2): (20, 200),
    ("mlp", 2): (100, 400),
    ("mlp", 3): (100, 400),
}
BACKWARD = 2 / 3  # of a step: backward computes two gradients (inputs, weights) for each product of the forward pass
# Of the bytes on an Ethernet with TCP: 1448 of a frame's 1514, and for two frames an acknowledgement the other way.
PAYLOAD = 1448 / (1514 + 66 / 2)


def step_time(compute: float, buckets: list[float], ranks: int, bandwidth: float) -> float:
    """Seconds of a step, by the formula of docs/scaling.md.

    compute: seconds without the network.  buckets: bytes, in the order in which backward fills them.
    bandwidth: bytes per second that leave each rank.
    """
    filled, end = 0.0, 0.0
    for size in buckets:
        filled += size
        full = compute * (1 - BACKWARD + BACKWARD * filled / sum(buckets))
        end = max(full, end) + 2 * (ranks - 1) / ranks * size / bandwidth  # one bucket at a time, around a ring
    return end


# ----------------------------------------------------------------------------------------- the namespaces and the links


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


def enter_new_namespace() -> None:
    """From here on this process, and those that it starts, have a network of their own.  OSError if it may not."""
    CLONE_NEWNET = 0x40000000
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"needs root: {os.strerror(ctypes.get_errno())}")
    shell("ip link set lo up")


def make_bridge() -> None:
    """In a network of this process's own; the links of the ranks meet there."""
    enter_new_namespace()
    shell("ip link add bridge type bridge")
    shell("ip link set bridge up")


def link_to_bridge(rank: int, bridge: int) -> None:
    """bridge: the process in whose namespace the bridge is."""
    port = f"port{os.getpid()}"  # the kernel may need a moment to remove the links of ranks that have ended
    enter_new_namespace()
    shell(f"ip link add {LINK} type veth peer name {port} netns {bridge}")
    shell(f"ip address add 10.0.0.{rank + 1}/24 dev {LINK}")
    shell(f"ip link set {LINK} up")
    shell(f"nsenter --target {bridge} --net ip link set {port} master bridge up")
    os.environ |= {"GLOO_SOCKET_IFNAME": LINK, "MASTER_ADDR": "10.0.0.1"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # launch's can't be reached from here: rank 0 serves one


def set_rate(rate: float) -> None:
    """Let only `rate` Mbit/s leave this rank's link; 0: no limit.  The burst, a millisecond's bytes, goes unlimited."""
    subprocess.run(["tc", "qdisc", "del", "dev", LINK, "root"], stderr=subprocess.DEVNULL)
    if rate:
        burst = max(3000, round(rate * 1e6 / 8 * 1e-3))  # bytes; with much less it doesn't reach its rate
        shell(f"tc qdisc add dev {LINK} root tbf rate {round(rate * 1000)}kbit burst {burst} latency 400ms")


# -------------------------------------------------------------------------------------------------- what each rank does


def make_step(name: str) -> tuple[torch.nn.Module, Callable[[], None]]:
    """The DDP model, and a function that trains it for one step."""
    torch.manual_seed(0)
    if name == "convnet":  # a step of mnist_ddp.py, with its share of the batch for two processes
        model, images = ConvNet(1, 28), torch.rand(100, 1, 28, 28)
    elif name == "resnet9":
        model, images = cifar10_ddp.resnet9(24), torch.rand(32, 3, 32, 32)
    else:  # two hidden layers: gradients of 7.4 MB
        layers = [torch.nn.Flatten(), torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)]
        model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(1024, 10))
        images = torch.rand(256, 1, 28, 28)
    model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    labels = torch.randint(10, (len(images),))
    model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step() -> None:
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def times(function: Callable[[], None], seconds: float, rate: float = 0) -> list[float]:
    """Seconds for each call of `function`, as many as fit into `seconds` (at least 3); the same number on all ranks."""
    set_rate(rate)
    dist.barrier()
    function()
    taken = []
    count = 3
    while len(taken) < count:
        started = time.perf_counter()
        function()
        taken.append(time.perf_counter() - started)
        if len(taken) == 3:
            fits = torch.tensor(seconds / statistics.median(taken))
            count = max(3, int(dist.all_reduce(fits, "min")))
    return taken


def worker(local_rank: int, world_size: int, bridge: int, name: str, rates: tuple, turns: int, seconds: float) -> list:
    """One rank: measures one model.  Returns a row of the table for each rate."""
    link_to_bridge(local_rank, bridge)
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    model, step = make_step(name)
    times(step, 0.5)  # DDP arranges its buckets anew after the first step
    found: dict[float, list[float]] = {0: [], **{rate: [] for rate in rates}}
    for _ in range(turns):  # a machine whose speed drifts is fair to all
        for rate, taken in found.items():
            taken += times(step, seconds, rate)
    buckets = [float(size) for size in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]
    alone, *slowed = [statistics.median(taken) for taken in found.values()]
    rows = []
    for rate, taken in zip(rates, slowed, strict=True):
        by_formula = step_time(alone, buckets, world_size, PAYLOAD * rate * 1e6 / 8)
        rows.append(row(name, world_size, sum(buckets), rate, alone, taken, by_formula))
    return rows


HEAD = ["model", "ranks", "gradients", "Mbit/s per link", "no limit", "measured", "by the formula", "difference"]


def row(name: str, ranks: int, size: float, rate: float, alone: float, taken: float, by_formula: float) -> list[str]:
    """size: bytes of gradients; times in seconds."""
    milliseconds = [f"{1000 * seconds:.0f} ms" for seconds in (alone, taken, by_formula)]
    return [name, str(ranks), f"{size / 1e6:.2f} MB", f"{rate:g}", *milliseconds, f"{by_formula / taken - 1:+.0%}"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="convnet, resnet9 or mlp (default: all)")
    parser.add_argument("--save", action="store_true", help="write the table to experiments/results/")
    parser.add_argument("--dry-run", action="store_true", help="a few steps only, with the fastest link")
    args = parser.parse_args()
    known = [model for model, _ in LINKS]
    args.models = args.models or known
    if not set(args.models) <= set(known) or (args.save and (args.dry_run or set(args.models) < set(known))):
        parser.error("the models are convnet, resnet9 and mlp; --save takes all of them, without --dry-run")
    tools = [tool for tool in ("ip", "tc", "nsenter") if not shutil.which(tool)]
    if tools:
        parser.error(f"{', '.join(tools)} not found: on Debian and Ubuntu, apt-get install iproute2 util-linux")
    try:
        make_bridge()
    except OSError as problem:
        parser.error(problem.strerror)
    return args


def main() -> None:
    args = parse_args()
    rows = [HEAD]
    for (model, ranks), rates in LINKS.items():
        if model not in args.models:
            continue
        print(f"{model}, {ranks} ranks: {', '.join(map(str, rates))} Mbit/s", flush=True)
        how = (rates[-1:], 1, 0.1) if args.dry_run else (rates, 3, 3.0)
        rows += dist.launch(worker, os.getpid(), model, *how, nproc=ranks)
    line = measured.conditions("python -m experiments.slow_link --save", "Medians; one thread for each rank.")
    measured.report("slow_link", line, rows, save=args.save)


if __name__ == "__main__":
    sys.exit(main())
