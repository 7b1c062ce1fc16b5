"""distributed_launcher.py: P1, P3 to P5, P7 of its promises.  Real processes, real faults; events are waited for."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from world import ENVIRONMENT, ROOT, forker, gone, processes_in, shell, wait_for

import distributed as dist
import distributed_launcher as launcher
from dev import programs

pytestmark = pytest.mark.timeout(180)
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def program():
    """program(code): a file in a folder of its own, where its processes live; TMPDIR is another one.

    Not in tmp_path: its name can be too long for the sockets that loader workers put into TMPDIR (108 characters).
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "cwd").mkdir()

        def written(code):
            file = folder / "cwd" / "program.py"
            file.write_text(f"import os, signal, sys, time\nimport torch\nimport distributed as dist\n{code}")
            return file

        yield written


def start(file, *args, **options):
    """Forked from a process that has imported torch: as `python file args`."""
    folder = file.parent
    return forker().start(file, *args, cwd=folder, path=[ROOT], TMPDIR=folder.with_name("tmp"), **options)


def run(file, *args, **options):
    done = start(file, *args, **options).wait()
    assert_nothing_left(file)
    return done


def wrote(file, name):
    """Which of the first two ranks have written a file of this name."""
    return [rank for rank in (0, 1) if (file.parent / f"{name}{rank}").exists()]


def start_ready(file, *args, **options):
    job = start(file, *args, **options)
    wait_for(lambda: wrote(file, "ready") == [0, 1])
    return job


def assert_nothing_left(file):
    """No process that stands in the program's folder, and nothing in its temporary folder."""
    if sys.platform == "linux":
        wait_for(lambda: not processes_in(file.parent), 20)  # promised within 10
    assert list(file.parent.with_name("tmp").iterdir()) == []


# ----------------------------------------------------------------------------------------------------- P3: the faults

FAULTS = """
def fails(what):
    print("its last words")
    if what == "raise": raise ValueError("mine")
    if what == "times out": raise TimeoutError("mine")
    if what.startswith("SIG"): os.kill(os.getpid(), signal.Signals[what])

def waits(loader):
    for batch in loader:
        dist.all_reduce(batch)

def worker(rank, n, what, workers):
    dist.init_process_group()
    loader = [torch.ones(1)] * 100000
    if workers and rank == 1:
        from torch.utils.data import DataLoader
        loader = DataLoader(loader, None, num_workers=2, multiprocessing_context=workers)
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
    dist.launch(worker, *sys.argv[1:], nproc=3)
"""
FIRST = "rank 1 of 3 failed first: "
FAULT_CASES = [  # what rank 1 does; its data loader's workers; the error
    ("raise", "fork", FIRST + r"\s+Traceback(?s:.*), in fails\n(?s:.*)\nValueError: mine\n"),
    ("SIGKILL", "fork", FIRST + "killed by SIGKILL "),
    ("SIGSEGV", "", FIRST + "killed by SIGSEGV\n(?s:.*)  rank 1: .*, fails\n"),
    ("returns", "", r", in waits\n(?s:.*)\nIt lost its connection after rank 1 had finished\. All ranks must call"),
    ("times out", "", FIRST + "(?s:.*)TimeoutError: mine\nwhere each rank (?s:.*)  rank 1: .*, fails\n"),
]


@pytest.mark.parametrize(("what", "workers", "error"), FAULT_CASES)
def test_the_error_is_that_of_the_rank_that_failed_first_and_nothing_is_left(program, what, workers, error):
    file = program(FAULTS)
    done = run(file, what, workers)
    assert done.code == 1 and re.search(error, done.err), done.err
    assert done.err.count("failed first") == 1
    assert done.err.count("Traceback") <= 1, done.err
    assert "its last words" in done.out or what in ("SIGKILL", "SIGSEGV"), "its output is lost"


