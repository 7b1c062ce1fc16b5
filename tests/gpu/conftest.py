"""What the tests of this folder run on: this machine's GPUs, or, if it has none, simulated ones (../simulated_gpus).

On a machine with fewer cards than a test has ranks, the ranks share these, over gloo.  To see that without a card:
SIM_GPUS=8.0 python -m pytest -m gpu -n 0.
"""

import os

import pytest
import torch
from simulated_gpus import build
from world import Forker

REAL = torch.cuda.device_count()  # NVML's number: nothing is started
SIMULATED = os.environ.get("SIM_GPUS")  # a simulated machine with these cards; otherwise it has what a test asks for
PYTHONPATH = os.environ.get("PYTHONPATH", "")  # of this machine: it can be where torch is found


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.path.as_posix() and "slow" not in item.keywords:
            item.add_marker(pytest.mark.gpu)


class Gpus:
    """Starts programs on GPUs.  cards: the compute capabilities that there are; None: as a test asks for."""

    def __init__(self, forker, cards):
        self.forker, self.cards = forker, cards

    def run(self, *command, gpus=("8.0",), **environment):
        """As Forker.run, on a machine with these GPUs; each is named by its compute capability."""
        visible = self.visible(len(gpus))
        given = {"NCCL_DEBUG": None, "NVIDIA_TF32_OVERRIDE": "0"}  # TensorFloat-32 has few digits
        if self.cards is None:
            given |= {"SIM_GPUS": ",".join(gpus), "CUDA_VISIBLE_DEVICES": None}
        else:
            given |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(visible)))}
        if visible < len(gpus):
            given |= {"NPROC": len(gpus), "DIST_BACKEND": "gloo"}
        return self.forker.run(*command, **{**given, **environment})

    def visible(self, n):
        """How many cards n ranks get."""
        return n if self.cards is None else min(n, len(self.cards))

    def backend(self, n):
        return "nccl" if self.visible(n) == n else "gloo"

    def needs(self, n):
        """Skip a test that says nothing if ranks share a card."""
        if self.visible(n) < n:
            pytest.skip(f"needs {n} GPUs: python -m pytest -m gpu -n 0, on a machine that has them, or on one without")

    def approx(self, losses):
        """Simulated kernels round as the CPU does.  Real ones don't, and each step makes the difference larger."""
        return pytest.approx(losses, rel=1e-3 if REAL else 0, abs=2e-4)  # they are printed with four digits


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    if REAL:
        environment = {"PYTHONPATH": PYTHONPATH}
        cards = ["{}.{}".format(*torch.cuda.get_device_capability(i)) for i in range(REAL)]
    else:
        folder = tmp_path_factory.mktemp("simulated_gpus")
        try:
            build.build(folder)
        except build.CantBuild as problem:
            pytest.skip(str(problem))
        environment = build.environment(folder) | {"SIM_GPUS": SIMULATED or ""}
        cards = SIMULATED.split(",") if SIMULATED else None
    forker = Forker(**environment)
    yield Gpus(forker, cards)
    forker.end()


@pytest.fixture
def simulated(machine):
    """The machine, if its GPUs are simulated: only these do what a test says."""
    if REAL:
        pytest.skip("needs simulated GPUs: python -m pytest -m gpu -n 0, on a machine without a GPU")
    return machine
