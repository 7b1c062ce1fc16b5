# Copied from the project ddp-by-diff 1.0.  SPDX-License-Identifier: MIT
"""A small torchrun inside the program: it starts one process per rank, watches them, and reports which failed first.

    run(function, args, nproc=2)    # function(*args) in two new processes; returns rank 0's result

Each rank gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT), so
torch's own init_process_group works in it, too.  distributed.py uses this file if it is next to it.

The file follows a run: start, watch, explain, end; what each rank does.  The last two parts also serve the ranks of
torchrun, srun and mpirun: the launchers' variables, and how the ranks find each other.
"""

import atexit
import contextlib
import errno
import faulthandler
import fcntl
import gc
import importlib
import io
import logging.handlers
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import distributed as torch_dist

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A rank answers this signal with its stack.  Not SIGUSR1, for which a program may have a handler of its own.
STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR1)  # macOS has no SIGRTMAX
STOP_GRACE = 30  # seconds to save, for ranks that handle SIGTERM, if the run is asked to stop
FAILURE_GRACE = 3  # the same, after another rank has failed
REPORT_UNENDED_AFTER = 10  # seconds that a rank's process lives on after the rank has finished
POLL = 0.02  # seconds between two looks at the ranks
CPU_QUOTA = "/sys/fs/cgroup/cpu.max"  # in a container "200000 100000" means two cores, "max 100000" all
_FRAME = re.compile(r'File "(.+)", line (\d+),? in (.+)')  # a line of a traceback, Python's or faulthandler's
# The table of where each rank is shows lines of the program, so not of torch, of what is built into Python, ...
NOT_THE_PROGRAM = [os.path.join(os.path.dirname(torch.__file__), ""), "<frozen "]
STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
HELPER = b"# Copied from the project ddp-by-diff"  # how the first line of each helper begins

# How a rank may fail, beginning with the likeliest cause: a rank that died broke the others' connections, while a rank
# that reports an error keeps its own, and a lost connection is only a consequence.
DIED, FAILED, TIMED_OUT, LOST = FAILURES = ("died", "failed", "timed out", "lost its connection")


class _Report(NamedTuple):
    """How a rank has ended."""

    when: float
    failure: str = ""  # one of FAILURES, or "" if it has finished, or was asked to stop
    error: str = ""
    stop_signal: int = 0  # the rank exited with 128 + this signal, as programs do after saving
    result: Any = None


def run(function: Callable, args: tuple = (), nproc: int = 2) -> Any:
    """Run function(*args) in nproc new processes, and return what it returned on rank 0.

    The first rank that fails ends the run: SystemExit is raised with its error, so the exit code is 1.  In a notebook,
    a shell, a thread or a process of multiprocessing, where SystemExit would be lost, it is a RuntimeError.  Ctrl-C and
    SIGTERM end the run with 130 and 143; Ctrl-C and `kill -USR1` of this process print where each rank is.  Ranks that
    handle SIGTERM get DIST_GRACE seconds to save, by default 30, or 3 after another rank has failed.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a spawned rank, which imports the program
        sys.exit('launch was called while the program was imported: write  if __name__ == "__main__":  above the call')
    if multiprocessing.current_process().daemon:
        raise RuntimeError("launch: a daemonic process can't start child processes: create it with daemon=False")
    ranks = _Ranks(nproc, read_grace())
    with ranks.signals_handled():
        try:
            ranks.start((function, args, _random_numbers()))
            error = ranks.watch()
        finally:
            ranks.end()
    if error:
        raise RuntimeError(error) if must_go_on() else SystemExit(error)
    if ranks.stop_signal:
        is_ctrl_c_in_shell = ranks.stop_signal == signal.SIGINT and _in_shell()
        raise KeyboardInterrupt if is_ctrl_c_in_shell else SystemExit(128 + ranks.stop_signal)
    return ranks.reports[0].result


def read_grace() -> float | None:
    """Return DIST_GRACE in seconds, or None if it is not set; raise ValueError, in one line, if it is not a number."""
    text = os.environ.get("DIST_GRACE")
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}(\.\d*)?", text):
        raise ValueError(f"DIST_GRACE is {text}: give a number of seconds (DIST_GRACE=30), or unset it")
    return float(text)


def _in_shell() -> bool:
    """Return whether the program is a notebook or an interactive shell, which SystemExit would end."""
    return hasattr(sys, "ps1")


def must_go_on() -> bool:
    """Return whether SystemExit would be lost, because a thread drops it, and a Pool waits for its worker forever."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    return _in_shell() or not is_main_thread or multiprocessing.parent_process() is not None


# ------------------------------------------------------------------------------------------------------------- start