@needs_proc
@pytest.mark.parametrize(
    ("name", "code", "workers"), [("SIGTERM", 143, ""), ("SIGHUP", 129, ""), ("SIGKILL", -9, "forkserver")]
)
def test_a_signal_to_the_launching_process_ends_all_quietly(program, name, code, workers):
    file = program(FAULTS)
    job = start_ready(file, "stays", workers)
    os.kill(job.pid, signal.Signals[name])
    done = job.wait()
    assert (done.code, done.err) == (code, ""), done.err
    assert_nothing_left(file)


@needs_proc
def test_ctrl_c_in_a_terminal_says_where_each_rank_stands_and_is_130(program):
    file = program(FAULTS)
    screen, terminal = os.openpty()
    # The terminal that the leader of a session opens is the session's: its signals go to the leader's process group.
    before = f"os.setsid(); os.dup2(os.open({os.ttyname(terminal)!r}, os.O_RDWR), 1); os.dup2(1, 2)"
    job = start_ready(file, "stays", "", before=before)
    os.write(screen, b"\x03")
    assert job.wait().code == 130
    table = "".join(rf"  rank {rank}: {file}:\d+, w\w+(, in all_reduce)?\r\n" for rank in range(3))
    expected = rf"distributed: 3 processes, gloo, cpu\r\n\^C\r\nwhere each rank is:\r\n{table}"
    assert re.fullmatch(expected, os.read(screen, 10000).decode())
    os.close(screen)
    os.close(terminal)
    assert_nothing_left(file)


LEAVES_TRACES = """
from multiprocessing.util import Finalize

def stays(rank, n):
    dist.init_process_group()
    if rank == 1:
        raise ValueError("mine")
    try:
        dist.barrier()
    except RuntimeError:
        os.abort()  # as NCCL's watchdog does when a connection is lost

def comes_later(rank, n):
    while rank == 1 and not os.path.exists("failed"): time.sleep(0.01)
    if rank == 1: raise ValueError("mine")
    open("failed", "w").close()
    raise torch.distributed.DistBackendError("NCCL operation failed")  # all that torch 2.15's backend says

def dies_at_its_end(rank, n):
    if rank == 1: Finalize(None, os._exit, (3,), exitpriority=1)

def downloads(rank, n):
    dist.init_process_group()
    if rank == 1:
        while not os.path.exists("done"): time.sleep(0.01)
        raise ConnectionResetError(104, "Connection reset by peer: http://x")
    open("done", "w").close()

def returns(rank, n):
    return lambda: None

dist.launch(globals()[sys.argv[1]], nproc=2)
"""
CAUSES = [  # what the ranks do; which one is named, and with what
    ("stays", 1, r"\s+Traceback(?s:.*)ValueError: mine"),
    ("comes_later", 1, "(?s:.*)ValueError: mine"),
    ("dies_at_its_end", 1, r"exited with code 3 \(by os\._exit, or .*\)\. It had finished its work"),
    (
        "downloads",
        1,
        r"\s+Traceback(?s:.*)\nConnectionResetError: .*x\n\(rank 0 had finished\)\n$",
    ),  # an error of its own
    ("returns", 0, "worker_fn has returned, but .*: save it in "),
]


@pytest.mark.parametrize(("what", "rank", "error"), CAUSES)
def test_the_cause_is_found_in_what_is_left(program, what, rank, error):
    done = run(program(LEAVES_TRACES), what)
    assert done.code == 1 and re.search(f"rank {rank} of 2 failed first: {error}", done.err), done.err


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
        batches = iter(torch.utils.data.DataLoader(range(9), num_workers=1))
        open("loader_worker", "w").write(str(batches._workers[0].pid))
        while not os.path.exists("ready0"): time.sleep(0.01)
        raise ValueError("mine")
    while rank == 1: time.sleep(0.01)
    dist.barrier()  # rank 0 waits for rank 1, as for one that computes for long

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    dist.launch(worker, sys.argv[1], nproc=2)
"""


@pytest.fixture
def saves(program):
    """SAVES; its ranks go on saving while the file "wait" exists."""
    file = program(SAVES)
    (file.parent / "wait").touch()
    return file


@pytest.mark.parametrize("second", ["SIGTERM", "SIGINT"])
def test_ranks_have_time_to_save_unless_there_is_a_second_ctrl_c(saves, second):
    """A second SIGTERM, as GNU timeout sends it, doesn't count."""
    job = start_ready(saves, "", DIST_GRACE=3600)
    os.kill(job.pid, signal.SIGTERM)
    wait_for(lambda: wrote(saves, "asked") == [0, 1])
    os.kill(job.pid, signal.Signals[second])
    if second == "SIGTERM":
        time.sleep(0.2)  # or it would end the run about now
        (saves.parent / "wait").unlink()
    done = job.wait()
    assert (done.code, done.err) == (143, "launch: SIGTERM: waiting for 2 processes to save\n")
    assert wrote(saves, "saved") == ([0, 1] if second == "SIGTERM" else [])
    assert_nothing_left(saves)


