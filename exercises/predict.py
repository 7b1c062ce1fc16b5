"""Predict what lines print, run them, then break them.  python -m exercises.predict set_epoch

Type what you expect (of random numbers: the same, or others?), then Return: the lines run in two processes.  Three to
begin with: set_epoch, padding and collective.  Why each is so is on the page docs/mistakes.md: read it afterwards.
"""

import argparse
import ast
import functools
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import distributed as dist
from exercises import mistakes
from exercises.mistakes import MISTAKES, worker

PAGE = Path(__file__).parents[1] / "docs" / "mistakes.md"


def given(function: Callable) -> str:
    """The lines outside of the function that give its names their values, such as `numbers = list(range(6))`."""
    source = inspect.getsource(mistakes)
    lines = [
        ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and node.targets[0].id in function.__code__.co_names
    ]
    return "".join(f"{line}\n" for line in [*lines, ""]) if lines else ""


def heading(name: str) -> str:
    """Of the mistake's part of the page."""
    before = PAGE.read_text(encoding="utf-8").partition(f" {name} -->")[0]
    return before.rpartition("\n## ")[2].partition("\n")[0]


def predict(title: str, function: Callable) -> None:
    """Show the function's lines, ask, and run them."""
    shown = function.args[0] if isinstance(function, functools.partial) else function
    lines = inspect.getsource(shown).partition("\n")[2]
    lines = re.sub("  # .*", "", lines)  # the comments tell too much
    print(f"{title}\n\n{given(shown)}{lines}")
    try:
        expected = input("What do two processes print? ")
        if not sys.stdin.isatty():  # a terminal has shown it already
            print(expected)
    except EOFError:  # no input: only show
        print()
    print("\nCompare it with what they print:\n", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dist.launch(worker, function, folder, nproc=2)
    except SystemExit as end:  # some of the mistakes end with an error
        print(re.sub(r"Traceback .*?\n(?=\w+Error)", "", str(end.code), flags=re.DOTALL))
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=MISTAKES)
    name = parser.parse_args().name
    os.environ.setdefault("DIST_TIMEOUT", "3")  # a mistake that hangs is shown after 3 s
    wrong, right = MISTAKES[name]
    predict("1. These lines are right.", right)
    predict("2. Now they are broken: compare them with those above.", wrong)
    print(f"Why: docs/mistakes.md, {heading(name)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
