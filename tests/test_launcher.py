"""launch: what it does when it is told to stop, when a process fails in an odd way, and in odd surroundings.

The matrix of signals is in test_faults.py.  Most programs are forked from one process that has imported torch.
"""

import argparse
import functools
import multiprocessing
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import ROOT, SEVERAL, forker, shell

import checkpoint
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
        pytest.param(50, [("SIGTERM", 0), ("SIGTERM", 1.2)], False, marks=pytest.mark.slow),  # out of patience
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
    end, came = launcher._Group.end, []

    def told_late(group):
        os.kill(os.getpid(), signal.SIGTERM)
        end(group)

    monkeypatch.setattr(launcher._Group, "end", told_late)
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


@pytest.mark.slow
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
        "    except (SystemExit, RuntimeError) as failure: print(failure)\n"
        + ("t = threading.Thread(target=main); t.start(); t.join()\n" if thread else "main()\n")
        + "print(signal.getsignal(signal.SIGCHLD) == handler)\n"
    )
    before = "import launcher; launcher._start_method = lambda job, n: ('fork', 1, job)"  # a thread would make it spawn
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    """As when the disk is full: the file can't be written."""
    code = (
        "def worker(rank, n):\n"
        "    if rank == 1:\n"
        "        os.mkdir(os.path.dirname(os.environ['DIST_STORE']) + '/report1.tmp')\n"
        "        raise KeyError('the cause')\n"
        "    time.sleep(20)\n"
        "dist.launch(worker, nproc=2)\n"
    )
    result = run(tmp_path, code)
    assert result.code == 1 and "KeyError: 'the cause'" in result.err
    how = "ended by os._exit(1), or by the error above, which it could not report (is the disk full?)"
    assert result.err.endswith(f"rank 1 of 2 failed first: {how}\n")


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
    try:
        dist.launch(fails, nproc=N)
    except (KeyError, SystemExit) as again:
        assert N == 1 or str(again).count("Traceback") == 1, again  # without that of the caller's exception
print(dist.launch(works, nproc=N))
"""


@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_launch_again_after_a_failure_and_inside_an_except_block(tmp_path, n):
    result = forker().run(program(tmp_path, AGAIN), n, path=[ROOT])
    assert [line for line in result.out.splitlines() if line.isdigit()] == [str(n)] * 2, result.err
    assert result.code == 0


IN_THREAD = """
import threading

def fails(local_rank, world_size):
    raise ValueError("the cause")

if __name__ == "__main__":
    thread = threading.Thread(target=dist.launch, args=(fails,), kwargs={"nproc": 2})
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_an_error_is_shown_if_launch_was_called_in_a_thread(tmp_path):
    result = run(tmp_path, IN_THREAD)
    assert "failed first" in result.err and "ValueError: the cause" in result.err


def test_what_a_failed_process_has_printed_is_not_lost(tmp_path):
    """It waits to be killed, with text in its buffers: standard output is no terminal here."""
    code = (
        "def worker(rank, n):\n"
        "    print('before the error', end='')\n"
        "    if rank == 1: raise KeyError('the cause')\n"
        "    time.sleep(20)\n"
        "dist.launch(worker, nproc=2)\n"
    )
    result = run(tmp_path, code)
    assert (result.code, result.out) == (1, "before the error") and "KeyError: 'the cause'" in result.err


@pytest.mark.slow
def test_after_a_failure_the_others_have_three_seconds(tmp_path):
    """Not the thirty of a run that was told to stop: nobody has asked for a checkpoint."""
    code = (
        "def slow(*_): time.sleep(60)\n"
        "def worker(rank, n):\n"
        "    signal.signal(signal.SIGTERM, slow)\n"
        "    if rank == 1:\n"
        "        time.sleep(0.5)\n"
        "        raise KeyError('the cause')\n"
        "    time.sleep(60)\n"
        "dist.launch(worker, nproc=2)\n"
    )
    before = time.monotonic()
    result = run(tmp_path, code)
    assert result.code == 1 and "KeyError: 'the cause'" in result.err
    assert time.monotonic() - before < 20


