"""launch: what it does when it is told to stop, when a process fails in an odd way, and in odd surroundings.

The matrix of signals is in test_faults.py.  Most programs are forked from one process that has imported torch.
"""

import argparse
import functools
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import ROOT, forker, shell

import distributed as dist
import launcher
import rendezvous

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def program(tmp_path, code, name="program.py"):
    path = tmp_path / name
    path.write_text("import os, signal, sys, time\nimport torch\nimport distributed as dist\n" + code)
    return path


def start(tmp_path, code, before="", **environment):
    """The program, forked, with a folder of its own for temporary files."""
    (tmp_path / "tmp").mkdir()
    environment["TMPDIR"] = str(tmp_path / "tmp")
    return forker().start(program(tmp_path, code), before=before, path=[ROOT], **environment)


def run(tmp_path, code, before="", **environment):
    result = start(tmp_path, code, before, **environment).wait()
    assert not list((tmp_path / "tmp").iterdir())  # nothing is left there, whatever happened
    return result


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stat(pid):
    """The state of a process: R, S, T (stopped), Z (zombie) ...; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------------- told to stop

# The grace after a failure is short here: saving takes longer than that.
SAVES = """
import rendezvous
rendezvous.LIMITS["DIST_GRACE"] = 0.5

def save(number, frame):
    time.sleep(SECONDS)
    print("saved", flush=True)
    sys.exit(143)

def worker(rank, n):
    if rank == 1:
        signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
    time.sleep(60)

