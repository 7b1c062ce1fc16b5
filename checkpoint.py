# Copied from the project ddp-by-diff 1.0.  SPDX-License-Identifier: MIT
"""Atomic checkpoints for data parallel training: save, resume, and stop on SIGTERM.

    import sys

    import torch
    from torch.utils.data import DataLoader

    import checkpoint as ckpt
    import distributed as dist

    def main_worker(local_rank, world_size, epochs, batch_size):
        dist.init_process_group()
        stop = ckpt.Preemption()                      # notices SIGTERM, whichever process receives it
        sampler = dist.data_sampler(dataset)
        loader = DataLoader(dataset, batch_size // world_size, sampler=sampler, drop_last=True)
        in_epoch = len(loader)                        # steps of a whole epoch
        model = Net().to(dist.get_device())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, epochs * in_epoch)
        model = dist.prepare_ddp_model(model)
        keeper = ckpt.Keeper("run", model=model, optimizer=optimizer, scheduler=scheduler)
        step = keeper.restore().get("step", 0)        # 0 in a new run
        for epoch in range(step // in_epoch, epochs):
            sampler.set_epoch(epoch, skip=step % in_epoch * loader.batch_size)  # the examples before the stop
            for batch in loader:
                loss = train_step(model, batch, optimizer)  # you write Net, dataset and train_step
                scheduler.step()
                step += 1
                stopping = stop.agreed()              # a collective; SIGTERM takes effect here, so call it in each step
                if stopping or step % 100 == 0 or step == epochs * in_epoch:
                    keeper.save(step)                 # on every rank; rank 0 writes
                if stopping:
                    dist.cleanup()
                    sys.exit(143)                     # the exit code of a program that SIGTERM has ended
            dist.print_primary(f"epoch {epoch}  loss {dist.reduce(loss):.4f}")
        dist.cleanup()

    if __name__ == "__main__":
        dist.launch(main_worker, 5, 20)

Copy this file next to distributed.py; it also needs the package filelock, 3.20.1 or newer.

A checkpoint is a dictionary that torch.load reads with weights_only=True: "step", "config", "parts" (the state dict of
each part, the model's without "module."), "orders" (the names of each optimizer's parameters, in its order), "random"
(each rank's state of torch's random number generators, but not of Python's and numpy's), and the values that `save` was
given by name.
"""

import contextlib
import copy
import errno
import importlib
import math
import os
import pickle
import re
import secrets
import signal
import sys
import threading
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

if not __package__:
    import distributed as dist
else:  # a package into which this file was copied
    dist = importlib.import_module(".distributed", __package__)

LOCK_TIMEOUT = 10  # seconds: the processes of a killed run may still be ending
HEAD_START = 0.1  # seconds: the rank that has failed raises its error so much earlier, so that a launcher names it
SHARDS = (
    "Put shards (of FSDP, ZeRO, tensor parallelism) together on all ranks first, as get_model_state_dict does with "
    "full_state_dict=True, or save them with torch.distributed.checkpoint"
)
FROM_ALL = "Reduce it over all ranks, or save all ranks' values: save(step, name=checkpoint.from_all(mine))"
ADVICE = {  # what to do if the ranks differ in this
    "step": "Call save after the same number of steps on all ranks",
    "score": "Reduce the score over all ranks before saving: dist.reduce(score)",
    "order": "Its parameters have a different order on each rank: make its groups from lists, not from sets",
    "model": f"Wrap the model in DDP, which makes the weights equal. {SHARDS}",
    "optimizer": f"Give a loss to an optimizer or a scheduler as dist.reduce(loss), the same on all ranks. {SHARDS}",
    "part": FROM_ALL,
    "value": FROM_ALL,
}


class CheckpointError(Exception):
    """A checkpoint can't be saved or read, or doesn't fit; the message is one line."""


class Damaged(CheckpointError):
    """The file is not what `save` has written: a checksum is wrong, the archive is broken, or entries are missing."""


def write(path: Path, state: dict) -> None:
    """Write `state` with torch.save, atomically: `path` is the old file or the complete new one, even after kill -9.

    Raises:
        CheckpointError: If that fails (the disk is full), or torch.load couldn't read the file; `path` is as it was.
    """
    # It is in the same folder, because a rename can't cross file systems.  "x" creates a new file, and nobody can guess
    # its name, so where other users may write, too, nothing is written through a link that one of them has planted.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # without this, the rename may reach the disk before the bytes
        # Don't keep what torch.load would reject.  The tensors are mapped, so this takes no memory.
        torch.load(temporary, map_location="cpu", mmap=True, weights_only=True)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # writes the new name to the disk, too
        os.close(folder)
    except Exception as problem:
        raise CheckpointError(f"can't write {path} ({_reason(problem)})") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # after an error; if there was none, it has been renamed