def test_after_a_failure_the_others_have_time_to_save_and_nothing_hides_the_error(saves):
    """Neither Ctrl-C nor a loader worker of the failed rank, which ends while that rank waits."""
    job = start(saves, "fails", DIST_GRACE=3600)
    wait_for(lambda: wrote(saves, "asked"))
    wait_for(lambda: gone((saves.parent / "loader_worker").read_text()))
    time.sleep(0.2)  # or an error of torch's would come about now
    os.kill(job.pid, signal.SIGINT)
    (saves.parent / "wait").unlink()
    done = job.wait()
    assert done.code == 1 and re.search("rank 1 of 2 failed first: (?s:.*)ValueError: mine", done.err), done.err
    assert "DataLoader worker" not in done.err and wrote(saves, "saved") == [0]
    assert_nothing_left(saves)


@pytest.mark.parametrize(
    ("what", "stop_grace", "failure_grace", "dist_grace"),
    [("", 0.2, 3600, None), ("fails", 3600, 0.2, None), ("", 3600, 3600, 0.2)],
)
def test_they_have_30_seconds_or_3_after_a_failure_or_dist_grace(saves, what, stop_grace, failure_grace, dist_grace):
    """Here one of the three is short; with another one the run would not end."""
    assert (launcher.STOP_GRACE, launcher.FAILURE_GRACE) == (30, 3)
    graces = f"launcher.STOP_GRACE, launcher.FAILURE_GRACE = {stop_grace}, {failure_grace}"
    before = f"import distributed_launcher as launcher; {graces}"
    job = start_ready(saves, what, before=before, DIST_GRACE=dist_grace)
    if what != "fails":
        os.kill(job.pid, signal.SIGTERM)
    assert job.wait().code == (1 if what == "fails" else 143)
    assert 0 in wrote(saves, "asked") and wrote(saves, "saved") == []
    assert_nothing_left(saves)


# ------------------------------------------------------------------------------------------------- P5: the stack table

ASKS = """
import importlib
def waits_here():
    while not os.path.exists("go1"):
        importlib._bootstrap._call_with_frames_removed(time.sleep, 0.01)  # in <frozen importlib._bootstrap>

def waits_there():
    open("there", "w").close()
    while not os.path.exists("go2"): time.sleep(0.01)

def worker(rank, n):
    dist.init_process_group()
    open(f"ready{rank}", "w").close()
    if rank == 1:
        waits_here()
        waits_there()
        torch.distributed.send(torch.ones(1), 0)
    else:
        torch.distributed.recv(torch.ones(1), 1)

if __name__ == "__main__":
    dist.launch(worker, nproc=2)
"""


def test_sigusr1_asks_where_each_rank_stands_and_the_run_goes_on(program):
    file = program(ASKS)
    job = start_ready(file)
    os.kill(job.pid, signal.SIGUSR1)
    wait_for(lambda: "waits_here" in job.err())
    (file.parent / "go1").touch()
    wait_for((file.parent / "there").exists)
    os.kill(job.pid, signal.SIGUSR1)
    wait_for(lambda: "waits_there" in job.err())
    (file.parent / "go2").touch()
    done = job.wait()
    table = rf"where each rank is:\n  rank 0: {file}:\d+, worker, in recv\n  rank 1: {file}:\d+, waits_\w+"
    assert done.code == 0 and re.fullmatch(rf"{table}(, in \w+)?\n{table}\n", done.err), done.err
    assert_nothing_left(file)


