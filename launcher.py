"""Starting processes, watching them, explaining how they failed, and ending them.  Never touches a tensor.

    import launcher

    def work(local_rank, world_size, name): ...

    if __name__ == "__main__":
        launcher.run(work, ("ada",), nproc=2)

Each process finds its place in torchrun's variables (rendezvous.py).  The file reads in the order in which a run
lives: plan, run, start, watch, explain, end.  Part of distributed.py; copy it together with that file.
"""

import argparse
import contextlib
import faulthandler
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
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import torch

if __package__:
    from . import rendezvous
else:
    import rendezvous

STOP_GRACE = 30  # seconds for a checkpoint to be saved, when the run was told to stop; DIST_GRACE overrides it
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS = {*_STOPS, signal.SIGUSR1, signal.SIGTSTP}
_UNKNOWN = 256  # in the place of an exit code that nobody knows

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
        if getattr(args, "batch_size", processes) < processes:
            raise ValueError(f"--batch-size {args.batch_size} is too small for {processes} processes: one example each")
    except ValueError as problem:
        parser.error(str(problem))
    return args


# ---------------------------------------------------------------------------------------------------------------- run


def run(function: Callable, args: tuple = (), nproc: int | None = None, finish: Callable = lambda: None) -> Any:
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
    return _run_here(function, args, world, finish)


def _run_here(function: Callable, args: tuple, world: rendezvous.World, finish: Callable) -> Any:
    """This process is one of several that a launcher has started, or the only one."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "mpirun" in world.launcher:  # killed, they leave their processes behind
        threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    if world.launcher not in ("", "torchrun"):  # for a function that calls torch's own init_process_group
        address, port = rendezvous.meeting_point(world)
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def call() -> Any:
        try:
            return function(world.local_rank, world.world_size, *args)
        except KeyboardInterrupt:
            raise _stopped_by(signal.SIGINT) from None
        except RuntimeError as problem:
            several_machines = world.local_world_size < world.world_size
            if several_machines and re.search("gloo|NCCL|onnection|imed out", str(problem)):
                _explain_loss(world, problem)
            raise

    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun's own report then shows this error
        from torch.distributed.elastic.multiprocessing.errors import record

        call = record(call)
    try:
        result = call()
    finally:
        finish()
    return result if world.rank == 0 else None


def _explain_loss(world: rendezvous.World, problem: RuntimeError) -> None:
    hosts = rendezvous.hosts
    names = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in rendezvous.lost(world))
    if names:
        raise RuntimeError(f"rank {world.rank} ({hosts[world.rank]}) has lost {names}") from problem


def _die_with(parent: int) -> None:
    """End this process and its group once `parent` is gone, even if it was killed and could tell no one."""
    while os.getppid() == parent:
        time.sleep(0.5)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _interactive() -> bool:
    """In a notebook, IPython or Python's own shell, which SystemExit would end."""
    return hasattr(sys, "ps1")


def _stopped_by(number: int) -> BaseException:
    if number == signal.SIGINT and _interactive():
        return KeyboardInterrupt()
    return SystemExit(128 + number)


def _run_all(function: Callable, args: tuple, nproc: int, finish: Callable) -> Any:
    """Start nproc processes, watch them, end them all whatever happens; returns rank 0's result."""
    method, threads = _start_method(function, nproc)
    run = _Run(nproc)
    with run.signals_noted() as mask:
        try:
            run.start(method, _Job(function, args, finish, threads))
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            result = run.watch()
        finally:
            run.end()
    for number, _ in run.stops[:1]:  # too late for us, so it is for the caller
        os.kill(os.getpid(), number)
    return result


# -------------------------------------------------------------------------------------------------------------- start


