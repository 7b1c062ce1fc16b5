"""The side-by-side pages: up to date, rightly aligned, a note on each change; and all that a reader does in a browser.

The tests in a browser are slow ones.  They need Debian's chromium and chromium-driver and the package selenium; the one
on accessibility also axe-core (npm install --no-save axe-core), the one on printing pypdf.  Otherwise they are skipped.

    python -m tests.tools.test_pages FOLDER     # writes screenshots to FOLDER, to be looked at
"""

import base64
import functools
import html
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from urllib.parse import unquote

import pytest

from tools import build, pages
from tools.align import aligned, changed_words, counts, faced
from tools.highlight import ROOT, source

TREE = pages.Tree(build.STEPS)
PAIRS = TREE.pairs()
ALL_PAIRS = list(itertools.permutations(TREE.paths, 2))
DOCS = (ROOT / "docs").as_uri()
INDEX = f"{DOCS}/index.html"


@functools.cache
def generated():
    return pages.generated(build.STEPS)


def line_of(side, number):
    """The selector of a line in the left ("l") or the right ("r") column."""
    return f'.row > :{"first" if side == "l" else "last"}-child > [data-n="{number}"]'


def key(pair):
    return "..".join(Path(path).stem for path in pair)


# ---------------------------------------------------------------------------------------------------------- the files


@pytest.mark.slow
def test_pages_are_up_to_date():
    made = generated()
    for page, text in made.items():
        name = page.relative_to(ROOT)
        assert page.is_file() and page.read_text(encoding="utf-8") == text, (
            f"{name} is out of date: run  python -m tools.build --pages"
        )
        assert len(text.encode()) < 2**21  # index.html has 0.6 MB for 13 scripts; it grows with their square
        assert not re.search(r'<(script|img|link|iframe)[^>]+(src|href)="(?!data:)', text), "it loads another file"
    assert set(made) == set(ROOT.glob("docs/*.html"))


def test_every_change_has_its_note():
    assert TREE.problems() == [], "mend tools/notes.toml, then run  python -m tools.build --pages"


def test_notes_are_short_and_true_for_each_pair():
    """A note also stands at pairs with a script in between: the script that it compares with is named."""
    for step, line, why in TREE.notes:
        assert not re.search(r"\b(parent|the left|the right)\b", why), f"name the script: {step}: {line}"
        assert 1 <= len(re.findall(r"[.?!](?= |$)", why)) <= 3, f"one to three sentences: {step}: {line}"


def test_problems_of_notes_are_found(monkeypatch):
    """A change without a note, a note whose line is gone or stands twice, and a step that there isn't."""
    notes = TREE.notes
    gone = next(n for n, (step, line, _) in enumerate(notes) if step == "mnist_ddp" and "cleanup" in line)
    monkeypatch.setattr(TREE, "notes", [note for n, note in enumerate(notes) if n != gone])
    missing = TREE.problems()
    assert len(missing) == len([pair for pair in PAIRS if pair[1] == "mnist_ddp.py"])
    assert all(
        "no note" in problem and "mnist_ddp.py, line" in problem and "dist.cleanup" in problem for problem in missing
    )
    for step, line, expected in [
        ("mnist_ddp", "no such line", "stands at 0 changes"),
        ("mnist_ddp", "dist.", "changes, not one"),
        ("mnist_dpp", "dist.cleanup()", "STEPS in tools/build.py has no mnist_dpp"),
    ]:
        monkeypatch.setattr(TREE, "notes", [*notes, (step, line, "")])
        (problem,) = TREE.problems()
        assert expected in problem


@pytest.mark.parametrize("pair", PAIRS, ids=key)
def test_as_many_lines_change_as_git_counts(pair):
    added, removed = counts(pages.pair_of(*pair))
    assert f"+{added} -{removed}" == build.lines(*pair)


@pytest.mark.slow
def test_alignment_loses_nothing():
    """Of any two scripts: every line of both stands once, in order, and equal lines are equal."""
    for before, after in itertools.combinations(TREE.paths, 2):
        a, b = source(before).lines, source(after).lines
        rows = [row for part in pages.pair_of(before, after) for row in part]
        assert [i for row in rows for i in row.old] == list(range(len(a)))
        assert [j for row in rows for j in row.new] == list(range(len(b)))
        for row in rows:
            if row.kind == "changed":
                assert not (row.old and row.new) or a[row.old.start] != b[row.new.start]
            else:
                assert [a[i] for i in row.old] == [b[j] for j in row.new]


