"""A run that waits says for whom; a run that disagrees says about what.  Real processes, real hangs."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from forked import SEVERAL
from torch import nn

import distributed as dist
import rendezvous


def _comes_when_it_is_named(rank, n, missing):
    deadline = time.monotonic() + 20
    while rank in missing and not os.pread(2, 1000, 0) and time.monotonic() < deadline:  # capfd's file
        time.sleep(0.01)
    dist.init_process_group(rank, n)
    return dist.all_reduce(torch.tensor(1)).item()


OF_TWO = pytest.param(2, [1], "rank 1 of 2", marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "missing", "names"), [OF_TWO, (4, [1, 3], "rank 1, rank 3 of 4")])
def test_the_roll_call_names_the_missing_and_goes_on_when_they_come(n, missing, names, monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "REPORT_MISSING_AFTER", 1)  # enough for the others to come
    assert dist.launch(_comes_when_it_is_named, missing, nproc=n) == n
    assert capfd.readouterr().err == f"distributed: waiting for {names}\n"


def _late(rank, n, missing, timeout=None):
    if rank in missing:
        time.sleep(30)
    dist.init_process_group(rank, n, timeout=timeout)


@pytest.mark.parametrize(
    ("n", "missing", "names", "limit", "timeout"),
    [
        pytest.param(2, [1], "rank 1 of 2", "1", None, marks=pytest.mark.slow),
        (4, [0, 2], "rank 0, rank 2 of 4", "5", 1),  # what is passed goes before the variable
    ],
)
def test_whoever_does_not_come_in_time_is_named_and_found(n, missing, names, limit, timeout, monkeypatch):
    monkeypatch.setenv("DIST_INIT_TIMEOUT", limit)
    with pytest.raises(SystemExit) as failure:
        dist.launch(_late, missing, timeout, nproc=n)
    text = str(failure.value)
    assert f"TimeoutError: init_process_group: {names} did not come within 1 s" in text
    for rank in missing:
        assert re.search(rf"rank {rank}: {re.escape(__file__)}:\d+, _late$", text, re.MULTILINE), text


def test_the_time_until_the_missing_are_listed_is_part_of_the_time_out(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "REPORT_MISSING_AFTER", 0.9)
    store, world = torch.distributed.HashStore(), rendezvous.World("", 0, 2, 0, 2)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="rank 1 of 2 did not come within 1 s"):
        rendezvous._roll_call(store, world, 1.0, "machine 0", "")
    assert 1.0 <= time.monotonic() - started < 1.9
    assert capfd.readouterr().err == "distributed: waiting for rank 1 of 2\n"


def test_the_last_step_of_joining_has_the_same_time_out(monkeypatch):
    monkeypatch.setenv("DIST_INIT_TIMEOUT", "20")
    before = time.monotonic()
    with pytest.raises(RuntimeError):
        rendezvous.wait_for_all(torch.distributed.HashStore(), rendezvous.World("", 0, 2, 0, 2), timeout=0.2)
    assert time.monotonic() - before < 15


class _SlowStore:
    """A store whose answers take half a second."""

    def __init__(self, store):
        self.store, self.set = store, store.set

    def wait(self, keys, limit):
        self.store.wait(keys, limit)
        time.sleep(0.5)


def test_nobody_leaves_before_all_have_seen_that_all_have_joined():
    """Rank 0 serves the store: if it leaves, the others get no answer."""
    store, left = torch.distributed.HashStore(), {}

    def join(rank, after, own_store):
        time.sleep(after)
        rendezvous.wait_for_all(own_store, rendezvous.World("", rank, 3, rank, 3), timeout=10)
        left[rank] = time.monotonic()

    late = (0, 0, store), (1, 0, _SlowStore(store)), (2, 0.5, store)
    threads = [threading.Thread(target=join, args=args) for args in late]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left[1] - started > 0.9  # rank 2 has come after half a second
    assert left[2] - started > 0.4
    assert left[0] > left[1] - 0.1


def _serve(pipe):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()
    os._exit(0)


def _attempt(pipe, rank, port, attempt):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": str(attempt), "DIST_INIT_TIMEOUT": "20" if attempt else "1"}
    try:
        dist.init_process_group()
        pipe.send(dist.all_reduce(torch.tensor(rank + 1)).item())
    except TimeoutError as problem:
        pipe.send(str(problem))
    os._exit(0)


def _fork(function, *args):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _answer(pipe):
    assert pipe.poll(30), "no answer within 30 s"
    return pipe.recv()


@pytest.mark.slow
def test_an_attempt_that_ended_before_all_had_met_does_not_spoil_the_next():
    server, pipe = _fork(_serve)  # torchrun's own store serves all attempts
    port, said = _answer(pipe), []
    for attempt, ranks in (0, [0]), (1, [0, 1]), (2, [0, 1]):
        started = [_fork(_attempt, rank, port, attempt) for rank in ranks]
        said.append([_answer(end) for _, end in started])
        for process, _ in started:
            process.join(30)
    pipe.send("the end")
    server.join(30)
    assert said == [["init_process_group: rank 1 of 2 did not come within 1 s"], [3, 3], [3, 3]]


def _busy_elsewhere():
    time.sleep(30)


def _stuck(rank, n):
    dist.init_process_group(rank, n)
    if rank == n - 1:
        _busy_elsewhere()
    dist.barrier()


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_collective_that_times_out_ends_with_where_each_rank_stands(n, monkeypatch):
    monkeypatch.setenv("DIST_TIMEOUT", "1")
    before = time.monotonic()
    with pytest.raises(SystemExit) as failure:
        dist.launch(_stuck, nproc=n)
    assert time.monotonic() - before < 25  # not the 30 s for which one of them sleeps
    text = str(failure.value)
    assert re.match(rf"rank \d of {n} failed first:", text) and text.count("Traceback") == 1
    table = text.partition("where each rank stands:\n")[2].splitlines()
    assert [line.split(":")[0].strip() for line in table] == [f"rank {rank}" for rank in range(n)]
    assert all(re.search(rf"{re.escape(__file__)}:\d+, _stuck, in barrier$", line) for line in table[:-1]), text
    assert re.search(rf"{re.escape(__file__)}:\d+, _busy_elsewhere$", table[-1]), text


def _loses_and_times_out(rank, n):
    """As gloo does it: the rank whose time is over closes its connections, and the others may be heard first."""
    if rank == 0:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:12345")
    time.sleep(0.05)
    raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")


def test_who_lost_the_connection_to_another_did_not_fail_first():
    with pytest.raises(SystemExit) as failure:
        dist.launch(_loses_and_times_out, nproc=2)
    assert str(failure.value).startswith("rank 1 of 2 failed first:") and "where each rank stands:" in str(
        failure.value
    )


def _asks(rank, n, stop):
    """Rank 1 is stopped, or waits in a collective for rank 0, which asks for the table; then all go on."""
    dist.init_process_group(rank, n)
    pids = torch.cat(dist.gather(torch.tensor([os.getpid()]))).tolist()
    if rank == 0:
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(1)
        os.kill(pids[1], signal.SIGCONT)
    elif stop and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return dist.all_reduce(torch.tensor(rank)).item()


MORE = [pytest.param(n, stop, marks=pytest.mark.slow) for n, stop in ((2, False), (2, True), (4, False))]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "stop"), [(4, True), *MORE])
def test_sigusr1_to_the_parent_prints_where_each_rank_stands_and_goes_on(n, stop, capfd):
    assert dist.launch(_asks, stop, nproc=n) == n * (n - 1) // 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "where each rank stands:" and len(lines) == 1 + n
    assert re.fullmatch(rf"  rank 0: {re.escape(__file__)}:\d+, _asks", lines[1])
    if stop:
        assert re.fullmatch(r"  rank 1: no answer \(if it was stopped: kill -CONT \d+\)", lines[2])
    else:
        assert re.fullmatch(rf"  rank 1: {re.escape(__file__)}:\d+, _asks, in all_reduce", lines[2])
    for rank in range(2, n):
        assert re.fullmatch(rf"  rank {rank}: {re.escape(__file__)}:\d+, _asks, in all_reduce", lines[1 + rank])


def _asked_twice_at_once(rank, n):
    """With so many threads that faulthandler doesn't show all of them."""
    dist.init_process_group()
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(110)]
    for thread in threads:
        thread.start()
    dist.barrier()
    if rank == 0:
        for _ in range(2):
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(0.1)
        time.sleep(1)
    dist.barrier()
    done.set()


