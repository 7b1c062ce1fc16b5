"""The pictures of docs/timelines/, a script's step below its parent's, and the tables of what each form costs.

    sudo python -m experiments.timelines overlap fsdp     # two pictures, into the folder timelines/
    sudo python -m experiments.timelines adam             # the table of docs/results.md
    sudo python -m experiments.timelines --save           # all: docs/timelines/, experiments/results/; 6 minutes
    python -m experiments.timelines pipeline              # without root: no slowed network, no lanes of the links

The processes train on synthetic digits, on the CPU.  Where messages are what a picture is about, each process has a
network link that carries 50 Mbit/s (slow_link.py): over memory they take no time that could be seen.  The lane of a
link shows what the kernel counts: bytes that left a process, read every millisecond, beside the messages that torch
tells of.  `adam` is the same training with a larger network, Adam and four processes: there sharding saves memory.
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
from typing import Any, NamedTuple

from experiments import measured, slow_link
from experiments.with_adam import Wide  # noqa: F401  for the tests
from instruments.hooks import Hooks
from instruments.meeting import Place
from instruments.ranks import Job, look_at
from timeline.data import KINDS, size_of
from timeline.draw import draw
from timeline.picture import picture_of
from timeline.record import Recorder
from timeline.say import say
from timeline.svg import Drawing
from tools.steps import code_digest

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's profiler would warn of older memory
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
STEPS = 24  # that are recorded
LINK = 24  # pixels: the height of a link's lane


class Run(NamedTuple):
    program: str  # module and flags
    rate: float = 0  # Mbit/s that each link carries; 0: the network is not slowed
    shown: int = 1  # steps in the picture
    nproc: int = 2
    note: str = ""  # in the title
    flags: str = "--dataset synthetic"
    is_on_one_core: bool = False
    has_adam: bool = False


SINGLE, DDP, BY_HAND = Run("mnist_single", nproc=1), Run("mnist_ddp", 50), Run("variants.mnist_by_hand", 50)
TENSOR_PARALLEL, PIPELINE = Run("variants.mnist_tensor_parallel"), "variants.mnist_pipeline --batch-size"
PICTURES = {  # below each other
    "ddp": [SINGLE, Run("mnist_ddp")],
    "amp": [Run("mnist_ddp"), Run("mnist_amp")],
    "by_hand": [DDP, BY_HAND],
    "overlap": [BY_HAND, Run("variants.mnist_overlap", 50)],
    "zero": [BY_HAND, Run("variants.mnist_zero", 50)],
    "accumulate": [DDP, Run("variants.mnist_accumulate", 50)],
    "fsdp": [DDP, Run("variants.mnist_fsdp", 50)],
    "tensor_parallel": [SINGLE, TENSOR_PARALLEL],
    "mesh": [TENSOR_PARALLEL, Run("variants.mnist_mesh", nproc=4)],
    "pipeline": [
        Run(f"{PIPELINE} 199", note="1 micro-batch"),  # as many as divide the batch
        Run(f"{PIPELINE} 198", note="2 micro-batches"),
        Run(f"{PIPELINE} 200", note="4 micro-batches"),
    ],
    "local_sgd": [Run("mnist_ddp", 50, shown=8), Run("variants.mnist_local_sgd --every 8", 50, shown=8)],
    "compile": [Run("mnist_ddp"), Run("variants.mnist_compile")],
    "buckets": [Run("cifar10_ddp --batch-size 64 --width 16", 500)],
    "checkpointed": [Run("mnist_ddp"), Run("experiments.checkpointed")],
    "slow_loading": [Run("demos.slow loading --every-rank", flags="", note="loading")],
    "slow_rank": [Run("demos.slow forward", flags="", note="rank 1 is late in forward")],
    "slow_messages": [Run("mnist_ddp", 20)],
    "slow_batch": [
        Run("mnist_single --batch-size 16", nproc=1, note="a batch of 16"),
        Run("mnist_ddp --batch-size 16", note="8 for each process"),
    ],
    "slow_core": [Run("mnist_ddp", note="two processes on one core", is_on_one_core=True)],
}
ADAM = [
    Run(f"{module} --lr 0.001", nproc=4, has_adam=True)
    for module in ("mnist_ddp", "variants.mnist_by_hand", "variants.mnist_zero", "variants.mnist_fsdp")
]
HEAD = ["program", "messages", "kB", "waits"]
HEAD += ["weights", "state", "gradients", "buffers", "activations", "temporary", "sum"]  # KINDS


# --------------------------------------------------------------------------------------------------------- recording


def make_recorder(place: Place, bridge: int, folder: str, run: Run) -> Hooks:
    """In each rank, before its program begins."""
    sys.path.append(str(measured.ROOT))
    os.chdir(Path(folder, "home"))  # what a script saves is not kept
    if run.rate:
        Path(folder, str(place.rank)).write_text(str(os.getpid()))
        slow_link.link_to_bridge(place.rank, bridge)
        slow_link.set_rate(run.rate)
    return Recorder(place, STEPS)


def count_bytes(folder: str, until: Any, found: Any) -> None:
    """In a process of its own, in the bridge's network: (time, {name of a port: bytes received}) every millisecond."""
    samples = []
    while not until.wait(0.001):
        lines = Path("/proc/net/dev").read_text().splitlines()
        ports = [line.split() for line in lines if line.lstrip().startswith("port")]
        samples.append((time.time_ns(), {words[0].rstrip(":"): int(words[1]) for words in ports}))
    names = [f"port{Path(folder, str(rank)).read_text()}" for rank in range(len(list(Path(folder).glob("[0-9]*"))))]
    found.send([[(when, counts[name]) for when, counts in samples if name in counts] for name in names])


