"""Where the ranks leave their notes: no process group is needed, and none is disturbed."""

import os
import pickle
import socket
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as torch_dist

CHUNK = 2_000_000  # bytes: torch's store refuses values of more than 8 MB


class Place(NamedTuple):
    """This process's place among the ranks, noted before the program can change the variables."""

    rank: int
    world_size: int


def read_place() -> Place | None:
    """What torchrun's variables say; None if no launcher has started this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


class Folder:
    """A folder of the run, if we have started the processes on this machine."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def put(self, key: str, value: Any) -> None:
        part = self.path / f"{key}.{threading.get_native_id()}.part"  # several may write one key
        torch.save(value, part)  # pickle would copy each tensor
        part.rename(self.path / key)  # a reader sees all of it, or nothing

    def get(self, key: str) -> Any:
        # mmap: numbers are read when they are needed.
        return torch.load(self.path / key, weights_only=False, mmap=True)

    def has(self, key: str) -> bool:
        return (self.path / key).exists()


class Store:
    """The store that torchrun serves.  Without torchrun rank 0 serves one, at MASTER_PORT + 1.

    The notes are pickles: whoever can write to the store can run code here.  docs/launching.md,
    Networks, says who should be able to.
    """

    def __init__(self, tool: str, place: Place, timeout: float) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if not is_served:
            port += 1
        limit = timedelta(seconds=max(timeout, 30))
        if not is_served and place.rank == 0:
            store = serve_store(address, port, limit)
        else:
            store = torch_dist.TCPStore(address, port, timeout=limit, wait_for_workers=False)
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self.store = torch_dist.PrefixStore(f"{tool} {run} {attempt}", store)

    def put(self, key: str, value: Any) -> None:
        packed: Any = zlib.compress(pickle.dumps(value), 1)  # torch's types don't know set(bytes)
        starts = range(0, len(packed), CHUNK)
        for number, start in enumerate(starts):
            self.store.set(f"{key} {number}", packed[start : start + CHUNK])
        self.store.set(key, str(len(starts)))  # comes last: who sees this finds all of it

    def get(self, key: str) -> Any:
        count = int(self.store.get(key))
        chunks = [self.store.get(f"{key} {number}") for number in range(count)]
        return pickle.loads(zlib.decompress(b"".join(chunks)))

    def has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError:  # rank 0 served the store, and has ended: there is nothing to wait for
            return True


Meeting = Folder | Store


def wait_until(
    condition: Callable[[], bool], seconds: float, report: Callable[[float], None] | None = None
) -> None:
    """Wait at most so many seconds.  Calls report(seconds left) once."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > seconds:
            return
        if report and waited > min(10, seconds / 2):
            report(seconds - waited)
            report = None
        time.sleep(0.02)


def serve_store(
    address: str = "127.0.0.1", port: int = 0, limit: timedelta = timedelta(minutes=5)
) -> torch_dist.TCPStore:
    """Serve a store, as torchrun does.  torch itself would listen on all networks."""
    options: dict = {"timeout": limit, "is_master": True, "wait_for_workers": False}
    if address in ("localhost", "::1") or address.startswith("127."):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, port), family=family)
        port = server.getsockname()[1]
        # libuv's of torch 2.4 and 2.5 doesn't listen on a given socket (pytorch#150215).
        options |= {"master_listen_fd": server.detach(), "use_libuv": False}
    return torch_dist.TCPStore(address, port, **options)


def variables_of_one(store: torch_dist.TCPStore) -> dict[str, str]:
    """The variables that torchrun would set for one process; NPROC is that of `launch`."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "NPROC": "1"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return place | address | agent
