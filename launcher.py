"""All processes of a run are one process group, led by a guard.  Never touches a tensor.

`launcher.run(work, ("ada",), nproc=2)` calls work(local_rank, world_size, "ada") in two processes, the ranks.  Each
finds its place in torchrun's variables (rendezvous.py).

    this process    starts the guard and the ranks, watches the ranks, explains how they failed, and kills the group
    the guard       a small shell that waits.  If this process dies first, the guard removes the run's folder and kills
                    the group, itself included
    the ranks       join the guard's group first thing, and so what they start is in it, too.  Each writes a report of
                    its own end into the run's folder

The file reads in the order in which a run lives: plan, run, start, watch, explain, end.  Part of distributed.py; copy
it together with that file.
"""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import re
import secrets
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, util
from typing import Any, NamedTuple

import torch

if __package__:
    from . import rendezvous
else:
    import rendezvous

STOP_GRACE = 30  # seconds for the ranks to save a checkpoint, if the run was told to stop; DIST_GRACE overrides it
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS = (*_STOP_SIGNALS, signal.SIGUSR1, signal.SIGTSTP)
CONNECTION_LOST = re.compile("connection (closed|reset) by peer", re.IGNORECASE)  # so this rank did not fail first
TIMED_OUT = re.compile("tim(ed|e) ?out", re.IGNORECASE)
_CRASHED = re.compile("SIG(ABRT|BUS|FPE|ILL|SEGV)")
_FRAME = re.compile(r'File "(.+)", line (\d+),? in (.+)')  # of a traceback, or of faulthandler's dump

# --------------------------------------------------------------------------------------------------------------- plan


BACKENDS = {"cuda": "nccl", "xpu": "xccl"}  # between accelerators of each kind; gloo connects all others


def devices() -> tuple[str, int]:
    """The kind of this machine's accelerators, and how many this process sees: ("cuda", 2), or ("cpu", 0).

    Counting starts no driver.  is_available would start CUDA, and no process could be forked any more.
    """
    kind = "cuda"
    if not torch.cuda.device_count() and torch.__version__ >= (2, 7):  # torch 2.6 may start a driver here
        kind = str(torch.accelerator.current_accelerator())  # what torch was built for: "cuda" without a GPU, too
    count = getattr(torch, kind).device_count() if kind in BACKENDS else 0
    return (kind, count) if count else ("cpu", 0)


def default_backend() -> str:
    """nccl for CUDA and xccl for XPU, if torch has it; else gloo."""
    backend = BACKENDS.get(devices()[0], "gloo")
    return backend if torch.distributed.is_backend_available(backend) else "gloo"


def check_backend(backend: str | None) -> None:
    """ValueError, in one line, if no process can use this backend here."""
    if backend == "nccl" and devices()[0] != "cuda":
        raise ValueError("backend nccl needs a CUDA GPU, and none is visible: use gloo")
    if backend == "xccl" and devices()[0] != "xpu":
        raise ValueError("backend xccl needs an Intel GPU (XPU), and none is visible: use gloo")
    if backend in BACKENDS.values() and not torch.distributed.is_backend_available(backend):
        raise ValueError(f"this torch was built without {backend}: use gloo")


def plan(nproc: int | None = None, backend: str | None = None, on_cpu: int = 1) -> int:
    """How many processes `run` would start here.  ValueError, in one line, if they couldn't run.

    By default one per visible GPU, or `on_cpu` without a GPU; the environment's NPROC overrides the default.
    """
    check_backend(backend)
    gpus = devices()[1]
    if nproc is None:
        nproc = os.environ.get("NPROC") or gpus or on_cpu
    if not str(nproc).isdecimal() or int(nproc) < 1:
        raise ValueError(f"nproc (or NPROC) is {nproc}: start at least 1 process")
    if gpus and int(nproc) > gpus and (backend or default_backend()) != "gloo":
        raise ValueError(f"{nproc} processes, but {gpus} visible GPU(s): start {gpus}, or share them with backend gloo")
    return int(nproc)


