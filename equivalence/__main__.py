"""The command line."""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

if __package__ != "equivalence":  # python PATH/equivalence, or the package that pip installs
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from instruments import command  # noqa: E402
from instruments.command import Line  # noqa: E402

import equivalence  # noqa: E402
from equivalence import progress  # noqa: E402

LEFT_OUT = "an epoch's last batch, evaluation and resume were not looked at"


def parse_args() -> argparse.Namespace:
    parser = command.new_parser("equivalence", equivalence.__doc__)
    add = parser.add_argument
    add("--nproc", type=int, help="processes (default: one for each GPU; without a GPU, 2)")
    add("--steps", type=int, default=3, help="to compare (default: %(default)s)")
    add("--only", choices=["averaging"], help="without runs in one process: only this question")
    add("--alone", default="", help='flags for the run in one process: --alone="--nproc 1"')
    add("--patience", type=float, default=120, help="seconds without a step (default: %(default)s)")
    args = command.read(parser)
    try:
        args.alone = shlex.split(args.alone)
    except ValueError as problem:
        parser.error(f"--alone: {problem}")
    if not args.command:
        parser.error("give a program, such as mnist_ddp.py --dataset synthetic")
    if args.steps < 2 or not args.patience > 0 or (args.nproc is not None and args.nproc < 2):
        parser.error("--nproc and --steps must be at least 2, and --patience greater than 0")
    return args


def main() -> int:
    args = parse_args()
    # These import torch, which takes seconds.
    from instruments.rank import leave

    try:
        code = compare(args)
    except KeyboardInterrupt:
        return 130
    except Exception:  # 1 would mean: different
        traceback.print_exc()
        print("equivalence: this is a mistake of equivalence's own", file=sys.stderr)
        code = 2
    leave(code)
    return code


def compare(args: argparse.Namespace) -> int:
    """Run A, and where its notes come together the runs in one process, and the answer."""
    import torch
    from instruments import ranks as instrument
    from instruments.rank import Job

    from equivalence.record import Recorder
    from equivalence.words import refusal_in

    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="equivalence-"))

    def show(notes: list) -> int:
        if any(note.ending == "failed" for note in notes):
            return 2  # its error follows
        return answer(args, sorted(notes), folder, started)

    torch.set_num_threads(1)  # or nothing could be forked after it
    # On GPUs another batch size may mean another kernel, which rounds otherwise.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    instrument.translate_variables()
    is_here = instrument.read_place() is None  # so all ranks will be on this machine
    shelf = str(folder) if is_here else None
    arguments = (args.steps, f"{folder}/log", shelf)
    job = Job("equivalence", args.command, args.patience, Recorder, arguments)
    try:
        return instrument.look_at(job, args.nproc, show)
    except SystemExit as end:  # the program failed
        progress.show("")
        refusal = refusal_in(str(end.code))
        if refusal:
            print(f"equivalence: {refusal}", file=sys.stderr)
            return 2
        if isinstance(end.code, str):
            for log in sorted(folder.glob("log*")):
                sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-2000:])
            print(end.code, file=sys.stderr)
            print("equivalence: the program failed with several processes", file=sys.stderr)
            return 2
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def answer(args: argparse.Namespace, notes: list, folder: Path, started: float) -> int:
    from instruments.ranks import NO_STEP, exit_at_sigterm

    from equivalence import verdict
    from equivalence.alone import Runs
    from equivalence.facts import Facts
    from equivalence.judge import Judge

    exit_at_sigterm()
    ranks = [note.value for note in notes]
    for rank in ranks:
        rank.open()
    steps = [len(rank.counts) for rank in ranks]
    if max(steps) == 0:
        return unknown(NO_STEP)
    is_stuck = any(note.ending == "stuck" for note in notes)
    if len(ranks) < ranks[0].world_size or is_stuck or min(steps) <= args.steps:
        each = ", ".join(f"rank {rank.rank}: {len(rank.counts)}" for rank in ranks)
        return unknown(
            f"not all ranks came through {args.steps + 1} steps of an optimizer ({each}): let them "
            "make more, or give fewer --steps"
        )
    if len(ranks) < 2:
        return unknown("there is only one process: give --nproc 2")
    runs = Runs(args, folder, len(ranks))
    if args.only:
        code, lines = verdict.only_averaging(Facts(ranks, args.steps))
    else:
        judge = Judge(ranks, args.steps, runs)
        code, lines = verdict.all_three(judge, args.command)
        if judge.look is None and code == verdict.UNKNOWN:
            sys.stderr.write(runs.problem)
    seconds = f"{time.perf_counter() - started:.0f} s"
    and_one = "" if args.only else " and one"
    program = f"{shlex.join(args.command)}: {len(ranks)} processes{and_one}, {args.steps} steps"
    lines.insert(1, Line("program", f"{program} ({seconds})"))
    lines.append(Line("note", f"{args.steps} steps; {LEFT_OUT}"))
    say(lines)
    return code


def unknown(text: str) -> int:
    say([Line("verdict", f"NOT FOUND OUT: {text}")])
    return 2


def say(lines: list[Line]) -> None:
    progress.show("")
    command.say(lines, indent=14)


if __name__ == "__main__":
    sys.exit(main())
