"""A small torchrun inside the program: it starts one process per rank, watches them, and says which failed first.

    launcher.run(function, args, nproc=2)    # function(*args) in two new processes; returns rank 0's result

Each rank finds its place in torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT), so torch's own init_process_group works in it, too.  distributed.py uses this file in `launch`: copy it
beside that one to start programs with `python train.py`; torchrun, srun and mpirun don't need it.

The file reads in the order of a run: start, watch, explain, end; at last what each rank does.
"""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import numpy
import torch

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CONNECTION_LOST = "connection (was likely )?(closed|reset)|broken pipe|ncclRemoteError"  # in torch's own errors
TIMED_OUT = "tim(ed|e) ?out"
STOP_GRACE = 30  # seconds to save, for ranks that handle SIGTERM, if the run is told to stop
FAILURE_GRACE = 3  # the same, after another rank has failed
POLL = 0.02  # seconds between two looks at the ranks
_FRAME = re.compile(r'File "(.+)", line (\d+),? in (.+)')  # of a traceback, or of faulthandler's


class _Report(NamedTuple):
    """What is known of a rank's end."""

    when: float
    error: str = ""
    died: bool = False  # killed, or exited without a report: then `error` says how
    lost: bool = False  # its connection: that is a consequence
    timed_out: bool = False
    stop_signal: int = 0  # it ended itself with 128 + this signal, as programs do that have saved
    result: Any = None


class _Standing(NamedTuple):
    """Where a rank stands."""

    place: str = ""  # file, line, function, and what that has called
    call: str = ""  # the collective, or another function


def run(function: Callable, args: tuple = (), nproc: int = 2, grace: float | None = None) -> Any:
    """function(*args) in nproc new processes; returns what it returned on rank 0.

    The first rank that fails ends the run: SystemExit with its error, so the exit code is 1; in a notebook or a shell
    RuntimeError.  Ctrl-C and SIGTERM end with 130 and 143 (in a shell Ctrl-C is KeyboardInterrupt).  Ctrl-C, and
    `kill -USR1` of this process, print where each rank stands.
    grace: seconds for ranks that handle SIGTERM to save (30 if the run is told to stop, 3 after a failure).
    """
    ranks = _Ranks(nproc, grace)
    with ranks.signals_handled():
        try:
            method, threads, job = _how_to_start((function, args), nproc)
            ranks.start(method, threads, job)
            error = ranks.watch()
        finally:
            ranks.end()
    if error:
        raise RuntimeError(error) if _in_shell() else SystemExit(error)
    if ranks.stop_signal:
        is_ctrl_c_in_shell = ranks.stop_signal == signal.SIGINT and _in_shell()
        raise KeyboardInterrupt if is_ctrl_c_in_shell else SystemExit(128 + ranks.stop_signal)
    return ranks.reports[0].result


def _in_shell() -> bool:
    """Whether this is a notebook or an interactive shell, which SystemExit would end."""
    return hasattr(sys, "ps1")


# ------------------------------------------------------------------------------------------------------------- start


def fork_is_safe() -> bool:
    """Whether this process can be forked: a child has its parent's locks, but none of its threads.

    So nothing may be forked while there are other threads, Python's or torch's OpenMP pool: a child that uses the pool
    waits for ever.
    """
    return _can_fork() and threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1


def _can_fork() -> bool:
    """Whether the system and CUDA allow it.  Forks a test child: only there does CUDA say so.

    OpenBLAS, which numpy brings, ends its threads at this first fork, so `fork_is_safe` doesn't count them.
    """
    if sys.platform != "linux":  # macOS's own libraries break after a fork (bugs.python.org/issue33725)
        return False
    child = _fork(lambda: torch.cuda.device_count() > 0 and torch.cuda._is_in_bad_fork())
    return os.waitpid(child, 0)[1] == 0


def _fork(function: Callable) -> int:
    """A child process that does just this, and ends with its result as exit code; returns its process ID."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(function() or 0)
        finally:
            os._exit(code)
    return child


def _how_to_start(job: tuple, nproc: int) -> tuple[str, int | None, Any]:
    """ "fork" or "spawn", torch's threads in each rank (None: its default), and the job as the ranks get it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores // nproc)
    if fork_is_safe():
        return "fork", threads, job
    has_file = os.path.exists(getattr(sys.modules["__main__"], "__file__", ""))
    is_shell = _in_shell() or not has_file
    try:
        pickled = pickle.dumps(job)  # multiprocessing's own pickle would send tensors as shared memory
        if not (is_shell and b"__main__" in pickled):
            return "spawn", threads, pickled
        problem = "a new process can't import what a shell or notebook defines: move it to a file, or restart the shell"
    except Exception as error:  # of a lambda, a lock or a queue: each has an error of its own
        problem = (
            f"the function and its arguments can't be sent to a new process ({type(error).__name__}: {error}): define "
            "functions at the top level of a file, and make locks and queues inside them"
        )
    if is_shell and _can_fork():
        return "fork", 1, job  # with one thread torch doesn't use OpenMP's pool
    raise RuntimeError(problem)