# ---------------------------------------------------------------------------------------------------------------- run


def run(function: Callable, args: tuple = (), nproc: int | None = None, finish: Callable | None = None) -> Any:
    """function(local_rank, world_size, *args) in nproc processes; returns what it returned on rank 0.

    See distributed.py's `launch`.  In each process `finish(failed)` is called after the function.
    """
    world = rendezvous.get_world()
    rendezvous.check_limits()
    if world.launcher == rendezvous.LAUNCH:
        raise RuntimeError("launch was called in a process that launch has started: call it once, in the main program")
    if not world.launcher:
        nproc = plan(nproc, "gloo" if nproc else None)  # a number that the caller chose may be more than the GPUs
        if nproc > 1:
            return _run_group((function, args, finish), nproc)
    return _run_here(function, args, finish)


def _run_group(job: tuple, nproc: int) -> Any:
    """Start nproc ranks, watch them, kill them all whatever happens; returns rank 0's result."""
    method, threads, job = _start_method(job, nproc)
    group = _Group(nproc)
    with contextlib.ExitStack() as undo:
        group.handle_signals(undo)
        group.start_guard()
        undo.callback(group.end)
        group.start_ranks(method, threads, job)
        result = group.watch()
    if group.stop_signal:  # it came after the ranks had ended, so it is for the caller
        os.kill(os.getpid(), group.stop_signal)
    return result


def _run_here(function: Callable, args: tuple, finish: Callable | None) -> Any:
    """This process is a rank of `run`, a launcher has started it, or it is the only one."""
    rendezvous.set_torchruns_variables()
    world = rendezvous.get_world()
    is_mpirun = world.launcher in (rendezvous.OPEN_MPI, rendezvous.MPICH)
    if is_mpirun or "TORCHELASTIC_RUN_ID" in os.environ:  # if these two are killed, their processes stay
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if world.launcher not in (rendezvous.NONE, rendezvous.TORCHRUN):
        rendezvous.set_meeting_point(world)

    def call() -> Any:
        try:
            return function(world.local_rank, world.world_size, *args)
        except KeyboardInterrupt:
            raise _exit_error(128 + signal.SIGINT) from None
        except RuntimeError as error:
            if not world.is_one_machine and re.search("gloo|NCCL|connection|timed out", str(error), re.IGNORECASE):
                text = rendezvous.lost(world)
                if text:
                    raise RuntimeError(text) from error
            raise

    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun's own report then shows this error
        from torch.distributed.elastic.multiprocessing.errors import record

        call = record(call)
    failed = True
    try:
        result = call()
        failed = False
    finally:
        if finish:
            finish(failed)
    return result if world.rank == 0 else None


def _end_with(parent: int) -> None:
    """End this process and its group once `parent` is gone, even by a SIGKILL."""
    while os.getppid() == parent:
        time.sleep(0.5)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _exit_error(code: int | str) -> BaseException:
    """SystemExit; a different exception where that would end a shell (IPython, a notebook, Python's own) or be lost."""
    is_shell = hasattr(sys, "ps1")
    if is_shell and code == 128 + signal.SIGINT:
        return KeyboardInterrupt()
    is_thread = threading.current_thread() is not threading.main_thread()  # Python prints no SystemExit of a thread
    if isinstance(code, str) and (is_shell or is_thread):
        return RuntimeError(code)
    return SystemExit(code)


# -------------------------------------------------------------------------------------------------------------- start


