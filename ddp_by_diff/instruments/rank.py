"""One rank: it runs the program, watches it, and leaves what was noted as soon as it is done.

That is when it has finished, and when its program has ended, failed, or made no step for too long.
So nothing that was noted is lost:

    finished    it waits until all ranks have left their notes, as others may need its connections
    ended       (early) it ends, as the program would
    failed      it asks the others for what they have, waits a moment for that, and fails
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import distributed as torch_dist

from ddp_by_diff.instruments.hooks import Hooks
from ddp_by_diff.instruments.meeting import Meeting, Place, Store, wait_until
from ddp_by_diff.instruments.observer import Observer
from ddp_by_diff.instruments.program import Refused, run_program, where, without_our_frames

MOMENT = 5  # seconds that a rank which has failed waits for the others' notes
DRAWING = 20  # seconds that it waits at most, under torchrun, until rank 0 has drawn


class Job(NamedTuple):
    """What all ranks do."""

    tool: str  # the instrument's name
    command: list[str]  # the program and its flags
    timeout: float  # seconds without a step
    make_observers: Callable[..., list[Observer]]  # a function at the top level of a file
    arguments: tuple  # make_observers(place, *arguments)


class Notes(NamedTuple):
    """What one rank has left."""

    rank: int
    ending: str  # "finished", "ended", "failed", "stuck", or "stopped" after another one failed
    value: Any  # what the first observer's notes() returned


def collect(meeting: Meeting, world_size: int) -> list[Notes]:
    """The notes of the ranks that have left theirs."""
    here = [rank for rank in range(world_size) if meeting.has(f"rank {rank}")]
    return [meeting.get(f"rank {rank}") for rank in here]


def be_rank(job: Job, place: Place, meeting: Meeting, show: Callable | None) -> int:
    """Run the program; leave the notes; show those of all ranks, if this rank is to do so."""
    rank = Rank(job, place, meeting, show)
    watching = threading.Thread(target=rank.watch, daemon=True)
    try:
        with rank.hooks.installed():
            is_finished = run_program(job.command, watching.start)
    except Refused as refusal:
        rank.end("failed")
        raise SystemExit(f"{job.tool}: {refusal}") from None
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return rank.end("ended")
        rank.end("failed")
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(130) from None  # as distributed_launcher.py ends after Ctrl-C
        raise without_our_frames(error) from error.__cause__
    return rank.end("finished" if is_finished else "ended")


class Rank:
    """One rank, and the thread that watches it."""

    def __init__(self, job: Job, place: Place, meeting: Meeting, show: Callable | None) -> None:
        self.job, self.place, self.meeting = job, place, meeting
        self.show = show if place.rank == 0 else None
        self.hooks = Hooks(job.make_observers(place, *job.arguments))
        self.is_over = threading.Event()  # the program has ended
        self.is_stuck = False
        self.lock = threading.Lock()

    def leave(self, ending: str, is_own_thread: bool = True) -> None:
        if self.is_stuck and ending == "failed":
            return  # the failure came after: another rank that was stuck has ended its connections
        notes = Notes(self.place.rank, ending, self.hooks.notes(is_own_thread))
        self.meeting.put(f"rank {self.place.rank}", notes)

    def end(self, ending: str) -> int:
        """Leave the notes, wait for those of others, and show all if that is this rank's part."""
        self.is_over.set()
        self.leave(ending)
        if ending == "failed":
            self.meeting.put("failed", True)
            wait_until(self.all_are_here, min(MOMENT, self.job.timeout))
        elif ending == "finished" or self.show:
            wait_until(self.all_are_here, self.job.timeout + MOMENT, self.report)
        code = self.show_all()
        if ending == "finished" and self.all_are_here() and torch_dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the program was left within its group
                torch_dist.destroy_process_group()
        if ending == "failed":
            self.wait_until_shown()
        return code

    def wait_until_shown(self) -> None:
        """torchrun ends all when this rank fails: rank 0, too, which may still be drawing."""
        if isinstance(self.meeting, Store):
            wait_until(lambda: self.meeting.has("shown"), DRAWING)

    def show_all(self) -> int:
        with self.lock:  # once: the watching thread may have done it
            show, self.show = self.show, None
        if not show:
            return 0
        code = show(collect(self.meeting, self.place.world_size))
        self.meeting.put("shown", True)
        return code

    def missing(self) -> list[int]:
        ranks = range(self.place.world_size)
        return [rank for rank in ranks if not self.meeting.has(f"rank {rank}")]

    def all_are_here(self) -> bool:
        return not self.missing()

    def report(self, left: float) -> None:
        """Say for whom the ranks wait.  The first of those that wait speaks."""
        missing = self.missing()
        if self.place.rank != min(set(range(self.place.world_size)) - set(missing)):
            return
        names = ", ".join(f"rank {rank}" for rank in missing)
        self.say(f"waiting for {names}, {left:.0f} s at most (--timeout)")

    def say(self, text: str) -> None:
        # Not print: a program may have replaced sys.stderr, or print.
        os.write(2, f"{self.job.tool}: {text}\n".encode(errors="backslashreplace"))

    def watch(self) -> None:
        """End a program that makes no steps, or whose other ranks failed.  It runs in a thread."""
        timeout, hooks = self.job.timeout, self.hooks
        while not self.meeting.has("failed") and time.monotonic() - hooks.last_step < timeout:
            if self.is_over.wait(min(0.5, timeout / 4)):
                return
        if self.is_over.is_set():
            return
        standing = where(hooks.thread)
        if self.meeting.has("failed"):
            self.leave("stopped", is_own_thread=False)
            wait_until(self.all_are_here, MOMENT)
            self.show_all()
            return  # whoever has started this process ends it, or its own error does
        stuck = f"{hooks.observers[0].stuck} for {timeout:g} s"
        made = f"rank {self.place.rank} {stuck}, after {hooks.steps}"
        self.say(f"{made}; it stands in {standing}")
        self.leave("stuck", is_own_thread=False)
        self.is_stuck = True
        wait_until(self.all_are_here, MOMENT, self.report)
        self.show_all()
        self.wait_until_shown()
        sys.stdout.flush()
        os._exit(1)


def leave(code: int) -> None:
    """End this process.  What the program has started, and did not end, would keep it alive."""
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    for thread in threading.enumerate():  # Python waits for the program's, and some wait for ever
        if not thread.daemon and thread is not threading.main_thread():
            os._exit(code)
    timer = threading.Timer(MOMENT, os._exit, [code])  # in case that something waits for ever
    timer.daemon = True
    timer.start()