class _Ranks:
    """The processes of one run, seen from the process that has started them."""

    def __init__(self, nproc: int, grace: float | None) -> None:
        self.nproc = nproc
        self.grace = grace
        self.processes: list[multiprocessing.Process] = []
        self.reports: dict[int, _Report] = {}
        self.ended: set[int] = set()
        self.stop_signal = 0  # the first signal that told the run to stop
        self.stop_now = False  # there was a second Ctrl-C: don't wait for the ranks to save
        self.stacks_wanted = False
        self.guard = 0  # its process ID
        self.store: Any = None
        self.folder = tempfile.mkdtemp(prefix="dist-")  # for the ranks' reports and stacks

    @contextlib.contextmanager
    def signals_handled(self) -> Iterator[None]:
        """Signals are noted here, and acted on in `watch`.  What is ignored stays ignored (SIGHUP under nohup)."""
        handlers = {}
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
        elif number in STOP_SIGNALS and not self.stop_signal:
            self.stop_signal = number
        elif number == signal.SIGINT:  # not a second SIGTERM: GNU timeout sends two at once
            self.stop_now = True

    def start(self, method: str, threads: int | None, job: Any) -> None:
        """Start the processes, then serve their store."""
        seed = torch.empty((), dtype=torch.int64).random_().item()  # as torch's DataLoader seeds its workers
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
        parent = os.getpid()
        self.guard = _fork(lambda: _guard(parent, self.folder))
        os.setpgid(self.guard, self.guard)  # here, too: its group must be there when the ranks join it
        if method == "spawn":
            resource_tracker.ensure_running()  # now, because it unblocks signals
        # Blocked until a rank is ready for them, so that none dies half-way into its start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGUSR1))
        try:
            for rank in range(self.nproc):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                arguments = (self.guard, environment | place, self.folder, seed + rank, threads, job)
                process = multiprocessing.get_context(method).Process(target=_be_rank, args=arguments)
                process.start()
                self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.store = torch.distributed.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
            use_libuv=False,  # libuv's of torch 2.4 and 2.5 doesn't listen on a given socket (pytorch#150215)
        )

    # -------------------------------------------------------------------------------------------------------- watch

    def watch(self) -> str:
        """Wait until all have ended well, one has failed, or the run is told to stop; returns the error, or ""."""
        while not (self.stop_signal or self.failures() or len(self.ended) == self.nproc):
            self.wait_for_news()
            for report in self.reports.values():
                self.stop_signal = self.stop_signal or report.stop_signal  # the rank was told to stop, so the run was
        # What is seen first may be a consequence.  So wait a moment for its cause, and longer if all that is known is
        # that connections were lost.
        since = time.monotonic()
        while self.failures() and not self.stop_signal:
            patience = 2 if self.reports[self.failures()[0]].lost else 0.2
            remaining = since + patience - time.monotonic()
            if remaining <= 0:
                return self.explain()
            self.wait_for_news(remaining)
        if self.stop_signal == signal.SIGINT and not any(report.stop_signal for report in self.reports.values()):
            print(f"\n{_table(self.ask_ranks())}", file=sys.stderr, flush=True)  # a line below the terminal's ^C
        return ""

    def wait_for_news(self, seconds: float = POLL) -> None:
        """Sleep for a moment, for so many seconds at most; then look what the ranks and signals have brought."""
        time.sleep(min(seconds, POLL))
        if self.stacks_wanted:
            self.stacks_wanted = False
            print(_table(self.ask_ranks()), file=sys.stderr, flush=True)
        for rank, process in enumerate(self.processes):
            self.look_at(rank, process)

    def look_at(self, rank: int, process: multiprocessing.Process) -> None:
        """Note whether this rank has ended, and its report: its own, or one that says how it died."""
        code = process.exitcode  # first: a rank that has ended has written its report, or never will
        if code is not None:
            self.ended.add(rank)
        if rank not in self.reports and (written := self.read(f"report{rank}")):
            try:
                self.reports[rank] = pickle.loads(written)
            except Exception as error:  # of a class that can't be made here, for example
                self.reports[rank] = _Report(time.monotonic(), f"its result can't be read: {error}")
        report = self.reports.get(rank)
        if code is not None and report is None:
            self.reports[rank] = _Report(time.monotonic(), _how_it_ended(code), died=True)
        elif code and not report.error:
            self.reports[rank] = _Report(time.monotonic(), f"{_how_it_ended(code)} after its work", died=True)

    def read(self, name: str) -> bytes:
        """What a rank has written into this file; b"" if nothing."""
        path = f"{self.folder}/{name}"
        if not os.path.exists(path):
            return b""
        with open(path, "rb") as file:
            return file.read()

    def failures(self) -> list[int]:
        """The ranks with an error, in the order in which they failed.

        A rank that reports an error waits to be killed, so it takes no connection from the others.  One that died
        without a report does: it comes first.  Those that have only lost a connection come last.
        """

        def order(rank: int) -> tuple:
            report = self.reports[rank]
            return report.lost, not report.died, report.when

        return sorted((rank for rank, report in self.reports.items() if report.error), key=order)

    # ------------------------------------------------------------------------------------------------------ explain

    def explain(self) -> str:
        """The error of the rank that failed first, and what helps to understand it."""
        rank = self.failures()[0]
        report = self.reports[rank]
        text = f"rank {rank} of {self.nproc} failed first: {report.error.rstrip()}"
        finished = ", ".join(f"rank {r}" for r, report in sorted(self.reports.items()) if not report.error)
        if report.lost and finished:
            text += f"\nIt lost its connection after {finished} had finished. All ranks must call the same collectives."
        elif finished:
            text += f"\n({finished} had finished)"
        if report.lost or report.timed_out or report.died:
            standings = self.ask_ranks()
            text += f"\n{_table(standings)}"
            if report.timed_out:
                text += f"\n{_in_words(standings)}"
        return text

    def ask_ranks(self) -> list[_Standing]:
        """Where each rank stands."""
        asked = set(range(len(self.processes))) - self.ended
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)  # faulthandler answers inside a collective, too
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not self.stop_now:
            if all(b"_bootstrap" in self.read(f"stack{rank}") for rank in asked):  # multiprocessing's frame comes last
                break
            time.sleep(0.01)
        standings = []
        for rank, process in enumerate(self.processes):
            report = self.reports.get(rank)
            frames = _FRAME.findall(self.read(f"stack{rank}").decode())
            if report and report.error and not report.died:
                frames = _FRAME.findall(report.error)[::-1]  # of a traceback; there the innermost is last
            standing = _where(frames)
            if not standing.place:
                if rank not in asked:
                    state = "has ended"
                elif report:
                    state = "has finished, but still runs: a thread of its own?"
                else:
                    state = f"no answer (starting, or stopped: then kill -CONT {process.pid})"
                standing = _Standing(state)
            standings.append(standing)
            open(f"{self.folder}/stack{rank}", "w").close()  # empty, for the next answer
        return standings

    # ---------------------------------------------------------------------------------------------------------- end

    def end(self) -> None:
        """Let the ranks save, then kill them all; nothing of the run is left."""
        try:
            self.let_ranks_save()
        finally:
            if self.guard:
                os.killpg(self.guard, signal.SIGKILL)
                os.waitpid(self.guard, 0)
            for process in self.processes:
                process.kill()  # one that has not joined the group yet
                process.join()
            self.store = None
            shutil.rmtree(self.folder, ignore_errors=True)

    def let_ranks_save(self) -> None:
        """SIGTERM to those that handle it.  The others end by SIGKILL, and their data loader workers with them."""
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
            if report and report.error and not report.lost:
                text = f"rank {rank} of {self.nproc} failed while it was ending: {report.error}"
                print(text, file=sys.stderr, flush=True)


