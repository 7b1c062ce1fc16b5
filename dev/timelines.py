"""The pictures of docs/timelines/, a script's step below its parent's, and the table of memory in docs/results.md.

    sudo python -m dev.timelines overlap fsdp     # two pictures, into the folder timelines/
    python -m dev.timelines pipeline              # one without a slowed network needs no root
    python -m dev.timelines adam attention        # the tables of docs/results.md and docs/scaling.md
    sudo python -m dev.timelines --save           # all: docs/timelines/, dev/results/; 6 minutes

The processes train on synthetic digits, on the CPU.  For pictures about messages each process has a slowed network link
(slow_link.py): without it messages take too little time to be seen.  There, Gloo's threads get a core as soon as they
need one, because two processes that compute would leave them none of two cores, while a network card needs none
(GlooFirst).  For pictures about kept memory the network is wide, and the optimizer is Adam (networks.py).

A picture whose page says that a run is faster, or that it overlaps, is only written if it shows that (CLAIMS).  Else
the exit code is 1.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch import distributed as torch_dist

from ddp_by_diff.instruments.command import say
from ddp_by_diff.instruments.meeting import Place
from ddp_by_diff.instruments.observer import Observer
from ddp_by_diff.instruments.rank import Job
from ddp_by_diff.instruments.ranks import look_at
from ddp_by_diff.timeline.data import KINDS
from ddp_by_diff.timeline.draw import draw
from ddp_by_diff.timeline.picture import picture_of
from ddp_by_diff.timeline.record import observers
from dev import measured, slow_link
from dev.programs import ROOT
from dev.steps import code_digest


class Run(NamedTuple):
    program: str  # module and flags
    rate: float = 0  # Mbit/s that each link carries; 0: the network is not slowed
    shown: int = 1  # steps in the picture
    nproc: int = 2
    note: str = ""  # in the title
    flags: str = "--dataset synthetic"
    network: str = ""  # one of networks.py in place of the script's
    cores: int = 2  # for all processes
    recorded: int = 24  # steps

    @property
    def module(self) -> str:
        return self.program.split()[0]

    @property
    def command(self) -> list[str]:
        network = ["dev.networks", self.network] if self.network else []
        return ["-m", *network, *self.program.split(), *self.flags.split()]


SINGLE, DDP, BY_HAND = Run("mnist_single", nproc=1), Run("mnist_ddp", 50), Run("variants.mnist_by_hand", 50)
TENSOR_PARALLEL, PIPELINE = Run("variants.mnist_tensor_parallel"), "variants.mnist_pipeline --batch-size"
TRANSFORMER = Run("variants.mnist_transformer")
WIDE = {"network": "Wide", "flags": "--dataset synthetic --lr 0.001"}
WIDE_DDP = Run("mnist_ddp", 1000, note="wide network, Adam", **WIDE)
PICTURES = {  # the runs of a picture, from top to bottom
    "ddp": [SINGLE, Run("mnist_ddp")],
    "amp": [Run("mnist_ddp"), Run("mnist_amp")],
    "by_hand": [DDP, BY_HAND],
    "overlap": [BY_HAND, Run("variants.mnist_overlap", 50)],
    "zero": [WIDE_DDP, WIDE_DDP._replace(program="variants.mnist_zero")],
    "fsdp_by_hand": [WIDE_DDP._replace(program=f"variants.mnist_{name}") for name in ("by_hand", "fsdp_by_hand")],
    "accumulate": [DDP, Run("variants.mnist_accumulate", 50)],
    "fsdp": [WIDE_DDP, WIDE_DDP._replace(program="variants.mnist_fsdp")],
    "tensor_parallel": [SINGLE, TENSOR_PARALLEL],
    "mesh": [TENSOR_PARALLEL, Run("variants.mnist_mesh", nproc=4)],
    "pipeline": [
        WIDE_DDP._replace(rate=0),
        Run(f"{PIPELINE} 199", note="wide network, 1 micro-batch", **WIDE),  # as many as divide the batch
        Run(f"{PIPELINE} 200", note="wide network, 4 micro-batches", **WIDE),
    ],
    "pipeline_1f1b": [Run("variants.mnist_pipeline"), Run("variants.mnist_pipeline_1f1b")],
    "transformer": [Run("mnist_ddp"), TRANSFORMER],
    "context_parallel": [TRANSFORMER, Run("variants.mnist_context_parallel")],
    "experts": [TRANSFORMER, Run("variants.mnist_experts")],
    "local_sgd": [Run("mnist_ddp", 50, shown=8), Run("variants.mnist_local_sgd --every 8", 50, shown=8)],
    "buckets": [Run("cifar10_ddp --batch-size 64 --width 16", 500)],
    "checkpointed": [Run("mnist_ddp"), Run("mnist_ddp", network="Checkpointed", note="with checkpointing")],
    "slow_loading": [Run("demos.slow loading --every-rank", flags="", note="loading")],
    "slow_rank": [Run("demos.slow forward", flags="", note="rank 1 is late in forward")],
    "slow_messages": [Run("mnist_ddp", 20)],
    "slow_batch": [
        Run("mnist_single --batch-size 16", nproc=1, note="a batch of 16"),
        Run("mnist_ddp --batch-size 16", note="8 for each process"),
    ],
    "slow_core": [Run("mnist_ddp", note="two processes on one core", cores=1)],
}
ADAM = [  # one step each: all steps send and keep the same
    Run("mnist_ddp", nproc=1, recorded=1, **WIDE),
    Run("mnist_ddp", nproc=4, recorded=1, **WIDE),
    Run("variants.mnist_zero", nproc=4, recorded=1, **WIDE),
    Run("variants.mnist_fsdp", nproc=4, recorded=1, **WIDE),
]
ATTENTION = []  # shares of a sequence on 1, 2 and 4 ranks
for side in 4, 2:  # of a patch, of 28 x 28 pixels
    for nproc in 1, 2, 4:
        note, flags = f"{(28 // side) ** 2} tokens", "--dataset synthetic --batch-size 40"
        ATTENTION.append(Run(f"dev.sequence {side}", 0, 1, nproc, note, flags, recorded=2))


class GlooFirst(Observer):
    """Lets the threads in which Gloo transfers preempt those that compute."""

    def patches(self) -> list[tuple[Any, str, Callable]]:
        return [(torch_dist, "init_process_group", self.init_process_group)]

    def init_process_group(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        before = os.listdir("/proc/self/task")
        original(*args, **kwargs)
        for thread in set(os.listdir("/proc/self/task")) - set(before):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))


@functools.cache
def record(run: Run) -> dict:
    """Record a program in a new process, with which its network, folder and cores end; returns the picture."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        return executor.submit(record_here, run).result()


