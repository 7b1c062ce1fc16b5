"""How many GPUs until the network is the limit?  A small model of a DDP step: compute, ring all-reduce, overlap.

    python -m experiments.network_model                                  # three models, five networks, 2 to 1024 GPUs
    python -m experiments.network_model --model resnet50 --compute 24    # with the ms per step that you have measured
    python -m experiments.network_model --gradient 400 --compute 90      # your own model: 400 MB of gradients
    python -m experiments.network_model --bandwidth 25 --latency 20      # your own network: Gbit/s and microseconds
    python -m experiments.network_model --strong --gpus 8,16             # more GPUs share one global batch

Nothing is run: the times of a step are computed from published figures and an assumed utilisation, until you give your
own (--compute).  docs/scaling.md has the formula, compares it with measured steps, and says what is left out.
"""

import argparse
import math
from typing import NamedTuple

MIB = 2**20  # bytes
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB  # DDP's defaults: a small one first, so that sending starts early
BACKWARD = 2 / 3  # of a step: backward computes two gradients (inputs, weights) for each product of the forward pass
# Of the bytes on an Ethernet with TCP: 1448 of a frame's 1514, and for two frames an acknowledgement the other way.
PAYLOAD = 1448 / (1514 + 66 / 2)
HOST = 1.5e-3  # seconds: an assumption, see docs/scaling.md; the host starts the operations of a step one by one
PEAK = 312.0  # TFLOP/s: bfloat16 on the tensor cores of an A100 (NVIDIA's data sheet)


class Model(NamedTuple):
    """What a step computes and sends.  The utilisation of the GPU is an assumption, not a measurement."""

    name: str
    parameters: int
    batch: int  # examples per GPU
    example: str
    flop: float  # to train on one example: forward and backward
    utilisation: float  # share of the GPU's peak that is reached


MODELS = {
    # 2.84 million multiply-adds forward, counted by hand; kernels so small take longer to start (HOST) than to run
    "convnet": Model("the MNIST ConvNet", 29_034, 200, "images", 6 * 2.84e6, 0.2),
    # 4.09 billion multiply-adds forward (torchvision's table of weights)
    "resnet50": Model("ResNet-50", 25_557_032, 64, "images", 6 * 4.09e9, 0.2),
    # 6 FLOP per parameter and token (Kaplan et al. 2020)
    "1b": Model("a transformer with 1 billion parameters", 1_000_000_000, 8192, "tokens", 6 * 1e9, 0.4),
}


class Network(NamedTuple):
    """One GPU's link.  The bandwidths are nominal, the latencies assumptions of a usual size."""

    name: str
    bandwidth: float  # bytes per second in each direction
    latency: float  # seconds per message
    tree: bool = False  # all-reduce over trees rather than a ring


NETWORKS = [
    Network("10 Gbit/s Ethernet", PAYLOAD * 10e9 / 8, 30e-6),
    Network("25 Gbit/s Ethernet", PAYLOAD * 25e9 / 8, 30e-6),
    Network("100 Gbit/s InfiniBand", 100e9 / 8, 5e-6),
    Network("400 Gbit/s InfiniBand", 400e9 / 8, 5e-6),
    Network("NVLink of an A100", 300e9, 3e-6),
]


# ----------------------------------------------------------------------------------------------------------- the model


def compute_time(flop: float, peak: float, utilisation: float) -> float:
    """Seconds for so many FLOP, if the share `utilisation` of a GPU's `peak` TFLOP/s is reached; at least HOST."""
    return max(flop / (peak * 1e12 * utilisation), HOST)


def compute_of_each(compute: float, gpus: int, strong: bool) -> float:
    """Seconds of computing per step on each of N GPUs, from those of one GPU.

    strong: they share one batch, but a smaller share takes no less than HOST, in which the host starts the operations.
    """
    return max(compute / gpus, min(compute, HOST)) if strong else compute


def buckets(gradient: float, size: float = BUCKET) -> list[float]:
    """The bytes of each of DDP's buckets, in the order in which backward fills them; they add up to `gradient`."""
    first = min(gradient, FIRST_BUCKET)
    whole, rest = divmod(gradient - first, size)
    return [first, *[size] * int(whole), *[rest] * (rest > 0)]


def all_reduce_time(size: float, gpus: int, network: Network) -> float:
    """Seconds to add up `size` bytes over all GPUs; 0 for one GPU.

    Each sends 2 (N - 1) / N of the bytes: its share of the sum to all, in a ring in 2 (N - 1) messages one after the
    other.  Trees (NCCL has two at once, each for half of the bytes) send as many bytes, but wait only 2 log2 N times.
    """
    messages = 2 * math.ceil(math.log2(gpus)) if network.tree else 2 * (gpus - 1)
    return 2 * (gpus - 1) / gpus * size / network.bandwidth + messages * network.latency


def step_time(compute: float, sizes: list[float], gpus: int, network: Network) -> float:
    """Seconds for a step: `compute` seconds of computing, and an all-reduce for each bucket (`sizes`, in bytes).

    Backward, the last two thirds of `compute`, fills the buckets evenly.  A bucket is sent as soon as it is full and
    the one before has been sent.  The last is full when backward ends: it is never hidden.
    """
    filled = sent = 0.0
    for size in sizes:
        filled += size
        full = compute * (1 - BACKWARD + BACKWARD * filled / sum(sizes))
        sent = max(sent, full) + all_reduce_time(size, gpus, network)
    return sent


