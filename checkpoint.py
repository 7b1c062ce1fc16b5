"""Checkpoints that are whole or not there, on every rank: copy this file and distributed.py into your project.

    import sys
    from pathlib import Path

    import torch

    import checkpoint
    import distributed as dist

    def main_worker(local_rank, world_size, last_step):
        dist.init_process_group()
        stop = checkpoint.Preemption()                # SIGTERM to any of the processes
        model = dist.prepare_ddp_model(Net().to(dist.get_device()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        keeper = checkpoint.Keeper(Path("run"), model=model, optimizer=optimizer)
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

A script that counts in epochs and has a flag --resume uses `find_start` and `Progress` as well: see cifar10_ddp.py.

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
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout
from torch import distributed as torch_dist

import distributed as dist

LOCK_TIMEOUT = 10  # seconds to wait for the processes of a killed run to be gone
_BEST = r"best-(-?[\d.]+(?:e[+-]\d+)?)-step-(\d+)\.pt"
_KEYS = {"step", "config", "parts", "random"}


class CheckpointError(Exception):
    """Can't be saved, or read, or doesn't fit; the message is one line that says what is wrong, and what is good."""


# ------------------------------------------------------------------------------------------------------------- files


def write(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Put `content` into the file at once: whoever reads it, whenever this is killed, finds all of it, or the old.

    `previous` gets the file that was there.  A full disk and the like: CheckpointError, with everything as it was.
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


# -------------------------------------------------------------------------------------------------- where to start


class Start(NamedTuple):
    """Where a run starts: from a checkpoint, or from nothing."""

    path: Path | None = None  # the checkpoint; None: there is none
    folder: Path | None = None  # the folder of the run to continue; None: it is a new run
    config: dict = {}  # the checkpoint's


def find_start(output_dir: str, resume: str | None, flags: dict, error: Callable[[str], None] | None = None) -> Start:
    """Where a script with the flags --output-dir and --resume starts.  Call it on rank 0, before training.

    resume: a run's folder, to continue this run from its newest good checkpoint; or a checkpoint, to start a new run
        from it.  If a launcher has restarted this run (see `interrupted`), the run continues, whatever `resume` says.
    flags: the names and values that change the result.  The checkpoint's config must have the same.
    What fails is a CheckpointError, or a call of `error` with its message (argparse's `parser.error`, say).
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        start = _find_start(Path(output_dir), resume)
        if start.path:
            _check_flags(start, flags)
        return start
    except CheckpointError as problem:
        message = str(problem)
    except OSError as problem:
        message = f"can't write to --output-dir {output_dir} ({problem.strerror}): choose another"
    if error is None:
        raise CheckpointError(message)
    error(message)


def _find_start(output_dir: Path, resume: str | None) -> Start:
    path, folder = interrupted(output_dir), None
    if path is None and resume:
        path = Path(resume)
    if path and path.is_dir():
        folder = path
        with locked(folder):  # the last process of a killed run may still be writing
            path, problems = newest(folder)
        for problem in problems:
            print(f"{problem}: going on from {path}", file=sys.stderr)
    if not os.access(folder or output_dir, os.W_OK | os.X_OK):
        raise CheckpointError(f"can't write to {folder or output_dir}: choose another --output-dir")
    if not path:
        return Start()
    try:
        return Start(path, folder, read(path)["config"])
    except CheckpointError as problem:
        message = str(problem)
    with contextlib.suppress(CheckpointError):  # if there is no good one, the message is complete
        message += f"; a good one is {newest(path.parent)[0]}"
    raise CheckpointError(message)


def _check_flags(start: Start, flags: dict) -> None:
    if not start.config.keys() >= flags.keys():
        raise CheckpointError(f"{start.path} is a checkpoint of another program")
    different = [_as_flag(name, start.config[name]) for name in flags if start.config[name] != flags[name]]
    if different:
        raise CheckpointError(f"{start.path} was trained with other flags: resume it with {' '.join(different)}")


def _as_flag(name: str, value: Any) -> str:
    """What to type on the command line: ("lr", 0.1) is "--lr 0.1", and ("amp", False) is "no --amp"."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    if value is False or value is None:
        return f"no {flag}"
    return f"{flag} {value}"


# ------------------------------------------------------------------------------------------------------------ a run


class Keeper:
    """Saves the state of `parts` (whatever has state_dict and load_state_dict), and brings it back, on every rank.

    In `folder` rank 0 keeps last.pt, previous.pt (the one before) and the best `keep`; other ranks never look at it.
    One process at a time can have a folder: CheckpointError, on rank 0, while another one has it.
    config: what must be known to go on: numbers, strings, lists and dictionaries.
    """

    def __init__(self, folder: Path, config: dict | None = None, keep: int = 2, **parts: Any) -> None:
        self.folder, self.config, self.keep = Path(folder), config or {}, keep
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
        state = _on_primary(read, path) if path else None
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
        if dist.is_primary() and path != last and last.exists():
            try:
                read(last)
            except CheckpointError:  # out of the way, or the next `save` would put it in previous.pt's place
                os.replace(last, last.with_suffix(".pt.corrupt"))
        return state

    def save(self, step: int, score: float | None = None, **extra: Any) -> None:
        """Write last.pt, and best-SCORE-step-STEP.pt if the score is among the best `keep` (the higher the better).

        A score of NaN or infinity, of a run that has diverged, is never among them: only last.pt is written then.
        Every rank must call it, after `step` steps; it returns when rank 0 has written.  extra: more to have back;
        numbers, strings, tensors, lists and dictionaries.  If a file can't be written: CheckpointError, on all ranks,
        with all that was saved before untouched.
        """
        random = [{"cpu": state} for state in dist.gather(torch.get_rng_state())]
        if dist.get_device().type == "cuda":
            for mine, state in zip(random, dist.gather(torch.cuda.get_rng_state()), strict=True):
                mine["cuda"] = state
        _on_primary(self._write, {**extra, "step": step, "config": self.config, "random": random}, score)

    def _write(self, state: dict, score: float | None) -> None:
        buffer = io.BytesIO()
        torch.save({**state, "parts": {name: part.state_dict() for name, part in self.parts.items()}}, buffer)
        content, last = buffer.getvalue(), self.folder / "last.pt"
        try:
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as problem:
            kind = re.search(r"GLOBAL ([\w.]+)", str(problem)) or ["something unknown"] * 2
            raise TypeError(f"{kind[1]} can't be read back from a checkpoint: make it a number, a string...") from None
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


class Progress:
    """How far a run is: `epoch` epochs are done, and `batch` batches of the current epoch.

    steps: the number of batches in an epoch.  sums: a tensor in which this rank adds up what it measures in an epoch.
    history: a list with the metrics of each finished epoch, which the caller appends to.
    state: what `keeper.restore` has returned; sums then continue, even if the number of processes has changed.
    """

    def __init__(self, keeper: Keeper, steps: int, sums: torch.Tensor, history: list, state: dict) -> None:
        self.keeper, self.steps, self.sums, self.history = keeper, steps, sums, history
        self.epoch = state.get("epoch", 0)
        self.batch = state.get("batch", 0)
        if state and len(state["sums"]) == dist.get_world_size():
            self.sums += state["sums"][dist.get_rank()].to(sums.device)
        elif state and dist.is_primary():  # the number of processes has changed: rank 0 takes the sums of all
            self.sums += state["sums"].sum(0).to(sums.device)

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, batch {self.batch} of {self.steps}"

    def next_epoch(self) -> None:
        """Count the current epoch as done."""
        self.epoch += 1
        self.batch = 0
        self.sums.zero_()

    def save(self, score: float | None = None) -> None:
        """Save a checkpoint, see `Keeper.save`.  Every rank must call it."""
        sums = torch.stack(dist.gather(self.sums))
        extra = {"history": self.history, "epoch": self.epoch, "batch": self.batch, "sums": sums}
        self.keeper.save(self.epoch * self.steps + self.batch, score, **extra)

    def stop_if_told(self, stop: "Preemption", log: Callable[[str], None] = print) -> None:
        """If any rank has received SIGTERM, save a checkpoint and exit with 143.  Every rank must call it."""
        if not stop.agreed():
            return
        self.save()
        log(f"SIGTERM: saved at {self}; go on with --resume {self.keeper.folder}")
        dist.cleanup()
        sys.exit(143)


def from_primary(value: Any) -> Any:
    """Rank 0's value, on every rank: anything that can be pickled.  Every rank must call it."""
    box = [value]
    if dist.get_world_size() > 1:
        torch_dist.broadcast_object_list(box, 0)
    return box[0]


def _on_primary(function: Callable, *args: Any) -> Any:
    """What function(*args) returns on rank 0, on every rank; its CheckpointError, too."""
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


# ------------------------------------------------------------------------------------------- stopped, and restarted


class Preemption:
    """SIGTERM, as clusters send it to a job that must go: all ranks learn of it at the same step, and can save.

    Make one on every rank, in the main thread, after init_process_group.  It replaces the process's SIGTERM handler;
    processes that are forked from this one get the old handler back.
    """

    def __init__(self) -> None:
        self.asked, self.group = False, None
        self.replaced = signal.signal(signal.SIGTERM, self._ask)
        if dist.get_world_size() > 1:  # on the CPU, so that no GPU waits for it
            limit = timedelta(seconds=dist.rendezvous.seconds("DIST_TIMEOUT"))
            self.group = torch_dist.new_group(backend="gloo", timeout=limit)

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True

    def __bool__(self) -> bool:
        """Whether this very process was told to stop."""
        return self.asked

    def agreed(self) -> bool:
        """Whether any rank was told to stop.  Every rank must call it, and gets the same answer."""
        if self.group is None:
            return self.asked
        flag = torch.tensor([int(self.asked)])
        torch_dist.all_reduce(flag, torch_dist.ReduceOp.MAX, group=self.group)
        return bool(flag)


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
    while isinstance(getattr(handler, "__self__", None), Preemption):
        handler = handler.__self__.replaced or signal.SIG_DFL  # None: not installed from Python
        signal.signal(signal.SIGTERM, handler)
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _note(output_dir: Path) -> tuple[Path, bool] | None:
    """The file that says, to a run that its launcher may restart, where it was; and whether it was restarted."""
    env = os.environ
    if "SLURM_JOB_ID" in env:  # first: a job that SLURM requeues starts a new torchrun
        run = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', 'batch')}"
    elif "TORCHELASTIC_RUN_ID" in env:
        run = env["TORCHELASTIC_RUN_ID"]
        if run == "none":  # torchrun was given no --rdzv-id: then the meeting point tells runs apart
            run = f"{env.get('MASTER_ADDR')}-{env.get('MASTER_PORT')}"
    else:
        return None
    command = zlib.crc32("\0".join(sys.argv).encode())  # a job may train several times, with other flags
    name = re.sub(r"[^\w.-]", "_", f".run-{run}-{command:08x}")
    restarts = env.get("TORCHELASTIC_RESTART_COUNT"), env.get("SLURM_RESTART_COUNT")
    return output_dir / name, any(count not in (None, "0") for count in restarts)


def interrupted(output_dir: Path) -> Path | None:
    """The run's folder, if this is a run that torchrun (--max-restarts) or SLURM (--requeue) has started once more.

    With the same command line, that is.  None for any other start, which forgets what an earlier one has noted.  Call
    it on rank 0, which must be on the same machine as before, or on a shared disk.
    """
    file, restarted = _note(output_dir) or (None, False)
    if file and not restarted:
        file.unlink(missing_ok=True)
    if not (restarted and file.exists()):
        return None
    return output_dir / file.read_text(encoding="utf-8")


def note_run(folder: Path, done: bool = False) -> None:
    """Note, for `interrupted`, the folder of this run, which must be in its output_dir; or forget it, once it is done.

    Does nothing on other ranks than 0, and where no launcher restarts runs.
    """
    file, _ = (dist.is_primary() and _note(folder.parent)) or (None, False)
    if file and done:
        file.unlink(missing_ok=True)
    elif file:
        write(file, folder.name.encode())
