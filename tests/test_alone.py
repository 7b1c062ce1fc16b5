"""P1: distributed.py alone starts the processes.  By the commands that a user types, in a folder with nothing else."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from world import ENVIRONMENT, ROOT, forker, processes_in, wait_for

pytestmark = pytest.mark.timeout(180)

PROGRAM = """
import os, signal, sys, threading, time
import torch
import distributed as dist

print("imported\\n", end="")

def work(local_rank, world_size, size):
    dist.init_process_group()
    total = dist.reduce(torch.tensor(float(dist.get_rank())), "sum").item()
    return {"total": total, "threads": torch.get_num_threads(), "big": torch.full((size,), float(world_size))}

def ends(local_rank, world_size, how):
    dist.init_process_group()
    if how == "fails" and local_rank == 1:
        raise ZeroDivisionError("mine")
    print(f"ready{local_rank}\\n", end="", flush=True)
    while True:
        dist.barrier()

def generates(local_rank, world_size):
    yield

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "twice":
        before = dict(os.environ)
        for count in 2, 3:
            result = dist.launch(work, 3_000_000, nproc=count)
            big = result.pop("big")
            print(result, big.sum().item() / 3_000_000, big.device, flush=True)
        print(os.environ.keys() - before.keys() - {"TORCHELASTIC_SIGNALS_TO_HANDLE"} or "no new variables")
    elif how == "lambda":
        dist.launch(lambda *_: 1)
    elif how == "lock":
        dist.launch(work, threading.Lock())
    elif how == "generates":
        dist.launch(generates)
    else:
        dist.launch(ends, how)
"""


@pytest.fixture
def folder(tmp_path):
    shutil.copy(ROOT / "distributed.py", tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_it_starts_the_processes_any_number_of_times_and_returns_rank_0s_result_on_the_cpu(folder):
    """Also in a package, as `python -m mine.train`; each count of processes has its own number of threads."""
    package = folder / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.move(folder / "distributed.py", package)
    text = (
        (folder / "program.py").read_text().replace("import distributed as dist", "from . import distributed as dist")
    )
    (package / "train.py").write_text(text)
    done = forker().run("-m", "mine.train", "twice", cwd=folder, OMP_NUM_THREADS=None)
    assert done.code == 0, done
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    said = ""
    for n in 2, 3:
        result = {"total": float(sum(range(n))), "threads": max(1, cores // n)}
        said += f"distributed: {n} processes, gloo, cpu\n{result} {n}.0 cpu\n"
    assert done.out.replace("imported\n", "") == f"{said}no new variables\n", done.out
    assert done.out.count("imported\n") == 1 + 2 + 3  # each process imports the program


UNGUARDED = "import distributed as dist\nprint('imported')\ndef work(rank, n): pass\ndist.launch(work)\n"
REFUSED = [  # what is typed; what its one line says
    (["program.py", "lambda"], "distributed: .*<lambda>.*: put worker_fn at the top level of a file, or copy dist"),
    (["program.py", "lock"], "distributed: .*lock.*: put worker_fn at the top level of a file, or copy distributed_l"),
    (["unguarded.py"], 'distributed: write  if __name__ == "__main__":  above the call of launch, because new pro'),
    (["-c", UNGUARDED], "distributed: .*__main__.*: put worker_fn at the top level of a file, or copy distributed_l"),
]


@pytest.mark.parametrize(("command", "line"), REFUSED)
def test_what_a_new_process_could_not_run_is_refused_before_anything_starts(folder, command, line):
    (folder / "unguarded.py").write_text(UNGUARDED)
    if command[0] == "-c":
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code, out, err = forker().run(folder / command[0], *command[1:], cwd=folder)
    assert (code, out) == (2, "imported\n") and re.fullmatch(f"{line}.*\n", err), err


def test_in_a_shell_it_says_so_and_the_shell_goes_on(folder):
    typed = "import distributed as dist\ndef work(rank, n): pass\n\ndist.launch(work, nproc=2)\nprint('goes on')\n"
    shell = [sys.executable, "-i", "-q"]
    done = subprocess.run(shell, input=typed, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert "RuntimeError: <module '__main__'" in done.stderr and "copy distributed_launcher.py here" in done.stderr
    assert done.stdout == "goes on\n"


@pytest.mark.parametrize(("how", "says"), [("fails", "ZeroDivisionError: mine"), ("generates", "returned a generator")])
def test_a_failure_ends_all_with_torchruns_text_and_the_ranks_own_traceback(folder, how, says):
    done = forker().run(folder / "program.py", how, cwd=folder, NPROC=3)
    root_cause = done.err.rpartition("Root Cause (first observed failure)")[2]
    assert done.code == 1 and "rank      : " in root_cause, done.err
    assert says in (root_cause if how == "fails" else done.err), done.err
    wait_for(lambda: not processes_in(folder), 20)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_is_left_after_a_signal_to_the_launching_process(folder, name):
    command = [sys.executable, "program.py", "stays"]
    with open(folder / "out", "w") as out:
        process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT | {"NPROC": "2"}, stdout=out, stderr=out)
    said = Path(folder, "out").read_text
    wait_for(lambda: "ready0" in said() and "ready1" in said(), seen=said)
    process.send_signal(signal.Signals[name])
    assert process.wait(60) == (-signal.SIGKILL if name == "SIGKILL" else 1), said()
    wait_for(lambda: not processes_in(folder), 20)  # promised within 10
