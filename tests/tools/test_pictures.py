"""The pictures that tools/ draws: up to date, true to what they show, and readable in a browser.

The tests in a browser are slow ones; what they need is said in test_pages.py.

    python -m tests.tools.test_pictures FOLDER     # writes screenshots to FOLDER, to be looked at
"""

import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tools.test_pages import Reader, start_browser
from tools import build, collectives, ddp_step

PICTURES = [ddp_step.PICTURE, *(collectives.PICTURES / f"{name}.svg" for name in collectives.NAMES)]
SVG = "{http://www.w3.org/2000/svg}"


def test_pictures_are_up_to_date():
    made = build.drawings()
    assert sorted(made) == sorted(PICTURES) == sorted([*collectives.PICTURES.iterdir(), ddp_step.PICTURE])
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, build.OUT_OF_DATE.format(path.relative_to(build.ROOT))


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_says_in_words_what_it_shows(path):
    picture = ElementTree.parse(path).getroot()
    title, description = picture.find(f"{SVG}title"), picture.find(f"{SVG}desc")
    assert (
        picture.get("role") == "img" and picture.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    )
    assert len(title.text) > 10 and len(description.text) > 50


def test_the_numbers_are_those_of_the_output():
    ranks = collectives.parsed("rank 0: [1, 2] -> [11, 22]\nrank 1: [10, 20] -> no result\n")
    assert ranks == [([1, 2], [11, 22]), ([10, 20], None)]
    texts = [text.text for text in ElementTree.fromstring(collectives.drawn("reduce", ranks)).iter(f"{SVG}text")]
    assert texts == ["before", "after", "rank 0", "1", "2", "11", "22", "rank 1", "10", "20", "no result"]
    assert [collectives.origins(number) for number in (3, 20, 300, 22, 111)] == [[0], [1], [2], [0, 1], [0, 1, 2]]


def test_users_are_found_by_what_a_name_means(tmp_path):
    (tmp_path / "variants").mkdir()
    (tmp_path / "one.py").write_text(
        "import distributed as dist\nimport torch.distributed as td\n"
        "class A:\n    def b(self):\n        td.reduce(dist.reduce(1))\n"
    )
    (tmp_path / "variants/two.py").write_text(
        "import torch\nfrom torch import distributed\n"
        "def f():\n    distributed.reduce\ndef g():\n    torch.distributed.reduce()\n"
    )
    assert collectives.users("reduce", False, tmp_path) == {"one.py": ["A.b"], "variants/two.py": ["f", "g"]}
    assert collectives.users("reduce", True, tmp_path) == {"one.py": ["A.b"]}
    assert "train" in collectives.users("all_reduce", True)["variants/mnist_by_hand.py"]


def test_the_recorded_step_is_one():
    """Of each rank: all layers forward, then backward, last layer first; a bucket is sent when it is full."""
    step = ddp_step.Step(ddp_step.recorded())
    assert [layer for bucket in step.buckets for layer in bucket] == list("654321")
    for rank in (0, 1):
        computed = [e for e in step.of("forward", "backward", "optimizer") if e.rank == rank]
        assert [e.layers for e in computed] == [*map(list, "123456654321"), []]
        assert all(a.end <= b.start for a, b in zip(computed, computed[1:], strict=False))
        ready = {e.layers[0]: e.end for e in computed if e.kind == "backward"}
        for sent in step.of("all-reduce"):
            assert sent.rank != rank or sent.start >= max(ready[layer] for layer in sent.layers)
    first, last_backward = step.of("all-reduce")[0], step.of("backward")[-1]
    assert first.end < last_backward.end, "nothing overlaps: record another step"


# ------------------------------------------------------------------------------------------------------- the browser