def read(path: Path, test: bool = False) -> dict:
    """Return the checkpoint in this file.  Its tensors are mapped into CPU memory, so unused ones take no memory.

    Args:
        test: Also compare the checksums, which torch.load doesn't do; this reads the whole file.

    Raises:
        Damaged: If the file is not what was written.
        CheckpointError: If the machine can't read it: it is missing, or forbidden, or too many files are open.
    """
    if path.is_dir():  # torch.distributed.checkpoint saves folders
        raise CheckpointError(f"can't read {path} (it is a folder, not a checkpoint: give it another name)")
    try:
        if test:
            _test(path)
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Damaged:
        raise
    except Exception as problem:  # torch raises many kinds
        # What weights_only rejects, and what torch's own reader of archives can't read, is the file's fault.
        if isinstance(problem, pickle.UnpicklingError) or "PytorchStreamReader failed" in str(problem):
            raise Damaged(f"{path} is damaged, or not a checkpoint ({_reason(problem)})") from None
        raise CheckpointError(f"can't read {path} ({_reason(problem)})") from None
    is_complete = isinstance(state, dict) and state.keys() >= {"step", "config", "parts", "random"}
    if not is_complete or not isinstance(state["random"], list) or not all(map(_is_random_state, state["random"])):
        raise Damaged(f"{path} is damaged, or not a checkpoint (it lacks step, config, parts or the random states)")
    return state


def _test(path: Path) -> None:
    """Raise Damaged unless the file is an archive (torch's format is zip) in which all checksums are correct."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except Exception as problem:  # a broken archive can raise many kinds
        is_machine = isinstance(problem, (OSError, MemoryError))
        if is_machine and getattr(problem, "errno", 0) != errno.EINVAL:  # EINVAL: its end names an impossible position
            raise
        raise Damaged(f"{path} is damaged, or not a checkpoint ({_reason(problem)})") from None
    if wrong:
        raise Damaged(f"{path} is damaged (wrong checksum of {wrong})")


def _is_random_state(state: Any) -> bool:
    cpu, usual = state.get("cpu") if isinstance(state, dict) else None, torch.get_rng_state()
    return torch.is_tensor(cpu) and (cpu.dtype, cpu.shape) == (usual.dtype, usual.shape)


def _reason(problem: Exception) -> str:
    unknown = re.search(r"GLOBAL (\S+)", str(problem))
    if unknown:  # weights_only rejects it
        return f"{unknown[1]} in it is not a tensor, number, string, list or dictionary"
    is_hidden = isinstance(problem, RuntimeError) and problem.__context__  # torch.save hides that the disk is full
    return str(problem.__context__ if is_hidden else problem).partition("\n")[0]


def newest(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest undamaged checkpoint, or None, and the problems of all newer ones.

    Another process may save and remove checkpoints at the same time.

    Raises:
        CheckpointError: If all are damaged, or if the machine can't read one of them.
    """
    saved = _saved(folder)
    problems: dict[Path, str] = {}
    while saved:
        _, _, path = last = saved.pop()
        try:
            read(path, test=True)
            return path, problems
        except Damaged as problem:
            problems[path] = str(problem)
        except CheckpointError:
            saved, problems = _saved(folder), {}
            if last in saved:
                raise
            # The file has been removed since it was listed, because there are newer ones: look again.
    if problems:
        raise CheckpointError("; ".join(problems.values()))
    return None, {}


def _saved(folder: Path) -> list[tuple[int, float, Path]]:
    """Return (step, score, path) of each checkpoint in the folder, the oldest first; a missing score is -inf."""
    saved = []
    try:
        for entry in os.scandir(folder):  # not glob, which hides errors in Python 3.13
            match = re.fullmatch(r"step-(\d+)(?:-score-(-?\d+(?:\.\d+)?(?:e[+-]\d+)?))?\.pt", entry.name)
            # Whoever opens a FIFO is blocked.  A folder counts, so that `read` reports it: the run doesn't start anew.
            if match and (entry.is_file() or entry.is_dir()):
                saved.append((int(match[1]), float(match[2] or "-inf"), Path(folder, entry.name)))
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise CheckpointError(f"can't read {folder} ({problem.strerror})") from None
    return sorted(saved)


