"""exercises/: the stored solutions pass; blanks fail with a line that helps; wrong solutions are refused, and named.

The others, in other_solutions.txt, are the stored ones with some text replaced, as somebody might have written it.
"""

import itertools
import re
import subprocess
import sys
import time

import pytest
from world import ROOT, WORLDS, forker

from exercises import check
from exercises.checks import NAMES
from exercises.mistakes import MISTAKES

SOLUTIONS = ROOT / "exercises" / "solutions"


def read_others():
    """Of tests/other_solutions.txt: exercise, words of the verdict, [(text of the solution, what stands instead)]."""
    text = (ROOT / "tests" / "other_solutions.txt").read_text(encoding="utf-8")
    for block in text.split("## ")[1:]:
        title, words, *lines = block.rstrip().split("\n")
        changes = []
        for _, group in itertools.groupby(lines, key=lambda line: line.startswith("-")):
            changes.append("\n".join(line[2:] for line in group))
        yield pytest.param(
            title.partition(":")[0], words, list(zip(changes[::2], changes[1::2], strict=True)), id=title
        )


OTHERS = list(read_others())


@pytest.fixture
def verdict(tmp_path, capsys):
    """verdict(name, *changes): whether the changed solution passes, and what the check prints."""

    def examined(name, *changes, limit=check.LIMIT):
        source = (SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")
        for old, new in changes:
            assert old in source, old
            source = source.replace(old, new, 1)
        file = tmp_path / f"{name}.py"
        file.write_text(source, encoding="utf-8")
        return check.check(name, file, limit), capsys.readouterr().out

    return examined


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words", "changes"), OTHERS)
def test_a_wrong_solution_is_refused_and_a_right_one_is_not(verdict, name, words, changes):
    passed, text = verdict(name, *changes)
    assert words in text, text
    assert passed == (words == "equal") == (text.count(" equal\n") == 3), text


def test_each_exercise_has_a_wrong_solution():
    wrong = {case.values[0] for case in OTHERS if case.values[1] != "equal"}
    assert wrong == set(NAMES)


def test_the_readme_lists_all_in_their_order():
    text = (ROOT / "exercises" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \d+ \| \[(\w+)\]\((?:\w+)\.py\)", text, re.MULTILINE) == NAMES
    for name in NAMES:
        assert (ROOT / "exercises" / f"{name}.py").read_text(encoding="utf-8").count("raise NotImplementedError") == 1
    for name in re.findall(r"exercises\.predict (\w+)", text):
        assert name in MISTAKES


# ------------------------------------------------------------------------------------------------------- the program


def test_blanks_fail_with_a_line_that_helps():
    done = forker().run("-m", "exercises.check", "average_gradients")
    assert (done.code, done.err) == (1, "")
    assert "not implemented yet: write average_gradients() in exercises/average_gradients.py; a hint" in done.out


@pytest.mark.slow
def test_all_blanks_fail():
    done = forker().run("-m", "exercises.check", "all")
    assert done.code == 1 and done.out.count("not implemented yet") == 10
    assert done.out.endswith("0 of 10 are right\n")


@pytest.mark.slow
def test_all_solutions_pass():
    started = time.monotonic()
    done = forker().run("-m", "exercises.check", "all", "--solution", timeout=170)
    assert done.code == 0 and done.out.count(" equal\n") == 30 and done.out.endswith("10 of 10 are right\n"), done
    assert time.monotonic() - started < 170


def test_a_solution_passes():
    done = forker().run("-m", "exercises.check", "5", "--solution")
    assert done == (
        0,
        "average_gradients (exercises/solutions/average_gradients.py)\n"
        "  1 process    equal\n  2 processes  equal\n  3 processes  equal\npassed; next: one_bucket\n",
        "",
    )


def test_a_bad_name_and_a_launcher_are_one_line():
    done = forker().run("-m", "exercises.check", "shrad")
    assert done.code == 2 and "invalid choice: 'shrad'" in done.err and "Traceback" not in done.err
    done = forker().run("-m", "exercises.check", "shard", RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2)
    assert done.code == 2 and done.err.endswith("it starts its processes itself: type python -m exercises.check\n")


@pytest.mark.slow
@WORLDS
def test_a_hang_is_an_answer_with_the_place_of_each_rank(verdict, tmp_path, n):
    here = f"dist.get_world_size() == {n} and dist.get_rank() == {n - 1}"
    wait = f"import time\n    if {here}:\n        time.sleep(3600)\n    "
    started = time.monotonic()
    passed, text = verdict("global_mean", ("total, count", f"{wait}total, count"), limit=10)
    assert not passed and time.monotonic() - started < 60
    assert "HANGS  after 10 s each rank stands here:\n" in text
    table = [re.sub(r":\d+,", "", line.strip()) for line in text.splitlines() if line.startswith("    rank ")]
    expected = [f"rank {r}: {tmp_path}/global_mean.py global_mean, in all_reduce" for r in range(n - 1)]
    assert table == [*expected, f"rank {n - 1}: {tmp_path}/global_mean.py global_mean"]


@pytest.mark.slow
def test_an_error_is_a_few_lines(verdict, tmp_path):
    broken = "if dist.get_rank() == 1:\n        {}['shards']\n    "
    _, text = verdict("global_mean", ("total, count", f"{broken}total, count"))
    assert "1 process    equal\n  2 processes  ERROR  rank 1 of 2 failed first:" in text
    lines = re.sub(r"\.py:\d+,", ".py,", text)
    assert f"\n    {tmp_path}/global_mean.py, in global_mean:  {{}}['shards']\n    KeyError: 'shards'\n" in lines
    assert len(text.splitlines()) <= 6
    _, text = verdict("global_mean", ("return", "return ("))
    assert "SyntaxError: '(' was never closed" in text and len(text.splitlines()) <= 8
    _, text = verdict("global_mean", ("def global_mean", "def mean"))
    assert f"there is no function global_mean in {tmp_path}/global_mean.py" in text


# ----------------------------------------------------------------------------------------------------------- predict


ORDERS = [["[2, 3, 1]", "[1, 2, 3]", "[0, 1, 4]"], ["[2, 3, 1]"] * 3]  # right, broken


def check_prediction(out, typed):
    right, broken = out.split("2. Now they are broken: compare them with those above.")
    assert (
        right.startswith("1. These lines are right.\n\nnumbers = list(range(6))\n\n    sampler =")
        and "set_epoch(epoch)" in right
    )
    assert "set_epoch(epoch)" not in broken and broken.endswith(
        "docs/mistakes.md, Every epoch has the same order: no set_epoch\n"
    )
    for part, orders, line in zip((right, broken), ORDERS, typed, strict=True):
        assert f"What do two processes print? {line}\n\nCompare it with what they print:\n" in part
        assert re.findall(r"rank 0 trains on (.*)", part.partition("what they print")[2]) == orders


def test_predict_without_input_only_shows():
    done = forker().run("-m", "exercises.predict", "set_epoch")
    assert done.code == 0
    check_prediction(done.out, ["", ""])


@pytest.mark.slow
def test_predict_reads_from_a_pipe():
    command = [sys.executable, "-m", "exercises.predict", "set_epoch"]
    done = subprocess.run(command, input="new ones\nthe same\n", capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    check_prediction(done.stdout, ["new ones", "the same"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MISTAKES if name != "set_epoch"])
def test_predict_shows_errors_and_hangs(name):
    done = forker().run("-m", "exercises.predict", name)
    assert re.search(r"\nWhy: docs/mistakes.md, \w[^\n]+\n$", done.out), done
    assert done.code == 0 and "Traceback" not in done.out + done.err
    says = {"padding": "accuracy 83.3% (5/6)", "state_dict": "Missing key(s)", "collective": "collective_wrong, in"}
    assert says.get(name, "Compare it with what they print") in done.out