def test_notes_explain_the_way_from_parent_to_child():
    """Other pairs (two children of one parent, or the wrong way round) have none: they would explain another change."""
    for pair in [*PAIRS, ("mnist_amp.py", "mnist_apex.py"), ("mnist_ddp.py", "mnist_single.py")]:
        for change in pages.changes(pages.pair_of(*pair)):
            assert bool(TREE.notes_on(change, *pair)) == (pair in PAIRS)


def rows(before, after):
    return [row if isinstance(row, str) else "~" for row in faced(before, after)]


def test_a_changed_line_faces_its_successor():
    assert rows(["x = f(1)"], ["x = f(2)"]) == ["~"]
    assert rows(["loss.backward()"], ["with scaled(loss) as scaled_loss:", "    scaled_loss.backward()"]) == ["+", "~"]
    assert rows(["a = first(x)", "b = second(y)"], ["b = second(y, z)"]) == ["-", "~"]
    assert rows(["import os"], ["return total / count"]) == ["-", "+"]
    assert rows([], ["one", "two"]) == ["+", "+"]
    assert rows(["", "x"], [""]) == ["-", "-", "+"]  # empty lines are like nothing
    swapped = rows(["alpha = 1", "beta = 2"], ["beta = 2", "alpha = 1"])  # the order is kept
    assert swapped.count("~") == 1


def test_changed_words_are_marked():
    assert changed_words("train(model, device)", "train(model, device, scaler)") == [[], [[19, 27]]]
    assert changed_words("    x = 1", "        x = 1") == [[[0, 4]], [[0, 8]]]
    assert changed_words("a = b.c", "a = d.e") == [[[4, 7]], [[4, 7]]]  # one mark, over the dot


def test_long_equal_stretches_are_folded():
    def shape(before, after):
        """For each part its rows: lines at the left, at the right, and the first letter of the kind."""
        return [
            " ".join(f"{len(row.old)}{len(row.new)}{row.kind[0]}" for row in part) for part in aligned(before, after)
        ]

    same = [f"line {n}" for n in range(9)]
    assert shape(same, ["new", *same]) == ["01c", "33e 66f"]
    assert shape([*same, "old", *"0123456"], [*same, *"0123456"]) == ["66f 33e", "10c", "33e 44f"]
    assert shape(["a", *same[:2], "b"], ["a", "x", *same[:2], "y", "b"]) == ["11e", "01c 22e 01c", "11e"]  # one change
    assert shape([], ["x", "y"]) == ["02c"] and shape(["x"], ["x"]) == ["11e"]


@pytest.mark.slow
def test_colours_and_links_leave_the_text_as_it_is():
    for path in TREE.paths:
        plain = [html.unescape(re.sub(r"<[^>]*>", "", line)) for line in source(path).html]
        assert plain == source(path).lines, path


@pytest.mark.slow
def test_links_lead_somewhere():
    """To a page, an anchor in it, or a file.  Scripts' calls are links."""
    made = {page.name: text for page, text in generated().items()}
    anchors = {name: set(re.findall(r' id="([^"]+)"', text)) for name, text in made.items()}
    for name, text in made.items():
        for link in set(re.findall(r'(?:href|src)="([^"]+)"', text)):
            path, _, anchor = link.partition("#")
            if "://" in link or link.startswith("data:"):
                continue
            assert path in made or not path or (ROOT / "docs" / path).exists(), f"{name}: {link}"
            known = anchors.get(path or name, {anchor})
            assert not anchor or html.unescape(anchor) in known, f"{name}: {link}"
        assert 'href="../README.md"' in text
        for call, file in [("dist.all_reduce", "distributed.py"), ("data.load", "data.py")]:
            assert f'<a href="../{file}">{call}</a>' in text


def test_torchs_own_dist_is_no_link():
    """In a script of plain torch `dist` is torch.distributed."""
    plain = source("mnist_ddp_plain.py")
    line = next(n for n, line in enumerate(plain.lines) if "dist.all_reduce(tested)" in line)
    assert "href" not in plain.html[line] and any("href" in line for line in plain.html)  # data.load


# ------------------------------------------------------------------------------------------------------- the browser


def start_browser():
    """Debian's chromium without a window; skips the test if something is missing."""
    pytest.importorskip("selenium", reason="pip install selenium")
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1400,1000"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


@pytest.fixture(scope="module")
def chromium():
    browser = start_browser()
    yield browser
    browser.quit()


def squeezed(text):
    return re.sub(r"\s", "", text)


