"""How fast each program trains, beside its peers and its limit; the time to 99 %.

    python -m experiments.benchmark                    # prints two tables: about 12 minutes on two quiet cores
    python -m experiments.benchmark speed              # only this one: speed or accuracy
    python -m experiments.benchmark --save             # writes them to experiments/results/, too
    python -m experiments.benchmark --dry-run          # each program once, with a few batches: only to see that it runs

speed     images/s in training, as each program prints them, on synthetic digits: the median over the epochs of a run,
          without the first; in the table median, least and greatest over the runs.  The peers load image by image, as
          their examples do, and in whole batches, as our loader does: pip install pytorch-ignite accelerate lightning
accuracy  seconds from the start of the command to the end of the first epoch with 99 % on MNIST

The programs take turns (A B C A B C), so that a machine whose speed drifts is fair to all.  Each turn has its own seed.
Every program may use all cores: processes x threads = cores.  All keep the memory that a step frees: data.py sees to
that, in the peers, too.
"""

import argparse
import math
import os
import statistics
import sys
import time
from importlib import metadata
from typing import NamedTuple

import torch

import data
from experiments import measured
from experiments.measured import Epoch, spread

SINGLE, WHOLE = "image by image", "in whole batches"
BARRIER = "compute with one barrier per step"
PEERS = {  # the program: its name in the table, the package that it needs
    "plain_ddp": ("plain DDP loop", "torch"),
    "with_ignite": ("PyTorch-Ignite", "pytorch-ignite"),
    "with_accelerate": ("Accelerate", "accelerate"),
    "with_fabric": ("Lightning Fabric", "lightning"),
}
TARGET = 99.0  # per cent


class Program(NamedTuple):
    title: str
    loads: str  # SINGLE or WHOLE
    processes: int
    threads: int  # of each process
    command: list[str]
    variables: dict[str, str] = {}


# ------------------------------------------------------------------------------------------------------ what to measure


def one_process() -> Program:
    return Program("mnist_single.py", WHOLE, 1, measured.cores(), ["mnist_single.py"])


def script(title: str, *command: str) -> Program:
    """A program of ours, with a process for each GPU, or for each core."""
    processes = torch.cuda.device_count() or measured.cores()
    threads = max(1, measured.cores() // processes)
    return Program(title, WHOLE, processes, threads, [*command, "--nproc", str(processes)])


def peer(name: str, loads: str) -> Program:
    """Started by torchrun, as its users would."""
    ours = script(PEERS[name][0])
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ours.processes}"]
    command = [*torchrun, "-m", f"experiments.baselines.{name}", *(["--whole-batches"] if loads == WHOLE else [])]
    return ours._replace(loads=loads, command=command, variables={"OMP_NUM_THREADS": str(ours.threads)})


def version(package: str) -> str:
    """Name and version; "" if it is not installed."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def plan() -> list[Program]:
    """The lines of the table of speeds, in its order; peers that are not installed are left out, with a line."""
    found = [one_process(), script("mnist_ddp.py", "mnist_ddp.py")]
    if torch.cuda.device_count() > 1:  # else it computes what mnist_single.py computes
        found.append(one_process()._replace(title="mnist_dataparallel.py", command=["mnist_dataparallel.py"]))
    if torch.cuda.device_count() or "(with bf16" in measured.machine():  # else ten times slower: minutes for each run
        found.append(script("mnist_amp.py", "mnist_amp.py"))
    for name, (title, package) in PEERS.items():
        if version(package):
            found += [peer(name, SINGLE), peer(name, WHOLE)]
        else:
            print(f"{title} is left out: pip install {package}")
    limit = ["-m", "experiments.baselines.limit"]
    return [*found, script("compute only", *limit), script(BARRIER, *limit, "--barrier")]


# ----------------------------------------------------------------------------------------------------------- measuring


def run_in_turns(programs: list[Program], turns: int, flags: list[str]) -> list[list[list[Epoch]]]:
    """For each program its runs, for each run its epochs; a line of progress before each run."""
    found = [[] for _ in programs]
    total, done, started = turns * len(programs), 0, time.monotonic()
    for turn in range(turns):
        for program, runs in zip(programs, found, strict=True):
            left = (time.monotonic() - started) / done * (total - done) / 60 if done else math.nan
            words = f"run {done + 1} of {total}: {program.title}, {program.loads}"
            print(words + (f"; about {left:.0f} min left" if done else ""), flush=True)
            command = [*program.command, *flags, "--seed", turn]
            runs.append(measured.run(command, **program.variables))
            done += 1
    return found


def speed(epochs: list[Epoch]) -> float:
    """images/s of a run, without the first epoch, in which memory is allocated and DDP arranges its buckets."""
    return statistics.median(epoch.images_per_s for epoch in epochs[1:] or epochs)


def speed_rows(programs: list[Program], speeds: list[list[float]]) -> list[list[str]]:
    """speeds: those of each program's runs.  A program that loads in two ways has one line."""
    of = {(program.title, program.loads): values for program, values in zip(programs, speeds, strict=True)}
    limit = statistics.median(of[BARRIER, WHOLE])
    rows = [["program", "processes x threads", f"images/s, {SINGLE}", f"images/s, {WHOLE}", "of the last line"]]
    for title in dict.fromkeys(program.title for program in programs):
        layout = next(f"{p.processes} x {p.threads}" for p in programs if p.title == title)
        whole = of[title, WHOLE]
        share = f"{statistics.median(whole) / limit:.0%}"
        rows.append([title, layout, spread(of.get((title, SINGLE), [])), spread(whole), share])
    return rows