ODD_ENDS = {
    "os.kill(os.getpid(), signal.SIGRTMIN + 1)": "ended by signal 35",
    "return Bad(1)": r"its result can't be read: .*missing 1 required positional argument",
    "return threading.Lock()": "cannot pickle '_thread.lock' object",
}


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("os._exit, (3,)", r"ended by os\._exit\(3\) after its work"),
        ("os.kill, (os.getpid(), signal.SIGTERM)", "ended by SIGTERM after its work"),
        ("os.kill, (os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV after its work\nwhere each rank stands:(?s:.*)"),
    ],
)
def test_a_process_that_dies_while_python_tidies_up_has_failed(tmp_path, end, says):
    code = (
        "from multiprocessing import util\n"
        "def worker(rank, n):\n"
        f"    if rank == 1: util.Finalize(None, {end}, exitpriority=1)\n"
        "dist.launch(worker, nproc=2)\n"
        "print('never')\n"
    )
    result = run(tmp_path, code)
    assert (result.code, result.out) == (1, "")
    assert re.fullmatch(f"rank 1 of 2 failed first: {says}\n", result.err), result.err


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


@on_linux
def test_when_its_input_ends_the_guard_removes_the_folder_and_kills_its_group_alone(tmp_path):
    """What C code prints on a closed stderr may come out of the pipe that has got its number."""
    group = launcher._Group(2)
    group.folder = str(tmp_path / "folder")
    os.mkdir(group.folder)
    stranger = subprocess.Popen(["sleep", "30"], start_new_session=True)
    group.start_guard()
    ignores = "import signal, time; signal.signal(signal.SIGVTALRM, signal.SIG_IGN); print(flush=True); time.sleep(30)"
    members = [["sleep", "30"], [sys.executable, "-c", ignores]]
    join = {"preexec_fn": lambda: os.setpgid(0, group.guard), "stdout": subprocess.PIPE}
    members = [subprocess.Popen(command, **join) for command in members]
    members[1].stdout.readline()
    os.write(group.lifeline, f"[W1121 {stranger.pid} 0] a warning\n-{stranger.pid}\n\n".encode())
    time.sleep(0.1)
    assert os.path.exists(group.folder) and members[0].poll() is None
    os.close(group.lifeline)
    try:
        assert [member.wait(5) for member in members] == [-signal.SIGVTALRM, -signal.SIGKILL]
        assert os.waitstatus_to_exitcode(os.waitpid(group.guard, 0)[1]) == -signal.SIGKILL
        assert not os.listdir(tmp_path) and stranger.poll() is None
    finally:
        for process in (stranger, *members):
            process.kill()
            process.communicate()


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


def _folder(rank, n):
    return os.stat(os.path.dirname(os.environ["DIST_STORE"])).st_mode & 0o777


def test_the_folder_of_a_run_is_private():
    before = os.umask(0)
    try:
        assert dist.launch(_folder, nproc=2) == 0o700
    finally:
        os.umask(before)


def _fail_in_turn(rank, n):
    if rank < n - 1:  # they fail when the last one has reported
        wait_for(lambda: os.path.exists(f"{os.path.dirname(os.environ['DIST_STORE'])}/report{n - 1}"))
    raise KeyError(f"the error of rank {rank}")


@SEVERAL
def test_the_error_that_came_first_is_shown(n):
    with pytest.raises(SystemExit, match=f"rank {n - 1} of {n} failed first: (?s:.*)the error of rank {n - 1}"):
        dist.launch(_fail_in_turn, nproc=n)


def test_nohup_keeps_the_run(tmp_path):
    job = start(tmp_path, NOHUP, before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    wait_for(lambda: "ready" in job.files[0].read_text())
    os.kill(job.pid, signal.SIGHUP)
    assert job.wait() == (0, "ready\n2\n", "")


NOHUP = """
def worker(rank, n):
    if rank == 0: print("ready", flush=True)
    time.sleep(0.5)
    return n
print(dist.launch(worker, nproc=2))
"""

LOADS = """
from torch.utils.data import DataLoader
def worker(rank, n):
    return sum(len(batch) for batch in DataLoader(torch.ones(8, 2), batch_size=2, num_workers=2))
print(dist.launch(worker, nproc=2))
"""


@pytest.mark.parametrize("length", [60, 75])
def test_the_temporary_folder_may_have_a_name_as_long_as_for_python_itself(length):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # tmp_path may be longer
        long = Path(folder) / ("x" * (length - len(folder) - 1))
        long.mkdir()
        result = forker().run(program(Path(folder), LOADS), path=[ROOT], TMPDIR=long, timeout=20)
        assert (result.code, result.out) == (0, "8\n"), result.err
        assert not list(long.iterdir())


NON_ASCII = """
def worker(rank, n):
    dist.init_process_group()
    if rank == 0:
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(1)
    dist.all_reduce(torch.ones(1))
dist.launch(worker, nproc=2)
"""


@pytest.mark.slow
@on_linux
def test_the_table_shows_the_callers_line_in_a_folder_of_any_alphabet(tmp_path):
    folder = tmp_path / "J\xf6rg \u4e2d \U0001f600"
    folder.mkdir()
    for name in "distributed", "launcher", "rendezvous":
        shutil.copy(ROOT / f"{name}.py", folder)
    result = forker().run(program(folder, NON_ASCII), TMPDIR=tmp_path)
    assert re.search(rf"rank 1: {re.escape(str(folder))}/program.py:\d+, worker, in all_reduce\n", result.err), result


def test_numbers_that_only_look_like_numbers_are_named(monkeypatch):
    monkeypatch.setenv("NPROC", "\xb2")
    with pytest.raises(ValueError, match="^nproc .or NPROC. is \xb2: start at least 1 process"):
        dist.launch(_returns)
    monkeypatch.delenv("NPROC")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "abc")
    with pytest.raises(ValueError, match="^MASTER_PORT is abc: give a number, or unset it"):
        rendezvous.meeting_point(rendezvous.World())


