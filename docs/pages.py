"""Writes the side-by-side pages: docs/index.html for all pairs of scripts, and one page for each helper file.

    python docs/build.py --pages           # only these pages, in about a second
    python docs/build.py                   # all that is generated

docs/template.html, pages.css and pages.js are written into each page, so that it needs no other file and no network.
index.html shows the pair FIRST as plain HTML.  The other pairs are data that pages.js turns into the same HTML:
`pair_html` here and `pairHTML` there must stay equal, and tests/test_pages.py compares what they make.

The notes that explain the changes are in docs/notes.toml.
"""

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from align import aligned, counts
from highlight import HELPERS, ROOT, Source, linked, source, wrapped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = ROOT / "docs"
MORE = {  # scripts that can be chosen, but are no step
    "min_DDP.py": "the smallest complete DDP program, on one screen",
    "cifar10_ddp.py": "a realistic training run: augmentation, a schedule, logs and checkpoints",
}
FIRST = ("mnist_single.py", "mnist_ddp.py")  # the diff that README.md shows


# --------------------------------------------------------------------------------------------------------------- notes


class Change(NamedTuple):
    line: int  # where it begins in the script after, from 1
    texts: list[str]  # the changed lines of both scripts
    notes: list[int]  # on this change: numbers in Tree.notes


class Pair(NamedTuple):
    parts: list  # as align.aligned says
    added: int  # lines
    removed: int
    changes: list[Change]


def _texts(before: Source, after: Source, parts: list) -> Iterator[tuple[int, list[str]]]:
    """(first line in the script after, the changed lines of both) for each change."""
    i = j = 0
    for part in parts:
        line, texts = j + 1, []
        for row in part if isinstance(part, list) else [int(part)]:
            if isinstance(row, int):
                i, j = i + row, j + row
                continue
            if row != "+":
                texts.append(before.lines[i])
                i += 1
            if row != "-":
                texts.append(after.lines[j])
                j += 1
        if isinstance(part, list):
            yield line, texts


class Tree:
    """The scripts, their parents, the notes."""

    def __init__(self, steps: Iterable) -> None:
        """`steps`: what docs/build.py has, with `script`, `parent`, `adds` and `buys`."""
        self.names = {Path(step.script).stem for step in steps}  # also of scripts that are not in this checkout
        self.steps = {step.script: step for step in steps if (ROOT / step.script).is_file()}
        self.paths = [*self.steps, *MORE]
        written = tomllib.loads((DOCS / "notes.toml").read_text(encoding="utf-8"))
        self.notes = [(step, note["line"], note["why"]) for step, notes in written.items() for note in notes]

    def pairs(self) -> list[tuple[str, str]]:
        """Those that the page offers, in the order in which one reads them."""
        return list(
            dict.fromkeys([FIRST, *((step.parent, step.script) for step in self.steps.values() if step.parent)])
        )

    def ancestors(self, path: str) -> list[str]:
        """The script itself, its parent, and so on."""
        step = self.steps.get(path)
        return [path, *self.ancestors(step.parent)] if step else []

    def pair(self, before: str, after: str) -> Pair:
        """Two scripts, aligned; each change has the notes of the steps that lead from one to the other."""
        parts = aligned(source(before).lines, source(after).lines)
        way = {Path(path).stem for path in set(self.ancestors(before)) ^ set(self.ancestors(after))}
        found = []
        for line, texts in _texts(source(before), source(after), parts):
            changed = "\n" + "\n".join(texts) + "\n"
            fits = [number for number, (step, part, _) in enumerate(self.notes) if step in way and part in changed]
            found.append(Change(line, texts, fits))
        return Pair(parts, *counts(parts), found)

    def problems(self) -> list[str]:
        """What is wrong with docs/notes.toml: a change without a note; a note that stands at no change, or at two."""
        found, used = [], Counter()
        for before, after in self.pairs():
            for change in self.pair(before, after).changes:
                if after in self.steps and self.steps[after].parent == before:
                    used.update(change.notes)
                if not change.notes:
                    place = f"{after}, line {change.line} (from {before})"
                    text = next((text for text in reversed(change.texts) if text), "").strip()
                    found.append(f"docs/notes.toml has no note on the change at {place}:  {text}")
        for number, (step, line, _) in enumerate(self.notes):
            if step not in self.names:
                found.append(f"docs/notes.toml: STEPS in docs/build.py has no {step}")
            elif step in {Path(path).stem for path in self.steps} and used[number] != 1:
                found.append(f"docs/notes.toml: a note on {step} stands at {used[number]} changes, not one:  {line}")
        return found

    def marked_up(self, text: str) -> str:
        """`code`, with links to the helpers; {mnist_ddp.py} is what was measured for it, from STEPS."""
        text = re.sub(r"\{(\w+\.py)\}", lambda m: self._measured(m[1]), text.strip())
        parts = re.split(r"`([^`]+)`", text)
        parts[1::2] = [f"<code>{linked(escape(part, quote=False), part, '')}</code>" for part in parts[1::2]]
        parts[::2] = [escape(part, quote=False) for part in parts[::2]]
        return "".join(parts)

    def why(self, note: int) -> str:
        return self.marked_up(self.notes[note][2])

    def _measured(self, script: str) -> str:
        found = [step.buys for step in self.steps.values() if Path(step.script).name == script]
        return found[0] if found else "not measured"

    def script(self, path: str) -> dict:
        """What the page says about a script."""
        adds, buys = MORE.get(path, ""), ""
        if path in self.steps:
            adds, buys = self.steps[path].adds, self.steps[path].buys
        definitions = [[d.first, d.name] for d in source(path).definitions if "." not in d.name]
        return {
            "path": path,
            "adds": self.marked_up(adds[:1].upper() + adds[1:]),
            "buys": self.marked_up(buys),
            "definitions": definitions,
        }


