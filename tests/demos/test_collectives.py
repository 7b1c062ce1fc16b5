"""demos/collectives.py in closed forms."""

from world import forker, on_ranks

from demos import collectives

HELD = {  # by each of three ranks afterwards, which had [1, 2, 3], [10, 20, 30] and [100, 200, 300]; None: no result
    "broadcast": [[1, 2, 3]] * 3,
    "reduce": [[111, 222, 333], None, None],
    "all_reduce": [[111, 222, 333]] * 3,
    "gather": [[1, 10, 100], None, None],
    "all_gather": [[1, 10, 100]] * 3,
    "scatter": [[1], [2], [3]],
    "reduce_scatter": [[111], [222], [333]],
    "all_to_all": [[1, 10, 100], [2, 20, 200], [3, 30, 300]],
    "send_recv": [[1, 2, 3], [1, 2, 3], [100, 200, 300]],
}


@on_ranks(3)
def test_what_each_rank_holds():
    for name, values in HELD.items():
        assert [after for _, after in collectives.before_and_after(name)] == values, name
    assert [*HELD, "barrier"] == [*collectives.COLLECTIVES]


def test_one_process_is_one_line():
    done = forker().run("-m", "demos.collectives", "all_reduce", "--nproc", 1)
    assert done.code == 2 and "--nproc 1: a collective needs at least two processes, so type --nproc 2" in done.err