def links_of(picture: dict, samples: list[list[tuple[int, int]]], rate: float) -> list[dict]:
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
        links.append({"name": f"link {rank}", "rates": [*rates, [before, 0]], "limit": rate * 1e6 / 8, "sent": total})
    return links


def draw_link(link: dict, drawing: Drawing) -> None:
    """What left a network link; the dashed line is what it can carry."""
    drawing.y += LINK + 4
    times, rates = zip(*link["rates"], strict=True)
    most = max(link["limit"], *rates, 1)
    drawing.areas(times, {"m": rates}, most, LINK)
    if link["limit"]:
        level = drawing.y - LINK * link["limit"] / most
        drawing.path("limit", f"M{drawing.x(times[0]):.1f},{level:.1f}H{drawing.x(times[-1]):.1f}")
    drawing.row(link["name"], f"sent {size_of(link['sent'])}", drawing.y - 6)


@functools.cache
def record(run: Run) -> dict:
    """The picture of a program."""
    command = ["-m", *run.program.split(), *run.flags.split()]
    args = argparse.Namespace(command=command, steps_shown=run.shown)
    if run.has_adam:
        command = ["-m", "experiments.with_adam", *command[1:]]
    recordings: list[dict] = []
    fork = multiprocessing.get_context("fork")
    until, (mine, theirs) = fork.Event(), fork.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "home").mkdir()
        counter = fork.Process(target=count_bytes, args=(folder, until, theirs), daemon=True)
        if run.rate:
            counter.start()
        all_cores = os.sched_getaffinity(0)
        if run.is_on_one_core:
            os.sched_setaffinity(0, {min(all_cores)})
        job = Job("timelines", command, 120.0, make_recorder, (os.getpid(), folder, run))
        variables = dict(os.environ)
        look_at(job, run.nproc, lambda notes: recordings.extend(one.value for one in notes))
        os.sched_setaffinity(0, all_cores)
        os.chdir(measured.ROOT)  # one process is this one
        os.environ.clear()
        os.environ.update(variables)
        until.set()
        samples = mine.recv() if run.rate else []
    ports = [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines() if "port" in line]
    for port in ports if run.rate else ():  # the kernel keeps a link while bytes wait there; the next has its address
        subprocess.run(["ip", "link", "delete", port], check=False, stderr=subprocess.DEVNULL)
    picture = picture_of(recordings, args)
    name = run.program.split()[0].rpartition(".")[2]
    picture["title"] = ", ".join(filter(None, [name, run.note, f"{run.rate:g} Mbit/s" if run.rate else ""]))
    picture["lanes"] = [functools.partial(draw_link, link) for link in links_of(picture, samples, run.rate)]
    picture["setting"] += ", one core for all" if run.is_on_one_core else f", {measured.cores()} cores for all"
    say(picture["findings"])
    return picture


