"""Who is this process, where do all of them meet, who is missing, who was lost?  Never touches a tensor.

A process's place is read from torchrun's variables, whoever has started it:

    torchrun         sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT itself
    srun, mpirun     have variables of their own; `set_torchruns_variables` translates them
    launcher.py      sets them, and DIST_STORE: a file in a private folder where its processes meet

Part of distributed.py; copy it together with that file.
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
    "DIST_GRACE": 3,  # between SIGTERM and SIGKILL, when launcher.py ends the other ranks after a failure
}
REPORT_MISSING_AFTER = 10  # seconds; then rank 0 lists the ranks that are missing
hosts: list[str] = []  # each rank's machine, as the roll-call has found them
_store = None  # rank 0 serves it to the others, so it must live as long as the process
_interface = "lo0" if sys.platform == "darwin" else "lo"
LOOPBACK = {"GLOO_SOCKET_IFNAME": _interface, "NCCL_SOCKET_IFNAME": f"={_interface}"}  # without "=" NCCL takes a prefix


def seconds(name: str) -> float:
    """A limit: the environment's, or the default.  ValueError, in one line, if it is not a number of seconds."""
    text = os.environ.get(name) or str(LIMITS[name])
    try:
        value = float(text)
    except ValueError:
        value = -1
    shortest = 0 if name == "DIST_GRACE" else 0.001
    if not shortest <= value <= 1e9:  # nan is refused, too
        raise ValueError(f"{name} is {text}: give a number of seconds ({name}={LIMITS[name]}), or unset it")
    return value


def check_limits() -> None:
    """ValueError, in one line, before anything starts."""
    for name in LIMITS:
        seconds(name)


# ------------------------------------------------------------------------------------------------ who is this process?


# What may have started this process.
NONE, LAUNCH, TORCHRUN, SRUN = "", "launch", "torchrun", "srun"
OPEN_MPI, MPICH = "mpirun (Open MPI)", "mpirun (MPICH)"


class World(NamedTuple):
    """A process's place among the others, and what has started it."""

    launcher: str = NONE
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_one_machine(self) -> bool:
        return self.local_world_size == self.world_size