AGREES = """
import checkpoint

def worker(rank, n):
    dist.init_process_group()
    stop = checkpoint.Preemption()
    open(f"ready{rank}", "w").close()
    while rank == 1 and not os.path.exists("go"): time.sleep(0.01)
    stop.agreed()

if __name__ == "__main__":
    dist.launch(worker, nproc=2)
"""


def test_a_helpers_line_is_not_the_programs(program):
    file = program(AGREES)
    job = start_ready(file)
    wait_for(lambda: os.kill(job.pid, signal.SIGUSR1) or time.sleep(0.1) or "in agreed" in job.err())
    (file.parent / "go").touch()
    done = job.wait()
    last = done.err.rpartition("where each rank is:\n")[2]
    assert done.code == 0 and re.match(rf"  rank 0: {file}:\d+, worker, in agreed\n  rank 1: {file}:", last), done.err


def test_what_is_the_program(tmp_path):
    """A program may be installed below the standard library, as in Docker's python image, or have a data.py."""
    library, mine = Path(os.__file__).parent, tmp_path / "data.py"
    mine.write_text("# Mine\n")
    for path in mine, "<string>", library / "site-packages/mine/train.py", library / "dist-packages/mine.py":
        assert launcher.is_the_program(str(path)), path
    helpers = [ROOT / name for name in ("distributed.py", "distributed_launcher.py", "checkpoint.py", "data.py")]
    for path in (*helpers, os.__file__, torch.__file__, torch.nn.__file__, "<frozen importlib._bootstrap>"):
        assert not launcher.is_the_program(str(path)), path
    assert launcher.is_the_program(f"{os.path.dirname(torch.__file__)}titan/train.py")


FAILURES = [
    (RuntimeError("Application timeout caused pair closure"), "timed out"),  # gloo's, without a line of its source
    (RuntimeError("[../third_party/gloo/gloo/pair.cc:1] Timed out waiting 6000ms"), "timed out"),
    (RuntimeError("[../third_party/gloo/gloo/pair.cc:1] Connection closed by peer"), "lost its connection"),
    (torch.distributed.DistBackendError("NCCL operation failed"), "lost its connection"),
    (RuntimeError("my request timed out"), "failed"),
]


@pytest.mark.parametrize(("error", "failure"), FAILURES)
def test_a_timeout_or_a_lost_connection_is_known_by_what_torch_says(error, failure):
    assert launcher._failure_of(error) == failure


UNEQUAL = """
def train(rank, n):
    for batches in 12, 7 if rank < 2 else 5:  # fewer digits than before
        dist.cleanup()  # the passes of a group that has ended are not counted
        dist.init_process_group()
        model = dist.prepare_ddp_model(torch.nn.Linear(4, 2))
        train_with(model, batches)
    dist.reduce(torch.ones(1))

def train_with(model, batches):
    for batch in range(batches):
        with torch.no_grad(): model(torch.ones(1, 4))  # an evaluation is not counted
        model(torch.ones(1, 4)).sum().backward()

if __name__ == "__main__":
    dist.launch(train, nproc=3)
"""


