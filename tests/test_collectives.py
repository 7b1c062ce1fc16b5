"""exercises/collectives.py in closed forms."""

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


@pytest.mark.parametrize("n", [2, 3])
def test_what_each_rank_holds(n):
    for name, values in expected(n).items():
        assert run(held_after, n, name) == [values] * n, name
    assert sorted([*expected(n), "barrier"]) == sorted(collectives.COLLECTIVES)


def test_nobody_leaves_a_barrier_before_the_last_has_come():
    assert min(seconds for (seconds,) in run(held_after, 3, "barrier")[0]) >= 2


def test_one_process_is_one_line():
    done = forker().run("-m", "exercises.collectives", "all_reduce", "--nproc", 1)
    assert done.code == 2 and "--nproc 1: with fewer than two processes nothing is exchanged" in done.err
