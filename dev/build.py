"""Writes docs/side_by_side.html, and on the Markdown pages everything between two markers.

    python -m dev.build            # rewrites what is out of date
    python -m dev.build --quick    # without the programs, which take minutes: diffs, tables, sources, side_by_side.html
    python -m dev.build --check    # only says what is out of date; exit code 1 if anything but a picture is

A block stands between <!-- kind: what --> and <!-- end -->:

    kind        what                      what is written
    steps                                 the table of the steps in the root
    lines       PARENT FILE               +added -removed, as git counts them
    diff        PARENT FILE [N]           the diff, with N (1) lines of context; PARENT FILE 0 | grep WORD: a part
    output      [VARIABLE=VALUE] ARGS     what `python ARGS` prints, with the end of its error; ARGS | grep WORD: a part
    why         NAME                      the line `why` of the recording in docs/timelines/NAME.svg
    medians     NAME                      how long a step of each recording in docs/timelines/NAME.svg takes
    mistake     [VARIABLE=VALUE] NAME     a mistake of demos/mistakes.py, wrong and right: its lines, their output
    collective  NAME                      one of demos/collectives.py: its picture, its lines, its output
    result      NAME                      dev/results/NAME.md

An output stays as it is while only figures have changed that depend on the machine (`same_output`); to get new ones,
delete the text between its markers.
"""

import argparse
import ast
import math
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dev import programs, side_by_side
from dev.programs import ROOT, SHELL, Result
from dev.steps import GROUPS, code_digest, diff_lines, git_diff, recorded_from

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / folder / "README.md" for folder in ("exercises", "variants", "ddp_by_diff")]


# ----------------------------------------------------------------------------------------------------- from the sources


def steps() -> str:
    """The table of the steps in the root, with their numbers, from their docstrings."""
    rows = ["| script | what it adds | diff lines |", "|---|---|---|"]
    for step in GROUPS["The course"]:
        changed = ", ".join(_as_link(parent, step.script) for parent in step.parents)
        number = re.search(r"step (\d) of", (ROOT / step.script).read_text(encoding="utf-8").split("\n")[0])
        adds = f"{number[1]}. {step.adds}" if number else step.adds
        rows.append(f"| [{step.script}]({step.script}) | {adds} | {changed} |")
    return "\n" + "\n".join(rows) + "\n"


def _as_link(parent: str, script: str) -> str:
    """The size of a diff; on the site it is a link, but GitHub would show the source of that page."""
    page = f"docs/side_by_side.html#{side_by_side.key(parent, script)}"
    return f"{lines(parent, script)} from `{parent}`<!--site  ([diff]({page}))-->"


def lines(before: str, after: str) -> str:
    return "+{} -{}".format(*diff_lines(before, after))


def diff(before: str, after: str, context: str = "1", *pipe: str) -> str:
    """The diff, without the four lines that name the files, and without line numbers.

    pipe: `| grep WORD`, for the changed lines with this word only.
    """
    hunks = git_diff(f"-U{context}", before, after).split("\n@@ ")[1:]
    hunks = ["@@" + hunk.split("@@", 1)[1].rstrip("\n").removesuffix("\n ") for hunk in hunks]  # no empty last line
    if pipe:
        changed = [line for hunk in hunks for line in hunk.splitlines() if not line.startswith("@@")]
        hunks = [line for line in changed if re.search(pipe[-1], line)]
    return block("diff", "\n".join(hunks))


def block(language: str, text: str) -> str:
    return f"\n```{language}\n{text.rstrip()}\n```\n"


def definition(file: str, name: str) -> list[str]:
    """The lines of a function or class."""
    text = (ROOT / file).read_text(encoding="utf-8")
    node = next(node for node in ast.parse(text).body if getattr(node, "name", None) == name)
    return text.splitlines()[node.lineno - 1 : node.end_lineno]


def why(name: str) -> str:
    """The line `why` that timeline printed when dev/timelines.py recorded the picture."""
    picture = (ROOT / f"docs/timelines/{name}.svg").read_text(encoding="utf-8")
    sentence = re.search(r"<!-- why: (.*?) -->", picture)[1]
    return block("text", f"why       {sentence}") if sentence else "\n`timeline` prints no `why` line for this step.\n"


