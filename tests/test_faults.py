"""No orphan, ever: real signals to real runs, in every phase, under every way of starting.

Each case starts a run in a session of its own, waits for the phase, sends the signal, and looks 5 seconds later at the
exit code, at what was printed, and at every process of the machine that belongs to that session.  Eight cases run at a
time; the table is printed at the end of the test (pytest -rP shows it when it passes, too).
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

import distributed as dist

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
ENDS_WITHIN = 5  # seconds; the promise
PHASES = ("start", "train", "collective", "end")
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")


# ----------------------------------------------------------------------------------------- the run that is to be hurt


def worker(rank, world_size, phase, folder):
    def ready():
        with open(f"{folder}/{rank}.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}")

    if phase == "start":
        ready()
        time.sleep(60)
    dist.init_process_group(rank, world_size)
    if phase == "train":
        batches = iter(
            DataLoader(torch.ones(10**9 // 8).expand(8, -1).t(), batch_size=4, num_workers=1)
        )  # a child, too
        next(batches)
        subprocess.Popen(["sleep", "60"])  # and one that would stay
        ready()
        while True:
            dist.all_reduce(next(batches).sum())
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


def forked_run(method, phase, folder, ignore_sigint):
    """`launch` in a forked child of this process: saves the import of torch, which takes longer than all the rest."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignore_sigint else signal.default_int_handler)
        output = os.open(f"{folder}/output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(1, "w", closefd=False)
        dist._fork_is_safe = lambda: method == "fork"
        dist.launch(worker, phase, folder, nproc=2)
        code = 0
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        code = exit.code if isinstance(exit.code, int) else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def torchrun(phase, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    output = open(f"{folder}/output", "a")  # noqa: SIM115
    env = {**os.environ, "PYTHONPATH": os.path.dirname(dist.__file__)}
    return subprocess.Popen([*command, phase, folder], stdout=output, stderr=output, start_new_session=True, env=env)


if __name__ == "__main__":
    dist.launch(worker, *sys.argv[1:])


# ----------------------------------------------------------------------------------------------------------- the cases


def alive(session, pids=()):
    """The processes of the session, and those of pids, that are neither gone nor zombies."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    state, _, _, sid = stat.read().rpartition(")")[2].split()[:4]
                with open(f"/proc/{entry}/cmdline") as command:
                    tracker = "resource_tracker" in command.read()  # Python's own; ends when all others have
            except OSError:
                continue
            if (int(sid) == session or int(entry) in pids) and state not in "ZX" and not tracker:
                found.append(int(entry))
    return found


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def case(method, phase, target, signame, folder, seen):
    """A generator, so that many run side by side; yields while it waits, returns what was wrong."""
    folder = str(folder)
    signum = getattr(signal, signame)
    process = torchrun(phase, folder) if method == "torchrun" else None
    parent = process.pid if process else forked_run(method, phase, folder, ignore_sigint=target == "background")
    deadline = time.monotonic() + 60
    importing = method == "spawn" and phase == "start"  # hit the workers while they import
    workers = []
    while len(workers) < 2:
        yield
        if importing:
            workers = [pid for pid in children(parent) if "spawn_main" in open(f"/proc/{pid}/cmdline").read()]
        else:
            workers = [int(open(f"{folder}/{r}").read()) for r in (0, 1) if os.path.exists(f"{folder}/{r}")]
        if time.monotonic() > deadline:
            os.killpg(parent, signal.SIGKILL)
            return "never got ready: " + open(f"{folder}/output").read()
    for _ in range(3):
        yield  # into the sleep or the collective
    family = alive(parent, workers)
    seen["processes"] = len(family)
    if target == "terminal":
        os.killpg(parent, signum)
    else:
        os.kill(workers[1] if target == "worker" else parent, signum)
    sent, code = time.monotonic(), None
    patience = 2 if importing else ENDS_WITHIN  # nobody waits for an import
    patience = 20 if method == "torchrun" else patience  # torchrun itself takes its time, after its workers
    while time.monotonic() - sent < patience:
        yield
        if code is None:
            code = (
                process.poll()
                if process
                else (lambda r: os.waitstatus_to_exitcode(r[1]) if r[0] else None)(os.waitpid(parent, os.WNOHANG))
            )
        left = [pid for pid in alive(parent, family) if pid != parent]
        if code is not None and not left:
            break
    seen["seconds"] = time.monotonic() - sent
    output = open(f"{folder}/output").read()
    if code is None or left:
        for pid in {*left, *([parent] if code is None else [])}:
            os.kill(pid, signal.SIGKILL)
        if code is None:
            process.wait() if process else os.waitpid(parent, 0)
        return f"still alive: {left or 'the parent'}; exit code {code}; {output}"
    code = 128 - code if code < 0 else code
    seen["code"] = code
    if method == "torchrun":
        return None if code else f"exit code {code}; {output}"
    if target == "worker":
        expected, line = 1, f"rank 1 of 2 failed first: ended by {signame}"
    else:
        expected = 128 + signum
        line = "" if signame == "SIGKILL" else f"launch: {signame}: ending 2 processes"
    lines = [text for text in output.splitlines() if not text.startswith("distributed: ")]
    if phase == "train" and target == "worker":  # a killed rank's loader may cry before the parent has ended it, too
        lines = [text for text in lines if not text.startswith("[rank")]
    wrong = [text for text in lines if not text.startswith(line or "\0")]
    if code != expected or wrong or len(lines) != bool(line):
        return f"exit code {code}, expected {expected}; printed {output!r}, expected one line: {line!r}"


ALL_CASES = [
    *itertools.product(["fork"], PHASES, ["parent", "worker", "terminal", "background"], SIGNALS),
    *itertools.product(["spawn"], ["start", "collective"], ["parent", "background"], ["SIGINT", "SIGTERM", "SIGKILL"]),
    *itertools.product(["spawn"], ["collective"], ["worker", "terminal"], ["SIGINT", "SIGKILL"]),
    ("spawn", "start", "terminal", "SIGINT"),
    *itertools.product(["torchrun"], ["collective"], ["parent", "worker"], ["SIGTERM", "SIGKILL"]),
]
SOME_CASES = [
    *itertools.product(["fork"], PHASES, ["parent"], SIGNALS),
    *itertools.product(["fork"], PHASES, ["worker"], ["SIGKILL"]),
    *itertools.product(["fork"], PHASES, ["terminal", "background"], ["SIGINT"]),
    ("spawn", "start", "parent", "SIGTERM"),
    ("spawn", "start", "terminal", "SIGINT"),
    ("spawn", "collective", "background", "SIGINT"),
    ("spawn", "collective", "parent", "SIGKILL"),
    ("torchrun", "collective", "parent", "SIGTERM"),
]
CASES = ALL_CASES if os.environ.get("ALL_FAULTS") else SOME_CASES  # ALL_FAULTS=1 takes a minute


@pytest.mark.timeout(300)
def test_no_process_outlives_a_run(tmp_path):
    waiting, running, rows, failures = list(enumerate(CASES)), {}, {}, []
    waiting.sort(key=lambda item: item[1][0] == "fork")  # the slow ones first
    while waiting or running:
        while waiting and len(running) < 8:
            number, what = waiting.pop(0)
            folder = tmp_path / str(number)
            folder.mkdir()
            seen = {"processes": 0, "seconds": 0.0, "code": None}
            running[number] = what, seen, case(*what, folder, seen)
        for number, (what, seen, steps) in list(running.items()):
            try:
                next(steps)
            except StopIteration as end:
                del running[number]
                name = "  ".join(f"{word:10}" for word in what)
                verdict = "ok" if end.value is None else "WRONG"
                rows[number] = f"{name}  {seen['processes']:9}  {seen['code']!s:9}  {seen['seconds']:4.1f} s  {verdict}"
                failures += [f"{name}: {end.value}"] if end.value else []
        time.sleep(0.05)
    print(f"{'start':10}  {'phase':10}  {'target':10}  {'signal':10}  processes  exit code  all gone after")
    print("\n".join(rows[number] for number in sorted(rows)))
    print(f"{len(CASES)} cases, {len(failures)} wrong")
    assert not failures, "\n".join(failures)


def test_nohup_is_honoured():
    code = (
        "import os, signal, time, distributed as dist\n"
        "def work(rank, n):\n"
        "    dist.init_process_group(rank, n); rank or os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.5)\n"
        "    return 'survived'\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "print(dist.launch(work, nproc=2))"
    )
    env = {**os.environ, "PYTHONPATH": os.path.dirname(dist.__file__)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert result.stdout.endswith("survived\n"), result.stderr
