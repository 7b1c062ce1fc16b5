"""P2 and P9: torchrun's, mpirun's and srun's variables; their real programs; distributed.py alone in a folder."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from world import ENVIRONMENT, ROOT, error_of, forker, gone, shell, wait_for

import distributed as dist
import distributed_launcher as launcher

# As the launchers set them for the second of two tasks (Open MPI 4.1, MPICH 4.0, SLURM 22.05, torch 2.15).
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(("RANK", "SIZE"), "12", strict=True)}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_FD": "8", "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {"SLURM_JOB_ID": "8", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def srun(rank=1, size=2, local_rank=1, node_count=1, nodes="node7"):
    names = ("PROCID", "STEP_NUM_TASKS", "LOCALID", "STEP_NUM_NODES", "STEP_NODELIST", "STEP_ID")
    values = (rank, size, local_rank, node_count, nodes, 0)
    return BATCH | {f"SLURM_{name}": str(value) for name, value in zip(names, values, strict=True)}


ONE = srun(0, 1, 0)  # srun -n 1
SECOND_MACHINE = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
LAST_OF_FOUR = {"RANK": "3", "WORLD_SIZE": "4"}
HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
PLACES = {  # rank, world size, local rank, local world size; whether a launcher has said so
    "nobody": ({}, (0, 1, 0, 1, False)),
    "torchrun": (TORCHRUN, (1, 2, 1, 2, True)),
    "Open MPI": (OPEN_MPI, (1, 2, 1, 2, True)),
    "Open MPI, two machines": (OPEN_MPI | SECOND_MACHINE, (2, 4, 0, 2, True)),
    "MPICH": (MPICH, (1, 2, 1, 2, True)),
    "srun -n 2": (srun(), (1, 2, 1, 2, True)),
    "srun -n 2 --mpi=pmi2": (srun() | {"PMI_FD": "12", "PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 1, 2, True)),
    "srun, nodes of 2, 2, 2 and 1 tasks: the last": (srun(6, 7, 0, 4, "node[1-4]"), (6, 7, 0, None, True)),
    "srun -m cyclic": (srun(1, 4, 0, 2, "node[1-2]"), (1, 4, 0, None, True)),
    "sbatch without srun": (BATCH, (0, 1, 0, 1, False)),
    "srun -n 1": (ONE, (0, 1, 0, 1, False)),
    "MPICH in salloc": (ONE | MPICH, (1, 2, 1, 2, True)),
    "Open MPI in a job": (srun(0, 2, 0, 2) | OPEN_MPI, (1, 2, 1, 2, True)),
    "torch's own env://, as Kubernetes sets it": ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 0, None, True)),
    "torchrun on each node of a job": (srun(1, 2, 0, 2) | TORCHRUN | LAST_OF_FOUR, (3, 4, 1, 2, True)),
}


def test_without_local_rank_the_ranks_of_a_machine_take_its_gpus_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for rank, local_rank in (2, 2), (5, 1):
        assert under({"RANK": str(rank), "WORLD_SIZE": "8"}, who)[0] == (rank, 8, local_rank)


def who():
    return dist.get_rank(), dist.get_world_size(), dist.get_local_rank()


def under(environment, function, *args):
    """function(*args) in this environment; its result and the environment after it."""
    with mock.patch.dict(os.environ, environment, clear=True):
        launcher.translate_variables()  # as when distributed.py is imported
        return function(*args), dict(os.environ)


@pytest.mark.parametrize("case", PLACES)
def test_the_place_is_the_launchers_and_is_written_into_torchruns_variables(case):
    variables, place = PLACES[case]
    found, after = under(variables, who)
    assert found == place[:3]
    written = {name: str(number) for name, number in zip(TORCHRUN, place[:4], strict=True)}
    written = {name: number for name, number in written.items() if place[4] and number != "None"}
    assert {name: after[name] for name in TORCHRUN if name in after} == (
        variables if case.startswith("torch's") else written
    )
    assert under(after, who)[0] == found  # once is enough


def meeting_point(variables):
    def found():
        dist.check_variables()
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    return under(variables, found)


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        (OPEN_MPI, "127.0.0.1"),
        (MPICH, "127.0.0.1"),
        (srun(), "127.0.0.1"),
        (srun(1, 2, 0, 4, "node[08-09,12],other"), "node08"),
        (srun(1, 2, 0, 2, "gpu-a,gpu-b"), "gpu-a"),
    ],
)
def test_the_meeting_point_is_implied_by_the_launchers_variables_or_told(variables, address):
    (found, port), after = meeting_point(variables)
    assert found == address and 20000 <= port < 30000 and after["MASTER_PORT"] == str(port)
    assert meeting_point(variables | {"MASTER_ADDR": "there", "MASTER_PORT": "7"})[0] == ("there", 7)
    if variables is not MPICH:
        other_step = {"SLURM_STEP_ID": "1", "PMIX_NAMESPACE": "another"}
        (_, other_port), other = meeting_point(variables | other_step)
        assert other_port != port and other["DIST_RUN"] != after["DIST_RUN"]


WITHOUT_PMI_SIZE = {name: value for name, value in MPICH.items() if name != "PMI_SIZE"}
BAD = [
    ({"RANK": "1"}, "RANK=1: set RANK and WORLD_SIZE to this process's .*, or unset RANK$"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: set RANK and WORLD_SIZE"),
    (TORCHRUN | {"RANK": "x"}, "RANK=x WORLD_SIZE=2"),
    (TORCHRUN | {"RANK": "2"}, "RANK=2 WORLD_SIZE=2"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, "RANK=1 .*LOCAL_RANK=2"),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "RANK=1 .*LOCAL_WORLD_SIZE=3"),
    (WITHOUT_PMI_SIZE, "RANK=1 .*: set RANK and WORLD_SIZE"),
    (srun() | {"WORLD_SIZE": "2"}, "WORLD_SIZE=2: on SLURM, leave them to srun: unset WORLD_SIZE$"),
    (OPEN_MPI | SECOND_MACHINE, "MASTER_ADDR= and MASTER_PORT= must be rank 0's address .*-x MASTER_ADDR=HOST"),
    (TORCHRUN | {"MASTER_ADDR": "here", "MASTER_PORT": "70000"}, "MASTER_ADDR=here and MASTER_PORT=70000 must be"),
    ({"DIST_TIMEOUT": "-1"}, r"the timeout \(or DIST_TIMEOUT\) is -1: give seconds greater than 0"),
    ({"DIST_BACKEND": "nvcc"}, r"torch has no backend nvcc \(DIST_BACKEND or an argument\): choose nccl or gloo"),
    ({"DIST_BACKEND": "cpu:gloo,cuda:nvcc"}, "torch has no backend cpu:gloo,cuda:nvcc "),
]
BAD_STARTS = [  # only `launch` reads them
    ({"NPROC": "0"}, r"nproc \(or NPROC\) is 0: start at least 1 process"),
    ({"NPROC": "two"}, r"nproc \(or NPROC\) is two: start at least 1 process"),
    ({"DIST_GRACE": "nan"}, r"DIST_GRACE is nan: give a number of seconds \(DIST_GRACE=30\), or unset it"),
]


@pytest.mark.parametrize(("variables", "error"), BAD + BAD_STARTS)
def test_what_cannot_run_is_one_line_and_exit_code_2_or_an_error_in_a_shell(variables, error, monkeypatch, capsys):
    for function in dist.count_processes, (lambda: dist.launch(who)):
        with pytest.raises(SystemExit, match="2"):
            under(variables, function)
        out, err = capsys.readouterr()
        assert not out and re.fullmatch(f"distributed: {error}.*\n", err), err
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=error):
            patch.setattr(sys, "ps1", ">>> ", raising=False)
            under(variables, function)
    if (variables, error) in BAD:
        found, _ = under(variables, error_of, dist.init_process_group)
        assert re.match(f"ValueError: {error}", found) and "\n" not in found


def test_under_a_launcher_the_number_of_processes_is_the_launchers():
    assert under(TORCHRUN | LAST_OF_FOUR | HERE, dist.count_processes, 3)[0] == 4


def test_a_launcher_that_is_not_known_is_no_world_of_one(capsys):
    """Unless it has started one process."""
    unknown = {"PMI_RANK": "1", "PMI_SIZE": "2"}  # HPE Cray's PALS, for one of two tasks
    with pytest.raises(SystemExit, match="2"):
        under(unknown, dist.launch, who)
    said = capsys.readouterr().err
    assert re.fullmatch("distributed: PMI_SIZE is set, but not WORLD_SIZE: use torchrun, or .*\n", said), said
    assert under(unknown, error_of, dist.init_process_group)[0] == f"ValueError: {said[13:-1]}"
    assert under({"PMI_RANK": "0", "PMI_SIZE": "1"}, lambda: (dist.check_variables(), who())[1])[0] == (0, 1, 0)


TRAIN = """
import os, random, signal, sys, time
import torch
IMPORT
torch.manual_seed(5)
print("top\\n", end="")  # torchrun starts python -u: only what is one write stays together

