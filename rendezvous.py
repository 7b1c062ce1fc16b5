"""Who is this process, where do all of them meet, who is missing, who was lost?  Never touches a tensor.

A process's place is read from torchrun's variables, whoever has started it:

    torchrun         sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT itself
    srun, mpirun     have variables of their own; `world` translates them into torchrun's, once
    launcher.py      sets them, and DIST_STORE: a file in a private folder where its processes meet

DIST_LAUNCHER notes whose variables were translated.  Part of distributed.py; copy it together with that file.
"""

import os
import re
import socket
import sys
import time
import zlib
from datetime import timedelta
from typing import NamedTuple

from torch import distributed as torch_dist

LIMITS = {  # in seconds; an environment variable of the same name overrides each
    "DIST_INIT_TIMEOUT": 120,  # for all ranks to come together
    "DIST_TIMEOUT": 600,  # for one collective
    "DIST_GRACE": 3,  # between SIGTERM and SIGKILL, when launcher.py ends the others after a failure
}
REPORT_MISSING_AFTER = 10  # seconds; then rank 0 lists the ranks that are missing
hosts: list[str] = []  # each rank's machine, as the roll-call has found them
_store = None  # rank 0 serves it to the others, so it must live as long as the process
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def seconds(name: str, default: float | None = None) -> float:
    """A limit: from the environment, else the default.  ValueError, in one line, if it is no number."""
    text = os.environ.get(name) or str(LIMITS[name] if default is None else default)
    try:
        value = float(text)
    except ValueError:
        value = -1
    least = 0 if name == "DIST_GRACE" else 0.001  # without any time nothing could come in time
    if not least <= value <= 1e9:  # nan is refused, too
        raise ValueError(f"{name} is {text}: give a number of seconds ({name}={LIMITS[name]}), or unset it")
    return value


def check_limits() -> None:
    """Before anything starts: an error while processes are being ended would leave some of them behind."""
    for name in LIMITS:
        seconds(name)


# ------------------------------------------------------------------------------------------------ who is this process?


class World(NamedTuple):
    """A process's place among the others, and which launcher has started it ("" for none)."""

    launcher: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


# Each launcher's variables for the rank, the world size, the local rank and the local world size.  If several launchers
# have set theirs, the first in this table counts: mpirun and torchrun run inside SLURM jobs, and torchrun inside
# mpirun, not the other way round.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun (Open MPI)": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpirun (MPICH)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
_by_hand = World()  # where no launcher's variables are set: what init_process_group was told


def world() -> World:
    """This process's place.  ValueError, in one line, if a launcher's variables are incomplete or contradictory.

    What srun and mpirun say is repeated in torchrun's variables, for everything that reads those.
    """
    found = _from_environment()
    if found.launcher in LAUNCHERS and "RANK" not in os.environ:
        os.environ |= dict(zip(LAUNCHERS["torchrun"], map(str, found[1:]), strict=True))
        os.environ["DIST_LAUNCHER"] = found.launcher
    if not found.launcher and _by_hand == World() and torch_dist.is_initialized():  # by torch's own function
        rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
        return World("", rank, world_size, rank, world_size)
    return found if found.launcher else _by_hand


def _from_environment() -> World:
    for launcher, names in LAUNCHERS.items():
        given = _variables(launcher, names)
        if not given:
            continue
        for name in names:
            if not given.get(name, "").isdigit():
                wrong = f"{name} is {given.get(name) or 'not set'}, but {launcher} sets all of {', '.join(names)}"
                raise ValueError(f"{wrong}: start with {launcher}, or unset {' '.join(given)}")
        found = World(launcher, *(int(given[name]) for name in names))
        _check(found, given)
        if "DIST_STORE" in os.environ:
            return found._replace(launcher="launch")
        if launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ:  # translated, or set by hand
            return found._replace(launcher=os.environ.get("DIST_LAUNCHER", launcher))
        return found
    return World()


