"""init_process_group, cleanup and the roll-call (P6)."""

import contextlib
import multiprocessing
import os
import re
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as torch_dist
from world import error_of, free_port, on_ranks, run_in_a_group_of_one, wait_for

import distributed as dist
import distributed_launcher as launcher


def _count(rank, n):
    return dist.all_reduce(torch.tensor(1)).item()


@on_ranks(3)
def test_a_group_can_be_left_and_joined_again():
    for _ in range(2):
        try:
            raise ValueError
        except ValueError:
            dist.cleanup()  # while an exception is handled it does nothing
            assert torch_dist.is_initialized()
            count = dist.launch(_count)  # under a launcher it calls the function here; then it leaves the group
        assert not torch_dist.is_initialized()
        dist.cleanup()
        dist.init_process_group(timeout=timedelta(seconds=50))
        assert (count, torch_dist.get_backend()) == (3 if dist.is_primary() else None, "gloo")


def _fails(rank, n):
    raise ValueError("mine")


def _fails_alone():
    return error_of(dist.launch, _fails, nproc=1), torch_dist.is_initialized()


def test_one_process_leaves_its_group_after_an_error_too():
    """Or a notebook's cell could not be run again."""
    assert run_in_a_group_of_one(_fails_alone) == ("ValueError: mine", False)


PLACE = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
BAD = [
    ({"timeout": timedelta(seconds=-1)}, {}, r"the timeout \(or DIST_TIMEOUT\) is "),
    ({"timeout": float("inf")}, {}, r"the timeout \(or DIST_TIMEOUT\) is inf"),
    ({"backend": "nccl"}, {}, "backend nccl needs a visible CUDA GPU and a torch"),
    ({"rank": 2, "world_size": 2}, {}, "RANK=2 WORLD_SIZE=2: set RANK and WORLD_SIZE to"),
    ({"world_size": 2}, PLACE, "init_process_group: world_size is 2, but WORLD_SIZE is 3"),
    ({"rank": 1}, {"WORLD_SIZE": "2"}, "MASTER_ADDR= and MASTER_PORT= must say"),  # each completes the other
]


@pytest.mark.parametrize(("arguments", "variables", "error"), BAD)
def test_bad_arguments_are_one_line(arguments, variables, error, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert re.match(f"ValueError: {error}", error_of(dist.init_process_group, **arguments))
    assert not torch_dist.is_initialized() and os.environ.get("RANK") == variables.get("RANK")


# ------------------------------------------------------------------------------------------------- P6: who is missing


@on_ranks(3)
def test_the_missing_are_named_and_all_goes_on_when_they_come(tmp_path):
    dist.cleanup()
    usual, launcher.REPORT_MISSING_AFTER = launcher.REPORT_MISSING_AFTER, 0.2
    rank = dist.get_rank()
    with open(tmp_path / str(rank), "w") as file, contextlib.redirect_stderr(file):
        if rank < 2:
            wait_for(lambda: any("of 3\n" in path.read_text() for path in tmp_path.iterdir()))
        dist.init_process_group()
    launcher.REPORT_MISSING_AFTER = usual
    said = "distributed: waiting for rank 0, rank 1 of 3\n"
    assert Path(file.name).read_text() == (said if rank == 2 else "")
    assert dist.all_reduce(torch.tensor(1)).item() == 3


def test_they_are_named_after_10_seconds_once_by_rank_0_or_by_all_and_in_the_error(monkeypatch, capsys):
    """By a clock that runs only while it waits."""
    waits = []
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append))
    for rank, missing, speaks in (0, "rank 1", True), (2, "rank 1", False), (2, "rank 0, rank 1", True):
        for limit in 10, 11:
            waits.clear()
            with pytest.raises(TimeoutError, match=f"init_process_group: {missing} did not come within {limit} s"):
                launcher._wait_for(lambda missing=missing: missing, rank, timedelta(seconds=limit))
            is_said = speaks and limit > 10
            assert capsys.readouterr().err == f"distributed: waiting for {missing}\n" * is_said
            assert limit < sum(waits) < limit + 0.2


def _by_hand(rank, n, port, pipe, timeout, name):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_SOCKET_IFNAME": "mine"}
    os.environ["DIST_RUN"] = name
    error = error_of(dist.init_process_group, rank=rank, world_size=n, timeout=timeout)
    if error:
        pipe.send(error if "RANK" not in os.environ else f"RANK is left after {error}")
    else:
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME"), os.environ["NCCL_SOCKET_IFNAME"]
        total = dist.all_reduce(torch.tensor(1)).item()
        dist.cleanup()
        alone = dist.get_rank(), dist.get_world_size()  # until it joins a group again
        dist.init_process_group(rank, n)
        pipe.send((total, interfaces, alone, dist.all_reduce(torch.tensor(1)).item()))
    pipe.poll(60)  # stay until the test has read all answers
    os._exit(0)


