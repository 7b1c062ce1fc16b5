"""README.md and the other texts as HTML, for pages.py: a browser shows a .md file from the disk as plain text.

Links between the texts become links between the pages; all others lead to the same files as before.
"""

import os
import re
from html import unescape
from pathlib import Path

import markdown

from tools.highlight import HELPERS, ROOT

DOCS = ROOT / "docs"


def texts() -> dict[Path, str]:
    """All texts of the root and of docs/, and the names of their pages."""
    return {path: f"{path.stem.lower()}.html" for path in [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]}


def html_of(path: Path) -> str:
    """The text in HTML; links and pictures as a page in docs/ needs them."""
    text = re.sub(r"(?<!`)<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)  # not those in `code`
    html = markdown.markdown(text, extensions=["tables", "fenced_code", "sane_lists"])
    html = re.sub(r'(href|src)="([^"]+)"', lambda m: f'{m[1]}="{_target(unescape(m[2]), path)}"', html)
    html = re.sub("<pre>", '<pre tabindex="0">', html)  # what is too wide scrolls, by keyboard, too
    html = html.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")
    return _with_anchors(html)


def _target(link: str, path: Path) -> str:
    """A link of the text, as seen from docs/."""
    file, hash_sign, anchor = link.partition("#")
    if "://" in link or not file:
        return link
    linked = Path(os.path.normpath(path.parent / file))
    pages = texts() | {ROOT / helper: f"{Path(helper).stem}.html" for helper in HELPERS}
    return pages.get(linked, Path(os.path.relpath(linked, DOCS)).as_posix()) + hash_sign + anchor


def _with_anchors(html: str) -> str:
    """Each heading with its anchor, as GitHub makes them: lower case, no punctuation, -1 for the second of its name."""
    found: list[str] = []

    def heading(m: re.Match) -> str:
        name = re.sub(r"[^\w\- ]", "", unescape(re.sub(r"<[^>]*>", "", m[2])).lower()).replace(" ", "-")
        found.append(name)
        count = found.count(name) - 1
        return f'<h{m[1]} id="{name}{f"-{count}" if count else ""}">{m[2]}</h{m[1]}>'

    return re.sub(r"<h(\d)>(.*?)</h\1>", heading, html)
