"""docs/distributed_testing.py and its recipe: which test fails, and what pytest prints of its ranks."""

import re
import shutil

from world import ROOT, forker

EXAMPLES = """
import os, time
import pytest, torch
import torch.distributed as dist
from distributed_testing import on_ranks

@pytest.fixture
def model():
    return torch.nn.Linear(2, 1)

class TestClass:
    @pytest.mark.parametrize("size", [1, 1000])
    @on_ranks(2, 3)
    def test_right(self, size, model, tmp_path, monkeypatch):
        monkeypatch.setenv("X", "1")
        mine = torch.full((size,), float(dist.get_rank()))
        dist.all_reduce(mine)
        assert (mine == sum(range(dist.get_world_size()))).all() and tmp_path.exists()

@on_ranks(3)
def test_one_rank_fails():
    mine = torch.tensor([1, 2, dist.get_rank()])
    if dist.get_rank() == 1:
        assert mine.tolist() == [1, 2, 3]
    dist.all_reduce(mine)  # others wait here

@on_ranks(3)
def test_dies():
    if dist.get_rank() == 2:
        os._exit(7)
    dist.barrier()

@on_ranks(2, timeout=1)
def test_hangs():
    if dist.get_rank() == 0:
        dist.barrier()  # rank 0 waits here
    while True:
        time.sleep(0.1)  # rank 1 is here

@on_ranks(2)
def test_skip():
    pytest.skip("not here")

@pytest.mark.xfail
@on_ranks(2)
def test_xfail():
    assert dist.get_rank() == 0
"""


def line_of(comment):
    return next(number for number, line in enumerate(EXAMPLES.splitlines(), 1) if comment in line)


def pytest_on(folder, text):
    shutil.copy(ROOT / "docs/distributed_testing.py", folder)
    (folder / "test_ranks.py").write_text(text)
    return forker().run("-m", "pytest", "-p", "no:cacheprovider", "-q", "test_ranks.py", cwd=folder)


def test_a_rank_that_fails_dies_or_waits_is_named(tmp_path):
    done = pytest_on(tmp_path, EXAMPLES)
    assert done.out.endswith("\n") and "3 failed, 4 passed, 1 skipped, 1 xfailed" in done.out, done
    fails, dies, hangs = re.split(r"^_+ test_\w+\[\d\] _+$", done.out, flags=re.MULTILINE)[1:]
    assert fails.index("rank 1: AssertionError: assert [1, 2, 1] == [1, 2, 3]") < fails.index("E   ")
    for rank in 0, 2:
        assert re.search(
            rf"^rank {rank}: still at .*line {line_of('others wait')} in test_one_rank_fails$", fails, re.M
        )
    assert "rank 2: the process died with exit code 7" in dies
    for rank in 0, 1:
        assert re.search(rf"^rank {rank}: still at .*line {line_of(f'rank {rank} ')} in test_hangs$", hangs, re.M)


def test_the_recipe_finds_a_sum_in_place_of_a_mean(tmp_path):
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    code = re.search(r"^## Tests on several ranks\n.*?```python\n(.*?)```", page, re.DOTALL | re.MULTILINE)[1]
    assert "2 passed" in pytest_on(tmp_path, code).out
    wrong = pytest_on(tmp_path, code.replace(").backward()", ', reduction="sum").backward()'))
    assert "1 failed, 1 passed" in wrong.out, wrong
