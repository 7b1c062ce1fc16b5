"""Checkpoints that are complete or not there, on every rank: copy this file beside distributed.py.

    import sys
    from pathlib import Path

    import torch

    import checkpoint as ckpt
    import distributed as dist

    def main_worker(local_rank, world_size, last_step):
        dist.init_process_group()
        stop = ckpt.Preemption()                      # SIGTERM to any of the processes
        model = dist.prepare_ddp_model(Net().to(dist.get_device()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        keeper = ckpt.Keeper(Path("run"), model=model, optimizer=optimizer)
        last = Path("run/last.pt")
        state = keeper.restore(last if last.exists() else None)
        for step in range(state.get("step", 0) + 1, last_step + 1):
            ...                                       # one step of the training
            stopping = stop.agreed()
            if stopping or step % 100 == 0 or step == last_step:
                keeper.save(step)                     # on every rank; rank 0 writes
            if stopping:
                dist.cleanup()
                sys.exit(143)
        dist.cleanup()

    if __name__ == "__main__":
        dist.launch(main_worker, 1000)

A script with a flag --resume, logs and metrics also takes report.py, which looks after a run's folder.

A checkpoint is a file that torch.load reads with weights_only=True: a dictionary with "step", "config", what `save` was
given by name, "parts" (each part's state dict, the model's without "module.") and "random" (each rank's state of
torch's random numbers; Python's and numpy's are not in it).  Rank 0 alone reads and writes: no shared disk is needed.
"""

import contextlib
import io
import math
import os
import pickle
import re
import signal
import threading
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout
from torch import distributed as torch_dist

if __package__:
    from . import distributed as dist
else:
    import distributed as dist

LOCK_TIMEOUT = 10  # seconds to wait for the processes of a killed run to be gone
_BEST = r"best-(-?[\d.]+(?:e[+-]\d+)?)-step-(\d+)\.pt"
_KEYS = {"step", "config", "parts", "random"}  # of every checkpoint


class CheckpointError(Exception):
    """Can't be saved, or read, or doesn't fit; the message is one line that says what is wrong, and what is good."""


# ------------------------------------------------------------------------------------------------------------- files


