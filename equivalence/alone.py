"""Run B: the program in one process, as often as the tests need."""

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
from instruments import ranks as instrument
from instruments.meeting import Folder, Place, serve_store, variables_of_one
from instruments.ranks import Job

from equivalence.notes import Notes
from equivalence.plan import Plan, Test
from equivalence.replay import Replayer, Result

MOST_RUNS = 8  # an infinite data set needs one, a program of few steps more


class Alone(NamedTuple):
    """What all runs together have found."""

    plan: Plan
    result: Result | None
    problem: str = ""  # what the program printed, if it failed


class Request(NamedTuple):
    """What a run gets."""

    ranks: list[Notes]
    steps: int
    rates: dict[str, int]
    tests: list[Test]
    known: dict[Test, dict]


def run_all(args: argparse.Namespace, plan: Plan, folder: Path) -> Alone:
    """Until all tests are made, or a run makes none."""
    instrument.exit_at_sigterm()  # which ends the run in one process, too
    ranks, rates = plan.ranks, plan.rates
    left = plan.all_tests()
    found: Result | None = None
    for _ in range(MOST_RUNS):
        left = with_their_states(left) if found else left
        known = {test: step.raw for test, step in found.steps.items()} if found else {}
        torch.save(Request(ranks, args.steps, rates, left, known), folder / "request.pt")
        problem = run_once(args, folder)
        if not (folder / "result.pt").exists():
            return Alone(plan, None, problem)
        one: Result = torch.load(folder / "result.pt", weights_only=False)
        (folder / "result.pt").unlink()
        if one.rates != rates and any(one.rates.values()):
            rates = one.rates  # it takes other batches in a step: plan again
            plan = Plan(ranks, args.steps, rates)
            continue
        if not one.steps:
            return Alone(plan, found, problem)
        found = merged(found, one)
        left = [test for test in plan.all_tests() if test not in found.steps]
        if not left:
            break
    return Alone(plan, found)


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


def run_once(args: argparse.Namespace, folder: Path) -> str:
    """Returns what the program printed, if it failed."""
    store = serve_store()
    environment = {n: v for n, v in os.environ.items() if not n.startswith("TORCHELASTIC_")}
    environment |= variables_of_one(store)
    own = [sys.executable, str(Path(__file__).parent), "--replay", str(folder)]
    own += ["--parent", str(os.getpid())]
    own += ["--threads", str(args.threads), "--patience", str(args.patience)]
    command = [*own, *args.command, *args.alone]
    log = folder / "log"
    with open(log, "w", encoding="utf-8") as file:
        out = subprocess.run(command, env=environment, stdout=file, stderr=file)
    text = log.read_text(encoding="utf-8", errors="replace")
    return text if out.returncode else ""


# ------------------------------------------------------------------------- in that process


def replay(args: argparse.Namespace) -> int:
    """The run itself; its result is a file in the folder."""
    threading.Thread(target=end_with, args=[args.parent], daemon=True).start()
    torch.set_num_threads(args.threads)
    folder = Path(args.replay)
    job = Job("equivalence", args.command, args.patience, replayer, (folder,))

    def save(notes: list) -> int:
        (one,) = notes
        torch.save(one.value, folder / "result.pt")
        return 0

    return instrument.be_rank(job, Place(0, 1), Folder(str(folder)), save)


def end_with(parent: int) -> None:
    """End when the process that has started this one does, also by a kill -9."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def replayer(place: Place, folder: Path) -> Replayer:
    request: Request = torch.load(folder / "request.pt", weights_only=False)
    plan = Plan(request.ranks, request.steps, request.rates)
    plan.tests, plan.known = request.tests, request.known
    return Replayer(plan)
