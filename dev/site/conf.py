"""The website: Sphinx, with MyST and Furo, makes it from the Markdown pages and the source files as they are.

    pip install -r dev/site/requirements.txt
    sphinx-build -W --keep-going -d .doctrees -c dev/site . site     # then open site/index.html in a browser

The order of the pages is that of docs/README.md.  A source file is a page, too, so that a link to it shows it in
colour.  docs/**/*.html are pages that need no other file: they stay as they are, apart from their links.
"""

import html
import json
import os
import re
import shutil
from pathlib import Path

from docutils import nodes
from myst_parser.sphinx_ import Parser as Markdown
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = os.environ.get("GITHUB_REPOSITORY", "OWNER/REPOSITORY")  # a workflow of GitHub sets it
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "sh", ".cpp": "cpp"}
ON_GITHUB = re.compile("<!--github-->.*?<!--/github-->", re.DOTALL)  # what is true there only
ON_SITE = re.compile("<!--site (.*?)-->", re.DOTALL)  # and here only
SECTION = re.compile(r'<section id="(.+?)">\s*<h2>(.+?)</h2>\s*(?:<p>(.+?)</p>)?')  # of a page that is HTML already
EVERYDAY = {"combine", "dispatch", "step"}  # mostly not the terms of the glossary that they are, too

project = html_title = "ddp-by-diff"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "README"
source_suffix = {".md": "markdown", ".ipynb": "notebook", ".html": "html", **dict.fromkeys(LANGUAGES, "source")}
include_patterns = ["*.py", "*.md", "mnist_notebook.ipynb", "docs/**", "variants/**", "exercises/**", "demos/**"]
include_patterns += ["ddp_by_diff/**", "dev/networks.py", "tests/simulated_gpus/**"]
exclude_patterns = ["ddp_by_diff/**/*.html", "exercises/checks"]  # templates, and what judges a solution
smartquotes = False  # of -- and ... it would make other characters
myst_heading_anchors = 6  # as GitHub names them
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True  # of a session: what one types, not what is printed
html_theme = "furo"
templates_path = ["."]
html_static_path = ["site.css", "search.js"]
html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = html_show_copyright = html_use_index = False
pygments_style, pygments_dark_style = "default", "github-dark"
if "GITHUB_REPOSITORY" in os.environ:
    html_theme_options = {"source_repository": f"https://github.com/{REPOSITORY}/", "source_branch": "main"}


# ------------------------------------------------------------------------------------------ files that aren't Markdown


class Notebook(Markdown):
    """The cells, and what they have printed."""

    supported = ("notebook",)

    def parse(self, text: str, document: nodes.document) -> None:
        parts = []
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
            for output in cell.get("outputs", []):
                printed = "".join(output.get("text") or output["data"]["text/plain"])
                parts.append(f"```text\n{printed}\n```")
        super().parse("\n\n".join(parts), document)


class Source(Markdown):
    supported = ("source",)

    def parse(self, text: str, document: nodes.document) -> None:
        path = Path(document["source"]).relative_to(ROOT)
        head = f"---\nnosearch: true\nhide-toc: true\n---\n# `{path}`\n\n"  # a search leads to the pages about it
        super().parse(f"{head}~~~~~~{LANGUAGES[path.suffix]}\n{text}\n~~~~~~\n", document)


class Html(Markdown):
    """Its title, for the contents; write_html puts the page itself in this one's place."""

    supported = ("html",)

    def parse(self, text: str, document: nodes.document) -> None:
        super().parse("# " + re.search("<title>(.*?)</title>", text)[1], document)
        env = document.settings.env
        slugs = env.metadata[env.docname]["myst_slugs"]  # a link may lead to each id of the page
        slugs |= {name: (1, name, "") for name in re.findall(r' id="(.+?)"', text)}


# ---------------------------------------------------------------------------------------------------------------- links


class Links(SphinxTransform):
    """What isn't a page (a folder, LICENSE) is shown by GitHub; a picture's folder is its class in site.css."""

    default_priority = 400

    def apply(self) -> None:
        for node in self.document.findall(nodes.image):
            node["classes"].append(Path(node["uri"]).parent.name)
        for kind in (download_reference, pending_xref):
            for node in list(self.document.findall(kind)):
                place = (ROOT / self.env.docname).parent / node["reftarget"]
                if kind is download_reference or place.is_dir():
                    path = os.path.normpath(place.relative_to(ROOT))
                    address = f"https://github.com/{REPOSITORY}/tree/main/{path}"
                    node.replace_self(nodes.reference("", "", *node.children, refuri=address))


def glossary() -> dict[str, tuple[str, str]]:
    """{term: (anchor, definition)} of the list at the top of docs/glossary.md."""
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    definitions = {}
    for heading, definition in re.findall(r"^### (.+)\n\n(.+)", text, re.MULTILINE):
        plain = re.sub(r"\[(.+?)\]\(.+?\)|[*`]", r"\1", definition)
        definitions[nodes.make_id(heading)] = plain
    terms = {}
    for entry, slug in re.findall(r"\[([^]]+)\]\(#([^)]+)\)", text):
        anchor = nodes.make_id(slug)
        for term in entry.split(", "):
            terms[term] = (anchor, definitions[anchor])
            if term[1:].islower():  # "rank" is the same word, "zero" is not ZeRO
                terms[term.lower()] = terms[term]
    return {term: entry for term, entry in terms.items() if term.lower() not in EVERYDAY}


