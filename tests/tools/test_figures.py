"""The figures on README.md and docs/results.md are measurements: they are generated, or listed here with their source.

A figure is a number with a unit: a speed, a time, a share, a ratio, an amount of memory.  What stands between markers
comes from a file or a program (test_docs.py compares it), and code is no statement.
"""

import re

import pytest
from world import ROOT

from tools import build

UNITS = r"%|per cent|percent|images/s|(?:ms|s|min|h|seconds?|minutes?|hours?)\b|times\b|points?\b|[KMG]i?B\b|Gbit/s"
WORDS = "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|a hundred|half an?|a quarter of an?|a third of an?"
FIGURE = re.compile(rf"(?<![\w.])(?:[\d][\d.,]*|{WORDS})(?:\s*[x×]|(?:\s+percentage)?\s*(?:{UNITS}))", re.IGNORECASE)
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)\n]*\)", re.DOTALL)  # fences, inline code, the targets of links

EXCEPTIONS = {  # page: {the words around a figure: its source}
    "README.md": {},
    "results.md": {},
}


def figures(text):
    """The figures outside of generated blocks and code, each with the words around it."""
    plain = CODE.sub(lambda m: " " * len(m[0]), build.BLOCK.sub(lambda m: " " * len(m[0]), text))
    return [(m[0], " ".join(text[max(0, m.start() - 60) : m.end() + 60].split())) for m in FIGURE.finditer(plain)]


@pytest.mark.parametrize("page", EXCEPTIONS)
def test_every_figure_is_generated_or_has_a_source(page):
    path = next(path for path in build.PAGES if path.name == page)
    text = path.read_text(encoding="utf-8")
    known = EXCEPTIONS[page]
    for words in known:
        assert words in " ".join(text.split()), f"no longer on the page, take it from EXCEPTIONS: {words}"
    found = [
        around for figure, around in figures(text) if not any(figure in words and words in around for words in known)
    ]
    assert not found, f"measure it into experiments/results/, or name its source in EXCEPTIONS: {found}"


def test_measured_blocks_come_from_results():
    for block in build.blocks("measured"):
        assert block.what.startswith("experiments/results/"), block.what
        assert (ROOT / block.what).is_file()
    assert build.MEASURED.is_relative_to(ROOT / "experiments/results")  # of the blocks `benchmark`


def test_what_is_taken_for_a_figure():
    seen = {
        "takes 30 ms": "30 ms",
        "1.46 times as fast": "1.46 times",
        "78% of it": "78%",
        "about 5,929 images/s now": "5,929 images/s",
        "after 0.14 s, then": "0.14 s",
        "three minutes later": "three minutes",
        "0.1 percentage points": "0.1 percentage points",
        "10x faster": "10x",
    }
    for text, figure in seen.items():
        assert [found for found, _ in figures(text)] == [figure], text
    for text in ("2 processes", "torch 2.15", "`--nproc 2 %`", "2 x 100", "<!-- measured: a -->5 s<!-- end -->"):
        assert figures(text.replace("2 x 100", "`2 x 100`")) == []