@pytest.mark.slow
def test_two_questions_at_once_have_two_answers(capfd):
    dist.launch(_asked_twice_at_once, nproc=2)
    answers = capfd.readouterr().err.split("where each rank stands:\n")
    assert len(answers) == 3 and not answers[0]
    for answer in answers[1:]:
        assert re.fullmatch(
            r"  rank 0: .*, _asked_twice_at_once\n  rank 1: .*, _asked_twice_at_once, in barrier\n", answer
        )


def _asked_again(rank, n, then):
    """Rank 1 answers the first question, and can't answer the second: it was stopped, or killed."""
    dist.init_process_group()
    pids = torch.cat(dist.gather(torch.tensor([os.getpid()]))).tolist()
    if rank == 0:
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(1)
        if then == signal.SIGKILL:  # rank 0 is the first that fails: rank 1 can't notice, and dies a moment later
            os.kill(pids[1], signal.SIGSTOP)
            subprocess.Popen(["sh", "-c", f"sleep 0.05; kill -KILL {pids[1]}"])
            os.abort()  # the end of the run says where each stands
        os.kill(pids[1], then)
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(1)
        os.kill(pids[1], signal.SIGCONT)
    dist.barrier()


STOPPED = pytest.param("SIGSTOP", "no answer ", marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("then", "says"), [STOPPED, ("SIGKILL", "gone$")])
def test_an_earlier_answer_is_not_shown_again(then, says, capfd):
    try:
        ended = dist.launch(_asked_again, getattr(signal, then), nproc=2)
    except SystemExit as failure:
        ended = failure
    first, second = re.findall("^  rank 1: (.*)", f"{capfd.readouterr().err}{ended}", re.MULTILINE)
    assert first.endswith("_asked_again, in barrier") and re.match(says, second)