# ---------------------------------------------------------------------------------------------------------------- html


def _cell(tag: str, side: str, number: int, html: str, hidden: bool = False) -> str:
    indent = len(html) - len(html.lstrip(" "))
    if hidden:  # the left one of two equal lines: a screen reader reads the right one
        html = html.replace("<a ", '<a tabindex="-1" ')
    attributes = f' data-{side}="{number}" style="--i:{indent}"' + ' aria-hidden="true"' * hidden
    return f"<{tag}{attributes}>{html}\n</{tag}>"


class _Columns:
    """Makes rows, and counts the lines of both columns."""

    def __init__(self, left: Source, right: Source) -> None:
        self.left, self.right, self.i, self.j = left, right, 0, 0

    def _old(self, tag: str, marks: list, hidden: bool = False) -> str:
        self.i += 1
        html = wrapped(self.left.html[self.i - 1], marks, "<mark>", "</mark>")
        return _cell(tag, "l", self.i, html, hidden)

    def _new(self, tag: str, marks: list) -> str:
        self.j += 1
        return _cell(tag, "r", self.j, wrapped(self.right.html[self.j - 1], marks, "<mark>", "</mark>"))

    def row(self, row: Any) -> str:
        if isinstance(row, int):
            equal = [self._old("code", [], True) + self._new("code", []) for _ in range(row)]
            return "".join(f'<div class="row equal">{cells}</div>' for cells in equal)
        if row == "-":
            return f'<div class="row">{self._old("del", [])}<i></i></div>'
        if row == "+":
            return f'<div class="row"><i></i>{self._new("ins", [])}</div>'
        return f'<div class="row">{self._old("del", row[0])}{self._new("ins", row[1])}</div>'

    def fold(self, count: int) -> str:
        names = [d.name for d in self.right.definitions if self.j < d.first <= self.j + count and "." not in d.name]
        within = f": <code>{', '.join(names)}</code>" if names else ""
        return f"<details><summary>{count} equal lines{within}</summary>{self.row(count)}</details>"


def _head(side: str, script: Source) -> str:
    copy = f'<button class="needs-script" data-copy="{side}" aria-label="Copy {script.path}">copy</button>'
    data = "data:text/x-python;charset=utf-8," + quote(script.text, safe="!~*'()")
    load = f'<a download="{script.name}.py" href="{data}" aria-label="Download {script.path}">download</a>'
    return f'<div class="head"><strong>{script.path}</strong> {copy} {load}</div>'


def pair_html(tree: Tree, before: str, after: str) -> str:
    """Two scripts side by side: their headings, the rows, and the notes of each change."""
    pair, left, right = tree.pair(before, after), tree.script(before), tree.script(after)
    times = [f"{script['path']} {script['buys']}" for script in (left, right) if script["buys"]]
    times = f" Measured: {'; '.join(times)}." if times else ""
    adds = f"{right['adds']}. " if right["adds"] else ""
    html = f"<h2>{left['path']} → {right['path']}</h2>"
    html += f'<p class="about">{adds}<b>+{pair.added} −{pair.removed}</b> lines.{times}</p>'
    html += f'<div class="heads">{_head("l", source(before))}{_head("r", source(after))}</div>'
    columns, number = _Columns(source(before), source(after)), 0
    html += '<div class="between">'
    for part in pair.parts:
        if isinstance(part, int):
            html += columns.row(part)
        elif isinstance(part, str):
            html += columns.fold(int(part))
        else:
            why = "".join(f"<p>{tree.why(note)}</p>" for note in pair.changes[number].notes)
            number += 1
            title = f'<h3 id="change{number}">Change {number} of {len(pair.changes)}</h3>'
            note = f'<div class="note" role="group" tabindex="-1" aria-labelledby="change{number}">{title}{why}</div>'
            rows = "".join(columns.row(row) for row in part)
            html += f'</div>{note}<div class="change">{rows}</div><div class="between">'
    return html + "</div>"


