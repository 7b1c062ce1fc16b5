"""Training steps over a slowed network on one machine, beside what network_model.py predicts.  Linux only.

    sudo python -m experiments.slow_link mlp 2 50                                 # model, ranks, Mbit/s; needs iproute2
    unshare --user --map-root-user python -m experiments.slow_link mlp 2 50       # where users may have namespaces
    sudo python -m experiments.studies slow_link                                  # all of LINKS

Each rank is a process in a network namespace of its own, with one Ethernet link to a bridge.  `tc ... tbf` lets only
so many Mbit/s leave each link.  Nothing of the machine's own network is touched, and the namespaces end with the
processes: nothing is left, whatever happens.

Steps without a limit are measured in alternation with the slowed ones.  Their time is all that the model is told:
computing, and what the cores work for sending.  Nothing is fitted to the slowed steps.
"""

import argparse
import ctypes
import json
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
import mnist_ddp
from experiments import measured, network_model
from experiments.measured import RESULTS, Study, new_picture, png, set_ticks, write_table

LINK = "eth"  # the name of a rank's end of its link
LINKS = {  # model, ranks: Mbit/s
    ("convnet", 2): (10, 20, 50, 100),
    ("resnet9", 2): (20, 50, 100, 200),
    ("mlp", 2): (50, 100, 200, 400),
    ("mlp", 3): (50, 100, 200, 400),
}

# ----------------------------------------------------------------------------------------- the namespaces and the links


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


def enter_new_namespace() -> None:
    """From here on this process, and those that it starts, have a network of their own.  OSError if it may not."""
    CLONE_NEWNET = 0x40000000
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"needs root: {os.strerror(ctypes.get_errno())}")


def make_bridge() -> None:
    """In a network of this process's own; the links of the ranks meet there."""
    enter_new_namespace()
    shell("ip link set lo up")
    shell("ip link add bridge type bridge")
    shell("ip link set bridge up")


def link_to_bridge(rank: int, bridge: int) -> None:
    """bridge: the process in whose namespace the bridge is."""
    enter_new_namespace()
    shell("ip link set lo up")
    shell(f"ip link add {LINK} type veth peer name port{rank} netns {bridge}")
    shell(f"ip address add 10.0.0.{rank + 1}/24 dev {LINK}")
    shell(f"ip link set {LINK} up")
    shell(f"nsenter --target {bridge} --net ip link set port{rank} master bridge up")
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
        model, images = mnist_ddp.ConvNet(1, 28), torch.rand(100, 1, 28, 28)
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


