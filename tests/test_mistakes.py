"""demos/mistakes.py: each mistake is on its page; what is wrong, and what is right, in two processes."""

import ast
import contextlib
import io
import re

import pytest
from world import ROOT, forker, run

from demos.mistakes import MISTAKES


def number(pattern):
    """The first number in what was printed that the pattern finds."""
    return lambda printed: float(re.search(pattern, printed)[1])


def number_of_lists(printed):
    return len(set(re.findall(r"\[.*\]", printed)))


def length_of_list(printed):
    return len(ast.literal_eval(re.search(r"\[.*\]", printed)[0]))


ACCURACY = number(r"([\d.]+)%")
PRINTED = {  # what is read from what rank 0 prints; its value with the right lines, and with the wrong ones
    "no_ddp": (number(r": ([\d.]+)$"), 0, 0.48),
    "no_sampler": (number(r"(\d+) of them"), 20, 10),
    "set_epoch": (number_of_lists, 3, 1),
    "padding": (ACCURACY, 80, 83.3),
    "mean_of_means": (ACCURACY, 80, 83.3),  # 4 / 5; (2 / 3 + 2 / 2) / 2
    "batch_size": (number(r"(\d+) steps"), 6, 3),
    "iterable": (length_of_list, 6, 24),  # by two workers on two ranks
    "clip": (number(r"length ([\d.]+)"), 1, 1 / 65536),
    "dropout_seed": (number(r"(\d+) different"), 2, 1),
}
IN_PROGRAMS = {  # of all ranks: how many lines the right program prints, and the exit code of the wrong one
    "every_rank": (1, 0),
    "collective": (1, 1),
    "unused": (1, 1),
    "early_stop": (1, 1),
    "rank_0_works": (1, 1),
}


def test_each_mistake_is_on_the_page_and_tested():
    page = (ROOT / "docs/mistakes.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- mistake: (?:\S+ )?(\w+) -->", page) == list(MISTAKES)
    assert sorted(MISTAKES) == sorted([*PRINTED, *IN_PROGRAMS])


def _printed(name, way):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        MISTAKES[name][way]()
    return printed.getvalue()


@pytest.mark.parametrize("name", PRINTED)
def test_wrong_and_right(name):
    read, right, wrong = PRINTED[name]
    assert read(run(_printed, 2, name, 1)[0]) == pytest.approx(right, abs=1e-6)
    assert read(run(_printed, 2, name, 0)[0]) == pytest.approx(wrong, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PROGRAMS)
def test_wrong_and_right_as_programs(name):
    lines, code = IN_PROGRAMS[name]
    right, wrong = (forker().run("-m", "demos.mistakes", name, way, DIST_TIMEOUT=3) for way in ("right", "wrong"))
    met = "distributed: 2 processes, gloo, cpu"  # two ranks that print at the same time may share a line
    assert right.code == 0 and len(right.out.replace(met, "").split("\n")) - right.out.count(met) - 1 == lines, right
    assert wrong.code == code and (code or wrong.out.count("epoch 1") == 2), wrong