def _checksums(path: Path) -> str:
    """Return the names and checksums of the file's entries, or "" if it can't be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return str([(entry.filename, entry.CRC) for entry in archive.infolist()])
    except (OSError, zipfile.BadZipFile):
        return ""


class Keeper:
    """Saves and restores the state of the parts of a run: objects that have state_dict and load_state_dict.

    It is for data parallelism, where all ranks have equal parts: `save` keeps rank 0's, and rejects parts that differ
    between ranks, as with FSDP, ZeRO and tensor parallelism.  Only a module's buffers, such as BatchNorm's averages,
    may differ; all ranks get rank 0's.

    Every rank must make a Keeper.

    Args:
        folder: The folder of this run alone, which all machines must see.  It holds step-STEP.pt or
            step-STEP-score-SCORE.pt: the last two checkpoints, and the best `keep`.
        config: Settings to store in the checkpoint for a resumed run: numbers, strings, lists and dictionaries.
        parts: The parts by name: model=model, optimizer=optimizer.

    Raises:
        CheckpointError: On all ranks, if another run is using the folder, or if it can't be written to.
    """

    def __init__(self, folder: str | Path, config: dict | None = None, keep: int = 2, **parts: Any) -> None:
        self.config, self.keep = config or {}, keep
        self.parts = {name: dist.unwrap_model(part) for name, part in parts.items()}
        dist._check_same_call("Keeper")
        _on_all(self._take_folder, folder)

    def _take_folder(self, folder: str | Path) -> None:
        if not _is_count(self.keep):
            raise ValueError(f"Keeper: keep is {self.keep!r}: give an integer of at least 0")
        for name, part in self.parts.items():
            if not hasattr(part, "state_dict"):
                raise ValueError(
                    f"Keeper: {name} has no state_dict: give a plain value to save, as save(step, {name}=...)"
                )
        self.folder = Path(folder).absolute()  # so that it stays the same after os.chdir
        if not dist.is_primary():
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The system frees the lock if this process dies.  Before 3.20.1, filelock emptied what a link leads to.
            self.lock = FileLock(self.folder / ".lock", is_singleton=True)
            self.lock.acquire(LOCK_TIMEOUT)
        except Timeout:
            raise CheckpointError(f"another run is writing to {self.folder}: end it, or use another folder") from None
        except OSError as problem:
            raise CheckpointError(f"can't write to {self.folder} ({problem.strerror})") from None
        for temporary in self.folder.glob(".step-*.tmp"):  # from a run that was killed
            with contextlib.suppress(OSError):  # a folder, or somebody else's file, does no harm here
                temporary.unlink()

    def restore(self) -> dict:
        """Load all parts and the random states from the newest undamaged checkpoint; return it, or {} if there is none.

        Every rank must call this.  Rank 0 compares the checksums, and reports damaged newer files on stderr; then each
        rank reads the file.  If the number of processes has changed, the random states are not restored.

        Raises:
            CheckpointError: On all ranks, if all checkpoints are damaged, if a rank doesn't see rank 0's file, or if
                it doesn't fit the parts.
        """
        dist._check_same_call("Keeper.restore")
        path = _on_primary(self._choose)
        if path is None:
            return {}
        mine = self.folder / path.name  # on another machine this may be a different file
        seen = _from_all(_checksums(mine))
        others = [str(rank) for rank in range(len(seen)) if seen[rank] != seen[0]]
        if others:
            missing = f"rank {', '.join(others)} doesn't see rank 0's {path}"
            raise CheckpointError(f"{missing}: put the run's folder where all machines can see it")
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
            print(f"{problem}: resuming from {path}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                file.rename(f"{file}.damaged")  # so that it is not one of the last two
        return path

    def _load(self, path: Path) -> dict:
        state = read(path)
        for name, part in self.parts.items():
            try:
                part.load_state_dict(_as_named_in(part, state["parts"][name]))
            except Exception as problem:  # a part may raise anything
                raise CheckpointError(f"{path} doesn't fit this {name} ({_in_one_line(problem)})") from None
        saved = state.get("orders", {})  # a checkpoint that an older version has written has none
        for name, order in self._orders().items():
            if saved.get(name, order) != order:
                differs = "its parameters, or their order, are not those with which it was saved"
                raise CheckpointError(
                    f"{path} doesn't fit this {name} ({differs}): make its groups from lists, not sets"
                )
        return state

    def save(self, step: int, score: float | None = None, **extra: Any) -> None:
        """Write a checkpoint, and remove those that are neither among the last two nor among the best `keep`.

        Every rank must call this; it returns when rank 0 has written.  A checkpoint of the same step is replaced.

        Args:
            step: How many steps the run has made, the same on all ranks.
            score: A number, the same on all ranks; higher is better, and of two equal scores the earlier is better.
            extra: More values for `restore` to return: tensors, numbers, strings, lists and dictionaries, the same
                on all ranks.  If each rank has its own value, give `from_all(value)`: the list of all ranks' values.

        Raises:
            CheckpointError: On all ranks, if the step, the score, a value or a part differs between ranks (they
                exchange checksums), if the checkpoint can't be written, or if the folder has one of a later step,
                which `restore` would load.  All earlier checkpoints are then as before.
            ValueError: On a rank with an invalid argument; CheckpointError on the others.
        """
        dist._check_same_call("Keeper.save")
        state, checksums = _on_all(self._state_and_checksums, step, score, extra)
        _check_equal(_from_all(checksums))
        state["random"] = _from_all(_random_state())
        _on_primary(self._write, state, "" if score is None else f"-score-{float(score)}")

    def _state_and_checksums(self, step: int, score: float | None, extra: dict) -> tuple[dict, dict[str, str]]:
        """Return this rank's checkpoint, and a text for each value in it that must be the same on all ranks."""
        if not _is_count(step) or not _is_score(score):
            raise ValueError(f"save: step {step!r}, score {score!r}: give an integer of at least 0 and a finite score")
        if taken := extra.keys() & {"config", "parts", "orders", "random"}:
            raise ValueError(f"save: {', '.join(sorted(taken))}: the checkpoint has these names already, choose others")
        parts = {name: _state_of(name, part) for name, part in self.parts.items()}
        orders = self._orders()
        checksums = {"step": str(step), "score": str(score if score is None else float(score))}
        if dist.get_world_size() > 1:
            checksums |= {f"order.{name}": str(order) for name, order in orders.items()}
            for name, part in self.parts.items():
                kind = "model" if isinstance(part, nn.Module) else "optimizer" if _is_torchs(part) else "part"
                checksums |= _checksums_of(_without_buffers(part, parts[name]), f"{kind}.{name}")
            checksums |= _checksums_of(extra, "value")
        return {**extra, "step": step, "config": self.config, "parts": parts, "orders": orders}, checksums

    def _orders(self) -> dict[str, list[list[str]]]:
        """Return the names of each optimizer's parameters, by group: torch itself keeps their state by position."""
        names = {}
        for part_name, part in self.parts.items():
            if isinstance(part, nn.Module):
                for name, param in part.named_parameters():
                    names[param] = f"{part_name}.{_without_compile(name)}"
        orders: dict = {}
        for part_name, part in self.parts.items():
            if isinstance(part, torch.optim.Optimizer):
                orders[part_name] = [[names.get(param, "") for param in group["params"]] for group in part.param_groups]
        return orders

    def _write(self, state: dict, score: str) -> None:
        before = _saved(self.folder)
        if before and before[-1][0] > state["step"]:
            later = f"{before[-1][2]} is later than step {state['step']}"
            raise CheckpointError(f"{later}: restore it, or use another folder")
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


