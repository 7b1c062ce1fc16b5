"""launcher.py: P1, P3 to P5 and P7 of its promises.  Real processes, real faults; what is waited for is an event."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from world import ENVIRONMENT, ROOT, forker, gone, shell, wait_for

import distributed as dist
import launcher

pytestmark = pytest.mark.timeout(180)
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def program(tmp_path):
    """program(code): a file in a folder of its own, where its processes live; TMPDIR is another one."""

    def written(code, name="program.py"):
        (tmp_path / "tmp").mkdir(exist_ok=True)
        (tmp_path / "cwd").mkdir(exist_ok=True)
        file = tmp_path / "cwd" / name
        file.write_text(f"import os, signal, sys, time\nimport torch\nimport distributed as dist\n{code}")
        return file

    return written


def start(file, *args, **environment):
    """Forked from a process that has imported torch: as `python file args`."""
    folder = file.parent
    return forker().start(file, *args, cwd=folder, path=[ROOT], TMPDIR=folder.with_name("tmp"), **environment)


def run(file, *args, **environment):
    done = start(file, *args, **environment).wait()
    assert_nothing_left(file)
    return done


def assert_nothing_left(file, in_tmp=0):
    """No process that stands in the program's folder, and nothing in its temporary folder."""
    if sys.platform == "linux":
        wait_for(lambda: not processes_in(file.parent))
    assert len(list(file.parent.with_name("tmp").iterdir())) == in_tmp


def processes_in(folder):
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "cwd") == str(folder) and not gone(path.name):
                found.append(int(path.name))
        except OSError:
            continue
    return found


# ----------------------------------------------------------------------------------------------------- P3: the faults

FAULTS = """
def fails(what):
    if what == "raise": raise ValueError("mine")
    if what == "os._exit": os._exit(3)
    if what == "SIGKILL": os.kill(os.getpid(), signal.SIGKILL)
    if what == "SIGSEGV": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "sys.exit": sys.exit("a word of mine")
    if what == "hangs": time.sleep(1000)

def waits(loader):
    for batch in loader:
        dist.all_reduce(batch)

def worker(rank, n, what, workers):
    if what == "missing" and rank == 1: time.sleep(1000)
    dist.init_process_group()
    loader = [torch.ones(1)] * 100000
    if workers:
        from torch.utils.data import DataLoader
        loader = DataLoader(loader, 1, num_workers=2, multiprocessing_context=workers)
    batches = iter(loader)
    dist.all_reduce(next(batches))
    open(f"ready{rank}", "w").close()
    if rank == 1:
        fails(what)
    if rank != 1 or what == "stays":
        waits(batches)

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever nohup or a background job has ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    what, method, workers = sys.argv[1:]
    if method == "spawn":
        import launcher
        launcher.fork_is_safe = lambda: False
    dist.launch(worker, what, workers, nproc=3)
"""
FIRST = "rank 1 of 3 failed first: "
ERRORS = {
    "raise": FIRST + r"\s+Traceback(?s:.*), in fails\n(?s:.*)\nValueError: mine\n",
    "os._exit": FIRST + r"ended with exit code 3, by os\._exit or an error above\n",
    "SIGKILL": FIRST + "ended by SIGKILL ",
    "SIGSEGV": FIRST + "ended by SIGSEGV\n(?s:.*)  rank 1: .*, fails\n",
    "sys.exit": FIRST + "a word of mine\n",
    "returns": r"rank [02] of 3 failed first: it lost its connection after rank 1 had finished\. All ranks must call",
    "hangs": r"rank [02] of 3 failed first: (?s:.*)\n  rank 0: .*, waits, in all_reduce\n  rank 1: .*, fails\n",
    "missing": r"rank [02] of 3 failed first: (?s:.*)TimeoutError: init_process_group: rank 1 of 3 did not come",
}
CASES = [(what, "fork", "") for what in ERRORS] + [("raise", "spawn", ""), ("SIGKILL", "spawn", "")]
CASES += [(what, "fork", workers) for what in ("raise", "SIGKILL") for workers in ("fork", "forkserver")]


@pytest.mark.parametrize(("what", "method", "workers"), CASES)
def test_the_error_is_that_of_the_rank_that_failed_first_and_nothing_is_left(program, what, method, workers):
    file = program(FAULTS)
    done = run(file, what, method, workers, DIST_TIMEOUT=5 if what in ("hangs", "missing") else None)
    assert done.code == 1 and re.search(ERRORS[what], done.err), done.err
    assert done.err.count("failed first") == 1
    assert "Traceback" not in done.err.replace("Traceback", "", 1) or what in ("hangs", "missing"), done.err