def _handles_sigterm(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = int(re.search(r"SigCgt:\s*(\w+)", status.read())[1], 16)  # a bit for each signal
    except OSError:  # macOS doesn't tell: perhaps
        return True
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}, by os._exit or an error above"
    if -code == signal.SIGKILL:
        return "ended by SIGKILL (by hand, or by the kernel because memory ran out: see dmesg)"
    names = {number.value: number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"


def _where(frames: list[tuple[str, str, str]]) -> _Standing:
    """The innermost frame outside torch, Python and these helpers, of frames that begin with the innermost."""
    helpers = [os.path.join(os.path.dirname(__file__), name) for name in ("distributed.py", "launcher.py")]
    libraries = (*helpers, os.path.dirname(torch.__file__), sysconfig.get_path("stdlib"))
    called = ""
    for path, line, function in frames:
        if function == "_bootstrap":  # what follows in a forked process is its parent's
            break
        if not path.startswith(libraries):
            return _Standing(f"{path}:{line}, {function}" + (f", in {called}" if called else ""), called or function)
        if function != "wrapper":  # torch's, around each of its collectives
            called = function
    return _Standing()


def _table(standings: list[_Standing]) -> str:
    lines = (f"\n  rank {rank}: {standing.place}" for rank, standing in enumerate(standings))
    return "where each rank stands:" + "".join(lines)


def _in_words(standings: list[_Standing]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, standing in enumerate(standings):
        ranks.setdefault(standing.call or "no call that is known", []).append(f"rank {rank}")
    parts = [f"{' and '.join(names)} {'stand' if names[1:] else 'stands'} in {call}" for call, names in ranks.items()]
    return f"{', '.join(parts)}. All ranks must call the same collectives, in the same order."


# ------------------------------------------------------------------------------------------ in the guard, in each rank


def _guard(parent: int, folder: str) -> None:
    """The leader of the process group that all ranks join, and so what they start: data loader workers, forkservers.

    If the launching process dies, even by SIGKILL, the group is killed and the run's folder removed.
    """
    os.setpgid(0, 0)  # or a parent that dies now would make it kill the group of the parent
    while os.getppid() == parent:
        time.sleep(0.5)
    group = os.getpgid(0)
    if os.fork() == 0:
        os.setpgid(0, 0)  # out of the group, to be there when all of it has gone
        os.killpg(group, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _be_rank(guard: int, environment: dict, folder: str, seed: int, threads: int | None, job: Any) -> None:
    """Do the job, and report."""
    # Forked inside an except block, this process would go on handling its parent's exception.
    ctypes.pythonapi.PyErr_SetExcInfo(None, None, None)
    try:
        os.setpgid(0, guard)  # so Ctrl-C in a terminal reaches the launching process alone
    except OSError:  # the launching process was killed, and so the guard has ended
        os._exit(1)
    os.environ |= environment
    rank = int(environment["RANK"])
    multiprocessing.current_process()._config["tempdir"] = folder  # for sockets that killed workers can't remove
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    stack_file = open(f"{folder}/stack{rank}", "a")  # noqa: SIM115  faulthandler keeps it open
    faulthandler.enable(file=stack_file, all_threads=False)  # of a crash
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGUSR1))
    if threads:
        torch.set_num_threads(threads)
    try:
        function, args = pickle.loads(job) if isinstance(job, bytes) else job
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)  # it takes no larger number
        result = function(*args)
        sys.stdout.flush()  # before the report: whoever has reported may be killed
        report = _Report(time.monotonic(), result=result if rank == 0 else None)
        _write_report(report, f"{folder}/report{rank}")
    except BaseException as error:
        sys.stdout.flush()
        report = _report_of(error)
        _write_report(report, f"{folder}/report{rank}")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a data loader's worker dies
        while report.error or report.stop_signal:  # if it ended now, the others would report a lost connection
            signal.pause()