def is_limit(compute: float, sizes: list[float], gpus: int, network: Network) -> bool:
    """Is the network the limit: do the all-reduces take longer than the backward pass that should hide them?"""
    all_buckets = network._replace(latency=len(sizes) * network.latency)
    return all_reduce_time(sum(sizes), gpus, all_buckets) > BACKWARD * compute


def limit_from(compute: float, sizes: list[float], network: Network, most: int, strong: bool = False) -> int:
    """The smallest number of GPUs, up to `most`, for which the network is the limit; 0 if there is none.

    `compute` is the time of one GPU; strong: see compute_of_each.
    """
    for gpus in range(2, most + 1):
        if is_limit(compute_of_each(compute, gpus, strong), sizes, gpus, network):
            return gpus
    return 0


def bandwidth_needed(compute: float, gradient: float, gpus: int) -> float:
    """Bytes per second with which the all-reduces take as long as backward, if messages had no latency."""
    return 2 * (gpus - 1) / gpus * gradient / (BACKWARD * compute)


# ----------------------------------------------------------------------------------------------------------- the table


def table(compute: float, gradient: float, networks: list[Network], args: argparse.Namespace) -> str:
    """A line per network: the efficiency for each number of GPUs, * where the network is the limit, and from when."""
    sizes = buckets(gradient, args.bucket * MIB)
    needed = 8e-9 * bandwidth_needed(compute, gradient, 8)
    lines = [f"  {gradient / 1e6:.4g} MB of gradients in {len(sizes)} bucket(s); 8 GPUs need {needed:.3g} Gbit/s each"]
    lines.append(f"  {'GPUs':<24}{''.join(f'{gpus:>8}' for gpus in args.gpus)}   the network is the limit")
    for network in networks:
        cells = ""
        for gpus in args.gpus:
            each = compute_of_each(compute, gpus, args.strong)
            perfect = compute / gpus if args.strong else compute
            star = "*" if is_limit(each, sizes, gpus, network) else " "
            cells += f"{perfect / step_time(each, sizes, gpus, network):>7.0%}{star}"
        first = limit_from(compute, sizes, network, max(args.gpus), args.strong)
        lines.append(f"  {network.name:<24}{cells}   {f'from {first} GPUs' if first else 'never'}")
    return "\n".join(lines)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="network_model.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=MODELS, help="only this one")
    add("--compute", type=float, help="ms per step of one GPU, measured by you, instead of the assumed time")
    add("--gradient", type=float, help="MB of gradients of your own model; needs --compute")
    add("--gpus", default="2,8,64,256,1024", help="(default: %(default)s)")
    add("--strong", action="store_true", help="keep the global batch: N GPUs compute 1/N of the time each")
    add("--bandwidth", type=float, help="Gbit/s of your own network, in each direction, per GPU")
    add("--latency", type=float, default=30, help="its microseconds per message (default: %(default)s)")
    add("--tree", action="store_true", help="all-reduce over trees rather than a ring")
    add("--bucket", type=float, default=BUCKET / MIB, help="DDP's bucket_cap_mb, in MiB (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("compute", "gradient", "bandwidth", "latency", "bucket"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} is {value}: give a number greater than 0")
    if (args.gradient or 1000) * 1e6 > 1e6 * args.bucket * MIB:
        parser.error(f"--bucket {args.bucket} MiB is too small: that makes more than a million buckets")
    if args.gradient and (args.model or not args.compute):
        parser.error("--gradient is for your own model: give its --compute (ms per step on one GPU), and no --model")
    if args.compute and not (args.gradient or args.model):
        parser.error("--compute is the time of one model: add --model or --gradient")
    numbers = args.gpus.split(",")
    if not all(number.isdecimal() and 2 <= int(number) <= 100_000 for number in numbers):
        parser.error(f"--gpus is {args.gpus}: give numbers from 2 to 100000, such as 2,8,64")
    args.gpus = [int(number) for number in numbers]
    return args


def main(argv: list[str] | None = None) -> None:
    """Print the tables that these flags ask for (None: those of the command line)."""
    args = parse_args(argv)
    networks = [network._replace(tree=args.tree) for network in NETWORKS]
    if args.bandwidth:
        name = f"{args.bandwidth:g} Gbit/s, {args.latency:g} us"
        networks = [Network(name, PAYLOAD * args.bandwidth * 1e9 / 8, args.latency * 1e-6, args.tree)]
    kept = "global batch" if args.strong else "batch per GPU"
    print(f"speed-up / GPUs, same {kept}; * = the network is the limit: all-reduce takes longer than backward")
    if args.gradient:
        print(f"\nyour model: {args.compute:g} ms per step")
        print(table(args.compute / 1e3, args.gradient * 1e6, networks, args))
        return
    for model in [MODELS[args.model]] if args.model else MODELS.values():
        compute = compute_time(model.flop * model.batch, PEAK, model.utilisation)
        source = f"assumed: {model.utilisation:.0%} of {PEAK:g} TFLOP/s"
        if compute == HOST:
            source = "assumed: the host starts its operations in that time"
        if args.compute:
            compute, source = args.compute / 1e3, "given"
        print(f"\n{model.name}: {model.batch} {model.example} per GPU in {1e3 * compute:.3g} ms ({source})")
        print(table(compute, 4 * model.parameters, networks, args))  # 4 bytes: float32, with torch.amp as well


if __name__ == "__main__":
    main()
