"""demos/mistakes.py and predict.py: each mistake is on its page; what is wrong, and what is right, in two processes."""

import contextlib
import io
import re
import subprocess
import sys

import pytest
from world import ROOT, run

from demos import predict
from demos.mistakes import MISTAKES

ANSWERS = {  # to the question of demos/predict.py, on the right lines and on the wrong ones
    "no_ddp": (True, False),
    "no_sampler": (20, 10),
    "set_epoch": (3, 1),
    "every_rank": (1, 2),
    "collective": (True, False),
    "padding": (80, 83.3),
    "mean_of_means": (80, 83.3),  # 4 / 5; (2 / 3 + 2 / 2) / 2
    "batch_size": (6, 3),
    "unused": (True, False),
    "early_stop": (True, False),
    "iterable": (6, 24),  # by two workers on two ranks
    "rank_0_works": (True, False),
    "clip": (1, 1 / 65536),
    "dropout_seed": (2, 1),
}
IN_PROGRAMS = ["every_rank", *(name for name, question in predict.QUESTIONS.items() if question is predict.ENDS)]


def test_each_mistake_is_on_the_page():
    page = (ROOT / "docs/mistakes.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- mistake: (?:\S+ )?(\w+) -->", page) == list(MISTAKES) == list(predict.QUESTIONS)


def _printed(name, way):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        MISTAKES[name][way]()
    return printed.getvalue()


@pytest.mark.parametrize("name", [name for name in MISTAKES if name not in IN_PROGRAMS])
def test_wrong_and_right(name):
    for way, answer in zip((1, 0), ANSWERS[name], strict=True):
        done = subprocess.CompletedProcess([], 0, run(_printed, 2, name, way)[0])
        assert predict.QUESTIONS[name][1](done) == pytest.approx(answer, abs=1e-6), done.stdout


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
    assert "\nWrong: the answer is 1, not 2.\n" in broken
    assert "set_epoch(epoch)" not in broken.partition("Two processes")[0]
    assert "Why (docs/mistakes.md, Every epoch has the same order: no set_epoch):\nThe sampler shuffles" in broken


def test_a_missing_answer_is_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        predicted(monkeypatch, capsys, "collective")
    assert end.value.code == 2 and "an answer is missing: answer in a terminal" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PROGRAMS)
def test_wrong_and_right_as_programs(monkeypatch, capsys, name):
    text = predicted(monkeypatch, capsys, name, *map(predict.in_words, ANSWERS[name]))
    assert text.count("\nRight.\n") == 2 and "Traceback" not in text, text