def _cuda_was_started() -> bool:
    """Whether this process has started CUDA (torch.cuda.is_available does it): then forked ranks can't use CUDA.

    That the driver is loaded says nothing: libcublasLt loads it as soon as torch is imported.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:  # not even loaded
        return torch.cuda.is_initialized()
    not_initialized = 3
    return torch.cuda.is_initialized() or driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialized


def fork_is_safe() -> bool:
    """Whether this process can be forked.  A child has its parent's locks, but none of its threads.

    So nothing may be forked after CUDA was started (torch says so, and refuses), while there are other Python threads,
    or native ones, such as torch's OpenMP pool: a child that uses the pool waits for ever.  macOS's own libraries break
    after a fork (bugs.python.org/issue33725).
    """
    if sys.platform != "linux" or torch.version.hip or _cuda_was_started() or threading.active_count() > 1:
        return False
    if devices()[0] not in ("cpu", "cuda"):  # nobody has tried it
        return False
    if len(os.listdir("/proc/self/task")) > 1:
        # OpenBLAS, which numpy brings, ends its threads before every fork and starts them again when it needs them.
        # So the threads that are left after a first fork are not OpenBLAS's.
        first = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of these very threads
            first.start()
        first.join()
    return len(os.listdir("/proc/self/task")) == 1


def _start_method(job: tuple, nproc: int) -> tuple[str, int | None, Any]:
    """ "fork" or "spawn", the threads of each rank (None: as OMP_NUM_THREADS says), and the job as the ranks get it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores // nproc)
    if fork_is_safe():
        return "fork", threads, job
    # A spawned process imports the main module: a file, or `python -m module`.  It skips the __main__ of a package, a
    # folder or a zip file; a notebook and a shell have no file.
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    imports_main = not spec.name.endswith("__main__") if spec else os.path.exists(file or "")
    is_stdin = file and not spec and not imports_main  # "<stdin>": a spawned process fails to import that
    name = getattr(job[0], "__name__", job[0])
    try:
        sent = pickle.dumps(job)  # plain: multiprocessing's own pickle would send tensors as shared memory
        if imports_main or not (is_stdin or b"__main__" in sent):
            return "spawn", threads, sent
        problem = (
            f"a new process can't find {name}, defined in a notebook or shell, and this one can't be forked (CUDA is "
            "in use, or this isn't Linux): move it to a file, or restart and call launch first"
        )
    except Exception as error:  # a lambda, a lock and a queue each raise an error of their own
        problem = (
            f"{name} and its arguments can't be sent to a new process ({type(error).__name__}: {error}): define "
            "functions at the top level of a file, and make locks and queues inside them"
        )
        if imports_main or spec:  # a program; in a notebook or shell a function can have no file
            raise RuntimeError(problem) from error
    if not imports_main and sys.platform == "linux" and not _cuda_was_started():
        return "fork", 1, job  # a process with one thread never uses the pool
    raise RuntimeError(problem)


# The shell's input ends when this process ends.  SIGVTALRM ends the ranks, but not the shell, which ignores it: a rank
# that is still alive would write into the folder, or fail for lack of it.  SIGKILL ends whoever handles SIGVTALRM.
_GUARD = """
trap '' HUP INT TERM VTALRM
cd /
PATH=/usr/bin:/bin:$PATH
while read -r line; do :; done
kill -s VTALRM 0
rm -rf "$0" || { sleep 0.1; rm -rf "$0"; }
kill -s KILL 0
"""


class _Report(NamedTuple):
    """What a rank says of its own end."""

    when: float = 0.0
    error: str = ""
    stopped_by: int = 0  # the signal, if it has ended itself with 128 + the signal's number
    result: Any = None


