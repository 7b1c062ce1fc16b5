"""Run B: the program in one process, as often as the tests need."""

import argparse
import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from instruments import ranks as instrument
from instruments.meeting import Folder, Place
from instruments.ranks import Job

from equivalence.plan import Plan, Test
from equivalence.replay import Replayer, Result

MEMORY = "/proc/meminfo"
MOST_RUNS = 8  # an infinite data set needs one, a program of few steps more


class Alone(NamedTuple):
    """What all runs together have found."""

    plan: Plan
    result: Result | None
    problem: str = ""  # what the program printed, if it failed


def run_all(args: argparse.Namespace, plan: Plan, folder: Path) -> Alone:
    """Until all tests are made, or a run makes none that is new."""
    instrument.exit_at_sigterm()
    left = plan.all_tests()
    found: Result | None = None
    for _ in range(MOST_RUNS):
        plan.tests = with_their_states(left) if found else left
        plan.known = {test: step.raw for test, step in found.steps.items()} if found else {}
        one, problem = run_once(args, folder, plan)
        if one is None:
            return Alone(plan, None, problem)
        if one.rates != plan.rates and any(one.rates.values()):
            plan = Plan(plan.ranks, args.steps, one.rates)  # it takes other batches in a step
            continue
        if not one.steps:
            return Alone(plan, found, problem)
        before = len(found.steps) if found else 0
        found = merged(found, one)
        left = [test for test in plan.all_tests() if test not in found.steps]
        if not left or len(found.steps) == before:
            break
    return Alone(plan, found, problem)


def why_no_room(plan: Plan) -> str:
    """Why the memory that is free is not enough; "" if it is, or if that isn't known."""
    weights = sum(tensor.nbytes for tensor in plan.ranks[0].steps[0].weights.values())
    copies = sum(3 if test.has_update else 1 for test in plan.all_tests())
    needed = 2 * copies * weights  # once more while they are compared
    with contextlib.suppress(OSError, TypeError):  # not on macOS
        free = 1024 * int(re.search(r"MemAvailable: *(\d+)", Path(MEMORY).read_text())[1])
        if needed > free:
            text = f"its notes take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are "
            return f"{text}free: give --steps 2, or make the model smaller"
    return ""


def with_their_states(left: list[Test]) -> list[Test]:
    """A further run begins anew: with the whole steps, which bring the optimizer's states.

    The steps of `mean` go on from each other, so they are made together.
    """
    means = [test for test in left if test.kind == "mean"]
    others = [test for test in left if test.kind != "mean"]
    if means:
        means = [Test("mean", step) for step in range(means[-1].step + 1)]
    first = [test for test in others if test.kind == "whole" and not test.is_neutral]
    count = 1 + max(test.step for test in left)
    wholes = [Test("whole", step) for step in range(count)]
    return wholes + [test for test in others if test not in first] + means


def merged(old: Result | None, new: Result) -> Result:
    if old is None:
        return new
    unmatched = sorted({*old.unmatched, *new.unmatched})
    steps, after = old.steps | new.steps, old.after | new.after
    return new._replace(steps=steps, after=after, unmatched=unmatched)


def run_once(args: argparse.Namespace, folder: Path, plan: Plan) -> tuple[Result | None, str]:
    """What a run has found (None: nothing), and what the program printed, if it failed."""
    _, run = instrument.import_launcher()
    job = Job("equivalence", [*args.command, *args.alone], args.patience, Replayer, (plan,))
    with tempfile.TemporaryDirectory(prefix="alone-", dir=folder) as place:
        error = ""
        try:
            run(replay, (job, place), nproc=1)
        except SystemExit as end:
            if isinstance(end.code, int):
                raise  # after Ctrl-C or SIGTERM
            error = end.code
        log = Path(place, "log").read_text(encoding="utf-8", errors="replace")
        notes = instrument.collect(Folder(place), 1)
    printed = f"{log}{error}\n"
    if not notes:
        return None, printed
    (one,) = notes
    return one.value, printed if one.ending in ("failed", "stuck") else ""


# ------------------------------------------------------------------------- in that process


def replay(job: Job, folder: str) -> None:
    """The run itself; its notes, and what it prints, are files in the folder."""
    # One GPU, the first: with more a program may take all of them (nn.DataParallel).
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["NPROC"] = "1"  # for `launch` of a helper of its own
    terminal = os.dup(2)
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    job = job._replace(arguments=(*job.arguments, terminal))

    code = instrument.be_rank(job, Place(0, 1), Folder(folder), None)
    instrument.end_process_if_threads_live_on(code)
