"""rendezvous.py under launchers: which variables mean what; the real ones, with real processes, on one machine and two.

A launcher that is not installed skips its test and says how to get it.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from unittest import mock

import pytest
import torch

import data
import distributed as dist
import rendezvous

# ------------------------------------------------------------------------------------------------ recognised, or not
# Two tasks on one machine each, as the launchers set them (Open MPI 4.1, MPICH 4.0, SLURM 22.05, torch 2.15).

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
OPENMPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_FD": "8", "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {"SLURM_JOB_ID": "8", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def srun(rank=1, size=2, local_rank=1, tasks="2", node=0, nodes="node7", step="0"):
    names = ("PROCID", "STEP_NUM_TASKS", "LOCALID", "STEP_TASKS_PER_NODE", "NODEID", "STEP_NODELIST", "STEP_ID")
    values = (rank, size, local_rank, tasks, node, nodes, step)
    return BATCH | {f"SLURM_{name}": str(value) for name, value in zip(names, values, strict=True)}


SRUN = srun()
ONE = srun(0, 1, 0, "1")  # srun -n 1
LAUNCHERS = {"torchrun": TORCHRUN, "mpirun (Open MPI)": OPENMPI, "mpirun (MPICH)": MPICH, "srun": SRUN}


def under(env, function=rendezvous.get_world, *args):
    with mock.patch.dict(os.environ, env, clear=True):
        return function(*args)


SECOND_MACHINE = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize("variables", [pytest.param({}, marks=pytest.mark.slow), SECOND_MACHINE])
def test_rank_0_alone_serves_the_store_and_without_it_the_wait_ends(variables, monkeypatch):
    """The first rank of the second machine serves none either.  The limit is that of meeting, not of a collective."""
    monkeypatch.setattr(rendezvous, "_store", None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DIST_TIMEOUT": "60"} | variables
    before = time.monotonic()
    with pytest.raises(RuntimeError):
        under(env, lambda: rendezvous._open_store(rendezvous.get_world(), 1.0))
    assert time.monotonic() - before < 20


RECOGNISED = {
    "torchrun": (TORCHRUN, ("torchrun", 1, 2, 1, 2)),
    "torchrun, two nodes": (
        TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
        ("torchrun", 3, 4, 1, 2),
    ),
    "Open MPI": (OPENMPI, ("mpirun (Open MPI)", 1, 2, 1, 2)),
    "Open MPI, two nodes": (
        OPENMPI | {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"},
        ("mpirun (Open MPI)", 2, 3, 1, 2),
    ),
    "MPICH": (MPICH, ("mpirun (MPICH)", 1, 2, 1, 2)),
    "srun -n 2": (SRUN, ("srun", 1, 2, 1, 2)),
    "srun -n 2 --mpi=pmi2": (SRUN | {"PMI_FD": "12", "PMI_RANK": "1", "PMI_SIZE": "2"}, ("srun", 1, 2, 1, 2)),
    "srun, 2 and 1 tasks": (srun(2, 3, 0, "2,1", 1), ("srun", 2, 3, 0, 1)),
    "srun, 2(x3),1: second": (srun(3, 7, 1, "2(x3),1", 1), ("srun", 3, 7, 1, 2)),
    "srun, 2(x3),1: last": (srun(6, 7, 0, "2(x3),1", 3), ("srun", 6, 7, 0, 1)),
    "srun, 1,10(x12): first": (srun(0, 121, 0, "1,10(x12)", 0), ("srun", 0, 121, 0, 1)),
    "srun, 1,10(x12): last": (srun(120, 121, 9, "1,10(x12)", 12), ("srun", 120, 121, 9, 10)),
    "srun -m cyclic": (srun(1, 4, 0, "2(x2)", 1), ("srun", 1, 4, 0, 2)),
    "srun -m cyclic, 2nd": (srun(2, 4, 1, "2(x2)", 0), ("srun", 2, 4, 1, 2)),
    "sbatch, no srun": (BATCH, ("", 0, 1, 0, 1)),
    "salloc, no srun": ({"SLURM_JOB_ID": "4", "SLURM_NTASKS": "2"}, ("", 0, 1, 0, 1)),
    "interactive step": (srun(0, 1, 0, "1", step="4294967290"), ("", 0, 1, 0, 1)),
    "srun -n 1": (ONE, ("", 0, 1, 0, 1)),
    "srun -n 1 --mpi=pmi2": (ONE | {"PMI_FD": "12", "PMI_RANK": "0", "PMI_SIZE": "1"}, ("", 0, 1, 0, 1)),
    "Open MPI in sbatch": (BATCH | OPENMPI, ("mpirun (Open MPI)", 1, 2, 1, 2)),
    "MPICH in salloc": (ONE | MPICH, ("mpirun (MPICH)", 1, 2, 1, 2)),  # it starts its proxy by srun
    "torchrun in sbatch": (BATCH | TORCHRUN, ("torchrun", 1, 2, 1, 2)),
    "torchrun in srun -n 1": (ONE | TORCHRUN, ("torchrun", 1, 2, 1, 2)),
    "torchrun in srun, 1 each": (
        srun(1, 2, 0, "1(x2)", 1) | TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
        ("torchrun", 3, 4, 1, 2),
    ),
    "torchrun in mpirun -np 1": (
        OPENMPI | {name: "0" for name in OPENMPI} | {"OMPI_COMM_WORLD_SIZE": "1"} | TORCHRUN,
        ("torchrun", 1, 2, 1, 2),
    ),
    "launch": (TORCHRUN | {"DIST_STORE": "/x/store"}, ("launch", 1, 2, 1, 2)),
    "launch in srun -n 1": (ONE | TORCHRUN | {"DIST_STORE": "/x/store"}, ("launch", 1, 2, 1, 2)),
    "nobody": ({}, ("", 0, 1, 0, 1)),
}


@pytest.mark.parametrize("case", RECOGNISED)
def test_the_world_is_the_launchers(case):
    env, world = RECOGNISED[case]
    assert under(env) == rendezvous.World(*world)


@pytest.mark.parametrize("first", range(4))
def test_of_several_launchers_the_innermost_counts(first):
    """torchrun before Open MPI before MPICH before srun, whatever the order of the variables."""
    sets = list(LAUNCHERS.values())
    sets[0] = {name: value for name, value in TORCHRUN.items() if name != "GROUP_WORLD_SIZE"}  # RANK ... by hand
    sets[3] = srun(1, 2, 0, "1(x2)", 1) | {"SLURM_STEP_NUM_NODES": "2"}  # as mpirun starts its own proxies in a job
    merged = {name: value for env in sets[:first:-1] + [sets[first]] for name, value in env.items()}
    assert under(merged).launcher == list(LAUNCHERS)[first]
    assert under(dict(reversed(merged.items()))).launcher == list(LAUNCHERS)[first]


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (TORCHRUN, "SLURM_STEP_NUM_TASKS"),
        (TORCHRUN, "OMPI_COMM_WORLD_SIZE"),
        (TORCHRUN, "PMI_SIZE"),
        (TORCHRUN | {"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, "SLURM_STEP_NUM_TASKS"),  # --nnodes=2, four times
    ],
)
def test_torchrun_in_each_of_several_tasks_is_refused(env, name):
    inside = {"SLURM_STEP_NUM_TASKS": srun(1, 4, 1, "4"), "OMPI_COMM_WORLD_SIZE": OPENMPI, "PMI_SIZE": MPICH}[name]
    with pytest.raises(ValueError, match=f"{name} is {inside[name]}: that many torchruns .* --nnodes, or leave torch"):
        under(inside | env, dist.launch, print)


NEEDED = [("srun", f"SLURM_{name}") for name in ("PROCID", "LOCALID", "STEP_TASKS_PER_NODE")]
for launcher in "torchrun", "mpirun (Open MPI)", "mpirun (MPICH)":
    NEEDED += [(launcher, name) for name in LAUNCHERS[launcher] if name not in ("GROUP_WORLD_SIZE", "PMI_FD")]


@pytest.mark.parametrize(("launcher", "name"), NEEDED)
@pytest.mark.parametrize("value", [None, "", "two", "-1"])
def test_a_variable_that_is_missing_or_no_number_is_named(launcher, name, value):
    env = {n: v for n, v in LAUNCHERS[launcher].items() if n != name} | ({} if value is None else {name: value})
    with pytest.raises(ValueError, match=f"^{name} is {value or 'not set'}, but {re.escape(launcher)} sets all of"):
        under(env, dist.launch, print)


@pytest.mark.parametrize(
    ("launcher", "name", "value"),
    [
        ("torchrun", "RANK", "2"),  # of 2
        ("torchrun", "LOCAL_WORLD_SIZE", "3"),  # of 2
        ("mpirun (Open MPI)", "OMPI_COMM_WORLD_LOCAL_RANK", "2"),  # of 2 on this machine
        ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "0"),  # and local rank 1
        ("mpirun (MPICH)", "PMI_SIZE", "1"),
        ("mpirun (MPICH)", "MPI_LOCALNRANKS", "0"),
        ("srun", "SLURM_PROCID", "5"),
        ("srun", "SLURM_STEP_TASKS_PER_NODE", "1"),
        ("srun", "SLURM_LOCALID", "2"),
    ],
)
def test_variables_that_contradict_each_other_are_shown(launcher, name, value):
    message = f"contradict each other.*'{name}': '{value}'.*start with {re.escape(launcher)}"
    with pytest.raises(ValueError, match=message):
        under(LAUNCHERS[launcher] | {name: value}, dist.launch, print)


@pytest.mark.parametrize("node", [None, "", "4", "x"])
def test_a_node_that_is_not_in_the_list_is_named(node):
    env = {name: value for name, value in srun(6, 7, 0, "2(x3),1").items() if name != "SLURM_NODEID"}
    with pytest.raises(ValueError, match="^SLURM_NODEID is .*, but SLURM_STEP_TASKS_PER_NODE lists 4 node"):
        under(env | ({} if node is None else {"SLURM_NODEID": node}), dist.launch, print)


@pytest.mark.parametrize("env", [OPENMPI, MPICH])
def test_mpirun_in_each_of_several_tasks_is_refused_but_not_its_own_proxies(env):
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_TASKS is 2: that many mpiruns"):
        under(SRUN | {"SLURM_STEP_NUM_NODES": "1"} | env, dist.launch, print)
    assert under(srun(1, 2, 0, "1(x2)", 1) | {"SLURM_STEP_NUM_NODES": "2"} | env).launcher.startswith("mpirun")


def test_mpich_over_several_machines_needs_master_port():
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        meeting_point(MPICH | {"PMI_SIZE": "4", "MASTER_ADDR": "there"})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_place_is_repeated_in_torchruns_variables(launcher):
    """For all that read those, such as data.py's progress bar; the launcher's name stays known."""

    names = rendezvous.LAUNCHERS["torchrun"]

    def ask_twice():
        first = rendezvous.get_world()
        assert not set(names) & set(os.environ) or launcher == "torchrun"  # asking writes nothing
        rendezvous.set_torchruns_variables()
        return first, rendezvous.get_world(), {name: os.environ.get(name) for name in names}

    first, second, said = under(LAUNCHERS[launcher], ask_twice)
    assert first == second == rendezvous.World(launcher, 1, 2, 1, 2)
    assert said == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


RANK_3_OF_4 = RECOGNISED["torchrun, two nodes"][0]  # local rank 1 of 2


@pytest.mark.parametrize(("rank", "world_size"), [(0, 4), (2, None), (3, 2), (1, 2), (None, 3)])
def test_who_contradicts_the_launcher_is_refused(rank, world_size):
    message = re.escape(f"init_process_group({rank}, {world_size}), but torchrun says: rank 3 (local rank 1) of 4")
    with pytest.raises(ValueError, match=f"^{message}"):
        under(RANK_3_OF_4, dist.init_process_group, rank, world_size)


@pytest.mark.parametrize(("rank", "world_size"), [(3, 4), (1, 4), (3, None), (None, None)])
def test_rank_and_local_rank_agree_with_the_launcher(rank, world_size):
    assert under(RANK_3_OF_4, rendezvous.join, rank, world_size) == rendezvous.World("torchrun", 3, 4, 1, 2)


def test_torchrun_inside_a_translated_task_is_torchrun():
    translated = SRUN | {"DIST_LAUNCHER": "srun"} | {"SLURM_STEP_NUM_TASKS": "1"}
    assert under(translated | TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).launcher == "torchrun"


def _shows_a_bar(env):
    """Whether data.py's progress bar is seen on a terminal, by a script that has asked for its rank."""
    terminal, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(other, 2)
            sys.stderr = open(2, "w", closefd=False)
            os.environ |= env
            rendezvous.set_torchruns_variables()  # as `launch` and `init_process_group` do it
            images = data.Images(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4), (0.0,), (1.0,))
            sampler = dist.data_sampler(images, shuffle=False)
            list(data.batches(data.loader(images, 2, sampler), torch.device("cpu")))
        finally:
            os._exit(0)  # or, after an error, the rest of the tests would run here, too
    os.close(other)
    seen = b""
    with contextlib.suppress(OSError):  # when nobody holds the other end any more
        while chunk := os.read(terminal, 1000):
            seen += chunk
    os.waitpid(pid, 0)
    os.close(terminal)
    return b"it/s" in seen or b"%|" in seen


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_progress_bars_are_shown_by_rank_0_alone(launcher):
    first = {name: "0" if re.search("RANK|PROCID|LOCALID", name) else v for name, v in LAUNCHERS[launcher].items()}
    first = {name: "2" if name == "MPI_LOCALNRANKS" else value for name, value in first.items()}
    assert _shows_a_bar(first)
    assert not _shows_a_bar(LAUNCHERS[launcher])


