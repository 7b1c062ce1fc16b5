"""What the other experiments make of made-up figures, by closed forms; and each of them once, with a few batches."""

import math

import pytest
import torch
from world import forker, shell

from experiments import benchmark, timelines
from experiments.measured import Epoch


def epochs(*speeds, accuracy=math.inf):
    return [Epoch(10.0 * number, 0.1, accuracy, speed) for number, speed in enumerate(speeds, 1)]


def test_the_table_of_speeds():
    """The median without a run's first epoch; one line for both ways of a peer to load; shares are those of medians."""
    assert benchmark.speed(epochs(1, 10, 40, 20)) == 20 and benchmark.speed(epochs(7)) == 7
    ddp, limit = benchmark.script("mnist_ddp.py", "mnist_ddp.py"), benchmark.script(benchmark.BARRIER, "limit")
    peers = [benchmark.peer("plain_ddp", loads) for loads in (benchmark.SINGLE, benchmark.WHOLE)]
    speeds = [[800, 700, 900], [100], [790, 810], [1000, 990, 4000]]
    _, *rows = benchmark.speed_rows([ddp, *peers, limit], speeds)
    assert [row[0] for row in rows] == ["mnist_ddp.py", "plain DDP loop", benchmark.BARRIER]
    assert rows[0][2:] == ["–", "800 (700 to 900)", "80%"]
    assert rows[1][2:] == ["100", "800 (790 to 810)", "80%"]
    assert rows[2][2:] == ["–", "1,000 (990 to 4,000)", "100%"]


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch 2.14 tells which tensors a message has")
def test_what_each_form_sends_and_keeps():
    """Four ranks and Adam, which has two numbers for each weight: ZeRO-1 shares these out, FSDP everything."""
    done = forker().run("-m", "experiments.timelines", "adam", timeout=100)
    assert done.code == 0, done.err
    rows = [line.strip("| \n").split("|") for line in done.out.splitlines() if line.startswith("| `")]
    cells = [[float(cell.replace(",", "")) for cell in (row[2], *row[4:])] for row in rows]
    assert all(row[-1] == pytest.approx(sum(row[1:-1]), abs=4) for row in cells)  # rounded
    n = 4e-3 * sum(p.numel() for p in timelines.Wide(1, 28).parameters())  # kB
    expected = [
        (n, n, 2 * n, n),  # DDP: kB sent, weights, optimizer state, gradients
        (n, n, 2 * n, n),
        (n + n / 4, n, 2 * n / 4, n + n / 4),  # ZeRO-1: all gradients out, a slice of the weights; a slice averaged
        (n + 2 * n / 4, n / 4, 2 * n / 4, None),  # FSDP: its weights for forward and for backward
    ]
    for row, form in zip(cells, expected, strict=True):
        assert all(want is None or has == pytest.approx(want, rel=0.01) for has, want in zip(row, form, strict=False))
    assert cells[2][-1] < cells[0][-1] and cells[3][-1] < cells[2][-1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_dry_run():
    done = shell("-m", "experiments.benchmark", "--dry-run", timeout=390)
    assert done.code == 0 and "\n| mnist_ddp.py" in done.out, done.err
