# Copied from the project ddp-by-diff.  SPDX-License-Identifier: MIT
"""Run a pytest test on several ranks: processes on this machine, in a process group of Gloo.

    from distributed_testing import on_ranks

    @pytest.mark.parametrize("size", [1, 1000])
    @on_ranks(2, 3)                    # on two ranks, then on three
    def test_sum(size):
        mine = torch.full((size,), float(torch.distributed.get_rank()))
        torch.distributed.all_reduce(mine)
        assert (mine == sum(range(torch.distributed.get_world_size()))).all()

Copy this file: it needs torch and pytest.  The ranks are forked from pytest's process for each
test, so they start in a tenth of a second, have the test's fixtures, and leave nothing behind.
Import in conftest.py what is slow to import (torch._dynamo, which DDP needs).  A process that has
used CUDA can't be forked, and Windows has no fork.
"""

import faulthandler
import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import pytest
import torch


class End(NamedTuple):  # of a rank
    severity: int  # 0: the test has returned; 1: it skips; 2: it failed, or still runs; 3: the process died
    line: str
    text: str = ""  # the error, as pytest prints it


def on_ranks(*world_sizes: int, timeout: float = 60) -> Callable:
    """Run the decorated test on so many ranks.  It fails if one fails, or doesn't end within `timeout` seconds."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def start(*args: Any, world_size: int, **fixtures: Any) -> None:
            _run(functools.partial(test, *args, **fixtures), world_size, timeout)

        size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        start.__signature__ = inspect.Signature([*inspect.signature(test).parameters.values(), size])  # for pytest
        return pytest.mark.parametrize("world_size", world_sizes)(start)

    return decorate


def _run(test: Callable, world_size: int, timeout: float) -> None:
    fork, processes, pipes, ends = multiprocessing.get_context("fork"), [], {}, {}
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/stack", "w+") as stack:
        try:
            for rank in range(world_size):
                pipe, theirs = fork.Pipe()
                process = fork.Process(target=_be_rank, args=(test, rank, world_size, folder, stack, theirs))
                with warnings.catch_warnings():  # Python 3.12 and newer warn of other threads
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()  # so this pipe ends with the rank
                processes.append(process)
                pipes[pipe] = rank
            deadline = time.monotonic() + timeout
            while pipes and (ready := wait(pipes, max(0, deadline - time.monotonic()))):
                for pipe in ready:
                    rank = pipes.pop(pipe)
                    try:
                        ends[rank] = pickle.loads(pipe.recv_bytes())
                    except (EOFError, ConnectionError):
                        processes[rank].join()
                        ends[rank] = End(3, f"the process died with exit code {processes[rank].exitcode}")
                    if ends[rank].severity > 1:  # the others may fail in the same way
                        deadline = min(deadline, time.monotonic() + 2)
            for rank in pipes.values():
                ends[rank] = End(2, f"still at {_place(processes[rank].pid, stack)}")
        finally:
            for process in processes:
                process.kill()
                process.join()
    first, *others = sorted(ends, key=lambda rank: (-ends[rank].severity, not ends[rank].text))  # the likeliest cause
    lines = [f"rank {rank}: {ends[rank].line}" for rank in (first, *sorted(others))]
    if ends[first].severity == 1:
        pytest.skip(ends[first].line)
    if ends[first].severity > 1:
        pytest.fail("\n".join([lines[0], ends[first].text, *lines[1:]]), pytrace=False)


def _be_rank(test: Callable, rank: int, world_size: int, folder: str, stack: Any, pipe: Connection) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in variables.items()})
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    torch.set_num_threads(1)  # OpenMP's threads are not forked
    try:
        torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
        test()
        end = End(0, "has returned")
    except pytest.skip.Exception as skipped:
        end = End(1, str(skipped))
    except BaseException:
        error = pytest.ExceptionInfo.from_current()
        error.traceback = error.traceback[1:]  # without this function
        end = End(2, error.exconly().splitlines()[0], f"    {error.getrepr()}\n")
    pipe.send_bytes(pickle.dumps(end))
    _end_with_pytest()  # not now, because other ranks may still need this one's connections


def _end_with_pytest() -> None:
    """Wait until pytest's process ends this one, or has died."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _place(pid: int, stack: Any) -> str:
    """Return where the rank is: the innermost line that belongs to no installed package."""
    begin = stack.seek(0, os.SEEK_END)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.1)
    stack.seek(begin)
    lines = [line.strip() for line in stack if "File" in line and "/lib/python" not in line]
    return lines[0] if lines else "a line of torch or Python"