# ---------------------------------------------------------------------------------------------------------- mismatches


def _disagrees(rank, n, case):
    dist.init_process_group(rank, n, checked=True)
    c10d = torch.distributed
    odd = rank == n - 1
    if case == "shape":
        c10d.all_reduce(torch.ones(3 + 2 * odd))
    elif case == "dtype":
        c10d.all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32))
    elif case == "collective":
        c10d.broadcast(torch.ones(3), 0) if odd else c10d.all_reduce(torch.ones(3))
    elif not odd:
        c10d.all_reduce(torch.ones(3))


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("shape", r"TensorShape=\[[35]\].*TensorShape=\[[35]\].*3\s*vs\s*5|5\s*vs\s*3"),
        ("dtype", "TensorDtypes=(Float,.*TensorDtypes=Double|Double,.*TensorDtypes=Float)"),
        ("collective", "OpType=(ALLREDUCE.*OpType=BROADCAST|BROADCAST.*OpType=ALLREDUCE)"),
    ],
)
def test_a_checked_run_says_what_each_rank_called(n, case, says):
    with pytest.raises(SystemExit, match=f"Detected mismatch between collectives on ranks(?s:.*){says}") as failure:
        dist.launch(_disagrees, case, nproc=n)
    assert str(failure.value).count("Traceback") == 1


@SEVERAL
def test_a_rank_that_has_finished_early_is_named(n):
    with pytest.raises(SystemExit, match=rf"rank \d of {n} failed first(?s:.*)\(rank {n - 1} had finished\)$"):
        dist.launch(_disagrees, "one call more", nproc=n)


def _leaves_early(rank, n):
    dist.init_process_group(rank, n)
    if rank == n - 1:
        sys.exit(0)
    dist.all_reduce(torch.ones(1))


@SEVERAL
def test_a_connection_that_is_lost_to_a_rank_that_has_finished_is_explained(n):
    with pytest.raises(SystemExit) as failure:
        dist.launch(_leaves_early, nproc=n)
    first, error, *table = str(failure.value).splitlines()
    says = f"it lost its connection after rank {n - 1} had finished. All ranks must call the same collectives."
    assert re.fullmatch(rf"rank \d of {n} failed first: {says}", first)
    assert re.match(r"RuntimeError: .*[Cc]onnection (closed|reset)", error)
    stand = [rf"  rank {rank}: .*, _leaves_early, in all_reduce" for rank in range(n - 1)] + [f"  rank {n - 1}: gone"]
    assert re.fullmatch(";".join(["where each rank stands:", *stand]), ";".join(table))