def _parsed(gpus, argv, env):
    def parse():
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-size", type=int, default=512)
        with mock.patch.object(torch.cuda, "device_count", lambda: gpus), mock.patch.object(sys, "argv", ["x", *argv]):
            return dist.parse_args(parser)

    return under(env, parse)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_tasks_that_see_one_gpu_each_are_not_refused(launcher):
    """srun --gpus-per-task=1: whether two share a card is for the roll-call to see."""
    assert _parsed(1, [], LAUNCHERS[launcher]).nproc == 2
    assert _parsed(1, ["--backend", "nccl"], LAUNCHERS[launcher]).nproc == 2


def test_nccl_without_a_gpu_is_refused_under_a_launcher_too(capsys):
    with pytest.raises(SystemExit) as failure:
        _parsed(0, ["--backend", "nccl"], SRUN)
    assert failure.value.code == 2 and "backend nccl needs a CUDA GPU" in capsys.readouterr().err


def test_the_batch_is_shared_by_the_processes_of_all_nodes(capsys):
    assert _parsed(0, ["--batch-size", "4"], RANK_3_OF_4).nproc == 2
    with pytest.raises(SystemExit):
        _parsed(0, ["--batch-size", "3"], RANK_3_OF_4)
    assert "--batch-size 3 is too small for 4 processes" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ where to meet