class Reader:
    """What a reader does in the browser."""

    def __init__(self, browser):
        self.browser = browser
        self.js = browser.execute_script

    def open(self, url=INDEX, width=1400, height=1000, dark=False, script=True, scale=1):
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
        self.browser.get("about:blank")  # otherwise a new hash opens nothing
        self.browser.get(url)

    def tap(self, selector):
        """With a finger."""
        from selenium.webdriver.common.actions.action_builder import ActionBuilder
        from selenium.webdriver.common.actions.pointer_input import PointerInput

        builder = ActionBuilder(self.browser, mouse=PointerInput("touch", "finger"))
        builder.pointer_action.move_to(self.one(selector)).pointer_down().pointer_up()
        builder.perform()

    def press(self, keys):
        self.js("document.activeElement.blur()")
        self.type(keys)

    def type(self, keys):
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(keys).perform()

    def one(self, selector):
        return self.browser.find_element("css selector", selector)

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def sees(self, selector, text):
        """Whether this stands there, soon: a new hash, or a new page, takes a moment."""
        deadline = time.monotonic() + 10
        while self.js("return document.querySelector(arguments[0])?.textContent", selector) != text:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def change(self):
        """The number of the change that has the focus, or 0."""
        return int(self.js("return document.activeElement.querySelector?.('h3')?.textContent.split(' ')[1] ?? 0"))

    def printed(self):
        """The text of each page, without spaces."""
        pypdf = pytest.importorskip("pypdf", reason="pip install pypdf")
        pdf = self.browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"]
        pages = pypdf.PdfReader(io.BytesIO(base64.b64decode(pdf))).pages
        return [squeezed(unicodedata.normalize("NFKC", page.extract_text())) for page in pages]

    def select(self, first, last):
        """Drag the mouse from the beginning of one cell's text to the end of another's."""
        from selenium.webdriver import ActionChains

        self.js("document.querySelector(arguments[0]).scrollIntoView({block: 'start'}); scrollBy(0, -100)", first)
        box = """const range = document.createRange();
            range.selectNodeContents(document.querySelector(arguments[0]));
            const boxes = [...range.getClientRects()].filter((box) => box.width > 0);
            const box = arguments[1] ? boxes.at(-1) : boxes[0];
            return [arguments[1] ? box.right : box.left, box.top + box.height / 2].map(Math.round)"""
        (x, y), (x_end, y_end) = self.js(box, first, False), self.js(box, last, True)
        mouse = ActionChains(self.browser, duration=50)
        mouse.w3c_actions.pointer_action.move_to_location(x, y).pointer_down()
        mouse.w3c_actions.pointer_action.move_to_location(x_end + 1, y_end).pointer_up()
        mouse.perform()

    def clipboard(self, copy=True):
        """What is pasted into a text field of another page."""
        from selenium.webdriver import ActionChains, Keys

        chord = ActionChains(self.browser).key_down(Keys.CONTROL).send_keys
        if copy:
            chord("c").key_up(Keys.CONTROL).perform()
        here = self.browser.current_window_handle
        self.browser.switch_to.new_window("tab")
        self.browser.get("data:text/html,<textarea autofocus></textarea>")
        self.one("textarea").click()
        ActionChains(self.browser).key_down(Keys.CONTROL).send_keys("v").key_up(Keys.CONTROL).perform()
        text = self.one("textarea").get_property("value")
        self.browser.close()
        self.browser.switch_to.window(here)
        return text

    def complaints(self):
        """Messages of the console, and requests to anything but files."""
        events = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        requests = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        assert any(url.startswith("file:") for url in requests), "nothing was recorded"
        return self.browser.get_log("browser"), [url for url in requests if not url.startswith(("file:", "data:"))]


@pytest.fixture
def reader(chromium):
    reader = Reader(chromium)
    reader.open()
    reader.js("localStorage.clear()")
    reader.open()
    return reader


ROWS = """
const rows = [...document.querySelectorAll(arguments[0] + ".row")];
return rows.map((row) => [row.classList.contains("equal"), ...[...row.children].map((cell) =>
  [...cell.children].map((line) => ({
    number: Number(line.dataset.n), text: line.textContent, marks: line.querySelectorAll("mark").length,
    tinted: getComputedStyle(cell).backgroundColor !== "rgba(0, 0, 0, 0)",
    top: line.getBoundingClientRect().top })))]);"""


def check_rows(reader, pair, within=""):
    """The shown pair: all lines of both scripts in order, equal ones side by side, changed ones tinted."""
    shown = reader.js(ROWS, within)
    for side, path in enumerate(pair, 1):
        lines = [line for row in shown for line in row[side]]
        assert [line["number"] for line in lines] == list(range(1, len(source(path).lines) + 1))
        assert "".join(line["text"] for line in lines) == source(path).text
    for equal, left, right in shown:
        assert all(line["tinted"] != equal for line in left + right)
        for old, new in zip(left, right, strict=bool(left and right)):
            assert old["top"] == new["top"]  # they face each other, however long they are
            assert old["text"] == new["text"] if equal else old["marks"] + new["marks"] >= 1
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=key)
def test_a_pair_of_the_tree(reader, pair):
    reader.open(f"{INDEX}#{key(pair)}")
    reader.press("f")
    check_rows(reader, pair)
    assert reader.all(".note") and all(note.find_element("css selector", "p").text for note in reader.all(".note"))
    assert reader.complaints() == ([], [])


