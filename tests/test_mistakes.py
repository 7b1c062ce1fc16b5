"""demos/mistakes.py and predict.py: each mistake is on its page; what is wrong, and what is right, in two processes."""

import contextlib
import io
import re
import sys

import pytest
from world import ROOT, forker, run

from demos import predict
from demos.mistakes import MISTAKES


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

    wrong, right = (run(_printed, 2, "no_ddp", way)[0] for way in (0, 1))
    assert right.endswith(" 0.00\n") and not wrong.endswith(" 0.00\n")
    says = [run(_printed, 2, "no_sampler", way)[0] for way in (0, 1)]
    assert says == [
        "120 steps of 20 images, 10 of them different\n",  # 1200 images in batches of 10 on each rank
        "60 steps of 20 images, 20 of them different\n",
    ]
    wrong, right = (run(_printed, 2, "dropout_seed", way)[0] for way in (0, 1))
    assert right.startswith("2 ") and wrong.startswith("1 ")
    wrong, right = (run(_printed, 2, "set_epoch", way)[0].splitlines() for way in (0, 1))
    assert len({line.partition(":")[2] for line in wrong}) == 1 and len({line.partition(":")[2] for line in right}) == 3


def test_a_stream_is_shared_out_to_loader_workers():
    wrong, right = (eval(run(_printed, 2, "iterable", way)[0].split(":")[1]) for way in (0, 1))
    assert right == [0, 1, 2, 3, 4, 5] and wrong == sorted(4 * right)  # by two workers on two ranks


def test_an_unknown_mistake_is_one_line():
    done = forker().run("-m", "demos.mistakes", "set_epoch", "left")
    assert done.code == 2 and "argument way: invalid choice: 'left'" in done.err


# ----------------------------------------------------------------------------------------------------------- predict

ANSWERS = {  # to the question on the right lines, and on the wrong ones
    "no_ddp": "yes no",
    "no_sampler": "20 10",
    "set_epoch": "3 1",
    "every_rank": "1 2",
    "collective": "yes no",
    "padding": "80% 83",
    "mean_of_means": "80 83.3",
    "batch_size": "6 3",
    "unused": "yes no",
    "early_stop": "yes no",
    "iterable": "6 24",
    "rank_0_works": "yes no",
    "clip": "1 0",
    "dropout_seed": "2 1",
}


def predicted(monkeypatch, capsys, name, *answers):
    monkeypatch.setattr(sys, "argv", ["predict", name])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{answer}\n" for answer in answers)))
    predict.main()
    return capsys.readouterr().out


def test_an_answer_is_compared_with_the_run(monkeypatch, capsys):
    text = predicted(monkeypatch, capsys, "set_epoch", "many", 3, 2)
    assert "'many' is no answer: type a number" in text
    right, broken = text.split("2. Now they are broken")
    assert "\nRight.\n" in right and "set_epoch(epoch)" in right and "numbers = list(range(6))\n" in right
    assert (
        "\nWrong: the answer is 1, not 2.\n" in broken
        and "set_epoch(epoch)" not in broken.partition("Two processes")[0]
    )
    assert "Why (docs/mistakes.md, Every epoch has the same order: no set_epoch):\nThe sampler shuffles" in broken


def test_a_missing_answer_is_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        predicted(monkeypatch, capsys, "collective")
    assert end.value.code == 2 and "an answer is missing: answer in a terminal" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_right_answers_are_right(monkeypatch, capsys, name):
    text = predicted(monkeypatch, capsys, name, *ANSWERS[name].split())
    assert text.count("\nRight.\n") == 2 and "Traceback" not in text, text
