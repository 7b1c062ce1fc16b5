"""Runs: more of them, after run A, in one process or with all ranks."""

import argparse
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ddp_by_diff.distributed_launcher as launcher
from ddp_by_diff.equivalence import weights
from ddp_by_diff.equivalence.facts import Facts, facts_of
from ddp_by_diff.equivalence.notes import Alone
from ddp_by_diff.equivalence.observe import observers
from ddp_by_diff.equivalence.source import Source
from ddp_by_diff.equivalence.verdict import Reason, refusal_in, some_of
from ddp_by_diff.instruments.meeting import Folder, Place
from ddp_by_diff.instruments.rank import Job, be_rank, collect, leave
from ddp_by_diff.instruments.ranks import be_started_rank

RUN_IT = (
    "run the program in one process, with --alone and the flags that it needs there (--json FILE "
    "holds the whole error); if it works, let a DataLoader give all that a step uses, in a copy"
)
IF_NO_FLAG = ", the flag with which it takes {}; or let argparse read --batch-size in a copy"
NO_COUNTERPART = "in a copy, call the same modules in both (with fully_shard in place of FSDP1)"
NO_MEMORY = Reason(
    "one process has no memory for the examples of all ranks",
    "give the program a smaller batch size, in both runs",
)
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|MemoryError|SIGKILL")


class Runs:
    """Runs that an answer needs, made when it asks for them."""

    def __init__(self, args: argparse.Namespace, folder: Path, processes: int) -> None:
        self.args, self.folder, self.processes = args, folder, processes
        self.flags: dict[str, int] = {}  # with which one process takes the batches of all ranks
        self.per_step: dict[str, int] = {}  # batches in one process, if other than with all ranks
        self.problem = ""  # what the program printed, if it failed
        self.failure = Reason("the tool's own run in one process made too few steps", RUN_IT)
        self.is_hopeless = False  # another run would end, or wait, at the same place

    def with_all_ranks(self, left_out: tuple, known: Facts) -> Facts | None:
        """Facts of run A, made once more without kinds of layers; None if it was not completed."""
        arguments = (self.args.steps, f"{self.folder}/log", left_out)
        notes, _ = self.run(self.processes, self.args.command, arguments)
        ranks = [note.value for note in sorted(notes)]
        complete = [rank for rank in ranks if len(rank.counts) > self.args.steps]
        return facts_of(ranks, self.args.steps, known) if len(complete) == self.processes else None

    def of_the_same_job(self, facts: Facts) -> Alone | Reason:
        """A run with all examples, and with flags that say so, if the program has any.

        Otherwise a loss that is divided by --batch, say, would be another one: the flags with which
        N processes run describe one rank's share.
        """
        alone, flags = self.alone(facts, "all examples"), facts.flags_of_all()
        if not flags or self.is_hopeless or isinstance(alone, Alone) and facts.is_same_job(alone):
            return alone
        before, each = dict(vars(self)), [{flag: size} for flag, size in flags.items()]
        for some in [flags, *each, flags] if len(flags) > 1 else [flags]:
            self.flags, self.per_step, self.problem = some, {}, ""
            larger = self.alone(facts, "all examples")
            is_same_job = isinstance(larger, Alone) and facts.is_same_job(larger)
            if is_same_job and weights.options(facts, larger, None).is_right:
                break  # else one of them may be no batch size, but what a learning rate is for
        if is_same_job:
            return larger
        vars(self).update(before)
        return alone

    def other_job(self, facts: Facts, alone: Alone | Reason) -> Reason | None:
        """Why no difference is a mistake that a batch size may make; None if it can't be one.

        One process has the flags of one rank, and the examples of all.
        """
        if isinstance(alone, Reason) or facts.is_same_job(alone):
            return None
        own = alone.own_total or "other"
        text = f"one process takes {own} examples per step by itself, all ranks {facts.total}"
        given = re.search(rf"(\S+[ =]){own}(?!\S)", " ".join(self.args.command))
        flag = f"{given[1]}{facts.total}" if given else "FLAG VALUE"
        way_on = f'give --alone="{flag}"' + IF_NO_FLAG.format(facts.total) * (not given)
        return Reason(text, way_on)

    def alone(self, facts: Facts, kind: str, left_out: tuple = (), **given: Any) -> Alone | Reason:
        """A run in one process; a reason if the program failed, or made too few steps."""
        result = self.run_alone(Source(facts, kind, self.per_step, left_out, **given))
        if isinstance(result, Alone) and not self.per_step:
            many, alone = facts.ranks[0], result.notes
            per_step = {key: alone.per_step(key) for key in many.events}
            if any(per_step[key] not in (0, many.per_step(key)) for key in per_step):
                self.per_step = per_step
                result = self.run_alone(Source(facts, kind, self.per_step, left_out, **given))
        if isinstance(result, Alone) and len(result.notes.counts) <= self.args.steps:
            return self.failure
        return result

    def run_alone(self, source: Source) -> Alone | Reason:
        if self.is_hopeless:
            return self.failure
        command = [*self.args.command]
        for flag, size in self.flags.items() if source.kind != "one share" else ():
            command += [flag, str(size)]
        command += self.args.alone  # comes last, so it decides
        out = tempfile.mkdtemp(prefix="alone-", dir=self.folder)
        arguments = self.args.steps, f"{out}/out", source.left_out, source
        notes, error = self.run(1, command, arguments)
        ending = notes[0].ending if notes else "failed"
        if source.kind != "in float64" and (error or ending in ("failed", "stuck")):
            refusal = refusal_in(error)
            self.is_hopeless = bool(refusal) or ending == "stuck"
            files = sorted(Path(out).glob("out*"))
            printed = [file.read_text(encoding="utf-8", errors="replace") for file in files]
            self.problem = "\n".join(text[-3000:] for text in (*printed, error))
            last = error.strip().rpartition("\n")[2]
            failure = Reason(f"the tool's own run failed: {last}", RUN_IT)
            failure = NO_MEMORY if OUT_OF_MEMORY.search(error) else failure
            self.failure = Reason(refusal, "") if refusal else failure
        return notes[0].value if notes else self.failure

    def run(
        self, count: int, command: list[str], arguments: tuple, make: Callable = observers
    ) -> tuple[list, str]:
        """The notes that so many processes left, and the launcher's error."""
        job, error = Job("equivalence", command, self.args.timeout, make, arguments), ""
        with tempfile.TemporaryDirectory(prefix="notes-", dir=self.folder) as place:
            try:
                launcher.run(be_alone if count == 1 else be_started_rank, (job, place), count)
            except SystemExit as end:
                if isinstance(end.code, int):
                    raise  # after Ctrl-C or SIGTERM
                error = str(end.code)
            return collect(Folder(place), count), error


def with_counterparts(alone: Alone | Reason) -> Alone | Reason:
    """The run, if it can be compared; a reason if the ranks have no such weights."""
    if isinstance(alone, Reason) or not alone.unmatched:
        return alone
    text = "the ranks have no weights with the names and shapes of one process's "
    return Reason(text + some_of(alone.unmatched), NO_COUNTERPART)


def be_alone(job: Job, folder: str) -> None:
    """The process of a run in one process: it sees the first GPU only, and prints into a file."""
    os.environ["NPROC"] = "1"  # for `launch` of a helper of its own
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[0]
    terminal = os.dup(2)
    log = os.open(f"{job.arguments[1]} of its own", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    job = job._replace(arguments=(*job.arguments, terminal))
    leave(be_rank(job, Place(0, 1), Folder(folder), None))
