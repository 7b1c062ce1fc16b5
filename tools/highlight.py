"""The files of this repository as lines of HTML: in colours, with links to the helpers.  For pages.py."""

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

ROOT = Path(__file__).resolve().parent.parent
HELPERS = ["distributed.py", "launcher.py", "data.py", "checkpoint.py"]
COLOURS = [(Comment, "c"), (Keyword, "k"), (Operator.Word, "k"), (String, "s"), (Number, "m")]
COLOURS += [(Name.Function, "f"), (Name.Class, "f")]
MODULES = {"dist": "distributed.py"} | {Path(helper).stem: helper for helper in HELPERS}  # as the notes call them


class Source:
    """A file of the repository."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = Path(path).stem
        self.text = (ROOT / path).read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        tree = ast.parse(self.text)
        self.definitions = dict(_definitions(tree))  # name: its first line, from 0
        self.modules = _imported_helpers(tree)

    @functools.cached_property
    def html(self) -> list[str]:
        """Each line in colours, with links to the helpers."""
        coloured = zip(_coloured(self.text), self.lines, strict=True)
        return [linked(html, line, self.modules) for html, line in coloured]


@functools.cache
def source(path: str) -> Source:
    return Source(path)


def _definitions(tree: ast.Module) -> Iterable[tuple[str, int]]:
    """Functions, classes and variables at the top level."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            name = getattr(node.targets[0] if isinstance(node, ast.Assign) else node.target, "id", None)
        else:
            name = getattr(node, "name", None)
        if name:
            yield name, node.lineno - 1


def _imported_helpers(tree: ast.Module) -> dict[str, str]:
    """The names that mean a helper in this file: in a script of plain torch `dist` is torch.distributed."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = [node for node in imports if getattr(node, "module", None) is None]  # import x, from . import x
    names = {alias.asname or alias.name: f"{alias.name}.py" for node in imports for alias in node.names}
    return {name: file for name, file in names.items() if file in HELPERS}


def _coloured(text: str) -> list[str]:
    lines, parts = [], []
    for kind, token in PythonLexer(stripnl=False).get_tokens(text):
        css = next((css for group, css in COLOURS if kind in group), "")
        for part in re.findall(r"(?m)\n|^ +|[^\n]+", token):  # leading spaces stand outside of the colour
            if part == "\n":
                lines.append(_joined(parts))
                parts = []
            else:
                parts.append(("" if part.isspace() else css, part))
    return lines


def _joined(parts: list[tuple[str, str]]) -> str:
    html = ""
    for css, group in itertools.groupby(parts, key=lambda part: part[0]):
        text = escape("".join(part for _, part in group), quote=False)
        html += f'<span class="{css}">{text}</span>' if css else text
    return html


def wrapped(html: str, ranges: Sequence[Sequence[int]], opening: str, closing: str) -> str:
    """A line with tags around these ranges of its characters."""
    if not ranges:
        return html
    out, position, inside = "", 0, False
    for piece in re.findall(r"<[^>]*>|&\w+;|.", html):
        wanted = piece[0] != "<" and any(start <= position < end for start, end in ranges)
        if wanted != inside:
            out += opening if wanted else closing
        out, inside, position = out + piece, wanted, position + (piece[0] != "<")
    return out + closing * inside


def linked(html: str, line: str, modules: dict[str, str]) -> str:
    """Links `dist.reduce` to the helper's file."""
    for m in re.finditer(r"(?<![\w.])(\w+)\.(\w+)", line):
        helper = modules.get(m[1], "")
        if helper and m[2] in source(helper).definitions:
            html = wrapped(html, [m.span()], f'<a href="../{helper}">', "</a>")
    return html
