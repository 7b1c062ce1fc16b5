"""Predict what lines print, run them, then break them.  python -m exercises.predict set_epoch

Type what you expect, then Return, and the lines run in two processes.  Three to begin with: set_epoch, padding and
collective.  The others, and why each is so, are on the page docs/mistakes.md: read it afterwards.
"""

import argparse
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Callable

import distributed as dist
from exercises.mistakes import MISTAKES, worker


def predict(title: str, function: Callable) -> None:
    """Show the function's lines, ask, and run them."""
    lines = inspect.getsource(function).partition("\n")[2]
    lines = re.sub("  # .*", "", lines)  # the comments tell too much
    print(f"{title}\n\n{lines}")
    try:
        expected = input("What do two processes print? ")
        if not sys.stdin.isatty():  # a terminal has shown it already
            print(expected)
    except EOFError:  # no input: only show
        print()
    print("\nThey print:\n", flush=True)
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
    print(f"Why: docs/mistakes.md, {name}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
