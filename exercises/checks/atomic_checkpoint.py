"""Check which rank writes, and when the call returns; then kill one process at each change of the folder."""

import contextlib
import io
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import torch

import distributed as dist
from exercises.checks import common

HINT = """
Write a second file in the same folder, close it, and then rename it to `path`: os.replace does that atomically.
dist.barrier() waits until all ranks have called it, so call it outside of the `if`.
"""
OLD, NEW = 1, 2
LIMIT = 60  # seconds for one save, also on a busy machine
MOST_MOMENTS = 24
WAITS_ITSELF = True  # after each call, when it has looked at the folder


def state_of(step, rank=0, size=10):
    return {"step": step, "rank": rank, "weights": torch.arange(size) + step}


def read(path):
    """Return (step, rank) if the file is complete, else what is wrong with it, in words."""
    if not path.exists():
        return "there is no file"
    try:
        state = torch.load(path, weights_only=True)
        weights = state["weights"]
        if torch.equal(weights, torch.arange(len(weights)) + state["step"]):
            return state["step"], state["rank"]
    except Exception:  # a damaged file can raise many kinds of errors
        pass
    return f"the file is damaged ({path.stat().st_size} bytes)"


# ------------------------------------------------------------------------------------------------------- on each rank


def run(function, folder):
    """Save a new file, then replace an old one.  One rank calls late; each rank reads when its call returns."""
    path = Path(folder, "ranks", "last.pt")
    path.parent.mkdir(exist_ok=True)
    rank, seen = dist.get_rank(), []
    for step, late in enumerate([0, 0, dist.get_world_size() - 1]):
        common.wait_for_the_others(folder, f"step{step}")
        if rank == late:
            time.sleep(0.2)
        function(state_of(step, rank, size=100_000), str(path))
        seen.append(read(path))
        common.wait_for_the_others(folder, f"saved{step}")
        seen.append(read(path))
    return {"seen": seen, "files": sorted(file.name for file in path.parent.iterdir())}


def judge(answers):
    for rank, answer in enumerate(answers):
        for number, found in enumerate(answer["seen"]):
            step, is_return = number // 2, number % 2 == 0
            if isinstance(found, tuple) and found[1] != 0:
                return f"the file is rank {found[1]}'s: rank 0 alone writes"
            if found != (step, 0):
                old = f"the file is still that of step {found[0]}" if isinstance(found, tuple) else found
                when = f"when rank {rank} returns from the call" if is_return else "when all ranks have returned"
                return f"{old}, {when} for step {step}"
        if answer["files"] != ["last.pt"]:
            others = ", ".join(set(answer["files"]) - {"last.pt"})
            return f"it leaves another file behind: {others}"
    return ""


# ----------------------------------------------------------------------------------------------------- in one process


class Killer:
    """A function for sys.setprofile that records each change of the folder, and kills its own process at one of them.

    Python calls it before and after each function, also those in C, so it sees the folder as a kill would leave it.
    """

    def __init__(self, folder, moment=None):
        self.folder, self.moment, self.moments = folder, moment, []
        self.before = self.snapshot()

    def snapshot(self):
        return sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns, f.inode()) for f in os.scandir(self.folder))

    def __call__(self, frame, event, argument):
        with contextlib.suppress(FileNotFoundError):
            now = self.snapshot()
            if now == self.before:
                return
            self.before = now
            self.moments.append(f"after {getattr(argument, '__name__', frame.f_code.co_name)}")
            if len(self.moments) - 1 == self.moment:
                os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(function, folder, moment=None):
    """Save NEW in a forked process; return its exit code (negative: a signal), its moments, and its error."""
    note = Path(f"{folder}.note")
    note.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        error = ""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                dist.init_process_group(backend="gloo")
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT)  # the process ends, whatever happens
            killer = Killer(folder, moment)
            sys.setprofile(killer)
            function(state_of(NEW), str(folder / "last.pt"))
            sys.setprofile(None)
        except BaseException as problem:
            sys.setprofile(None)
            error = f"{type(problem).__name__}: {problem}"
        note.write_bytes(pickle.dumps((killer.moments, error)))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, *(pickle.loads(note.read_bytes()) if note.exists() else ([], ""))


def alone(function, folder):
    folder = Path(folder, "alone")
    folder.mkdir()
    path = folder / "last.pt"
    torch.save(state_of(OLD), path)
    code, moments, error = in_a_process(function, folder)  # without a kill, to find the moments
    if code or error or read(path) != (NEW, 0):
        return f"a second save: exit code {code}, {error or read(path)}"
    chosen = range(0, len(moments), -(-len(moments) // MOST_MOMENTS))
    for moment in chosen:
        torch.save(state_of(OLD), path)  # what killed processes have left is not removed
        code, *_ = in_a_process(function, folder, moment)
        if code == -signal.SIGALRM:
            return "after a kill -9 the next save hangs"
        if code == -signal.SIGKILL and read(path) not in ((OLD, 0), (NEW, 0)):
            return f"kill -9 {moments[moment]}: {read(path)}, neither the old state nor the new one is there"
    code, _, error = in_a_process(function, folder)
    if code or error or read(path) != (NEW, 0):
        return f"after a kill -9 the next save fails: {error or read(path)}"
    return ""
