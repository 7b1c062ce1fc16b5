"""No orphan, ever: real signals to real runs, in every phase, under every way of starting.

Each case starts a run as a shell does, waits for its phase, and sends the signal.  The run's parent must end; 5 seconds
later every process that the run has started must be gone, in whatever session or process group it is, and the
temporary folder must be empty.  One case has more time: a spawned worker that is still importing torch when `launch`
itself is killed ends when its import does.  Exit code and output are compared, too.  Eight cases run at a time; the
test prints the table of all cases at its end (pytest -rP shows it when the test passes).

By default a selection is run.  All cases, in some minutes: python -m pytest -m slow tests/test_faults.py
"""

import contextlib
import ctypes
import fcntl
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from multiprocessing import resource_tracker
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

import distributed as dist
import launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
ENDS_WITHIN = 5  # seconds; the promise
IMPORTS_WITHIN = 60  # seconds; Python and torch, on a busy machine
STOPS_WITHIN = 3  # seconds, after Ctrl-Z
SAVES_FOR = 0.5  # seconds that a rank needs for its checkpoint


# ----------------------------------------------------------------------------------------- the run that is to be hurt


def worker(rank, world_size, phase, folder):
    def ready():
        write(f"{folder}/{rank}.tmp", os.getpid())
        os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}")

    if phase == "start":
        ready()
        time.sleep(60)
    dist.init_process_group(rank, world_size)
    if phase in ("train", "spawned loaders", "gil"):
        images = torch.ones(1, 8).expand(10**9, 8)  # takes no memory
        # In a spawned process Python spawns, too, and each loader worker imports torch.  One phase waits for that.
        context = None if phase == "spawned loaders" else "fork"
        batches = iter(DataLoader(images, batch_size=4, num_workers=2, multiprocessing_context=context))
        next(batches)
        subprocess.Popen(["sleep", "60"])  # unlike a loader worker, it doesn't look whether its parent lives
        ready()
        if phase == "gil":
            ctypes.PyDLL(None).sleep(60)  # C code that holds the GIL: no other Python thread of this process can run
        with open(f"{folder}/steps{rank}", "wb", buffering=0) as steps:
            while True:
                dist.all_reduce(next(batches).sum())
                steps.write(b".")
    if phase == "save":  # as Preemption of checkpoint.py does it
        stopped = []
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
        ready()
        while not dist.all_reduce(torch.tensor(len(stopped))):
            time.sleep(0.01)
        time.sleep(SAVES_FOR)
        write(f"{folder}/saved{rank}", "")
    if phase == "collective":
        dist.barrier()
        ready()
        if rank == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(1))  # for ever, as far as this test goes
    dist.cleanup()
    if phase == "end":
        ready()
        threading.Thread(target=time.sleep, args=(60,)).start()  # the process waits for it after the worker's return


def write(path, content):
    with open(path, "w") as file:
        file.write(str(content))


if __name__ == "__main__":
    write(f"{sys.argv[2]}/launcher", os.getpid())
    dist.launch(worker, *sys.argv[1:], nproc=2)


# --------------------------------------------------------------------------------------------------- starting a run


class Case(NamedTuple):
    start: str  # fork or spawn: `launch` in a fork of this process, which saves importing torch; or one of COMMANDS
    phase: str
    target: str  # who gets the signal
    signal: str


COMMANDS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "timeout": ["timeout", "600", sys.executable],
    "bash": ["bash", "--norc", "--noprofile", "-i"],  # in a terminal, where this file's command line is typed
}