def _is_score(score: Any) -> bool:
    try:
        return score is None or math.isfinite(score)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # no number, or several, or too large for a float
        return False


def _is_torchs(part: Any) -> bool:
    """Return whether this is an optimizer, a scheduler or a GradScaler."""
    return isinstance(part, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler))


def _random_state() -> dict:
    random = {"cpu": torch.get_rng_state()}
    if dist.get_device().type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state()
    return random


def _state_of(name: str, part: Any) -> dict:
    try:
        state = part.state_dict()
    except Exception as problem:  # a part may raise anything
        reason = f"rank {dist.get_rank()}'s state_dict raises an error ({_in_one_line(problem)})"
        raise CheckpointError(f"can't save {name}: {reason}. {SHARDS}") from None
    if isinstance(part, nn.Module):
        for key in list(state):
            state[_without_compile(key)] = state.pop(key)
    return state


def _without_buffers(part: Any, state: Any) -> Any:
    if not isinstance(part, nn.Module):
        return state
    buffers = {_without_compile(name) for name, _ in part.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in state.items() if name not in buffers}


def _without_compile(name: str) -> str:
    """Return the name of a module's tensor without what torch.compile(layer) has added to it."""
    return name.replace("_orig_mod.", "")


def _as_named_in(part: Any, state: Any) -> Any:
    """Return the saved state with the names of this part, which may be compiled or not."""
    if isinstance(part, nn.Module):
        names = {_without_compile(name): name for name in part.state_dict()}
        state = copy.copy(state)  # keeps the metadata, in which torch stores the versions of modules
        for name in list(state):
            state[names.get(_without_compile(name), name)] = state.pop(name)
    return state


