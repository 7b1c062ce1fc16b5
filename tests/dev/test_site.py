"""The site of dev/site, as its reader meets it: links, order, search, terms, phone, theme; and a build that fails."""

import functools
import io
import os
import re
import shutil
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from PIL import Image
from world import ROOT, chromium, shell, wait_for

from dev import build, steps

pytestmark = pytest.mark.slow
CONTENTS = ["docs/README.md"]  # the front page aside, in the order of the tables
for target in re.findall(r"^\| \[.+?\]\((.+?)\)", (ROOT / "docs/README.md").read_text(encoding="utf-8"), re.MULTILINE):
    CONTENTS.append(os.path.normpath(f"docs/{target}"))
MESSAGES = {  # as torch and Python print them, with other numbers than the page's: the section that explains each
    "[rank0]:[E1128 20:03:11.123 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600005 milliseconds "
    "before timing out.": "Watchdog caught collective operation timeout",
    "train.py: error: unrecognized arguments: --local-rank=3": "unrecognized arguments: --local-rank",
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.": "DataLoader worker is killed by signal",
    "[rank1]: RuntimeError: CUDA error: invalid device ordinal": "Invalid device ordinal, under srun --gpus-per-task",
    "init_process_group: rank 3 did not join within 600 s": "It hangs at the start",
    "[rank0]: RuntimeError: [/__w/pytorch/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:47764. "
    "This is typically caused by a remote worker crashing.": "Connection closed by peer",
}


def page_of(name):
    return f"{os.path.splitext(name)[0]}.html"


def sphinx(root, folder):
    pytest.importorskip("furo", reason="pip install -r dev/site/requirements.txt")
    args = ["-q", "-W", "--keep-going", "-d", folder / ".doctrees", "-c", "dev/site", ".", folder]
    return shell("-m", "sphinx", *args, cwd=root, GITHUB_REPOSITORY="owner/name", timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = sphinx(ROOT, folder)
    assert done.code == 0, done.err
    return folder


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what a browser loads with it."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.targets, self.loaded = [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors.append(values.get("id"))
        self.targets += [values[name] for name in ("href", "src") if name in values]
        self.loaded += [values[name] for name in ("href", "src") if name in values and tag != "a"]


def test_each_link_leads_somewhere(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    names = [page.relative_to(ROOT).as_posix() for page in build.PAGES] + [step.script for step in steps.STEPS]
    assert {site / page_of(name) for name in [*names, *CONTENTS]} <= set(pages)
    checked = 0
    for path, page in pages.items():
        assert not [target for target in page.loaded if target.startswith("http")], path  # nothing from elsewhere
        for target in page.targets:
            link = urlsplit(target)
            if link.scheme in ("https", "data"):
                continue
            leads_to = (path.parent / link.path).resolve() if link.path else path
            assert leads_to.is_file(), (path, target)
            assert not link.fragment or link.fragment in pages[leads_to].anchors, (path, target)
            checked += 1
    assert checked > 5000


def test_a_sentence_is_true_on_the_site(site):
    """What is true on GitHub only is left out, and the repository has its name."""
    text = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.html"))
    text = re.sub("<span.*?>|</span>", "", text)  # of coloured words
    assert "OWNER/REPOSITORY" not in text and "from your clone" not in text
    assert "git clone https://github.com/owner/name" in text
    assert "https://colab.research.google.com/github/owner/name/blob/main/mnist_notebook.ipynb" in text


def test_previous_and_next_have_the_order_of_the_contents(site):
    pages = [site / page_of(name) for name in CONTENTS]
    seen = {}
    for path in pages:
        html = path.read_text(encoding="utf-8")
        for way in ("prev-page", "next-page"):
            link = re.search(rf'<a class="{way}" href="([^"]+)"', html)
            seen[path, way] = link and (path.parent / link[1]).resolve()
        if seen[path, "next-page"] is None and "←" in html:  # a page that is HTML already has links of its own
            found = [re.search(rf'<a href="([^"]+)">{name}</a>', html) for name in ("← [^<]+", "[^<]+ →")]
            seen[path, "prev-page"], seen[path, "next-page"] = ((path.parent / link[1]).resolve() for link in found)
        marked = re.findall(r'current-page"><a class="current reference internal" href="#">([^<]+)', html)
        assert len(marked) == ('class="sidebar-tree"' in html), path
    recorded = min(site.glob("docs/replays/*.html"))  # these come last, and lead back by links of their own
    assert [seen[path, "next-page"] for path in pages] == [*pages[1:], recorded]
    assert [seen[path, "prev-page"] for path in pages] == [site / "README.html", *pages[:-1]]


def test_the_first_use_of_a_term_leads_to_the_glossary(site):
    for name in ("docs/launching.md", "docs/mistakes.md", "variants/README.md"):
        html = (
            (site / page_of(name)).read_text(encoding="utf-8").split('<article role="main"')[1].split("</article>")[0]
        )
        links = re.findall(r'glossary\.html#([\w-]+)"', html)
        terms = re.findall(r'<a class="term[^>]*glossary\.html#([\w-]+)" title="[^"]{20,}">', html)
        assert len(terms) > 5 and len(set(terms)) == len(terms), name
        for term in terms:  # the page's own links to it come later
            assert html.index(f'#{term}" title=') < html.rindex(f"#{term}") or links.count(term) == 1, (name, term)
        prose = re.sub(
            r"<(pre|code|a|h\d)\b.*?</\1>|<[^>]+>", " ", html[: html.index(f'#{terms[0]}"')], flags=re.DOTALL
        )
        assert not re.search(rf"\b{terms[0]}\b", prose, re.IGNORECASE), (name, terms[0])
    assert 'class="term' not in (site / "docs/glossary.html").read_text(encoding="utf-8")


def show(browser, path, width=1280, scheme="light", height=900):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 400}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    preferred = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)
    browser.get(path.as_uri())