def medians(name: str) -> str:
    """The duration of a step of each recording in the picture, as `timeline` printed it."""
    picture = (ROOT / f"docs/timelines/{name}.svg").read_text(encoding="utf-8")
    titles = re.search(r"<title.*?>.*?: (.*?)</title>", picture)[1].split("; ")
    found = re.findall(r"step: median ([\d.]+ ms).*?\(([\d.]+ ms) of \d+ without profiling\)", picture)
    rows = ["| recording | median duration of a step | with profiling |", "|---|---|---|"]
    rows += [f"| {title} | {bare} | {profiled} |" for title, (profiled, bare) in zip(titles, found, strict=True)]
    return "\n" + "\n".join(rows) + "\n"


def result(name: str) -> str:
    return "\n" + (ROOT / f"dev/results/{name}.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------- what programs print


run_program = programs.shell  # the tests put a faster one in its place, with the same arguments


def run(command: str) -> Result:
    """Run `[VARIABLE=VALUE ...] python ARGUMENTS` in an empty folder: two processes, any GPUs hidden."""
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    script, *args = words[len(variables) :]
    with tempfile.TemporaryDirectory() as folder:
        for name in args:
            if (ROOT / name).is_file():  # a program that an instrument looks at
                Path(folder, name).symlink_to(ROOT / name)
        script = script if script == "-m" else ROOT / script
        return run_program(script, *args, cwd=Path(folder), path=[ROOT], timeout=280, **(SHELL | variables))


def session(command: str, printed: str) -> str:
    variables, arguments = re.match(r"((?:[A-Z_]+=\S* )*)(.*)", command).groups()
    return block("console", f"$ {variables}python {arguments}\n{printed}")


def output(command: str) -> str:
    program, _, word = command.partition(" | grep ")
    done = run(program)
    printed = done.out + (told(done.err) if done.code else "")
    return session(command, "".join(line for line in printed.splitlines(keepends=True) if re.search(word, line)))


def mistake(what: str) -> str:
    """The wrong and the right lines of a mistake, each with its output but for the first line (`distributed: ...`).

    What the wrong lines print is folded, so that a reader can predict it.
    """
    shown = ""
    variables, _, name = what.rpartition(" ")
    for way in "wrong", "right":
        command = f"{variables} -m demos.mistakes {name} {way}".lstrip()
        done = run(command)
        if done.code and way == "right":
            raise RuntimeError(done.err)
        printed = re.sub(r"^distributed: .*\n", "", done.out) + told(done.err)
        body = textwrap.dedent("\n".join(definition("demos/mistakes.py", f"{name}_{way}")[1:]))
        shown += f"\n{way.capitalize()}:\n{block('python', body)}"
        shown += folded(session(command, printed)) if way == "wrong" else session(command, printed)
    return shown


def folded(text: str) -> str:
    return f"\n<details>\n<summary>What does it print?</summary>\n{text}\n</details>\n"


def collective(name: str) -> str:
    command = f"-m demos.collectives {name}"
    picture = f"![{name}: three ranks, before and after](collectives/{name}.svg)"
    lines = block("python", "\n".join(definition("demos/collectives.py", name)))
    printed = re.sub(r"^distributed: .*\n", "", run(command).out)
    return f"\n{picture}\n{lines}{session(command, printed)}"


def told(stderr: str) -> str:
    """The warnings in stderr; then the error's table of the ranks or, if there is none, its last message.

    The message's lines are cut: torch writes whole paragraphs.
    """
    text = stderr.replace(f"{ROOT}/", "")
    text = re.sub(r"\bfor rank \d", "for rank 0", text)  # either of two ranks with the same error may be the first
    if found := re.search(r"^where each rank is:.*", text, re.DOTALL | re.MULTILINE):
        error = found[0]
    else:
        found = re.search(r"^\w+Error: (?!.*^\w+Error: ).*", text, re.DOTALL | re.MULTILINE)
        error = re.sub(r"^(.{100}\S*) .*", r"\1 …", found[0], flags=re.MULTILINE) if found else ""
    warned = dict.fromkeys(re.findall(r"^\S+:\d+: (\w+Warning: .*\n)", text, re.MULTILINE))  # each once, not per rank
    return "".join(warned) + error


def masked(text: str) -> str:
    """The text without what depends on the machine: folders, speeds, times, sizes, counts of right answers."""
    text = re.sub(r"/tmp/\w+", "#", text)
    return re.sub(r"[\d.]+(?= (?:images/s|s|MiB)\b)|(?<=\()\d+(?=/\d+\))|(?<=right )\d+|\de-\d\d", "#", text)


def same_output(shown: str, now: str) -> bool:
    """Whether two outputs differ only in the masked figures, and in losses and accuracies only by rounding.

    CPUs round differently, and training makes the differences larger.  Another order of the examples changes more.
    """
    number = r"\d+\.\d+"
    before, after = masked(shown), masked(now)
    if re.sub(number, "#", before) != re.sub(number, "#", after):
        return False
    pairs = zip(re.findall(number, before), re.findall(number, after), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.05, abs_tol=0.01) for a, b in pairs)


