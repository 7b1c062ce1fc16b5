"""Runs the program that is looked at, as `python train.py` or `python -m train` would."""

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import ddp_by_diff.distributed_launcher as launcher

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class Finished(BaseException):
    """Enough was noted.  It is a BaseException, so that it leaves all `except Exception`."""


class Refused(BaseException):
    """The program can't be looked at; the message is one line, with what to type."""


def run_program(command: list[str], begin: Callable[[], None]) -> bool:
    """Run the program as __main__, in this process.  Returns whether an instrument has finished.

    command: ["train.py", "--my-flag"], or ["-m", "package.train", "--my-flag"].
    begin: called before the program's first line.
    """
    is_module = command[0] == "-m"
    arguments = command[1:] if is_module else command
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(command[0]))
    old_path = list(sys.path)
    old_argv = sys.argv
    sys.argv = arguments
    sys.path[0] = folder  # it was the folder of the command, or the current one
    try:
        begin()
        if is_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except Finished:
        return True
    finally:
        sys.path[:] = old_path
        sys.argv = old_argv
    return False


def without_our_frames(error: BaseException) -> BaseException:
    """The program's error, from its own first line on."""
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not path.startswith((os.path.dirname(__file__), "<frozen runpy")):
            return error.with_traceback(trace)
        trace = trace.tb_next
    return error


def where(thread: int) -> str:
    """The program's own line on which this thread stands: file, line, function.

    Lines of torch, of Python, of installed packages and of this project's tools are left out.  If
    nothing remains, the innermost line counts.
    """
    frames = traceback.walk_stack(sys._current_frames()[thread])
    stack = traceback.StackSummary.extract(frames, lookup_lines=False)
    own = [frame for frame in stack if is_own(frame.filename)]
    innermost = (own or stack)[0]
    return f"{innermost.filename}:{innermost.lineno}, {innermost.name}"


def called_by(thread: int) -> str:
    """The function, such as torch.distributed.reduce, that the program's line has called; or ""."""
    called = ""
    for frame, _ in traceback.walk_stack(sys._current_frames()[thread]):
        name = frame.f_code.co_name
        if is_own(frame.f_code.co_filename):
            return called
        if not name.startswith("_") and name != "wrapper":  # that of a decorator
            called = f"{frame.f_globals.get('__name__')}.{name}".replace(".distributed_c10d", "")
    return ""


def is_own(path: str) -> bool:
    """Whether a file is the program's own: neither installed, nor Python's, torch's or a helper."""
    is_file = not path.startswith(("<", PACKAGE))
    is_installed = {"site-packages", "dist-packages"} & set(Path(path).parts)
    return is_file and not is_installed and launcher.is_the_program(path)
