"""Writes the side-by-side pages: docs/index.html for all pairs of scripts.

docs/steps.html has the pairs of parent and child, one below the other: to print, and to read without JavaScript.

    python -m tools.build --pages           # only these pages, in about a second
    python -m tools.build                   # all that is generated

tools/template.html, pages.css and pages.js are written into each page, so that it needs no other file and no network.
index.html shows the pair FIRST; the other pairs wait in <template> elements.  A line stands in many pairs, so their
rows hold only its number in one list of all lines (and headings, and notes), and pages.js copies it from there.
With N scripts there are N * (N - 1) / 2 pairs, of 3 KB each.

The notes that explain the changes are in tools/notes.toml.
"""

import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from tools.align import Row, aligned, counts
from tools.highlight import HELPERS, MODULES, ROOT, Source, linked, source, wrapped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS, TOOLS = ROOT / "docs", ROOT / "tools"


class Script(NamedTuple):
    script: str
    parent: str  # "": it has none
    adds: str


MORE = [  # scripts that can be chosen, but are no step of the course
    Script("min_DDP.py", "", "the smallest complete DDP program, on one screen"),
    Script("cifar10_ddp.py", "", "a realistic training run: augmentation, a schedule, logs and checkpoints"),
]
FIRST = ("mnist_single.py", "mnist_ddp.py")  # the diff that README.md shows


# --------------------------------------------------------------------------------------------------------------- notes


@functools.cache
def pair_of(before: str, after: str) -> list[list[Row]]:
    return aligned(source(before).lines, source(after).lines)


def changes(parts: list[list[Row]]) -> list[list[Row]]:
    return [part for part in parts if part[0].kind == "changed"]


def changed_lines(change: list[Row], before: str, after: str) -> list[str]:
    """Of both scripts."""
    lines = []
    for row in change:
        if row.kind == "changed":
            lines += (
                source(before).lines[row.old.start : row.old.stop] + source(after).lines[row.new.start : row.new.stop]
            )
    return lines


class Tree:
    """The scripts, their parents, the notes."""

    def __init__(self, steps: Iterable) -> None:
        """`steps`: what tools/build.py has, with `script`, `parent` and `adds`."""
        self.steps = {step.script: step for step in [*steps, *MORE]}
        self.paths = list(self.steps)
        written = tomllib.loads((TOOLS / "notes.toml").read_text(encoding="utf-8"))
        self.notes = [(step, note["line"], note["why"]) for step, notes in written.items() for note in notes]

    def pairs(self) -> list[tuple[str, str]]:
        """Those that the page offers, in the order in which one reads them."""
        steps = [(step.parent, step.script) for step in self.steps.values() if step.parent]
        return list(dict.fromkeys([FIRST, *steps]))

    def ancestors(self, path: str) -> list[str]:
        """The script itself, its parent, and so on."""
        step = self.steps.get(path)
        return [path, *self.ancestors(step.parent)] if step else []

    def notes_on(self, change: list[Row], before: str, after: str) -> list[int]:
        """Those of the steps that lead from one script to the other, as numbers in self.notes."""
        way = self.ancestors(after)
        steps = {Path(path).stem for path in way[: way.index(before)]} if before in way else set()
        text = "\n" + "\n".join(changed_lines(change, before, after)) + "\n"
        return [number for number, (step, line, _) in enumerate(self.notes) if step in steps and line in text]

    def problems(self) -> list[str]:
        """What is wrong with tools/notes.toml: a change without a note; a note that stands at no change, or at two."""
        found, used = [], Counter()
        for before, after in self.pairs():
            for change in changes(pair_of(before, after)):
                notes = self.notes_on(change, before, after)
                if after in self.steps and self.steps[after].parent == before:
                    used.update(notes)
                if not notes:
                    place = f"{after}, line {change[0].new.start + 1} (from {before})"
                    text = "\n".join(changed_lines(change, before, after)).rstrip().rpartition("\n")[2].strip()
                    found.append(f"tools/notes.toml has no note on the change at {place}:  {text}")
        names = {Path(path).stem for path in self.steps}
        for number, (step, line, _) in enumerate(self.notes):
            if step not in names:
                found.append(f"tools/notes.toml: STEPS in tools/build.py has no {step}")
            elif used[number] != 1:
                found.append(f"tools/notes.toml: a note on {step} stands at {used[number]} changes, not one:  {line}")
        return found

    def marked_up(self, text: str) -> str:
        """`code`, with links to the helpers."""
        parts = re.split(r"`([^`]+)`", text.strip())
        parts[1::2] = [f"<code>{linked(escape(part, quote=False), part, MODULES)}</code>" for part in parts[1::2]]
        parts[::2] = [escape(part, quote=False) for part in parts[::2]]
        return "".join(parts)

    def about(self, before: str, after: str) -> str:
        """What the second script adds."""
        adds = self.steps[after].adds
        return self.marked_up(f"{adds[:1].upper()}{adds[1:]}.")