class _Group:
    """The process group of one run."""

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self.ranks: list[multiprocessing.Process] = []
        self.reports: dict[int, _Report] = {}
        self.stop_signal = 0  # the first signal that told the run to stop
        self.stop_time = 0.0
        self.told_again = self.asked_for_stacks = False
        # As long as Python's own temporary folders: the sockets in it have the longest names that a system takes.
        self.folder = os.path.join(tempfile.gettempdir(), f"dist-{secrets.token_urlsafe(6)}")

    def handle_signals(self, undo: contextlib.ExitStack) -> None:
        """What this process does when it gets a signal, until `undo` puts back the caller's handlers."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread handle signals
        actions: dict = dict.fromkeys(_STOP_SIGNALS, self.note_stop)
        actions |= {signal.SIGUSR1: self.note_question, signal.SIGTSTP: self.suspend}
        actions[signal.SIGCHLD] = signal.SIG_DFL  # if it is ignored, the kernel forgets how a child has ended
        for number, action in actions.items():
            given = signal.getsignal(number)
            # SIGHUP stays ignored under nohup.  SIGINT doesn't: a shell ignores it for every `script &`.
            if given == signal.SIG_IGN and number in (signal.SIGHUP, signal.SIGTSTP):
                continue
            # Python can't put back what it doesn't know, such as faulthandler's handlers.
            if given is None or (given == signal.SIG_DFL and _catches(os.getpid(), number)):
                continue
            undo.callback(signal.signal, number, given)
            signal.signal(number, action)

    def start_guard(self) -> None:
        """The guard has the group's number: no other process can get it as long as one of the group is there."""
        guards_end, self.lifeline = os.pipe()
        actions: list = [(os.POSIX_SPAWN_DUP2, guards_end, 0)]
        actions += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        command = ["/bin/sh", "-c", _GUARD, self.folder]
        self.guard = os.posix_spawn(command[0], command, os.environ, file_actions=actions, setpgroup=0)
        os.close(guards_end)

    def start_ranks(self, method: str, threads: int | None, job: Any) -> None:
        os.mkdir(self.folder, 0o700)  # after the guard, which removes it
        with socket.create_server(("127.0.0.1", 0)) as server:  # for torch's own init_process_group
            port = server.getsockname()[1]
        environment = {
            "WORLD_SIZE": str(self.nproc),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "DIST_STORE": f"{self.folder}/store",
        }
        lifeline = self.lifeline if method == "fork" else None  # a spawned process doesn't inherit it
        with _signals_blocked(method):  # the ranks start with the block, so that none dies half-way into its start
            for rank in range(self.nproc):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                arguments = (self.guard, lifeline, environment | place, threads, job)
                process = multiprocessing.get_context(method).Process(target=_be_rank, args=arguments)
                process.start()
                self.ranks.append(process)

    # ------------------------------------------------------------------------------------------------ watch, explain

    def note_stop(self, number: int, frame: Any = None) -> None:
        if not self.stop_signal:
            self.stop_signal, self.stop_time = number, time.monotonic()
        elif time.monotonic() - self.stop_time >= 1:  # GNU timeout and a closing terminal signal twice at once
            self.told_again = True

    def note_question(self, number: int, frame: Any) -> None:
        self.asked_for_stacks = True

    def suspend(self, number: int, frame: Any) -> None:
        """Ctrl-Z reaches this process alone: it stops the ranks, then itself, and continues them after `fg`."""
        self.send(signal.SIGSTOP)
        os.kill(self.guard, signal.SIGCONT)  # it must not sleep while this process could be killed
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # this process stops here, until `fg`
        signal.signal(number, self.suspend)
        self.send(signal.SIGCONT)

    def send(self, number: int) -> None:
        with contextlib.suppress(OSError):  # all have ended
            os.killpg(self.guard, number)

    def wait_a_moment(self) -> None:
        time.sleep(0.01)
        if self.asked_for_stacks:
            self.asked_for_stacks = False
            _print_error(self.stack_table())

    def watch(self) -> Any:
        """Wait for all ranks; returns rank 0's result, or raises what ended the run."""
        while True:
            self.wait_a_moment()
            all_ended = self.collect_reports()
            if self.failed():
                time.sleep(0.2)  # a rank can notice a death before this process does; a stop may come, too
                self.collect_reports()
            for report in self.reports.values():
                if report.stopped_by:
                    self.note_stop(report.stopped_by)  # the rank was told to stop, so the run was
            if self.stop_signal:
                _print_error(f"launch: {signal.Signals(self.stop_signal).name}: ending {self.nproc} processes")
                raise _exit_error(128 + self.stop_signal)
            if self.failed():
                raise self.failure()
            if all_ended:
                return self.reports[0].result

    def collect_reports(self) -> bool:
        """Read the reports, and write one for each rank that died without; returns whether all have ended."""
        ended = [_has_ended(process) for process in self.ranks]  # first: then their reports are complete
        for rank, process in enumerate(self.ranks):
            self.read_report(rank)
            report, code = self.reports.get(rank), process.exitcode
            # A rank that reports an error waits to be killed.  So a rank that died lost no other, and failed first.
            if ended[rank] and not report:
                self.reports[rank] = _Report(0.0, _how_it_ended_early(code, self.has_joined(rank)))
            elif ended[rank] and not report.error and code:
                self.reports[rank] = _Report(0.0, f"{_how_it_ended(code)} after its work")
        return all(ended)

    def read_report(self, rank: int) -> None:
        """It is a file: a process that was killed could leave a pipe half full, or its children could hold it open."""
        path = f"{self.folder}/report{rank}"
        if rank in self.reports or not os.path.exists(path):
            return
        try:
            with open(path, "rb") as file:
                self.reports[rank] = pickle.load(file)
        except Exception as error:  # of a class that can't be made here, for example
            self.reports[rank] = _Report(time.monotonic(), f"its result can't be read: {error}")

    def has_joined(self, rank: int) -> bool:
        """Whether it has imported all, is in the group, and handles signals as a rank does."""
        return os.path.exists(f"{self.folder}/stack{rank}")

    def failed(self) -> list[int]:
        """The ranks with an error, the first one first; ranks that only lost the connection to another come last."""
        errors = {rank: report for rank, report in self.reports.items() if report.error}
        return sorted(errors, key=lambda rank: (bool(CONNECTION_LOST.search(errors[rank].error)), errors[rank].when))

    def failure(self) -> BaseException:
        """What `launch` raises, with the error of the first rank that failed."""
        rank = self.failed()[0]
        error = self.reports[rank].error.rstrip()
        text = f"rank {rank} of {self.nproc} failed first: {error}"
        done = ", ".join(f"rank {r}" for r, report in sorted(self.reports.items()) if not report.error)
        if done and CONNECTION_LOST.search(error):
            text = f"rank {rank} of {self.nproc} failed first: it lost its connection after {done} had finished. "
            text += f"All ranks must call the same collectives.\n{error.splitlines()[-1]}"
        elif done and not error.endswith("after its work"):
            text += f"\n({done} had finished)"
        if CONNECTION_LOST.search(error) or TIMED_OUT.search(error) or _CRASHED.search(error):
            text += f"\n{self.stack_table()}"
        return _exit_error(text)

    def stack_table(self) -> str:
        """A line for each rank that says where it stands: its main thread's innermost frame outside torch and this."""
        for rank, process in enumerate(self.ranks):
            if self.has_joined(rank) and not _has_ended(process):
                os.kill(process.pid, signal.SIGUSR1)  # faulthandler answers, from C: in a collective, too
        time.sleep(0.3)
        lines = ["where each rank stands:"]
        for rank, process in enumerate(self.ranks):
            error = self.reports[rank].error if rank in self.reports else ""
            # In a traceback the innermost frame is the last one; in a dump it is the first.
            frames = _FRAME.findall(error)[::-1] or _FRAME.findall(self.read_dump(rank))
            state = f"no answer (if it was stopped: kill -CONT {process.pid})"
            if _has_ended(process):
                state = "gone"
            elif not self.has_joined(rank):
                state = "still starts"
            lines.append(f"  rank {rank}: {_innermost(frames) or state}")
        return "\n".join(lines)

    def read_dump(self, rank: int) -> str:
        """The main thread's part of what faulthandler has written, as an answer or in a crash."""
        path = f"{self.folder}/stack{rank}"
        if not os.path.exists(path):
            return ""
        with open(path, "r+") as file:
            dump = file.read()
            file.truncate(0)  # an answer is shown once
        return _unescape(dump.rpartition("hread 0x")[2])  # the main thread comes last

    # ------------------------------------------------------------------------------------------------------------ end

    def end(self) -> None:
        """Let the ranks save, then kill the group."""
        try:
            self.let_ranks_save()
        finally:
            self.send(signal.SIGKILL)
            for process in self.ranks:
                process.kill()  # one that has not joined yet
            for process in self.ranks:
                process.join()
            with contextlib.suppress(ChildProcessError):  # the caller's own handler of SIGCHLD has waited for it
                os.waitpid(self.guard, 0)
            os.close(self.lifeline)
            shutil.rmtree(self.folder, ignore_errors=True)

    def let_ranks_save(self) -> None:
        """SIGTERM to the ranks that handle it, and some time to save a checkpoint."""
        unheard = set(range(len(self.ranks))) - set(self.reports)
        for rank in filter(self.may_save, unheard):
            self.ranks[rank].terminate()
        grace = rendezvous.seconds("DIST_GRACE")
        if self.stop_signal and not os.environ.get("DIST_GRACE"):
            grace = STOP_GRACE
        for _ in range(round(grace / 0.01)):  # counted, not timed: the time to save stands still in a Ctrl-Z
            if self.told_again or not any(map(self.may_save, unheard)):
                break
            self.wait_a_moment()
        for rank in sorted(unheard):
            self.read_report(rank)
            report = self.reports.get(rank)
            if self.stop_signal and report and report.error:  # it could not save, perhaps
                _print_error(f"rank {rank} of {self.nproc} failed while it was ending: {report.error.rstrip()}")

    def may_save(self, rank: int) -> bool:
        """Whether it has joined, has not reported, and handles SIGTERM.

        SIGTERM would simply end the others, and their data loader workers would complain.
        """
        if _has_ended(self.ranks[rank]) or not self.has_joined(rank):
            return False
        has_reported = rank in self.reports or os.path.exists(f"{self.folder}/report{rank}")
        return not has_reported and _catches(self.ranks[rank].pid, signal.SIGTERM) is not False