def fork_is_safe() -> bool:
    """Return whether this process has no other threads, of Python or of OpenMP: a child would wait for them forever."""
    return _can_fork() and threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1


def _can_fork() -> bool:
    """Return whether the system and CUDA allow a fork.  CUDA only says so in a forked child, so one is forked."""
    if sys.platform != "linux":  # macOS's own libraries break after a fork (bugs.python.org/issue33725)
        return False
    # At this first fork OpenBLAS, which numpy brings, ends its threads, so `fork_is_safe` doesn't count them.
    child = _fork(lambda: torch.cuda.device_count() > 0 and torch.cuda._is_in_bad_fork())
    return os.waitpid(child, 0)[1] == 0


def _fork(function: Callable) -> int:
    """Fork a child process that calls the function, with its result as exit code; return the child's process ID."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(function() or 0)
        finally:
            os._exit(code)
    return child


def _how_to_start(job: tuple, nproc: int) -> tuple[str, int | None, Any]:
    """Return "fork" or "spawn", torch's threads in each rank (None: its default), and the job as the ranks get it."""
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, _count_cores() // nproc)
    if fork_is_safe():
        return "fork", threads, job
    has_file = os.path.exists(getattr(sys.modules["__main__"], "__file__", ""))
    is_shell = _in_shell() or not has_file
    try:
        pickled = pickle.dumps(job)  # multiprocessing's own pickle would send tensors through shared memory
        if not (is_shell and b"__main__" in pickled):
            return "spawn", threads, pickled
        problem = "a new process can't import what a shell or notebook defines: move it to a file, or restart the shell"
    except Exception as error:  # a lambda, a lock and a queue have errors of their own
        problem = (
            f"the function and its arguments can't be sent to a new process ({type(error).__name__}: {error}): define "
            "functions at the top level of a file, and create locks and queues inside them"
        )
    if is_shell and _can_fork():
        return "fork", 1, job  # with one thread torch doesn't use OpenMP's pool
    raise RuntimeError(problem)


def _package_main() -> str:
    """Return the name of `python -m package`'s __main__.py, which multiprocessing doesn't import in new processes."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec and spec.name.endswith(".__main__") else ""


def _count_cores() -> int:
    """Return the number of cores for this process.  A container (docker --cpus=2) sees all cores, but has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or no quota
        quota, period = Path(CPU_QUOTA).read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


