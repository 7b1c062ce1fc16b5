"""Runs of the program in one process, each in a process of its own."""

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path

from instruments.meeting import Folder, Place
from instruments.observer import Observer
from instruments.rank import Job, be_rank, collect, leave
from instruments.ranks import be_started_rank, import_launcher

from equivalence.facts import Facts
from equivalence.notes import Alone, Notes
from equivalence.record import observers
from equivalence.source import Given, Source
from equivalence.verdict import refusal_in
from equivalence.view import facts_of


class Runs:
    """Makes the runs that an answer needs, when it needs them."""

    def __init__(self, args: argparse.Namespace, folder: Path, count: int) -> None:
        self.args, self.folder, self.count = args, folder, count
        self.rates: dict[str, int] = {}
        self.problem = ""  # what the program printed, if it failed
        self.failure = "the program failed in one process"
        self.is_hopeless = False  # another run would end, or wait, at the same place

    def several(self, left_out: tuple, known: Facts) -> Facts | None:
        """Run A once more, without kinds of layers; None: not all ranks came through."""
        arguments = (self.args.steps, f"{self.folder}/log", str(self.folder), left_out)
        job = Job("equivalence", self.args.command, self.args.patience, observers, arguments)
        notes, _ = self.run(be_started_rank, job, self.count)
        ranks = [note.value for note in sorted(notes)]
        is_complete = len(ranks) == self.count
        is_complete = is_complete and all(len(rank.counts) > self.args.steps for rank in ranks)
        return facts_of(ranks, self.args.steps, known) if is_complete else None

    def alone(self, facts: Facts, kind: str, left_out: tuple = (), turn: int = 0) -> Alone | None:
        """None: the program failed, or did not come through the steps."""
        given = Given(facts, kind, left_out, turn)
        result = self.once(dataclasses.replace(given, rates=self.rates))
        if result is not None and not self.rates:
            self.rates = other_rates(facts.ranks[0], result.notes)
            if self.rates:
                result = self.once(dataclasses.replace(given, rates=self.rates))
        if result is None or len(result.notes.counts) <= self.args.steps:
            return None
        return result

    def once(self, given: Given) -> Alone | None:
        if self.is_hopeless:
            return None
        command = [*self.args.command, *self.args.alone]
        out = tempfile.mkdtemp(prefix="alone-", dir=self.folder)
        arguments = (given, f"{out}/out", str(self.folder))
        job = Job("equivalence", command, self.args.patience, observers_alone, arguments)
        notes, error = self.run(be_alone, job, 1)
        if error or not notes or notes[0].ending in ("failed", "stuck"):
            refusal = refusal_in(error)
            self.failure = refusal or self.failure
            self.is_hopeless = bool(refusal) or bool(notes) and notes[0].ending == "stuck"
            printed = "".join(map(read, sorted(Path(out).glob("out*"))))
            self.problem = f"{printed}{error}\n"
        return notes[0].value if notes else None

    def run(self, be_process: object, job: Job, count: int) -> tuple[list, str]:
        """The notes that came, and the error."""
        _, run = import_launcher()
        error = ""
        with tempfile.TemporaryDirectory(prefix="notes-", dir=self.folder) as place:
            try:
                run(be_process, (job, place), count)
            except SystemExit as end:
                if isinstance(end.code, int):
                    raise  # after Ctrl-C or SIGTERM
                error = str(end.code)
            return collect(Folder(place), count), error


def other_rates(many: Notes, alone: Notes) -> dict[str, int]:
    """How many batches one process takes in a step, if the processes take others; else {}."""
    rates = {key: alone.rate(key) for key in many.events}
    return rates if any(rates[key] not in (0, many.rate(key)) for key in rates) else {}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-3000:]


def observers_alone(
    place: Place, given: Given, log: str, folder: str, terminal: int
) -> list[Observer]:
    """What looks at the run in one process."""
    length = len(given.facts.steps)
    return observers(place, length, log, folder, given.left_out, Source(given), terminal)


def be_alone(job: Job, folder: str) -> None:
    """In that process.  It has the first GPU only; what it prints is a file."""
    os.environ["NPROC"] = "1"  # for `launch` of a helper of its own
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[0]
    terminal = os.dup(2)
    log = os.open(f"{job.arguments[1]} of its own", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    job = job._replace(arguments=(*job.arguments, terminal))
    leave(be_rank(job, Place(0, 1), Folder(folder), None))
