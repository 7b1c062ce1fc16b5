"""exercises/mistakes.py: each mistake is on its page; what goes wrong, and what is right, in two processes."""

import contextlib
import io
import re

from world import ROOT, forker, run

from exercises.mistakes import MISTAKES


def test_each_mistake_is_on_the_page():
    page = (ROOT / "docs/mistakes.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- mistake: (?:\S+ )?(\w+) -->", page) == list(MISTAKES)


def _printed(name, way):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        MISTAKES[name][way]()
    return printed.getvalue()


def test_wrong_and_right():
    says = {name: [run(_printed, 2, name, way)[0] for way in (0, 1)] for name in ("padding", "mean_of_means", "clip")}
    assert says["padding"] == ["accuracy 83.3% (5/6)\n", "accuracy 80.0% (4/5)\n"]
    assert says["mean_of_means"] == ["accuracy 83.3%\n", "accuracy 80.0%\n"]  # (2 / 3 + 2 / 2) / 2; 4 / 5
    wrong, right = (float(text.split()[-1]) for text in says["clip"])
    assert (wrong, right) == (round(1 / 65536, 6), 1)

    wrong, right = (run(_printed, 2, "around_ddp", way)[0] for way in (0, 1))
    assert right.endswith(" 0.00\n") and not wrong.endswith(" 0.00\n")
    wrong, right = (run(_printed, 2, "dropout_seed", way)[0] for way in (0, 1))
    assert right.startswith("2 ") and wrong.startswith("1 ")
    wrong, right = (run(_printed, 2, "set_epoch", way)[0].splitlines() for way in (0, 1))
    assert len({line.partition(":")[2] for line in wrong}) == 1 and len({line.partition(":")[2] for line in right}) == 3


def test_a_stream_is_shared_out_to_loader_workers():
    wrong, right = (eval(run(_printed, 2, "iterable", way)[0].split(":")[1]) for way in (0, 1))
    assert right == [0, 1, 2, 3, 4, 5] and wrong == sorted(4 * right)  # by two workers on two ranks


def test_an_unknown_mistake_is_one_line():
    done = forker().run("-m", "exercises.mistakes", "set_epoch", "left")
    assert done.code == 2 and "argument way: invalid choice: 'left'" in done.err