class _Ranks:
    """The processes of one run, seen from the process that has started them."""

    def __init__(self, nproc: int, grace: float | None) -> None:
        self.nproc = nproc
        self.grace = grace
        self.processes: list[Any] = []  # of multiprocessing
        self.reports: dict[int, _Report] = {}
        self.ended: set[int] = set()
        self.stop_signal = 0  # the first signal that asked the run to stop
        self.stop_now = False  # after a second Ctrl-C: don't wait for the ranks to save
        self.stacks_wanted = False
        self.unended_reported = False
        self.guard = 0  # the guard's process ID
        self.store: Any = None
        self.folder = ""  # for the ranks' reports and stacks

    @contextlib.contextmanager
    def signals_handled(self) -> Iterator[None]:
        """Record signals, so that `watch` can act on them.  An ignored signal stays ignored (SIGHUP under nohup)."""
        if threading.current_thread() is not threading.main_thread():  # Python sets handlers in the main thread only
            yield
            return
        # A handler of the program itself might wait for the ranks before we do.
        handlers = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN:
                handlers[number] = signal.signal(number, self.note_signal)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: it was not installed from Python

    def note_signal(self, number: int, frame: Any) -> None:
        if number == signal.SIGUSR1:
            self.stacks_wanted = True
        elif not self.stop_signal:
            self.stop_signal = number
        elif number == signal.SIGINT:  # not a second SIGTERM: GNU timeout sends two at once
            self.stop_now = True

    def start(self, job: tuple) -> None:
        """Start the processes, then serve their store."""
        self.folder = tempfile.mkdtemp(prefix="dist-")
        method, threads, job = _how_to_start(job, self.nproc)
        parent = os.getpid()
        self.guard = _fork(lambda: _guard(parent, self.folder))
        os.setpgid(self.guard, self.guard)  # here, too: the group must exist before the ranks join it
        server = socket.create_server(("127.0.0.1", 0))  # held from now on, so no other run can have its port
        address, port = server.getsockname()
        environment = {
            "WORLD_SIZE": str(self.nproc),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: rank 0 need not serve the store
            "TORCHELASTIC_RESTART_COUNT": "0",  # torch 2.4 and 2.5 read it then
        }
        files = _open_files()
        _inherited[:] = [weakref.ref(file) for file in files]
        _write(files)  # without this, each forked rank would also write the files' buffers
        if method == "spawn":
            resource_tracker.ensure_running()  # now, because it unblocks signals
        # Signals are blocked until a rank is ready for them, so that no rank dies half-way into its start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGUSR1, STACK_SIGNAL))
        try:
            for rank in range(self.nproc):
                if signal.sigpending() & set(STOP_SIGNALS):
                    break
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                arguments = (self.guard, environment | place, self.folder, threads, job, _package_main())
                process = multiprocessing.get_context(method).Process(target=_be_rank, args=arguments)
                process.start()
                self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.store = torch_dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
            use_libuv=False,  # libuv's of torch 2.4 and 2.5 doesn't listen on a given socket (pytorch#150215)
        )

    # -------------------------------------------------------------------------------------------------------- watch

    def watch(self) -> str:
        """Wait until all ranks have ended, one has failed, or the run is asked to stop; return the error, or ""."""
        while not (self.stop_signal or self.failures() or len(self.ended) == self.nproc):
            self.wait_for_news()
            for report in self.reports.values():
                self.stop_signal = self.stop_signal or report.stop_signal  # the rank was asked to stop, so the run was
            self.report_unended()
        # The first failure that we see may be a consequence, so wait for its cause, longer after a lost connection.
        since = time.monotonic()
        while self.failures() and not self.stop_signal:
            patience = 2 if self.reports[self.failures()[0]].failure == LOST else 0.2
            remaining = since + patience - time.monotonic()
            if remaining <= 0:
                return self.explain()
            self.wait_for_news(remaining)
        if self.stop_signal == signal.SIGINT and not any(report.stop_signal for report in self.reports.values()):
            print(f"\n{self.table()}", file=sys.stderr, flush=True)  # a line below the terminal's ^C
        return ""

    def wait_for_news(self, seconds: float = POLL) -> None:
        """Sleep for POLL seconds, or for `seconds` if that is less; then check the signals and the ranks."""
        time.sleep(min(seconds, POLL))
        if self.stacks_wanted:
            self.stacks_wanted = False
            print(self.table(), file=sys.stderr, flush=True)
        for rank, process in enumerate(self.processes):
            self.look_at(rank, process.exitcode)

    def look_at(self, rank: int, code: int | None) -> None:
        """Record whether this rank has ended, and its report: the rank's own, or one on how it died."""
        if code is not None:  # check this first, because a rank that has ended has written its report, or never will
            self.ended.add(rank)
        if rank not in self.reports and (written := self.read(f"report{rank}")):
            try:
                self.reports[rank] = torch.load(io.BytesIO(written), map_location="cpu", weights_only=False)
            except Exception as error:  # for example a class that this process can't import
                self.reports[rank] = _Report(time.monotonic(), FAILED, f"its result can't be read: {error}")
        report = self.reports.get(rank)
        if code is not None and report is None:
            self.reports[rank] = _Report(time.monotonic(), DIED, _how_it_ended(code))
        elif report and code not in (None, 0, -STACK_SIGNAL) and not report.failure:
            self.reports[rank] = _Report(time.monotonic(), DIED, f"{_how_it_ended(code)}. It had finished its work")

    def read(self, name: str) -> bytes:
        """Return the content of a file that a rank may have written, or b"" if there is none."""
        path = Path(self.folder, name)
        return path.read_bytes() if path.exists() else b""

    def report_unended(self) -> None:
        """Print, once, which ranks have finished although their processes are still running."""
        now = time.monotonic()
        running = [report for rank, report in self.reports.items() if rank not in self.ended]
        if any(now - report.when > REPORT_UNENDED_AFTER for report in running) and not self.unended_reported:
            self.unended_reported = True
            print(f"launch: waiting for processes to end\n{self.table()}", file=sys.stderr, flush=True)

    def failures(self) -> list[int]:
        """Return the ranks that have failed, beginning with the likeliest cause of the other failures."""
        failed = [rank for rank, report in self.reports.items() if report.failure]
        return sorted(failed, key=lambda rank: (FAILURES.index(self.reports[rank].failure), self.reports[rank].when))

    # ------------------------------------------------------------------------------------------------------ explain

    def explain(self) -> str:
        """Return the text for the user: the error of the rank that failed first, and where each rank is."""
        rank = self.failures()[0]
        report = self.reports[rank]
        text = f"rank {rank} of {self.nproc} failed first: {report.error.rstrip()}"
        finished = ", ".join(f"rank {number}" for number, ended in sorted(self.reports.items()) if not ended.failure)
        if report.failure == LOST and finished:
            text += f"\nIt lost its connection after {finished} had finished. All ranks must call the same collectives."
        elif finished:
            text += f"\n({finished} had finished)"
        return text if report.failure == FAILED else f"{text}\n{self.table()}"

    def table(self) -> str:
        """Return a table with the line of the program at which each rank is."""
        asked = set(range(len(self.processes))) - self.ended
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, STACK_SIGNAL)  # faulthandler answers inside a collective, too
        deadline = time.monotonic() + 6
        while time.monotonic() < deadline and not self.stop_now:
            if all(b"_bootstrap" in self.read(f"stack{rank}") for rank in asked):  # multiprocessing's, the last frame
                break
            time.sleep(0.01)
        lines = ["where each rank is:"]
        for rank, process in enumerate(self.processes):
            report = self.reports.get(rank)
            stacks = self.read(f"stack{rank}").decode()
            frames = _FRAME.findall(stacks.rpartition("hread 0x")[2])  # the main thread is the last one
            if report and report.failure in (FAILED, TIMED_OUT, LOST):
                frames = _FRAME.findall(report.error)[::-1]  # in a traceback, the innermost frame is the last one
            if rank not in asked:
                otherwise = "has ended"
            elif report:
                otherwise = "has finished, but its process is still running: a thread, or an atexit function?"
            elif frames:  # it has answered, but none of the lines is the program's
                otherwise = "{}:{}, {}".format(*frames[0])
            else:
                otherwise = f"no answer: it is starting, or it is stopped (then type kill -CONT {process.pid})"
            progress = self.read(f"progress{rank}").decode().rstrip()
            lines.append(f"  rank {rank}: {_where(frames) or otherwise}{progress}")
            open(f"{self.folder}/stack{rank}", "w").close()  # make it empty for the next answer
        return "\n".join(lines)

    # ---------------------------------------------------------------------------------------------------------- end

    def end(self) -> None:
        """Let the ranks save, then kill them and the processes that they have started, and remove the run's folder."""
        try:
            self.let_ranks_save()
        finally:
            if self.guard:
                os.killpg(self.guard, signal.SIGKILL)
                os.waitpid(self.guard, 0)
            for process in self.processes:
                process.kill()  # if it has not joined the group yet
                process.join()
            self.store = None
            shutil.rmtree(self.folder, ignore_errors=True)

    def let_ranks_save(self) -> None:
        """Send SIGTERM to ranks that handle it, and wait until they have saved.  They may need the others for that."""
        saving = []
        for rank, process in enumerate(self.processes):
            if rank not in self.reports and _handles_sigterm(process.pid):
                process.terminate()
                saving.append(rank)
        if saving and self.stop_signal:
            name = signal.Signals(self.stop_signal).name
            print(f"launch: {name}: waiting for {len(saving)} processes to save", file=sys.stderr, flush=True)
        grace = self.grace
        if grace is None:
            grace = STOP_GRACE if self.stop_signal else FAILURE_GRACE
        deadline = time.monotonic() + grace
        while not self.stop_now and any(rank not in self.reports for rank in saving):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            self.wait_for_news(remaining)
        for rank in saving:
            report = self.reports.get(rank)
            if report and report.failure in (DIED, FAILED, TIMED_OUT):
                text = f"rank {rank} of {self.nproc} failed while it was shutting down: {report.error}"
                print(text, file=sys.stderr, flush=True)


