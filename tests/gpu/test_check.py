"""dev/gpu_check.py, which is for people who have a card: what fails hides nothing else."""

import re

import pytest
from world import ROOT, forker


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_parts_and_one_that_fails(machine, tmp_path):
    """NPROC asks for more processes than there are cards; only the part that sets no NPROC of its own reads it."""
    command = ("-m", "dev.gpu_check", "mnist_ddp", "--dry-run", "--out", tmp_path / "out")
    run = machine.run(*command, gpus=("8.0",), timeout=480, NPROC=3)
    results = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \| \d+ \|$", run.out, re.MULTILINE))  # of the table at the end
    assert run.code == 1 and len(results) == 2, run.out + run.err[-3000:]
    assert results["mnist_ddp, one process per card"].startswith("FAILED: distributed: 3 processes, but 1 visible GPU")
    assert re.fullmatch(r"[\d,]+ images/s", results["mnist_ddp, two on one card, gloo"]), run.out
    assert {"table.md", "mnist_ddp_two_on_one_card_gloo.log"} <= {file.name for file in (tmp_path / "out").iterdir()}


def test_without_a_gpu_it_says_so(tmp_path):
    run = forker().run("-m", "dev.gpu_check", "--out", tmp_path / "out")
    assert run.code == 2 and run.err == "gpu_check: torch sees no GPU: python -m ddp_by_diff.doctor says more\n"
    (tmp_path / "out" / "table.md").touch()
    run = forker().run("-m", "dev.gpu_check", "--out", tmp_path / "out", cwd=ROOT)
    assert run.code == 2 and "there are files in it" in run.err
