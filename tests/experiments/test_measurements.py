"""What the tables of docs/results.md say, by closed forms."""

import pytest
import torch
from world import forker

from experiments import timelines


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