def record_here(run: Run) -> dict:
    if run.rate:
        slow_link.make_cable()
    cores = sorted(os.sched_getaffinity(0))[: run.cores]
    os.sched_setaffinity(0, cores)
    recordings: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:  # what a script saves is not kept
        os.chdir(folder)
        job = Job("timelines", run.command, 120.0, make_observers, (os.getpid(), run))
        look_at(job, run.nproc, lambda notes: recordings.extend(one.value for one in notes))
        os.chdir(ROOT)
    picture, figures = picture_of(recordings, argparse.Namespace(command=run.command, steps_shown=run.shown))
    name, rate = run.module.rpartition(".")[2], f"{run.rate:g} Mbit/s" if run.rate else ""
    picture["title"] = ", ".join(filter(None, [name, run.note, rate]))
    picture["setting"] += f", cores for all: {len(cores)}"
    if run.rate:
        picture["setting"] += ", Gloo's threads first"
    picture["step_without_recorder"] = figures["step_without_recorder"]
    say(picture["findings"])
    return picture


def make_observers(place: Place, owner: int, run: Run) -> list[Observer]:
    """The recorders of a rank, made before its program begins."""
    sys.path.append(str(ROOT))
    found = observers(place, run.recorded)
    if run.rate:
        slow_link.take_end(place.rank, owner, run.rate)
        found.append(GlooFirst())
    return found