# ---------------------------------------------------------------------------------------------------------- the pages

PROGRAMS: dict[str, Callable[..., str]] = {"output": output, "mistake": mistake, "collective": collective}
KINDS = {kind.__name__: kind for kind in (steps, lines, diff, why, medians, result)} | PROGRAMS
BLOCK = re.compile(rf"<!-- ({'|'.join(KINDS)})(?:: (.+?))? -->(.*?)<!-- end -->", re.DOTALL)


class Block(NamedTuple):
    page: Path
    kind: str
    what: str
    shown: str

    def now(self) -> str:
        """The text that the block should show; an output that is still true stays as it is."""
        new = PROGRAMS[self.kind](self.what) if self.kind in PROGRAMS else KINDS[self.kind](*self.what.split())
        return self.shown if self.kind in PROGRAMS and same_output(self.shown, new) else new

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}, {self.kind}: {self.what}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, found[1], found[2] or "", found[3]) for found in BLOCK.finditer(text)]


def rewrite(page: Path, check: bool, quick: bool) -> list[str]:
    """Bring a page's blocks up to date (check: nothing is written); returns what is wrong with it, line by line."""
    text = page.read_text(encoding="utf-8")
    markers = re.findall(r"^<!-- (\w+).*? -->", text, re.MULTILINE)
    unknown = {*markers} - {*KINDS, "end", "command"}  # README.md's commands are for .ci/run
    wrong = [f"{page.relative_to(ROOT)}: no kind of block is called {kind}" for kind in sorted(unknown)]
    for found, one in zip(list(BLOCK.finditer(text)), blocks(page), strict=True):
        if quick and one.kind in PROGRAMS:
            continue
        try:
            new = one.now()
        except (OSError, StopIteration, RuntimeError) as error:
            wrong.append(f"{one}: can't be made: {error!r}")
            continue
        if new != one.shown and check:
            wrong.append(f"{one} is out of date")
        whole = found[0].removesuffix(f"{one.shown}<!-- end -->")
        text = text.replace(found[0], f"{whole}{new}<!-- end -->")
    if not check:
        page.write_text(text, encoding="utf-8")
    return wrong


def old_pictures() -> list[str]:
    """A line for each picture of docs/timelines/ that is older than its scripts; recording new ones needs root."""
    found = []
    for picture in sorted((ROOT / "docs/timelines").glob("*.svg")):
        for script, digest in recorded_from(picture).items():
            if not (ROOT / script).exists() or code_digest(script) != digest:
                command = f"sudo .venv/bin/python -m dev.timelines --save {picture.stem}"
                found.append(f"{picture.relative_to(ROOT)} is older than {script}: {command}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if anything is out of date")
    parser.add_argument("--quick", action="store_true", help="run no programs")
    args = parser.parse_args()
    wrong = side_by_side.problems()
    for page in PAGES:
        wrong += rewrite(page, args.check, args.quick)
    html = side_by_side.page()
    if not args.check:
        side_by_side.PAGE.write_text(html, encoding="utf-8")
    elif html != side_by_side.PAGE.read_text(encoding="utf-8"):
        wrong.append("docs/side_by_side.html is out of date")
    for line in [*wrong, *old_pictures()]:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