dist.launch(worker, nproc=2)
"""


@pytest.mark.parametrize(
    ("seconds", "signals", "saved"),
    [
        pytest.param(1.0, [("SIGTERM", 0)], True, marks=pytest.mark.slow),
        (1.0, [("SIGTERM", 0), ("SIGTERM", 0.001)], True),  # GNU timeout signals its child, then its group
        pytest.param(1.0, [("SIGHUP", 0), ("SIGHUP", 0.001)], True, marks=pytest.mark.slow),  # a closing terminal
        pytest.param(2.0, [("SIGTERM", 0), ("SIGUSR1", 1.2)], True, marks=pytest.mark.slow),  # only a question
        (50, [("SIGTERM", 0), ("SIGTERM", 1.2)], False),  # somebody has lost patience
    ],
)
def test_a_run_that_is_told_to_stop_has_time_to_save(tmp_path, seconds, signals, saved):
    job = start(tmp_path, SAVES.replace("SECONDS", str(seconds)))
    wait_for(lambda: job.files[0].read_text().count("ready\n") == 2)
    before = time.monotonic()
    for name, pause in signals:
        time.sleep(pause)
        os.kill(job.pid, getattr(signal, name))
    result = job.wait()
    assert result.code == 128 + getattr(signal, signals[0][0])
    assert ("saved" in result.out) == saved
    assert time.monotonic() - before < 20  # not the 30 s that it may take, nor the 50 s that it would
    first, *answer = result.err.splitlines()
    assert first == f"launch: {signals[0][0]}: ending 2 processes"
    if "SIGUSR1" in dict(signals):
        assert re.fullmatch(r"where each rank stands:;  rank 0: .*, worker;  rank 1: .*, save", ";".join(answer))
    else:
        assert not answer
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_stderr_that_is_full_loses_no_checkpoint(tmp_path):
    """As a closed terminal; SIGUSR1's table can't be printed either."""
    job = start(tmp_path, "sys.stderr = open('/dev/full', 'w')\n" + SAVES.replace("SECONDS", "1.0"))
    wait_for(lambda: job.files[0].read_text().count("ready\n") == 2)
    os.kill(job.pid, signal.SIGUSR1)
    time.sleep(0.6)
    os.kill(job.pid, signal.SIGTERM)
    result = job.wait()
    assert result.code == 143 and "saved" in result.out
    assert not list((tmp_path / "tmp").iterdir())


def test_an_error_while_saving_is_shown(tmp_path):
    job = start(tmp_path, SAVES.replace("SECONDS", "0.1").replace("sys.exit(143)", "raise OSError('the disk is full')"))
    wait_for(lambda: job.files[0].read_text().count("ready\n") == 2)
    os.kill(job.pid, signal.SIGTERM)
    result = job.wait()
    assert result.code == 143
    assert re.search(r"\nrank 1 of 2 failed while it was ending: (?s:.*)OSError: the disk is full\n$", result.err)


@pytest.mark.slow
@on_linux
def test_the_time_to_save_stands_still_while_all_are_stopped(tmp_path):
    (tmp_path / "tmp").mkdir()
    # Half a second of running: what sleeps through a stop wakes up at its end.
    path = program(tmp_path, SAVES.replace("    time.sleep(SECONDS)", "    for _ in range(10): time.sleep(0.05)"))
    job = forker().start(path, before="os.setpgid(0, 0)", path=[ROOT], DIST_GRACE="1.5", TMPDIR=tmp_path / "tmp")
    wait_for(lambda: job.files[0].read_text().count("ready\n") == 2)
    os.kill(job.pid, signal.SIGTERM)
    time.sleep(0.2)
    os.killpg(job.pid, signal.SIGTSTP)
    wait_for(lambda: stat(job.pid) == "T")
    time.sleep(1.5)
    os.killpg(job.pid, signal.SIGCONT)
    result = job.wait()
    assert result.code == 143 and "saved" in result.out


@pytest.mark.parametrize(("n", "name"), [(2, "SIGTERM"), (3, "SIGTERM"), (2, "SIGINT"), (2, "SIGHUP")])
def test_a_process_that_was_told_to_stop_and_has_saved_ends_the_run_with_its_code(tmp_path, n, name):
    expected = 128 + getattr(signal, name)
    code = (
        "def worker(rank, n):\n"
        "    dist.init_process_group()\n"
        "    if rank == 1:\n"
        f"        sys.exit({expected})\n"
        "    dist.barrier()\n"
        f"dist.launch(worker, nproc={n})\n"
    )
    result = run(tmp_path, code, DIST_GRACE="1")  # rank 0 handles no signal inside the collective
    assert (result.code, result.err) == (expected, f"launch: {name}: ending {n} processes\n")


def test_ctrl_c_of_a_single_process_is_130_without_a_traceback(tmp_path):
    result = run(tmp_path, "def worker(rank, n): raise KeyboardInterrupt\ndist.launch(worker, nproc=1)\n")
    assert result == (130, "", "")


def _returns(rank, n):
    return n


def test_a_stop_that_comes_while_a_good_run_ends_reaches_the_caller(monkeypatch):
    terminate, came = launcher._Run.terminate, []

    def told_late(run):
        os.kill(os.getpid(), signal.SIGTERM)
        terminate(run)

    monkeypatch.setattr(launcher._Run, "terminate", told_late)
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        assert dist.launch(_returns, nproc=2) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


@on_linux
def test_ctrl_z_stops_all_and_fg_goes_on(tmp_path):
    code = (
        "def worker(rank, n):\n"
        "    open(f'{sys.argv[1]}/{rank}', 'w').write(str(os.getpid()))\n"
        "    time.sleep(0.5)\n"
        "    dist.init_process_group()\n"
        "    return dist.all_reduce(torch.tensor(rank)).item()\n"
        "print(dist.launch(worker, nproc=3))\n"
    )
    folder = tmp_path / "pids"
    folder.mkdir()
    # A group of its own, as a shell with job control makes one.
    job = forker().start(program(tmp_path, code), folder, before="os.setpgid(0, 0)", path=[ROOT])
    wait_for(lambda: len([file for file in folder.iterdir() if file.read_text()]) == 3)
    pids = [job.pid, *(int(file.read_text()) for file in folder.iterdir())]
    os.killpg(job.pid, signal.SIGTSTP)
    wait_for(lambda: all(stat(pid) == "T" for pid in pids))
    time.sleep(0.6)
    assert all(stat(pid) == "T" for pid in pids)
    os.killpg(job.pid, signal.SIGCONT)
    assert job.wait()[:2] == (0, "distributed: 3 processes, gloo, cpu\n3\n")


# ----------------------------------------------------------------------------------------------------------- failures


NO_LIMITS = [(name, value) for name in rendezvous.LIMITS for value in ("3s", "-1", "nan", "inf")]


@pytest.mark.parametrize(("name", "value"), [*NO_LIMITS, ("DIST_TIMEOUT", "0"), ("DIST_INIT_TIMEOUT", "0")])
def test_a_limit_that_is_no_number_is_refused_before_anything_starts(name, value, monkeypatch, tmp_path):
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for n in 1, 2:
        with pytest.raises(ValueError, match=rf"^{name} is {value}: give a number of seconds \({name}=\d+\), or unset"):
            dist.launch(os._exit, nproc=n)
    assert not list(tmp_path.iterdir())


def test_a_wrong_limit_is_one_line_of_a_script():
    result = forker().run("min_DDP.py", DIST_GRACE="3s")
    assert result.code == 2 and result.out == ""
    assert result.err.splitlines()[-1].endswith(
        "DIST_GRACE is 3s: give a number of seconds (DIST_GRACE=3), or unset it"
    )


@pytest.mark.parametrize("reaps", ["signal.SIG_IGN", "reap"])
@pytest.mark.parametrize("thread", [False, True])
def test_children_that_the_caller_does_not_wait_for(tmp_path, reaps, thread):
    """SIGCHLD ignored: the kernel forgets how a child has ended.  In a thread `launch` can't change that."""
    code = (
        "import threading\n"
        "def reap(*_):\n"
        "    try: os.waitpid(-1, os.WNOHANG)\n"
        "    except ChildProcessError: pass\n"
        f"signal.signal(signal.SIGCHLD, {reaps})\n"
        "handler = signal.getsignal(signal.SIGCHLD)\n"
        "def good(rank, n): return n\n"
        "def bad(rank, n):\n"
        "    if rank == 1: os._exit(3)\n"
        "    time.sleep(20)\n"
        "def main():\n"
        "    print(dist.launch(good, nproc=2), flush=True)\n"
        "    try: dist.launch(bad, nproc=2)\n"
        "    except SystemExit as failure: print(failure)\n"
        + ("t = threading.Thread(target=main); t.start(); t.join()\n" if thread else "main()\n")
        + "print(signal.getsignal(signal.SIGCHLD) == handler)\n"
    )
    before = "import launcher; launcher._start_method = lambda *_: ('fork', 1)"  # a thread would make it spawn
    result = run(tmp_path, code, before=before)
    how = r"(by os\._exit\(3\)|and nobody knows how)" if thread else r"by os\._exit\(3\)"
    assert re.fullmatch(rf"2\nrank 1 of 2 failed first: ended {how}\nTrue\n", result.out), result