def _handles_sigterm(pid: int) -> bool:
    try:
        caught = int(re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[0], 16)  # a bit for each
    except OSError:  # macOS doesn't tell, so assume that it does
        return True
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code} (by os._exit, or because of an error that is shown above)"
    if -code == signal.SIGKILL:
        return "killed by SIGKILL (by hand, or by the kernel, because memory ran out: see dmesg)"
    if -code == signal.SIGABRT:
        return "killed by SIGABRT (by C or C++ code: gloo, or NCCL's watchdog after a timeout; see its error above)"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def _where(frames: list[tuple[str, str, str]]) -> str:
    """Return the innermost line of the program itself, or "" if there is none; frames begin with the innermost."""
    called = ""
    for path, line, function in frames:
        if function == "_bootstrap":  # in a forked process, the frames that follow are the parent's
            break
        if is_the_program(path):
            return f"{path}:{line}, {function}" + (f", in {called}" if called else "")
        if function != "wrapper":  # torch's, around each of its collectives
            called = function
    return ""


def is_the_program(path: str) -> bool:
    """Return whether this file belongs to the program: not to Python or torch, and not a helper of this project."""
    in_library = path.removeprefix(STANDARD_LIBRARY)
    is_pythons = in_library != path and not in_library.startswith(("site-packages", "dist-packages"))
    if is_pythons or path.startswith(tuple(NOT_THE_PROGRAM)):
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return not file.readline().startswith(HELPER)
    return True  # not a file, such as <string>


