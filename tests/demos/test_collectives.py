"""demos/collectives.py in closed forms, and the drawing of a step in docs/data_parallel.svg."""

import ast
import re

import torch
from torch import nn
from world import ROOT, forker, on_ranks

import distributed as dist
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


@on_ranks(2)
def test_the_drawing_of_a_step_is_what_ddp_computes():
    drawing = (ROOT / "docs/data_parallel.svg").read_text(encoding="utf-8")
    told = re.search("<desc.*?>(.*)</desc>", drawing)[1]
    examples = torch.tensor(ast.literal_eval(re.search(r"\(x, y\): (.*?);", told)[1]), dtype=torch.float)
    inputs, targets = examples.split(1, dim=1)
    step = (
        r"w = (\S+)\. Their local gradients are (\S+) and (\S+)\. .* the mean, (\S+)\. .* - (\S+) \* \S+ = (\S+)\. The"
    )
    start, *local, mean, rate, end = map(float, re.search(step, told).groups())
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, start)

    def gradient(of, chosen):
        (((of(inputs[chosen]) - targets[chosen]) ** 2).mean() / 2).backward()
        return model.weight.grad.item()

    assert gradient(model, slice(None)) == mean, "one process, with the whole batch"
    mine = slice(dist.get_rank(), None, 2)
    model.zero_grad()
    assert gradient(model, mine) == local[dist.get_rank()]
    model.zero_grad()
    assert gradient(dist.prepare_ddp_model(model), mine) == mean
    torch.optim.SGD(model.parameters(), rate).step()
    assert round(model.weight.item(), 6) == end
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
    assert shown.count(f"w = {start:g}") == shown.count(f"{mean:g}") == shown.count(f"w = 1 - 0.1 · 4 = {end:g}") == 2
    assert f"all-reduce: the mean of {local[0]:g} and {local[1]:g}" in shown