def _write_report(report: _Report, path: str) -> None:
    with open(f"{path}.tmp", "wb") as file:
        pickle.dump(report, file)
    os.rename(f"{path}.tmp", path)  # the launching process sees no report, or all of it


def _report_of(error: BaseException) -> _Report:
    now = time.monotonic()
    if not isinstance(error, SystemExit):
        lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)  # without this file
        message = "".join(traceback.format_exception_only(type(error), error))
        # NCCL's errors and the store's have a class; gloo's are a RuntimeError that names the line of its source.
        is_torchs = isinstance(error, torch.distributed.DistError) or (
            type(error) is RuntimeError and "gloo/" in message
        )
        lost = is_torchs and bool(re.search(CONNECTION_LOST, message, re.IGNORECASE))
        timed_out = is_torchs and bool(re.search(TIMED_OUT, message, re.IGNORECASE)) or isinstance(error, TimeoutError)
        return _Report(now, "\n\n" + "".join(lines), lost=lost, timed_out=timed_out)
    code = error.code
    if code is None or code == 0:
        return _Report(now)
    if isinstance(code, int) and code - 128 in STOP_SIGNALS:
        return _Report(now, stop_signal=code - 128)
    return _Report(now, code if code and isinstance(code, str) else f"it called sys.exit({code!r})")
