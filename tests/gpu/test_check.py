"""tools/gpu_check.py, which is for people who have a card: all of it runs, and what fails hides nothing else."""

import re

import pytest
from world import ROOT, forker

PARTS = ["equivalence", "mnist_ddp", "trace", "picture", "tests/gpu"]  # the other scripts are run as mnist_ddp.py is


def rows(run):
    """Of the table at the end: the part and its result."""
    return re.findall(r"^\| ([^|]+) \| ([^|]+) \| \d+ \|$", run.out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_kind_of_part(machine, tmp_path):
    command = ("-m", "tools.gpu_check", *PARTS, "--dry-run", "--out", tmp_path / "out")
    run = machine.run(*command, gpus=("8.0",) * 2, timeout=880)
    assert run.code == 0, run.out + run.err[-3000:]
    found = rows(run)
    assert [name for name in PARTS if not any(part.startswith(name) for part, _ in found)] == [], run.out
    results = dict(found)
    assert results["equivalence of min_DDP"].startswith("THE SAME as one process, up to rounding; ")
    assert results["trace of mnist_ddp"] == "trace0.json.gz, trace1.json.gz"
    assert all(re.fullmatch(r"[\d,]+ images/s", result) for part, result in found if "card" in part), run.out
    assert {"step.svg", "table.md", "tests_gpu.log"} <= {file.name for file in (tmp_path / "out").iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_what_fails_is_said_and_the_rest_runs(machine, tmp_path):
    """Here the helper refuses a variable, which mnist_single.py does not read."""
    arguments = ("-m", "tools.gpu_check", "mnist_single", "mnist_ddp", "--dry-run", "--out", tmp_path / "out")
    run = machine.run(*arguments, gpus=("8.0",), timeout=480, DIST_TIMEOUT="soon")
    single, ddp, shared = rows(run)
    assert run.code == 1 and "images/s" in single[1], run.out
    for _, result in ddp, shared:
        assert result.startswith("FAILED: distributed: the timeout (or DIST_TIMEOUT) is soon"), run.out


def test_without_a_gpu_it_says_so(tmp_path):
    run = forker().run("-m", "tools.gpu_check", "--out", tmp_path / "out")
    assert run.code == 2 and run.err == "gpu_check: torch sees no GPU: python doctor.py says more\n"
    (tmp_path / "out" / "trace0.json.gz").touch()
    run = forker().run("-m", "tools.gpu_check", "--out", tmp_path / "out", cwd=ROOT)
    assert run.code == 2 and "there are files in it" in run.err