class Terms(SphinxTransform):
    """The first use of each term on a page leads to the glossary, unless a link of the page does already."""

    default_priority = 401
    untouched = (nodes.reference, pending_xref, nodes.title, nodes.literal, nodes.literal_block, nodes.comment)

    def apply(self) -> None:
        page = self.env.docname
        if page == "docs/glossary" or "nosearch" in self.env.metadata[page]:
            return
        terms = glossary()
        longest_first = sorted(terms, key=len, reverse=True)
        pattern = re.compile(rf"(?<![\w/.-])({'|'.join(map(re.escape, longest_first))})(?:e?s)?(?![\w-])")
        address = os.path.relpath("docs/glossary.html", Path(page).parent)
        linked = set()
        for node in list(self.document.findall()):
            if isinstance(node, pending_xref) and node["reftarget"] == "docs/glossary" and node["reftargetid"]:
                linked.add(nodes.make_id(node["reftargetid"]))
            elif isinstance(node, nodes.Text) and not self.is_inside(node, self.untouched):
                text = node.astext()
                parts, end = [], 0
                for word in pattern.finditer(text):
                    anchor, definition = terms[word[1]]
                    if anchor not in linked:
                        linked.add(anchor)
                        link = nodes.reference("", word[0], refuri=f"{address}#{anchor}", reftitle=definition)
                        link["classes"].append("term")
                        parts += [nodes.Text(text[end : word.start()]), link]
                        end = word.end()
                if parts:
                    node.parent.replace(node, [*parts, nodes.Text(text[end:])])

    @staticmethod
    def is_inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
        while node and not isinstance(node, kinds):
            node = node.parent
        return node is not None


# ------------------------------------------------------------------------------------------------ contents and search


def contents() -> str:
    """The tables of docs/README.md as toctrees, so that the order of the pages is theirs.

    A page of docs/**/*.html that is in no table follows, with its folder's name as caption.
    """
    trees = [("", ["Start <self>", "Contents <docs/README>"])]
    named = set()
    for part in (ROOT / "docs/README.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        entries = []
        for name, target in re.findall(r"^\| \[(.+?)\]\((.+?)\)", part, re.MULTILINE):
            page = os.path.splitext(os.path.normpath(f"docs/{target}"))[0]
            named.add(page)
            entries.append(f"{name} <{page}>")
        trees.append((part.split("\n")[0], entries))
    others: dict[str, list[str]] = {}
    for file in sorted(ROOT.glob("docs/**/*.html")):
        page = file.relative_to(ROOT).with_suffix("").as_posix()
        if page not in named:
            others.setdefault(file.parent.name.capitalize(), []).append(page)
    parts = []
    for caption, entries in [*trees, *others.items()]:
        head = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else [])]
        parts += [*head, *entries, "```", ""]
    return "\n\n" + "\n".join(parts)


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """A page without what is true on GitHub only; the front page gets the contents."""
    app.env.metadata[docname]["orphan"] = True  # a source file needs no place in the contents
    text = ON_SITE.sub(r"\1", ON_GITHUB.sub("", source[0]))
    source[0] = text.replace("OWNER/REPOSITORY", REPOSITORY)
    if docname == root_doc:
        source[0] += contents()


def sections(env: BuildEnvironment) -> list[list[str]]:
    """[page, its title, anchor, heading, text] of each section of the pages in the contents: what search.js searches.

    The text is without the sections below it.
    """
    found = []
    for page in sorted({root_doc}.union(*env.toctree_includes.values())):
        title = env.titles[page].astext()
        for section in env.get_doctree(page).findall(nodes.section):
            parts = [part.astext() for part in section[1:] if not isinstance(part, nodes.section)]
            text = re.sub("<!--.*?-->", "", "\n".join(parts))
            found.append([page, title, section["ids"][0], section[0].astext(), text])
        file = Path(env.doc2path(page))
        if file.suffix == ".html":
            for anchor, *parts in SECTION.findall(file.read_text(encoding="utf-8")):
                found.append([page, title, anchor, *(html.unescape(re.sub("<.*?>", "", part)) for part in parts)])
    return found


def write_html(app: Sphinx, error: Exception | None) -> None:
    if not error:
        pages = re.compile(rf'(href="[^":#]+)(?:{"|".join(map(re.escape, source_suffix))})\b')
        for page in ROOT.glob("docs/**/*.html"):
            text = ON_GITHUB.sub("", page.read_text(encoding="utf-8"))
            place = app.outdir / page.relative_to(ROOT)
            place.write_text(pages.sub(r"\1.html", text), encoding="utf-8")
        shutil.copytree(ROOT / "docs/timelines", app.outdir / "docs/timelines", dirs_exist_ok=True)  # of side_by_side
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")
        (app.outdir / "sections.js").write_text(f"const sections = {json.dumps(sections(app.env))};\n")


def setup(app: Sphinx) -> None:
    for parser in (Notebook, Source, Html):
        app.add_source_parser(parser)
    app.add_transform(Links)
    app.add_transform(Terms)
    app.connect("source-read", read)
    app.connect("build-finished", write_html)
