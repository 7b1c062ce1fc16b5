"""docs/side_by_side.html: a note on each change, lines that face each other, and what a reader does in a browser."""

import html
import re
import xml.etree.ElementTree as ElementTree

import pytest
from world import ROOT, chromium, pictures_to_scroll

from dev import side_by_side
from dev.side_by_side import PAGE, PAIRS, compared, source
from dev.steps import diff_lines


def test_each_change_has_a_note_of_at_most_two_sentences():
    assert side_by_side.problems() == []


def test_the_page_is_up_to_date_and_small():
    assert PAGE.read_text(encoding="utf-8") == side_by_side.page(), "run  python -m dev.build --quick"
    assert PAGE.stat().st_size <= 500_000


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: side_by_side.key(*pair))
def test_each_line_stands_once(pair):
    old, new = (source(path).lines for path in pair)
    rows = [row for part in compared(*pair) for row in part.rows]
    assert [i for i, _ in rows if i is not None] == list(range(len(old)))
    assert [j for _, j in rows if j is not None] == list(range(len(new)))
    changed = [row for part in compared(*pair) if part.is_change for row in part.rows]
    changed = [(i, j) for i, j in changed if None in (i, j) or old[i] != new[j]]
    assert (sum(j is not None for _, j in changed), sum(i is not None for i, _ in changed)) == diff_lines(*pair)
    assert all(old[i] == new[j] for part in compared(*pair) if not part.is_change for i, j in part.rows)
    text = re.sub(r"<[^>]*>", "", "\n".join(side_by_side.line_html(line, {3}) for line in source(pair[1]).html))
    assert html.unescape(text).splitlines() == new  # colours and links leave the text as it is


def test_a_note_in_a_long_change_is_above_its_line():
    html = side_by_side.pair_html("variants/mnist_transformer.py", "variants/mnist_context_parallel.py")
    below = re.findall(r"^<tr class=aside>.*\n<tr>.*?<td data-n=\d+[^>]*>(.*)", html, re.MULTILINE)
    first_names = {re.sub("<.*?>", "", line).split()[0] for line in below}
    assert {"maximum", "previous,", "logsumexp", "delta", "probabilities", "d_q"} <= first_names


def test_pictures_parse():
    pictures = sorted((ROOT / "docs").rglob("*.svg"))
    assert len(pictures) > 10
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in pictures)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height", "most"), [(1280, 900, 400), (390, 844, 550)])
def test_the_first_screen_shows_code(width, height, most):
    with chromium() as browser:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 400}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(PAGE.as_uri())
        first = "return [...document.querySelectorAll('td[data-n]')].find((line) => line.checkVisibility())"
        line = browser.execute_script(first)
        assert line.rect["y"] <= most and line.text.startswith('"""MNIST')
        assert browser.find_elements("css selector", "details[open]") == []  # variants, recorded steps


@pytest.mark.slow
def test_what_a_reader_does_in_a_browser():
    """Keys, a link to a change, one column on a phone, and the same without JavaScript."""

    def one(selector):
        return browser.find_element("css selector", selector)

    def shown():
        sections = browser.find_elements("css selector", "section")
        return [section.get_attribute("id") for section in sections if section.is_displayed()]

    with chromium() as browser:
        browser.get(PAGE.as_uri())
        assert shown() == [side_by_side.key(*PAIRS[0])] and one("[role=status]").text == "11 changes"
        one("body").send_keys("jj")
        assert browser.current_url.endswith(":change2") and one("[role=status]").text == "2 of 11"
        one("body").send_keys("n")
        assert shown() == [side_by_side.key(*PAIRS[1])]
        folded = one(f'[id="{shown()[0]}"] pre')
        assert not folded.is_displayed()
        one("body").send_keys("f")
        assert folded.is_displayed()
        light = one("body").value_of_css_property("background-color")
        one("body").send_keys("t")
        assert one("body").value_of_css_property("background-color") != light
        assert browser.get_log("browser") == []

        phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        browser.get(f"{PAGE.as_uri()}#mnist_ddp..mnist_by_hand")
        one('section[id="mnist_ddp..mnist_by_hand"] .picture summary').click()
        assert pictures_to_scroll(browser) == 1
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
        browser.get("about:blank")
        browser.get(f"{PAGE.as_uri()}#{side_by_side.key(*PAIRS[3])}:change1")
        assert shown() == [side_by_side.key(*PAIRS[3])]
        browser.find_elements("css selector", "li a")[4].click()
        assert shown() == [side_by_side.key(*PAIRS[4])]
