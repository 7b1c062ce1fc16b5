"""Ranks that come late: the others wait, with NCCL's work pending on their GPUs.  And what is seen if nobody waits."""

import json
import re

import pytest
import torch
from world import ROOT

LATE = """
import json, os, sys, time
import torch
import distributed as dist
from torch import distributed as torch_dist

def too_late(rank, n):
    dist.init_process_group(timeout=2)
    time.sleep(60 * rank)
    dist.barrier()

def nobody_waits(rank, n):
    dist.init_process_group()
    device = dist.get_device()
    x, side = torch.ones(2, device=device), torch.cuda.Stream(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    os.environ["SIM_NCCL_DELAY"] = str(rank)
    work = torch_dist.all_reduce(x, async_op=True)
    found = [work.is_completed(), x.tolist()]
    side.wait_stream(torch.cuda.current_stream())
    work.wait()
    end.record()
    found += [end.query(), torch.cuda.current_stream().query(), side.query()]
    torch.cuda.synchronize()
    return [*found, end.query(), work.is_completed(), x.tolist(), round(begin.elapsed_time(end) / 1000)]

def one_stream_for_another(rank, n):
    dist.init_process_group()
    device = dist.get_device()
    x, side = torch.ones(2, device=device), torch.cuda.Stream(device)
    os.environ["SIM_NCCL_DELAY"] = str(rank)
    torch_dist.all_reduce(x, async_op=True).wait()  # this stream waits, not the host
    side.wait_stream(torch.cuda.current_stream())
    found = [side.query()]
    with torch.cuda.stream(side):
        twice = 2 * x
    return [*found, twice.tolist()]

def copy_to_the_host(rank, n):
    dist.init_process_group()
    device = dist.get_device()
    x, found = torch.ones(2, device=device), torch.zeros(2).pin_memory()
    os.environ["SIM_NCCL_DELAY"] = str(rank)
    torch_dist.all_reduce(x, async_op=True).wait()
    found.copy_(x, non_blocking=True)
    early = found.tolist()
    torch.cuda.synchronize()
    return early, found.tolist()

def messages(rank, n):
    dist.init_process_group()
    device, found = dist.get_device(), {}
    for dtype in torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8:
        for op in "SUM", "MAX", "MIN":
            x = torch.tensor([rank, n - rank], device=device, dtype=dtype)
            torch_dist.all_reduce(x, getattr(torch_dist.ReduceOp, op))
            found.setdefault(op, []).append(x.tolist())
    long = torch.full((200_000,), float(rank), device=device)  # more than is on its way at once
    left = torch.empty_like(long)
    send = torch_dist.P2POp(torch_dist.isend, long, (rank + 1) % n)
    receive = torch_dist.P2POp(torch_dist.irecv, left, (rank - 1) % n)
    for work in torch_dist.batch_isend_irecv([send, receive]):
        work.wait()
    found["ring"] = [left.min().item(), left.max().item()]
    given = 10 * rank + torch.arange(n, device=device)
    torch_dist.all_to_all_single(taken := torch.empty_like(given), given)
    found["all_to_all"] = taken.tolist()
    outer = torch_dist.new_group([0, n - 1])  # a part of the communicator
    x = torch.ones(1, device=device)
    if rank in (0, n - 1):
        torch_dist.all_reduce(x, group=outer)
    found["group"] = x.item()
    everyone = [None] * n
    torch_dist.all_gather_object(everyone, found)
    return everyone

if __name__ == "__main__":
    print(json.dumps(dist.launch(globals()[sys.argv[1]], *sys.argv[2:])))
"""


@pytest.fixture(scope="module")
def late(machine, tmp_path_factory):
    program = tmp_path_factory.mktemp("late") / "program.py"
    program.write_text(LATE)

    def late(*words, n=2, **more):
        machine.needs(n)
        return machine.run(program, *words, gpus=("8.0",) * n, path=[ROOT], **more)

    return late


def answer(run):
    assert run.code == 0, run.err[-3000:]
    return json.loads(run.out.splitlines()[-1])


@pytest.mark.parametrize("newer", [0, 1])
def test_a_rank_that_waits_too_long_ends_the_run(late, newer):
    """torch 2.14 has two backends for NCCL.  The older one's watchdog aborts the process after four times 100 ms; with
    the newer one, the rank sees that its work has ended, and may raise the error before its watchdog aborts."""
    run = late("too_late", TORCH_DIST_USE_NCCL2=newer, TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=100)
    aborted = ["rank 0 of 2 failed first: killed by SIGABRT", "NCCL's watchdog"]
    raised = ["rank 0 of 2 failed first: \n", "DistBackendError: NCCL operation timed out"]
    is_newer = newer and torch.__version__ >= (2, 14)
    texts = raised if is_newer and raised[1] in run.err else aborted
    texts += ["Operation timed out" if is_newer else "Watchdog caught collective operation timeout"]
    assert run.code == 1 and [text for text in texts if text not in run.err] == [], run.err[-3000:]
    assert re.search(r"rank 0: \S+program.py:\d+, too_late, in barrier\n", run.err), run.err[-3000:]
    assert re.search(r"rank 1: \S+program.py:\d+, too_late\n", run.err), run.err[-3000:]


def test_messages(late):
    """Sums, greatest and least values of two numbers, in five dtypes; what the rank at the left has sent; ..."""
    everyone = answer(late("messages", n=3))
    for rank, found in enumerate(everyone):
        assert found["SUM"] == [[3, 6]] * 5
        assert found["MAX"] == [[2, 3]] * 5 and found["MIN"] == [[0, 1]] * 5
        assert found["ring"] == [(rank - 1) % 3] * 2
        assert found["all_to_all"] == [10 * other + rank for other in range(3)]
        assert found["group"] == (1 if rank == 1 else 2)


# The simulation's own proofs: it must not be kinder than a GPU.  Of rank 0, whose GPU waits for the other one.


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nobody_waits", [False, [1, 1], False, False, True, True, True, [2, 2], 1]),
        ("one_stream_for_another", [False, [4, 4]]),
        ("copy_to_the_host", [[0, 0], [2, 2]]),
    ],
)
def test_what_nobody_waits_for_is_not_there(late, simulated, what, expected):
    assert answer(late(what)) == expected