def test_a_hang_with_unequal_batches_says_how_far_each_rank_is(program):
    done = run(program(UNEQUAL), DIST_TIMEOUT=3)
    assert done.code == 1 and re.search(r"rank \d of 3 failed first", done.err), done.err
    ranks = [(0, "backward", 6), (1, "backward", 6), (2, "reduce", 5)]  # two have begun the pass that rank 2 lacks
    table = "".join(rf"  rank {rank}: .*in {what}, after {passes} forward passes\n" for rank, what, passes in ranks)
    assert re.search(f"where each rank is:\n{table}", done.err), done.err


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 adds no notes to errors")
def test_under_torchrun_the_error_of_a_hang_says_how_far_its_rank_is(program):
    file = program(UNEQUAL)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3")
    done = forker().run(*torchrun, file, cwd=file.parent, path=[ROOT], DIST_TIMEOUT=3)
    said = set(re.findall(r"\(rank (\d, after \d) forward passes\)", done.err))
    assert said and said <= {"0, after 6", "1, after 6", "2, after 5"}, done.err  # torchrun ends the slower ones


# ------------------------------------------------------------------------------------------------- P7: two runs at once

TWO_RUNS = """
def worker(rank, n, name):
    dist.init_process_group()
    open(f"{name}{rank}", "w").close()
    while len([f for f in os.listdir() if f[0] in "12"]) < 4: time.sleep(0.01)  # until both are running
    return dist.all_reduce(torch.tensor(int(name))).item()

if __name__ == "__main__":
    other = os.fork()  # a launching process of its own
    total = dist.launch(worker, "1" if other else "2", nproc=2)
    print(f"{os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])}, then {total}" if other else total, flush=True)
"""


def test_two_runs_on_one_machine_do_not_meet(program):
    done = run(program(TWO_RUNS))
    assert done.code == 0 and done.out.splitlines()[-2:] == ["4", "0, then 2"], done


# ----------------------------------------------------------------------------------------------------------- P1: launch


def _who(rank, n, *args):
    """Under torch's own functions, as under torchrun."""
    variables = [os.environ.get(name) for name in launcher.TORCHRUN]
    total = torch.tensor([rank + 1.0])
    if n > 1:
        torch.distributed.init_process_group("gloo")
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
    return os.getpid(), rank, n, args, total.item(), torch.get_num_threads(), variables