def test_an_exit_with_a_tensor_is_one_error():
    with pytest.raises(SystemExit, match=r"failed first: it called sys.exit\(tensor\(\[143, +1\]\)\)$"):
        dist.launch(lambda rank, n: sys.exit(torch.tensor([143, 1])), nproc=2)


def _dies_unseen(rank, n, folder):
    """Rank 0 reports that it lost rank 1, which then dies a moment later."""
    if rank == 0:
        raise RuntimeError("Connection closed by peer")
    while not os.path.exists(f"{os.path.dirname(os.environ['DIST_STORE'])}/report0"):
        time.sleep(0.001)
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_that_shows_after_its_consequence_is_still_the_cause(tmp_path):
    with pytest.raises(SystemExit, match="rank 1 of 2 failed first: ended by SIGKILL"):
        dist.launch(_dies_unseen, str(tmp_path), nproc=2)


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
    """torch.cuda.is_available() starts CUDA; a library of the driver's name stands in for it here."""
    _make_driver(tmp_path)
    code = (
        "import torch\n"
        "x = (torch.ones(500, 500) + 1).sum()\n"  # starts threads that a forked process has not
        "import ctypes, distributed as dist, launcher\n"
        "print(launcher.fork_is_safe())\n"
        "def work(rank, n):\n"
        "    dist.init_process_group(rank, n)\n"
        "    return dist.all_reduce((torch.ones(500, 500)).sum()).item()\n"
        "print(dist.launch(work, nproc=2))\n"
        "ctypes.CDLL('libcuda.so.1').cuInit(0)\n"
        "try: dist.launch(work, nproc=2)\n"
        "except RuntimeError as problem: print(problem)\n"
    )
    # GOTO_NUM_THREADS: no threads of OpenBLAS, which would be seen instead
    result = shell("-c", code, PYTHONPATH=ROOT, GOTO_NUM_THREADS=1, OMP_NUM_THREADS=2, LD_LIBRARY_PATH=tmp_path)
    safe, _, total, refusal = result.out.splitlines()
    assert safe == "False" and total == "500000.0", result
    assert refusal.startswith("a new process can't find work, defined in a notebook or shell, and this"), result


def _main(file=None, module=None, **names):
    """A main module as Python makes it."""
    spec = SimpleNamespace(name=module) if module else None
    return SimpleNamespace(__spec__=spec, **({"__file__": file} if file else {}), **names)


@pytest.mark.parametrize(
    ("main", "in_main", "elsewhere"),
    [
        (_main(__file__), "spawn", "spawn"),  # python script.py
        (_main(__file__, "folder.module"), "spawn", "spawn"),  # python -m folder.module
        (_main("folder/__main__.py", "folder.__main__"), "fork", "spawn"),  # python -m folder: spawn skips __main__.py
        (_main("away.zip/__main__.py", "__main__"), "fork", "spawn"),  # python away.zip
        (_main("<stdin>"), "fork", "fork"),  # python - : spawn would look for that file
        (_main(), "fork", "spawn"),  # python -c, a notebook
    ],
)
@pytest.mark.parametrize("wrap", [lambda function: function, functools.partial], ids=["plain", "partial"])
@on_linux
def test_what_a_new_process_can_not_import_is_forked(wrap, main, in_main, elsewhere, monkeypatch):
    def work():
        pass

    work.__module__, work.__qualname__ = "__main__", "work"
    main.work = work
    monkeypatch.setattr(launcher, "fork_is_safe", lambda: False)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert launcher._start_method((wrap(work), (), None), 2)[0] == in_main
    assert launcher._start_method((wrap(_returns), (), None), 2)[0] == elsewhere
    local = lambda: None  # noqa: E731
    if in_main == "fork" and not main.__spec__:  # a shell or a notebook: there a function may have no file
        assert launcher._start_method((local, (), None), 2)[0] == "fork"
        return
    with pytest.raises(RuntimeError, match=r"^<lambda> and its arguments can't be sent to a new process .*pickle"):
        launcher._start_method((local, (), None), 2)
    with pytest.raises(RuntimeError, match=r"^_returns and its arguments can't be sent .*Lock objects should only be"):
        launcher._start_method((_returns, (multiprocessing.Lock(),), None), 2)