class HurtRun:
    """A case's processes and files."""

    terminals = []  # the test's ends of the open terminals

    def __init__(self, case, folder):
        self.case, self.folder, self.temporary = case, str(folder), f"{folder}/t"
        self.terminal, self.screen = None, ""
        self.parent, self.workers, self.code = None, [], None
        self.processes, self.seconds, self.over = 0, 0.0, False
        os.mkdir(self.temporary)
        shell = None
        if case.start == "bash":
            self.terminal, shell = os.openpty()
            os.set_blocking(self.terminal, False)
            HurtRun.terminals.append(self.terminal)
        self.init = os.fork()
        if self.init == 0:
            be_init(self, shell)
        if shell:
            os.close(shell)

    def read(self, name):
        try:
            with open(f"{self.folder}/{name}", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def exit_code(self):
        """The parent's exit code as a shell has it; None while it lives."""
        if reaped := re.search(rf"^{self.parent}: (-?\d+)$", self.read("reaped"), re.MULTILINE):
            code = int(reaped[1])
            self.code = 128 - code if code < 0 else code
        return self.code

    def is_over(self):
        """Whether all processes are gone: then init ends."""
        self.over = self.over or os.waitpid(self.init, os.WNOHANG)[0] != 0
        return self.over

    def what_is_on_the_screen(self):
        with contextlib.suppress(BlockingIOError):
            self.screen += os.read(self.terminal, 1 << 16).decode(errors="replace")
        return self.screen

    def close_terminal(self):
        if self.terminal:
            HurtRun.terminals.remove(self.terminal)
            os.close(self.terminal)
            self.terminal = None

    def end(self):
        """Whatever happened: leave nothing."""
        while not self.is_over():
            for pid in descendants(self.init) or [self.init]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.close_terminal()


def be_init(run, shell):
    """The ancestor of all processes of the run, for ever: as a machine's init it adopts orphans, and reaps all."""
    try:
        for terminal in HurtRun.terminals:
            os.close(terminal)  # or a terminal that the test closes would stay open here
        pr_set_child_subreaper = 36
        assert ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0
        os.setsid()  # this is also the shell whose job the run is: the leader of its session, in another process group
        parent = os.fork()
        if parent == 0:
            be_parent(run, shell)
        if shell:
            os.close(shell)
        write(f"{run.folder}/parent", parent)
        if run.case.target == "its start":
            hit_in_its_start(run, parent)
        while True:
            pid, status = os.wait()
            with open(f"{run.folder}/reaped", "a") as file:
                file.write(f"{pid}: {os.waitstatus_to_exitcode(status)}\n")
    finally:  # ChildProcessError: nobody is left
        os._exit(0)


def hit_in_its_start(run, parent):
    """Between two lines of `launch`: at once when its folder is there, or its first, second, ... child."""
    what, number = run.case.phase.split()
    while len(os.listdir(run.temporary) if what == "folder" else children(parent)) < int(number):
        time.sleep(0.001)
    os.kill(parent, getattr(signal, run.case.signal))


def start_slowly():
    """Pause before each program that this process starts, and after each of its forks: a signal can come then."""
    sys.addaudithook(lambda event, _: time.sleep(0.2) if event == "subprocess.Popen" else None)
    os.register_at_fork(after_in_parent=lambda: time.sleep(0.2))


def be_parent(run, shell):
    """What the user starts."""
    code = 70
    try:
        if shell:
            os.setsid()
            fcntl.ioctl(shell, termios.TIOCSCTTY, 0)
            os.dup2(shell, 0)
            output = shell
        else:
            os.setpgid(0, 0)
            output = os.open(f"{run.folder}/output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # As a shell script starts a job with &.
        signal.signal(signal.SIGINT, signal.SIG_IGN if run.case.target == "background" else signal.default_int_handler)
        if run.case.target == "nohup":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.environ |= {"TMPDIR": run.temporary, "PYTHONPATH": os.path.dirname(dist.__file__)}
        if command := COMMANDS.get(run.case.start):
            program = [] if shell else [__file__, run.case.phase, run.folder]
            os.environ |= {"PS1": "$ ", "TERM": "dumb", "HISTFILE": ""}
            os.execvp(command[0], [*command, *program])
        sys.stdout = sys.stderr = open(1, "w", closefd=False)
        tempfile.tempdir = run.temporary  # Python remembers the folder that it has found once,
        multiprocessing.current_process()._config.pop("tempdir", None)  # and multiprocessing the one that it has made
        tracker = resource_tracker._resource_tracker
        tracker._fd = tracker._pid = None  # none yet, whatever an earlier test has started
        launcher.fork_is_safe = lambda: run.case.start == "fork"
        if run.case.target == "its start":
            start_slowly()
        dist.launch(worker, run.case.phase, run.folder, nproc=2)
        code = 0
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        code = exit.code if isinstance(exit.code, int) else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


# --------------------------------------------------------------------------------------------------- who is there?


class Process(NamedTuple):
    pid: int
    state: str
    parent: int
    group: int


def processes():
    """All processes of the machine but zombies."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
            state, parent, group = stat.read().rpartition(")")[2].split()[:3]
            if state not in "ZX":
                yield Process(int(entry), state, int(parent), int(group))


def descendants(pid):
    """The processes that pid has started, those that they have started, and so on."""
    everything, found = list(processes()), [pid]
    for ancestor in found:
        found += [process.pid for process in everything if process.parent == ancestor]
    return found[1:]


def command_line(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
        return file.read().replace("\0", " ").strip()
    return "gone"


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


# -------------------------------------------------------------------------------------------------------- the steps
# of a case are generators, so that many cases run side by side: they yield while they wait.  What is wrong is an
# AssertionError.


def until(condition, seconds=ENDS_WITHIN):
    """Wait until the condition holds; returns whether it did in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        yield
    return True


def importing(case):
    """Whether the workers are hit while they import torch, before `launch` can have run anything in them."""
    return case.start == "spawn" and case.phase == "start"


def ends_after_its_import(case):
    """`launch` was killed, so nobody is left who could end a worker that has not joined the process group yet."""
    started = importing(case) and case.target in ("parent", "background")
    starts = case.start == "spawn" and case.target == "its start"
    return case.signal == "SIGKILL" and (started or starts)


def patience(case):
    """How many seconds the parent has to end."""
    if importing(case) and case.target == "worker":
        return IMPORTS_WITHIN  # `launch` has blocked the signal in its workers until they have imported torch
    if importing(case):
        return 2  # nobody waits for that import
    if case.start in COMMANDS:
        return 20  # Python tidies up all of torch's modules; torchrun takes longer still
    return ENDS_WITHIN + SAVES_FOR


def until_ready(run):
    """Start the run, and wait until it is in its phase."""
    assert (yield from until(lambda: run.read("parent"))), "not started"
    run.parent = int(run.read("parent"))
    if run.case.start == "bash":
        os.write(run.terminal, f"{sys.executable} {__file__} {run.case.phase} {run.folder}; echo code $?\n".encode())

    def workers():
        if importing(run.case):
            return [pid for pid in children(run.parent) if "spawn_main" in command_line(pid)]
        return [int(run.read(rank)) for rank in (0, 1) if run.read(rank)]

    assert (yield from until(lambda: len(workers()) == 2, 120)), "never got ready"
    run.workers = workers()
    if run.case.start == "bash":
        run.parent = int(run.read("launcher"))
    for _ in range(3):
        yield  # into the sleep or the collective
    run.processes = len(descendants(run.init))


def until_gone(run):
    """The parent ends, and within the promised seconds after that, all that it has started."""
    sent = time.monotonic()
    assert (yield from until(lambda: run.exit_code() is not None, patience(run.case))), "the parent is still alive"
    yield from until(run.is_over, IMPORTS_WITHIN if ends_after_its_import(run.case) else ENDS_WITHIN)
    run.seconds = time.monotonic() - sent
    alive = [] if run.over else [command_line(pid) or "?" for pid in descendants(run.init)]
    assert not alive, f"still alive: {alive}"
    left = sorted(os.listdir(run.temporary))
    if run.case.start == "torchrun":  # it makes this folder for its workers' logs, and doesn't remove it
        left = [name for name in left if not name.startswith("torchelastic_")]
    assert not left, f"left in the temporary folder: {left}"


def check_end(run, code, line=""):
    """The exit code, and one line of output, or none."""
    assert run.code == code, f"exit code {run.code}, expected {code}"
    lines = [text for text in run.read("output").splitlines() if not text.startswith("distributed: ")]
    if run.case.phase == "train" and run.case.target == "worker":
        lines = [text for text in lines if not text.startswith("[rank")]  # its loader may cry before the parent ends it
    if run.case.phase == "spawned loaders":  # Python's resource tracker, which removes the semaphores of killed loaders
        lines = [text for text in lines if "resource_tracker" not in text and "warnings.warn" not in text]
    right = len(lines) == 1 and lines[0].startswith(line) if line else not lines
    assert right, f"printed {lines}, expected one line: {line!r}"
    if run.case.phase == "save":
        saved = [rank for rank in (0, 1) if os.path.exists(f"{run.folder}/saved{rank}")]
        assert saved == [0, 1], f"only these ranks had the time to save: {saved}"


def steps(run):
    return [len(run.read(f"steps{rank}")) for rank in (0, 1)]


def goes_on(run):
    """Every rank takes further steps."""
    before = steps(run)
    return until(lambda: all(now > then for now, then in zip(steps(run), before, strict=True)))


def stops(run):
    """The parent, the ranks and what the ranks have started are all stopped, in time."""

    def awake():
        everything = list(processes())
        groups = {process.group for process in everything if process.pid in run.workers}
        family = [process for process in everything if process.pid == run.parent or process.group in groups]
        family = [process for process in family if process.pid not in groups]  # the guard stays awake
        assert len(family) > 2, "they have ended"
        return [f"{command_line(process.pid)} ({process.state})" for process in family if process.state not in "Tt"]

    stopped = yield from until(lambda: not awake(), STOPS_WITHIN)
    assert stopped, f"not stopped: {awake()}"


# -------------------------------------------------------------------------------------------------------- the cases


def is_hurt(run):
    """One signal to the parent (also to one that runs in the background), to its whole group, or to a worker."""
    yield from until_ready(run)
    _, _, target, name = run.case
    signum = getattr(signal, name)
    if target == "terminal":
        os.killpg(run.parent, signum)
    else:
        os.kill(run.workers[1] if target == "worker" else run.parent, signum)
    yield from until_gone(run)
    if target == "worker":
        check_end(run, 1, f"rank 1 of 2 failed first: ended by {name}")
    else:
        check_end(run, 128 + signum, f"launch: {name}: ending 2 processes" if name != "SIGKILL" else "")


def is_hurt_in_its_start(run):
    """While `launch` starts its processes."""
    assert (yield from until(lambda: run.read("parent"))), "not started"
    run.parent = int(run.read("parent"))
    yield from until_gone(run)
    if run.case.signal == "SIGTERM":
        check_end(run, 143, "launch: SIGTERM: ending 2 processes")
    else:
        assert run.code == 137  # a process that Python has half spawned may cry


def is_hurt_twice(run):
    """As the same stop arrives by two ways: within milliseconds."""
    yield from until_ready(run)
    signum = getattr(signal, run.case.signal)
    os.kill(run.parent, signum)
    time.sleep(0.002)
    os.kill(run.parent, signum)
    yield from until_gone(run)
    check_end(run, 128 + signum, f"launch: {run.case.signal}: ending 2 processes")


def ignores_sighup(run):
    """nohup python ...: the run goes on when the terminal is closed."""
    yield from until_ready(run)
    os.kill(run.parent, signal.SIGHUP)
    for _ in range(5):
        yield
    assert (yield from goes_on(run)), "it doesn't go on"
    os.kill(run.parent, signal.SIGTERM)
    yield from until_gone(run)
    check_end(run, 143, "launch: SIGTERM: ending 2 processes")


def runs_under_timeout(run):
    """GNU timeout signals its child, and then its own group, which the child belongs to."""
    yield from until_ready(run)
    os.kill(run.parent, getattr(signal, run.case.signal))  # SIGALRM: as its clock does it
    yield from until_gone(run)
    check_end(run, 124 if run.case.signal == "SIGALRM" else 143, "launch: SIGTERM: ending 2 processes")


def runs_under_torchrun(run):
    yield from until_ready(run)
    os.kill(run.workers[1] if run.case.target == "worker" else run.parent, getattr(signal, run.case.signal))
    yield from until_gone(run)
    assert run.code, "exit code 0"


def is_stopped(run):
    """Ctrl-Z stops all of it; what is then sent works as ever."""
    yield from until_ready(run)
    os.killpg(run.parent, signal.SIGTSTP)
    yield from stops(run)
    before = steps(run)
    for _ in range(5):
        yield
    assert steps(run) == before, "it takes steps"
    if run.case.signal == "SIGCONT":
        os.killpg(run.parent, signal.SIGCONT)
        assert (yield from goes_on(run)), "it doesn't go on"
        os.killpg(run.parent, signal.SIGTSTP)  # and a second time
        yield from stops(run)
        os.killpg(run.parent, signal.SIGCONT)
        assert (yield from goes_on(run)), "it doesn't go on again"
    signum = signal.SIGKILL if run.case.signal == "SIGKILL" else signal.SIGTERM
    os.kill(run.parent, signum)
    if signum != signal.SIGKILL:
        os.killpg(run.parent, signal.SIGCONT)  # as the shell's own kill does it: or the signal would wait
    yield from until_gone(run)
    check_end(run, 128 + signum, "launch: SIGTERM: ending 2 processes" if signum == signal.SIGTERM else "")


def obeys_the_keys(run):
    """In a real terminal, under a real shell: Ctrl-Z, fg, and at last Ctrl-C."""
    yield from until_ready(run)
    assert (yield from goes_on(run))
    os.write(run.terminal, b"\x1a")
    yield from stops(run)
    assert (yield from until(lambda: f"code {128 + signal.SIGTSTP}" in run.what_is_on_the_screen())), "no prompt"
    os.write(run.terminal, b"fg; echo code $?\n")
    assert (yield from goes_on(run)), "it doesn't go on"
    os.write(run.terminal, b"\x03")
    ended = yield from until(lambda: "code 130" in run.what_is_on_the_screen(), patience(run.case))
    assert ended, "no exit code 130"
    run.code = 130
    os.write(run.terminal, b"exit\n")
    yield from until_gone(run)


def loses_its_terminal(run):
    """The window is closed: the shell gets SIGHUP and passes it on, and the kernel sends it when the shell has gone."""
    yield from until_ready(run)
    if run.case.signal == "SIGTSTP":
        os.write(run.terminal, b"\x1a")  # while the run is stopped
        yield from stops(run)
    run.close_terminal()
    yield from until_gone(run)
    check_end(run, 129)


STORIES = {
    "its start": is_hurt_in_its_start,
    "twice": is_hurt_twice,
    "nohup": ignores_sighup,
    "stopped": is_stopped,
    "keys": obeys_the_keys,
    "window": loses_its_terminal,
    "timeout": runs_under_timeout,
    "torchrun": runs_under_torchrun,
}


def story(run):
    return STORIES.get(run.case.target) or STORIES.get(run.case.start) or is_hurt


PHASES = ("start", "train", "collective", "end")
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")
BOTH = ("fork", "spawn")
STARTS = ("folder 1", "child 1", "child 2", "child 3")  # the guard is a child, too, and so is Python's with spawn
ALL_CASES = [
    *itertools.product(["fork"], STARTS, ["its start"], ["SIGTERM", "SIGKILL"]),
    *itertools.product(["spawn"], [*STARTS, "child 4"], ["its start"], ["SIGTERM", "SIGKILL"]),
    *itertools.product(BOTH, PHASES, ["parent", "worker", "terminal", "background"], SIGNALS),
    *itertools.product(["spawn"], ["spawned loaders"], ["parent"], ["SIGTERM", "SIGKILL"]),
    *itertools.product(BOTH, ["gil"], ["parent"], SIGNALS),
    *itertools.product(BOTH, ["gil"], ["worker"], ["SIGTERM", "SIGKILL"]),
    *itertools.product(BOTH, ["save"], ["parent", "terminal", "twice"], ["SIGINT", "SIGTERM", "SIGHUP"]),
    *itertools.product(BOTH, ["train"], ["stopped"], ["SIGCONT", "SIGTERM", "SIGKILL"]),
    *itertools.product(BOTH, ["train"], ["nohup"], ["SIGHUP"]),
    *itertools.product(["bash"], ["train", "save"], ["window"], ["SIGHUP", "SIGTSTP"]),
    ("bash", "train", "keys", "SIGTSTP"),
    *itertools.product(["timeout"], ["train", "save"], ["parent"], ["SIGALRM", "SIGTERM"]),
    *itertools.product(["torchrun"], ["collective"], ["parent", "worker"], ["SIGTERM", "SIGKILL"]),
]
SOME_CASES = [
    ("fork", "child 1", "its start", "SIGKILL"),
    ("fork", "child 3", "its start", "SIGKILL"),
    *itertools.product(["fork"], ["start", "end"], ["parent"], ["SIGKILL"]),
    *itertools.product(["fork"], ["collective"], ["parent"], ["SIGINT", "SIGKILL"]),
    *itertools.product(["fork"], ["train"], ["parent"], ["SIGTERM", "SIGKILL"]),
    *itertools.product(["fork"], ["train"], ["worker"], ["SIGKILL"]),
    *itertools.product(["fork"], ["train"], ["terminal"], ["SIGINT"]),
    ("fork", "gil", "parent", "SIGKILL"),
    ("fork", "save", "parent", "SIGTERM"),
    ("fork", "train", "stopped", "SIGKILL"),
    ("fork", "train", "nohup", "SIGHUP"),
    ("spawn", "start", "parent", "SIGTERM"),
]
SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("cases", [pytest.param(SOME_CASES, id="some"), pytest.param(ALL_CASES, id="all", marks=SLOW)])
def test_no_process_outlives_a_run(cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("f")  # multiprocessing's sockets lie below it: their names can't be long
    there = [case for case in cases if case[0] not in COMMANDS or shutil.which(COMMANDS[case[0]][0])]
    waiting, running, rows, failures = [Case(*case) for case in there], {}, {}, []
    order = {case: number for number, case in enumerate(waiting)}
    waiting.sort(key=lambda case: case.start == "fork")  # the slow ones first
    try:
        while waiting or running:
            while waiting and len(running) < 8:
                case = waiting.pop(0)
                (folder / str(order[case])).mkdir()
                run = HurtRun(case, folder / str(order[case]))
                running[run] = story(run)(run)
            for run, doing in list(running.items()):
                problem = None
                try:
                    next(doing)
                    continue
                except StopIteration:
                    pass
                except AssertionError as error:
                    problem = str(error).splitlines()[0]
                name = "  ".join(f"{word:10}" for word in run.case)
                rows[order[run.case]] = f"{name}  {run.processes:9}  {run.code!s:9}  {run.seconds:4.1f} s  "
                rows[order[run.case]] += "WRONG" if problem else "ok"
                if problem:
                    failures.append(f"{name}: {problem}\n{run.read('output')}{run.screen}".rstrip())
                del running[run]
                run.end()
            time.sleep(0.05)
    finally:
        for run in running:
            run.end()
    print(f"{'start':10}  {'phase':10}  {'target':10}  {'signal':10}  processes  exit code  all gone after")
    print("\n".join(rows[number] for number in sorted(rows)))
    print(f"{len(there)} cases, {len(failures)} wrong")
    assert not failures, "\n".join(failures)