@pytest.mark.slow
def test_any_two_scripts(reader):
    """Also the other way round, which is the same with its columns exchanged, and without the notes."""
    from selenium.webdriver.support.select import Select

    Select(reader.one("#left")).select_by_value("min_DDP")
    Select(reader.one("#right")).select_by_value("mnist_amp")
    assert reader.sees("h2", "min_DDP.py → mnist_amp.py")
    seen = {}
    for pair in ALL_PAIRS:
        reader.js("location.hash = arguments[0]", key(pair))
        assert reader.sees("h2", " → ".join(pair))
        seen[pair] = check_rows(reader, pair)
        added, removed = (sum(len(row[side]) for row in seen[pair] if not row[0]) for side in (2, 1))
        assert f"+{added} −{removed} lines" in reader.one(".about").text
        assert [head.text.split()[0] for head in reader.all(".head")] == list(pair)
        if pair[::-1] in seen:
            assert [row[0] for row in seen[pair]] == [row[0] for row in seen[pair[::-1]]]
            assert not reader.all(".note p")
    assert reader.complaints() == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", ["mnist_ddp..no_such", "mnist_ddp.py..mnist_amp.py", "change99", "mnist_ddp..mnist_ddp:change1"]
)
def test_an_unknown_hash(reader, wrong):
    reader.open(f"{INDEX}#{wrong}")
    assert f"This page has no {wrong}" in reader.one(".said").text
    assert reader.js("return [left.value, right.value].join('..')") == key(PAIRS[0])
    assert reader.one("h2").text.startswith("mnist_single.py")
    for place in "L9999", "change99", "change0":
        reader.open(f"{INDEX}#mnist_ddp..mnist_amp:{place}")
        assert reader.one(".said").text == f"This page has no mnist_ddp..mnist_amp:{place}."
        assert reader.one("h2").text == "mnist_ddp.py → mnist_amp.py" and not reader.all(".here")
    reader.press("n")
    assert reader.sees(".said", "")


@pytest.mark.slow
def test_the_buttons_step(reader):
    """By mouse, which moves the focus to the button: to each change, the last, and back."""
    total = len(reader.all(".note"))
    after, before = reader.one('[data-key="j"]'), reader.one('[data-key="k"]')
    seen = []
    for button in [after] * (total + 1) + [before] * total:
        button.click()
        seen.append(reader.change())
    assert seen == [*range(1, total + 1), 0, *range(total - 1, 0, -1), 1]


IN_VIEW = """
const box = document.querySelector(arguments[0]).getBoundingClientRect();
return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight;"""


@pytest.mark.slow
def test_on_a_phone_a_finger_steps(reader):
    """The buttons stay in view; the change stands below the headings, and its first line above the buttons."""
    reader.open(width=390, height=800)
    assert reader.js(IN_VIEW, '[data-key="j"]')
    for number in range(1, 6):
        reader.tap('[data-key="j"]')
        assert reader.change() == number and reader.one("#count").text == f"{number} of {len(reader.all('.note'))}"
        top, foot, heads, bar = reader.js("""
            const box = (part) => part.getBoundingClientRect();
            const note = document.activeElement;
            return [box(note).top, box(note.nextElementSibling.querySelector("code")).bottom,
                box(document.querySelector(".heads")).bottom, box(document.querySelector(".bar")).top]""")
        assert heads <= top and foot <= bar
        assert reader.js(IN_VIEW, '[data-key="j"]') and reader.js(IN_VIEW, '[data-key="k"]')
        assert reader.js("return [...document.querySelectorAll('.bar button')].every((b) => b.offsetHeight >= 40)")
    reader.tap('[data-key="k"]')
    assert reader.change() == 4