def _variables(launcher: str, names: tuple[str, ...]) -> dict[str, str]:
    """Those of the launcher's variables that are set; none if it has not started this process."""
    env = os.environ
    given = {name: env[name] for name in names if name in env}
    if launcher == "mpirun (MPICH)" and "SLURM_STEP_ID" in env and "MPI_LOCALRANKID" not in env:
        return {}  # srun --mpi=pmi2 sets PMI_RANK, too
    if launcher != "srun":
        return given
    if env.get("SLURM_STEP_NUM_TASKS", "1") == "1":  # a batch script or an interactive shell: a world of one
        return {}
    counts = []  # tasks of each node, from a list such as 2(x3),1
    for part in given.get(names[3], "").split(","):
        count, _, times = part.removesuffix(")").partition("(x")
        counts += [count] * int(times or 1)
    node = env.get("SLURM_NODEID", "not set")
    if not node.isdigit() or int(node) >= len(counts):
        raise ValueError(f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE lists {len(counts)} node(s)")
    return given | {names[3]: counts[int(node)]}


def _check(found: World, given: dict[str, str]) -> None:
    """ValueError if the numbers contradict each other, or if several worlds run side by side."""
    fits = found.rank < found.world_size and found.local_world_size <= found.world_size
    if not (fits and found.local_rank < found.local_world_size and found.local_rank <= found.rank):
        raise ValueError(f"these contradict each other: {given}; start with {found.launcher}, or unset them")
    env = os.environ
    tasks, nodes = env.get("SLURM_STEP_NUM_TASKS", "1"), env.get("SLURM_STEP_NUM_NODES", "1")
    if "mpirun" in found.launcher and int(tasks) > int(nodes):  # mpirun itself starts one task on each node
        raise ValueError(f"SLURM_STEP_NUM_TASKS is {tasks}: that many mpiruns run side by side; leave srun out")
    torchruns = int(env.get("GROUP_WORLD_SIZE", sys.maxsize))  # one on each node
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if found.launcher == "torchrun" and int(env.get(name, 1)) > torchruns:
            wrong = f"{name} is {env[name]}: that many torchruns run side by side, each a world of its own"
            raise ValueError(f"{wrong}: start one per node with --nnodes, or leave torchrun out: launch needs none")


def join(rank: int | None, world_size: int | None) -> World:
    """The place of a process whose init_process_group was called with these; ValueError if it contradicts `world`."""
    global _by_hand
    found = world()
    if found.launcher:
        if rank not in (None, found.rank, found.local_rank) or world_size not in (None, found.world_size):
            raise ValueError(f"init_process_group({rank}, {world_size}), but this is {found}")
        return found
    rank, world_size = rank or 0, world_size or 1  # no launcher (mp.spawn, say): the caller knows
    if not 0 <= rank < world_size:
        raise ValueError(f"init_process_group: rank {rank} of {world_size}: ranks go from 0 to {world_size - 1}")
    _by_hand = World("", rank, world_size, rank, world_size)  # on one machine, as far as is known
    return _by_hand


# ------------------------------------------------------------------------------------------------- where do they meet?


def meeting_point(found: World) -> tuple[str, int]:
    """Rank 0's address and port: from MASTER_ADDR and MASTER_PORT, else what srun's and mpirun's variables imply."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (address and port) and found.launcher in ("", "launch", "torchrun"):
        raise ValueError("MASTER_ADDR and MASTER_PORT must say where rank 0 is: set them, or start with launch")
    one_machine = found.local_world_size == found.world_size
    if not address and one_machine:
        address = "127.0.0.1"
    elif not address and found.launcher == "srun":  # the step's first host, of node[08-09,12],other
        address = re.sub(r"\[(\w+)[^]]*]", r"\1", os.environ["SLURM_STEP_NODELIST"]).split(",")[0]
    elif not address:
        raise ValueError("MASTER_ADDR is not set: over several machines, mpirun needs -x MASTER_ADDR=HOST_OF_RANK_0")
    if not port and found.launcher == "mpirun (MPICH)" and not one_machine:
        raise ValueError("MASTER_PORT is not set: over several machines, MPICH's mpirun needs -genv MASTER_PORT 29500")
    if port:
        return address, int(port)
    run = os.environ.get("PMIX_NAMESPACE") or str(os.getppid())  # the same for all tasks, different for other runs
    if found.launcher == "srun":
        run = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    return address, 20000 + zlib.crc32(run.encode()) % 10000  # below the ports that systems give out


def _attempt() -> str:
    """For the keys: torchrun's store outlives an attempt, with all that was written in it."""
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}"


