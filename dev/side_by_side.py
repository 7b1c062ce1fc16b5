"""Writes docs/side_by_side.html: each script beside its parents, line by line, with a note at each change.

Changed lines face each other, their changed words are marked, and long equal stretches are folded.  All pairs stand in
the page; page.css shows one of them, so that it can be read without JavaScript.  page.html, page.css and page.js are
written into it: it needs no other file and no network.  The notes are in notes.toml.
"""

import ast
import difflib
import functools
import itertools
import keyword
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from dev.programs import ROOT
from dev.steps import GROUPS, STEPS, diff_lines, recorded_from

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = ROOT / "docs/side_by_side.html"
DEV = ROOT / "dev"
FIRST = ("mnist_single.py", "mnist_ddp.py")  # what the page shows at first, and README.md
PAIRS = list(dict.fromkeys([FIRST, *((parent, step.script) for step in STEPS for parent in step.parents)]))
CONTEXT = 3  # equal lines that stay open on each side of a change
FOLD = 4  # fewer equal lines than this are not folded
JOIN = 2  # at most so many equal lines within one change
SIMILAR = 0.4  # lines with a smaller similarity don't face each other
NEAR = 6  # a note on a line further down than the first one's is shown above that line
LONG = 40  # a line with more characters may be wrapped, on a phone


# ---------------------------------------------------------------------------------------------- aligning two scripts


def _words(line: str) -> list[str]:
    return re.findall(r"\w+|\s+|.", line)


def similarity(before: str, after: str) -> float:
    """The share of characters, from 0 to 1, in words of both lines; 0.2 more if both begin with the same name."""
    code = (line.partition("  # ")[0] for line in (before, after))
    old, new = (Counter(word for word in _words(line) if not word.isspace()) for line in code)
    shared, total = (sum(len(word) * count for word, count in words.items()) for words in (old & new, old + new))
    first, other = (next(filter(str.isidentifier, _words(line)), "") for line in (before, after))
    same_name = first and first == other and not keyword.iskeyword(first)
    return (2 * shared / total if total else 0) + (0.2 if same_name else 0)


def changed_words(before: str, after: str) -> tuple[set[int], set[int]]:
    """The positions of each line's characters that the other line lacks; a shared one between two of them counts."""
    a, b = _words(before), _words(after)
    marks: tuple[set[int], set[int]] = (set(), set())
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            marks[0].update(range(len("".join(a[:i])), len("".join(a[:i_end]))))
            marks[1].update(range(len("".join(b[:j])), len("".join(b[:j_end]))))
    for side in marks:
        side |= {position + 1 for position in side if position + 2 in side}
    return marks


def faced(before: Sequence[str], after: Sequence[str]) -> list[tuple[int | None, int | None]]:
    """The rows of one change: a line of each script, or of one only.

    Both sides keep their order.  Of all such arrangements this is the one with the greatest sum of similarities.
    """

    @functools.cache
    def best(i: int, j: int) -> tuple[float, tuple]:
        """The best rows for the lines from i and from j on, after the sum of their similarities."""
        if i == len(before):
            return 0, tuple((None, k) for k in range(j, len(after)))
        if j == len(after):
            return 0, tuple((k, None) for k in range(i, len(before)))
        gone, come, score = best(i + 1, j), best(i, j + 1), similarity(before[i], after[j])
        ways = [(gone[0], ((i, None), *gone[1])), (come[0], ((None, j), *come[1]))]
        if score >= SIMILAR:
            rest = best(i + 1, j + 1)
            ways.insert(0, (score + rest[0], ((i, j), *rest[1])))
        return max(ways, key=lambda way: way[0])

    return list(best(0, 0)[1])


class Part(NamedTuple):
    """Rows of a page, from top to bottom; a row is a line number of each script, from 0, or None."""

    rows: list[tuple[int | None, int | None]]
    is_change: bool = False
    is_folded: bool = False


def aligned(before: Sequence[str], after: Sequence[str]) -> list[Part]:
    """The parts of two scripts.  A change may hold a few equal lines, but begins and ends with changed lines."""
    parts: list[Part] = []
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            parts.append(Part(list(zip(range(i, i_end), range(j, j_end), strict=True))))
            continue
        rows = faced(before[i:i_end], after[j:j_end])
        rows = [(None if a is None else a + i, None if b is None else b + j) for a, b in rows]
        if len(parts) > 1 and len(parts[-1].rows) <= JOIN:
            between = parts.pop()
            parts[-1].rows.extend(between.rows + rows)
        else:
            parts.append(Part(rows, is_change=True))
    return [piece for place, part in enumerate(parts) for piece in folded(part, place > 0, place < len(parts) - 1)]


