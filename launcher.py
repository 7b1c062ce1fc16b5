"""Starting processes, watching them, explaining how they failed, and ending them.  Never touches a tensor.

`launcher.run(work, ("ada",), nproc=2)` calls work(local_rank, world_size, "ada") in two processes.  Each finds its
place in torchrun's variables (rendezvous.py).  The file reads in the order in which a run lives: plan, run, start,
watch, explain, end.  Part of distributed.py; copy it together with that file.
"""

import argparse
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import resource_tracker, util
from typing import IO, Any, NamedTuple

import torch

if __package__:
    from . import rendezvous
else:
    import rendezvous

STOP_GRACE = 30  # seconds for a checkpoint to be saved, when the run was told to stop; DIST_GRACE overrides it
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS = (*_STOPS, signal.SIGUSR1, signal.SIGTSTP)
_UNKNOWN = 256  # in the place of an exit code that nobody knows
_ENDS = {-number: f"by signal {number}" for number in range(1, signal.NSIG)}  # exit code: how a process has ended
_ENDS |= {-number: f"by {number.name}" for number in signal.Signals}
_ENDS[-signal.SIGKILL] += " (by hand, or by the kernel for want of memory: see dmesg)"
_ENDS[_UNKNOWN] = "and nobody knows how"
_LOST = re.compile("onnection (closed|reset) by peer")  # what others say of a rank that failed: it isn't the cause
_FRAME = re.compile(r'File "(.+)", line (\d+),? in (.+)')  # of a traceback, or of faulthandler's dump

# --------------------------------------------------------------------------------------------------------------- plan


def plan(nproc: int | None = None, backend: str | None = None, on_cpu: int = 1) -> int:
    """How many processes `run` would start here.  ValueError, in one line, if they couldn't run.

    By default one per visible GPU, or `on_cpu` where there is none; the environment's NPROC overrides the default.
    """
    gpus = torch.cuda.device_count()
    if nproc is None:
        nproc = os.environ.get("NPROC") or gpus or on_cpu
    if not str(nproc).isdigit() or int(nproc) < 1:
        raise ValueError(f"nproc (or NPROC) is {nproc}: start at least 1 process")
    if backend == "nccl" and not gpus:
        raise ValueError("backend nccl needs a CUDA GPU, and none is visible: use gloo")
    if gpus and int(nproc) > gpus and backend != "gloo":
        raise ValueError(f"{nproc} processes, but {gpus} visible GPU(s): start {gpus}, or share them with backend gloo")
    return int(nproc)


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """distributed.py's `parse_args`."""
    parser.add_argument("--nproc", type=int, help="processes on this machine (default: one per GPU; without a GPU, 2)")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="(default: nccl for GPUs, else gloo)")
    args = parser.parse_args()
    try:
        rendezvous.check_limits()
        world = rendezvous.world()
        processes = world.world_size
        if world.launcher and args.nproc is not None:
            raise ValueError(f"{world.launcher} has started {processes} process(es): leave out --nproc")
        if world.launcher:
            plan(1, args.backend)  # each may see a GPU of its own: whether two share one is for the roll-call to see
            args.nproc = world.local_world_size
        else:
            args.nproc = processes = plan(args.nproc, args.backend, on_cpu=2)
        batch_size = getattr(args, "batch_size", None)
        if isinstance(batch_size, int) and batch_size < processes:
            raise ValueError(f"--batch-size {batch_size} is too small for {processes} processes: one example each")
    except ValueError as problem:
        parser.error(str(problem))
    return args


# ---------------------------------------------------------------------------------------------------------------- run


def run(function: Callable, args: tuple = (), nproc: int | None = None, finish: Callable | None = None) -> Any:
    """function(local_rank, world_size, *args) in nproc processes; returns what it returned on rank 0.

    See distributed.py's `launch`.  `finish` is called in each process after the function.
    """
    world = rendezvous.world()
    rendezvous.check_limits()
    if world.launcher == "launch":
        raise RuntimeError("launch was called in a process that launch has started: call it once, in the main program")
    if not world.launcher:
        nproc = plan(nproc, "gloo" if nproc else None)  # who asks for more may share GPUs
        if nproc > 1:
            return _run_all(function, args, nproc, finish)
    given = signal.getsignal(signal.SIGTERM)
    try:
        return _run_here(function, args, finish)
    finally:  # the caller goes on, without checkpoint.py's handler
        if not world.launcher and given is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, given)