def _open_store(found: World, timeout: float) -> torch_dist.Store:
    if found.launcher == "launch":
        return torch_dist.FileStore(os.environ["DIST_STORE"], found.world_size)
    if found.world_size == 1 and not found.launcher:
        return torch_dist.HashStore()
    if isinstance(_store, torch_dist.TCPStore):  # a second group
        return _store
    address, port = meeting_point(found)
    if found.world_size == found.local_world_size and address == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # the host's name may lead elsewhere, or nowhere
    serve = found.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun serves it
    wait = timedelta(seconds=timeout)
    return torch_dist.TCPStore(address, port, found.world_size, serve, wait, wait_for_workers=False, multi_tenant=True)


def meet(found: World, gpu: str = "", timeout: float | None = None) -> torch_dist.Store:
    """Wait until all ranks have come; returns a store for their new process group.

    gpu: the card that this rank uses, if no other one may.  timeout: seconds (DIST_INIT_TIMEOUT).  After 10 s rank 0
    says who is missing; at the end TimeoutError names them.
    """
    global hosts, _store
    check_limits()
    timeout = timeout or seconds("DIST_INIT_TIMEOUT")
    _store = _open_store(found, timeout)
    group = _store.add(f"{_attempt()} groups of {found.rank}", 1)
    store = torch_dist.PrefixStore(f"{_attempt()} group {group}", _store)  # other keys for each group
    host = f"machine {os.environ.get('GROUP_RANK') or os.environ.get('SLURM_NODEID') or socket.gethostname()}"
    hosts = _roll_call(store, found, timeout, host, gpu)
    return store


def _roll_call(store: torch_dist.Store, found: World, timeout: float, host: str, gpu: str) -> list[str]:
    """Wait for all ranks, and say which are missing: torch's own start-up waits without a word.  Returns the hosts."""
    keys = [f"rank {rank}" for rank in range(found.world_size)]
    store.set(keys[found.rank], f"{host}\n{gpu}")
    first_wait = min(REPORT_MISSING_AFTER, timeout)
    missing = _missing_after(first_wait, store, keys)
    if missing and timeout > first_wait:
        if found.rank == 0:
            print(f"distributed: waiting for {missing}", file=sys.stderr, flush=True)
        missing = _missing_after(timeout - first_wait, store, keys)
    if missing:
        raise TimeoutError(f"init_process_group: {missing} did not come within {timeout:.0f} s")
    machines, gpus = zip(*(store.get(key).decode().split("\n") for key in keys), strict=True)
    same = [key for key, other in zip(keys, gpus, strict=True) if gpu and other == gpu]
    if len(same) > 1:  # NCCL can't, and would say so less clearly
        raise RuntimeError(f"{' and '.join(same)} use the same GPU ({gpu}): one process per GPU, or backend gloo")
    return list(machines)


def _missing_after(limit: float, store: torch_dist.Store, keys: list[str]) -> str:
    """Wait so many seconds for all keys; the names of those that have not come, or ""."""
    try:
        store.wait(keys, timedelta(seconds=limit))
        return ""
    except RuntimeError:  # DistStoreError, or plain from a FileStore
        missing = [key for key in keys if not store.check([key])]
        return f"{', '.join(missing)} of {len(keys)}" if missing else ""


def wait_for_all(store: torch_dist.Store, found: World, timeout: float | None = None) -> None:
    """After joining: nobody goes on, and perhaps leaves, while another rank is still connecting to it."""
    store.set(f"joined {found.rank}", "")
    keys = [f"joined {rank}" for rank in range(found.world_size)]
    store.wait(keys, timedelta(seconds=timeout or seconds("DIST_INIT_TIMEOUT")))


# --------------------------------------------------------------------------------------------------------- who is lost?


def lost(found: World) -> str:
    """Who can't be reached from here any more, after a collective has failed, in words; "" if nobody."""
    unheard = list(range(found.world_size))
    deadline = time.monotonic() + 5
    try:  # over a new connection: on one that was cut, every call hangs
        store = torch_dist.TCPStore(*meeting_point(found), is_master=False, timeout=timedelta(seconds=5))
        store.set(f"{_attempt()} still here {found.rank}", "")
        while unheard and time.monotonic() < deadline:
            unheard = [rank for rank in unheard if not store.check([f"{_attempt()} still here {rank}"])]
            time.sleep(0.1)
    except RuntimeError:  # rank 0's machine is out of reach, and so are the others
        unheard = [rank for rank in unheard if hosts[rank] != hosts[found.rank]] or [0]
    names = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in unheard)
    return f"rank {found.rank} ({hosts[found.rank]}) has lost {names}" if names else ""