DRIVER = """
static int started;
int cuInit(unsigned flags) { started = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return started ? 0 : 3; }
"""


def _make_driver(folder):
    """A CUDA driver that can be loaded and started, and nothing else."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    (folder / "driver.c").write_text(DRIVER)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(command, cwd=folder, check=True)


LOADS_DRIVER = """
import ctypes, torch, launcher
print(launcher.fork_is_safe())
driver = ctypes.CDLL("libcuda.so.1")
print(launcher.fork_is_safe())
driver.cuInit(0)
print(launcher.fork_is_safe())
"""


@pytest.mark.slow
@on_linux
def test_a_driver_that_is_loaded_does_not_keep_a_process_from_being_forked_but_cuda_does(tmp_path):
    """libcublasLt loads it as soon as torch is imported."""
    _make_driver(tmp_path)
    (tmp_path / "program.py").write_text(LOADS_DRIVER)
    result = shell(tmp_path / "program.py", PYTHONPATH=ROOT, LD_LIBRARY_PATH=tmp_path, OPENBLAS_NUM_THREADS=1)
    assert result.out.split() == ["True", "True", "False"], result.err


SPAWNS = """
import threading
class Model(torch.nn.Linear): pass
def train(rank, n, model, shared):
    for tensor in (model.weight, shared):
        tensor.data += rank + 1
    time.sleep(0.2)
    return model.weight.item(), shared.item()
if __name__ == "__main__":
    model = Model(1, 1)
    torch.nn.init.ones_(model.weight)
    shared = torch.ones(1).share_memory_()
    done = threading.Event()
    threading.Thread(target=done.wait).start()  # so that launch spawns
    print(dist.launch(train, model, shared, nproc=2), model.weight.item(), shared.item())
    done.set()
"""


@pytest.mark.slow
def test_a_spawned_process_gets_a_copy_of_a_model(tmp_path):
    result = shell(program(tmp_path, SPAWNS), PYTHONPATH=ROOT)
    assert result.out == "(2.0, 2.0) 1.0 1.0\n", result.err


@pytest.mark.slow
@on_linux
def test_a_package_whose_main_module_calls_launch_runs_and_a_failed_import_is_named(tmp_path):
    (tmp_path / "package").mkdir()
    thread = "import threading\ndone = threading.Event()\nthreading.Thread(target=done.wait).start()\n"
    calls = "try: print(dist.launch(work, nproc=2))\nfinally: done.set()\n"
    program(tmp_path / "package", f"{thread}def work(rank, n): return n\n{calls}", "__main__.py")
    result = shell("-m", "package", cwd=tmp_path, PYTHONPATH=ROOT)
    assert (result.code, result.out) == (0, "2\n"), result.err
    imports = "def work(rank, n): return n\nif __name__ != '__main__': raise KeyError('the cause')\n"
    result = shell(program(tmp_path, f"{imports}{thread}{calls}"), PYTHONPATH=ROOT)
    assert result.code == 1 and "KeyError: 'the cause'" in result.err
    assert re.search(r"rank \d of 2 failed first: ended before its work began \(its own error is above\)\n", result.err)


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
def test_the_callers_sigterm_is_as_it_was_before_preemption(n):
    def worker(rank, world_size):
        dist.init_process_group()
        stop = checkpoint.Preemption()
        assert signal.getsignal(signal.SIGTERM) != before
        os.kill(os.getpid(), signal.SIGTERM)
        return bool(stop)

    before = signal.getsignal(signal.SIGTERM)
    assert dist.launch(worker, nproc=n)
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
@SEVERAL
def test_nothing_can_be_reached_from_outside(n):
    found, interfaces = dist.launch(_open_sockets, nproc=n)
    assert interfaces == list(rendezvous.LOOPBACK.values())  # whatever the host's name leads to
    assert len(found) >= n  # gloo listens, in each process
    assert set(found) <= LOOPBACK
