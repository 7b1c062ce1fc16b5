"""The site of dev.site: each link leads to a page or picture in it, and the pages fit a phone and a screen."""

import itertools
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from world import ROOT, chromium, pictures_to_scroll, shell

from dev import build, steps

pytestmark = pytest.mark.slow
SHOWN = ["index.html", "mnist_ddp.py.html", "mnist_notebook.ipynb.html", "variants/index.html"]
SHOWN += ["docs/side_by_side.html", "docs/collectives.html", "docs/timeline.html"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mdit_py_plugins", reason="pip install markdown-it-py mdit-py-plugins pygments")
    folder = tmp_path_factory.mktemp("site")
    done = shell("-m", "dev.site", folder, GITHUB_REPOSITORY="owner/name")
    assert done.code == 0 and f"open {folder}/index.html" in done.out, done.err
    return folder


class Page(HTMLParser):
    """The anchors of a page, and what it links to."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.targets = [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors.append(values.get("id"))
        self.targets += [values[name] for name in ("href", "src") if name in values]


def test_each_link_leads_somewhere(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    names = [page.relative_to(ROOT).as_posix().replace("README.md", "index.md") for page in build.PAGES]
    wanted = [name.replace(".md", ".html") for name in names] + [f"{step.script}.html" for step in steps.STEPS]
    assert {site / name for name in wanted} <= set(pages)
    for path, page in pages.items():
        for target in page.targets:
            link = urlsplit(target)
            if link.scheme in ("https", "data"):
                continue
            leads_to = (path.parent / link.path).resolve() if link.path else path
            assert leads_to.is_file() and leads_to.suffix in (".html", ".svg", ".css"), (path, target)
            assert not link.fragment or link.fragment in pages[leads_to].anchors, (path, target)
    assert "https://github.com/owner/name" in pages[site / "index.html"].targets


def test_pages_fit_a_phone_and_a_screen(site):
    root = "document.documentElement"
    shown = 0
    with chromium() as browser:
        for name, (width, scheme) in itertools.product(SHOWN, [(390, "dark"), (1200, "light")]):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            preferred = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)
            browser.get((site / name).as_uri())
            shown += pictures_to_scroll(browser)
            assert browser.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth"), (name, width)
            background = browser.find_element("css selector", "body").value_of_css_property("background-color")
            assert ("255, 255, 255" in background) == (scheme == "light"), (name, scheme)
        assert browser.get_log("browser") == [] and shown > 20
