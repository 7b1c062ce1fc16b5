"""The report that a visitor with GPUs sends in.  Its run on (simulated) GPUs is in tests/gpu/test_send_report.py."""

import pytest
from world import shell

from experiments import gpu_report


def test_a_part_that_takes_too_long_is_stopped_and_what_it_said_is_kept():
    part = gpu_report.Part("waits", ["-c", "import time; print('begun', flush=True); time.sleep(60)"], 1.0)
    outcome = gpu_report.run(part)
    assert (outcome.code, outcome.text) == (None, "begun\n") and 1 <= outcome.seconds < 10
    assert gpu_report.said(outcome) == f"not ready after {outcome.seconds:.0f} s"


def test_the_parts_take_ten_minutes_at_most():
    assert sum(part.limit for part in gpu_report.parts("")) <= gpu_report.ALL - 240
    assert gpu_report.ALL == 600 and gpu_report.tests(270.4).command[-1] == "--session-timeout=210"


@pytest.mark.slow
def test_without_a_gpu_it_is_one_line(tmp_path):
    result = shell("doctor.py", "--report", tmp_path / "report.txt")
    assert result.code == 2 and result.err.count("\n") == 1 and "torch sees none" in result.err
    assert not (tmp_path / "report.txt").exists()
