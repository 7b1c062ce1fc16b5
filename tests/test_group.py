"""init_process_group, cleanup and the roll-call (P6)."""

import contextlib
import io
import math
import multiprocessing
import os
import re
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

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
    ({}, {"DIST_TIMEOUT": "10m"}, r"the timeout \(or DIST_TIMEOUT\) is 10m: give seconds greater than 0, such as 600"),
    ({"timeout": math.inf}, {}, r"the timeout \(or DIST_TIMEOUT\) is inf"),
    ({"timeout": math.nan}, {}, r"the timeout \(or DIST_TIMEOUT\) is nan"),
    ({"backend": "nccl"}, {}, "backend nccl needs a visible CUDA GPU and a torch"),
    ({"backend": 0, "world_size": 1, "rank": "nccl"}, {}, "backend nccl needs a"),  # joh-fischer's order of arguments
    ({"rank": 2, "world_size": 2}, {}, "RANK=2 WORLD_SIZE=2: set RANK and WORLD_SIZE to"),
    ({"world_size": 2}, PLACE, "init_process_group: world_size is 2, but here it is 3"),
    ({"rank": 1}, {}, "RANK=1 WORLD_SIZE=1: set RANK and WORLD_SIZE to"),
    ({"rank": 1, "world_size": 2}, {}, "MASTER_ADDR= and MASTER_PORT= must be"),
]


@pytest.mark.parametrize(("arguments", "variables", "error"), BAD)
def test_bad_arguments_are_one_line(arguments, variables, error):
    with mock.patch.dict(os.environ, variables):
        assert re.match(f"ValueError: {error}", error_of(dist.init_process_group, **arguments))
    assert not torch_dist.is_initialized()


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
            with pytest.raises(TimeoutError, match=f"init_process_group: {missing} did not join within {limit} s"):
                launcher._wait_for(lambda missing=missing: missing, rank, timedelta(seconds=limit))
            is_said = speaks and limit > 10
            assert capsys.readouterr().err == f"distributed: waiting for {missing}\n" * is_said
            assert limit < sum(waits) < limit + 0.2


def _by_hand(rank, n, port, pipe, timeout, name):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_SOCKET_IFNAME": "mine"}
    os.environ["DIST_RUN"] = name
    error = error_of(dist.init_process_group, rank=rank, world_size=n, timeout=timeout)
    if error:
        pipe.send(error)
    else:
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME"), os.environ["NCCL_SOCKET_IFNAME"]
        totals = [dist.all_reduce(torch.tensor(1)).item()]
        for leave in torch_dist.destroy_process_group, dist.cleanup:
            time.sleep(0.1 * (rank == 0))  # it still serves this group's store when the others come to the next
            leave()
            place = dist.get_rank(), dist.get_world_size()  # as under a launcher, it is the same before the next group
            dist.init_process_group(rank, n, "gloo")  # in the order of arguments of joh-fischer/distributed-pytorch
            totals.append(dist.all_reduce(torch.tensor(1)).item())
        pipe.send((totals, interfaces, place))
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


def test_processes_that_no_launcher_has_started_meet_where_they_are_told_three_times():
    """They leave a group by torch's own function, or by ours."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"  # unless the user has named one
    pipes, port = by_hand([2, 0, 1], 3, 60)
    assert answers_of(pipes) == {rank: ([3] * 3, (loopback, "mine"), (rank, 3)) for rank in range(3)}
    assert is_served(port) and not is_served(port, "127.0.0.2")  # nobody listens on another network


def _in_anothers_group(rank, n, printed):
    torch_dist.init_process_group("gloo")  # as Ray Train, Accelerate and Lightning Fabric do
    contradictions = [error_of(dist.init_process_group, **{name: 7}) for name in ("rank", "world_size")]
    os.environ.pop("RANK")  # which Fabric does not set
    with contextlib.redirect_stdout(io.StringIO()) as out:
        dist.init_process_group("nccl", timeout=1)  # its owner has chosen others
    printed.send((out.getvalue(), contradictions))
    sums = [dist.all_reduce(torch.tensor(1)).item(), dist.reduce(torch.tensor(rank), "sum").item()]
    share = list(dist.data_sampler(range(3 * n), shuffle=False))
    dist.cleanup()
    assert torch_dist.is_initialized() and dist.count_processes(5) == n
    assert dist.launch(lambda rank, n: dist.get_world_size(), nproc=5) == (n if rank == 0 else None)
    torch.distributed.barrier()  # the group still works
    torch_dist.destroy_process_group()
    os.environ["RANK"] = str(rank)
    dist.init_process_group()  # now it makes its own
    twice = error_of(dist.init_process_group)
    dist.cleanup()
    return sums, share, twice, torch_dist.is_initialized()


def test_a_group_that_another_library_has_made_is_used_and_left_to_its_owner(forks):
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    sums, share, twice, is_left = dist.launch(_in_anothers_group, theirs, nproc=3)
    assert (sums, share, is_left) == ([3, 3], [0, 3, 6], False)
    assert twice == "ValueError: init_process_group was called twice: call cleanup() before the second time"
    printed = dict(ours.recv() for _ in range(3))
    assert "distributed: 3 processes, gloo, cpu, in another library's group\n" in printed and len(printed) == 2
    for contradictions in printed.values():
        assert re.match(
            r"ValueError: init_process_group: rank is 7, but in the existing group it is \d", contradictions[0]
        )
        assert contradictions[1] == "ValueError: init_process_group: world_size is 7, but here it is 3"


def test_a_rank_0_that_does_not_come_is_named_with_its_address():
    pipes, port = by_hand([1, 2], 3, 1)
    error = f"TimeoutError: init_process_group: rank 0 at 127.0.0.1:{port} did not join within 1 s"
    assert answers_of(pipes) == {1: error, 2: error}


def test_two_runs_that_meet_on_one_port_do_not_mix():
    first, port = by_hand([0], 2, 60, name="first")
    wait_for(lambda: is_served(port))
    other, _ = by_hand([0, 1], 2, 2, port, name="other")
    in_use = f"RuntimeError: rank 0: port {port} is in use. If another run uses it, set MASTER_PORT to a free port"
    answers = answers_of(other)
    assert answers[0].startswith(in_use)
    assert answers[1] == "TimeoutError: init_process_group: rank 0 of 2 did not join within 2 s"
    second, _ = by_hand([1], 2, 60, port, name="first")
    assert [answer[0] for answer in (answers_of(first)[0], answers_of(second)[1])] == [[2] * 3] * 2
    third, _ = by_hand([1], 2, 60, port, name="first")
    taken = f"RuntimeError: rank 1 of 2 has already joined. If that .* run, set MASTER_PORT .* other than {port}, "
    assert re.match(f"{taken}.*If a rank started .*type env .*python ...$", answers_of(third)[1])


def test_a_process_takes_the_gpu_of_its_local_rank_or_the_one_that_it_sees(monkeypatch):
    for name, value in zip(launcher.TORCHRUN, "5823", strict=True):
        monkeypatch.setenv(name, value)
    for visible, device in ((4, "cuda:2"), (1, "cuda:0"), (0, "cpu")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert str(dist.get_device()) == device