# ------------------------------------------------------------------------------------------ in the guard, in each rank


def _guard(parent: int, folder: str) -> None:
    """Lead the process group of all ranks and of the processes that they start (DataLoader workers, ...).

    If the launching process dies, even by SIGKILL, remove the run's folder, and kill the group.
    """
    os.setpgid(0, 0)  # otherwise, if the parent died now, the parent's group would be killed
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _be_rank(guard: int, environment: dict, folder: str, threads: int | None, job: Any, package_main: str) -> None:
    """Call the function in this process, which is a rank, and write its report."""
    global _progress_file
    try:
        os.setpgid(0, guard)  # so that Ctrl-C in a terminal reaches only the launching process
    except OSError:  # the launching process was killed, so the guard has ended, too
        os._exit(1)
    os.environ |= environment
    multiprocessing.current_process()._config["tempdir"] = folder  # for sockets that killed workers can't remove
    is_forked = not isinstance(job, bytes)
    if is_forked:
        _leave_to_the_parent()
    rank = int(environment["RANK"])
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    stack_file = open(f"{folder}/stack{rank}", "a")  # noqa: SIM115  faulthandler keeps it open
    faulthandler.enable(file=stack_file)  # for a crash, also in another thread, such as NCCL's watchdog
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # faulthandler restores this at Python's end, so no rank dies of it
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=False)
    _progress_file = os.open(f"{folder}/progress{rank}", os.O_CREAT | os.O_WRONLY)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGUSR1, STACK_SIGNAL))
    if threads:
        torch.set_num_threads(threads)
    failure, pid = None, os.getpid()
    try:
        if not is_forked and package_main and b"__main__" in job:
            sys.modules["__main__"] = importlib.import_module(package_main)
        function, args, random_numbers = job if is_forked else pickle.loads(job)
        _set_random_numbers(random_numbers, is_forked)
        result = function(*args)
        report = _Report(time.monotonic(), result=result if rank == 0 else None)
    except BaseException as error:
        failure = error  # kept until the report is written, because closing its frames' files may take long
        report = _report_of(error)
        # This is done before the report, because a rank that has reported a failure is killed.
        _write([*_log_handlers(), *_open_files()])
    if os.getpid() != pid:  # a child that the function has forked has returned from it
        os._exit(failure is not None)
    _write_report(report, f"{folder}/report{rank}")
    if report.failure or report.stop_signal:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a DataLoader worker dies
        failure = None  # frees its frames, so their files are closed and their DataLoaders end
        while True:  # if this rank ended now, the others would report a lost connection
            signal.pause()
    # Python does this at the end of a program, in this order, but multiprocessing leaves out a part of it.
    threading._shutdown()  # waits for threads, and asks pools of threads to end
    atexit._run_exitfuncs()
    _write(_open_files())


def _leave_to_the_parent() -> None:
    """Make a forked process like a new one, because only the parent cleans up what the parent has begun.

    The libraries that register with atexit once per process register again: weakref.finalize, and logging.
    """
    signal.set_wakeup_fd(-1)  # of an asyncio loop: a signal to this rank would wake the parent's loop
    gc.freeze()  # or the rank would copy the memory of the launching process, when it collects garbage
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    for handler in _log_handlers():
        if isinstance(handler, logging.handlers.BufferingHandler):  # other handlers' files were flushed before the fork
            handler.buffer = []
    weakref.finalize._registered_with_atexit = True
    for function in logging.shutdown, weakref.finalize._exitfunc, multiprocessing.util._exit_function:  # the last first
        atexit.register(function)
    forkserver._forkserver.__init__()  # this rank's DataLoaders start their own, because Python waits for it as a child


def _random_numbers() -> tuple:
    """Return the states of the generators that a program may have seeded: Python's, numpy's, torch's (CPU and GPUs)."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), numpy.random.get_state(), torch.initial_seed(), torch.get_rng_state(), cuda


def _set_random_numbers(states: tuple, is_forked: bool) -> None:
    """Continue the launching process's random numbers.  If this process was forked, only Python's were reseeded."""
    of_python, of_numpy, seed, of_torch, of_cuda = states
    random.setstate(of_python)
    if not is_forked:
        numpy.random.set_state(of_numpy)
        torch.manual_seed(seed)  # GPUs, too
        torch.set_rng_state(of_torch)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)


_progress_file = 0  # of a rank of `launch`: a file, because a rank that hangs can't answer
_passes = 0  # the forward passes of DDP models that this rank has begun in training, in this group


def count_forward_passes(model: torch.nn.Module) -> None:
    """Count forward passes in training, for the report of a hang: a rank with fewer batches has made fewer of them."""
    model.register_forward_pre_hook(_count_pass)


def _count_pass(model: torch.nn.Module, inputs: tuple) -> None:
    global _passes
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _passes += 1
        if _progress_file:
            os.pwrite(_progress_file, _passes_in_words().encode().ljust(80), 0)  # 80: the text before may be longer


def _passes_in_words() -> str:
    return f", after {_passes} forward passes" if _passes else ""


def note_forward_passes(error: BaseException) -> None:
    """Add the number of forward passes to the error.  For a rank of `launch`, the table shows it."""
    if _passes and not _progress_file and hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(f"(rank {os.environ.get('RANK', 0)}{_passes_in_words()})")


_inherited: list[weakref.ref] = []  # the files that the launching process had open


def _open_files() -> list:
    """Return the program's open files.  The inherited ones are frozen, so gc does not list them."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    files = [item for item in gc.get_objects() if issubclass(type(item), kinds)]  # isinstance would ask the item
    return files + [file for reference in _inherited if (file := reference()) is not None]