def _run_here(function: Callable, args: tuple, finish: Callable | None) -> Any:
    """This process is one of several that `run` or a launcher has started, or the only one."""
    world = rendezvous.world()
    if "TORCHELASTIC_RUN_ID" in os.environ or "mpirun" in world.launcher:  # killed, they leave their processes behind
        threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    if world.launcher not in ("", "torchrun"):  # for a function that calls torch's own init_process_group
        address, port = rendezvous.meeting_point(world)
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def call() -> Any:
        try:
            return function(world.local_rank, world.world_size, *args)
        except KeyboardInterrupt:
            raise _exit(128 + signal.SIGINT) from None
        except RuntimeError as problem:
            several_machines = world.local_world_size < world.world_size
            if several_machines and re.search("gloo|NCCL|onnection|imed out", str(problem)):
                text = rendezvous.lost(world)
                if text:
                    raise RuntimeError(text) from problem
            raise

    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun's own report then shows this error
        from torch.distributed.elastic.multiprocessing.errors import record

        call = record(call)
    try:
        result = call()
    finally:
        if finish:
            finish()
    return result if world.rank == 0 else None


def _die_with(parent: int) -> None:
    """End this process and its group once `parent` is gone, even if it was killed and could tell no one."""
    while os.getppid() == parent:
        time.sleep(0.5)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _exit(code: int | str) -> BaseException:
    """SystemExit; another exception in a notebook, IPython or Python's own shell, which SystemExit would end."""
    if hasattr(sys, "ps1") and code == 128 + signal.SIGINT:
        return KeyboardInterrupt()
    if hasattr(sys, "ps1") and isinstance(code, str):
        return RuntimeError(code)
    return SystemExit(code)


def _run_all(function: Callable, args: tuple, nproc: int, finish: Callable | None) -> Any:
    """Start nproc processes, watch them, end them all whatever happens; returns rank 0's result."""
    method, threads = _start_method(function, nproc)
    job = functools.partial(_run_here, function, args, finish)
    run = _Run(nproc)
    with contextlib.ExitStack() as undo:
        run.handle_signals(undo)
        run.start_guard()
        undo.callback(run.terminate)
        run.start(method, job, threads)
        result = run.watch()
    for number, _ in run.stops[:1]:  # too late for us, so it is for the caller
        os.kill(os.getpid(), number)
    return result


# -------------------------------------------------------------------------------------------------------------- start


def _cuda_was_used() -> bool:
    """Whether CUDA's driver was loaded (torch.cuda.is_available does it): children can't use CUDA.  Linux only."""
    with open("/proc/self/maps") as maps:
        return torch.cuda.is_initialized() or "/libcuda.so" in maps.read()


def fork_is_safe() -> bool:
    """Whether this process can be forked.  A child has its parent's locks, but none of its threads.

    So it must not follow CUDA (torch says so, and refuses), other Python threads, or native ones, such as torch's
    OpenMP pool, whose next use in the child never returns.  macOS's own libraries break after a fork
    (bugs.python.org/issue33725).
    """
    if sys.platform != "linux" or torch.version.hip or _cuda_was_used() or threading.active_count() > 1:
        return False
    if len(os.listdir("/proc/self/task")) > 1:
        # OpenBLAS, which numpy brings, ends its threads before every fork and starts them again when it needs them.
        # So the threads that are left after a first fork belong to somebody else.
        first = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of these very threads
            first.start()
        first.join()
    return len(os.listdir("/proc/self/task")) == 1


def _start_method(function: Callable, nproc: int) -> tuple[str, int | None]:
    """ "fork" or "spawn", and the number of threads for each process (None: as OMP_NUM_THREADS says)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores // nproc)
    if fork_is_safe():
        return "fork", threads
    while isinstance(function, functools.partial):
        function = function.func
    main = sys.modules["__main__"]  # a new process imports it, where it has a file ("<stdin>" is none)
    main_file = getattr(main, "__file__", None)
    a_module = getattr(main, "__spec__", None)  # python -m, a zip file
    if os.path.exists(main_file or "") or a_module or (not main_file and function.__module__ != "__main__"):
        return "spawn", threads
    if sys.platform != "linux" or _cuda_was_used():
        name = getattr(function, "__name__", function)
        raise RuntimeError(
            f"a new process can't find {name}, defined in a notebook or shell, and this one can't be "
            "forked (CUDA is in use, or this isn't Linux): move it to a file, or restart and call launch first"
        )
    return "fork", 1  # a process with one thread never uses the pool


# Its input ends when nobody holds the other end of the pipe any more: when this process was killed.
_GUARD = """
trap '' HUP INT TERM
PATH=/usr/bin:/bin:$PATH
while read -r pid; do
    case $pid in ''|0|1|*[!0-9]*) ;; *) pids="$pids $pid" ;; esac  # what else is written there by mistake is no pid
