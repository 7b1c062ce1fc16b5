"""experiments/baselines/mnist_plain.py, in plain torch, computes what mnist_ddp.py computes with our helper files."""

import re

import pytest

from tools.programs import shell

FLAGS = ("--dataset", "synthetic", "--dry-run")


def printed(run):
    """Without the figures of this machine, and without distributed.py's own line."""
    assert run.code == 0, run.err
    text = re.sub(r"\d+ images/s|done in .*", "", run.out)
    return [line for line in text.splitlines() if line and not line.startswith("distributed: ")]


@pytest.mark.slow
def test_plain_torch_computes_the_same():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3")
    plain = printed(shell(*torchrun, "-m", "experiments.baselines.mnist_plain", *FLAGS))
    assert plain == printed(shell("mnist_ddp.py", *FLAGS, "--nproc", 3))
    assert "accuracy" in plain[-1]


@pytest.mark.slow
def test_without_torchrun_it_says_so():
    done = shell("-m", "experiments.baselines.mnist_plain", *FLAGS)
    assert done.code == 2 and "start it with torchrun" in done.err
