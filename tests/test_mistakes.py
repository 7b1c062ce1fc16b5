"""exercises/mistakes.py and its page.  That the page shows what the programs print is compared in test_docs.py."""

import ast
import re

from world import ROOT, forker

PAGE = (ROOT / "docs/mistakes.md").read_text(encoding="utf-8")
FUNCTIONS = {
    node.name: node.end_lineno - node.lineno
    for node in ast.parse((ROOT / "exercises/mistakes.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.endswith(("_wrong", "_right"))
}


def test_each_mistake_is_on_the_page_wrong_and_right():
    names = re.findall(r"<!-- mistake: (\w+) -->", PAGE)
    assert len(names) == len(set(names)) == 14
    assert sorted(FUNCTIONS) == sorted(f"{name}_{way}" for name in names for way in ("wrong", "right"))
    assert max(FUNCTIONS.values()) <= 7, "a few lines each"


def outputs():
    """Of each mistake, what the page shows: the wrong and the right output.  (A slow test compares them with a run.)"""
    for block in PAGE.split("<!-- mistake: ")[1:]:
        shown = re.findall(r"^```console\n\$ .*\n((?:.*\n)+?)```$", block, re.MULTILINE)
        yield re.match(r"\w+", block)[0], shown


def test_wrong_and_right_print_different_things():
    for _, (wrong, right) in outputs():
        assert wrong != right


def test_what_the_right_way_prints_is_what_it_must():
    wrong, right = ({name: shown[i] for name, shown in outputs()} for i in (0, 1))
    assert right["padding"] == "accuracy 80.0% (4/5)\n" and right["mean_of_means"] == "accuracy 80.0%\n"
    assert right["around_ddp"].endswith(" 0.00\n")
    assert eval(right["iterable"].split(":")[1]) == [0, 1, 2, 3, 4, 5]  # each number once
    assert eval(wrong["iterable"].split(":")[1]) == sorted([0, 1, 2, 3, 4, 5] * 4)  # by two workers on two ranks
    assert float(right["clip"].split()[-1]) == 1 and float(wrong["clip"].split()[-1]) == round(1 / 65536, 6)
    assert right["dropout_seed"].startswith("2 ") and wrong["dropout_seed"].startswith("1 ")
    for name in "collective", "early_stop", "rank_0_works":
        assert wrong[name].startswith("where each rank stands:\n") and "rank 1: " in wrong[name]


def test_an_unknown_mistake_is_one_line():
    done = forker().run("-m", "exercises.mistakes", "set_epoch", "left")
    assert done.code == 2 and "argument way: invalid choice: 'left'" in done.err