def meeting_point(env):
    return under(env, lambda: rendezvous.meeting_point(rendezvous.get_world()))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_master_addr_and_master_port_win(launcher):
    env = LAUNCHERS[launcher]
    assert meeting_point(env | {"MASTER_ADDR": "there", "MASTER_PORT": "123"}) == ("there", 123)
    for name, value in ("MASTER_ADDR", "there"), ("MASTER_PORT", "123"):
        if launcher == "torchrun":  # it always sets both
            with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT must say"):
                meeting_point(env | {name: value})
        else:
            assert value in map(str, meeting_point(env | {name: value}))


def test_a_port_that_is_none_is_named():
    for port in ("abc", "99999"):
        with pytest.raises(ValueError, match=f"MASTER_PORT is {port}: "):
            meeting_point(TORCHRUN | {"MASTER_ADDR": "there", "MASTER_PORT": port})


@pytest.mark.parametrize("env", [{}, TORCHRUN])
def test_without_a_launcher_that_implies_it_the_meeting_point_must_be_set(env):
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT must say"):
        meeting_point(env)


@pytest.mark.parametrize(
    ("task", "other", "stranger", "parents"),
    [
        (srun(0, 2, 0), srun(1, 2, 1), srun(1, 2, 1, step="1"), (1, 2, 3)),
        (srun(0, 2, 0), srun(1, 2, 1), srun(1, 2, 1) | {"SLURM_JOB_ID": "9"}, (1, 1, 1)),
        (
            OPENMPI | {"PMIX_NAMESPACE": "77"},
            OPENMPI | {"PMIX_NAMESPACE": "77"},
            OPENMPI | {"PMIX_NAMESPACE": "78"},
            (1, 2, 1),
        ),
        (MPICH, MPICH, MPICH, (1, 1, 2)),  # it sets nothing of the kind, but is the parent of all
    ],
)
def test_the_tasks_of_a_run_on_one_machine_meet_and_no_others(task, other, stranger, parents):
    points = []
    for env, parent in zip((task, other, stranger), parents, strict=True):
        with mock.patch.object(os, "getppid", lambda parent=parent: parent):
            points.append(meeting_point(env))
    assert points[0] == points[1] and points[0][1] != points[2][1]
    assert all(address == "127.0.0.1" and 20000 <= port < 32768 for address, port in points)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node[08-09,12]", "node08"), ("node[7,9]", "node7"), ("a,b", "a"), ("b,n[1-2]", "b"), ("r[0-1]n[2-3]", "r0n2")],
)
def test_under_srun_several_nodes_meet_at_the_first(nodes, first):
    here, there = (meeting_point(srun(2 * node, 4, 0, "2(x2)", node, nodes)) for node in (0, 1))
    assert here == there and here[0] == first