def by_hand(ranks, n, timeout, port=None, name=""):
    """Processes that no launcher has started; pipes to them, by rank."""
    fork, port, pipes = multiprocessing.get_context("fork"), port or free_port(), {}
    for rank in ranks:
        pipes[rank], theirs = fork.Pipe()
        fork.Process(target=_by_hand, args=(rank, n, port, theirs, timeout, name), daemon=True).start()
    return pipes, port


def is_served(port, address="127.0.0.1"):
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def answers_of(pipes):
    return {rank: pipe.recv() if pipe.poll(60) else None for rank, pipe in pipes.items()}


def test_processes_that_no_launcher_has_started_meet_where_they_are_told():
    loopback = "lo0" if sys.platform == "darwin" else "lo"  # unless the user has named one
    pipes, port = by_hand([2, 0, 1], 3, 60)
    assert answers_of(pipes) == dict.fromkeys(range(3), (3, (loopback, "mine"), (0, 1), 3))
    assert is_served(port) and not is_served(port, "127.0.0.2")  # nobody listens on another network


def _member(pipe):
    """A process that lives on, and takes part in any run that it is told of."""
    while job := pipe.recv():
        rank, n, port, is_torchs = job
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        answers = []
        for _ in range(2):  # two groups of one run
            error = error_of(dist.init_process_group, "gloo", n, rank, timeout=30)
            answers.append(error or dist.all_reduce(torch.tensor(rank)).item())
            time.sleep(0.1 * (rank == 0))  # it still serves this group's store when the others come to the next
            torch_dist.destroy_process_group() if is_torchs else dist.cleanup()
        pipe.send(answers)
    os._exit(0)


RUNS = {  # the members of each run, in the order of their ranks, and which port
    "other processes": [([0, 1], 0), ([1, 2], 1), ([0, 1], 2)],
    "more, fewer": [([0, 1], 0), ([0, 1, 2], 1), ([2, 0], 2)],
    "other ranks": [([0, 1], 0), ([1, 0], 1), ([2, 1, 0], 2), ([0, 1], 0)],
    "always one port": [([0, 1, 2], 0), ([1, 2], 0), ([2, 0], 0), ([0, 2, 1], 0), ([0, 1, 2], 0)],
    "one between several": [([0, 1], 0), ([1], 1), ([0], 1), ([0, 1], 0), ([1, 2, 0], 1)],
}


@pytest.mark.parametrize("is_torchs", [False, True])
@pytest.mark.parametrize("case", RUNS)
def test_a_process_takes_part_in_several_runs(case, is_torchs):
    """It leaves them by dist.cleanup, or by torch's own function, after which our variables are still there."""
    fork, pipes = multiprocessing.get_context("fork"), []
    for _ in range(3):
        pipe, theirs = fork.Pipe()
        fork.Process(target=_member, args=(theirs,), daemon=True).start()
        pipes.append(pipe)
    ports = [free_port() for _ in range(3)]
    for members, port in RUNS[case]:
        n = len(members)
        for rank, member in enumerate(members):
            pipes[member].send((rank, n, ports[port], is_torchs))
        answers = answers_of({member: pipes[member] for member in members})
        assert answers == dict.fromkeys(members, [n * (n - 1) // 2] * 2), (members, answers)
    for pipe in pipes:
        pipe.send(None)


def test_a_rank_0_that_does_not_come_is_named_with_its_address():
    pipes, port = by_hand([1, 2], 3, 1)
    error = f"TimeoutError: init_process_group: rank 0 at 127.0.0.1:{port} did not come within 1 s"
    assert answers_of(pipes) == {1: error, 2: error}


def test_two_runs_that_meet_on_one_port_do_not_mix():
    first, port = by_hand([0], 2, 60, name="first")
    wait_for(lambda: is_served(port))
    other, _ = by_hand([0, 1], 2, 2, port, name="other")
    in_use = f"RuntimeError: rank 0: port {port} is in use. If by another run, set MASTER_PORT to a free port"
    answers = answers_of(other)
    assert answers[0].startswith(in_use)
    assert answers[1] == "TimeoutError: init_process_group: rank 0 of 2 did not come within 2 s"
    second, _ = by_hand([1], 2, 60, port, name="first")
    assert [answer[0] for answer in (answers_of(first)[0], answers_of(second)[1])] == [2, 2]
    third, _ = by_hand([1], 2, 60, port, name="first")
    taken = f"RuntimeError: rank 1 of 2 is here already. If this is another run, set MASTER_PORT .* and not {port}. "
    assert re.match(f"{taken}If a rank has started .*type env .*python ...$", answers_of(third)[1])


def test_a_process_takes_the_gpu_of_its_local_rank_or_the_one_that_it_sees(monkeypatch):
    for name, value in zip(dist.VARIABLES, "5823", strict=True):
        monkeypatch.setenv(name, value)
    for visible, device in ((4, "cuda:2"), (1, "cuda:0"), (0, "cpu")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert str(dist.get_device()) == device
