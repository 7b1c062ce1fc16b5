"""The report that a visitor with GPUs sends in.  Its run on (simulated) GPUs is in tests/gpu/test_send_report.py."""

import getpass
import re
import socket
import sys
from pathlib import Path

import pytest
from forked import ROOT, shell

from experiments import gpu_report


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"host name          {socket.gethostname()} is 10.1.2.30", "host name          HOST is ADDRESS"),
        ("127.0.0.1 answers", "127.0.0.1 answers"),
        (f'File "{ROOT}/distributed.py", line 3, in f', 'File "./distributed.py", line 3, in f'),
        ('File "/home/me/x/y.py", line 3', 'File "PATH", line 3'),
        ("temporary folder   /scratch/me, 3.1 GiB free", "temporary folder   PATH, 3.1 GiB free"),
        ("~/runs and (/data/mnist)", "PATH and (PATH)"),
        ("fe80::1ff:fe23:4567:890a and 2001:db8::1", "ADDRESS and ADDRESS"),
        ("02:42:ac:11:00:02", "ADDRESS"),
        ("GPU-01234567-89ab-cdef-0123-456789abcdef", "UUID"),
        ("3455 images/s, 12:30:05, tests/gpu/test_start.py::test_apex[O0], 2.15.0+cu132, 3/3", None),
        ("https://pytorch.org/get-started/locally/", None),
    ],
)
def test_what_is_taken_out(text, expected):
    assert gpu_report.without_names(text) == (text if expected is None else expected)


def test_nothing_of_the_user_is_left():
    """Wherever Python lies: inside of the project, as the README has it, or not."""
    text = gpu_report.without_names(f"{sys.executable} of {getpass.getuser()}@{socket.gethostname()}: {sys.prefix}/lib")
    assert re.fullmatch(r"(PATH|\./\S+) of USER@HOST: (PATH|\./\S+)", text)
    assert str(ROOT) not in text and str(Path.home()) not in text


def test_a_part_that_takes_too_long_is_stopped_and_what_it_said_is_kept():
    part = gpu_report.Part("waits", ["-c", "import time; print('begun', flush=True); time.sleep(60)"], 1.0)
    outcome = gpu_report.run(part)
    assert (outcome.code, outcome.text) == (None, "begun\n") and 1 <= outcome.seconds < 10
    assert gpu_report.said(outcome) == f"not ready after {outcome.seconds:.0f} s"


def test_the_parts_take_ten_minutes_at_most():
    assert sum(part.limit for part in gpu_report.parts("")) <= gpu_report.ALL - 240
    assert gpu_report.ALL == 600 and gpu_report.tests(270.4).command[-1] == "--session-timeout=210"


def test_without_a_gpu_it_is_one_line(tmp_path):
    result = shell("doctor.py", "--report", tmp_path / "report.txt")
    assert result.code == 2 and result.err.count("\n") == 1 and "torch sees none" in result.err
    assert not (tmp_path / "report.txt").exists()
