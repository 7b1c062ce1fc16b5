"""exercises/collectives.py in closed forms."""

import time
from types import SimpleNamespace

import pytest
from world import forker, run

from exercises import collectives


def expected(n):
    """{name: what each rank holds afterwards}, for n ranks; None: no result."""
    mine = [[k * 10**rank for k in range(1, n + 1)] for rank in range(n)]
    ones = sum(10**rank for rank in range(n))
    total, firsts = [k * ones for k in range(1, n + 1)], [10**rank for rank in range(n)]
    return {
        "broadcast": [mine[0]] * n,
        "reduce": [total] + [None] * (n - 1),
        "all_reduce": [total] * n,
        "gather": [firsts] + [None] * (n - 1),
        "all_gather": [firsts] * n,
        "scatter": [[k] for k in mine[0]],
        "reduce_scatter": [[k] for k in total],
        "all_to_all": [[mine[rank][k] for rank in range(n)] for k in range(n)],
        "send_recv": [mine[0], mine[0], *mine[2:]],
    }


def held_after(name):
    return [after for _, after in collectives.before_and_after(name)]


def test_what_each_rank_holds():
    for name, values in expected(3).items():
        assert run(held_after, 3, name) == [values] * 3, name
    assert sorted([*expected(3), "barrier"]) == sorted(collectives.COLLECTIVES)


def _came_and_left():
    """When this rank came to the barrier and left it, in seconds since the machine's start; it comes 50 ms apart."""
    came, times = [], []

    def sleep(seconds):
        time.sleep(0.05 * seconds)
        came.append(time.monotonic())

    def monotonic():
        times.append(time.monotonic())
        return times[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "time", SimpleNamespace(sleep=sleep, monotonic=monotonic))
        collectives.before_and_after("barrier")
    return came[0], times[-1]


def test_nobody_leaves_a_barrier_before_the_last_has_come():
    came, left = zip(*run(_came_and_left, 3), strict=True)
    assert min(left) >= max(came)


def test_one_process_is_one_line():
    done = forker().run("-m", "exercises.collectives", "all_reduce", "--nproc", 1)
    assert done.code == 2 and "--nproc 1: with fewer than two processes nothing is exchanged" in done.err