CHANGES_IN_SIGHT = """
return [...document.querySelectorAll(".note")].flatMap((note, index) =>
  note.checkVisibility() && note.nextElementSibling.checkVisibility() ? [index + 1] : []);"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mouse", "finger", "keys"])
def test_one_change_at_a_time(reader, way):
    """With its note and the lines around it, from change to change, and from pair to pair."""

    def push(key):
        if way == "keys":
            reader.type(key)
        elif way == "finger":
            reader.tap(f'[data-key="{key}"]')
        else:
            reader.one(f'[data-key="{key}"]').click()

    reader.open(f"{INDEX}#{key(PAIRS[0])}", width=390 if way == "finger" else 1400, height=800)
    total = len(reader.all(".note"))
    assert reader.js(CHANGES_IN_SIGHT) == [*range(1, total + 1)]
    push("o")
    for number in range(1, total + 1):
        assert reader.js(CHANGES_IN_SIGHT) == [number] and reader.change() == number
        assert reader.one(".note.now p").is_displayed() and reader.one(".between.now .row").is_displayed()
        assert reader.one("#count").text == f"{number} of {total}"
        push("j")
    push("k")
    assert reader.js(CHANGES_IN_SIGHT) == [total - 1]
    reader.js("location.hash = arguments[0]", key(PAIRS[1]))
    assert reader.sees("h2", " → ".join(PAIRS[1])) and reader.js(CHANGES_IN_SIGHT) == [1]
    reader.js("location.hash = arguments[0]", f"{key(PAIRS[1])}:L1")  # that line is there
    reader.js("location.hash = arguments[0]", f"{key(PAIRS[1])}:L100")  # that one isn't: all are shown again
    assert reader.sees(".here", source(PAIRS[1][1]).lines[99] + "\n") and reader.one(".here").is_displayed()
    assert reader.js("return location.hash") == f"#{key(PAIRS[1])}:L100"
    assert len(reader.js(CHANGES_IN_SIGHT)) == len(reader.all(".note"))
    assert reader.one('[data-key="o"]').get_attribute("aria-pressed") == "false"
    push("o")
    push("o")
    assert len(reader.js(CHANGES_IN_SIGHT)) == len(reader.all(".note"))
    assert reader.complaints() == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[-1], PAIRS[-1][::-1]], ids=key)
def test_each_change_has_its_link(reader, pair):
    """In its title, in the address while one steps; it leads to the change, also from outside."""
    reader.open(f"{INDEX}#{key(pair)}")
    links = [link.get_property("href") for link in reader.all(".note h3 a")]
    assert links == [f"{INDEX}#{key(pair)}:change{number}" for number in range(1, len(links) + 1)]
    reader.press("jj")
    assert reader.browser.current_url == links[1]
    reader.one(f"[id='{key(pair)}:change4'] h3 a").click()
    assert reader.browser.current_url == links[3] and reader.change() == 4
    for number in 3, len(links):
        reader.open(links[number - 1])
        assert reader.one("h2").text == " → ".join(pair) and reader.change() == number
        assert reader.js(IN_VIEW, ".now.note") and reader.one(".said").text == ""
    reader.press("k")
    assert reader.change() == len(links) - 1


@pytest.mark.slow
def test_a_new_pair_begins_at_its_top(reader):
    reader.open(f"{INDEX}#{key(PAIRS[-2])}", height=500)
    reader.js("scrollTo(0, document.body.scrollHeight)")
    reader.press("n")
    assert reader.sees("h2", " → ".join(PAIRS[-1]))
    assert reader.js("return scrollY") == 0


@pytest.mark.slow
def test_folding(reader):
    fold = reader.one("details")
    row = fold.find_element("css selector", ".row")
    count = int(fold.text.split()[0])
    assert not row.is_displayed()
    fold.find_element("css selector", "summary").click()
    assert row.is_displayed() and len(row.find_elements("css selector", "[data-n]")) == 2 * count
    fold.find_element("css selector", "summary").click()
    assert not row.is_displayed()


@pytest.mark.slow
def test_each_key(reader):
    from selenium.webdriver import Keys

    focused = "return document.activeElement.querySelector('h3')?.textContent ?? ''"
    total = len(reader.all(".note"))
    reader.press("j")
    assert reader.js(focused) == f"Change 1 of {total}"
    reader.type("jj")
    assert reader.js(focused) == f"Change 3 of {total}"
    reader.type("k")
    assert reader.js(focused) == f"Change 2 of {total}"
    reader.press("n")
    assert reader.sees("h2", " → ".join(PAIRS[1]))
    assert reader.js("return location.hash") == f"#{key(PAIRS[1])}"
    reader.press("p")
    assert reader.sees("h2", " → ".join(PAIRS[0]))
    reader.press("f")
    assert all(part.get_property("open") for part in reader.all("details"))
    reader.press("f")
    assert not any(part.get_property("open") for part in reader.all("details"))
    reader.press("t")
    assert reader.one("#theme").text == "dark"
    reader.press("?")
    assert reader.one("dialog").is_displayed() and "next, previous change" in reader.one("dialog").text
    reader.type(Keys.ESCAPE)
    assert not reader.one("dialog").is_displayed()
    reader.press("?")
    reader.one("#keys-on").click()
    reader.type(Keys.ESCAPE)
    reader.press("t")
    assert reader.one("#theme").text == "dark"  # the keys are off, and stay so
    reader.open()
    reader.press("t")
    assert reader.one("#theme").text == "dark"
    assert reader.complaints() == ([], [])


@pytest.mark.slow
def test_the_hash_restores_pair_and_line(reader):
    reader.open(f"{INDEX}#mnist_ddp..mnist_amp:L33")
    here = reader.one(".here")
    assert reader.one("h2").text == "mnist_ddp.py → mnist_amp.py"
    assert here.get_attribute("data-n") == "33" and here.is_displayed()
    middle = reader.js("const box = arguments[0].getBoundingClientRect(); return box.top / innerHeight", here)
    assert 0.1 < middle < 0.9
    reader.open(f"{INDEX}#mnist_ddp..mnist_amp:left-L20")  # in a fold
    assert (
        reader.one(".row > :first-child > .here").get_attribute("data-n") == "20" and reader.one(".here").is_displayed()
    )
    cell = reader.one(line_of("r", 41))
    reader.js("arguments[0].scrollIntoView({block: 'center'})", cell)
    from selenium.webdriver import ActionChains

    box = cell.rect
    ActionChains(reader.browser).move_to_element_with_offset(cell, int(10 - box["width"] / 2), 0).click().perform()
    assert reader.js("return location.hash") == "#mnist_ddp..mnist_amp:L41"
    reader.one(".chips a").click()
    assert reader.sees("h2", " → ".join(PAIRS[0]))
    reader.browser.back()
    assert reader.sees("h2", "mnist_ddp.py → mnist_amp.py")


@pytest.mark.slow
@pytest.mark.parametrize("script", [True, False], ids=["", "without JavaScript"])
@pytest.mark.parametrize(("side", "path"), [("l", PAIRS[0][0]), ("r", PAIRS[0][1])])
def test_copying_a_column(reader, side, path, script):
    """Twenty lines and more, with changes, gaps and notes between them: the file's text, and nothing else."""
    reader.open(height=1600, script=script)
    reader.js("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    lines = source(path).lines
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("def main("))
    last = next(number for number in range(first + 20, first + 25) if lines[number - 1])
    reader.select(line_of(side, first), line_of(side, last))
    assert reader.clipboard().rstrip("\n") == "\n".join(lines[first - 1 : last])


