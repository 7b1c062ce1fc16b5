"""Checkpoints that are complete or absent, on every rank: copy this file beside distributed.py.

    import sys

    import torch
    from torch.utils.data import DataLoader

    import checkpoint as ckpt
    import distributed as dist

    def main_worker(local_rank, world_size, epochs, batch_size):
        dist.init_process_group()
        stop = ckpt.Preemption()                      # notes a SIGTERM, whichever process gets it
        sampler = dist.data_sampler(dataset)
        loader = DataLoader(dataset, batch_size // world_size, sampler=sampler, drop_last=True)
        in_epoch = len(loader)                        # steps of a whole epoch
        model = Net().to(dist.get_device())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, epochs * in_epoch)
        model = dist.prepare_ddp_model(model)
        keeper = ckpt.Keeper("run", model=model, optimizer=optimizer, scheduler=scheduler)
        step = keeper.restore().get("step", 0)        # 0: it is a new run
        for epoch in range(step // in_epoch, epochs):
            sampler.set_epoch(epoch, skip=step % in_epoch * loader.batch_size)  # the examples before the stop
            for batch in loader:
                loss = train_step(model, batch, optimizer)  # yours
                scheduler.step()
                step += 1
                stopping = stop.agreed()              # a collective; a SIGTERM takes effect here: call it in every step
                if stopping or step % 100 == 0 or step == epochs * in_epoch:
                    keeper.save(step)                 # on every rank; rank 0 writes
                if stopping:
                    dist.cleanup()
                    sys.exit(143)                     # says: stopped, and saved
            dist.print_primary(f"epoch {epoch}  loss {dist.reduce(loss):.4f}")
        dist.cleanup()

    if __name__ == "__main__":
        dist.launch(main_worker, 5, 20)

A checkpoint is a file that torch.load reads with weights_only=True: a dictionary with "step", "config", "parts" (each
part's state dict, the model's without "module."), "random" (each rank's state of torch's random numbers; Python's and
numpy's are not in it), and what `save` was given by name.
"""

import contextlib
import copy
import errno
import math
import os
import pickle
import re
import signal
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import distributed as torch_dist
from torch import nn

if __package__:
    from . import distributed as dist
else:
    import distributed as dist

LOCK_TIMEOUT = 10  # seconds: the processes of a killed run may still be ending
HEAD_START = 0.1  # seconds: the rank with the error raises it so much earlier than the others, so that it is named
LOSSES = (  # LBFGS keeps the last loss, ReduceLROnPlateau the best
    "If it is a loss, each rank has given its own: give the optimizer or the scheduler dist.reduce(loss) on all ranks"
)
SHARES = (
    "Shares (of FSDP, ZeRO, tensor parallelism) must be put together on all ranks first, as get_model_state_dict does "
    "with full_state_dict=True, or saved by torch.distributed.checkpoint"
)
EQUAL = f"Data parallelism keeps them equal. {SHARES}"


class CheckpointError(Exception):
    """A checkpoint can't be saved or read, or doesn't fit; the message is one line."""


class Damaged(CheckpointError):
    """The file is not what `save` has written: a wrong checksum, a broken archive, missing entries."""