STOPS = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "SIGKILL": -9}
STOP_CASES = [(name, "fork", "") for name in STOPS] + [("SIGTERM", "spawn", ""), ("SIGKILL", "spawn", "")]
STOP_CASES += [(name, "fork", workers) for name in ("SIGTERM", "SIGKILL") for workers in ("fork", "forkserver")]


@needs_proc
@pytest.mark.parametrize(("name", "method", "workers"), STOP_CASES)
def test_a_signal_to_the_launching_process_ends_all_quietly(program, name, method, workers):
    file = program(FAULTS)
    job = start(file, "stays", method, workers)
    wait_for(lambda: all((file.parent / f"ready{rank}").exists() for rank in range(3)))
    os.kill(job.pid, signal.Signals[name])
    done = job.wait()
    assert (done.code, done.err) == (STOPS[name], ""), done.err
    assert_nothing_left(file, in_tmp=1 if name == "SIGKILL" else 0)


@needs_proc
def test_ctrl_c_in_a_terminal_is_130_without_a_word(program):
    file = program(FAULTS)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(file.parent)
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT), "TMPDIR": str(file.parent.with_name("tmp"))}
        os.execve(sys.executable, [sys.executable, str(file), "stays", "fork", ""], environment)
    wait_for(lambda: (file.parent / "ready2").exists())
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert os.read(terminal, 10000).decode().split("\r\n") == ["distributed: 3 processes, gloo, cpu", "^C"]
    os.close(terminal)
    assert_nothing_left(file)


BIG = """
class Dies:
    def __reduce__(self): os.kill(os.getpid(), signal.SIGKILL)
def worker(rank, n):
    return [torch.zeros(25_000_000), Dies()]
dist.launch(worker, nproc=2)
"""


def test_a_rank_that_is_killed_while_it_sends_a_large_result(program):
    done = run(program(BIG))
    assert done.code == 1 and re.search("rank 0 of 2 failed first: ended by SIGKILL", done.err), done.err


LATE = """
def worker(rank, n):
    if rank == 0:
        raise RuntimeError("Connection closed by peer")
    report = os.path.join(os.environ["TMPDIR"], os.listdir(os.environ["TMPDIR"])[0], "report0")
    while not os.path.exists(report): time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
dist.launch(worker, nproc=2)
"""
WATCHDOG = """
def worker(rank, n):
    dist.init_process_group()
    if rank == 1:
        raise ValueError("mine")
    try:
        dist.barrier()
    except RuntimeError:
        os.abort()  # as NCCL's watchdog does when a connection is lost
dist.launch(worker, nproc=2)
"""


@pytest.mark.parametrize(
    ("code", "cause"), [(LATE, "ended by SIGKILL"), (WATCHDOG, r"\s+Traceback(?s:.*)ValueError: mine")]
)
def test_a_consequence_is_not_the_cause(program, code, cause):
    """A death that is seen after its consequence; and a rank that has failed, and does not end before the others."""
    done = run(program(code))
    assert done.code == 1 and re.search(f"rank 1 of 2 failed first: {cause}", done.err), done.err


# ----------------------------------------------------------------------------------------------------- P4: time to save

SAVES = """
def save(number, frame):
    open(f"asked{dist.get_rank()}", "w").close()
    while os.path.exists("wait"): time.sleep(0.01)
    open(f"saved{dist.get_rank()}", "w").close()
    sys.exit(143)

def worker(rank, n, what):
    signal.signal(signal.SIGTERM, save)
    dist.init_process_group()
    open(f"ready{rank}", "w").close()
    if rank == 1 and what == "fails":
        while not os.path.exists("ready0"): time.sleep(0.01)
        raise ValueError("mine")
    while True: time.sleep(0.01)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    dist.launch(worker, sys.argv[1], nproc=2)
"""


def test_ranks_that_handle_sigterm_have_time_to_save(program):
    file = program(SAVES)
    job = start(file, "")
    wait_for(lambda: all((file.parent / f"ready{rank}").exists() for rank in range(2)))
    os.kill(job.pid, signal.SIGTERM)
    done = job.wait()
    assert (done.code, done.err) == (143, "launch: SIGTERM: waiting for 2 processes to save\n")
    assert (file.parent / "saved0").exists() and (file.parent / "saved1").exists()
    assert_nothing_left(file)


@pytest.mark.parametrize(("grace", "saved"), [("60", True), ("0", False)])
def test_after_a_failure_the_others_have_time_to_save(program, grace, saved):
    file = program(SAVES)
    if not saved:
        (file.parent / "wait").touch()  # saving would take for ever
    done = run(file, "fails", DIST_GRACE=grace)
    assert done.code == 1 and "rank 1 of 2 failed first" in done.err and "ValueError: mine" in done.err
    assert (file.parent / "saved0").exists() == saved


