"""Predict what lines print, run them, then break them.  python -m demos.predict set_epoch

Read the lines, answer the question, and see whether they do so in two processes.  Three to begin with: set_epoch,
padding and collective.  Without a terminal give both answers as lines:

printf '3\\n1\\n' | python -m demos.predict set_epoch
"""

import argparse
import ast
import functools
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from demos import mistakes
from demos.mistakes import MISTAKES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mistakes.md"
Done = subprocess.CompletedProcess


def number(pattern: str) -> Callable[[Done], float]:
    """The first number in what was printed that the pattern finds."""
    return lambda done: float(re.search(pattern, done.stdout)[1])


def number_of_lists(done: Done) -> int:
    return len(set(re.findall(r"\[.*\]", done.stdout)))


def length_of_list(done: Done) -> int:
    return len(ast.literal_eval(re.search(r"\[.*\]", done.stdout)[0]))


YES_OR_NO = "(yes or no)"
ENDS = (
    f"A collective waits for 3 s. Do these lines end without an error? {YES_OR_NO}",
    lambda done: done.returncode == 0,
)
ACCURACY = "Which accuracy is printed, in percent?", number(r"([\d.]+)%")
QUESTIONS = {  # what is asked, and what the answer is after the run
    "no_ddp": (f"Are the ranks' weights equal at the end? {YES_OR_NO}", lambda done: ": 0.00" in done.stdout),
    "no_sampler": ("A global batch has 20 images. How many different ones?", number(r"(\d+) of them")),
    "set_epoch": ("How many different orders do the three epochs have?", number_of_lists),
    "every_rank": ("How many lines are printed?", lambda done: done.stdout.count("epoch 1")),
    "collective": ENDS,
    "padding": ACCURACY,
    "mean_of_means": ACCURACY,
    "batch_size": ("How many steps are there?", number(r"(\d+) steps")),
    "unused": ENDS,
    "early_stop": ENDS,
    "iterable": ("Two ranks with two workers each read the stream. How many numbers do they read?", length_of_list),
    "rank_0_works": ENDS,
    "clip": ("How long is the step, rounded to 0 or 1?", number(r"length ([\d.]+)")),
    "dropout_seed": ("How many different masks are there?", number(r"(\d+) different")),
}


def given(function: Callable) -> str:
    """The lines outside of the function that give its names their values, such as `numbers = list(range(6))`."""
    source = inspect.getsource(mistakes)
    lines = [
        ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and node.targets[0].id in function.__code__.co_names
    ]
    return "".join(f"{line}\n" for line in [*lines, ""]) if lines else ""


def reason(name: str) -> str:
    """The heading and the first paragraph of the mistake's part of the page."""
    before = PAGE.read_text(encoding="utf-8").partition(f" {name} -->")[0]
    heading, _, text = before.rpartition("\n## ")[2].partition("\n\n")
    paragraph = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text.partition("\n\n")[0])  # without the links' targets
    return f"Why (docs/mistakes.md, {heading}):\n{textwrap.fill(paragraph, 100)}"


def ask(question: str) -> float | bool:
    """The reader's answer, when it is one; EOFError if there is none."""
    read, example = (yes_or_no, "yes or no") if YES_OR_NO in question else (a_number, "a number, such as 2")
    while True:
        text = input(f"{question} ")
        if not sys.stdin.isatty():  # a terminal has shown it already
            print(text)
        answer = read(text)
        if answer is not None:
            return answer
        print(f"{text!r} is no answer: type {example}")


def yes_or_no(text: str) -> bool | None:
    return {"yes": True, "y": True, "no": False, "n": False}.get(text.strip().lower())


def a_number(text: str) -> float | None:
    try:
        return float(text.strip(" %"))
    except ValueError:
        return None


def in_words(answer: float | bool) -> str:
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    return f"{answer:g}"


def run(name: str, way: str) -> Done:
    """The program as the page runs it; of what it prints, without the line that says that the processes have met."""
    environment = os.environ | {"DIST_TIMEOUT": "3"}  # as on the page
    command = [sys.executable, "-m", "demos.mistakes", name, way]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    # Not the whole line: two ranks that print at the same time may share it.
    done.stdout = done.stdout.replace("distributed: 2 processes, gloo, cpu", "", 1).lstrip("\n")
    return done


def predict(name: str, way: str, title: str) -> None:
    """Show the lines, ask, run them, and compare."""
    function = MISTAKES[name][way == "right"]
    shown = function.args[0] if isinstance(function, functools.partial) else function
    lines = inspect.getsource(shown).partition("\n")[2]
    lines = re.sub("  # .*", "", lines)  # the comments tell too much
    print(f"{title}\n\n{given(shown)}{lines}")
    question, answer_of = QUESTIONS[name]
    answer = ask(question)
    done = run(name, way)
    right = answer_of(done)
    errors = re.sub(r"Traceback .*?\n(?=\w+Error)", "", done.stderr, flags=re.DOTALL)
    print(f"\nTwo processes print:\n\n{done.stdout}{errors}")
    is_right = abs(answer - right) < 0.5  # 83 is right for 83.3
    print("Right.\n" if is_right else f"Wrong: the answer is {in_words(right)}, not {in_words(answer)}.\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=MISTAKES)
    name = parser.parse_args().name
    try:
        predict(name, "right", "1. These lines are right.")
        predict(name, "wrong", "2. Now they are broken: compare them with those above.")
    except EOFError:
        print()
        how = f"printf 'ANSWER\\nANSWER\\n' | python -m demos.predict {name}"
        parser.error(f"an answer is missing: answer in a terminal, or type  {how}")
    print(reason(name))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