def _cuda_was_used() -> bool:
    """Whether this process has loaded CUDA's driver (torch.cuda.is_available does): its children can't use CUDA."""
    if torch.cuda.is_initialized():
        return True
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps") as maps:
        return "/libcuda.so" in maps.read()


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
        # So after a first fork the threads that are left belong to somebody else.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of these very threads
            child = os.fork()
        if child == 0:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):  # the caller has SIGCHLD ignored
            os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _start_method(function: Callable, nproc: int) -> tuple[str, int | None]:
    """ "fork" or "spawn", and the number of threads for each process (None: as OMP_NUM_THREADS says)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores // nproc)
    if fork_is_safe():
        return "fork", threads
    main_file = getattr(sys.modules["__main__"], "__file__", None) or ""
    if function.__module__ != "__main__" or os.path.exists(main_file):
        return "spawn", threads
    if sys.platform != "linux" or _cuda_was_used():
        raise RuntimeError(
            f"a new process can't find {function.__name__}, defined in a notebook or shell, and this one can't be "
            "forked (CUDA is in use, or this isn't Linux): move it to a file, or restart and call launch first"
        )
    return "fork", 1  # a process with one thread never uses the pool


_GUARD = """
PATH=/usr/bin:/bin:$PATH
while read -r pid; do
    case $pid in ''|0|1|*[!0-9]*) ;; *) pids="$pids $pid" ;; esac  # what else is written there by mistake is no pid