def test_torchs_own_init_process_group_finds_the_meeting_point_under_srun():
    task = srun(0, 2, 0)
    seen = under(task, dist.launch, lambda rank, n: (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    assert seen == meeting_point(task)


def test_on_one_machine_gloo_and_nccl_use_the_loopback_unless_they_are_told_otherwise():
    def interfaces(rank, n):
        return {name: os.environ.get(name) for name in rendezvous.LOOPBACK}

    assert under(srun(0, 2, 0), dist.launch, interfaces) == rendezvous.LOOPBACK
    chosen = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth1"}
    assert under(srun(0, 2, 0) | chosen, dist.launch, interfaces) == chosen
    two_nodes = srun(0, 4, 0, "2(x2)", 0, "a,b")
    assert under(two_nodes, dist.launch, interfaces) == dict.fromkeys(rendezvous.LOOPBACK)


def test_a_single_node_is_its_own_first():
    assert meeting_point(srun(0, 4, 0, "2(x2)", 0, "node7"))[0] == "node7"


@pytest.mark.parametrize("env", [OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"}, MPICH | {"PMI_SIZE": "4"}])
def test_mpirun_over_several_machines_needs_master_addr(env):
    with pytest.raises(ValueError, match="MASTER_ADDR is not set: over several machines, mpirun needs"):
        meeting_point(env)


# ---------------------------------------------------------------------------------------------------- the real program

LIFE = 200  # seconds after which a task of these tests ends itself, whatever else fails


def who(local_rank, world_size):
    """Rank, local rank, world size and device (of two per machine) of everyone; the sum of the ranks."""
    dist.init_process_group(local_rank, world_size)
    with mock.patch.object(torch.cuda, "device_count", lambda: 2):
        device = dist.get_device()
    mine = [dist.get_rank(), dist.get_local_rank(), dist.get_world_size(), device.index]
    everyone = [row.tolist() for row in dist.gather(torch.tensor(mine))]
    return everyone, dist.reduce(torch.tensor(mine[0]), "sum").item()


def on_and_on(local_rank, world_size, folder):
    dist.init_process_group(local_rank, world_size)
    for step in range(10**9):
        dist.all_reduce(torch.ones(1))
        if step == 3 and dist.is_primary():
            open(f"{folder}/going", "w").close()
        time.sleep(0.05)


def main(folder, then):
    signal.alarm(LIFE)
    result = dist.launch(who)
    path = f"{folder}/{dist.get_rank()}.json"
    with open(f"{path}.tmp", "w") as file:
        json.dump(result, file)
    os.rename(f"{path}.tmp", path)
    if then == "go on":
        dist.launch(on_and_on, folder)


def alive(folder):
    """All processes of a run, whoever their parent is by now: they have its folder in their environment."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
            if f"TEST_FOLDER={folder}\0".encode() in file.read():  # a zombie has none
                found.append(int(entry))
    return found


@contextlib.contextmanager
def running(command, folder, then, log="log", **env):
    clean = {n: v for n, v in os.environ.items() if not re.match("SLURM_(?!CONF)|OMPI_|PMI|MPI_|MASTER_|DIST_", n)}
    clean |= {"TEST_FOLDER": str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    clean |= {"PYTHONPATH": os.path.dirname(os.path.abspath(dist.__file__))} | env
    with open(folder / log, "w") as out:
        command = [*command, os.path.abspath(__file__), str(folder), then]
        process = subprocess.Popen(
            command, env=clean, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        for pid in {*alive(folder), *([process.pid] if process.poll() is None else [])}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def until(condition, seconds, *logs):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "\n".join(log.read_text() for log in logs)
        time.sleep(0.05)
    return seconds - (deadline - time.monotonic())


def results(folder, world_size, processes, *logs):
    """What each rank's `launch` has returned; fails as soon as a launcher has."""
    files = [folder / f"{rank}.json" for rank in range(world_size)]
    until(lambda: all(f.exists() for f in files) or any(p.poll() for p in processes), 100, *logs)
    assert all(file.exists() for file in files), "\n".join(log.read_text() for log in logs)
    return [json.loads(file.read_text()) for file in files]


def mpirun(names, says, package):
    for name in filter(shutil.which, names):
        if says in subprocess.run([name, "--version"], capture_output=True, text=True, timeout=10).stdout:
            return name
    pytest.skip(f"not installed: apt-get install {package}")


def openmpi_command():
    found = mpirun(("mpirun.openmpi", "mpirun"), "Open MPI", "openmpi-bin")
    return [found, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable], {}


def mpich_command():
    return [mpirun(("mpirun.mpich", "mpiexec.hydra", "mpirun"), "HYDRA", "mpich"), "-np", "2", sys.executable], {}


def srun_command():
    if not shutil.which("srun"):
        pytest.skip("not installed: apt-get install slurm-wlm munge, and as root: tests/slurm_here.sh")
    host = socket.gethostname().split(".")[0]
    for env in {}, {"SLURM_CONF": "/run/slurm_here/slurm.conf"}:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command = ["sinfo", "-h", "-n", host, "-o", "%t"]
            sinfo = subprocess.run(command, capture_output=True, text=True, timeout=3, env=os.environ | env)
            if {"idle", "mix", "alloc"} & set(sinfo.stdout.split()):
                return ["srun", "-n", "2", "-w", host, "--overcommit", "--immediate=20", sys.executable], env
    pytest.skip("no SLURM serves this machine: as root, tests/slurm_here.sh")


def torchrun_command():
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"], {}


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


SLOW_LAUNCHERS = [
    pytest.param(command, marks=pytest.mark.slow) for command in (openmpi_command, mpich_command, srun_command)
]


@on_linux
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", [pytest.param(torchrun_command, marks=pytest.mark.slow), *SLOW_LAUNCHERS])
def test_two_tasks_of_a_real_launcher(launcher, tmp_path):
    command, env = launcher()
    log, kill = tmp_path / "log", launcher != srun_command  # who kills srun finds its tasks in SLURM's hands
    with running(command, tmp_path, "go on" if kill else "end", **env) as process:
        seen = results(tmp_path, 2, [process], log)
        assert seen == [[[[0, 0, 2, 0], [1, 1, 2, 1]], 1], None]  # the result is rank 0's
        if kill:
            until((tmp_path / "going").exists, 60, log)
            assert len(alive(tmp_path)) >= 3
            process.kill()
        assert process.wait(60) == (-signal.SIGKILL if kill else 0), log.read_text()
        print(f"all gone after {until(lambda: not alive(tmp_path), 15, log):.1f} s")


# ---------------------------------------------------------------------------------------------------------- two nodes


@pytest.mark.slow
def test_the_error_reaches_torchruns_own_report(tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(
        "import distributed as dist\n"
        "def work(local_rank, world_size):\n"
        "    if local_rank == 1: raise KeyError('the cause')\n"
        "    dist.init_process_group(local_rank, world_size)\n"
        "dist.launch(work)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(program)]
    env = {**os.environ, "PYTHONPATH": os.path.dirname(dist.__file__)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    report = result.stderr.partition("Root Cause")[2]
    assert result.returncode == 1 and re.search(r"rank +: 1(?s:.*)KeyError: 'the cause'", report), result.stderr


def ip(*args):
    return subprocess.run(["ip", *args], capture_output=True, text=True, timeout=10)


def remove(namespace):
    for pid in ip("netns", "pids", namespace).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", namespace)


@pytest.fixture
def two_nodes():
    """Two machines, as far as the network goes: (namespace, device, address) of each, joined by a cable."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root, and apt-get install iproute2")
    for namespace, owner in re.findall(r"^(ddp-(\d+)-[ab])\b", ip("netns", "list").stdout, re.MULTILINE):
        if not os.path.exists(f"/proc/{owner}"):  # its run was killed
            remove(namespace)
    nodes = [(f"ddp-{os.getpid()}-{side}", f"cable-{side}", f"10.77.0.{n}") for n, side in enumerate("ab", 1)]
    (a, cable_a, _), (b, cable_b, _) = nodes
    try:
        for namespace, _, _ in nodes:
            if (made := ip("netns", "add", namespace)).returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        ip("link", "add", cable_a, "netns", a, "type", "veth", "peer", "name", cable_b, "netns", b).check_returncode()
        for namespace, cable, address in nodes:
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", cable).check_returncode()
            for device in "lo", cable:
                ip("-n", namespace, "link", "set", device, "up").check_returncode()
        yield nodes
    finally:
        for namespace, _, _ in nodes:
            remove(namespace)


@pytest.mark.slow
def test_two_nodes_and_the_cable_between_them_cut(two_nodes, tmp_path):
    """torchrun, 2 x 2 processes: right ranks and devices everywhere; then both sides name the ranks they have lost."""
    master = f"--master_addr={two_nodes[0][2]}"
    logs = [tmp_path / "a", tmp_path / "b"]
    with contextlib.ExitStack() as stack:
        sides = []
        for node, (namespace, cable, _) in enumerate(two_nodes):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
            command = ["ip", "netns", "exec", namespace, *torchrun, f"--node_rank={node}", master]
            env = {"DIST_TIMEOUT": "3", "GLOO_SOCKET_IFNAME": cable}
            sides.append(stack.enter_context(running(command, tmp_path, "go on", "ab"[node], **env)))
        ranks = [[0, 0, 4, 0], [1, 1, 4, 1], [2, 0, 4, 0], [3, 1, 4, 1]]
        assert results(tmp_path, 4, sides, *logs) == [[ranks, 6], None, None, None]
        until((tmp_path / "going").exists, 20, *logs)
        ip("-n", two_nodes[1][0], "link", "set", two_nodes[1][1], "down").check_returncode()
        waited = until(lambda: None not in [side.poll() for side in sides], 40, *logs)
        assert all(side.returncode for side in sides)
        print(f"both torchruns have ended {waited:.1f} s after the cut:")
        for log, mine, theirs in zip(logs, ((0, 1), (2, 3)), ((2, 3), (0, 1)), strict=True):
            here, there = mine[0] // 2, theirs[0] // 2
            lost = ", ".join(f"rank {rank} (machine {there})" for rank in theirs)
            expected = {f"rank {rank} (machine {here}) has lost {lost}" for rank in mine}
            found = set(re.findall(r"RuntimeError: (rank \d.* has lost rank .*)$", log.read_text(), re.MULTILINE))
            print(*sorted(found), sep="\n")
            assert found and found <= expected, log.read_text()
        assert not alive(tmp_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