# Each launcher's variables for the rank, the world size, the local rank and the local world size.  If several launchers
# have set theirs, the first in this table counts: mpirun and torchrun run inside SLURM jobs, and torchrun inside
# mpirun, not the other way round.
LAUNCHERS = {
    TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    OPEN_MPI: tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    MPICH: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    SRUN: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
_by_hand = World()  # without a launcher: the rank and the world size that init_process_group was given


def get_world() -> World:
    """This process's place.  ValueError, in one line, if a launcher's variables are incomplete or contradictory."""
    for launcher, names in LAUNCHERS.items():
        given = _given_variables(launcher, names)
        if given:
            return _read_world(launcher, names, given)
    if _by_hand == World() and torch_dist.is_initialized():  # by torch's own function
        rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
        return World(NONE, rank, world_size, rank, world_size)
    return _by_hand


def set_torchruns_variables() -> None:
    """Write the place that srun's or mpirun's variables give into torchrun's, for everything that reads those.

    DIST_LAUNCHER notes whose variables were translated.
    """
    world = get_world()
    if world.launcher and "RANK" not in os.environ:
        for name, value in zip(LAUNCHERS[TORCHRUN], world[1:], strict=True):
            os.environ[name] = str(value)
        os.environ["DIST_LAUNCHER"] = world.launcher


def _given_variables(launcher: str, names: tuple[str, ...]) -> dict[str, str]:
    """Those of the launcher's variables that are set; none if it has not started this process."""
    env = os.environ
    given = {name: env[name] for name in names if name in env}
    if launcher == MPICH and "SLURM_STEP_ID" in env and "MPI_LOCALRANKID" not in env:
        return {}  # srun --mpi=pmi2 sets PMI_RANK, too
    if launcher != SRUN:
        return given
    if env.get("SLURM_STEP_NUM_TASKS", "1") == "1":  # a batch script or an interactive shell: a world of one
        return {}
    counts = []  # tasks of each node, from a list such as 2(x3),1
    for part in given.get(names[3], "").split(","):
        count, _, times = part.removesuffix(")").partition("(x")
        counts += [count] * int(times or 1)
    node = env.get("SLURM_NODEID", "not set")
    if not node.isdecimal() or int(node) >= len(counts):
        raise ValueError(f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE lists {len(counts)} node(s)")
    return given | {names[3]: counts[int(node)]}


def _read_world(launcher: str, names: tuple[str, ...], given: dict[str, str]) -> World:
    for name in names:
        if not given.get(name, "").isdecimal():
            wrong = f"{name} is {given.get(name) or 'not set'}, but {launcher} sets all of {', '.join(names)}"
            raise ValueError(f"{wrong}: start with {launcher}, or unset {' '.join(given)}")
    world = World(launcher, *(int(given[name]) for name in names))
    fits = world.rank < world.world_size and world.local_world_size <= world.world_size
    if not (fits and world.local_rank < world.local_world_size and world.local_rank <= world.rank):
        raise ValueError(f"these contradict each other: {given}; start with {launcher}, or unset them")
    _refuse_several_worlds(world)
    if "DIST_STORE" in os.environ:
        return world._replace(launcher=LAUNCH)
    if launcher == TORCHRUN and "TORCHELASTIC_RUN_ID" not in os.environ:  # translated, or set by hand
        return world._replace(launcher=os.environ.get("DIST_LAUNCHER", TORCHRUN))
    return world


def _refuse_several_worlds(world: World) -> None:
    """ValueError if several launchers run side by side, each with a world of its own."""
    tasks = _number("SLURM_STEP_NUM_TASKS", 1)
    nodes = _number("SLURM_STEP_NUM_NODES", 1)
    if world.launcher in (OPEN_MPI, MPICH) and tasks > nodes:  # mpirun starts one task on each node
        raise ValueError(f"SLURM_STEP_NUM_TASKS is {tasks}: that many mpiruns run side by side; leave srun out")
    if world.launcher != TORCHRUN or "GROUP_WORLD_SIZE" not in os.environ:
        return
    torchruns = _number("GROUP_WORLD_SIZE", 1)  # one on each node
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (started := _number(name, 1)) > torchruns:
            wrong = f"{name} is {started}: that many torchruns run side by side, each a world of its own"
            raise ValueError(f"{wrong}: start one per node with --nnodes, or leave torchrun out: launch needs none")


def _number(name: str, default: int) -> int:
    """A whole number from the environment; ValueError, in one line, if it is none."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise ValueError(f"{name} is {text}: give a number, or unset it")
    return int(text)


def join(rank: int | None, world_size: int | None) -> World:
    """The place of a process that has called init_process_group with these; ValueError if a launcher says otherwise."""
    global _by_hand
    world = get_world()
    if world.launcher:
        if rank not in (None, world.rank, world.local_rank) or world_size not in (None, world.world_size):
            place = f"rank {world.rank} (local rank {world.local_rank}) of {world.world_size}"
            raise ValueError(f"init_process_group({rank}, {world_size}), but {world.launcher} says: {place}")
        set_torchruns_variables()
        return world
    rank, world_size = rank or 0, world_size or 1  # no launcher (mp.spawn, say): the caller knows
    if not 0 <= rank < world_size:
        raise ValueError(f"init_process_group: rank {rank} of {world_size}: ranks go from 0 to {world_size - 1}")
    _by_hand = World(NONE, rank, world_size, rank, world_size)  # on one machine, as far as is known
    return _by_hand


# ------------------------------------------------------------------------------------------------- where do they meet?


def meeting_point(world: World) -> tuple[str, int]:
    """Rank 0's address and port: from MASTER_ADDR and MASTER_PORT, else what srun's and mpirun's variables imply."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (address and port) and world.launcher in (NONE, LAUNCH, TORCHRUN):
        raise ValueError("MASTER_ADDR and MASTER_PORT must say where rank 0 is: set them, or start with launch")
    if not address and world.is_one_machine:
        address = "127.0.0.1"
    elif not address and world.launcher == SRUN:  # the step's first host, of node[08-09,12],other
        address = re.sub(r"\[(\w+)[^]]*]", r"\1", os.environ["SLURM_STEP_NODELIST"]).split(",")[0]
    elif not address:
        raise ValueError("MASTER_ADDR is not set: over several machines, mpirun needs -x MASTER_ADDR=HOST_OF_RANK_0")
    if port:
        number = _number("MASTER_PORT", 0)
        if number > 65535:
            raise ValueError(f"MASTER_PORT is {number}: ports go up to 65535")
        return address, number
    if world.launcher == MPICH and not world.is_one_machine:
        raise ValueError("MASTER_PORT is not set: over several machines, MPICH's mpirun needs -genv MASTER_PORT 29500")
    run = os.environ.get("PMIX_NAMESPACE") or str(os.getppid())  # the same for all tasks, different for other runs
    if world.launcher == SRUN:
        run = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    return address, 20000 + zlib.crc32(run.encode()) % 10000  # below the ports that systems give out


def set_meeting_point(world: World) -> tuple[str, int]:
    """Write the meeting point into MASTER_ADDR and MASTER_PORT, for torch's own init_process_group.

    On one machine Gloo and NCCL then use the loopback interface, unless their variables name a different one: the
    host's name may lead elsewhere, or nowhere.
    """
    address, port = meeting_point(world)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if world.is_one_machine and address == "127.0.0.1":
        for name, interface in LOOPBACK.items():
            os.environ.setdefault(name, interface)
    return address, port


def _attempt() -> str:
    """For the keys: torchrun's store outlives an attempt, with all that was written in it."""
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}"


def _open_store(world: World, timeout: float) -> torch_dist.Store:
    if world.launcher == LAUNCH:
        return torch_dist.FileStore(os.environ["DIST_STORE"], world.world_size)
    if world.world_size == 1 and not world.launcher:
        return torch_dist.HashStore()
    if isinstance(_store, torch_dist.TCPStore):  # a second group
        return _store
    address, port = set_meeting_point(world)
    serve = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun serves it
    wait = timedelta(seconds=timeout)
    return torch_dist.TCPStore(address, port, world.world_size, serve, wait, wait_for_workers=False, multi_tenant=True)


def meet(world: World, gpu: str = "", timeout: float | None = None) -> torch_dist.Store:
    """Wait until all ranks have come; returns a store for their new process group.

    gpu: the card that this rank uses, if no other one may.  timeout: seconds (DIST_INIT_TIMEOUT).  After 10 s rank 0
    says who is missing; at the end TimeoutError names them.
    """
    global hosts, _store
    check_limits()
    timeout = timeout or seconds("DIST_INIT_TIMEOUT")
    _store = _open_store(world, timeout)
    group = _store.add(f"{_attempt()} groups of {world.rank}", 1)
    store = torch_dist.PrefixStore(f"{_attempt()} group {group}", _store)  # other keys for each group
    host = f"machine {os.environ.get('GROUP_RANK') or os.environ.get('SLURM_NODEID') or socket.gethostname()}"
    hosts = _roll_call(store, world, timeout, host, gpu)
    return store


def _roll_call(store: torch_dist.Store, world: World, timeout: float, host: str, gpu: str) -> list[str]:
    """Wait for all ranks, and say which are missing: torch's own start-up waits without a word.  Returns the hosts."""
    keys = [f"rank {rank}" for rank in range(world.world_size)]
    store.set(keys[world.rank], f"{host}\n{gpu}")
    first_wait = min(REPORT_MISSING_AFTER, timeout)
    missing = _missing_after(first_wait, store, keys)
    if missing and timeout > first_wait:
        if world.rank == 0:
            print(f"distributed: waiting for {missing}", file=sys.stderr, flush=True)
        missing = _missing_after(timeout - first_wait, store, keys)
    if missing:
        raise TimeoutError(f"init_process_group: {missing} did not come within {timeout:.0f} s")
    machines, gpus = zip(*(store.get(key).decode().split("\n") for key in keys), strict=True)
    known = set(gpu) - set("0-")  # a driver that doesn't know the card's number says zeros
    same = [key for key, other in zip(keys, gpus, strict=True) if known and other == gpu]
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


def wait_for_all(store: torch_dist.Store, world: World, timeout: float | None = None) -> None:
    """After joining: no rank goes on, and perhaps ends, while another one is still connecting to it."""
    limit = timedelta(seconds=timeout or seconds("DIST_INIT_TIMEOUT"))
    store.set(f"joined {world.rank}", "")
    store.wait([f"joined {rank}" for rank in range(world.world_size)], limit)
    store.set(f"saw all {world.rank}", "")
    if world.rank == 0:  # it may serve the store: until here the others need its answers
        store.wait([f"saw all {rank}" for rank in range(world.world_size)], limit)


# --------------------------------------------------------------------------------------------------------- who is lost?


def lost(world: World) -> str:
    """Who can't be reached from here any more, after a collective has failed, in words; "" if nobody."""
    unheard = list(range(world.world_size))
    deadline = time.monotonic() + 5
    try:  # over a new connection: on one that was cut, every call hangs
        store = torch_dist.TCPStore(*meeting_point(world), is_master=False, timeout=timedelta(seconds=5))
        store.set(f"{_attempt()} still here {world.rank}", "")
        while unheard and time.monotonic() < deadline:
            unheard = [rank for rank in unheard if not store.check([f"{_attempt()} still here {rank}"])]
            time.sleep(0.1)
    except RuntimeError:  # rank 0's machine is out of reach, and so are the others
        unheard = [rank for rank in unheard if hosts[rank] != hosts[world.rank]] or [0]
    names = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in unheard)
    return f"rank {world.rank} ({hosts[world.rank]}) has lost {names}" if names else ""
