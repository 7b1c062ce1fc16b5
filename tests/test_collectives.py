"""exercises/collectives.py and ring.py in closed forms.  That the page shows what they print: tools/test_docs.py."""

import pytest
from world import forker

import distributed as dist
from exercises import collectives, ring


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


def _each(rank, n, names):
    dist.init_process_group(backend="gloo")
    found = {name: [after for _, after in collectives.before_and_after(name)] for name in names}
    assert found == {name: expected(n)[name] for name in names}
    sent, equal = ring.compare(84 * n)
    assert equal and sent == [2 * (n - 1) * 84 * 4] * n
    sent, equal = ring.compare(84 * n + 1)  # parts that differ in size: together the ranks send as much as ever
    assert equal and sum(sent) == 2 * (n - 1) * (84 * n + 1) * 4
    dist.cleanup()


@pytest.mark.parametrize("n", [2, 3, pytest.param(7, marks=pytest.mark.slow)])
def test_what_each_rank_holds(n):
    dist.launch(_each, list(expected(n)), nproc=n)
    assert sorted([*expected(n), "barrier"]) == sorted(collectives.COLLECTIVES)


def _barrier(rank, n):
    dist.init_process_group(backend="gloo")
    assert [after for _, after in collectives.before_and_after("barrier")] == [[n - 1]] * n  # when the last has come
    dist.cleanup()


@pytest.mark.slow
@pytest.mark.parametrize("n", [3])
def test_nobody_leaves_a_barrier_before_the_last_has_come(n):
    dist.launch(_barrier, nproc=n)


def test_one_process_is_one_line():
    done = forker().run("-m", "exercises.collectives", "all_reduce", "--nproc", 1)
    assert done.code == 2 and "--nproc 1: with fewer than two processes nothing is exchanged" in done.err