def _checked_training(rank, n):
    dist.init_process_group(rank, n, checked=True)
    model = dist.prepare_ddp_model(nn.Linear(2, 1))
    model(torch.full((1, 2), float(rank))).sum().backward()
    return dist.unwrap_model(model).weight.grad.tolist()


def test_ddp_trains_in_a_checked_run():
    assert dist.launch(_checked_training, nproc=3) == [[1.0, 1.0]]  # the mean of 0, 1 and 2


def _late_in_ddp(rank, n):
    dist.init_process_group(checked=True)
    model = dist.prepare_ddp_model(nn.Linear(2, 1))
    if rank == 1:
        _busy_elsewhere()
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.slow
def test_ddp_in_a_checked_run_has_the_time_out_of_the_others(monkeypatch):
    monkeypatch.setenv("DIST_TIMEOUT", "1")
    before = time.monotonic()
    with pytest.raises(SystemExit, match=r"rank 0 of 2 failed first(?s:.*)rank 1: .*_busy_elsewhere$"):
        dist.launch(_late_in_ddp, nproc=2)
    assert time.monotonic() - before < 25


# ------------------------------------------------------------------------------------------------------- model, GPUs


def _wrapped(rank, n):
    dist.init_process_group(rank, n)
    model = nn.Linear(2, 1)
    wrapped = dist.prepare_ddp_model(model)
    assert wrapped is not model and dist.unwrap_model(wrapped) is model and dist.unwrap_model(model) is model
    assert list(dist.unwrap_model(wrapped).state_dict()) == ["weight", "bias"]
    compiled = torch.compile(model)
    assert dist.unwrap_model(dist.prepare_ddp_model(compiled)) is model
    assert dist.unwrap_model(torch.compile(wrapped)) is model
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        dist.prepare_ddp_model(nn.BatchNorm1d(2), sync_bn=True)


@pytest.mark.slow
def test_unwrap_model_and_sync_bn():
    dist.launch(_wrapped, nproc=2)
    model = nn.Linear(1, 1)
    assert dist.unwrap_model(torch.compile(model)) is model


def test_two_ranks_on_one_gpu_are_named():
    store, world = torch.distributed.HashStore(), rendezvous.World("", 0, 3, 0, 3)
    for rank, gpu in [(0, "host, GPU a"), (1, "host, GPU b"), (2, "host, GPU a")]:
        store.set(f"rank {rank}", f"machine 0\n{gpu}")
    with pytest.raises(RuntimeError, match=r"rank 0 and rank 2 use the same GPU \(host, GPU a\)"):
        rendezvous._roll_call(store, world._replace(rank=2), 5.0, "machine 0", "host, GPU a")
    assert rendezvous._roll_call(store, world._replace(rank=1), 5.0, "machine 0", "host, GPU b") == ["machine 0"] * 3
    unknown = "00000000-0000-0000-0000-000000000000"  # an old driver's answer for every card
    for rank in range(3):
        store.set(f"rank {rank}", f"machine 0\n{unknown}")
    assert rendezvous._roll_call(store, world, 5.0, "machine 0", unknown) == ["machine 0"] * 3
    for rank in range(3):  # gloo: no GPU is named, and the CPU may be shared
        store.set(f"rank {rank}", "machine 0\n")
    assert rendezvous._roll_call(store, world, 5.0, "machine 0", "") == ["machine 0"] * 3


if __name__ == "__main__":  # the texts, to look at:  PYTHONPATH=. python tests/test_hangs.py
    for worker, args, n, env in [
        (_late, ([1],), 2, {"DIST_INIT_TIMEOUT": "12"}),
        (_stuck, (), 4, {"DIST_TIMEOUT": "2"}),
        (_asks, (True,), 4, {}),
        (_disagrees, ("shape",), 2, {}),
    ]:
        os.environ |= env
        try:
            dist.launch(worker, *args, nproc=n)
        except SystemExit as failure:
            print(failure, file=sys.stderr)
        for name in env:
            del os.environ[name]
