"""The command line."""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import textwrap
import time
from pathlib import Path

if not __package__:  # as `python PATH/equivalence`, from any folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from instruments import command  # noqa: E402

import equivalence  # noqa: E402
from equivalence import progress  # noqa: E402

LEFT_OUT = "an epoch's last batch, evaluation and resume were not looked at"


def parse_args() -> argparse.Namespace:
    parser = command.new_parser("equivalence", equivalence.__doc__)
    add = parser.add_argument
    add("--nproc", type=int, help="processes (default: one for each GPU; without a GPU, 2)")
    add("--steps", type=int, default=3, help="to compare (default: %(default)s)")
    add("--alone", default="", help='flags for the run in one process: --alone="--nproc 1"')
    add("--patience", type=float, default=120, help="seconds without a step (default: %(default)s)")
    args = command.read(parser)
    args.alone = shlex.split(args.alone)
    if not args.command:
        parser.error("give a program, such as mnist_ddp.py --dataset synthetic")
    if args.steps < 2 or not args.patience > 0 or (args.nproc is not None and args.nproc < 2):
        parser.error("--nproc and --steps must be at least 2, and --patience greater than 0")
    return args


def main() -> int:
    args = parse_args()
    # These import torch, which takes seconds.
    from instruments.ranks import UsageError, end_process_if_threads_live_on

    try:
        code = compare(args)
    except UsageError as problem:
        print(f"equivalence: error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    end_process_if_threads_live_on(code)
    return code


def compare(args: argparse.Namespace) -> int:
    """Run A, and where its notes come together run B and the answer."""
    import torch
    from instruments import ranks as instrument

    from equivalence.record import QuietRecorder

    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="equivalence-"))

    def show(notes: list) -> int:
        if any(one.ending == "failed" for one in notes):
            return 2  # its error follows
        return answer(args, sorted(notes), folder, started)

    torch.set_num_threads(1)  # or nothing could be forked after it
    arguments = (args.steps, str(folder))
    job = instrument.Job("equivalence", args.command, args.patience, QuietRecorder, arguments)
    try:
        return instrument.look_at(job, args.nproc, show)
    except SystemExit as end:  # the program failed
        progress.show("")
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
    from instruments.ranks import NO_STEP

    from equivalence.alone import run_all, why_no_room
    from equivalence.evidence import Evidence
    from equivalence.plan import Plan, Test
    from equivalence.verdict import judge

    ranks = [one.value for one in notes]
    steps = [len(rank.counts) for rank in ranks]
    made = min(steps)
    if max(steps) == 0:
        return unknown(NO_STEP)
    if len(ranks) < ranks[0].world_size or any(one.ending == "stuck" for one in notes):
        each = ", ".join(f"rank {rank.rank}: {len(rank.counts)}" for rank in ranks)
        return unknown(
            f"not all ranks came through {args.steps + 1} steps of an optimizer ({each})"
        )
    if made <= args.steps:
        steps = "1 step" if made == 1 else f"{made} steps"
        return unknown(
            f"the program made {steps}, and {args.steps + 1} are needed: let it make more, or "
            "give fewer --steps"
        )
    if len(ranks) < 2:
        return unknown("there is only one process: give --nproc 2")
    plan = Plan(ranks, args.steps)
    if reason := plan.why_not_one_batch() or why_no_room(plan):
        return unknown(reason)
    alone = run_all(args, plan, folder)
    if alone.result is None:
        sys.stderr.write(alone.problem)
        return unknown(
            "the program failed in one process, on the batches of all (its error is above). If it "
            "can't run so, or finds the first run's files, give it other flags: "
            '--alone="FLAGS"'
        )
    needed = [Test("whole", step) for step in range(args.steps)]
    needed += [Test("rounded", step) for step in range(args.steps)]
    if not all(test in alone.result.steps for test in needed):
        count = len(alone.result.steps)
        text = f"in one process the program made only {count} of the steps that are needed"
        text += f" (at least {len(needed)})"
        if alone.problem:
            sys.stderr.write(alone.problem)
            text += " (its error is above)"
        return unknown(text)
    if alone.result.unmatched:
        names = ", ".join(alone.result.unmatched[:3])
        return unknown(
            f"one process has weights that the {len(ranks)} don't have, or not in this shape: "
            f'{names}. If the program splits its model, try --alone="FLAGS" that leave it whole; '
            "if it calls a model in some steps only, give more --steps"
        )
    code, lines = judge(Evidence(alone.plan, alone.result))
    size = max(rank.size for rank in ranks) / 1000
    seconds = f"{time.perf_counter() - started:.0f} s"
    program = f"{shlex.join(args.command)}: {len(ranks)} processes and one, {args.steps} steps"
    texts = [(line.label, line.text) for line in lines]
    texts.insert(1, ("program", f"{program} ({seconds}; notes of {size:,.0f} kB on each rank)"))
    texts.append(("note", f"{args.steps} steps; {LEFT_OUT}"))
    say(texts)
    return code


def unknown(text: str) -> int:
    say([("verdict", f"NOT FOUND OUT: {text}")])
    return 2


def say(texts: list[tuple[str, str]]) -> None:
    progress.show("")
    width = max(60, shutil.get_terminal_size().columns - 1)
    lines = []
    for label, text in texts:
        lines.append(textwrap.fill(f"{label:13} {text}", width, subsequent_indent=" " * 14))
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main())
