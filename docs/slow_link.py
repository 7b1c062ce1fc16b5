"""Training steps over a slowed network on one machine, beside what scaling.py predicts.  Linux only.

    sudo python docs/slow_link.py                                  # as root; needs ip and tc (iproute2)
    unshare --user --map-root-user --net python docs/slow_link.py  # or so, where users may have namespaces
    python docs/slow_link.py --model mlp --rates 50 100 200 --ranks 3

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
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import scaling  # noqa: E402

LINK = "eth"  # the name of a rank's end of its link
MODELS = ("convnet", "mlp", "resnet9")

# ----------------------------------------------------------------------------------------- the namespaces and the ranks


def problem() -> str:
    """Why this can't run here; "" if it can."""
    tools = [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]
    if tools:
        return f"{', '.join(tools)} not found: on Debian and Ubuntu, apt-get install iproute2 util-linux"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"needs root ({done.stderr.strip()})" if done.returncode else ""


def measure(model: str, ranks: int, rates: list[float], seconds: float = 3, repeats: int = 3) -> list[dict]:
    """A dictionary for each rate (Mbit/s): what was measured, and predicted, in seconds.  RuntimeError if it fails."""
    command = [sys.executable, __file__, "--model", model, "--seconds", str(seconds), "--repeats", str(repeats)]
    command += ["--ranks", str(ranks), "--rates", *map(str, rates)]
    done = subprocess.run(["unshare", "--net", *command, "--inside"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(command)}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def end_with_parent() -> None:
    """SIGKILL for this process when the one that has started it is gone, however it ended."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start_ranks(args: argparse.Namespace) -> None:
    """In the namespace of the bridge: start the ranks, link them, and wait until they end."""

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True)

    run("ip link set lo up")
    run("ip link add bridge type bridge")
    run("ip link set bridge up")
    place = {"WORLD_SIZE": args.ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GLOO_SOCKET_IFNAME": LINK}
    place |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
    processes = []
    try:
        for rank in range(args.ranks):
            env = os.environ | {name: str(value) for name, value in (place | {"RANK": rank}).items()}
            command = ["unshare", "--net", sys.executable, *sys.argv, "--worker"]
            process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE)
            processes.append(process)
            while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                time.sleep(0.01)  # until unshare has made the namespace
            inside = f"nsenter --target {process.pid} --net ip"
            run(f"ip link add port{rank} type veth peer name {LINK} netns {process.pid}")
            run(f"ip link set port{rank} master bridge up")
            run(f"{inside} address add 10.0.0.{rank + 1}/24 dev {LINK}")
            run(f"{inside} link set lo up")
            run(f"{inside} link set {LINK} up")
        for process in processes:  # they wait for this line
            process.stdin.write(b"linked\n")
            process.stdin.flush()
        while None in (ended := [process.poll() for process in processes]) and not any(ended):
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(ended):
        sys.exit("slow_link.py: a rank failed: see above")


# -------------------------------------------------------------------------------------------------- what each rank does


def set_rate(rate: float) -> None:
    """Let only `rate` Mbit/s leave this rank's link; 0: no limit.  The burst, a millisecond's bytes, goes unlimited."""
    subprocess.run(["tc", "qdisc", "del", "dev", LINK, "root"], stderr=subprocess.DEVNULL)
    if rate:
        burst = max(3000, round(rate * 1e6 / 8 * 1e-3))  # bytes; with much less it doesn't reach its rate
        limit = f"tbf rate {round(rate * 1000)}kbit burst {burst} latency 400ms"
        subprocess.run(["tc", "qdisc", "add", "dev", LINK, "root", *limit.split()], check=True)


def make_step(name: str) -> tuple:
    """The DDP model, and a function that trains it for one step."""
    import torch
    from torch.nn import functional

    import cifar10_ddp
    import distributed as dist
    import mnist_ddp

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
    import torch

    import distributed as dist

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


def worker(args: argparse.Namespace) -> None:
    """One rank: measures; rank 0 prints a line of JSON for each rate."""
    sys.stdin.readline()  # until the link is there
    import distributed as dist

    dist.init_process_group(backend="gloo")
    model, step = make_step(args.model)
    times(step, 0.5)  # DDP arranges its buckets anew after the first step
    unslowed: list[float] = []
    slowed: dict[float, list[float]] = {rate: [] for rate in args.rates}
    for _ in range(args.repeats):
        for rate in args.rates:  # side by side, so that a machine whose speed drifts is fair to the model
            unslowed += times(step, args.seconds / 2)
            slowed[rate] += times(step, args.seconds, rate)

    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    sizes = [float(size) for size in sizes.split(",")]
    alone = statistics.median(unslowed)
    for rate in args.rates if dist.is_primary() else []:
        # No latency: that of this machine is part of the time without a limit.
        network = scaling.Network(f"{rate} Mbit/s", scaling.PAYLOAD * rate * 1e6 / 8, 0)
        row = {"model": args.model, "ranks": args.ranks, "rate": rate, "megabytes": sum(sizes) / 1e6}
        row |= {"buckets": len(sizes), "unslowed": alone, "measured": statistics.median(slowed[rate])}
        row |= {"predicted": scaling.step_time(alone, sizes, args.ranks, network)}
        print(json.dumps(row), flush=True)
    dist.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mlp", choices=MODELS, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 100, 200, 400], help="Mbit/s")
    parser.add_argument("--seconds", type=float, default=3, help="per rate and repeat (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of all rates in turn (default: %(default)s)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not 2 <= args.ranks <= 16 or args.repeats < 1 or not args.seconds > 0:
        parser.error("--ranks must be from 2 to 16, --repeats at least 1, --seconds greater than 0")
    if not all(1 <= rate <= 100_000 for rate in args.rates):
        parser.error("--rates are Mbit/s, from 1 to 100000")
    if args.inside or args.worker:
        end_with_parent()
        return worker(args) if args.worker else start_ranks(args)
    if problem():
        parser.error(problem())
    print(f"{args.model}, {args.ranks} ranks on {socket.gethostname()}")
    try:
        rows = measure(args.model, args.ranks, args.rates, args.seconds, args.repeats)
    except RuntimeError as error:
        sys.exit(f"slow_link.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    for row in rows:
        off = row["predicted"] / row["measured"] - 1
        print(
            f"{row['rate']:6g} Mbit/s  measured {1e3 * row['measured']:7.1f} ms  "
            f"predicted {1e3 * row['predicted']:7.1f} ms ({off:+.0%})  no limit {1e3 * row['unslowed']:.1f} ms"
        )


if __name__ == "__main__":
    main()