def main_worker(local_rank, world_size):
    dist.init_process_group()
    drawn = sorted({f"{drawn.item():.4f}" for drawn in dist.gather(torch.rand(()))})
    rank = dist.get_rank()
    mean = dist.reduce(torch.tensor(rank + 1.0)).item()
    ranks = [found.item() for found in dist.gather(torch.tensor(rank))]
    dist.print_primary(f"{world_size} ranks, mean {mean:.6f}, gathered {ranks}, drawn {', '.join(drawn)}")
    unseeded = {number.item() for number in dist.gather(torch.tensor(random.random()))}
    dist.print_primary(f"{len(unseeded)} without a seed, {torch.get_num_threads()} threads")
    return "rank 0's"

def ends(local_rank, world_size, how):
    dist.init_process_group()
    if how == "fails" and dist.get_rank() == 1:
        raise ValueError("mine")
    if how == "stays":
        for number in signal.SIGTERM, signal.SIGINT:
            signal.signal(number, lambda *_: sys.exit(print("saved", flush=True) or 143))
        print(f"process {os.getpid()}\\n", end="", flush=True)
        time.sleep(1000)

if __name__ == "__main__":
    print(f"{dist.launch(main_worker)} is returned\\n", end="", flush=True)
    if sys.argv[1:]:
        dist.launch(ends, sys.argv[1])