@pytest.mark.slow
def test_copying_over_a_fold_and_a_whole_file(reader):
    lines = source(PAIRS[0][1]).lines
    first, last = lines.index("import data") + 1, lines.index("    return sums.cpu()") + 1
    assert not reader.one(line_of("r", last - 10)).is_displayed()
    reader.select(line_of("r", first), line_of("r", last))
    assert reader.clipboard().rstrip("\n") == "\n".join(lines[first - 1 : last])
    reader.one("[data-copy]").click()
    assert reader.clipboard(copy=False) == source(PAIRS[0][0]).text
    links = "return [...document.querySelectorAll('[download]')].map((link) => [link.download, link.href])"
    for pair in PAIRS[:2]:
        reader.open(f"{INDEX}#{key(pair)}")
        for (name, link), path in zip(reader.js(links), pair, strict=True):
            assert name == Path(path).name and unquote(link.split(",", 1)[1]) == source(path).text


@pytest.mark.slow
def test_the_theme(reader):
    background = "return getComputedStyle(document.body).backgroundColor"
    light = reader.js(background)
    reader.open(dark=True)
    dark = reader.js(background)
    assert light == "rgb(255, 255, 255)" and dark != light  # as the system has it
    reader.open()
    reader.one('[data-key="t"]').click()
    assert reader.js(background) == dark
    reader.open()
    assert reader.js(background) == dark and reader.one("#theme").text == "dark"  # remembered
    reader.open(f"{DOCS}/steps.html")
    assert reader.js(background) == dark
    reader.press("t")
    reader.open(dark=True)
    assert reader.js(background) == light and reader.one("#theme").text == "light"


WIDER = """
return [...document.querySelectorAll("body *")].filter((part) => part.scrollWidth > part.clientWidth + 1
  && ["auto", "scroll"].includes(getComputedStyle(part).overflowX) && !part.closest(".row")).length;"""