def _log_handlers() -> list[logging.Handler]:
    return [handler for reference in logging._handlerList if (handler := reference())]


def _write(files: list) -> None:
    """Write the files' buffers to disk, each in a thread, because a file may be a pipe that nobody reads."""
    for file in files:
        thread = threading.Thread(target=_flush, args=[file], daemon=True)
        thread.start()
        thread.join(2)


def _flush(file: Any) -> None:
    with contextlib.suppress(Exception):  # it is closed, or the disk is full
        file.flush()


def _write_report(report: _Report, path: str) -> None:
    """Write the report atomically, so that the launching process sees no report, or all of it."""
    try:
        torch.save(report, f"{path}.tmp")  # not pickle, which would load a GPU's tensors onto that GPU
    except Exception as error:  # pickle raises many kinds of errors, and the disk may be full
        text = (
            f"worker_fn has returned, but its result can't be sent to the launching process ({type(error).__name__}: "
            f"{error}): save it in worker_fn and return None, or set TMPDIR to a folder with enough space"
        )
        torch.save(_Report(time.monotonic(), FAILED, text), f"{path}.tmp")
    os.rename(f"{path}.tmp", path)


def _report_of(error: BaseException) -> _Report:
    now = time.monotonic()
    if not isinstance(error, SystemExit):
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this file
        lines = traceback.format_exception(type(error), error, trace)
        return _Report(now, _failure_of(error), "\n\n" + "".join(lines))
    code = error.code
    if code is None or code == 0:
        return _Report(now)
    if isinstance(code, int) and code - 128 in STOP_SIGNALS:
        return _Report(now, stop_signal=code - 128)
    return _Report(now, FAILED, code if code and isinstance(code, str) else f"it called sys.exit({code!r})")


def _failure_of(error: BaseException) -> str:
    """Return LOST or TIMED_OUT if torch reports it, else FAILED."""
    message = "".join(traceback.format_exception_only(type(error), error))
    # Gloo's RuntimeErrors name a line of its source, except "Application timeout caused pair closure".
    is_gloos = type(error) is RuntimeError and ("gloo/" in message or "pair closure" in message)
    if isinstance(error, torch_dist.DistError) or is_gloos:
        lost = "connection (was likely )?(closed|reset)|broken pipe|ncclRemoteError"
        lost += "|NCCL operation failed"  # torch 2.15 gives no reason
        if re.search(lost, message, re.IGNORECASE):
            return LOST
        if re.search("tim(ed|e) ?out", message, re.IGNORECASE):
            return TIMED_OUT
    return TIMED_OUT if isinstance(error, TimeoutError) else FAILED


# ------------------------------------------------------------------------------------------ srun's, mpirun's variables

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
PLACES = (*TORCHRUN, *OPEN_MPI, *MPICH, *SRUN)
LAUNCHER_VARIABLES = (*PLACES, "MASTER_ADDR", "MASTER_PORT")


