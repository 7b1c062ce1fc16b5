"""Writes the project as a site: its Markdown, its scripts and docs/side_by_side.html as pages of HTML.

    pip install markdown-it-py mdit-py-plugins pygments
    python -m dev.site             # then open site/index.html in a browser
    python -m dev.site FOLDER      # another folder

The front page is README.md. Each file that a page links to becomes a page, too, and the links
lead to these pages.
"""

import argparse
import html
import json
import os
import re
import sys
from pathlib import Path

try:
    from markdown_it import MarkdownIt
    from mdit_py_plugins.anchors import anchors_plugin
    from pygments import formatters, highlight, lexers, util
except ImportError:
    sys.exit("dev.site: type  pip install markdown-it-py mdit-py-plugins pygments")

ROOT = Path(__file__).resolve().parent.parent
COPIED = (".css", ".html", ".svg")  # everything else becomes a page
LINK = re.compile(r'\b(href|src)="([^"#:]+)(#[^"]*)?"')  # neither https://... nor #...
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")  # owner/name, in a workflow of GitHub
STYLES = {"light": "default", "dark": "github-dark"}  # of pygments


def coloured(code: str, language: str, _attributes: str = "") -> str:
    try:
        lexer = lexers.get_lexer_by_name(language)
    except util.ClassNotFound:
        lexer = lexers.TextLexer()
    return highlight(code, lexer, formatters.HtmlFormatter(nowrap=True))


MARKDOWN = MarkdownIt("commonmark", {"highlight": coloured}).enable("table")
MARKDOWN.use(anchors_plugin, max_level=6)  # as GitHub names them


def notebook(text: str) -> str:
    """The cells of a notebook, and what they have printed, as Markdown."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            printed = "".join(output.get("text") or output["data"]["text/plain"])
            parts.append(f"```\n{printed}\n```")
    return "\n\n".join(parts)


def markdown(path: Path) -> str:
    """A file or folder as Markdown, with a title."""
    title = f"# `{path.relative_to(ROOT)}`\n\n"
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.is_file())
        return title + "\n".join(f"- [`{name}`]({name})" for name in names)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return notebook(text)
    return f"{title}~~~~~~{path.suffix[1:]}\n{text}\n~~~~~~\n"


def contents(path: Path) -> str:
    """The page of a file or folder, as HTML.  Its links still lead to files."""
    if path.suffix not in COPIED:
        text = markdown(path)
        code = f'<a href="https://github.com/{REPOSITORY}">repository</a>' if REPOSITORY else ""
        page = (ROOT / "dev/site.html").read_text(encoding="utf-8").replace("{{repository}}", code)
        page = page.replace("{{title}}", html.escape(text.split("\n")[0].strip("# `")))
        return page.replace("{{body}}", MARKDOWN.render(text))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".css":
        for scheme, style in STYLES.items():
            colours = formatters.HtmlFormatter(style=style).get_style_defs("pre")
            text += f"@media (prefers-color-scheme: {scheme}) {{\n{colours}\n}}\n"
    return text


def address(path: Path) -> Path:
    """The path of a file's or folder's page in the site."""
    place = path.relative_to(ROOT)
    if path.is_dir():
        return place / "index.html"
    if place.name == "README.md":
        return place.with_name("index.html")
    if place.suffix == ".md":
        return place.with_suffix(".html")
    return place if place.suffix in COPIED else Path(f"{place}.html")


def linked(target: str, path: Path) -> Path:
    """The file or folder to which a link of `path` leads; / in front is the root."""
    folder = path if path.is_dir() else path.parent
    file = ROOT / target[1:] if target.startswith("/") else (folder / target).resolve()
    if not file.exists():
        sys.exit(f"dev.site: {path.relative_to(ROOT)} links to {target}, which doesn't exist")
    readme = file / "README.md"
    return readme if readme.exists() else file


def write(path: Path, site: Path) -> list[Path]:
    """Write the page of a file or folder; returns the files and folders to which it links."""
    found = []

    def to_page(link: re.Match) -> str:
        attribute, target, anchor = link.groups(default="")
        file = linked(target, path)
        found.append(file)
        return f'{attribute}="{os.path.relpath(address(file), address(path).parent)}{anchor}"'

    place = site / address(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(LINK.sub(to_page, contents(path)), encoding="utf-8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site", help="default: site")
    site = parser.parse_args().folder
    waiting = [ROOT / "README.md"]
    written = set()
    while waiting:
        path = waiting.pop()
        if path not in written:
            written.add(path)
            waiting += write(path, site)
    print(f"{len(written)} files; open {site / 'index.html'}")


if __name__ == "__main__":
    main()