# For each text: its words, its box, its contrast with what is painted below it (WCAG 2), its size in pixels.
TEXTS = """
const luminance = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92
    : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const visible = (part) => {
  for (let at = part; at instanceof SVGElement; at = at.parentNode) {
    const style = getComputedStyle(at);
    if (style.opacity === "0" || style.visibility === "hidden") return false;
  }
  return true;
};
const rects = [...document.querySelectorAll("rect")].filter((part) => getComputedStyle(part).fill !== "none"
  && visible(part));
return [...document.querySelectorAll("text")].filter(visible).map((part) => {
  const box = part.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
  const below = rects.filter((rect) => {
    const r = rect.getBoundingClientRect(), follows = Node.DOCUMENT_POSITION_FOLLOWING;
    return rect.compareDocumentPosition(part) & follows && r.x <= x && x <= r.right && r.y <= y && y <= r.bottom;
  });
  const pair = [getComputedStyle(part).fill, getComputedStyle(below.at(-1)).fill].map(luminance).sort((a, b) => b - a);
  const scale = document.documentElement.getScreenCTM().a;
  return { words: part.textContent, left: box.left, right: box.right, top: box.top, bottom: box.bottom,
    contrast: (pair[0] + 0.05) / (pair[1] + 0.05), size: parseFloat(getComputedStyle(part).fontSize) * scale };
});"""


def look(reader, path, width=1000, dark=False, media="screen", motion=False):
    """The picture by itself, as wide as the window if that is narrower."""
    features = {"prefers-color-scheme": "dark" if dark else "light"}
    features["prefers-reduced-motion"] = "no-preference" if motion else "reduce"
    reader.open("about:blank", width, 700)
    size = {
        "width": width,
        "height": 700,
        "deviceScaleFactor": 1,
        "mobile": False,
    }  # a picture has no viewport of its own
    reader.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    given = {"media": media, "features": [{"name": name, "value": value} for name, value in features.items()]}
    reader.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", given)
    reader.browser.get(path.as_uri())
    reader.js("document.documentElement.style.maxWidth = '100%'; document.documentElement.style.height = 'auto'")


def check(reader):
    texts = reader.js(TEXTS)
    width, height = reader.js("const r = document.documentElement.getBoundingClientRect(); return [r.right, r.bottom]")
    for text in texts:
        assert text["contrast"] >= 4.5, text
        assert text["size"] >= 9, text
        assert text["left"] >= 0 and text["right"] <= width and text["top"] >= 0 and text["bottom"] <= height, text
    for number, one in enumerate(texts):
        for other in texts[:number]:
            apart = one["left"] >= other["right"] or other["left"] >= one["right"]
            assert apart or one["top"] >= other["bottom"] - 3 or other["top"] >= one["bottom"] - 3, (one, other)
    return [text["words"] for text in texts]


LOOKS = {
    "light": {},
    "dark": {"dark": True},
    "print": {"dark": True, "media": "print", "motion": True},
    "phone": {"dark": True, "width": 390},
}


@pytest.fixture(scope="module")
def reader():
    browser = start_browser()
    yield Reader(browser)
    browser.quit()


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOOKS)
@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_readable(reader, path, kind):
    look(reader, path, **LOOKS[kind])
    assert check(reader)
    paper = reader.js("return getComputedStyle(document.querySelector('.paper')).fill")
    assert (paper == "rgb(255, 255, 255)") == (kind in ("light", "print"))
    if kind == "phone":
        assert reader.js("return document.documentElement.getBoundingClientRect().width") <= 390
    reader.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.slow
def test_the_step_moves_on_a_screen_only(reader):
    """Still: all sentences' places are taken by one, and the cursor is gone.  Moving: readable at any time."""
    cursor = "return getComputedStyle(document.querySelector('.sweep')).visibility"
    for kind in "light", "print":
        look(reader, ddp_step.PICTURE, **LOOKS[kind])
        assert reader.js(cursor) == "hidden" and reader.js("return document.getAnimations().length") == 0
        assert ddp_step.STILL in check(reader)
    look(reader, ddp_step.PICTURE, motion=True)
    assert reader.js(cursor) == "visible"
    said = set()
    for time_in_ms in range(0, 1000 * ddp_step.SECONDS, 500):
        reader.js("document.getAnimations().forEach((a) => { a.pause(); a.currentTime = arguments[0]; })", time_in_ms)
        said |= set(check(reader))
    words = {words for _, words in ddp_step.phases(ddp_step.Step(ddp_step.recorded()))}
    assert words | {ddp_step.STILL} <= said
    reader.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def screenshots(folder):
    browser = start_browser()
    reader = Reader(browser)
    for path in PICTURES:
        for kind, options in LOOKS.items():
            look(reader, path, **options)
            time.sleep(0.1)
            browser.save_screenshot(str(folder / f"{path.stem}_{kind}.png"))
    browser.quit()


if __name__ == "__main__":
    screenshots(Path(sys.argv[1]))