def test_a_pasted_message_leads_to_its_place(site):
    """From a file, without a server: the first result is the section, and a click shows it."""
    heading_in_view = """const heading = document.getElementById(location.hash.slice(1))?.firstElementChild;
        const top = heading?.getBoundingClientRect().y;
        return -400 < top && top < 800 ? heading.firstChild.data : null"""  # the message itself is in the middle
    with chromium() as browser:
        for message, section in MESSAGES.items():
            show(browser, site / "index.html")
            browser.find_element("css selector", ".sidebar-search").send_keys(message, "\n")
            wait_for(functools.partial(browser.find_elements, "css selector", "#results a"))
            first = browser.find_element("css selector", "#results a")
            assert first.text.endswith(f"› {section}"), (message, first.text)
            first.click()
            wait_for(functools.partial(browser.execute_script, heading_in_view), 20)
            assert browser.execute_script(heading_in_view) == section, message
        assert browser.get_log("browser") == []


def test_pages_fit_a_phone_and_a_screen(site):
    root = "document.documentElement"
    beyond = """return [...document.querySelectorAll("article img.collectives")].filter(
        (picture) => picture.getBoundingClientRect().right > innerWidth).length"""
    says = """return [...document.querySelectorAll("p:has(> .timelines)")].every(
        (box) => box.scrollWidth <= box.clientWidth || getComputedStyle(box, "::before").content.includes("Scroll"))"""
    with chromium() as browser:
        for name in ["README.md", "mnist_ddp.py", *CONTENTS]:
            for width, scheme in [(390, "dark"), (1280, "light")]:
                show(browser, site / page_of(name), width, scheme)
                assert browser.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth"), (name, width)
                background = browser.find_element("css selector", "body").value_of_css_property("background-color")
                assert ("255, 255, 255" in background) == (scheme == "light"), (name, scheme)
                assert browser.execute_script(beyond) == 0 and browser.execute_script(says), (name, width)
        assert browser.get_log("browser") == []


def test_the_theme_button_changes_figures_and_is_kept(site):
    def brightness(picture):
        browser.execute_script("arguments[0].loading = 'eager'; return arguments[0].decode()", picture)
        grey = Image.open(io.BytesIO(picture.screenshot_as_png)).convert("L").resize((1, 1))
        return grey.getpixel((0, 0))

    with chromium() as browser:
        for name, kind in [("docs/collectives.html", "img.collectives"), ("docs/timeline.html", "img.timelines")]:
            show(browser, site / name)
            browser.execute_script("localStorage.clear()")
            browser.refresh()
            light = brightness(browser.find_element("css selector", kind))
            browser.find_element("css selector", ".theme-toggle-content button").click()
            assert brightness(browser.find_element("css selector", kind)) < 100 < 150 < light, name
        show(browser, site / "docs/side_by_side.html")  # another page, and one that is HTML already
        background = browser.find_element("css selector", "body").value_of_css_property("background-color")
        assert "255, 255, 255" not in background


def test_a_wrong_link_fails_the_build_and_a_new_page_of_html_is_in_the_contents(tmp_path):
    root, folder = tmp_path / "root", tmp_path / "site"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "data", "runs", "__pycache__"))
    page = root / "docs/class.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(f"{text}\n[a](nowhere.md) [b](glossary.md#nowhere)\n", encoding="utf-8")
    recorded = root / "docs/replays/recorded.html"
    recorded.parent.mkdir(exist_ok=True)
    recorded.write_text('<title>A run of three ranks</title><a href="../class.md#homework">class</a>', encoding="utf-8")
    done = sphinx(root, folder)
    line = len(text.splitlines()) + 2
    assert done.code == 1 and done.err.count(f"docs/class.md:{line}: WARNING") == 2, done.err
    assert '<a href="../class.html#homework">' in (folder / "docs/replays/recorded.html").read_text(encoding="utf-8")
    assert 'href="docs/replays/recorded.html">A run of three ranks</a>' in (folder / "index.html").read_text("utf-8")
