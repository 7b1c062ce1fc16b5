"""demos/mistakes.py: each mistake is on its page; what is wrong, and what is right, on two ranks and on three."""

import contextlib
import io
import re

import pytest
import torch
from world import ROOT, forker, run

import distributed as dist
from demos.mistakes import MISTAKES, zero_model

NUMBERS = list(range(6))
PRINTED = {  # by name and number of ranks: what the right lines print, and the wrong ones
    ("no_ddp", 2): (": 0.00", ": 0.33"),  # the second weight is 0 and 1/3
    ("after_wrapping", 3): (": 0.00", r": 0\.[1-9]"),
    ("no_sampler", 3): ("40 steps of 30 images, 30 ", "120 steps of 30 images, 10 "),
    ("set_epoch", 2): (r"0: .*(\[.*\])\n(?!.*\1)", r"0: .*(\[.*\])\n.*\1\n.*\1\n"),
    ("weighted", 3): ("1200 images, (4[5-9]|5[0-5])% ", "1200 images, 10% "),
    ("random_split", 3): ("^0 of 200 ", "^(8[5-9]|9|10)[0-9]* of 200 "),  # 200 * (1 - (1 - 5/6 * 1/3)**2) = 96
    ("padding", 2): ("80.0% .4/5", "83.3% .5/6"),
    ("mean_of_means", 2): ("80.0%", "83.3%"),  # 4 / 5; (2 / 3 + 2 / 2) / 2
    ("token_mean", 3): (" 28.6%", " 44.4%"),  # rank 2 has rank 0's text again: 4 / 14; (1 / 6 + 2 / 2 + 1 / 6) / 3
    ("border", 2): (" 50%", " 0%"),  # one of two followers; never seen
    ("balance", 2): (" 88%", r" 5\d%"),  # exp(2) / (exp(2) + 1), with a gradient of 0; a half: in balance on each rank
    ("batch_size", 3): ("7 steps of 198", "2 steps of 600"),
    ("iterable", 2): (re.escape(str(NUMBERS)), re.escape(str(sorted(4 * NUMBERS)))),  # two workers on two ranks
}
# These end in an error, or write a file: tests/dev/test_docs.py runs them as programs, wrong and right.
PROGRAMS = {"every_rank", "collective", "unused", "early_stop", "rank_0_works"}


def test_each_mistake_is_on_the_page():
    page = (ROOT / "docs/mistakes.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"<!-- mistake: (?:\S+ )?(\w+) -->", page)) == sorted(MISTAKES)  # grouped by what one sees
    assert {name for name, _ in PRINTED} | PROGRAMS == {*MISTAKES}


def test_without_a_name_each_mistake_is_listed_in_a_line():
    done = forker().run("-m", "demos.mistakes")
    listed, how_to_run = done.out.split("\n\n")
    lines = dict(line.split(maxsplit=1) for line in listed.splitlines())
    assert (done.code, done.err) == (0, "") and list(lines) == list(MISTAKES)
    assert all(re.fullmatch("[^:]+, so [^:]+", line) for line in lines.values()), "what is wrong, so what happens"
    assert len({*lines.values()}) == len(MISTAKES) and max(map(len, listed.splitlines())) <= 110
    name, way = re.search(r"^To run one: python -m demos.mistakes (\w+) (\w+)$", how_to_run, re.MULTILINE).groups()
    done = forker().run("-m", "demos.mistakes", name, way)
    assert done.code == 0 and re.search(PRINTED[name, 2][1], done.out), done


def _printed(name, way):
    torch.manual_seed(dist.get_rank())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        getattr(MISTAKES[name], way)()
    return printed.getvalue()


@pytest.mark.parametrize(("name", "n"), PRINTED)
def test_wrong_and_right(name, n):
    right, wrong = PRINTED[name, n]
    assert re.search(right, text := run(_printed, n, name, "right")[0]), text
    assert re.search(wrong, text := run(_printed, n, name, "wrong")[0]), text


def _change_after_wrapping(how):
    """Whether the ranks' gradients are still equal."""
    model = zero_model()
    ddp_model = dist.prepare_ddp_model(model)
    if how == "double":
        model.double()
    else:
        model.load_state_dict(zero_model().state_dict(), assign=True)
    inputs = torch.tensor([[1.0, dist.get_rank()]], dtype=model.bias.dtype)
    (ddp_model(inputs) - 1).square().mean().backward()
    gradients = dist.gather(model.weight.grad)
    return torch.equal(*gradients)


@pytest.mark.parametrize("how", ["double", "assign"])
def test_other_changes_after_wrapping(how):
    assert run(_change_after_wrapping, 2, how) == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [("after_wrapping", 3), ("token_mean", 2), ("early_stop", 3), ("weighted", 3)])
def test_equivalence_accuses_none_that_is_right(name, n):
    """What it says of the wrong ones stands on the page.  `weighted` draws with replacement; there are two texts."""
    done = forker().run("-m", "ddp_by_diff.equivalence", "--nproc", n, "-m", "demos.mistakes", name, "right", cwd=ROOT)
    assert done.code == 0 and done.out.startswith("verdict       THE SAME"), done
