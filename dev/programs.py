"""Starts the programs whose output stands on a page: as a user's shell does, in two processes on a CPU.

The tests start theirs in the same way, or faster: see tests/world.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import distributed_launcher as launcher

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 100  # seconds for a run that hangs: less than pytest's own limit, which prints nothing of it

# No GPU, so that the expectations hold on every machine; one thread, so that every run computes the same sums.
_NOT_OURS = ("NPROC", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "TORCH_DISTRIBUTED_DEBUG")
_NOT_OURS += launcher.LAUNCHER_VARIABLES
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in _NOT_OURS and not k.startswith("DIST_")}
ENVIRONMENT |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1"}
ENVIRONMENT |= {"OMP_WAIT_POLICY": "PASSIVE"}  # otherwise OpenMP's threads spin: ten times as long on a busy machine
SHELL = {"OMP_NUM_THREADS": None, "TMPDIR": None}  # what a user's shell has not set


class Result(NamedTuple):
    code: int
    out: str
    err: str


def start(*command: object, cwd: Path = ROOT, path: Iterable[Path] = (), **environment: object) -> subprocess.Popen:
    """Start `python command` in a new process group.  path: PYTHONPATH; environment: more variables, None: not set."""
    given = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, path)) or None} | environment
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={name: str(value) for name, value in given.items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def shell(*command: object, timeout: float = LIMIT, **options: object) -> Result:
    """Run `python command` to its end; after `timeout` seconds its process group is killed."""
    process = start(*command, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Result(process.returncode, out, err)