@pytest.mark.parametrize(
    ("n", "cores", "quota", "its_threads"),  # a container has a quota
    [(1, 6, "max 100000", 1), (2, 6, "max 100000", 3), (2, 64, "550000 100000", 3)],
)
def test_the_ranks_are_as_those_of_torchrun_and_one_process_is_this_one(
    forks, monkeypatch, tmp_path, n, cores, quota, its_threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setattr(launcher, "CPU_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    pid, rank, size, args, total, threads, variables = dist.launch(_who, "a", 7, nproc=n)
    assert (rank, size, args) == (0, n, ("a", 7)) and (pid == os.getpid()) == (n == 1)
    assert variables == (["0", "2", "0", "2"] if n > 1 else [None] * 4)
    assert total == n * (n + 1) / 2 and threads == its_threads  # a rank's share of the cores


@pytest.fixture
def three_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


def test_one_process_per_visible_gpu_or_two_without_or_as_many_as_told(three_gpus, monkeypatch):
    assert dist.count_processes() == 3
    monkeypatch.setenv("NPROC", "2")
    assert dist.count_processes() == 2 and dist.count_processes(1) == 1
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert dist.count_processes() == 2


def test_more_processes_than_gpus_share_them_over_gloo_or_are_refused(three_gpus, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        dist.launch(_who, nproc=4)
    said = capsys.readouterr().err
    assert re.fullmatch(r"distributed: 4 processes, but 3 visible .* \(DIST_BACKEND=gloo\)\n", said), said
    monkeypatch.setenv("DIST_BACKEND", "gloo")
    assert dist.count_processes(4) == 4
    monkeypatch.delenv("DIST_BACKEND")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)  # without NCCL it is gloo anyway
    assert dist.count_processes(4) == 4


LEAVES = """
import atexit, concurrent.futures, threading
import distributed_launcher
pool = concurrent.futures.ThreadPoolExecutor(1)  # nobody shuts it down
log = open("log", "a")
log.write("parent ")
atexit.register(lambda: open("ended", "a").write("parent "))

def late(rank):
    while not os.path.exists("go"): time.sleep(0.01)
    log.write(f"late{rank} ")

def returns(rank, n):
    if os.fork() == 0: return  # a child of its own, that comes back
    os.wait()
    log.write(f"returns{rank} ")
    atexit.register(lambda: open("ended", "a").write(f"rank{rank} "))
    threading.Thread(target=late, args=[rank]).start()
    pool.submit(int).result()
    read, write = os.pipe()
    stuck = globals()["stuck"] = open(write, "w")  # a pipe that nobody reads
    threading.Thread(target=lambda: print("x" * 10**6, file=stuck), daemon=True).start()

def fails(rank, n):
    log.write(f"fails{rank} ")
    open(f"ready{rank}", "w").close()
    while rank == 0: time.sleep(0.01)
    while not os.path.exists("ready0"): time.sleep(0.01)
    raise ValueError("mine")

def reap(number, frame):
    while os.waitpid(-1, os.WNOHANG)[0]: pass

if __name__ == "__main__":
    distributed_launcher.REPORT_UNENDED_AFTER = 0.3
    signal.signal(signal.SIGCHLD, reap)  # it must not get the ranks
    dist.launch(returns, nproc=2)
    log.write("between ")
    if signal.getsignal(signal.SIGCHLD) == reap: dist.launch(fails, nproc=2)
"""


def test_what_a_rank_leaves_open_is_written_once_and_its_atexit_functions_run(program):
    """Of a rank that fails, its files are.  And one that has finished, but does not end, is named."""
    file = program(LEAVES)
    job = start(file)
    wait_for(lambda: "still running" in job.err())
    (file.parent / "go").touch()
    done = job.wait()
    assert done.code == done.err.count("ValueError: mine") == 1, done.err
    said = r"launch: waiting for processes to end\nwhere each rank is:\n.*  rank [01]: has finished, .* still running: "
    assert re.match(f"(?s){said}", done.err), done.err
    log, ended = (sorted((file.parent / name).read_text().split()) for name in ("log", "ended"))
    assert log == ["between", "fails1", "late0", "late1", "parent", "returns0", "returns1"]
    assert ended == ["rank0", "rank1"]  # what the launching process has registered does not run in them
    assert_nothing_left(file)


SLOW_END = """
import ctypes, os, signal, threading, time
import distributed as dist
import distributed_launcher

def worker(rank, n):
    c = ctypes.CDLL(None)
    c.strdup.restype = pointer = ctypes.c_void_p
    for function, argument in (c.system, c.strdup(b"touch ended%d" % rank)), (c.sleep, 12):  # the last one runs first
        c.__cxa_atexit(ctypes.cast(function, pointer), pointer(argument), None)  # after Python's own end
    open(f"returned{rank}", "w").close()
    return 7

def ask():
    while not (os.path.exists("returned0") and os.path.exists("returned1")): time.sleep(0.01)
    for _ in range(8):  # on a slow machine, one table answers several signals
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGUSR1)

if __name__ == "__main__":
    distributed_launcher.REPORT_UNENDED_AFTER = 2
    threading.Thread(target=ask, daemon=True).start()  # a thread, so the ranks are spawned
    print("result", dist.launch(worker, nproc=2), flush=True)
"""


@pytest.mark.slow
@needs_proc
def test_a_rank_that_has_finished_is_not_failed_by_those_who_look_at_it(tmp_path):
    """Python's handlers are gone when C's atexit functions run.  The program is a package, started as a user does."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").touch()
    (tmp_path / "mine/__main__.py").write_text(SLOW_END)
    done = shell("-m", "mine", cwd=tmp_path, path=[ROOT])
    assert (done.code, done.out) == (0, "result 7\n"), done
    assert sorted(path.name for path in tmp_path.glob("ended*")) == ["ended0", "ended1"]
    assert done.err.count("where each rank is:") >= 2, done  # by SIGUSR1, and because they have not ended


AT_HOME = """
import asyncio, logging, logging.handlers, multiprocessing, tempfile, threading, weakref
from torch.utils.data import DataLoader

class Item: pass
log = logging.getLogger("mine")
def loader(): return map(int, DataLoader(range(4), None, num_workers=1, multiprocessing_context="forkserver"))

def worker(rank, n, what):
    if what == "service":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        if rank == 0: time.sleep(1000)
        while not os.path.exists("ready"): time.sleep(0.01)
        log.warning("its last words")
        raise ValueError("mine")
    own = logging.handlers.MemoryHandler(1000, target=logging.FileHandler("records"))
    log.addHandler(own)
    log.warning("rank %d", rank)  # to the parent's handler, too
    globals()["kept"] = tempfile.TemporaryDirectory(), Item()
    weakref.finalize(kept[1], open(f"finalized{rank}", "w").write, "yes")
    return list(loader())

async def service():
    asked = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.append, "service")
    open("ready", "w").close()
    try: dist.launch(worker, "service", nproc=2)
    except SystemExit as end: print("mine" in str(end), end=" ")
    await asyncio.sleep(0.2)
    print(asked, end=" ")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.2)
    print(asked)