"""


def alone(folder, *files, text="import distributed as dist"):
    for file in files:
        shutil.copy(ROOT / file, folder)
    (folder / "train.py").write_text(TRAIN.replace("IMPORT", text))


def says(n):
    """However it is started, all ranks draw the number that one process draws."""
    drawn = torch.rand((), generator=torch.Generator().manual_seed(5)).item()
    return f"{n} ranks, mean {(n + 1) / 2:.6f}, gathered {list(range(n))}, drawn {drawn:.4f}"


def test_distributed_py_alone_refuses_mpirun_and_srun(tmp_path):
    """Their processes would be worlds of one."""
    alone(tmp_path, "distributed.py")
    done = forker().run(tmp_path / "train.py", cwd=tmp_path, NPROC=1)
    assert done.code == 0 and says(1) in done.out, done
    said = r"distributed: \w+ is set, but not WORLD_SIZE: use torchrun, or copy distributed_launcher.py here\n"
    for variables in OPEN_MPI, MPICH, srun():
        done = forker().run(tmp_path / "train.py", cwd=tmp_path, **variables)
        assert (done.code, done.out) == (2, "top\n") and re.fullmatch(said, done.err), done


DIFFERENT_CALLS = """
import torch
import distributed as dist

def main_worker(local_rank, world_size):
    for number in range(20):  # torch's own store has the same keys for each group
        dist.init_process_group(timeout=20)
        assert dist.reduce(torch.tensor(number)).item() == number
        dist.cleanup()
    dist.init_process_group()
    try:
        dist.reduce(torch.zeros(3)) if dist.is_primary() else dist.gather(torch.zeros(3))
    except RuntimeError as error:
        print(f"{error}\\n", end="", flush=True)  # in one piece
    total = dist.reduce(torch.tensor(dist.get_rank()), "sum").item()
    dist.print_primary(f"the sum is {total}, the launcher {dist.launcher}")

if __name__ == "__main__":
    dist.launch(main_worker)
