"""The command line."""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from ddp_by_diff import equivalence
from ddp_by_diff.equivalence.verdict import Answer, refusal_in
from ddp_by_diff.instruments import command
from ddp_by_diff.instruments.command import Line

FAILED = "the program failed with several processes"
NCCL_SHARED = (
    "nccl needs a GPU for each process, and here they share GPUs: where the program asks for nccl, "
    'type init_process_group("gloo") in a copy of it'
)


def parse_args() -> argparse.Namespace:
    parser = command.new_parser("equivalence", equivalence.__doc__)
    add = parser.add_argument
    add("--nproc", type=int, help="processes (default: one for each GPU, but at least 2)")
    add("--steps", type=int, default=3, help="steps to compare (default: %(default)s)")
    add("--epoch", action="store_true", help="follow one epoch: each example once, on one rank?")
    add("--alone", default="", help='extra flags for the single-process run: --alone="--nproc 1"')
    add("--json", metavar="FILE", help="also write the answer into FILE, as one JSON object")
    command.add_timeout(parser, 120)
    args = command.read(parser)
    try:
        args.alone = shlex.split(args.alone)
    except ValueError as problem:
        parser.error(f"--alone: {problem}")
    if not args.command:
        parser.error("give a program, such as mnist_ddp.py --dataset synthetic")
    if args.steps < 2 or not args.timeout > 0 or (args.nproc is not None and args.nproc < 2):
        parser.error("--nproc and --steps must be at least 2, and --timeout greater than 0")
    args.json = args.json and command.output_path(parser, args.json)
    return args


def main() -> int:
    args = parse_args()
    # These import torch, which takes seconds.
    from ddp_by_diff.instruments.rank import leave

    try:
        code = compare(args)
    except KeyboardInterrupt:
        return 130
    except Exception:  # 1 would mean: different
        traceback.print_exc()
        code = failed(args, "this is a bug in equivalence itself: please report it")
    leave(code)
    return code


def compare(args: argparse.Namespace) -> int:
    """Run A; then, in the process that collects the ranks' notes, the other runs and the answer."""
    import torch

    from ddp_by_diff.equivalence import epoch, judge
    from ddp_by_diff.equivalence.observe import observers
    from ddp_by_diff.instruments import ranks as instrument
    from ddp_by_diff.instruments.rank import Job

    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="equivalence-"))

    codes: list[int] = []

    def show(notes: list) -> int:
        has_failed = any(note.ending == "failed" for note in notes)
        if has_failed and not (args.epoch and epoch.are_cut_off(notes)):
            write(args, {"verdict": "error", "text": FAILED})
            return 2  # the launcher prints the error
        instrument.exit_at_sigterm()
        codes.append(say(args, judge.answer(args, sorted(notes), folder), len(notes), started))
        return codes[0]

    torch.set_num_threads(1)  # with threads of torch, this process could not fork
    # On GPUs another batch size may select another kernel, with other rounding errors.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    make, arguments = epoch.observers if args.epoch else observers, (args.steps, f"{folder}/log")
    job = Job("equivalence", args.command, args.timeout, make, arguments)
    args.nproc, args.shared = instrument.at_least_two(args.nproc)
    try:
        return instrument.look_at(job, args.nproc, show)
    except SystemExit as end:  # the program failed
        command.show("")
        if codes:  # the answer explains it
            return codes[0]
        if refusal := refusal_in(str(end.code)):
            return failed(args, refusal)
        if isinstance(end.code, str):
            for log in sorted(folder.glob("log*")):
                sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-2000:])
            print(end.code, file=sys.stderr)
            is_nccls = args.shared and "nccl" in end.code.lower()
            return failed(args, NCCL_SHARED if is_nccls else FAILED)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def say(args: argparse.Namespace, found: Answer, processes: int, started: float) -> int:
    """Print the answer, and write it; returns the exit code."""
    import torch

    seconds, lines = time.perf_counter() - started, found.lines()
    if len(found.checks) > 1:
        and_one = " and on 1" * any(check.label == "weights" for check in found.checks)
        length = "one epoch" if args.epoch else f"{args.steps} steps"
        gpus = "1 visible GPU" if args.shared == 1 else f"{args.shared} visible GPUs"
        shared = f" (over gloo, with {gpus})" if args.shared else ""
        text = f"{shlex.join(args.command)} on {processes} processes{shared}{and_one}, {length}"
        lines.insert(1 + len(found.verdict.ways_on), Line("program", f"{text} ({seconds:.0f} s)"))
        left_out = "the rest of the epoch (use --epoch), evaluation, resuming"
        lines.append(Line("not checked", "gradients and weights" if args.epoch else left_out))
    command.show("")
    command.say(lines, indent=14)
    more = {"processes": processes, "steps": None if args.epoch else args.steps}
    more |= {"seconds": round(seconds, 1), "torch": torch.__version__}
    write(args, found.as_json() | more)
    return found.verdict.code


def failed(args: argparse.Namespace, text: str) -> int:
    """Print and write why there is no answer; returns the exit code."""
    print(f"equivalence: {text}", file=sys.stderr)
    write(args, {"verdict": "error", "text": text})
    return 2


def write(args: argparse.Namespace, found: dict) -> None:
    """Write the answer as one object of JSON: the file is complete, or as it was before."""
    if args.json:
        about = {"program": args.command, "python": sys.version.split()[0]}
        command.write_file(args.json, json.dumps(found | about, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