done
for pid in $pids; do kill -9 -$pid $pid; done
rm -rf "$0" || { sleep 0.1; rm -rf "$0"; }  # a process that is dying may still write there
"""


class _Report(NamedTuple):
    """What a process says of its own end."""

    when: float = 0.0
    error: str = ""
    stopped_by: int = 0  # the signal, if it ended itself with 128 + its number
    result: Any = None


class _Run:
    """The processes of one `run`: started, watched, explained, ended."""

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self.processes: list[multiprocessing.Process] = []
        self.reports: dict[int, _Report] = {}
        self.stops: list[tuple[int, float]] = []  # signals that end the run, and when they came
        self.folder = os.path.join(tempfile.gettempdir(), f"dist-{os.urandom(8).hex()}")

    def handle_signals(self, undo: contextlib.ExitStack) -> None:
        """What this process does when it gets a signal, until `undo` puts back the caller's handlers."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread handle signals
        actions: dict = dict.fromkeys(_STOPS, self.note_stop)
        actions |= {signal.SIGUSR1: self.show_stacks, signal.SIGTSTP: self.suspend}
        actions[signal.SIGCHLD] = signal.SIG_DFL  # ignored, it would make the kernel forget how a child has ended
        for number, action in actions.items():
            given = signal.getsignal(number)
            # nohup's SIGHUP stays ignored.  SIGINT doesn't: a shell's `script &` ignores it unasked.
            honoured = given == signal.SIG_IGN and number in (signal.SIGHUP, signal.SIGTSTP)
            # Python can't put back what it doesn't know, such as faulthandler's handlers.
            foreign = given is None or (given == signal.SIG_DFL and _catches(os.getpid(), number))
            if not (honoured or foreign):
                undo.callback(signal.signal, number, signal.signal(number, action))

    def start_guard(self) -> None:
        """Should this process be killed, the guard kills the others, with all that they have started."""
        command = ["/bin/sh", "-c", _GUARD, self.folder]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True, "cwd": "/"}
        self.guard = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, **quiet)

    def start(self, method: str, job: Callable, threads: int | None) -> None:
        os.mkdir(self.folder, 0o700)  # now that the guard knows it
        with socket.create_server(("127.0.0.1", 0)) as free:  # for a function that calls torch's own init
            port = free.getsockname()[1]
        environment = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.nproc))
        environment |= {"DIST_STORE": f"{self.folder}/store", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), rendezvous.LOOPBACK)
        guard = self.guard.stdin if method == "fork" else None  # spawn doesn't hand it down
        # The processes inherit the block: none dies half-way into its start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            if method == "spawn":
                resource_tracker.ensure_running()  # so that it has the block, too: Ctrl-Z doesn't stop it
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # once more, as Python has unblocked some
            for rank in range(self.nproc):
                environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
                arguments = (job, threads, dict(environment), guard)
                process = multiprocessing.get_context(method).Process(target=_work, args=arguments)
                process.start()
                self.processes.append(process)
                if not guard:  # a forked process tells the guard itself: then none is without it for a moment
                    self.guard.stdin.write(f"{process.pid}\n".encode())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # ------------------------------------------------------------------------------------------------ watch, explain

    def note_stop(self, number: int, frame: Any = None) -> None:
        self.stops.append((number, time.monotonic()))

    def suspend(self, number: int, frame: Any) -> None:
        """Ctrl-Z: it reaches this process alone, as the others have groups of their own."""
        self.send(signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # this process stops here, until `fg`
        signal.signal(number, self.suspend)
        self.send(signal.SIGCONT)

    def send(self, number: int) -> None:
        """Send a signal to all processes, with all that they have started."""
        for process in self.processes:
            _kill(-process.pid, number)
            _kill(process.pid, number)  # it may not have its group yet

    def watch(self) -> Any:
        """Wait for all processes; returns rank 0's result, or raises what ended the run."""
        while True:
            time.sleep(0.01)
            ended = self.look()
            if self.failed():
                time.sleep(0.2)  # its peers can notice a death before this process does; a stop may come, too
                self.look()
            if self.stops:
                number = self.stops[0][0]
                _say(f"launch: {signal.Signals(number).name}: ending {self.nproc} processes")
                raise _exit(128 + number)
            if self.failed():
                raise self.failure()
            if ended:
                return self.reports[0].result

    def look(self) -> bool:
        """Read the reports, and write one for each process that died without: returns whether all have ended."""
        codes = [_exit_code(process) for process in self.processes]  # first: who is gone has said what it had to
        for rank, code in enumerate(codes):
            report = self.read_report(rank)
            if code is None or (report and (report.error or code in (0, _UNKNOWN))):
                continue
            how = _ENDS.get(code, f"by os._exit({code})")
            # A process that reports an error waits to be ended: whoever died didn't lose another, and is the first.
            self.reports[rank] = _Report(0.0, f"ended {how} after its work" if report else f"ended {how}")
            _kill(-self.processes[rank].pid, signal.SIGKILL)  # its data loader workers, likewise
        return None not in codes

    def read_report(self, rank: int) -> _Report | None:
        """It is a file, as a pipe could be left half full, and held open, by a process that was killed."""
        path = f"{self.folder}/report{rank}"
        if rank not in self.reports and os.path.exists(path):
            try:
                with open(path, "rb") as file:
                    self.reports[rank] = pickle.load(file)
            except Exception as problem:  # of a class that can't be made here, say
                self.reports[rank] = _Report(time.monotonic(), f"its result can't be read: {problem}")
            if number := self.reports[rank].stopped_by:
                self.note_stop(number)  # it was told to stop, so the run was
        return self.reports.get(rank)

    def failed(self) -> list[int]:
        """The ranks with an error, the first one first; who only lost the connection to another comes later."""
        errors = {rank: report for rank, report in self.reports.items() if report.error}
        return sorted(errors, key=lambda rank: (bool(_LOST.search(errors[rank].error)), errors[rank].when, rank))

    def failure(self) -> BaseException:
        """What `launch` raises, with the error of the first process that failed."""
        rank = self.failed()[0]
        error = self.reports[rank].error.rstrip()
        text = f"rank {rank} of {self.nproc} failed first: {error}"
        done = ", ".join(f"rank {r}" for r, report in sorted(self.reports.items()) if not report.error)
        if done and not error.endswith("after its work"):
            text += f"\n({done} had finished)"
        if _LOST.search(error) or re.search("tim(ed|e) ?out|SIG(ABRT|BUS|FPE|ILL|SEGV)", error, re.IGNORECASE):
            text += f"\n{self.stack_table()}"
        return _exit(text)

    def show_stacks(self, number: int, frame: Any) -> None:
        with contextlib.suppress(OSError):  # the folder is gone
            _say(self.stack_table())

    def stack_table(self) -> str:
        """A line for each rank that says where it stands: its main thread's innermost frame outside torch and this."""
        for process in self.processes:
            _kill(process.pid, signal.SIGUSR1)  # faulthandler answers, from C: in a collective, too
        time.sleep(0.3)
        lines = ["where each rank stands:"]
        for rank, process in enumerate(self.processes):
            with open(f"{self.folder}/stack{rank}", "a+") as file:
                file.seek(0)
                dump = file.read()  # the answer, or what a crash has left
                file.truncate(0)  # an answer is shown once
            error = self.reports[rank].error if rank in self.reports else ""
            # In a traceback the innermost frame is the last.  In a dump it is the first; the main thread comes last.
            frames = _FRAME.findall(error)[::-1] or _FRAME.findall(dump.rpartition("hread 0x")[2])
            silent = f"no answer (if it was stopped: kill -CONT {process.pid})"
            state = silent if _exit_code(process) is None else "gone"
            lines.append(f"  rank {rank}: {_innermost(frames) or state}")
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------------------ end

    def terminate(self) -> None:
        """SIGTERM to whoever handles it, to save a checkpoint, say; then SIGKILL to all and to what they started."""
        try:
            self.let_them_save()
        finally:
            self.send(signal.SIGKILL)
            for process in self.processes:
                process.join()
            shutil.rmtree(self.folder, ignore_errors=True)
            with self.guard:  # which closes the pipe, and waits
                self.guard.kill()

    def let_them_save(self) -> None:
        unheard = set(range(self.nproc)) - set(self.reports)
        for process in filter(_handles_sigterm, self.processes):
            _kill(process.pid, signal.SIGTERM)
        grace = rendezvous.seconds("DIST_GRACE", STOP_GRACE if self.stops else None)
        for _ in range(round(grace / 0.01)):  # counted, not timed: the time to save stands still in a Ctrl-Z
            # Told again, by a person or a scheduler?  GNU timeout and a closing terminal signal twice at once.
            told_again = len(self.stops) > 1 and self.stops[-1][1] - self.stops[0][1] >= 1
            if told_again or not any(map(_handles_sigterm, self.processes)):
                break
            time.sleep(0.01)
        for rank in sorted(unheard):
            report = self.read_report(rank)
            if self.stops and report and report.error:  # it could not save, perhaps
                _say(f"rank {rank} of {self.nproc} failed while it was ending: {report.error.rstrip()}")


def _exit_code(process: multiprocessing.Process) -> int | None:
    """None while it runs, then as Process.exitcode has it.  It is left a zombie, so that no other gets its number."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.exitcode
    try:
        state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else has waited for it: the caller, who has SIGCHLD ignored, say
        return _UNKNOWN
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _kill(pid: int, number: int) -> None:
    """Send a signal; to the process group -pid, if pid is negative.  Whoever is gone needs none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for this signal.  Only Linux tells."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        mask = re.search(r"SigCgt:\s*(\w+)", status.read())[1]  # a bit for each signal that it handles
        return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def _handles_sigterm(process: multiprocessing.Process) -> bool:
    """Whether it runs, and SIGTERM would not simply end it."""
    if sys.platform != "linux":
        return _exit_code(process) is None
    return _catches(process.pid, signal.SIGTERM)


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


def _say(text: str) -> None:
    # There may be no stderr, or a signal has come in the middle of a print: no reason to fail.
    with contextlib.suppress(ValueError, AttributeError, RuntimeError):
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:  # the terminal is gone; what is left in the buffer would make Python end with 120
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115


# ------------------------------------------------------------------------------------------- in each started process


def _work(job: Callable, threads: int | None, environment: dict, guard: IO | None) -> None:
    """Take a group and a place of its own, do the job, and report."""
    os.setpgid(0, 0)  # so that Ctrl-C hits the parent alone, and what the process starts ends with it
    if guard:
        guard.write(f"{os.getpid()}\n".encode())
        guard.close()  # or the guard would wait for this process, too
    elif os.getppid() != multiprocessing.parent_process().pid:  # which was killed before it could tell the guard
        os._exit(1)
    os.environ |= environment
    folder, rank = os.path.dirname(environment["DIST_STORE"]), environment["RANK"]
    # Where multiprocessing keeps its sockets, those of DataLoader workers, too: killed, they can't remove them.
    multiprocessing.current_process()._config["tempdir"] = folder
    path = f"{folder}/report{rank}"
    _handle_signals(f"{folder}/stack{rank}")
    if threads:
        torch.set_num_threads(threads)
    try:
        report = _Report(result=job())
        util._flush_std_streams()  # what can't be printed is an error
        _write(report, path)
    except BaseException as problem:
        report = _report_of(problem)
        with contextlib.suppress(OSError):
            util._flush_std_streams()
        _write(report, path)  # if the disk is full, Python prints that and the problem
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to save: `terminate` needn't wait
    while report.error or report.stopped_by:  # until the parent ends all: or the others would fail for want of it
        time.sleep(1)


def _write(report: _Report, path: str) -> None:
    with open(f"{path}.tmp", "wb") as file:
        pickle.dump(report, file)
    os.rename(f"{path}.tmp", path)  # at once: nobody reads half of it


def _handle_signals(stack_file: str) -> None:
    """Nothing of the caller's; but on SIGUSR1, or in a crash, this process writes into the file where it stands."""
    signal.set_wakeup_fd(-1)  # the caller's, and so is the next: asyncio and faulthandler share theirs with children
    for number in (*_STOPS, signal.SIGTSTP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # in a terminal with `stty tostop` a print would stop it
    os.register_at_fork(after_in_child=faulthandler.enable if faulthandler.is_enabled() else faulthandler.disable)
    file = open(stack_file, "a")  # noqa: SIM115  faulthandler keeps it open
    faulthandler.enable(file=file)  # of this process alone, so not of its children
    faulthandler.register(signal.SIGUSR1, file=file)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _report_of(problem: BaseException) -> _Report:
    if not isinstance(problem, SystemExit):
        frames = problem.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        return _Report(time.monotonic(), "\n\n" + "".join(traceback.format_exception(problem.with_traceback(frames))))
    code = problem.code
    if code in [128 + number for number in _STOPS]:
        return _Report(time.monotonic(), stopped_by=code - 128)
    text = code if code and isinstance(code, str) else f"it called sys.exit({code!r})"
    return _Report(time.monotonic(), "" if code in (None, 0) else text)