def folded(part: Part, follows: bool, leads: bool) -> list[Part]:
    """Equal lines in up to three parts: the middle is folded, lines next to a change are not."""
    head = CONTEXT if follows else 0
    tail = len(part.rows) - (CONTEXT if leads else 0)
    if part.is_change or tail - head < FOLD:
        return [part]
    pieces = [Part(part.rows[:head]), Part(part.rows[head:tail], is_folded=True), Part(part.rows[tail:])]
    return [piece for piece in pieces if piece.rows]


@functools.cache
def compared(before: str, after: str) -> list[Part]:
    return aligned(source(before).lines, source(after).lines)


# ------------------------------------------------------------------------------------------------------------- sources

TOKEN = re.compile(
    r'(?P<s>[frb]*(?:"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'))|(?P<c>#[^\n]*)'
    rf"|(?P<f>(?<=def )\w+|(?<=class )\w+)|(?P<k>\b(?:{'|'.join(keyword.kwlist)})\b)"
    r"|(?P<name>(?<![\w.])\w+\.\w+)"
)


class Source:
    """A file of the repository."""

    def __init__(self, path: str) -> None:
        self.text = (ROOT / path).read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)
        nodes = [node for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        self.definitions = {node.name: node for node in nodes}

    @functools.cached_property
    def modules(self) -> dict[str, str]:
        """Files of this repository, by the names under which this one imports them."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                folder = f"{node.module.replace('.', '/')}/" if isinstance(node, ast.ImportFrom) else ""
                files = {alias.asname or alias.name: f"{folder}{alias.name}.py" for alias in node.names}
                found |= {name: file for name, file in files.items() if (ROOT / file).is_file()}
        return found

    @functools.cached_property
    def html(self) -> list[list[tuple[str, str]]]:
        """The characters of each line, each with its tag: a colour, a link, or none."""
        tags = [""] * len(self.text)
        for token in TOKEN.finditer(self.text):
            tag = link(token[0], self.modules) if token.lastgroup == "name" else f"<i class={token.lastgroup}>"
            tags[token.start() : token.end()] = [tag] * len(token[0])
        lines, start = [], 0
        for line in self.lines:
            lines.append(list(zip(line, tags[start : start + len(line)], strict=True)))
            start += len(line) + 1
        return lines


source = functools.cache(Source)


def link(name: str, modules: dict[str, str]) -> str:
    """The tag that leads from `dist.reduce` to its file, and shows its docstring's first sentence; or ""."""
    module, _, function = name.partition(".")
    node = source(modules[module]).definitions.get(function) if module in modules else None
    if node is None:
        return ""
    return f'<a href="../{modules[module]}" title="{escape(first_sentence(node))}">'


def first_sentence(node: ast.AST) -> str:
    return re.split(r"(?<=[.?])\s", " ".join((ast.get_docstring(node) or "").split()))[0]


# --------------------------------------------------------------------------------------------------------------- notes


@functools.cache
def all_notes() -> dict[str, dict[str, str]]:
    """{script: {a changed line of it, or a part of one: the note}}."""
    return tomllib.loads((DEV / "notes.toml").read_text(encoding="utf-8"))


def notes_on(part: Part, before: str, after: str) -> dict[str, int]:
    """The child script's notes on this change: {line: the row above which the note is shown; 0, the change's head}."""
    old, new, notes, rows = source(before).lines, source(after).lines, all_notes().get(Path(after).stem, {}), {}
    for number, (i, j) in enumerate(part.rows):
        lines = [*([] if i is None else [old[i]]), *([] if j is None else [new[j]])]
        if len(set(lines)) == len(lines):  # not an equal line
            text = "\n" + "\n".join(lines) + "\n"
            rows |= {line: number for line in notes if line in text and line not in rows}
    first = min(rows.values(), default=0)
    return {line: number if number > first + NEAR else 0 for line, number in rows.items()}


def problems() -> list[str]:
    """What is wrong with notes.toml: a change without a note, a note at no change or at two, or a long one."""
    found = []
    for step in STEPS:
        used: Counter = Counter()
        for parent in step.parents:
            changes = [part for part in compared(parent, step.script) if part.is_change]
            for part in changes:
                notes = notes_on(part, parent, step.script)
                used.update(list(notes) if parent == step.parents[0] else [])
                if not notes:
                    line = next((j for _, j in part.rows if j is not None), 0)
                    found.append(f"no note on {step.script}, line {line + 1} (compared with {parent})")
        for line, note in all_notes().get(Path(step.script).stem, {}).items():
            if used[line] != 1:
                found.append(f"a note on {step.script} stands at {used[line]} changes, not one: {line!r}")
            if len(note.splitlines()) > 2:
                found.append(f"a note on {step.script} has more than two sentences: {line!r}")
    unknown = set(all_notes()) - {Path(step.script).stem for step in STEPS}
    return [f"dev/notes.toml: {problem}" for problem in [*found, *(f"no step {name}" for name in sorted(unknown))]]


# ---------------------------------------------------------------------------------------------------------------- html


@functools.cache
def glossary() -> dict[str, str]:
    """{word: anchor} of the headings of docs/glossary.md; "Fork and spawn" is two words."""
    headings = re.findall(r"^### (.+)$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {heading: re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    found = {}
    for heading, anchor in anchors.items():
        for word in re.split(", | and ", heading):
            found[word] = anchor
            if word[1:].islower():  # "rank" is the same word, "zero" is not ZeRO
                found[word.lower()] = anchor
    return found


class Prose:
    """Notes as HTML.  A word of the glossary is a link where it comes first in a pair."""

    def __init__(self, modules: dict[str, str]) -> None:
        self.modules = modules
        self.linked: set[str] = set()
        words = sorted(glossary(), key=len, reverse=True)
        self.words = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, words))})s?(?![\w-])")

    def html(self, text: str) -> str:
        parts = re.split(r"`([^`]+)`", " ".join(text.split()))
        parts[::2] = [self.words.sub(self._to_glossary, escape(part, quote=False)) for part in parts[::2]]
        for number in range(1, len(parts), 2):
            tag = link(parts[number], self.modules)
            parts[number] = f"<code>{tag}{escape(parts[number], quote=False)}{'</a>' if tag else ''}</code>"
        return "".join(parts)

    def _to_glossary(self, word: re.Match) -> str:
        anchor = glossary()[word[1]]
        if anchor in self.linked:
            return word[0]
        self.linked.add(anchor)
        return f'<a href="glossary.md#{anchor}">{word[0]}</a>'