def _checksums_of(state: Any, name: str) -> dict[str, str]:
    """Return {name: a tensor's checksum, or another value's text} for all values in a state dict."""
    if isinstance(state, (dict, list, tuple)):
        checksums: dict = {}
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            checksums |= _checksums_of(value, f"{name}.{key}")
        return checksums
    if hasattr(state, "to_local"):  # a DTensor: a shard, even if all shards happen to be equal
        return {name: f"the shard of rank {dist.get_rank()}"}
    if isinstance(state, (set, frozenset)):  # its order differs between processes
        return {name: repr(sorted(state, key=repr))}
    if torch.is_tensor(state):
        dense = state.detach().cpu() if state.layout == torch.strided else state.detach().cpu().to_dense()
        dense = dense.resolve_conj().resolve_neg().contiguous()
        content = dense.flatten().view(torch.uint8).numpy().data  # so NaN is equal to NaN
        return {name: f"{state.dtype} {list(state.shape)} {zlib.crc32(content)}"}
    return {name: repr(state)}


def _check_equal(checksums: list[dict[str, str]]) -> None:
    """Raise CheckpointError if a rank's checksums differ from rank 0's; all ranks call this with the same list."""
    first, *others = checksums
    for rank, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                kind, _, part = name.partition(".")
                differs = f"rank {rank}'s differs from rank 0's, which alone would be kept"
                raise CheckpointError(f"can't save {part or kind}: {differs}. {ADVICE[kind]}")


def from_all(value: Any) -> list:
    """Return the values of all ranks, in rank order.  Every rank must call this, with a value that can be pickled."""
    dist._check_same_call("from_all")
    return _from_all(value)


def _from_all(value: Any) -> list:
    values = [value] * dist.get_world_size()
    if len(values) > 1:
        torch_dist.all_gather_object(values, value)
    return values


def _on_all(function: Callable, *args: Any) -> Any:
    """Call function(*args) on every rank.  If it fails on one rank, all raise an error, so none waits for that rank."""
    result, error = None, None
    try:
        result = function(*args)
    except Exception as problem:
        error = problem
    messages = [message for message in _from_all(error and _in_one_line(error)) if message]
    if error:
        raise error
    if messages:
        time.sleep(HEAD_START)
        raise CheckpointError(messages[0])
    return result


def _in_one_line(problem: Exception) -> str:
    kind = "" if isinstance(problem, CheckpointError) else f"{type(problem).__name__}: "
    return kind + " ".join(str(problem).split())


def _on_primary(function: Callable, *args: Any) -> Any:
    """Call function(*args) on rank 0 only; return its result, or raise its error, on every rank."""
    result = _on_all(lambda: function(*args) if dist.is_primary() else None)
    return _from_all(result)[0]


class Preemption:
    """Notices SIGTERM, which clusters send to a job that must end, so that all ranks can save after the same step.

    Make one on every rank, in the main thread, after init_process_group.  It replaces the process's SIGTERM handler.
    In another thread, as in Ray Train, it can't, so a line on rank 0 reports that SIGTERM is not noticed.

    `asked` is True if this process itself has received SIGTERM.  It differs between ranks, so decide by `agreed`.
    """

    def __init__(self) -> None:
        self.asked, self.calls, self.process = False, 0, os.getpid()
        self.group: Any = None
        if dist.get_world_size() > 1:  # on the CPU, so that no GPU waits for it
            self.group = torch_dist.new_group(backend="gloo", timeout=dist.get_timeout())
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handle)
        else:  # Python lets only the main thread set a handler
            dist.print_primary("SIGTERM is not noticed outside the main thread: use the platform's own notice")

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() == self.process:
            self.asked = True
        else:  # a forked process, such as a DataLoader worker, ends as if there were no handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def agreed(self, every: int = 1) -> bool:
        """Return whether any rank has received SIGTERM: the same answer on all ranks, which all must call this.

        Args:
            every: Ask the other ranks, and wait for them, only in every `every`-th call; the others return False.
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
