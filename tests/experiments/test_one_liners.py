"""one_liners.py: the table in the docs is what the program counts; slow_variants.py: bad input."""

import pytest
from world import forker

from experiments import measured


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_one_liners_are_those_of_the_table(tmp_path):
    """Counted figures are exact on each machine; losses and distances differ by rounding."""
    done = forker().run("-m", "experiments.one_liners", "--output", tmp_path, timeout=180)
    assert done.code == 0, done.err
    shown, found = (read_rows(folder / "one_liners.md") for folder in (measured.RESULTS, tmp_path))
    assert [row[:3] for row in shown] == [row[:3] for row in found] and len(found) >= 12
    for (_, _, counted, *before), (_, _, _, *after) in zip(shown, found, strict=True):
        if counted == "max abs(dw)":
            assert float(after[1]) <= 1e-5
        elif counted.startswith("loss"):
            assert float(after[1]) == pytest.approx(float(before[1]), abs=0.05)
        else:
            assert after == before


def read_rows(path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["0.5", "mnist_ddp"], "from 1 to 100000 Mbit/s, or 0"),
        (["0", "none"], "SCRIPT: invalid choice: 'none'"),
        (["0", "variants.mnist_local_sgd", "--every", "0"], "--every 0: it must be at least 1"),
    ],
)
def test_slow_variants_refuses_what_it_cannot_do(wrong, words):
    done = forker().run("-m", "experiments.slow_variants", *wrong)
    assert done.code == 2 and words in done.err.splitlines()[-1]
