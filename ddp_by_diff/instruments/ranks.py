"""Starts one process per rank, runs the program in each, and brings together what was noted.

Who reads the notes: the process that has started the ranks; under torchrun rank 0.
"""

import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import distributed as torch_dist

import ddp_by_diff.distributed_launcher as launcher
from ddp_by_diff import distributed as dist
from ddp_by_diff.instruments.command import refuse
from ddp_by_diff.instruments.meeting import (
    Folder,
    Meeting,
    Place,
    Store,
    read_place,
    serve_store,
    variables_of_one,
)
from ddp_by_diff.instruments.program import PACKAGE
from ddp_by_diff.instruments.rank import Job, Notes, be_rank, collect, leave


def look_at(job: Job, nproc: int | None, show: Callable[[list[Notes]], int]) -> int:
    """Run the job on all ranks; show(notes of those that came) where they come together.

    Returns the exit code.  If the program fails, its own error follows what is shown.
    """
    launcher.NOT_THE_PROGRAM.append(PACKAGE)
    place = read_place()
    if place is not None:
        if nproc is not None:
            refuse(job.tool, "a launcher has started the processes: leave out --nproc")
        return be_rank(job, place, open_store(job, place), show)
    count = dist.count_processes(nproc)
    folder = tempfile.mkdtemp(prefix=f"{job.tool}-")
    meeting = Folder(folder)
    try:
        if count == 1:
            store = serve_store()
            os.environ.update(variables_of_one(store))
            exit_at_sigterm()
            return be_rank(job, Place(0, 1), meeting, show)
        import torch._dynamo  # noqa: F401  an optimizer does; here once, where ranks are forked

        try:
            launcher.run(be_started_rank, (job, folder), count)
        except (SystemExit, RuntimeError) as error:
            if isinstance(getattr(error, "code", ""), int):
                raise  # after Ctrl-C or SIGTERM nothing new begins
            notes = collect(meeting, count)
            code = show(notes) if notes else 1
            if len(notes) == count and all(note.ending != "failed" for note in notes):
                return code  # all is said
            raise
        return show(collect(meeting, count))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def at_least_two(nproc: int | None) -> tuple[int | None, int]:
    """How many processes to start, and how many GPUs they share; 0: each has its own, or none.

    NCCL needs a GPU for each process, so on a machine with fewer GPUs they use gloo.
    """
    gpus = torch.cuda.device_count()
    if "RANK" in os.environ or "DIST_BACKEND" in os.environ:
        return nproc, 0  # the user has decided
    if gpus and nproc is None and "NPROC" not in os.environ:
        nproc = max(2, gpus)
    if not 0 < gpus < (nproc or 0):
        return nproc, 0
    os.environ["DIST_BACKEND"] = "gloo"
    return nproc, gpus


def exit_at_sigterm() -> None:
    """End by an exception at SIGTERM, so that `finally` blocks still say and remove things."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def open_store(job: Job, place: Place) -> Meeting:
    try:
        return Store(job.tool, place, job.timeout)
    except (KeyError, ValueError) as problem:
        refuse(job.tool, f"set MASTER_ADDR and MASTER_PORT, or start with torchrun: {problem}")
    except RuntimeError as problem:
        refuse(job.tool, f"the store of rank 0 can't be reached: {problem}")


def be_started_rank(job: Job, folder: str) -> None:
    place = read_place()
    assert place, "the launcher has set RANK and WORLD_SIZE"
    original = torch_dist.init_process_group
    torch_dist.init_process_group = partial(group_begins, original, random_numbers())
    leave(be_rank(job, place, Folder(folder), None))


def group_begins(original: Callable, begun: bytes, *args: Any, **kwargs: Any) -> None:
    """Begin the program's process group; let ranks draw numbers as under torchrun, if it uses that.

    torchrun's processes draw different numbers of `random` and NumPy until the program seeds them;
    those of `launch` draw the same.  begun: the generators' states at the program's first line.
    """
    frames = traceback.walk_stack(None)
    is_launched = any(frame.f_code.co_name == "launch" for frame, _ in frames)
    if not is_launched and random_numbers() == begun:  # neither seeded nor drawn before
        random.seed()
        numpy.random.seed()
    original(*args, **kwargs)


def random_numbers() -> bytes:
    """The states of the generators that torch's own seed leaves alone."""
    return pickle.dumps((random.getstate(), numpy.random.get_state()))