done
for pid in $pids; do kill -9 $pid -$pid; done
sleep 0.1
rm -rf "$0"
"""  # the reading ends when nobody holds the other end of the pipe any more


class _Job(NamedTuple):
    """What each process has to do."""

    function: Callable
    args: tuple
    finish: Callable
    threads: int | None  # of torch's operations; None: as OMP_NUM_THREADS says


class _Report(NamedTuple):
    """What a process says of its own end."""

    when: float
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
        self.requests: list[int] = []  # SIGUSR1 and Ctrl-Z
        self.grace = rendezvous.seconds("DIST_GRACE")
        self.stop_grace = rendezvous.seconds("DIST_GRACE", STOP_GRACE)
        self.folder = os.path.join(tempfile.gettempdir(), f"dist-{os.urandom(8).hex()}")
        self.guard, self.guard_pipe = None, -1

    @contextlib.contextmanager
    def signals_noted(self) -> Iterator[set]:
        """Note signals instead of dying of them.  They are blocked until the caller sets the mask that this yields:
        the processes inherit the block, so none dies half-way into its start."""

        def note(number: int, frame: Any) -> None:
            if number in _STOPS:
                self.stops.append((number, time.monotonic()))
            else:
                self.requests.append(number)

        handlers = {}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            if threading.current_thread() is threading.main_thread():  # Python lets no other thread handle signals
                for number in filter(_is_pythons, _SIGNALS):
                    # nohup's SIGHUP stays ignored.  SIGINT doesn't: a shell's `script &` ignores it unasked.
                    honoured = number in (signal.SIGHUP, signal.SIGTSTP)
                    if not (honoured and signal.getsignal(number) == signal.SIG_IGN):
                        handlers[number] = signal.signal(number, note)
                if _is_pythons(signal.SIGCHLD):  # ignored, it would make the kernel forget how a child has ended
                    handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            yield mask
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def start(self, method: str, job: _Job) -> None:
        """Start the processes, and before them the guard.

        Should this process be killed, the guard kills them, with all that they have started, and removes the folder.
        """
        if method == "spawn":
            resource_tracker.ensure_running()  # Python starts it anyway, and that unblocks signals:
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # once more
        guards_end, self.guard_pipe = os.pipe()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True, "cwd": "/"}
        self.guard = subprocess.Popen(["/bin/sh", "-c", _GUARD, self.folder], stdin=guards_end, **quiet)
        os.close(guards_end)
        os.mkdir(self.folder, 0o700)  # now that the guard knows it
        with socket.create_server(("127.0.0.1", 0)) as free:  # for a function that calls torch's own init
            port = free.getsockname()[1]
        environment = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.nproc))
        environment |= {"DIST_STORE": f"{self.folder}/store", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), rendezvous.LOOPBACK)
        context = multiprocessing.get_context(method)
        guard_pipe = self.guard_pipe if method == "fork" else None  # spawn doesn't hand it down
        for rank in range(self.nproc):
            environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            arguments = (job, dict(environment), os.getpid(), guard_pipe)
            process = context.Process(target=_work, args=arguments, name=f"rank {rank}")
            process.start()
            self.processes.append(process)
            if method == "spawn":  # a forked process tells the guard itself: then none is without it for a moment
                os.write(self.guard_pipe, f"{process.pid}\n".encode())

    # ---------------------------------------------------------------------------------------------------------- watch

    def watch(self) -> Any:
        """Wait for all processes; returns rank 0's result, or raises what ended the run."""
        settled = False
        while True:
            time.sleep(0.01)
            self.answer_requests()
            if self.stops:
                number = self.stops[0][0]
                _say(f"launch: {_name(number)}: ending {self.nproc} processes")
                self.grace = self.stop_grace
                raise _stopped_by(number)
            codes = [_exit_code(process) for process in self.processes]  # first: who is gone has said what it had to
            self.read_reports()
            causes = self.causes(codes)
            if causes and settled:
                raise self.failure(*min(causes))
            if causes:  # its peers can notice a death before this process does: look once more
                time.sleep(0.2)
                settled = True
            elif None not in codes:
                return self.reports[0].result

    def answer_requests(self) -> float:
        """SIGUSR1 and Ctrl-Z; returns for how many seconds this process was stopped."""
        stopped = 0.0
        while self.requests:
            if self.requests.pop(0) == signal.SIGUSR1:
                _say(self.stack_table())
                continue
            began = time.monotonic()
            self.send(signal.SIGSTOP)  # Ctrl-Z reaches this process alone: the others have groups of their own
            noted = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # this process stops here, until `fg`
            signal.signal(signal.SIGTSTP, noted)
            self.send(signal.SIGCONT)
            stopped += time.monotonic() - began
        return stopped

    def send(self, number: int) -> None:
        """Send a signal to all processes that still run, with all that they have started."""
        for process in self.processes:
            if _exit_code(process) is None:
                _kill(process.pid, number)
                _kill(-process.pid, number)

    def read_reports(self) -> None:
        """A report is a file, as a pipe could be left half full, and held open, by a process that was killed."""
        for rank in range(len(self.processes)):
            path = self.file("report", rank)
            if rank in self.reports or not os.path.exists(path):
                continue
            with open(path, "rb") as file:
                content = file.read()
            try:
                report = pickle.loads(content)
            except Exception as problem:  # of a class that can't be made here, say
                report = _Report(time.monotonic(), f"its result can't be read: {problem}")
            self.reports[rank] = report
            if report.stopped_by:  # it was told to stop, so the run was
                self.stops.append((report.stopped_by, time.monotonic()))

    def causes(self, codes: list) -> list[tuple[float, int, str]]:
        """When, which rank and what, for each process that has failed.

        A process that reports its error waits to be ended.  So whoever died without a report died before any other
        could lose it, and is the cause; among reports it is the earliest.
        """
        found = [(report.when, rank, report.error) for rank, report in self.reports.items() if report.error]
        for rank, code in enumerate(codes):
            if code is None or (rank in self.reports and code in (0, _UNKNOWN)):
                continue
            what = "and nobody knows how" if code == _UNKNOWN else f"by os._exit({code})"
            if code < 0:
                what = f"by {_name(-code)}"
            if code == -signal.SIGKILL:
                what += " (by hand, or by the kernel for want of memory: see dmesg)"
            if rank in self.reports:
                what += " after its work"
            found.append((0.0, rank, f"ended {what}"))
            _kill(-self.processes[rank].pid, signal.SIGKILL)  # its data loader workers, likewise
        return found

    # -------------------------------------------------------------------------------------------------------- explain

    def failure(self, when: float, rank: int, error: str) -> BaseException:
        """What `launch` raises, with the error of the first process that failed."""
        done = [f"rank {r}" for r, report in sorted(self.reports.items()) if not report.error]
        if done and f"rank {rank}" not in done:
            error = f"{error.rstrip()}\n({', '.join(done)} had finished)"
        text = f"rank {rank} of {self.nproc} failed first: {error.rstrip()}"
        if re.search("tim(ed|e) ?out|SIG(ABRT|BUS|FPE|ILL|SEGV)", error, re.IGNORECASE):
            text += f"\n{self.stack_table()}"
        return RuntimeError(text) if _interactive() else SystemExit(text)

    def stack_table(self) -> str:
        """A line for each rank that says where it stands: its main thread's innermost frame outside torch and this."""
        asked = [rank for rank, process in enumerate(self.processes) if _exit_code(process) is None]
        for rank in asked:
            open(self.file("stack", rank), "w").close()  # what it said when it was last asked
            _kill(self.processes[rank].pid, signal.SIGUSR1)  # faulthandler answers, from C: in a collective, too
        time.sleep(0.3)
        lines = ["where each rank stands:"]
        for rank, process in enumerate(self.processes):
            state = f"no answer (if it was stopped: kill -CONT {process.pid})" if rank in asked else "gone"
            with contextlib.suppress(FileNotFoundError), open(self.file("stack", rank)) as file:
                dump = file.read()
                if rank not in asked:  # a crash has left its last stack
                    dump = dump.rpartition("Fatal Python error")[2] if "Fatal Python error" in dump else ""
                # The main thread comes last, innermost frame first.
                frames = re.findall(r'File "(.+)", line (\d+),? in (.+)', dump.rpartition("hread 0x")[2])
                if rank in self.reports:  # in a traceback the innermost frame is the last
                    frames = re.findall(r'File "(.+)", line (\d+),? in (.+)', self.reports[rank].error)[::-1]
                state = _innermost(frames) or state
            lines.append(f"  rank {rank}: {state}")
        return "\n".join(lines)

    def file(self, name: str, rank: int) -> str:
        return os.path.join(self.folder, f"{name}{rank}")

    # ------------------------------------------------------------------------------------------------------------ end

    def end(self) -> None:
        """SIGTERM to whoever handles it, to save a checkpoint, say; then SIGKILL to all and to what they started."""
        try:
            self.let_them_save()
        finally:
            for process in self.processes:
                _kill(-process.pid, signal.SIGKILL)  # all at once, or its data loader workers would cry
                if _exit_code(process) is None:
                    _kill(process.pid, signal.SIGKILL)
                process.join()
            if self.guard:
                self.guard.kill()
                self.guard.wait()
                os.close(self.guard_pipe)
            shutil.rmtree(self.folder, ignore_errors=True)

    def let_them_save(self) -> None:
        had_failed = {rank for rank, report in self.reports.items() if report.error}
        for process in filter(_handles_sigterm, self.processes):
            _kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.grace
        while any(map(_handles_sigterm, self.processes)) and time.monotonic() < deadline and not self.told_again():
            deadline += self.answer_requests()
            time.sleep(0.01)
        if not self.stops:
            return
        self.read_reports()
        for rank, report in self.reports.items():
            if report.error and rank not in had_failed:  # it could not save, perhaps
                _say(f"rank {rank} of {self.nproc} failed while it was ending: {report.error.rstrip()}")

    def told_again(self) -> bool:
        """A person or a scheduler has lost patience.  GNU timeout and a closing terminal signal twice at once."""
        return len(self.stops) > 1 and self.stops[-1][1] - self.stops[0][1] >= 1