def is_faster(runs: list[Run]) -> str:
    """The last run's steps are shorter than the first one's, also if both are recorded twice more."""
    for again in record, record.__wrapped__, record.__wrapped__:
        before, after = (again(run)["step_without_recorder"] for run in (runs[0], runs[-1]))
        print(f"without profiling: {before} ms above, {after} ms below", flush=True)
        if before <= after:
            return f"a step takes {after} ms, but {before} ms in the figure above it"
    return ""


def overlaps(runs: list[Run]) -> str:
    """On each rank of the last run, at least half of the transfers' time is inside `backward`."""
    for rank in record(runs[-1])["ranks"]:
        backward = [part for part in rank["parts"] if part.what == "backward"]
        during = 0
        for message, part in itertools.product(rank["messages"], backward):
            during += max(0, min(message.end, part.end) - max(message.until, part.begin))
        share = during / sum(message.end - message.until for message in rank["messages"])
        print(f"rank {rank['rank']}: {share:.0%} of the transfers' time is inside backward", flush=True)
        if share < 0.5:
            return f"only {share:.0%} of the time of rank {rank['rank']}'s transfers is inside backward"
    return ""


CLAIMS = {"overlap": [is_faster, overlaps], "buckets": [overlaps]}  # what the pages say of a picture


def drawn(runs: list[Run]) -> str:
    """The SVG; for dev/build.py also the last picture's line `why`, and digests of the recorded scripts."""
    text = draw([record(run) for run in runs])
    reasons = [line.text for line in record(runs[-1])["findings"] if line.label == "why"]
    text += f"<!-- why: {''.join(reasons)} -->\n"
    files = [f"{run.module.replace('.', '/')}.py" for run in runs]
    files += ["dev/networks.py" for run in runs if run.network]
    digests = ", ".join(f"{file} {code_digest(file)}" for file in dict.fromkeys(files))
    return text + f"<!-- recorded from {digests} -->\n"


TABLES = {
    "adam": ("With Adam; memory in kB.", ADAM),
    "attention": ("A batch of 40, of 7 x 7 and of 14 x 14 patches; memory in kB.", ATTENTION),
}


def row(run: Run) -> list[str]:
    """Of rank 0, which has the largest shares: messages and kB of a step, and kB at the peak."""
    rank = record(run)["ranks"][0]
    sent = sum(message.bytes for message in rank["messages"])
    held = max(zip(*(rank["memory"][kind] for kind in KINDS), strict=True), key=sum)
    kilobytes = [f"{size / 1000:,.0f}" for size in (sent, *held, sum(held))]
    name = run.note or f"`{run.module.removeprefix('variants.')}`"
    return [name, str(run.nproc), str(len(rank["messages"])), *kilobytes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PICTURES, *TABLES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"(default: all) {' '.join(names)}")
    parser.add_argument("--save", action="store_true", help="write into docs/timelines/ and dev/results/")
    args = parser.parse_args()
    if not set(args.names) <= set(names):
        parser.error(f"choose from {' '.join(names)}")
    folder, code = ROOT / "docs/timelines" if args.save else Path("timelines"), 0
    for name in args.names or names:
        if name in TABLES:
            rows = [["run", "processes", "messages", "kB", *KINDS, "sum"], *map(row, TABLES[name][1])]
            command = f"python -m dev.timelines --save {name}"
            measured.report(name, command, TABLES[name][0], rows, args.save)
            continue
        if os.geteuid() and any(run.rate for run in PICTURES[name]):
            parser.error(f"the slowed network needs root: sudo {sys.executable} -m dev.timelines {name}")
        refuted = [problem for claim in CLAIMS.get(name, []) if (problem := claim(PICTURES[name]))]
        if refuted:
            print(f"{name} refutes what its page says, so it is not written: {'; '.join(refuted)}", file=sys.stderr)
            code = 1
            continue
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.svg").write_text(drawn(PICTURES[name]), encoding="utf-8")
        print(f"written: {folder / name}.svg", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
