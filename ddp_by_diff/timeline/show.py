"""Records all ranks, says what was found, and writes timeline.svg and timeline.json."""

import argparse
import functools
import json
import sys

import torch

from ddp_by_diff.instruments.command import Line, refuse, say, started_as, write_file
from ddp_by_diff.instruments.rank import Job, Notes
from ddp_by_diff.instruments.ranks import look_at
from ddp_by_diff.timeline.data import Recording, counted, recorded_steps
from ddp_by_diff.timeline.draw import draw
from ddp_by_diff.timeline.figures import compare, read_figures
from ddp_by_diff.timeline.picture import picture_of
from ddp_by_diff.timeline.record import observers
from ddp_by_diff.timeline.trace import trace_of

NO_STEP = (
    "no optimizer of torch.optim made a step that was seen. Steps inside torch.compile, in another "
    "thread, or in processes of the program's own are not: start its worker function under torchrun"
)


def record_and_show(args: argparse.Namespace) -> int:
    """Record the program on all ranks, then show it; returns the exit code."""
    job = Job("timeline", args.command, args.timeout, observers, (args.steps, args.ops))
    return look_at(job, args.nproc, functools.partial(show, args))


def show(args: argparse.Namespace, notes: list[Notes]) -> int:
    """Show what the ranks have left; returns the exit code."""
    recordings = [note.value for note in notes]
    usable = [recording for recording in recordings if recording["last"] >= recording["first"]]
    broken = [note for note in notes if note.ending in ("failed", "stuck")]
    if not usable:
        if not broken:  # else its own error is said
            text = too_few_steps(recordings, args.steps)
            print(f"timeline: {text}", file=sys.stderr, flush=True)
        return 1
    if broken:
        names = ", ".join(f"rank {note.rank} {note.ending}" for note in broken)
        print(f"timeline: {names}; what was recorded before is drawn", flush=True)
    picture, figures = picture_of(usable, args)
    say(picture["findings"])  # before it is written: the disk may be full
    if torch.cuda.device_count() == 1 and recordings[0]["ranks"] == 1 and not args.nproc:
        type_this = f"DIST_BACKEND=gloo {started_as('timeline')} --nproc 2 ..."
        say([Line("processes", f"one, for the one visible GPU. Two can share it: {type_this}")])
    code = 0
    if args.before:
        text, code = compare(args.before, figures, args.tolerance)
        say([Line("against", text)])
    trace = json.dumps(trace_of(picture), separators=(",", ":"))
    files = {f"{args.out}.svg": draw([picture]), f"{args.out}.json": trace}
    if args.json:
        files[args.json] = json.dumps(figures) + "\n"
    return code if write(files) and not broken else 1


def write(files: dict[str, str]) -> bool:
    """Write these texts, and say it; False, and a line, if one can't be written."""
    written = []
    for file, text in files.items():
        try:
            write_file(file, text)
            written.append(file)
        except OSError as problem:
            error = f"timeline: {file} can't be written: {problem.strerror}"
            print(error, file=sys.stderr, flush=True)
    if written:
        say([Line("written", ", ".join(written))])
    return len(written) == len(files)


def too_few_steps(recordings: list[Recording], steps: int) -> str:
    """Why nothing is drawn."""
    if not any(recording["cuts"] for recording in recordings):
        return NO_STEP
    made = min(max(0, len(recording["cuts"]) - 1) for recording in recordings)
    return (
        f"the program made {counted(made, 'step')}; --steps {steps} records from step "
        f"{recorded_steps(steps)[0] + 1} on: let it make more, or give fewer --steps"
    )


def read_before(file: str) -> dict:
    """The figures in the file of --against; or one line, and exit code 2."""
    try:
        return read_figures(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        why = f"{type(problem).__name__}: {problem}"
        refuse("timeline", f"{file} can't be read as what --json writes ({why})")