ABORTS = """
import faulthandler
faulthandler.enable()
def deep(): DIE
def worker(rank, n):
    dist.init_process_group()
    if rank == 1: deep()
    dist.barrier()
dist.launch(worker, nproc=2)
"""


@pytest.mark.parametrize(
    ("die", "name"), [("os.abort()", "SIGABRT"), ("import ctypes; ctypes.string_at(0)", "SIGSEGV")]
)
def test_a_crash_says_where_and_prints_nothing_else(tmp_path, die, name):
    result = run(tmp_path, ABORTS.replace("DIE", die))
    first, title, rank0, rank1 = result.err.splitlines()
    assert (first, title) == (f"rank 1 of 2 failed first: ended by {name}", "where each rank stands:")
    assert re.fullmatch(r"  rank 0: .*program\.py:\d+, worker, in barrier", rank0)
    assert re.fullmatch(r"  rank 1: .*program\.py:\d+, deep(, in string_at)?", rank1)


STDOUT = {  # as the shell makes it, before Python starts
    "> /dev/full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    ">&-": "os.close(1); sys.stdout = None",
    "| true": "gone, pipe = os.pipe(); os.close(gone); os.dup2(pipe, 1); os.close(pipe)",
}


@on_linux
@pytest.mark.parametrize("how", STDOUT)
def test_a_full_or_closed_stdout_hides_no_error(tmp_path, how):
    code = (
        "def worker(rank, n):\n"
        "    dist.init_process_group()\n"
        "    print('x' * 100, end='')\n"
        "    if rank == 1: raise KeyError('the cause')\n"
        "    dist.barrier()\n"
        "dist.launch(worker, nproc=2)\n"
    )
    result = run(tmp_path, code, before=STDOUT[how])
    assert re.search(
        r"rank [01] of 2 failed first: (?s:.*)(KeyError: 'the cause'|BrokenPipe|No space left)", result.err
    )
    assert "the cause" in result.err or how != ">&-"
    assert result.code == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_is_lost_is_an_error_and_the_cause_comes_first(tmp_path):
    code = (
        "sys.stdout = open('/dev/full', 'w')\n"
        "def worker(rank, n):\n"
        "    print('lost')\n"
        "    if sys.argv[1:]: raise KeyError('the cause')\n"
        "dist.launch(worker, nproc=2)\n"
    )
    for args, says in (["cause"], "KeyError: 'the cause'"), ([], "No space left on device"):
        result = forker().run(program(tmp_path, code), *args, path=[ROOT])
        assert result.code == 1
        assert re.match(r"rank [01] of 2 failed first: ", result.err)
        assert says in result.err


