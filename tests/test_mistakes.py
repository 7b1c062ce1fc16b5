"""demos/mistakes.py: each mistake is on its page; what is wrong, and what is right, on two ranks and on three."""

import contextlib
import io
import re

import pytest
import torch
from torch import nn
from world import ROOT, forker, run

import distributed as dist
from demos.mistakes import MISTAKES, make_step, zero_model

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
    ("batch_size", 3): ("7 steps of 198", "2 steps of 600"),
    ("iterable", 2): (re.escape(str(NUMBERS)), re.escape(str(sorted(4 * NUMBERS)))),  # two workers on two ranks
}
PROGRAMS = {  # those that end in an error, and one that writes a file
    "every_rank": ("(epoch 1  loss 0.50\n){1}$", "(epoch 1  loss 0.50\n){2}$"),
    "collective": ("loss 0.50", "where each rank stands:"),
    "unused": ("two steps, no error", "Expected to have finished reduction"),
    "early_stop": ("all ranks stop at step 5", "where each rank stands:"),
    "rank_0_works": ("all go on", "where each rank stands:"),
}


def test_each_mistake_is_on_the_page():
    page = (ROOT / "docs/mistakes.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- mistake: (?:\S+ )?(\w+) -->", page) == list(MISTAKES)
    assert {name for name, _ in PRINTED} | {*PROGRAMS} == {*MISTAKES}


def _printed(name, way):
    torch.manual_seed(dist.get_rank())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        MISTAKES[name][way]()
    return printed.getvalue()


@pytest.mark.parametrize(("name", "n"), PRINTED)
def test_wrong_and_right(name, n):
    right, wrong = PRINTED[name, n]
    assert re.search(right, text := run(_printed, n, name, 1)[0]), text
    assert re.search(wrong, text := run(_printed, n, name, 0)[0]), text


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_and_right_as_programs(name):
    right, wrong = PROGRAMS[name]
    done = forker().run("-m", "demos.mistakes", name, "right")
    assert done.code == 0 and re.search(right, done.out), done
    done = forker().run("-m", "demos.mistakes", name, "wrong", DIST_TIMEOUT=3)
    assert done.code == int(name != "every_rank") and re.search(wrong, done.out + done.err), done


def to_double(model):
    model.double()


def assign(model):
    model.load_state_dict(zero_model().state_dict(), assign=True)


def _trained(change, is_wrapped_again):
    """The model is changed after it was wrapped, and trained: the largest difference between the ranks' weights."""
    model = zero_model()
    ddp_model = dist.prepare_ddp_model(model)
    change(model)
    if is_wrapped_again:
        ddp_model = dist.prepare_ddp_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        inputs = torch.tensor([[1.0, dist.get_rank()]], dtype=model.bias.dtype)
        make_step(optimizer, (ddp_model(inputs) - 1).square().mean())
    weights = torch.stack(dist.gather(nn.utils.parameters_to_vector(model.parameters())))
    return (weights.amax(0) - weights.amin(0)).max().item()


@pytest.mark.parametrize("change", [to_double, assign])
def test_other_changes_after_wrapping(change):
    """Alone rank r learns (1, r, 1) / (2 + r**2): its second weight is 0 on rank 0, and 1/3 on rank 1."""
    assert run(_trained, 2, change, False)[0] == pytest.approx(1 / 3)
    assert run(_trained, 3, change, True)[0] == 0


NAMED = [("after_wrapping", 3, "copies"), ("token_mean", 2, "averaging")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n", "label"), NAMED)
def test_equivalence_names_it(name, n, label):
    command = (ROOT / "equivalence", "--nproc", n, "-m", "demos.mistakes", name)
    wrong, right = (forker().run(*command, way, cwd=ROOT) for way in ("wrong", "right"))
    assert wrong.code == 1 and re.search(f"^verdict .*{label}", wrong.out), wrong
    assert right.code == 0 and right.out.startswith("verdict       THE SAME as one process"), right


@pytest.mark.slow
def test_equivalence_does_not_accuse_examples_that_are_drawn_with_replacement():
    done = forker().run(ROOT / "equivalence", "-m", "demos.mistakes", "weighted", "right", cwd=ROOT)
    assert done.code == 0, done