"""


def test_distributed_py_alone_under_torchrun_joins_groups_and_has_the_table_of_calls_that_differ(tmp_path):
    """By the command that a user types."""
    shutil.copy(ROOT / "distributed.py", tmp_path)
    (tmp_path / "train.py").write_text(DIFFERENT_CALLS)
    done = shell(*torchrun_command()[0][1:], "train.py", cwd=tmp_path)
    assert done.code == 0 and "the sum is 1, the launcher None" in done.out, done
    table = r"the ranks made different calls.*\n  rank 0: reduce mean of.*\n  rank 1: gather of"
    assert len(re.findall(table, done.out)) == 2, done.out


def test_both_run_in_a_package(tmp_path):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    alone(package, "distributed.py", "distributed_launcher.py", text="from . import distributed as dist")
    for name in "distributed", "distributed_launcher":  # others of the same names, as Dask's
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    for folder in tmp_path, package:  # a program may have a launcher.py, which is not even read
        (folder / "launcher.py").write_bytes("é".encode("latin-1"))
    done = forker().run("-m", "mine.train", cwd=tmp_path, NPROC=3)
    assert done.code == 0 and says(3) in done.out, done
    assert "1 without a seed" in done.out, "forked ranks draw on where the program is, also with Python's generator"


def mpirun(names, says, package):
    for name in filter(shutil.which, names):
        if says in subprocess.run([name, "--version"], capture_output=True, text=True, timeout=10).stdout:
            return name
    pytest.skip(f"not installed: apt-get install {package}")


def torchrun_command():
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"], {}


def open_mpi_command():
    found = mpirun(("mpirun.openmpi", "mpirun"), "Open MPI", "openmpi-bin")
    return [found, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable], {}


def mpich_command():
    return [mpirun(("mpirun.mpich", "mpiexec.hydra", "mpirun"), "HYDRA", "mpich"), "-np", "2", sys.executable], {}


def wrapped(command):
    """As conda run, nsys and time do: the program is not the launcher's own child."""
    return [*command[:-1], "sh", "-c", '"$@"; exit $?', "wrapper", "sh", "-c", '"$@"; exit $?', "wrapper", command[-1]]


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


