"""exercises/mistakes.py and its page.  That the page shows what the programs print is compared in test_docs.py."""

import ast
import re

from forked import ROOT, forker

PAGE = (ROOT / "docs/mistakes.md").read_text(encoding="utf-8")
FUNCTIONS = {
    node.name: node.end_lineno - node.lineno
    for node in ast.parse((ROOT / "exercises/mistakes.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name != "worker"
}


def test_each_mistake_is_on_the_page_wrong_and_right():
    names = re.findall(r"<!-- mistake: (\w+) -->", PAGE)
    assert len(names) == len(set(names)) == 8
    assert sorted(FUNCTIONS) == sorted(f"{name}_{way}" for name in names for way in ("wrong", "right"))
    assert max(FUNCTIONS.values()) <= 6, "a few lines each"


def test_wrong_and_right_print_different_things():
    for block in PAGE.split("<!-- mistake: ")[1:]:
        wrong, right = re.findall(r"^```console\n\$ .*\n((?:.*\n)+?)```$", block, re.MULTILINE)
        assert wrong != right


def test_an_unknown_mistake_is_one_line():
    done = forker().run("-m", "exercises.mistakes", "set_epoch", "left")
    assert done.code == 2 and "argument way: invalid choice: 'left'" in done.err
