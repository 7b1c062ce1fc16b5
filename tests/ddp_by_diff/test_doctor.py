"""doctor.py as a user meets it: a healthy machine, and real faults, one at a time."""

import os
import re

import pytest
import torch
from world import forker, shell

from ddp_by_diff import doctor

ROWS = ["python", "torch", "CPU", "GPUs", "launcher", "rank 0", "rank 1", "together"]


def examined(done):
    """The table as {what: found}, and what is wrong."""
    lines = re.findall(r"^(ok   |WRONG)  (\S.{7})  (\S.*)", done.out, re.MULTILINE)
    table = {what.rstrip(): found for _, what, found in lines}
    wrong = [what.rstrip() for verdict, what, _ in lines if verdict == "WRONG"]
    assert len(table) == len(lines), done.out  # each line once
    assert done.code == bool(wrong), done
    return table, wrong


def test_a_healthy_machine():
    done = forker().run("-m", "ddp_by_diff.doctor")
    table, wrong = examined(done)
    assert wrong == [] and sorted(table) == sorted(ROWS) and done.err == ""
    assert torch.__version__ in table["torch"] and table["GPUs"] == "0, CUDA_VISIBLE_DEVICES ''"
    assert table["launcher"] == "none; `launch` starts the processes: 2 (no variable set)"
    assert table["rank 0"].startswith("cpu computes") and table["rank 1"].startswith("cpu computes")
    assert len(done.out.splitlines()) == len(ROWS) + 1  # and the helper's own line: the backend


def test_under_a_launcher_rank_0_writes_the_table():
    place = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    table, wrong = examined(forker().run("-m", "ddp_by_diff.doctor", **place))
    assert wrong == [] and "together" in table
    assert "its processes: 1 (RANK=0 WORLD_SIZE=1 LOCAL_RANK=0" in table["launcher"]


def test_a_wrong_environment_is_one_wrong_line():
    table, wrong = examined(forker().run("-m", "ddp_by_diff.doctor", RANK=1))
    assert wrong == ["launcher"] and "together" not in table  # without a place no process can be started
    assert table["launcher"].startswith(
        "RANK=1: set RANK and WORLD_SIZE to this process's rank and the world size, or unset RANK"
    )


FAULTS = {  # planted in distributed.py: what is said, and the advice
    "import torch\ntorch.ones = lambda *shape, device: torch.full(shape, 2.0)": (
        "computes 1048576.0 instead of 262144: don't train on it",
        "look it up",
    ),
    "right = dist.all_reduce\ndist.all_reduce = lambda tensor: right(tensor) + 1": (
        "the all-reduce returns 2 instead of 1: don't train with this torch",
        "look it up",
    ),
    "def fault(**options):\n    raise TimeoutError('timed out')\ndist.init_process_group = fault": (
        "TimeoutError: timed out",
        "a firewall? GLOO_SOCKET_IFNAME",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=["product", "sum", "connection"])
def test_a_fault_on_the_ranks_is_shown_with_what_to_do(fault):
    says, advice = FAULTS[fault]
    done = forker().run("-m", "ddp_by_diff.doctor", before=f"from ddp_by_diff import distributed as dist\n{fault}")
    table, wrong = examined(done)
    assert wrong == ["together"] and re.match(r"rank \d of 2 failed first:", table["together"]), done.out
    assert says in done.out and done.out.splitlines()[-1].startswith(f"       -> {advice}")


def test_without_torch_it_says_so_and_stops(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    done = shell("-m", "ddp_by_diff.doctor", path=[tmp_path])
    says = "WRONG  torch     libcudart.so.12: cannot open shared object file: pip install torch\n"
    assert done == (1, "", says)


@pytest.mark.parametrize(
    ("chosen", "device_file", "ok"),
    [("97,98", True, False), ("-1", True, True), ("", True, True), (None, False, True), (None, True, False)],
)
def test_gpus_that_torch_cannot_see(chosen, device_file, ok, monkeypatch, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os.path, "exists", lambda path: device_file)
    assert doctor.check_devices() == ok
    assert ("WRONG  GPUs" in capsys.readouterr().out) == (not ok)


def test_old_versions_are_wrong(monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.3.1"))
    assert not doctor.check_software()
    assert re.search(r"^WRONG  torch .*2\.3\.1.*: install 2\.4 or newer$", capsys.readouterr().out, re.MULTILINE)
