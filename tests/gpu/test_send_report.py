"""doctor.py --report: the file, of fewer programs than it has (this test is one of them)."""

import getpass
import os
import socket

import pytest
from world import ROOT

SHORT = """
import sys
from experiments import gpu_report
all_parts, all_tests = gpu_report.parts, gpu_report.tests
def parts(folder):
    doctor, equivalence, benchmark = all_parts(folder)
    equivalence.command.extend(["--ways", "ddp", "--nproc", "2"])
    benchmark.command.extend(["--scripts", "mnist_ddp.py", "--nproc", "2", "--epochs", "1"])
    return [doctor, equivalence, benchmark]
def tests(limit):
    part = all_tests(limit)
    part.command.extend(["-k", "smallest_program"])
    return part
gpu_report.parts, gpu_report.tests = parts, tests
sys.exit(gpu_report.main(sys.argv[1:]))
"""


@pytest.mark.timeout(400)
def test_the_report_of_two_gpus(machine, tmp_path):
    path, program = tmp_path / "report.txt", tmp_path / "short.py"
    program.write_text(SHORT)
    run = machine.run(program, path, gpus=("8.0", "8.0"), path=[ROOT], timeout=300)
    assert run.code == 0, run.out + run.err + (path.read_text() if path.exists() else "")
    text = path.read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| 2")]
    assert "2 x " in row and row.count("all is well") == 2 and "| 1 passed, " in row, row
    for title in "doctor", "tests", "equivalence", "benchmark":
        assert f"== {title}: all is well" in text
    for name in str(ROOT), str(tmp_path), socket.gethostname(), os.path.expanduser("~"):
        assert name not in text
    assert getpass.getuser() not in text.split()