def seconds_to_target(epochs: list[Epoch]) -> float:
    """When the first epoch with TARGET ended; inf if there is none."""
    return next((epoch.end for epoch in epochs if epoch.accuracy >= TARGET), math.inf)


def accuracy_rows(programs: list[Program], runs: list[list[list[Epoch]]]) -> list[list[str]]:
    rows = [["program", "processes x threads", f"seconds to {TARGET:g} %", "accuracy at the end, %"]]
    for program, of_program in zip(programs, runs, strict=True):
        seconds = spread([seconds_to_target(epochs) for epochs in of_program], "{:.1f}").replace("inf", "never")
        last = spread([epochs[-1].accuracy for epochs in of_program], "{:.2f}")
        rows.append([program.title, f"{program.processes} x {program.threads}", seconds, last])
    return rows


# --------------------------------------------------------------------------------------------------------- the program

IN_TURNS = "Runs of each program: {}, in alternation; median, least and greatest."


def command(table: str, args: argparse.Namespace) -> str:
    return f"python -m experiments.benchmark {table} --turns {args.turns} --save"


def speed_table(args: argparse.Namespace) -> tuple[str, list[list[str]]]:
    programs = plan()
    flags = ["--dataset", "synthetic", "--epochs", "2", *(["--dry-run"] if args.dry_run else [])]
    speeds = [[speed(epochs) for epochs in runs] for runs in run_in_turns(programs, args.turns, flags)]
    peers = ", ".join(filter(None, (version(package) for _, package in PEERS.values() if package != "torch")))
    conditions = measured.conditions(command("speed", args), f"{peers}. {IN_TURNS.format(args.turns)}")
    return conditions, speed_rows(programs, speeds)


def accuracy_table(args: argparse.Namespace) -> tuple[str, list[list[str]]]:
    programs = [one_process(), script("mnist_ddp.py", "mnist_ddp.py")]
    data_set = ["synthetic", "--dry-run"] if args.dry_run else ["mnist", "--data-dir", os.path.abspath(args.data_dir)]
    runs = run_in_turns(programs, args.turns, ["--dataset", *data_set])
    conditions = measured.conditions(command("accuracy", args), f"3 epochs of MNIST. {IN_TURNS.format(args.turns)}")
    return conditions, accuracy_rows(programs, runs)


TABLES = {"speed": speed_table, "accuracy": accuracy_table}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)} (default: all)")
    parser.add_argument("--turns", type=int, default=5, help="runs of each program (default: %(default)s)")
    parser.add_argument("--data-dir", default="data", help="MNIST is kept here (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write the tables to experiments/results/")
    parser.add_argument("--dry-run", action="store_true", help="only to see that everything runs")
    args = parser.parse_args()
    unknown = [name for name in args.tables if name not in TABLES]
    if unknown:
        parser.error(f"there is no table {unknown[0]!r}: choose from {', '.join(TABLES)}")
    if args.turns < 1:
        parser.error("--turns must be at least 1")
    if args.save and args.dry_run:
        parser.error("a dry run measures nothing: leave out --save")
    args.tables = args.tables or list(TABLES)
    if "accuracy" in args.tables and not args.dry_run:
        data.prepare("mnist", args.data_dir, error=parser.error)
    args.turns = 1 if args.dry_run else args.turns
    return args


def main() -> int:
    args = parse_args()
    try:
        for name in args.tables:
            measured.report(name, *TABLES[name](args), save=args.save)
    except RuntimeError as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