def _exit_code(process: multiprocessing.Process) -> int | None:
    """None while it runs, then as Process.exitcode has it.  It is left a zombie, so that no other gets its number."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.exitcode
    try:
        state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else has waited for it: the caller, who has SIGCHLD ignored, say
        return _UNKNOWN if process.exitcode is None else process.exitcode
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _kill(pid: int, number: int) -> None:
    """Send a signal; to the process group -pid, if pid is negative.  Whoever is gone needs none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for this signal.  Only Linux tells."""
    try:
        with open(f"/proc/{pid}/status") as status:
            mask = re.search(r"SigCgt:\s*(\w+)", status.read())  # a bit for each signal that it handles
    except OSError:  # it is gone
        return False
    return bool(mask and int(mask[1], 16) >> (number - 1) & 1)


def _handles_sigterm(process: multiprocessing.Process) -> bool:
    """Whether it runs, and SIGTERM would not simply end it."""
    if _exit_code(process) is not None:
        return False
    return sys.platform != "linux" or _catches(process.pid, signal.SIGTERM)


def _is_pythons(number: int) -> bool:
    """Whether Python's signal module knows this signal's handler: it can't put back faulthandler's, for instance."""
    known = signal.getsignal(number)
    if known is None or sys.platform != "linux":
        return known is not None
    return callable(known) or not _catches(os.getpid(), number)


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
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the terminal may be gone: no reason to fail
        print(text, file=sys.stderr, flush=True)


def _settle_in(environment: dict, folder: str, parent: int, guard_pipe: int | None) -> None:
    """A group and a place of its own, and nothing of the caller's signal handling."""
    os.setpgid(0, 0)  # so that Ctrl-C hits the parent alone, and what the process starts ends with it
    if guard_pipe is not None:
        os.write(guard_pipe, f"{os.getpid()}\n".encode())
        os.close(guard_pipe)  # or the guard would wait for this process, too
    elif os.getppid() != parent:  # which was killed before it could tell the guard
        os._exit(1)
    os.environ |= environment
    # Where multiprocessing keeps its sockets, those of DataLoader workers, too: killed, they can't remove them.
    multiprocessing.current_process()._config["tempdir"] = folder
    signal.set_wakeup_fd(-1)  # the caller's, and so is the next: asyncio and faulthandler share theirs with children
    faulthandler.unregister(signal.SIGUSR1)
    for number in (*_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.register_at_fork(after_in_child=faulthandler.enable if faulthandler.is_enabled() else faulthandler.disable)
    stack = open(os.path.join(folder, f"stack{os.environ['RANK']}"), "a")  # noqa: SIM115  faulthandler keeps it open
    faulthandler.enable(file=stack)  # of this process alone, so not of its children
    faulthandler.register(signal.SIGUSR1, file=stack)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _work(job: _Job, environment: dict, parent: int, guard_pipe: int | None) -> None:
    """What runs in each started process."""
    folder = os.path.dirname(environment["DIST_STORE"])
    _settle_in(environment, folder, parent, guard_pipe)
    world = rendezvous.world()
    if job.threads:
        torch.set_num_threads(job.threads)
    try:
        result = job.function(world.local_rank, world.world_size, *job.args)
        job.finish()
        _flush()
        report = _Report(0.0, result=result if world.rank == 0 else None)
        content = pickle.dumps(report)
    except BaseException as problem:
        report = _report_of(problem)
        content = pickle.dumps(report)
        with contextlib.suppress(OSError):
            _flush()
    try:
        path = os.path.join(folder, f"report{world.rank}")
        with open(f"{path}.tmp", "wb") as file:
            file.write(content)
        os.rename(f"{path}.tmp", path)  # at once: nobody reads half of it
    except OSError as problem:  # the disk is full
        _say(f"rank {world.rank} can't report to launch ({problem}). {report.error}")
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to save: `end` needn't wait
    while report.error or report.stopped_by:  # until the parent ends all: or the others would fail for want of it
        time.sleep(1)


def _flush() -> None:
    with contextlib.suppress(AttributeError, ValueError):  # there is no stdout, or it was closed
        sys.stdout.flush()


def _report_of(problem: BaseException) -> _Report:
    if not isinstance(problem, SystemExit):
        problem = problem.with_traceback(problem.__traceback__.tb_next)  # without _worker
        return _Report(time.monotonic(), "\n\n" + "".join(traceback.format_exception(problem)))
    code = problem.code
    for number in _STOPS:
        if code == 128 + number:
            return _Report(time.monotonic(), stopped_by=number)
    text = code if isinstance(code, str) else f"it called sys.exit({code!r})"
    return _Report(time.monotonic(), text if code else "")