def write(path: Path, state: dict) -> None:
    """torch.save, atomic: readers see the old file or the complete new one, even if this process is killed.

    CheckpointError if that can't be done (the disk is full) or torch.load couldn't read it; `path` is then as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # in the same folder, because a rename can't cross file systems
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # without this, the rename may reach the disk before the bytes
        # What torch.load would refuse is not saved.  The tensors are mapped, so it costs no memory.
        torch.load(temporary, map_location="cpu", mmap=True, weights_only=True)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # writes the new name to the disk, too
        os.close(folder)
    except Exception as problem:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointError(f"can't write {path} ({_reason(problem)})") from None


def read(path: Path, test: bool = False) -> dict:
    """The checkpoint in this file.  Its tensors are mapped, on the CPU: a tensor that is not used takes no memory.

    test: compare the checksums, which torch.load doesn't do; this reads the whole file.
    Damaged if the file is not what was written.  CheckpointError if the machine can't read it: it is missing, or
    forbidden, or too many files are open.
    """
    if path.is_dir():  # torch.distributed.checkpoint saves folders
        raise CheckpointError(f"can't read {path} (it is a folder, no checkpoint of this kind: give it another name)")
    try:
        if test:
            _test(path)
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Damaged:
        raise
    except Exception as problem:  # torch raises many kinds
        # What weights_only refuses, and what torch's own reader of archives can't read, is the file's fault.
        if isinstance(problem, pickle.UnpicklingError) or "PytorchStreamReader failed" in str(problem):
            raise Damaged(f"{path} is damaged, or no checkpoint ({_reason(problem)})") from None
        raise CheckpointError(f"can't read {path} ({_reason(problem)})") from None
    if not isinstance(state, dict) or not state.keys() >= {"step", "config", "parts", "random"}:
        raise Damaged(f"{path} is damaged, or no checkpoint (it has no step, config, parts and random)")
    usual, random = torch.get_rng_state(), state["random"]
    states = (
        [one.get("cpu") if isinstance(one, dict) else None for one in random] if isinstance(random, list) else [None]
    )
    if not all(torch.is_tensor(one) and (one.dtype, one.shape) == (usual.dtype, usual.shape) for one in states):
        raise Damaged(f"{path} is damaged, or no checkpoint (its random is no list of the ranks' states)")
    return state


def _test(path: Path) -> None:
    """Raise Damaged unless the file is an archive (torch's format is zip) in which all checksums are right."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except Exception as problem:  # a broken archive can raise many kinds
        is_machine = isinstance(problem, (OSError, MemoryError))
        if is_machine and getattr(problem, "errno", 0) != errno.EINVAL:  # EINVAL: the end names an impossible place
            raise
        raise Damaged(f"{path} is damaged, or no checkpoint ({_reason(problem)})") from None
    if wrong:
        raise Damaged(f"{path} is damaged (wrong checksum of {wrong})")


def _reason(problem: Exception) -> str:
    unknown = re.search(r"GLOBAL (\S+)", str(problem))
    if unknown:  # weights_only refuses it
        return f"{unknown[1]} in it is no tensor, number, string, list or dictionary"
    if isinstance(problem, RuntimeError) and problem.__context__:  # torch.save hides that the disk is full
        problem = problem.__context__
    return str(problem).partition("\n")[0]


def newest(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint that is not damaged (None if there is none), and what is wrong with each newer one.

    CheckpointError if all are damaged, or if the machine can't read one of them.
    """
    problems = {}
    for _, _, path in reversed(_saved(folder)):
        try:
            read(path, test=True)
            return path, problems
        except Damaged as problem:
            problems[path] = str(problem)
    if problems:
        raise CheckpointError("; ".join(problems.values()))
    return None, {}


def _saved(folder: Path) -> list[tuple[int, float, Path]]:
    """(step, score, path) of each checkpoint in the folder, the oldest first; a missing score is -inf."""
    try:
        names = os.listdir(folder)  # not glob, which hides errors in Python 3.13
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise CheckpointError(f"can't read {folder} ({problem.strerror})") from None
    saved = []
    for name in names:
        match = re.fullmatch(r"step-(\d+)(?:-score-(-?\d+(?:\.\d+)?(?:e[+-]\d+)?))?\.pt", name)
        if match:
            saved.append((int(match[1]), float(match[2] or "-inf"), folder / name))
    return sorted(saved)


def _checksums(path: Path) -> str:
    """The names and checksums of the file's parts; "" if it can't be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return str([(part.filename, part.CRC) for part in archive.infolist()])
    except (OSError, zipfile.BadZipFile):
        return ""


class Keeper:
    """Saves the state of `parts` (objects with state_dict and load_state_dict), and restores it, on every rank.

    For data parallelism: all ranks have equal parts, and rank 0's are kept.  `save` refuses parts that differ (FSDP,
    ZeRO, tensor parallelism).  A module's buffers, such as BatchNorm's averages, may differ: all ranks get rank 0's.
    Every rank must make a Keeper.  `folder` then belongs to this run: CheckpointError, on all ranks, if another run has
    it.  In it are step-STEP.pt or step-STEP-score-SCORE.pt: the last two, and the best `keep`.
    config: what a resumed run must know: numbers, strings, lists and dictionaries.
    """

    def __init__(self, folder: str | Path, config: dict | None = None, keep: int = 2, **parts: Any) -> None:
        if not _is_count(keep):
            raise ValueError(f"Keeper: keep is {keep!r}: give an integer of at least 0")
        self.folder, self.config, self.keep = Path(folder), config or {}, keep
        self.parts = {name: dist.unwrap_model(part) for name, part in parts.items()}
        _on_primary(self._take_folder)

    def _take_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.folder / ".lock", is_singleton=True)  # the system frees it if this process dies
            self.lock.acquire(LOCK_TIMEOUT)
            for temporary in self.folder.glob(".step-*.tmp"):  # from a run that was killed
                temporary.unlink()
        except Timeout:
            raise CheckpointError(f"another run is writing to {self.folder}: end it, or take another folder") from None
        except OSError as problem:
            raise CheckpointError(f"can't write to {self.folder} ({problem.strerror})") from None

    def restore(self) -> dict:
        """Load all parts and the random states from the newest good checkpoint; returns it, or {} if there is none.

        Every rank must call it.  Rank 0 tests the checksums, and says on stderr which newer files are damaged; then
        each rank reads the file.  The random states are not restored if the number of processes has changed.
        CheckpointError, on all ranks, if all are damaged, if a rank doesn't see the file, or if it doesn't fit.
        """
        path = _on_primary(self._choose)
        if path is None:
            return {}
        mine = self.folder / path.name  # on another machine this may be a different file
        seen = from_all(_checksums(mine))
        others = [str(rank) for rank in range(len(seen)) if seen[rank] != seen[0]]
        if others:
            missing = f"rank {', '.join(others)} doesn't see rank 0's {path}"
            raise CheckpointError(f"{missing}: put the run's folder where all machines see it")
        state = _on_all(self._load, mine)
        if len(state["random"]) == dist.get_world_size():
            random = state["random"][dist.get_rank()]
            torch.set_rng_state(random["cpu"])
            if "cuda" in random and torch.cuda.is_available():
                torch.cuda.set_rng_state(random["cuda"])
        return state

    def _choose(self) -> Path | None:
        path, damaged = newest(self.folder)
        for file, problem in damaged.items():
            print(f"{problem}: going on from {path}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                file.rename(f"{file}.damaged")  # so that it is not one of the last two
        return path

    def _load(self, path: Path) -> dict:
        state = read(path)
        for name, part in self.parts.items():
            try:
                part.load_state_dict(_as_named_in(part, state["parts"][name]))
            except Exception as problem:  # a part may raise anything
                reason = _in_one_line(problem)
                raise CheckpointError(f"{path} doesn't fit this {name} ({reason})") from None
        return state

    def save(self, step: int, score: float | None = None, **extra: Any) -> None:
        """Write a checkpoint, and remove those that are neither among the last two nor among the best `keep`.

        Every rank must call it, after `step` steps (an integer); it returns when rank 0 has written.
        score: a higher score is better; of two equal scores the earlier is better.
        extra: more values for `restore` to return: rank 0's tensors, numbers, strings, lists and dictionaries.
        CheckpointError, on all ranks, if it can't be written, if a part differs between ranks (they exchange checksums)
        or if the folder has a checkpoint of a later step, which `restore` would take.  After an error all earlier
        checkpoints are as before.  A checkpoint of the same step is replaced.
        """
        if not _is_count(step) or not _is_score(score):
            raise ValueError(f"save: step {step!r}, score {score!r}: give an integer of at least 0 and a finite score")
        if taken := extra.keys() & {"config", "parts", "random"}:
            raise ValueError(f"save: {', '.join(sorted(taken))}: the checkpoint has these names already, choose others")
        random = {"cpu": torch.get_rng_state()}
        if dist.get_device().type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        state = {**extra, "step": step, "config": self.config, "random": from_all(random)}
        state["parts"] = _on_all(self._states)
        self._check_equal(state["parts"])
        _on_primary(self._write, state, "" if score is None else f"-score-{float(score)}")

    def _states(self) -> dict:
        states = {}
        for name, part in self.parts.items():
            try:
                states[name] = part.state_dict()
            except Exception as problem:  # a part may raise anything
                reason = _in_one_line(problem)
                raise CheckpointError(
                    f"can't save {name}: rank {dist.get_rank()}'s state_dict raises an error ({reason}). {SHARES}"
                ) from None
            if isinstance(part, nn.Module):
                for key in list(states[name]):
                    states[name][_without_compile(key)] = states[name].pop(key)
        return states

    def _check_equal(self, states: dict) -> None:
        """Raise CheckpointError on all ranks if a state differs between them; a module's buffers may differ."""
        if dist.get_world_size() == 1:
            return
        compared = dict(states)
        for name, part in self.parts.items():
            if isinstance(part, nn.Module):
                buffers = {_without_compile(buffer) for buffer, _ in part.named_buffers(remove_duplicate=False)}
                compared[name] = {key: value for key, value in states[name].items() if key not in buffers}
        first, *rest = from_all(_checksums_of(compared, ""))
        for rank, checksums in enumerate(rest, 1):
            for name in first | checksums:
                if first.get(name) != checksums.get(name):
                    is_number = _is_number(first.get(name)) and _is_number(checksums.get(name))
                    raise CheckpointError(
                        f"can't save {name[1:]}: rank {rank}'s differs from rank 0's, which alone would be kept. "
                        f"{LOSSES if is_number else EQUAL}"
                    )

    def _write(self, state: dict, score: str) -> None:
        before = _saved(self.folder)
        if before and before[-1][0] > state["step"]:
            raise CheckpointError(
                f"{before[-1][2]} is later than step {state['step']}: restore it, or take another folder"
            )
        written = self.folder / f"step-{state['step']}{score}.pt"
        write(written, state)
        for step, _, path in before:
            if step == state["step"] and path != written:  # saved before, with a different score
                path.unlink()
        saved = _saved(self.folder)
        scored = [(score, -step, path) for step, score, path in saved if score > -math.inf]
        best = [path for _, _, path in sorted(scored, reverse=True)[: self.keep]]
        for _, _, path in saved[:-2]:
            if path not in best:
                with contextlib.suppress(OSError):
                    path.unlink()


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _is_number(text: str | None) -> bool:
    """Whether a checksum belongs to a number: it is then the number's text."""
    try:
        return text is not None and math.isfinite(float(text))
    except ValueError:
        return False


def _is_score(score: Any) -> bool:
    try:
        return score is None or math.isfinite(score)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # no number, or several, or too large for a float
        return False


def _in_one_line(problem: Exception) -> str:
    return " ".join(f"{type(problem).__name__}: {problem}".split())


def _without_compile(name: str) -> str:
    """The name of a module's tensor without the part that torch.compile(layer) adds."""
    return name.replace("_orig_mod.", "")


def _as_named_in(part: Any, state: Any) -> Any:
    """The saved state with the names of this part, which may be compiled or not."""
    if isinstance(part, nn.Module):
        names = {_without_compile(name): name for name in part.state_dict()}
        state = copy.copy(state)  # keeps the metadata, in which torch notes the versions of modules
        for name in list(state):
            state[names.get(_without_compile(name), name)] = state.pop(name)
    return state


def _checksums_of(state: Any, name: str) -> dict[str, str]:
    """{name: a tensor's checksum, or another value's text} for everything in a state dict."""
    if isinstance(state, (dict, list, tuple)):
        checksums = {}
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            checksums |= _checksums_of(value, f"{name}.{key}")
        return checksums
    if hasattr(state, "to_local"):  # a DTensor: a share, even if the shares happen to be equal
        return {name: f"the share of rank {dist.get_rank()}"}
    if isinstance(state, (set, frozenset)):  # its order differs between processes
        return {name: repr(sorted(state, key=repr))}
    if torch.is_tensor(state):
        dense = state.detach().cpu() if state.layout == torch.strided else state.detach().cpu().to_dense()
        dense = dense.resolve_conj().resolve_neg().contiguous()
        content = dense.flatten().view(torch.uint8).numpy()  # so NaN is equal to NaN
        return {name: f"{state.dtype} {list(state.shape)} {zlib.crc32(content)}"}
    return {name: repr(state)}


def from_all(value: Any) -> list:
    """The values of all ranks, in rank order; a value is anything that can be pickled.  Every rank must call it."""
    values = [value] * dist.get_world_size()
    if len(values) > 1:
        torch_dist.all_gather_object(values, value)
    return values


def _on_all(function: Callable, *args: Any) -> Any:
    """Call function(*args) on every rank.  One rank's error is a CheckpointError on the others: so no rank waits."""
    result = mine = told = None
    try:
        result = function(*args)
    except Exception as error:
        mine = error
        told = error if isinstance(error, CheckpointError) else CheckpointError(_in_one_line(error))
    for problem in from_all(told):
        if problem:
            time.sleep(0 if mine else HEAD_START)
            raise problem if told is mine else mine
    return result


def _on_primary(function: Callable, *args: Any) -> Any:
    """Call function(*args) on rank 0; returns its result, or raises its CheckpointError, on every rank."""
    result = _on_all(lambda: function(*args) if dist.is_primary() else None)
    return from_all(result)[0]


class Preemption:
    """SIGTERM, which clusters send to a job that must end: all ranks learn of it at the same step, and can save.

    Make one on every rank, in the main thread, after init_process_group.  It replaces the process's SIGTERM handler.
    `asked`: whether this process itself got SIGTERM.  It differs between ranks; for a common decision call `agreed`.
    """

    def __init__(self) -> None:
        self.asked, self.calls, self.process, self.group = False, 0, os.getpid(), None
        if dist.get_world_size() > 1:  # on the CPU, so that no GPU waits for it
            self.group = torch_dist.new_group(backend="gloo", timeout=dist.get_timeout())
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() == self.process:
            self.asked = True
        else:  # a forked process, such as a data loader's worker, ends as if there were no handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def agreed(self, every: int = 1) -> bool:
        """Whether any rank was told to stop.  Every rank must call it, and gets the same answer.

        every: only every `every`-th call sends a message and waits for all ranks; the others return False.
        """
        if not _is_count(every) or every < 1:
            raise ValueError(f"agreed: every is {every!r}: give an integer of at least 1")
        self.calls += 1
        if self.calls % every:
            return False
        flag = torch.tensor([int(self.asked)])
        if self.group is not None:
            torch_dist.all_reduce(flag, torch_dist.ReduceOp.MAX, group=self.group)
        return bool(flag)
