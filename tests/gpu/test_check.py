"""dev/gpu_check.py, which is for people who have a card: what fails hides nothing else."""

import json
import re

import pytest
from world import ROOT, forker


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_parts_and_one_that_fails(machine, tmp_path):
    """NPROC asks for more processes than there are cards; only the part that sets no NPROC of its own reads it."""
    files = ("--out", tmp_path / "out", "--report", tmp_path / "report.json")
    run = machine.run("-m", "dev.gpu_check", "mnist_ddp", "--dry-run", *files, gpus=("7.5",), timeout=480, NPROC=3)
    results = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \| \d+ \|$", run.out, re.MULTILINE))  # of the table at the end
    assert run.code == 1 and len(results) == 2, run.out + run.err[-3000:]
    failed = "FAILED (exit code 2): distributed: 3 processes, but 1 visible GPU"
    assert results["mnist_ddp, one process per card"].startswith(failed)
    pattern = r"loss ([\d.]+), accuracy ([\d.]+) %, ([\d,]+) images/s"
    found = re.fullmatch(pattern, results["mnist_ddp, two on one card, gloo"])
    assert found, (results, run.err[-3000:])
    figures = [figure.replace(",", "") for figure in found.groups()]
    assert {"table.md", "mnist_ddp_two_on_one_card_gloo.log"} <= {file.name for file in (tmp_path / "out").iterdir()}
    text = (tmp_path / "report.json").read_text()
    report = json.loads(text)
    failed, part = report["parts"].values()
    assert failed.keys() == {"failed", "seconds"} and str(ROOT) not in text  # an error can name a folder
    assert [part["loss"], part["accuracy, %"], part["images/s"]] == [float(figure) for figure in figures]
    assert run.out.endswith(f"\n{report['row']}\n") and len(text) < 3000 and list(report["gpus"].values()) == [1]


def test_ratios_of_a_step_are_read(machine, tmp_path):
    files = ("--out", tmp_path / "out", "--report", tmp_path / "report.json")
    run = machine.run("-m", "dev.gpu_check", "ratios", "--dry-run", *files, gpus=("8.0",))
    assert run.code == 0, run.out + run.err[-3000:]
    part = json.loads((tmp_path / "report.json").read_text())["parts"]["ratios of a step"]
    assert list(part["ratios of a step"]) == ["SGD(..., fused=True)"] and part["ratios of a step"].popitem()[1] > 0


def test_without_a_gpu_it_says_so(tmp_path):
    run = forker().run("-m", "dev.gpu_check", "--out", tmp_path / "out")
    assert run.code == 2 and run.err.startswith("gpu_check: torch sees no GPU; ")
    (tmp_path / "out" / "table.md").touch()
    run = forker().run("-m", "dev.gpu_check", "--out", tmp_path / "out", cwd=ROOT)
    assert run.code == 2 and "there are files in it" in run.err