def test_ctrl_c_after_a_failure_hides_no_error(program):
    file = program(SAVES)
    (file.parent / "wait").touch()
    job = start(file, "fails", DIST_GRACE=3600)
    wait_for((file.parent / "asked0").exists)
    os.kill(job.pid, signal.SIGINT)
    (file.parent / "wait").unlink()
    done = job.wait()
    assert done.code == 1 and "ValueError: mine" in done.err
    assert_nothing_left(file)


def test_ctrl_c_while_ranks_save_ends_at_once(program):
    file = program(SAVES)
    (file.parent / "wait").touch()
    job = start(file, "", DIST_GRACE=3600)
    wait_for(lambda: all((file.parent / f"ready{rank}").exists() for rank in range(2)))
    os.kill(job.pid, signal.SIGTERM)
    os.kill(job.pid, signal.SIGTERM)  # at the same time, as GNU timeout does: this one doesn't count
    wait_for(lambda: all((file.parent / f"asked{rank}").exists() for rank in range(2)))
    os.kill(job.pid, signal.SIGINT)
    assert job.wait().code == 143
    assert not (file.parent / "saved0").exists()
    assert_nothing_left(file)


def test_a_rank_that_was_told_to_stop_and_has_saved_ends_the_run_with_its_code(program):
    file = program(SAVES)
    job = start(file, "")
    wait_for(lambda: all((file.parent / f"ready{rank}").exists() for rank in range(2)))
    os.kill(processes_in(file.parent)[-1], signal.SIGTERM)  # the youngest
    assert job.wait().code == 143
    assert_nothing_left(file)


# ------------------------------------------------------------------------------------------------- P5: the stack table

ASKS = """
def waits_here():
    while not os.path.exists("go1"): time.sleep(0.01)

def waits_there():
    open("there", "w").close()
    while not os.path.exists("go2"): time.sleep(0.01)

def worker(rank, n):
    dist.init_process_group()
    open(f"ready{rank}", "w").close()
    if rank == 1:
        waits_here()
        waits_there()
    dist.barrier()

if __name__ == "__main__":
    dist.launch(worker, nproc=2)
"""


def test_sigusr1_asks_where_each_rank_stands_and_the_run_goes_on(program):
    file = program(ASKS)
    job = start(file)
    wait_for(lambda: all((file.parent / f"ready{rank}").exists() for rank in range(2)))
    os.kill(job.pid, signal.SIGUSR1)
    wait_for(lambda: "waits_here" in job.err())
    (file.parent / "go1").touch()
    wait_for((file.parent / "there").exists)
    os.kill(job.pid, signal.SIGUSR1)
    wait_for(lambda: "waits_there" in job.err())
    (file.parent / "go2").touch()
    done = job.wait()
    table = rf"where each rank stands:\n  rank 0: {file}:\d+, worker, in barrier\n  rank 1: {file}:\d+, waits_"
    assert done.code == 0 and re.fullmatch(f"{table}here\n{table}there\n", done.err), done.err
    assert_nothing_left(file)


# ------------------------------------------------------------------------------------------------- P7: two runs at once

TWO_RUNS = """
def worker(rank, n, name):
    dist.init_process_group()
    open(f"{name}{rank}", "w").close()
    while len([f for f in os.listdir() if f[0] in "12"]) < 4: time.sleep(0.01)  # until both are running
    return dist.all_reduce(torch.tensor(int(name))).item()

if __name__ == "__main__":
    print(dist.launch(worker, sys.argv[1], nproc=2))
"""