def test_a_report_that_cannot_be_written_hides_no_error(tmp_path):
    """As when the disk is full."""
    code = (
        "import shutil\n"
        "def worker(rank, n):\n"
        "    if rank == 1:\n"
        "        shutil.rmtree(os.path.dirname(os.environ['DIST_STORE']))\n"
        "        raise KeyError('the cause')\n"
        "    time.sleep(20)\n"
        "dist.launch(worker, nproc=2)\n"
    )
    result = run(tmp_path, code)
    assert result.code == 1 and "KeyError: 'the cause'" in result.err
    assert result.err.endswith("rank 1 of 2 failed first: ended by os._exit(1)\n")


def test_the_callers_own_faulthandler_stays(tmp_path):
    code = (
        "import faulthandler\n"
        "file = open(sys.argv[1], 'w')\n"
        "faulthandler.register(signal.SIGUSR1, file=file)\n"
        "def worker(rank, n):\n"
        "    if rank == 0: os.kill(os.getpid(), signal.SIGUSR1)\n"  # answers in the folder of the run
        "    return n\n"
        "assert dist.launch(worker, nproc=2) == 2\n"
        "assert not open(sys.argv[1]).read()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    result = forker().run(program(tmp_path, code), tmp_path / "dump", path=[ROOT])
    assert (result.code, result.err) == (0, "")
    assert "most recent call first" in (tmp_path / "dump").read_text()


def test_the_callers_event_loop_hears_no_signal_of_a_process(tmp_path):
    """asyncio has a descriptor to which Python writes each signal; a forked process shares it."""
    code = (
        "import socket\n"
        "ours, pythons = socket.socketpair()\n"
        "ours.setblocking(False); pythons.setblocking(False)\n"
        "signal.set_wakeup_fd(pythons.fileno())\n"
        "def worker(rank, n):\n"
        "    signal.signal(signal.SIGUSR2, lambda *_: None)\n"
        "    os.kill(os.getpid(), signal.SIGUSR2)\n"
        "    return n\n"
        "dist.launch(worker, nproc=2)\n"
        "try: print(ours.recv(10))\n"
        "except BlockingIOError: print('silence')\n"
    )
    result = run(tmp_path, code)
    assert result.out == "silence\n", result


AGAIN = """
def fails(rank, n):
    dist.init_process_group()
    raise KeyError("the cause")
def works(rank, n):
    dist.init_process_group()
    value = dist.all_reduce(torch.tensor(1)).item()
    dist.cleanup()
    assert not torch.distributed.is_initialized()
    return value
N = int(sys.argv[1])
try:
    dist.launch(fails, nproc=N)
except (KeyError, SystemExit):
    print(dist.launch(works, nproc=N))
print(dist.launch(works, nproc=N))
"""


@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_launch_again_after_a_failure_and_inside_an_except_block(tmp_path, n):
    result = forker().run(program(tmp_path, AGAIN), n, path=[ROOT])
    assert [line for line in result.out.splitlines() if line.isdigit()] == [str(n)] * 2, result.err
    assert result.code == 0


ODD_ENDS = {
    "os.kill(os.getpid(), signal.SIGRTMIN + 1)": "ended by signal 35",
    "return Bad(1)": r"its result can't be read: .*missing 1 required positional argument",
    "return threading.Lock()": "cannot pickle '_thread.lock' object",
}


@on_linux
@pytest.mark.parametrize("end", ODD_ENDS)
def test_odd_ends_are_explained(tmp_path, end):
    code = (
        "import threading\n"
        "class Bad(Exception):\n"
        "    def __init__(self, a, *, b=None):\n"
        "        super().__init__() if b or a else None\n"
        "def worker(rank, n):\n"
        f"    if rank == 0: {end}\n"
        "    time.sleep(1)\n"
        "dist.launch(worker, nproc=2)\n"
    )
    result = run(tmp_path, code)
    assert result.code == 1
    assert re.match(rf"rank 0 of 2 failed first: (?s:.*){ODD_ENDS[end]}", result.err), result.err


@on_linux
def test_a_process_killed_while_it_reports_is_the_cause(tmp_path):
    """It has a child, which would hold a pipe open; and its result is large."""
    code = (
        "import subprocess, threading\n"
        "def worker(rank, n):\n"
        "    if rank == 0:\n"
        "        subprocess.Popen(['sleep', '30'], close_fds=False)\n"
        "        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "        return [b'x' * 1000] * 3 * 10**7\n"
        "    time.sleep(30)\n"
        "dist.launch(worker, nproc=2)\n"
    )
    before = time.monotonic()
    result = run(tmp_path, code)
    assert time.monotonic() - before < 25  # the others would sleep for 30
    assert result.err.startswith("rank 0 of 2 failed first: ended by SIGKILL (by hand, or by the kernel")


def test_the_guard_takes_nothing_else_for_a_process(tmp_path):
    """What C code prints on a closed stderr may come out of the pipe that has got its number."""
    victim = subprocess.Popen(["sleep", "30"], start_new_session=True)
    folder = tmp_path / "folder"
    folder.mkdir()
    guarded = subprocess.Popen(["sleep", "30"], start_new_session=True)
    lines = f"[W1121 {victim.pid} 0] a warning\n-{victim.pid}\n 1 {victim.pid}\n\n{guarded.pid}\n"
    environment = {"PATH": "/nonexistent"}
    subprocess.run(["/bin/sh", "-c", launcher._GUARD, folder], input=lines, text=True, env=environment, timeout=10)
    try:
        assert guarded.wait(5) == -signal.SIGKILL
        assert victim.poll() is None and not folder.exists()
    finally:
        victim.kill()
        victim.wait()


def _fails(rank, n):
    raise KeyError("the cause")


@on_linux
def test_launch_leaves_no_file_open():
    dist.launch(_returns, nproc=2)  # the first may open what stays open
    before = set(os.listdir("/proc/self/fd"))
    dist.launch(_returns, nproc=3)
    with pytest.raises(SystemExit):
        dist.launch(_fails, nproc=2)
    assert set(os.listdir("/proc/self/fd")) <= before


# ------------------------------------------------------------------------------------------- notebooks, shells, forks


@pytest.mark.slow
def test_run_needs_no_distributed_py_in_spawned_processes(monkeypatch):
    monkeypatch.setattr(launcher, "fork_is_safe", lambda: False)
    assert launcher.run(_returns, nproc=2) == 2  # its arguments, with their defaults, can be pickled


def _interrupts(rank, n):
    os.kill(os.getppid(), signal.SIGINT)


def test_in_a_shell_an_error_is_no_exit(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(RuntimeError, match="rank [01] of 2 failed first: (?s:.*)KeyError: 'the cause'"):
        dist.launch(_fails, nproc=2)
    with pytest.raises(KeyboardInterrupt):
        dist.launch(_interrupts, nproc=2)


@pytest.mark.slow
def test_pythons_own_shell_survives_an_error(tmp_path):
    lines = [
        "import signal, os, distributed as dist, torch",
        "def fails(rank, n): raise KeyError('the cause')",
        "",
        "dist.launch(fails, nproc=2)",
        "def interrupts(rank, n): os.kill(os.getppid(), signal.SIGINT)",
        "",
        "dist.launch(interrupts, nproc=2)",
        "print('still', 'here')",
    ]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    wrapper = f"import subprocess, sys; subprocess.run([sys.executable, '-i'], stdin=open({str(tmp_path / 'lines')!r}))"
    result = shell("-c", wrapper, PYTHONPATH=ROOT)
    assert "still here" in result.out, result.err
    assert "RuntimeError: rank" in result.err and "KeyError: 'the cause'" in result.err
    assert "KeyboardInterrupt" in result.err


POOL = """
import torch, distributed as dist, launcher
print(launcher.fork_is_safe())
def work(rank, n): return n
dist.launch(work, nproc=2)  # ends the threads of OpenBLAS
(torch.ones(500, 500) + 1).sum()  # starts as many others
print(launcher.fork_is_safe())
"""


@pytest.mark.slow
@on_linux
def test_a_pool_of_threads_that_was_made_between_two_runs_is_noticed(tmp_path):
    path = tmp_path / "pool.py"
    path.write_text(POOL)
    result = shell(path, PYTHONPATH=ROOT, OMP_NUM_THREADS=2)
    assert result.out.splitlines() == ["True", "False"], result.err


@pytest.mark.slow
@on_linux
def test_functions_of_a_shell_are_forked_after_torch_was_used_and_refused_once_cuda_was_used(tmp_path):
    """torch.cuda.is_available() loads the driver; any library of that name stands in for it here."""
    code = (
        "import torch\n"
        "x = (torch.ones(500, 500) + 1).sum()\n"  # starts threads that a forked process has not
        "import ctypes, _ctypes, shutil, sys, distributed as dist, launcher\n"
        "print(launcher.fork_is_safe())\n"
        f"fake = {str(tmp_path / 'libcuda.so.1')!r}\n"
        "shutil.copy(_ctypes.__file__ if hasattr(_ctypes, '__file__') else sys.executable, fake)\n"
        "def work(rank, n):\n"
        "    dist.init_process_group(rank, n)\n"
        "    return dist.all_reduce((torch.ones(500, 500)).sum()).item()\n"
        "print(dist.launch(work, nproc=2))\n"
        "handle = ctypes.CDLL(fake)\n"
        "try: dist.launch(work, nproc=2)\n"
        "except RuntimeError as problem: print(problem)\n"
    )
    # GOTO_NUM_THREADS: no threads of OpenBLAS, which would be seen instead
    result = shell("-c", code, PYTHONPATH=ROOT, GOTO_NUM_THREADS=1, OMP_NUM_THREADS=2)
    safe, _, total, refusal = result.out.splitlines()
    assert safe == "False" and total == "500000.0", result
    assert refusal.startswith("a new process can't find work, defined in a notebook or shell, and this"), result


@pytest.mark.parametrize(
    ("main", "defined_in", "expected"),
    [
        ({"__file__": __file__, "__spec__": None}, "__main__", "spawn"),  # python script.py
        ({"__file__": "<stdin>", "__spec__": None}, "elsewhere", "fork"),  # python - : spawn would look for that file
        ({"__spec__": None}, "elsewhere", "spawn"),  # python -c, a notebook
        ({"__spec__": None}, "__main__", "fork"),
        ({"__file__": "away.zip/__main__.py", "__spec__": "a module"}, "__main__", "spawn"),  # python away.zip
    ],
)
@pytest.mark.parametrize("wrap", [lambda function: function, functools.partial], ids=["plain", "partial"])
@on_linux
def test_what_a_new_process_can_not_import_is_forked(wrap, main, defined_in, expected, monkeypatch):
    def function():
        pass

    function.__module__ = defined_in
    monkeypatch.setattr(launcher, "fork_is_safe", lambda: False)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**main))
    assert launcher._start_method(wrap(function), 2)[0] == expected