# ------------------------------------------------------------------------------------------------ pictures and tables


def drawn(runs: list[Run]) -> str:
    """The SVG, the last picture's line `why`, and from which state of the scripts it is, for tools/build.py."""
    text = draw([record(run) for run in runs])
    reasons = [line.sentence for line in record(runs[-1])["findings"] if line.subject == "why"]
    text += f"<!-- why: {''.join(reasons)} -->\n"
    files = dict.fromkeys(f"{run.program.split()[0].replace('.', '/')}.py" for run in runs)
    return text + f"<!-- recorded from {', '.join(f'{file} {code_digest(file)}' for file in files)} -->\n"


def row(run: Run) -> list[str]:
    """Of the rank that sends, or holds, most: messages and kB of a step, the share that waits, kB at the peak."""
    picture = record(run)
    count, sent, share, held = 0.0, 0.0, 0.0, [0] * len(KINDS)
    for one in picture["ranks"]:
        own = [message["bytes"] for message in one["messages"] if message["kind"] != "recv"]
        count, sent = max(count, len(own) / run.shown), max(sent, sum(own) / run.shown)
        waits = sum(part.end - part.begin for part in one["parts"] if part.what == "waiting")
        share += waits / (one["cuts"][-1] - one["cuts"][0]) / len(picture["ranks"])
        held = max([held, *zip(*(one["memory"][kind] for kind in KINDS), strict=True)], key=sum)
    name = run.program.removeprefix("variants.").split(" --batch-size")[0].split(" --lr")[0]
    kilobytes = [f"{size / 1000:,.0f}" for size in (sent, *held, sum(held))]
    return [f"`{name}`", f"{count:g}", kilobytes[0], f"{share:.0%}", *kilobytes[1:]]


def report(save: bool) -> None:
    """Record, and print the table."""
    rows = [HEAD, *(row(run) for run in ADAM)]
    line = measured.conditions("sudo python -m experiments.timelines --save", "Four processes, Adam. Memory in kB.")
    measured.report("adam", line, rows, save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PICTURES, "adam"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"(default: all) {' '.join(names)}")
    parser.add_argument("--save", action="store_true", help="write into docs/timelines/ and experiments/results/")
    args = parser.parse_args()
    if not set(args.names) <= set(names):
        parser.error(f"choose from {' '.join(names)}")
    try:
        slow_link.make_bridge()
    except (OSError, AttributeError) as problem:  # not root, not Linux
        if args.save:
            parser.error(f"--save needs the slowed network: {problem}")
        print(f"without the slowed network, as it {problem}", file=sys.stderr)
        PICTURES.update({name: [run._replace(rate=0) for run in runs] for name, runs in PICTURES.items()})
    folder = measured.ROOT / "docs" / "timelines" if args.save else Path("timelines").resolve()
    folder.mkdir(exist_ok=True)
    for name in args.names or names:
        if name == "adam":
            report(args.save)
            continue
        (folder / f"{name}.svg").write_text(drawn(PICTURES[name]), encoding="utf-8")
        print(f"written: {folder / name}.svg", flush=True)


if __name__ == "__main__":
    main()