def start(command, folder, *args, **environment):
    clean = {n: v for n, v in ENVIRONMENT.items() if not re.match("SLURM_(?!CONF)|OMPI_|PMI|MPI_|MASTER_", n)}
    return subprocess.Popen(
        [*command, folder / "train.py", *args],
        cwd=folder,
        env=clean | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def python_command():
    return [sys.executable], {"NPROC": "2"}


STARTS = {"python": python_command, "torchrun": torchrun_command, "srun": srun_command}
STARTS |= {"Open MPI": open_mpi_command, "MPICH": mpich_command}
STARTS |= {"MPICH, wrapped": lambda: (wrapped(mpich_command()[0]), {})}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "end"),
    [(name, "fails") for name in ("python", "torchrun", "srun", "Open MPI", "MPICH, wrapped")]
    + [("torchrun", "SIGTERM"), ("torchrun", "SIGINT"), ("MPICH", "SIGKILL")],
)
def test_what_the_starts_have_in_common_and_in_what_they_differ(name, end, tmp_path):
    """The table of docs/launching.md, and that no rank outlives its launcher.  Notebooks: test_launcher.py."""
    if end == "SIGKILL" and sys.platform != "linux":
        pytest.skip("the kernel of Linux ends them")
    command, environment = STARTS[name]()
    alone(tmp_path, "distributed.py", "distributed_launcher.py")
    process = start(command, tmp_path, "fails" if end == "fails" else "stays", **environment)
    out, ranks = "", []
    while end != "fails" and len(ranks) < 2 and (line := process.stdout.readline()):
        out += line
        ranks += re.findall(r"process (\d+)\n", line)  # another rank's words may stand before it
    if end != "fails":
        process.send_signal(signal.Signals[end])
    out += process.communicate(timeout=100)[0]
    assert process.returncode == (-signal.SIGKILL if end == "SIGKILL" else 1), out
    assert ("ValueError: mine" in out) == (end == "fails"), out
    assert out.count("saved") == (2 if end in ("SIGTERM", "SIGINT") else 0), out
    assert says(2) in out, out
    is_python = name == "python"
    assert out.count("top\n") == (1 if is_python else 2)
    assert ("1 without a seed" if is_python else "2 without a seed") in out
    assert out.count("rank 0's is returned") == 1 and out.count("None is returned") == (0 if is_python else 1)
    if name in ("python", "torchrun"):
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        threads = max(1, cores // 2) if is_python else 1
        assert f"{threads} threads" in out or Path("/sys/fs/cgroup/cpu.max").exists(), out  # a container's share
    wait_for(lambda: all(map(gone, ranks)))


@pytest.mark.slow
def test_two_containers_whose_processes_have_the_same_numbers_do_not_meet():
    """Their runs have other names and ports, although mpirun's name is made of a process's number."""
    if subprocess.run(["unshare", "-p", "-f", "--mount-proc", "true"]).returncode:
        pytest.skip("PID namespaces need root")
    variables = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-7"}
    code = "import os, distributed; print(os.environ['DIST_RUN'])"
    contained = ["unshare", "-p", "-f", "--mount-proc", sys.executable, "-c", code]
    there = subprocess.run(
        contained, cwd=ROOT, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=100
    )
    here = under(variables, who)[1]["DIST_RUN"]
    assert there.returncode == 0 and here.startswith("prterun-7 pid:"), there
    assert there.stdout.startswith("prterun-7 pid:") and there.stdout.strip() != here, there


def ip(*args):
    return subprocess.run(["ip", *args], capture_output=True, text=True, timeout=10)


@pytest.fixture
def two_machines():
    """As far as the network goes: (namespace, device, address) of each, joined by a cable."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root, and apt-get install iproute2")
    machines = [(f"ddp-{os.getpid()}-{side}", f"cable-{side}", f"10.77.0.{n}") for n, side in enumerate("ab", 1)]
    (a, cable_a, _), (b, cable_b, _) = machines
    try:
        for namespace, _, _ in machines:
            if (made := ip("netns", "add", namespace)).returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        ip("link", "add", cable_a, "netns", a, "type", "veth", "peer", "name", cable_b, "netns", b).check_returncode()
        for namespace, cable, address in machines:
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", cable).check_returncode()
            for device in "lo", cable:
                ip("-n", namespace, "link", "set", device, "up").check_returncode()
            hosts = Path("/etc/netns", namespace, "hosts")  # what /etc/hosts is there
            hosts.parent.mkdir(parents=True)
            first = "127.0.1.1" if namespace == a else machines[0][2]
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n{first} first\n")
        yield machines
    finally:
        for namespace, _, _ in machines:
            ip("netns", "del", namespace)
            shutil.rmtree(f"/etc/netns/{namespace}", ignore_errors=True)


@pytest.mark.slow
def test_two_machines(two_machines, tmp_path):
    """As Debian installs them: on each its own name is 127.0.1.1."""
    alone(tmp_path, "distributed.py", "distributed_launcher.py")
    sides = []
    for rank, (namespace, _, _) in enumerate(two_machines):
        command = ["ip", "netns", "exec", namespace, sys.executable]
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}
        sides.append(start(command, tmp_path, **place))
    outs = [side.communicate(timeout=100)[0] for side in sides]
    assert [side.returncode for side in sides] == [0, 0] and says(2) in outs[0] and says(2) not in outs[1], outs


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_batch_script_of_launching_md_saves_at_sigterm_and_puts_the_job_back(tmp_path):
    """On one node, with two tasks and synthetic digits."""
    _, slurm = srun_command()  # skips where no SLURM serves this machine
    script = re.search(r"```bash\n(#!.*?)```", (ROOT / "docs/launching.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    assert "cifar10_ddp.py --amp ||" in script
    small = f"{ROOT}/cifar10_ddp.py --dataset synthetic --width 2 --batch-size 64 --epochs 1000"
    (tmp_path / "train.sbatch").write_text(script.replace("cifar10_ddp.py --amp ||", f"{small} ||"))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(f"PATH={os.path.dirname(sys.executable)}:$PATH\n")
    env = {name: value for name, value in (os.environ | slurm).items() if not name.startswith("OMP_")}

    def slurms(*command):
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30).stdout.strip()

    options = "--nodes=1 --gpus-per-node=0 --ntasks-per-node=2 --cpus-per-task=1 --overcommit --output=log --parsable"
    job = slurms("sbatch", *options.split(), "train.sbatch")

    def log():
        file = tmp_path / "log"
        return file.read_text() if file.exists() else ""

    def seen():
        return slurms("squeue", "-o", "%all") + slurms("sinfo", "-o", "%all") + log()

    try:
        with contextlib.suppress(AssertionError):
            wait_for(lambda: slurms("squeue", "-h", "-o", "%t", "-j", job) == "R", 60)
        if not log() and slurms("squeue", "-h", "-o", "%t", "-j", job) != "R":
            pytest.skip(f"SLURM did not start the job: {seen()}")
        wait_for(lambda: "epoch 1, batch 0" in log(), 120, seen)
        wait_for(lambda: not slurms("scancel", "--signal=TERM", job) and "saved at" in log(), 60, seen)
        wait_for(lambda: slurms("squeue", "-h", "-o", "%t", "-j", job) == "PD", 60, seen)  # to be started again
    finally:
        slurms("scancel", job)
    assert "distributed: 2 processes, gloo, cpu" in log()
    assert list(tmp_path.glob("runs/cifar10/step-*.pt"))