@pytest.mark.slow
@pytest.mark.parametrize("page", ["index.html", "index.html#mnist_ddp..mnist_apex"])
def test_on_a_phone(reader, page):
    reader.open(f"{ROOT.as_uri()}/docs/{page}", width=390, height=800)
    reader.js("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert reader.js("return document.scrollingElement.scrollWidth") <= 390
    assert reader.js(WIDER) == 0
    row = reader.one(".row:not(.equal):not(:has(> :empty))")
    old, new = row.find_elements("css selector", "[data-n]")
    assert old.rect["y"] + old.rect["height"] <= new.rect["y"] + 1  # inline: the successor below
    assert not any(cell.is_displayed() for cell in reader.all(".equal > :first-child"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 700])
def test_a_narrow_page(reader, width):
    """The headings stay; nothing speaks of a left and a right side; no line of code begins with an empty one."""
    for pair in [*PAIRS, ("min_DDP.py", "cifar10_ddp.py")]:
        reader.open(f"{INDEX}#{key(pair)}", width=width, height=800)
        reader.press("f")
        assert (
            reader.js("""
            return [...document.querySelectorAll(".row code")].flatMap((line) => {
              const walker = document.createTreeWalker(line, NodeFilter.SHOW_TEXT), range = document.createRange();
              while (walker.nextNode()) {
                const start = walker.currentNode.data.search(/\\S/);
                if (start < 0) continue;
                range.setStart(walker.currentNode, start);
                range.setEnd(walker.currentNode, start + 1);
                const drop = range.getBoundingClientRect().top - line.getBoundingClientRect().top;
                return line.checkVisibility() && drop > 8 ? [line.dataset.n] : [];
              }
              return [];
            })""")
            == []
        )
        reader.js("[...document.querySelectorAll('.change')].at(-2).scrollIntoView()")
        assert reader.js(IN_VIEW, ".heads")
        for head, path in zip(reader.all(".head"), pair, strict=True):
            assert head.is_displayed() and head.text.startswith(path)
    texts = reader.js(
        "return [...document.querySelectorAll('.lead, .buttons, .about, .note, .bar, dialog')]"
        ".map((part) => part.textContent).join(' ')"
    )
    assert "From" in texts and not re.search(r"\b(left|right)\b", texts, re.IGNORECASE)
    reader.open(f"{INDEX}#mnist_ddp..mnist_amp:left-L20", width=width, height=800)  # shown once, for both scripts
    here = reader.one(".here")
    assert here.is_displayed() and here.text.strip() == source("mnist_ddp.py").lines[19].strip()


@pytest.mark.slow
@pytest.mark.parametrize("script", [True, False], ids=["", "without JavaScript"])
@pytest.mark.parametrize("page", ["index.html", "index.html#mnist_ddp..mnist_apex", "steps.html"])
def test_printing(reader, page, script):
    """Folded lines, too; the files' names on each page; no change is split, for each fits one page."""
    reader.open(f"{DOCS}/{page}", script=script)
    pairs = PAIRS
    if "index" in page:
        pairs = [("mnist_ddp.py", "mnist_apex.py") if "#" in page and script else PAIRS[0]]
    printed = reader.printed()
    first = 0
    for pair in pairs:
        heads = "−{}+{}".format(*pair)
        sheets = list(itertools.takewhile(lambda sheet: heads in sheet, printed[first:]))  # noqa: B023
        first += len(sheets)
        assert len(sheets) >= 2, pair
        for path in pair:
            assert all(squeezed(line) in "".join(sheets) for line in source(path).lines)
        for change in pages.changes(pages.pair_of(*pair)):
            lines = [squeezed(line) for line in pages.changed_lines(change, *pair)]
            assert any(all(line in sheet for line in lines) for sheet in sheets), lines
    assert first == len(printed)
    if script:
        assert not any(part.get_property("open") for part in reader.all("details"))  # as before


@pytest.mark.slow
def test_all_steps_on_one_page(reader):
    for script in True, False:
        reader.open(f"{DOCS}/steps.html", script=script)
        assert [part.text for part in reader.all(".pair h2")] == [" → ".join(pair) for pair in PAIRS]
        for pair in PAIRS:
            check_rows(reader, pair, within=f"[id='{key(pair)}'] ")
    reader.open(f"{DOCS}/steps.html#{key(PAIRS[1])}:change2")
    assert reader.js("return document.querySelector(':target h3').getBoundingClientRect().top") < 500
    links = "return [...document.querySelectorAll('[download]')].map((link) => link.href)"
    for link, path in zip(reader.js(links), [path for pair in PAIRS for path in pair], strict=True):
        assert unquote(link.split(",", 1)[1]) == source(path).text
    reader.open(f"{DOCS}/steps.html")
    reader.press("jjj")
    assert reader.browser.current_url == f"{DOCS}/steps.html#{key(PAIRS[0])}:change3"
    assert reader.complaints() == ([], [])


@pytest.mark.slow
def test_without_javascript(reader):
    """The first pair stands in the page, and all pairs of parent and child on the page that the links lead to."""
    reader.open(script=False)
    assert [chip.get_attribute("href") for chip in reader.all(".chips a")] == [
        f"{DOCS}/steps.html#{key(pair)}" for pair in PAIRS
    ]
    reader.all(".chips a")[-1].click()
    assert reader.sees("h1", "All steps: distributed training, one idea per diff")
    assert reader.js("return document.querySelector(':target h2').textContent") == " → ".join(PAIRS[-1])
    assert abs(reader.js("return document.querySelector(':target').getBoundingClientRect().top")) < 100
    reader.open(script=False)
    assert not reader.one(".bar").is_displayed() and reader.one(".without-script a").is_displayed()
    assert reader.one("h2").text == " → ".join(pages.FIRST)
    assert reader.one(".without-script").is_displayed() and not reader.one("#left").is_displayed()
    changed = reader.all(".row:not(.equal) > :last-child > [data-n]")
    assert changed and all(cell.is_displayed() for cell in changed)
    reader.one("summary").click()
    assert reader.one("details .row").is_displayed()


@pytest.mark.slow
def test_copied_is_said_for_a_moment(reader):
    reader.one("[data-copy]").click()
    assert reader.one("[data-copy]").text == "copied"
    assert reader.sees("[data-copy]", "copy")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    "page",
    ["index.html", "index.html#mnist_ddp..mnist_amp:L41", "steps.html"],
)
def test_accessibility(reader, page, dark):
    axe = ROOT / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.is_file():
        pytest.skip("npm install --no-save axe-core")
    reader.open(f"{ROOT.as_uri()}/docs/{page}", dark=dark)
    reader.js("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    reader.js(axe.read_text(encoding="utf-8"))
    found = reader.browser.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    found = [(part["impact"], part["id"], part["nodes"][0]["html"][:200]) for part in found["violations"]]
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS[:1] + PAIRS[-1:], ids=key)
def test_readable_in_half_a_second(reader, pair):
    """From opening the file to the first picture, and to the last script's end: the best of five."""
    times = []
    for _ in range(5):
        reader.open(f"{INDEX}#{key(pair)}")
        time.sleep(0.3)
        times.append(
            reader.js("""const [page] = performance.getEntriesByType("navigation");
            const [paint] = performance.getEntriesByName("first-contentful-paint");
            return [paint.startTime, page.loadEventEnd]""")
        )
    best = min(times, key=max)
    print(f"first picture after {best[0]:.0f} ms, all done after {best[1]:.0f} ms")
    assert max(best) < 500