def worker(local_rank: int, world_size: int, bridge: int, args: argparse.Namespace) -> dict:
    """One rank: measures."""
    link_to_bridge(local_rank, bridge)
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    model, step = make_step(args.model)
    times(step, 0.5)  # DDP arranges its buckets anew after the first step
    unslowed, slowed = [], []
    for _ in range(args.repeats):  # in turns, so that a machine whose speed drifts is fair to the model
        unslowed += times(step, args.seconds / 2)
        slowed += times(step, args.seconds, args.rate)

    sizes = [float(size) for size in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]
    alone = statistics.median(unslowed)
    # No latency: that of this machine is part of the time without a limit.
    network = network_model.Network("", network_model.PAYLOAD * args.rate * 1e6 / 8, 0)
    predicted = network_model.step_time(alone, sizes, world_size, network)
    row = {"megabytes": sum(sizes) / 1e6, "buckets": len(sizes)}
    return row | {"unslowed": alone, "measured": statistics.median(slowed), "predicted": predicted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted({model for model, _ in LINKS}))
    parser.add_argument("ranks", type=int, choices=range(2, 17), metavar="RANKS", help="2 to 16")
    parser.add_argument("rate", type=float, help="Mbit/s that may leave a rank")
    parser.add_argument("--repeats", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="of slowed steps per repeat (default: %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.rate <= 100_000 or args.repeats < 1 or not args.seconds > 0:
        parser.error("the rate must be from 1 to 100000 Mbit/s, --repeats at least 1, --seconds greater than 0")
    tools = [tool for tool in ("ip", "tc", "nsenter") if not shutil.which(tool)]
    if tools:
        parser.error(f"{', '.join(tools)} not found: on Debian and Ubuntu, apt-get install iproute2 util-linux")
    try:
        make_bridge()
    except OSError as problem:
        parser.error(problem.strerror)
    print(json.dumps(dist.launch(worker, os.getpid(), args, nproc=args.ranks)))


# ----------------------------------------------------------------------------------------------------------- the study


def points(args: argparse.Namespace) -> list[dict]:
    if os.geteuid() != 0:
        sys.exit("slow_link needs root: sudo, or unshare --user --map-root-user")
    return [
        {"model": model, "ranks": ranks, "rate": float(rate)}
        for (model, ranks), rates in LINKS.items()
        for rate in rates
    ]


def measure(point: dict, args: argparse.Namespace) -> dict:
    command = ["python", "-m", "experiments.slow_link", *point.values(), "--repeats", args.repeats]
    printed = measured.run(command, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    return json.loads(printed.splitlines()[-1])


def draw(points: list[dict[str, str]]) -> None:
    rows = [["model", "ranks", "gradients", "Mbit/s per link", "no limit", "measured", "predicted", "difference"]]
    for row in points:
        unslowed, found, predicted = (float(row[name]) for name in ("unslowed", "measured", "predicted"))
        cells = [row["model"], row["ranks"], f"{float(row['megabytes']):.2f} MB", f"{float(row['rate']):g}"]
        cells += [f"{1e3 * seconds:.0f} ms" for seconds in (unslowed, found, predicted)]
        rows.append([*cells, f"{100 * (predicted / found - 1):+.0f} %"])
    worst = max(abs(float(row["predicted"]) / float(row["measured"]) - 1) for row in points)
    write_table("slow_link", rows, points, f"Largest difference: {100 * worst:.0f} %. ")
    draw_picture(points)


def draw_picture(points: list[dict[str, str]]) -> None:
    """Left what was measured, right what the model says of ResNet-50 on faster networks."""
    figure, (left, right) = new_picture(1, 1)
    for color, (model, ranks) in enumerate(LINKS):
        group = [row for row in points if (row["model"], row["ranks"]) == (model, str(ranks))]
        rates = [float(row["rate"]) for row in group]
        left.plot(rates, [1e3 * float(row["predicted"]) for row in group], "-", color=f"C{color}")
        steps = [1e3 * float(row["measured"]) for row in group]
        left.plot(rates, steps, "o", color=f"C{color}", label=f"{model}, {ranks} ranks")
    left.set(xscale="log", yscale="log", xlabel="Mbit/s of each link", ylabel="ms per step")
    left.set_title("a slowed link: points measured, lines predicted")
    set_ticks(left.xaxis, (10, 20, 50, 100, 200, 400))
    set_ticks(left.yaxis, (50, 100, 200, 500, 1000, 2000))
    model, gpus = network_model.MODELS["resnet50"], [2**n for n in range(11)]
    compute = network_model.compute_time(model.flop * model.batch, network_model.PEAK, model.utilisation)
    sizes = network_model.buckets(4 * model.parameters)
    for color, network in enumerate(network_model.NETWORKS, len(LINKS)):  # not the colours of the models at the left
        shares = [100 * compute / network_model.step_time(compute, sizes, n, network) for n in gpus]
        right.plot(gpus, shares, color=f"C{color}", label=network.name)
    right.set(xscale="log", xlabel="GPUs", ylabel="speed-up / GPUs (%)", ylim=(0, 104))
    right.set_title(f"predicted: ResNet-50, {model.batch} images per GPU in {1e3 * compute:.0f} ms")
    set_ticks(right.xaxis, (1, 2, 8, 64, 256, 1024))
    for axes in left, right:
        axes.legend(frameon=False)
    measured.write(RESULTS / "scaling.png", png(figure))


STUDY = Study(points, measure, draw)

if __name__ == "__main__":
    main()