def _prints(rank, n):
    os.write(1, f"rank {rank} prints\n".encode())


@on_linux
def test_a_terminal_that_stops_background_processes_that_print_does_not_stop_the_ranks():
    pid, terminal = pty.fork()
    if pid == 0:  # in a session of its own, with this terminal
        settings = termios.tcgetattr(0)
        settings[3] |= termios.TOSTOP  # `stty tostop`
        termios.tcsetattr(0, termios.TCSANOW, settings)
        dist.launch(_prints, nproc=2)
        os._exit(0)
    try:
        wait_for(lambda: os.waitpid(pid, os.WNOHANG) == (pid, 0))
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise
    assert sorted(os.read(terminal, 1000).decode().split("\r\n")) == ["", "rank 0 prints", "rank 1 prints"]


@pytest.mark.parametrize(("code", "error"), [("", "''"), ([], "[]"), (3, "3"), ("why", ""), (None, None), (0, None)])
def test_an_exit_is_a_failure_as_python_has_it(code, error):
    def worker(rank, n):
        sys.exit(code)

    if error is None:
        assert dist.launch(worker, nproc=2) is None
        return
    says = f"it called sys.exit({error})" if error else code
    with pytest.raises(SystemExit, match=f"failed first: {re.escape(says)}"):
        dist.launch(worker, nproc=2)