def state(): return len(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGTERM)

if __name__ == "__main__":
    mine = tempfile.TemporaryDirectory()
    weakref.finalize(mine, open("parents", "a").write, "parent")
    parents = logging.handlers.MemoryHandler(1000, target=logging.FileHandler("parents_log"))
    log.addHandler(parents)
    log.warning("parent")
    if sys.argv[1] == "service": asyncio.run(service())
    else:
        list(loader())  # from here on a forkserver runs
        dist.launch(worker, sys.argv[1], nproc=2)
        before = state()
        print(dist.launch(worker, sys.argv[1], nproc=2))
        print(state() == before, os.path.isdir(mine.name))
"""


@needs_proc
@pytest.mark.parametrize("what", ["leaves", "service"])
def test_a_forked_rank_ends_as_a_fresh_process_and_leaves_its_parents_things_alone(program, what):
    """Log records, finalizers, temporary folders, a running forkserver, an asyncio loop's handlers."""
    file = program(AT_HOME)
    folder = file.parent
    code, out, err = shell(file, what, cwd=folder, path=[ROOT], TMPDIR=folder.with_name("tmp"))  # atexit functions run
    assert code == 0, err
    assert_nothing_left(file)
    if what == "service":
        assert out == "True [] ['service']\n"
        assert (folder / "parents_log").read_text() == "its last words\nparent\n"
        return
    assert out == "[0, 1, 2, 3]\nTrue True\n"
    records = (folder / "records").read_text().split("\n")[:-1]
    assert sorted(records) == sorted((folder / "parents_log").read_text().split("\n")[:-1])[1:]
    assert len(records) == 2 * 2 and (folder / "parents_log").read_text().count("parent") == 1
    assert [(folder / name).read_text() for name in ("finalized0", "finalized1", "parents")] == ["yes", "yes", "parent"]


ELSEWHERE = """
import asyncio, multiprocessing, threading
def worker(rank, n, fails):
    dist.init_process_group()
    if fails and rank == 1: raise ValueError("mine")
    return dist.all_reduce(torch.tensor(1)).item()
def start(fails=False):
    try: print(dist.launch(worker, fails, nproc=2), flush=True)
    except Exception as error: print(type(error).__name__, str(error).replace("\\n", " ")[:40], flush=True)
async def in_threads():
    for fails in False, True: await asyncio.to_thread(start, fails)
if __name__ == "__main__":
    asyncio.run(in_threads())
    spawn = multiprocessing.get_context("spawn")
    for daemon in False, True:
        process = spawn.Process(target=start, args=[not daemon], daemon=daemon)
        process.start(), process.join()
    with spawn.Pool(1) as pool: pool.apply_async(start).get(60)
"""


