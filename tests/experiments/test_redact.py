"""What the report of a stranger's machine may not give away."""

import getpass
import platform
import re
import socket
import sys
from pathlib import Path

import pytest
from world import ROOT

from experiments.redact import COMMON, without_names


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
    assert without_names(text) == (text if expected is None else expected)


def test_nothing_of_the_user_is_left():
    """Wherever Python lies: inside of the project, as the README has it, or not."""
    text = without_names(f"{sys.executable} of {getpass.getuser()}@{socket.gethostname()}: {sys.prefix}/lib")
    assert re.fullmatch(r"(PATH|\./\S+) of \S+@\S+: (PATH|\./\S+)", text)
    assert all(name in COMMON or name not in text for name in (getpass.getuser(), socket.gethostname()))
    assert str(ROOT) not in text and str(Path.home()) not in text


HOST, USER, HOME, RELEASE = "node-17.cluster.example.edu", "anna", "/mnt/c/Users/Anna Maria", "5.15.167.4-anna-WSL2"


@pytest.fixture
def elsewhere(monkeypatch):
    """On a machine with these names."""
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setattr(socket, "getfqdn", lambda: HOST)
    monkeypatch.setattr(getpass, "getuser", lambda: USER)
    monkeypatch.setattr(platform, "release", lambda: RELEASE)
    monkeypatch.setattr(Path, "home", lambda: Path(HOME))
    monkeypatch.setenv("HF_TOKEN", "hf_AbCdEf")
    return monkeypatch


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[node-17]:29500, node-17_1234, STEP 1.0 ON node-17", "[HOST]:29500, HOST_1234, STEP 1.0 ON HOST"),
        ("node-17:1234:1301 [0] NCCL WARN", "HOST:1234:1301 [0] NCCL WARN"),
        ("node-[17-18] and node-18.cluster.example.edu:29500", "HOST and HOST:29500"),
        ("login.cluster.example.edu answers", "HOST answers"),
        ("python 3.12 on Linux-5.15.167.4-anna-WSL2-x86_64-with", "python 3.12 on Linux-5.15-x86_64-with"),
        ("OOB ib0:fe80::e41d:2d03:ab:cdef%ib0<0>", "OOB iADDRESS%ib0<0>"),
        ("eth0:2001:db8::5<0>", "ethADDRESS<0>"),
        (f"{HOME}/envs/l/bin/python, line 3", "PATH, line 3"),
        (f"temporary folder {HOME}/Temp, 3 GiB", "temporary folder PATH, 3 GiB"),
        ("/nfs/x=1/y and /home/a,b/c, then /nfs/home/{x}/y.", "PATH and PATH, then PATH."),
        (f"{ROOT}-old/secret and {ROOT}.bak/x, {ROOT}/data.py", "PATH and PATH, ./data.py"),
        ("../../nfs/x/site-packages/torch/x.py:3", "PATH"),
        ("gcc -I/nfs/x/inc -L/nfs/x", "gcc -IPATH -LPATH"),
        ("\x1b[31m/home/x\x1b[0m", "PATH"),
        ("nfs01:/export/home/x and //server/share", "PATH and PATH"),
        (r"C:\Users\Anna\p and \\server\share", "PATH and PATH"),
        ("CUDA_VISIBLE_DEVICES GPU-8932f937,GPU-11aa", "CUDA_VISIBLE_DEVICES UUID,UUID"),
        ("https://anna:ghp_abc@github.com/anna/x.git or http://me:pw@proxy:3128/", "URL or URL"),
        ("git@gitlab.example.edu:me/x.git, me.too@uni.edu", "ADDRESS, ADDRESS"),
        ("HF_TOKEN=hf_AbCdEf", "HF_TOKEN=SECRET"),
        ("2 x 10.0.0.7 beside 127.0.1.1 and 0.0.0.0, ::1", "2 x ADDRESS beside 127.0.1.1 and 0.0.0.0, ::1"),
        ("c10::Error, std::vector, at 12:30:05, add it to /etc/hosts, /dev/shm/x", None),
        ("Root Cause (first observed failure): a/b 3 / 4 and/or ./data.py", None),
        ("https://docs.pytest.org/en/stable and https://github.com/pytorch/pytorch/issues/1", None),
    ],
)
def test_on_another_machine(elsewhere, text, expected):
    assert without_names(text) == (text if expected is None else expected)


@pytest.mark.parametrize("name", ["root", "nvidia", "torch", "test", "gpu"])
def test_a_name_that_many_have_is_a_word(elsewhere, name):
    elsewhere.setattr(getpass, "getuser", lambda: name)
    elsewhere.setattr(socket, "gethostname", lambda: name)
    elsewhere.setattr(socket, "getfqdn", lambda: "localhost")
    text = "Root Cause: torch.cuda, test session, tests/gpu/test_start.py, connect to localhost:29500, NVIDIA H100"
    assert without_names(text) == text