def write(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write the file atomically: readers see the old file or the complete new one, even if this process is killed.

    `previous` gets the old file.  If it can't be written (a full disk, say): CheckpointError, and nothing has changed.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # in the same folder: a rename doesn't cross file systems
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or the rename may reach the disk before the bytes
        if previous and path.exists():
            second = previous.with_name(f".{previous.name}.tmp")
            second.unlink(missing_ok=True)
            try:
                os.link(path, second)  # a second name for it, so that `path` is never missing
            except OSError:  # on a file system without hard links it is, for a moment
                os.replace(path, previous)
            else:
                os.replace(second, previous)
                second.unlink(missing_ok=True)  # renaming does nothing if both are the same file
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # some file systems can't sync a folder
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as problem:
        with contextlib.suppress(OSError):
            temporary.unlink()
        kept = f"; {path} is as it was" if path.exists() else ""
        raise CheckpointError(f"can't write {path} ({problem.strerror}){kept}") from None


def read(path: Path) -> dict:
    """The checkpoint in this file, on the CPU.  CheckpointError if it is missing, corrupt, or something else."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch's format; torch.load itself doesn't compare the checksums
            # An attribute, which torch never sets, would make it take a tensor for a folder, and not read it.
            damaged = archive.testzip() or next((e.filename for e in archive.infolist() if e.external_attr), None)
        if damaged:
            raise ValueError(f"wrong checksum of {damaged}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as problem:
        raise CheckpointError(f"can't read {path} ({problem.strerror})") from None
    except pickle.UnpicklingError:  # weights_only refuses it
        raise CheckpointError(f"{path} is no checkpoint of this program: it holds more than tensors and data") from None
    except Exception as problem:  # whatever a damaged file leads to
        reason = re.sub(r"[^ -~]", "?", str(problem).strip().partition("\n")[0][:100]) or type(problem).__name__
        raise CheckpointError(f"{path} is corrupt, or no checkpoint ({reason})") from None
    if not isinstance(state, dict) or not state.keys() >= _KEYS:
        raise CheckpointError(f"{path} is no checkpoint of this program, which has {', '.join(sorted(_KEYS))}")
    return state


def locked(folder: Path) -> AcquireReturnProxy:
    """Let no other process write to this run's folder: until this one ends, however it ends; or inside a `with`."""
    try:  # again in the same process: the exception of a run that failed can keep its lock alive
        return FileLock(folder / ".lock", is_singleton=True).acquire(timeout=LOCK_TIMEOUT)
    except Timeout:
        raise CheckpointError(f"another process is writing to {folder}: end it first") from None
    except OSError as problem:
        wrong = f"can't write to {folder} ({problem.strerror})"
        raise CheckpointError(f"{wrong}: copy it, or start a new run from a checkpoint in it") from None


def newest(folder: Path) -> tuple[Path, list[str]]:
    """The newest good checkpoint in a run's folder, and a line for each that is not good, where last.pt is not.

    CheckpointError, with these lines, if none is good.
    """
    last, good, problems = folder / "last.pt", {}, []
    for path in [last, *sorted(set(folder.glob("*.pt")) - {last})]:
        if last in good or (path == last and not path.exists()):  # missing: see `write`
            continue
        try:
            good[path] = read(path)["step"]
        except CheckpointError as problem:
            problems.append(str(problem))
    if not good:
        raise CheckpointError("; ".join(problems) or f"there is no checkpoint in {folder}")
    return max(good, key=good.get), problems


# ------------------------------------------------------------------------------------------------------------ a run


class Keeper:
    """Saves the state of `parts` (whatever has state_dict and load_state_dict), and brings it back, on every rank.

    In `folder` rank 0 keeps last.pt, previous.pt (the one before) and the best `keep`; other ranks never look at it.
    One process at a time can have a folder: CheckpointError, on rank 0, while another one has it.
    config: what must be known to go on: numbers, strings, lists and dictionaries.
    """

    def __init__(self, folder: Path, config: dict | None = None, keep: int = 2, **parts: Any) -> None:
        self.folder = Path(folder).absolute()  # os.chdir doesn't move it
        self.config, self.keep = config or {}, keep
        self.parts = {name: dist.unwrap_model(part) for name, part in parts.items()}
        if dist.is_primary():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = locked(self.folder).lock
            for temporary in self.folder.glob(".*.tmp"):  # of one that was killed
                temporary.unlink()

    def restore(self, path: Path | None) -> dict:
        """Load all parts and the random state from this file; returns the checkpoint, or {}, doing nothing, for None.

        Every rank must call it; rank 0's path counts.  With another number of processes than the checkpoint's the
        random states stay as they are.  CheckpointError, on all ranks, if it can't be read or doesn't fit.
        """
        path = from_primary(path)
        state = on_primary(read, path) if path else None
        if not state:
            return {}
        for name, part in self.parts.items():
            try:
                part.load_state_dict(state["parts"][name])
            except (KeyError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:200]
                raise CheckpointError(f"{path} doesn't fit this {name} ({reason})") from None
        if len(state["random"]) == dist.get_world_size():
            random = state["random"][dist.get_rank()]
            torch.set_rng_state(random["cpu"])
            if "cuda" in random and torch.cuda.is_available():
                torch.cuda.set_rng_state(random["cuda"])
        last = self.folder / "last.pt"
        if dist.is_primary() and Path(path).absolute() != last and last.exists():
            try:
                read(last)
            except CheckpointError:  # out of the way, or the next `save` would put it in previous.pt's place
                os.replace(last, last.with_suffix(".pt.corrupt"))
        return state

    def save(self, step: int, score: float | None = None, **extra: Any) -> None:
        """Write last.pt, and best-SCORE-step-STEP.pt if the score is among the best `keep` (the higher the better).

        A score of NaN or infinity, of a run that has diverged, is never among them: only last.pt is written then.
        Every rank must call it, after `step` steps; it returns when rank 0 has written.  extra: more that `restore`
        returns: rank 0's numbers, strings, tensors, lists and dictionaries (`dist.gather` first what differs by rank).
        If a file can't be written: CheckpointError, on all ranks, and what was saved before is untouched.
        """
        if taken := _KEYS & extra.keys():
            raise ValueError(f"save: {', '.join(sorted(taken))} is the checkpoint's own entry: choose another name")
        random = [{"cpu": state} for state in dist.gather(torch.get_rng_state())]
        if dist.get_device().type == "cuda":
            for mine, state in zip(random, dist.gather(torch.cuda.get_rng_state()), strict=True):
                mine["cuda"] = state
        on_primary(self._write, {**extra, "step": step, "config": self.config, "random": random}, score)

    def _write(self, state: dict, score: float | None) -> None:
        buffer = io.BytesIO()
        torch.save({**state, "parts": {name: part.state_dict() for name, part in self.parts.items()}}, buffer)
        content, last = buffer.getvalue(), self.folder / "last.pt"
        try:
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as problem:
            found = re.search(r"GLOBAL ([\w.]+)", str(problem))
            kind = found[1] if found else "something in it"
            raise TypeError(f"{kind} can't be read back from a checkpoint: make it a number, a string...") from None
        if score is not None and math.isfinite(score):
            digits = f"{score:.4f}"
            if abs(score) >= 1e15 or float(digits) != score:  # too long for a name, or not exact: names are ranked
                digits = repr(float(score))
            best = self.folder / f"best-{digits}-step-{state['step']}.pt"
            others = [path for path in self.folder.glob("best-*.pt") if re.fullmatch(_BEST, path.name)]
            ranked = sorted({best, *others}, key=_rank_of, reverse=True)
            if best in ranked[: self.keep]:
                try:
                    write(best, content)
                except CheckpointError as problem:
                    raise CheckpointError(f"{problem}; {last} is as it was" if last.exists() else problem) from None
            for worse in ranked[self.keep :]:
                worse.unlink(missing_ok=True)
        write(last, content, previous=self.folder / "previous.pt")


def _rank_of(best: Path) -> tuple[float, int]:
    """Of best-0.9412-step-970.pt: its score; among equal ones the earlier is the better."""
    score, step = re.fullmatch(_BEST, best.name).groups()
    return float(score), -int(step)


def from_primary(value: Any) -> Any:
    """Rank 0's value, on every rank: anything that can be pickled.  Every rank must call it."""
    if dist.get_world_size() == 1:
        return value
    # Not torch's broadcast_object_list: with TORCH_DISTRIBUTED_DEBUG it prints a debug line for each call.
    content = bytearray(pickle.dumps(value)) if dist.is_primary() else bytearray()
    size = torch.tensor(len(content))
    dist.sync_params([size])
    content = content or bytearray(int(size))
    dist.sync_params([torch.frombuffer(content, dtype=torch.uint8)])  # the tensor is this memory: rank 0's bytes
    return pickle.loads(content)


def on_primary(function: Callable, *args: Any) -> Any:
    """Call function(*args) on rank 0; returns its result, or raises its CheckpointError, on every rank."""
    result = problem = None
    if dist.is_primary():
        try:
            result = function(*args)
        except CheckpointError as error:
            problem = str(error)
    result, problem = from_primary((result, problem))
    if problem:
        raise CheckpointError(problem)
    return result


# ---------------------------------------------------------------------------------------------- told to stop (SIGTERM)


class Preemption:
    """SIGTERM, which clusters send to a job that must end: all ranks learn of it at the same step, and can save.

    Make one on every rank, in the main thread, after init_process_group.  It replaces the process's SIGTERM handler.
    The old one comes back when nothing refers to the object any more; processes that are forked meanwhile have it, too.
    `asked`: whether this very process was told; the ranks' answers differ, so a decision that all must share needs
    `agreed`.
    """

    def __init__(self) -> None:
        self.handler, self.group = _Handler(), None
        weakref.finalize(self, self.handler.put_back)
        if dist.get_world_size() > 1:  # on the CPU, so that no GPU waits for it
            self.group = torch_dist.new_group(backend="gloo", timeout=dist.get_timeout())

    @property
    def asked(self) -> bool:
        return self.handler.asked

    def agreed(self) -> bool:
        """Whether any rank was told to stop.  Every rank must call it, and gets the same answer."""
        if self.group is None:
            return self.asked
        flag = torch.tensor([int(self.asked)])
        torch_dist.all_reduce(flag, torch_dist.ReduceOp.MAX, group=self.group)
        return bool(flag)


class _Handler:
    """Notes a SIGTERM, and knows the handler that it has replaced."""

    def __init__(self) -> None:
        self.asked = self.is_over = False
        self.replaced = signal.signal(signal.SIGTERM, self) or signal.SIG_DFL  # None: not installed from Python

    def __call__(self, number: int, frame: Any) -> None:
        self.asked = True

    def put_back(self) -> None:
        self.is_over = True
        handler = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread handle signals
        while isinstance(handler, _Handler) and handler.is_over:
            handler = handler.replaced
            signal.signal(signal.SIGTERM, handler)


# A forked process inherits the handler, but never calls `agreed`: it would ignore SIGTERM, and multiprocessing, which
# ends daemon processes by SIGTERM and then waits for them, would wait for ever.  So a child gets back the handler from
# before Preemption.  Until it has it, SIGTERM is blocked: the kernel keeps the signal, and delivers it then.
_forking = threading.local()


def _before_fork() -> None:
    masks = _forking.__dict__.setdefault("masks", [])
    masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]))


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.masks.pop())


def _after_fork_in_child() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    while isinstance(handler, _Handler):
        handler = handler.replaced
        signal.signal(signal.SIGTERM, handler)
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