# ---------------------------------------------------------------------------------------------------------------- html


def in_full(pieces: Iterable[str], first: int = 1) -> str:
    """The pieces themselves; lines of code with their numbers, which begin with `first`."""
    return "".join(piece.replace("<code style", f'<code data-n="{n}" style') for n, piece in enumerate(pieces, first))


def _line(html: str, marks: Sequence[Sequence[int]] = ()) -> str:
    """Its indent is an element of its own: a narrow page must not break the line between the indent and a long word."""
    indent = len(html) - len(html.lstrip(" "))
    spaces = wrapped(html[:indent], marks, "<mark>", "</mark>")
    code = wrapped(html[indent:], [(start - indent, end - indent) for start, end in marks], "<mark>", "</mark>")
    return f'<code style="--i:{indent}">{f"<i>{spaces}</i>" if indent else ""}{code}\n</code>'


def _cell(script: Source, lines: range, marks: Sequence, place: Callable[..., str]) -> str:
    return f"<div>{place([_line(script.html[line], marks) for line in lines], lines.start + 1)}</div>"


def _row(row: Row, old: Source, new: Source, place: Callable[..., str]) -> str:
    css = "row" if row.kind == "changed" else "row equal"
    cells = _cell(old, row.old, row.marks[0], place) + _cell(new, row.new, row.marks[1], place)
    html = f'<div class="{css}">{cells}</div>'
    if row.kind != "folded":
        return html
    names = [name for name, line in new.definitions.items() if line in row.new]
    within = f": <code>{', '.join(names)}</code>" if names else ""
    return f"<details><summary>{len(row.new)} equal lines{within}</summary>{html}</details>"


def _head(script: Source) -> str:
    copy = f'<button class="needs-script" data-copy aria-label="Copy {script.path}">copy</button>'
    load = f'<a download="{script.name}.py" href="../{script.path}" aria-label="Download {script.path}">download</a>'
    return f'<div class="head"><strong>{script.path}</strong> {copy} {load}</div>'


def pair_html(tree: Tree, before: str, after: str, place: Callable[..., str], anchors: bool = False) -> str:
    """Two scripts side by side.  `place` puts pieces of HTML (one element each) into the page."""
    old, new, parts = source(before), source(after), pair_of(before, after)
    added, removed = counts(parts)
    about = place([f"<span>{tree.about(before, after)}</span>"])
    html = f"<h2>{before} → {after}</h2>"
    html += f'<p class="about"><b>+{added} −{removed}</b> lines. <span class="why">{about}</span></p>'
    heads = f"<div>{place([_head(old)])}</div><div>{place([_head(new)])}</div>"
    html += f'<div class="sides"><div class="heads"><div>{heads}</div></div>'
    number = 0
    for part in parts:
        rows = "".join(_row(row, old, new, place) for row in part)
        if part[0].kind != "changed":
            html += f'<div class="between">{rows}</div>'
            continue
        number += 1
        place_here = f"{_key(before, after)}:change{number}"
        title = f"Change {number} of {len(changes(parts))}"
        title = f'<a href="#{place_here}">{title}</a>' if anchors else f"<a>{title}</a>"  # pages.js has the others
        why = place([f"<p>{tree.marked_up(tree.notes[note][2])}</p>" for note in tree.notes_on(part, before, after)])
        anchor = f' id="{place_here}"' if anchors else ""
        html += f'<div class="note"{anchor}><h3>{title}</h3><div class="why">{why}</div></div>'
        html += f'<div class="change">{rows}</div>'
    return f"{html}</div>"