@contextlib.contextmanager
def _signals_blocked(method: str) -> Iterator[None]:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        if method == "spawn":
            resource_tracker.ensure_running()  # now, so that it has the block, too: Ctrl-Z doesn't stop it
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # once more: Python has unblocked some
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _catches(pid: int, number: int) -> bool | None:
    """Whether the process has a handler for this signal; None on a system that doesn't tell."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        caught = int(re.search(r"SigCgt:\s*(\w+)", status.read())[1], 16)  # a bit for each signal
        return bool(caught >> (number - 1) & 1)
    return None


def _has_ended(process: multiprocessing.Process) -> bool:
    if process.exitcode is not None:
        return True
    try:
        os.kill(process.pid, 0)
        return False
    except ProcessLookupError:  # the caller's own handler of SIGCHLD has waited for it, and has its exit code
        return True


def _how_it_ended_early(code: int | None, has_joined: bool) -> str:
    """Of a process that has left no report."""
    if code is not None and code >= 0 and not has_joined:
        return "ended before its work began (its own error is above)"
    if code == 1:
        return "ended by os._exit(1), or by the error above, which it could not report (is the disk full?)"
    return _how_it_ended(code)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "ended and nobody knows how"
    if code >= 0:
        return f"ended by os._exit({code})"
    if -code not in list(signal.Signals):
        return f"ended by signal {-code}"
    hint = " (by hand, or by the kernel because memory ran out: see dmesg)" if -code == signal.SIGKILL else ""
    return f"ended by {signal.Signals(-code).name}{hint}"


def _unescape(dump: str) -> str:
    r"""faulthandler writes the letters of other alphabets as \xe9, \u4e2d or \U0001f600."""
    escaped = r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})"
    return re.sub(escaped, lambda found: chr(int(found[found.lastindex], 16)), dump)


def _innermost(frames: list[tuple[str, str, str]]) -> str:
    """The innermost frame outside torch, Python and this library, of frames that begin with the innermost."""
    ours = [os.path.join(os.path.dirname(__file__), f"{name}.py") for name in ("distributed", "rendezvous", "launcher")]
    libraries = (*ours, os.path.dirname(torch.__file__), sysconfig.get_path("stdlib"))
    inner = ""
    for path, line, function in frames:
        if not path.startswith(libraries):
            return f"{path}:{line}, {function}{inner}"
        inner = f", in {function}"
    return ""


def _print_error(text: str) -> None:
    # There may be no stderr, or a signal has come in the middle of a print: no reason to fail.
    with contextlib.suppress(ValueError, AttributeError, RuntimeError):
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:  # the terminal is gone; what is left in the buffer would make Python end with 120
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115


# ----------------------------------------------------------------------------------------------------- in each rank


def _be_rank(guard: int, lifeline: int | None, environment: dict, threads: int | None, job: Any) -> None:
    """Join the group, do the job, and report."""
    # Forked inside an except block, this process would go on handling its caller's exception: cleanup would do nothing,
    # and tracebacks would begin with it.
    ctypes.pythonapi.PyErr_SetExcInfo(None, None, None)
    try:
        os.setpgid(0, guard)  # so that Ctrl-C reaches the launching process alone, and this one ends with the group
    except OSError:  # the launching process was killed, and the guard has ended the group
        os._exit(1)
    if os.getppid() != multiprocessing.parent_process().pid:  # the same, and the number is a different group's by now
        os._exit(1)
    if lifeline is not None:
        os.close(lifeline)  # or the guard would wait for this process, too
    os.environ |= environment
    folder, rank = os.path.dirname(environment["DIST_STORE"]), environment["RANK"]
    # Where multiprocessing keeps its sockets, those of DataLoader workers, too: if killed, they can't remove them.
    multiprocessing.current_process()._config["tempdir"] = folder
    _handle_signals(f"{folder}/stack{rank}")
    if threads:
        torch.set_num_threads(threads)
    try:
        function, args, finish = pickle.loads(job) if isinstance(job, bytes) else job
        report = _Report(result=_run_here(function, args, finish))
        util._flush_std_streams()  # what can't be printed is an error
        _write(report, f"{folder}/report{rank}")
    except BaseException as error:
        report = _report_of(error)
        with contextlib.suppress(OSError):
            util._flush_std_streams()
        _write(report, f"{folder}/report{rank}")  # if the disk is full, Python prints that and the error
    while report.error or report.stopped_by:  # if it ended now, the other ranks would report a lost connection
        time.sleep(1)


def _write(report: _Report, path: str) -> None:
    with open(f"{path}.tmp", "wb") as file:
        pickle.dump(report, file)
    os.rename(f"{path}.tmp", path)  # atomic: the reader sees no file, or all of it


def _handle_signals(stack_file: str) -> None:
    """Nothing of the caller's; but on SIGUSR1, or in a crash, this process writes into the file where it stands."""
    signal.set_wakeup_fd(-1)  # the caller's, and so is the next: asyncio and faulthandler share theirs with children
    for number in (*_STOP_SIGNALS, signal.SIGTSTP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # in a terminal with `stty tostop` a print would stop it
    os.register_at_fork(after_in_child=faulthandler.enable if faulthandler.is_enabled() else faulthandler.disable)
    file = open(stack_file, "a")  # noqa: SIM115  faulthandler keeps it open
    faulthandler.enable(file=file)  # of this process alone, so not of its children
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _report_of(error: BaseException) -> _Report:
    if not isinstance(error, SystemExit):
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        return _Report(time.monotonic(), "\n\n" + "".join(traceback.format_exception(error.with_traceback(frames))))
    code = error.code
    if code is None or (isinstance(code, int) and code == 0):
        return _Report(time.monotonic())
    if isinstance(code, int) and code - 128 in _STOP_SIGNALS:
        return _Report(time.monotonic(), stopped_by=code - 128)
    text = code if isinstance(code, str) and code else f"it called sys.exit({code!r})"
    return _Report(time.monotonic(), text)
