"""The pictures of docs/timelines/: a step of each variant below the same step of its parent, by timeline.py.

    sudo python -m experiments.timelines                  # all of them, into the folder timelines/: 4 minutes
    sudo python -m experiments.timelines overlap fsdp     # only these
    sudo python -m experiments.timelines --save           # all, into docs/timelines/
    python -m experiments.timelines pipeline              # without root: no slowed network, no lanes of the links

Two processes on the CPU train on synthetic digits.  Where messages are what a picture is about, each process has a
network link that carries 50 Mbit/s (slow_link.py): over memory they take no time that could be seen.  The lane of a
link shows what the kernel counts: bytes that left a process, read every millisecond, beside the messages that torch
tells of.
"""

import argparse
import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import distributed as dist
import timeline
from experiments import measured, slow_link

RATE = 50  # Mbit/s
STEPS = 24  # that are recorded
TWO = {  # picture: is the network slowed, how many steps are shown, parent and child with their flags
    "by_hand": (True, 1, "mnist_ddp", "variants.mnist_by_hand"),
    "overlap": (True, 1, "variants.mnist_by_hand", "variants.mnist_overlap"),
    "zero": (True, 1, "variants.mnist_by_hand", "variants.mnist_zero"),
    "accumulate": (True, 1, "mnist_ddp", "variants.mnist_accumulate"),
    "fsdp": (True, 1, "mnist_ddp", "variants.mnist_fsdp"),
    "local_sgd": (True, 8, "mnist_ddp", "variants.mnist_local_sgd --every 8"),
    "tensor_parallel": (False, 1, "mnist_ddp", "variants.mnist_tensor_parallel"),
    "pipeline": (False, 1, "mnist_ddp", "variants.mnist_pipeline"),
    "compile": (False, 1, "mnist_ddp", "variants.mnist_compile"),
    "amp": (False, 1, "mnist_ddp", "mnist_amp"),
}


def count_bytes(folder: str, until: Any, found: Any) -> None:
    """In a process of its own, in the bridge's network: (time, {name of a port: bytes received}) every millisecond."""
    samples = []
    while not until.wait(0.001):
        lines = Path("/proc/net/dev").read_text().splitlines()
        ports = [line.split() for line in lines if line.lstrip().startswith("port")]
        samples.append((time.time_ns(), {words[0].rstrip(":"): int(words[1]) for words in ports}))
    names = [f"port{Path(folder, str(rank)).read_text()}" for rank in range(len(os.listdir(folder)))]
    found.send([[(when, counts[name]) for when, counts in samples if name in counts] for name in names])


def worker(local_rank: int, world_size: int, bridge: int, folder: str, args: argparse.Namespace) -> list[dict] | None:
    if bridge:
        Path(folder, str(local_rank)).write_text(str(os.getpid()))
        slow_link.link_to_bridge(local_rank, bridge)
        slow_link.set_rate(RATE)
    return timeline.record(local_rank, world_size, args)


def links_of(picture: dict, samples: list[list[tuple[int, int]]]) -> list[dict]:
    """The lanes, from the counters of the ranks' links: bytes per second over two milliseconds each."""
    links = []
    for rank, counted in enumerate(samples):
        inside = [(when - picture["begin"], count) for when, count in counted]
        inside = [one for one in inside if 0 <= one[0] <= picture["end"]]
        rates, (before, sent) = [], inside[0]
        for when, count in inside:
            if when - before >= 2_000_000:
                rates.append([before, (count - sent) / (when - before) * 1e9])
                before, sent = when, count
        total = inside[-1][1] - inside[0][1]
        links.append({"name": f"link {rank}", "rates": [*rates, [before, 0]], "limit": RATE * 1e6 / 8, "sent": total})
    return links


@functools.cache
def record(program: str, is_slow: bool, shown: int) -> dict:
    """The picture of a program, recorded in two processes."""
    command = ["-m", *program.split(), "--dataset", "synthetic"]
    args = argparse.Namespace(command=command, steps=STEPS, steps_shown=shown, patience=120.0, out="failed")
    fork = multiprocessing.get_context("fork")
    until, (mine, theirs) = fork.Event(), fork.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        counter = fork.Process(target=count_bytes, args=(folder, until, theirs), daemon=True)
        if is_slow:
            counter.start()
        recordings = dist.launch(worker, os.getpid() if is_slow else 0, folder, args, nproc=2)
        until.set()
        samples = mine.recv() if is_slow else []
    ports = [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines() if "port" in line]
    for port in ports if is_slow else ():  # the kernel keeps a link while bytes wait there; the next has its address
        subprocess.run(["ip", "link", "delete", port], check=False, stderr=subprocess.DEVNULL)
    picture = timeline.picture_of(recordings, args)
    picture["title"] = f"{program.rpartition('.')[2]}, {f'{RATE} Mbit/s' if is_slow else 'no slowed network'}"
    picture["links"] = links_of(picture, samples)
    picture["setting"] += f", {measured.cores()} cores for all"
    timeline.say(picture["findings"])
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"(default: all) {' '.join(TWO)}")
    parser.add_argument("--save", action="store_true", help="write all pictures to docs/timelines/")
    args = parser.parse_args()
    if not set(args.names) <= set(TWO) or (args.save and args.names):
        parser.error(f"choose from {' '.join(TWO)}; --save takes all of them")
    has_links = True
    try:
        slow_link.make_bridge()
    except (OSError, AttributeError) as problem:  # not root, not Linux
        has_links = False
        if args.save:
            parser.error(f"--save needs the slowed network: {problem}")
        print(f"without the slowed network, as it {problem}", file=sys.stderr)
    folder = measured.ROOT / "docs" / "timelines" if args.save else Path("timelines")
    folder.mkdir(exist_ok=True)
    for name in args.names or TWO:
        is_slow, shown, *programs = TWO[name]
        pictures = [record(program, is_slow and has_links, shown) for program in programs]
        (folder / f"{name}.svg").write_text(timeline.draw(pictures), encoding="utf-8")
        print(f"written: {folder / name}.svg", flush=True)


if __name__ == "__main__":
    main()