def _helper_html(script: Source) -> tuple[str, str]:
    """(contents, source) of a helper file; each top-level definition is a section with its name as anchor."""
    contents, starts, ends, inner = [], {}, set(), {}
    for d in script.definitions:
        css = ' class="inner"' if "." in d.name else ""
        contents.append(f'<li{css}><a href="#{d.name}">{d.name.rpartition(".")[2]}</a></li>')
        if "." in d.name:
            inner[d.first] = d.name
        else:
            starts[d.first] = d.name
            ends.add(d.last)
    html = ""
    for number, line in enumerate(script.html, 1):
        html += f'<div class="definition" tabindex="-1" id="{starts[number]}">' if number in starts else ""
        html += f'<a class="anchor" id="{inner[number]}"></a>' if number in inner else ""
        html += _cell("code", "r", number, line)
        html += "</div>" if number in ends else ""
    return "".join(contents), f'{_head("r", script)}<div class="listing">{html}</div>'


# --------------------------------------------------------------------------------------------------------------- pages


def _filled(template: str, **parts: str) -> str:
    """A template of this folder, with what stands in double braces filled in."""
    text = (DOCS / template).read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], text)


def _page(name: str, title: str, body: str, data: str = "") -> str:
    css, js = _filled("pages.css"), _filled("pages.js")
    return _filled("template.html", title=title, css=css, js=js, links=_links(name), body=body, data=data)


def _links(here: str) -> str:
    """To the other pages."""
    pages = [("index.html", "side by side"), *((f"{Path(helper).stem}.html", helper) for helper in HELPERS)]
    current = ' aria-current="page"'
    return "".join(f'<li><a href="{page}"{current * (page == here)}>{text}</a></li>' for page, text in pages)


def _data(tree: Tree) -> str:
    """For pages.js: each different line once, the scripts as numbers of lines, the alignment of any two scripts."""
    table: dict[str, int] = {}
    scripts, pairs = {}, {}
    for path in tree.paths:
        lines = [table.setdefault(line, len(table)) for line in source(path).html]
        scripts[source(path).name] = tree.script(path) | {"lines": lines}
    for before, after in itertools.combinations(tree.paths, 2):
        pair = tree.pair(before, after)
        values = {"parts": pair.parts, "added": pair.added, "removed": pair.removed}
        pairs[_key(before, after)] = values | {"notes": [change.notes for change in pair.changes]}
    whys = [tree.why(number) for number in range(len(tree.notes))]
    data = {"first": _key(*FIRST), "lines": list(table), "scripts": scripts, "pairs": pairs, "whys": whys}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("</", "<\\/").replace("<!--", "\\u003c!--")


def _key(before: str, after: str) -> str:
    return f"{Path(before).stem}..{Path(after).stem}"


def _index(tree: Tree) -> str:
    chips = ""
    for key in (_key(*pair) for pair in tree.pairs()):
        chips += f'<li><a href="#{key}">{key.replace("mnist_", "").replace("..", " → ")}</a></li>'
    options = "".join(f'<option value="{Path(path).stem}">{path}</option>' for path in tree.paths)
    body = _filled("template_index.html", chips=chips, options=options, pair=pair_html(tree, *FIRST))
    title = "Side by side: distributed training, one idea per diff"
    return _page("index.html", title, body, _data(tree))


def generated(steps: Iterable) -> dict[Path, str]:
    """All pages: file and text."""
    pages = {DOCS / "index.html": _index(Tree(steps))}
    for helper in HELPERS:
        script = source(helper)
        contents, listing = _helper_html(script)
        body = f'<div class="helper"><nav aria-label="Contents"><h2>Contents</h2><ol>{contents}</ol></nav>'
        body += f'<main id="code" tabindex="-1"><h1>{helper}</h1>{listing}</main></div>'
        page = f"{script.name}.html"
        pages[DOCS / page] = _page(page, f"{helper}: ddp-by-diff", body)
    return pages


def report_problems(steps: Iterable) -> int:
    """Prints what is wrong with docs/notes.toml; 1 if there is something, else 0: the exit code."""
    problems = Tree(steps).problems()
    print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr)
    return int(bool(problems))