def translate_variables() -> None:
    """If mpirun or srun has started this process, write its rank into torchrun's variables, unless these are set.

    mpirun has precedence, because it runs inside SLURM jobs.  MASTER_ADDR and MASTER_PORT are kept if they are
    set.  Missing variables are not invented, because check_variables rejects an incomplete set.
    """
    env = os.environ
    if any(name in env for name in TORCHRUN):
        return
    host = run = ""  # mpirun doesn't tell where rank 0 is, and MPICH gives a run no name
    if any(name in env for name in OPEN_MPI):
        names, run = OPEN_MPI, env.get("PMIX_NAMESPACE", "")
    elif "MPI_LOCALRANKID" in env:  # srun --mpi=pmi2 sets PMI_RANK, but not this
        names = MPICH
    elif env.get("SLURM_STEP_NUM_TASKS", "1") != "1":  # 1: a batch script, or an interactive shell
        names, run = SRUN, f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
        nodes = env.get("SLURM_STEP_NODELIST", "")
        host = re.sub(r"\[(\w+)[^]]*]", r"\1", nodes).split(",")[0]  # of node[08-09,12],other: node08
    else:
        return
    env |= {ours: env[theirs] for ours, theirs in zip(TORCHRUN, names, strict=False) if theirs in env}
    if names is SRUN and env.get("SLURM_STEP_NUM_NODES") == "1":
        env["LOCAL_WORLD_SIZE"] = env["WORLD_SIZE"]
    if env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"):  # all processes are on this machine
        host = "127.0.0.1"
        if names is not SRUN and "MASTER_PORT" not in env:
            # PMIX_NAMESPACE, too, contains a process ID, which is unique only in its container.
            link = "/proc/self/ns/pid"
            run = f"{run or _mpirun()} {os.readlink(link) if os.path.lexists(link) else ''}"
    env["DIST_RUN"] = run  # the same for all ranks of a run, and different for other runs; "" if there is no such name
    if host:
        env.setdefault("MASTER_ADDR", host)
        env.setdefault("MASTER_PORT", str(20000 + zlib.crc32(run.encode()) % 10000))  # below the ephemeral ports


def _mpirun() -> int:
    """Return the process ID of the MPICH process that started this rank: the first ancestor without a rank."""
    pid = os.getppid()
    with contextlib.suppress(OSError):  # macOS has no /proc, and some processes can't be read
        while b"\0PMI_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def check_variables() -> None:
    """Raise ValueError, in one line, if torchrun's variables are incomplete or contradict each other."""
    read_grace()
    env = os.environ
    given = {name: env[name] for name in TORCHRUN if name in env}
    if not given:
        return
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_rank, local_size = int(given.get("LOCAL_RANK", 0)), int(given.get("LOCAL_WORLD_SIZE", world_size))
        is_right = 0 <= rank < world_size and 0 <= local_rank < local_size <= world_size
    except (KeyError, ValueError):
        is_right = False
    if not is_right:
        said = " ".join(f"{name}={text}" for name, text in given.items())
        advice = "set RANK and WORLD_SIZE to this process's rank and the world size, or"
        if env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            advice = "on SLURM, leave them to srun:"
        raise ValueError(f"{said}: {advice} unset {' '.join(given)}")
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if world_size > 1 and not (address and port.isdecimal() and 0 < int(port) < 65536):
        where = f"MASTER_ADDR={address} and MASTER_PORT={port} must be rank 0's address and port"
        raise ValueError(f"{where}: set them (mpirun over several machines: -x MASTER_ADDR=HOST -x MASTER_PORT=29500)")


# -------------------------------------------------------------------------------------- roll-call: who is missing?

REPORT_MISSING_AFTER = 10  # seconds; then a line on stderr names the missing ranks
_own_address = _address_of_rank_0 = ""  # on the network between this process and rank 0
_drawn = os.urandom(8).hex()  # distinguishes this process from those of other machines


def meet(rank: int, world_size: int, limit: timedelta) -> torch_dist.Store:
    """Return the store in which the ranks of a new group leave their addresses, when all ranks have joined."""
    global _passes
    _passes = 0
    table = _open_store(rank, world_size, limit)  # for the whole run; each of its groups has its own part
    count = f"groups of rank {rank}"
    store = torch_dist.PrefixStore(f"group {table.add(count, 0)}", table)
    _wait_for_all_ranks(store, rank, world_size, limit)
    table.set(_name_of_process(), "has joined")
    table.add(count, 1)  # only when all ranks have joined, so a rank that tries again uses the same part
    return store