def line_html(line: Sequence[tuple[str, str]], marked: set[int]) -> str:
    html = ""
    numbered = enumerate(line)
    for (is_marked, tag), group in itertools.groupby(numbered, key=lambda item: (item[0] in marked, item[1][1])):
        text = escape("".join(character for _, (character, _) in group), quote=False)
        text = f"{tag}{text}</{tag[1]}>" if tag else text
        html += f"<mark>{text}</mark>" if is_marked else text
    return html


def cell(lines: list[list[tuple[str, str]]], number: int | None, marked: set[int]) -> str:
    """A line and its number as HTML.  The indent of a long line is an element, so a line is not broken after it."""
    if number is None:
        return "<td class=none>"
    line = lines[number]
    if len(line) <= LONG:
        return f"<td data-n={number + 1}>{line_html(line, marked)}"
    indent = next(place for place, (character, _) in enumerate(line) if character != " ")
    code = line_html(line[indent:], {place - indent for place in marked})
    return f"<td data-n={number + 1} style=--i:{indent}><s>{line_html(line[:indent], marked)}</s>{code}"


def rows_html(part: Part, before: str, after: str, above: Mapping[int, str]) -> str:
    old, new = source(before), source(after)
    html = ""
    for number, (i, j) in enumerate(part.rows):
        html += f"<tr class=aside><td colspan=2>{above[number]}\n" if number in above else ""
        is_equal = None not in (i, j) and old.lines[i] == new.lines[j]
        marks = changed_words(old.lines[i], new.lines[j]) if None not in (i, j) else (set(), set())
        # An equal line is written once; page.js copies it to the left.
        left = f"<td data-n={i + 1}>" if is_equal else cell(old.html, i, marks[0])
        html += f"<tr{' class=equal' if is_equal else ''}>{left}{cell(new.html, j, marks[1])}\n"
    return html


def folded_html(part: Part, after: str) -> str:
    """Folded equal lines as HTML, written once: a click opens them."""
    first, last = part.rows[0][1], part.rows[-1][1]
    definitions = source(after).definitions.items()
    names = [name for name, node in definitions if first <= node.lineno - 1 <= last]
    within = f": <code>{', '.join(names)}</code>" if names else ""
    text = "\n".join(line_html(source(after).html[j], set()) for _, j in part.rows)
    summary = f"<summary>{len(part.rows)} equal lines{within}</summary>"
    return f"<tr><td colspan=2><details>{summary}<pre>{text}</pre></details>\n"


def key(before: str, after: str) -> str:
    return f"{Path(before).stem}..{Path(after).stem}"