def test_two_runs_on_one_machine_do_not_meet(program):
    file = program(TWO_RUNS)
    other = subprocess.Popen(
        [sys.executable, file, "1"],
        cwd=file.parent,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    done = start(file, "2").wait()
    assert (done.code, done.out.splitlines()[-1]) == (0, "4"), done.err
    assert other.communicate()[0].splitlines()[-1] == "2"


# ----------------------------------------------------------------------------------------------------------- P1: launch


def _who(rank, n, *args):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return os.getpid(), rank, n, args, torch.get_num_threads(), [os.environ.get(name) for name in names]


@pytest.mark.parametrize(("nproc", "env", "n"), [(None, None, 2), (None, "3", 3), (2, "3", 2), (1, None, 1)])
def test_launch_starts_as_many_as_told_and_two_without_a_gpu(monkeypatch, nproc, env, n):
    if env:
        monkeypatch.setenv("NPROC", env)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    pid, rank, size, args, threads, variables = dist.launch(_who, "a", 7, nproc=nproc)
    assert (rank, size, args) == (0, n, ("a", 7)) and (pid == os.getpid()) == (n == 1)
    assert variables == (["0", "0", str(n), str(n)] if n > 1 else [None] * 4)
    assert threads == max(1, len(os.sched_getaffinity(0)) // n) or n == 1


def test_one_process_per_visible_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    assert dist.launch(_who)[2] == 3
    assert dist.launch(_who, nproc=4)[2] == 4  # a number that was asked for may share GPUs, by gloo
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    with pytest.raises(ValueError, match=r"4 processes, but 3 visible GPU\(s\): start 3, or share them"):
        dist.launch(_who)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)  # without NCCL it is gloo anyway
    assert dist.launch(_who)[2] == 4


def test_under_a_launcher_the_function_is_called_here(monkeypatch):
    for name, value in {"RANK": "4", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    called = []
    assert dist.launch(lambda *args: called.append(args), "a") is None  # rank 0 alone returns the result
    assert called == [(1, 6, "a")]


def _plain_torch(rank, n):
    torch.distributed.init_process_group("gloo")
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return total.item()


def test_torchs_own_init_process_group_works_in_the_ranks():
    assert dist.launch(_plain_torch, nproc=3) == 6


AGAIN = """
import threading

def fails(rank, n): raise ValueError("mine")
def works(rank, n):
    dist.init_process_group()
    total = dist.all_reduce(torch.tensor(1)).item()
    dist.cleanup()  # does nothing while an exception is handled
    return total, torch.distributed.is_initialized(), threading.active_count()

try:
    dist.launch(fails, nproc=2)
except SystemExit:
    print(dist.launch(works, nproc=3))
    print(dist.launch(works, nproc=2))
"""


def test_launch_works_after_a_failure_and_inside_except(program):
    done = run(program(AGAIN))
    assert done.out.splitlines()[1::2] == ["(3, False, 1)", "(2, False, 1)"], done


SPAWNS = """
class Model(torch.nn.Linear): pass
def worker(rank, n, model):
    dist.init_process_group()
    with torch.no_grad(): model.weight += rank + 1
    return __name__, model.weight.item(), dist.all_reduce(torch.tensor(1)).item()

if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # a pool of threads
    model = Model(1, 1)
    torch.nn.init.zeros_(model.weight)
    print(dist.launch(worker, model, nproc=2), model.weight.item())
    try:
        dist.launch(lambda rank, n: None, nproc=2)
    except RuntimeError as error:
        print(error)
"""


def test_with_threads_the_ranks_are_spawned_with_copies_and_a_lambda_is_refused(program):
    file = program(SPAWNS)
    done = shell(file, cwd=file.parent, path=[ROOT], TMPDIR=file.parent.with_name("tmp"), OMP_NUM_THREADS=None)
    assert done.code == 0, done.err
    assert done.out.splitlines()[1] == "('__mp_main__', 1.0, 2) 0.0"
    assert re.match(
        r"the function and its arguments can't be sent to a new process .*: define functions at the top",
        done.out.splitlines()[2],
    )
    assert_nothing_left(file)


SHELL_LINES = """
import torch
import distributed as dist
torch.set_num_threads(2); x = torch.ones(1000, 1000) @ torch.ones(1000, 1000)
def worker(rank, n):
    dist.init_process_group()
    if n == 3: raise ValueError("mine")
    return "sum", dist.all_reduce(torch.tensor(rank + 1)).item()

dist.launch(worker, nproc=2)
dist.launch(worker, nproc=3)
print("still", "here")
"""


def test_in_an_interactive_shell_its_functions_run_and_an_error_is_no_exit():
    command = [sys.executable, "-i", "-c", "import sys"]
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=SHELL_LINES, env=environment, capture_output=True, text=True, timeout=100)
    assert "('sum', 3)" in done.stdout and "still here" in done.stdout, done
    assert re.search(r"^RuntimeError: rank [012] of 3 failed first: (?s:.*)ValueError: mine", done.stderr, re.MULTILINE)


def test_a_crowded_error_is_that_of_the_first():
    """An error, a death and lost connections at the same time: who died took the others' connections."""
    ranks = launcher._Ranks(4, None)
    ranks.reports = {
        0: launcher._Report(1.0, "RuntimeError: Connection closed by peer"),
        1: launcher._Report(3.0, "ended by SIGKILL", died=True),
        2: launcher._Report(2.0, "ValueError: mine"),
        3: launcher._Report(2.5),
    }
    assert ranks.failures() == [1, 2, 0]
    ranks.end()