# -------------------------------------------------------------------------------------------------------- screenshots


def screenshots(folder):
    """The pages as they look; readme.png is docs/side_by_side.png."""
    from PIL import Image

    browser = start_browser()
    reader = Reader(browser)
    docs = f"{ROOT.as_uri()}/docs"
    for name, page, width, height, dark in [
        ("readme", "index.html#mnist_ddp..mnist_amp:L44", 1000, 480, False),
        ("wide", "index.html#mnist_ddp..mnist_amp", 1400, 900, False),
        ("wider", "index.html", 1920, 1080, False),
        ("phone", "index.html#mnist_ddp..mnist_amp", 390, 1400, False),
        ("dark", "index.html", 1400, 900, True),
        ("branch", "index.html#mnist_ddp..mnist_apex:L109", 1400, 900, False),
    ]:
        reader.open(f"{docs}/{page}", width, height, dark, scale=2 if name == "readme" else 1)
        if name == "readme":  # the change begins below the headings
            reader.js("""const note = document.querySelector(".here").closest(".change").previousElementSibling;
                const top = document.querySelector(".heads").getBoundingClientRect().bottom;
                scrollBy(0, note.getBoundingClientRect().top - top - 4)""")
        reader.js("document.querySelector('.here')?.classList.remove('here')")
        browser.save_screenshot(str(folder / f"{name}.png"))
        Image.open(folder / f"{name}.png").quantize(256).save(folder / f"{name}.png", optimize=True)
    reader.open()
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"]
    (folder / "printed.pdf").write_bytes(base64.b64decode(pdf))
    browser.quit()
    if shutil.which("pdftoppm"):
        subprocess.run(["pdftoppm", "-r", "80", "-png", "printed.pdf", "printed"], cwd=folder, check=True)


if __name__ == "__main__":
    screenshots(Path(sys.argv[1]))
