"""What the tests of this folder run on: the machine's GPUs, or, if it has none, simulated ones (../simulated_gpus)."""

import os

import pytest
import torch
from simulated_gpus import build
from world import Forker

REAL = torch.cuda.device_count()  # NVML's number: nothing is started
PYTHONPATH = os.environ.get("PYTHONPATH", "")  # of this machine: it can be where torch is found


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


class Gpus:
    """Starts programs on GPUs."""

    def __init__(self, forker, base):
        self.forker, self.base = forker, base

    def run(self, *command, gpus=("8.0",), **environment):
        """As Forker.run, on a machine with these GPUs; each is named by its compute capability."""
        if self.base is None:
            if len(gpus) > REAL:
                pytest.skip(f"this machine has {REAL} GPUs")
            found = ["{}.{}".format(*torch.cuda.get_device_capability(i)) for i in range(len(gpus))] if gpus else []
            if "7.5" in gpus and found != list(gpus):
                pytest.skip("needs a card of compute capability 7.5")
            visible = ",".join(map(str, range(len(gpus))))
            return self.forker.run(*command, **{"CUDA_VISIBLE_DEVICES": visible, **environment})
        given = {"SIM_GPUS": ",".join(gpus), "CUDA_VISIBLE_DEVICES": None, "NCCL_DEBUG": None}
        return self.forker.run(*command, **{**given, **environment})


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    if REAL:
        real = Forker(PYTHONPATH=PYTHONPATH)
        yield Gpus(real, None)
        real.end()
        return
    folder = tmp_path_factory.mktemp("simulated_gpus")
    try:
        build.build(folder)
    except build.CantBuild as problem:
        pytest.skip(str(problem))
    base = build.environment(folder)
    simulated = Forker(**base)
    yield Gpus(simulated, base)
    simulated.end()