def _open_store(rank: int, world_size: int, limit: timedelta) -> torch_dist.Store:
    """Connect to the store of this run.  Raise RuntimeError, in one line, if another process already has this rank."""
    global _own_address, _address_of_rank_0
    env = os.environ
    if any(name in env for name in ("TORCHELASTIC_RUN_ID", OPEN_MPI[0], MPICH[2])):
        # If torchrun or mpirun is killed, Linux kills this process, too.
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    advice = f"set MASTER_PORT to a free port other than {port}, the same on all ranks of a run"
    inherited = " ".join(f"-u {name}" for name in PLACES if name in env)
    advice += f". If a rank started this program, it inherited that rank's variables: type env {inherited} python ..."
    # Two runs that use the same port have different names, and torch 2.4's torchrun has one store for all attempts.
    names = [env.get(name, "") for name in ("DIST_RUN", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]

    def connect(**options: Any) -> torch_dist.Store:
        options |= {"timeout": limit, "multi_tenant": True, "wait_for_workers": False}
        store = torch_dist.TCPStore(address, port, world_size, **options)
        return torch_dist.PrefixStore(f"run {' '.join(names)} of {world_size}", store)

    if rank == 0 and not _is_served_for_us():
        store = _serve(connect, address, port, advice)
    else:
        store = _find(connect, address, port, rank, limit)
    with socket.create_connection((address, port), timeout=60) as connection:
        _own_address, _address_of_rank_0 = connection.getsockname()[0], connection.getpeername()[0]
    holder = store.compare_set(f"process with rank {rank}", "", _name_of_process())
    if holder.decode() != _name_of_process():
        raise RuntimeError(f"rank {rank} of {world_size} has already joined. If that is a different run, {advice}")
    return store


def _serve(connect: Callable, address: str, port: int, advice: str) -> torch_dist.Store:
    """Serve the store of a new group, as rank 0, and return it."""
    options: dict = {}
    try:
        if _is_loopback(address):  # otherwise, torch would listen on all networks
            server = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
            options = {"master_listen_fd": server.detach(), "use_libuv": False}
        return connect(is_master=True, **options)
    except (OSError, RuntimeError) as error:
        if isinstance(error, torch_dist.DistNetworkError) and "EADDRINUSE" not in str(error):
            raise RuntimeError(f"rank 0 is not at MASTER_ADDR={address}: set it to this machine's address") from None
        if getattr(error, "errno", 0) != errno.EADDRINUSE and "EADDRINUSE" not in str(error):
            raise
        raise RuntimeError(f"rank 0: port {port} is in use. If another run uses it, {advice}") from None


def _find(connect: Callable, address: str, port: int, rank: int, limit: timedelta) -> torch_dist.Store:
    """Wait for the store that rank 0, torchrun or `launch` serves, and return it."""
    found = []

    def missing() -> str:
        try:
            socket.create_connection((address, port), timeout=5).close()  # a TCPStore that is too early prints warnings
            store = connect()
            # A rank's store is for one group, so if this process has joined a group in it, rank 0 is about to end it.
            if _is_served_for_us() or not store.check([_name_of_process()]):
                found.append(store)
        except (OSError, torch_dist.DistError):
            pass
        return "" if found else f"rank 0 at {address}:{port}"

    _wait_for(missing, rank, limit)
    return found[0]


def _is_served_for_us() -> bool:
    """Return whether torchrun or `launch` serves the store, instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _name_of_process() -> str:
    return f"process {os.getpid()} {_drawn}"


def _wait_for_all_ranks(store: torch_dist.Store, rank: int, world_size: int, limit: timedelta) -> None:
    """Wait until all ranks have joined.  The TimeoutError names the missing ranks, which torch's own does not."""
    keys = [f"rank {number}" for number in range(world_size)]
    if not _is_loopback(_own_address):
        store.set("address of rank 0", _address_of_rank_0)
    store.set(keys[rank], "here")

    def missing() -> str:
        if store.check(keys):
            return ""
        return f"{', '.join(key for key in keys if not store.check([key]))} of {world_size}"

    _wait_for(missing, rank, limit)
    _choose_interface(store)


def _choose_interface(store: torch_dist.Store) -> None:
    """Let Gloo use the network on which the ranks reach rank 0, if the user has not chosen another.

    By itself, Gloo uses the address of the machine's name, which Debian sets to 127.0.1.1.
    """
    address = _own_address
    if _is_loopback(address) and store.check(["address of rank 0"]):  # some ranks are on another machine
        address = store.get("address of rank 0").decode()
    if _is_loopback(address):
        interface = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": not others that begin with this name
    else:
        interface = _interface_with(address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1")


def _interface_with(address: str) -> str:
    """Return the network interface that has this address, as Linux names it, or "" if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _wait_for(missing: Callable[[], str], rank: int, limit: timedelta) -> None:
    """Wait until `missing` returns "".  After 10 s, print the ranks that it names; at the limit, raise TimeoutError.

    store.wait is not used, because torch prints warnings when it times out.
    """
    started = time.monotonic()
    pause = 0.001
    is_reported = False
    while ranks := missing():
        waited = time.monotonic() - started
        if waited > limit.total_seconds():
            raise TimeoutError(f"init_process_group: {ranks} did not join within {limit.total_seconds():.0f} s")
        if waited > REPORT_MISSING_AFTER and not is_reported:
            is_reported = True
            if rank == 0 or ranks.startswith("rank 0"):  # rank 0 prints the line, or all others if rank 0 is missing
                print(f"distributed: waiting for {ranks}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


translate_variables()  # when distributed.py imports this file, so that it finds torchrun's variables