def test_launch_in_a_thread_and_in_other_processes(program):
    """SystemExit would be lost there: a thread drops it, and a Pool waits for the answer of a worker that has ended."""
    done = run(program(ELSEWHERE))
    lines = [line for line in done.out.splitlines() if not line.startswith("distributed: ")]
    failed, refused = "RuntimeError rank 1 of 2 failed first:", "RuntimeError launch: a daemonic process can't start"
    assert done.code == 0 and [line[:38] for line in lines] == ["2", failed, failed, refused[:38], refused[:38]], done


SEEDS = """
import random
import numpy
def draw(): return torch.rand(1).item(), random.random(), numpy.random.rand()
def seed(): torch.manual_seed(1), random.seed(1), numpy.random.seed(1), draw()
"""
SPAWNS = """
import atexit
class Model(torch.nn.Linear): pass
if __name__ != "__main__":  # a spawned rank, that still imports
    try:
        dist.launch(len, nproc=2)
    except SystemExit as end:
        print(end, flush=True)
    open(f"starting{os.getpid()}", "w").close()
    while not os.path.exists("go"): time.sleep(0.01)

def worker(rank, n, model):
    dist.init_process_group()
    atexit.register(lambda: open(f"ended{rank}", "w").close())
    stays_open = globals()["stays_open"] = open(f"log{rank}", "w")
    stays_open.write("written")
    with torch.no_grad(): model.weight += rank + 1
    return __name__, model.weight.item(), draw()

if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # a pool of threads
    model = Model(1, 1)
    torch.nn.init.zeros_(model.weight)
    seed()
    name, weight, drawn = dist.launch(worker, model, nproc=2)
    seed()
    print(name, weight, drawn == draw(), model.weight.item())
    try:
        dist.launch(lambda rank, n: None, nproc=2)
    except RuntimeError as error:
        print(error)
"""
NO_ANSWER = "".join(rf"  rank {rank}: no answer: it is starting, or .* kill -CONT \d+\)\n" for rank in (0, 1))


def test_with_threads_the_ranks_are_spawned_with_copies_and_a_lambda_is_refused(program):
    """All else is as if they were forked.  While they still start they have no answer, and live on.

    Started by a user's command; forked ranks draw on, too: test_variables.py.
    """
    file = program(SEEDS + SPAWNS)
    process = programs.start(file, cwd=file.parent, path=[ROOT], TMPDIR=file.parent.with_name("tmp"))
    try:
        wait_for(lambda: len(list(file.parent.glob("starting*"))) == 2)
        process.send_signal(signal.SIGUSR1)
        said = [process.stderr.readline() for _ in range(3)]
        (file.parent / "go").touch()
        out, more = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0 and re.fullmatch(f"where each rank is:\n{NO_ANSWER}", "".join(said)), said
    assert more == "", more
    unguarded, _, backend, result, refused = out.splitlines()
    assert unguarded.endswith('write  if __name__ == "__main__":  above the call') and "gloo" in backend, out
    assert result == "__mp_main__ 1.0 True 0.0"
    assert refused.startswith("the function and its arguments can't be sent to a new process "), refused
    assert [(file.parent / f"log{rank}").read_text() for rank in (0, 1)] == ["written"] * 2
    assert wrote(file, "ended") == [0, 1]
    assert_nothing_left(file)


SHELL_LINES = """
import torch
import distributed as dist
torch.set_num_threads(2); x = torch.ones(1000, 1000) @ torch.ones(1000, 1000)
def worker(rank, n):
    dist.init_process_group()
    if n == 3: raise ValueError("mine")
    return "sum", dist.all_reduce(torch.tensor(rank + 1)).item()

dist.launch(worker, nproc=3)
dist.launch(worker, nproc=2)
"""


def test_in_an_interactive_shell_its_functions_run_and_an_error_is_no_exit():
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    options = dict(env=environment, capture_output=True, text=True, timeout=100)
    done = subprocess.run([sys.executable, "-i", "-c", "import sys"], input=SHELL_LINES, **options)
    assert "('sum', 3)" in done.stdout, done  # the later one's
    assert re.search(r"^RuntimeError: rank [012] of 3 failed first: (?s:.*)ValueError: mine", done.stderr, re.MULTILINE)