@pytest.mark.parametrize("n", [1, 2])
def test_the_callers_sigterm_is_as_it_was(n):
    def worker(rank, world_size):
        signal.signal(signal.SIGTERM, lambda *_: None)

    before = signal.getsignal(signal.SIGTERM)
    dist.launch(worker, nproc=n)
    assert signal.getsignal(signal.SIGTERM) == before


def test_parse_args_knows_no_batch_size_of_none(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int)
    assert dist.parse_args(parser).batch_size is None


# ------------------------------------------------------------------------------------------------ what can be reached


def _listening(pids):
    """The addresses, as /proc has them, on which these processes listen."""
    inodes = set()
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            inodes |= set(re.findall(r"socket:\[(\d+)\]", target))
    found = []
    for table in "tcp", "tcp6":
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def _open_sockets(rank, n):
    dist.init_process_group()
    dist.all_reduce(torch.ones(1))
    pids = torch.cat(dist.gather(torch.tensor([os.getpid()]))).tolist()
    found = _listening([os.getppid(), *pids]) if rank == 0 else []
    dist.barrier()
    return found, [os.environ[f"{backend}_SOCKET_IFNAME"] for backend in ("GLOO", "NCCL")]


@on_linux
@pytest.mark.parametrize("n", [2, 3])
def test_nothing_can_be_reached_from_outside(n):
    found, interfaces = dist.launch(_open_sockets, nproc=n)
    assert interfaces == [rendezvous.LOOPBACK] * 2  # whatever the host's name leads to
    assert len(found) >= n  # gloo listens, in each process
    assert set(found) <= LOOPBACK