# --------------------------------------------------------------------------------------------------------------- pages


def _filled(template: str, **parts: str) -> str:
    """A template of this folder, with what stands in double braces filled in."""
    text = (TOOLS / template).read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], text)


def _page(name: str, title: str, body: str) -> str:
    css, js = _filled("pages.css"), _filled("pages.js")
    return _filled("template.html", title=title, css=css, js=js, links=_links(name), body=body)


def _links(here: str) -> str:
    """To the other page, README.md and the helpers."""
    pages = [("../README.md", "README"), ("index.html", "side by side"), ("steps.html", "all steps")]
    pages += [(f"../{helper}", helper) for helper in HELPERS]
    current = ' aria-current="page"'
    return "".join(f'<li><a href="{page}"{current * (page == here)}>{text}</a></li>' for page, text in pages)


def _key(before: str, after: str) -> str:
    return f"{Path(before).stem}..{Path(after).stem}"


def _runs(numbers: Iterable[int]) -> str:
    """7 8 9 12 as "7-9 12"."""
    groups = itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    runs = [[number for _, number in group] for _, group in groups]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _templates(tree: Tree) -> str:
    """All pairs, in one direction (pages.js turns them round), and their pieces."""
    numbers: dict[tuple[str, str], int] = {}

    def place(pieces: Sequence[str], first: int = 1) -> str:
        """A piece has a number for each piece that stands before it: most cells are then one run of numbers."""
        return _runs([numbers.setdefault(pair, len(numbers)) for pair in itertools.pairwise(["", *pieces])])

    html = ""
    for pair in itertools.combinations(tree.paths, 2):
        html += f'<template id="{_key(*pair)}">{pair_html(tree, *pair, place)}</template>\n'
    return html + f'<template id="pieces">{"".join(piece for _, piece in numbers)}</template>'


def _chips(tree: Tree) -> str:
    """Links to the pairs of parent and child, which stand in steps.html; in index.html pages.js shows them there."""
    chips = ""
    for key in (_key(*pair) for pair in tree.pairs()):
        chips += f'<li><a href="steps.html#{key}">{key.replace("mnist_", "").replace("..", " → ")}</a></li>'
    return chips


def _index(tree: Tree) -> str:
    options = "".join(f'<option value="{Path(path).stem}">{path}</option>' for path in tree.paths)
    pair = pair_html(tree, *FIRST, in_full, anchors=True)
    parts = {"first": _key(*FIRST), "pair": pair, "templates": _templates(tree), "chips": _chips(tree)}
    body = _filled("template_index.html", options=options, **parts)
    return _page("index.html", "Side by side: distributed training, one idea per diff", body)


def _steps(tree: Tree) -> str:
    pairs = ""
    for pair in tree.pairs():
        html = pair_html(tree, *pair, in_full, anchors=True)
        pairs += f'<section class="pair" id="{_key(*pair)}">{html}</section>\n'
    body = _filled("template_steps.html", chips=_chips(tree), pairs=pairs)
    return _page("steps.html", "All steps: distributed training, one idea per diff", body)


def generated(steps: Iterable) -> dict[Path, str]:
    """All pages: file and text."""
    tree = Tree(steps)
    return {DOCS / "index.html": _index(tree), DOCS / "steps.html": _steps(tree)}


def report_problems(steps: Iterable) -> int:
    """Prints what is wrong with tools/notes.toml; 1 if there is something, else 0: the exit code."""
    problems = Tree(steps).problems()
    print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr)
    return int(bool(problems))
