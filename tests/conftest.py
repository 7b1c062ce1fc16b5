"""The tests' own processes are forked, not spawned: spawned workers import torch anew, for seconds each."""

import world

world.forker()  # its process imports what programs need, while this one does the same

import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  a process's first DDP model imports it, for seconds; forked ones find it here
from tqdm import tqdm  # noqa: E402

import distributed_launcher as launcher  # noqa: E402

torch.set_num_threads(1)  # no OpenMP pool; `launch` gives each worker its own number of threads
tqdm.monitor_interval = 0  # no thread that watches over progress bars


@pytest.fixture
def forks(monkeypatch):
    """For a test that calls `launch` in pytest's own process: pytest-xdist's thread there only waits."""
    monkeypatch.setattr(launcher, "fork_is_safe", lambda: True)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Whatever starts the tests: they start from a world without a launcher."""
    for name in (*launcher.LAUNCHER_VARIABLES, "NPROC", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