def picture_html(before: str, after: str) -> str:
    """The picture of dev/timelines.py in a fold, or "" if there is none."""
    file = next(step.picture for step in STEPS if step.script == after)
    if after not in recorded_from(file) or before == "mnist_dataparallel.py":  # without GPUs it is as mnist_single.py
        return ""
    svg = ElementTree.parse(file).getroot()
    title = svg.findtext("{http://www.w3.org/2000/svg}title")
    size = f"width={svg.get('width')} height={svg.get('height')}"
    image = f'<img src="{file.relative_to(PAGE.parent)}" {size} loading=lazy alt="{escape(title)}">'
    return f"<details class=picture><summary>Recorded steps</summary><div>{image}</div></details>\n"


def replay_html(script: str) -> str:
    """A link to the page of dev/replays.py, or "" if there is none."""
    page = next(step.replay for step in STEPS if step.script == script)
    if not page.exists():
        return ""
    return f' <a href="{page.relative_to(PAGE.parent)}">Step through it</a>.'


def pair_html(before: str, after: str) -> str:
    prose = Prose(source(after).modules | source(before).modules)  # `dist` is the helper, also beside plain torch
    added, removed = diff_lines(before, after)
    adds = next(step.adds for step in STEPS if step.script == after)
    heads = "".join(f'<th scope=col><a href="../{path}">{path}</a>' for path in (before, after))
    html = f'<section id="{key(before, after)}">\n<h2>{before} → {after}</h2>\n'
    html += f"<p><b>+{added} −{removed}</b> lines. {prose.html(adds[:1].upper() + adds[1:])}.{replay_html(after)}</p>\n"
    html += picture_html(before, after)
    html += f"<table>\n<thead><tr>{heads}</thead>\n"
    parts, number = compared(before, after), 0
    for part in parts:
        if part.is_folded:
            html += f"<tbody>{folded_html(part, after)}</tbody>\n"
        elif not part.is_change:
            html += f"<tbody>{rows_html(part, before, after, {})}</tbody>\n"
        else:
            number += 1
            anchor = f"{key(before, after)}:change{number}"
            title = f"Change {number} of {sum(part.is_change for part in parts)}"
            above: dict[int, str] = {}
            for line, row in sorted(notes_on(part, before, after).items(), key=lambda note: note[1]):
                above[row] = f"{above.get(row, '')}<p>{prose.html(all_notes()[Path(after).stem][line])}"
            html += f'<tbody class=note id="{anchor}"><tr><td colspan=2><h3><a href="#{anchor}">{title}</a></h3>'
            html += f"{above.pop(0, '')}</tbody>\n<tbody class=change>{rows_html(part, before, after, above)}</tbody>\n"
    return f"{html}</table>\n</section>\n"


def chips_html() -> str:
    """A button for each pair: those of the course, and in a fold those of the other groups."""
    groups = []
    for group, steps in GROUPS.items():
        scripts = [step.script for step in steps]
        html = f"<h2>{group}</h2>\n<ul>\n"
        for before, after in (pair for pair in PAIRS if pair[1] in scripts):
            label = key(before, after).replace("mnist_", "").replace("..", " → ")
            html += f'<li><a href="#{key(before, after)}">{label}</a>\n'
        groups.append(f"{html}</ul>\n")
    count = sum(html.count("<li>") for html in groups[1:])
    more = f"<details><summary>{count} variants</summary>\n<div class=pairs>\n{''.join(groups[1:])}</div></details>\n"
    return f"<div class=pairs>\n{groups[0]}</div>\n{more}"


def pages_html() -> str:
    """Links to the front page, to the contents, and to this page's neighbours in the tables of docs/README.md."""
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = re.findall(r"^\| \[(.+?)\]\((.+?)\)", text, re.MULTILINE)
    here = [target for _, target in pages].index(PAGE.name)
    links = [("ddp-by-diff", "../README.md"), ("Contents", "README.md")]
    links += [(f"← {pages[here - 1][0]}", pages[here - 1][1]), (f"{pages[here + 1][0]} →", pages[here + 1][1])]
    return "".join(f'<a href="{target}">{name}</a>\n' for name, target in links)


def page() -> str:
    """The text of docs/side_by_side.html."""
    html = (DEV / "page.html").read_text(encoding="utf-8")
    parts = {"pages": pages_html(), "chips": chips_html(), "pairs": "".join(pair_html(*pair) for pair in PAIRS)}
    parts |= {name: (DEV / f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    return re.sub(r"\{\{(\w+)\}\}\n?", lambda found: parts[found[1]], html)
