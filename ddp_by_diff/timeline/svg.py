"""Lines of SVG: lanes below each other, on one scale of time."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from ddp_by_diff.timeline.data import Span

LEFT, PLOT, WIDTH = 84, 640, 860  # pixels: where the time begins, how long it is; the whole
COLOURS = {  # on a light page, and on a dark one
    "page": ("#fff", "#0d1117"),
    "ink": ("#1c2128", "#e6edf3"),
    "soft": ("#57606a", "#9aa4af"),
    "forward": ("#9ccbf2", "#7fb5e2"),
    "backward": ("#1f63ac", "#2f74c0"),
    "optimizer": ("#35b58a", "#35b58a"),
    "other": ("#cdd1d6", "#565d66"),
    "hatch": ("#c0322b", "#ff8a80"),
    "message": ("#f0a32a", "#e39a2b"),
    "edge": ("#a86a00", "#f2c572"),
    "weights": ("#3a434d", "#aeb8c2"),
    "state": ("#6fd0ae", "#4fb795"),
    "loading": ("#c9a0dc", "#a97fc0"),
    "evaluation": ("#f2b6c1", "#cf8796"),
}
RULES = """text{font:13px system-ui,sans-serif;fill:$ink}.title{font-weight:600;font-size:15px}
.soft{fill:$soft}.right{text-anchor:end}.middle{text-anchor:middle}.small{font-size:11px}
.light{fill:#fff}.dark{fill:#1c2128}.page{fill:$page}.f{fill:$forward}.b{fill:$backward}
.o{fill:$optimizer}.x{fill:$other}.w{fill:url(#hatch)}.i{fill:url(#idle)}.l{fill:$loading}
.e{fill:$evaluation}
.m{fill:$message}.v{fill:$weights}.s{fill:$state}.queue{fill:$edge}
.stays{fill:$message;fill-opacity:.18;stroke:$edge;stroke-dasharray:2.5 1.5}
.line{stroke:$soft;fill:none}.hatch{stroke:$hatch}.idle{stroke:$page;stroke-width:3}
.arrow{stroke:$edge;stroke-width:1.4;marker-end:url(#head)}
.layer{stroke:$page;stroke-width:.7}.over{stroke:$page;stroke-width:4;paint-order:stroke}"""
DEFINITIONS = """<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse"
patternTransform="rotate(45)"><path class="hatch" d="M0,0v6"/></pattern>
<pattern id="idle" width="5" height="5" patternUnits="userSpaceOnUse"><path class="idle"
d="M0,0v5"/></pattern><marker id="head" class="queue" viewBox="0 0 6 6" refX="5" refY="3"
markerWidth="5" markerHeight="5" orient="auto"><path d="M0,0L6,3L0,6z"/></marker></defs>"""


def style() -> str:
    """The rules: for each colour its plain value, for viewers that know no var(), and the var()."""
    rules = RULES
    light, dark = "", ""
    for name, (on_light, on_dark) in COLOURS.items():
        rules = re.sub(rf"(\w+):\${name}\b", rf"\1:{on_light};\1:var(--{name})", rules)
        light += f"--{name}:{on_light};"
        dark += f"--{name}:{on_dark};"
    dark = f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    return f"<style>\nsvg{{{light}}}\n{dark}\n{rules}\n</style>{DEFINITIONS}"


class Drawing:
    """Lines of SVG, from top to bottom; y is where the next thing is drawn."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.y = 8.0
        self.lines: list[str] = []

    def x(self, time: float) -> float:
        return LEFT + PLOT * time / self.longest

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        self.lines.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{plain(text)}</text>')

    def row(self, name: str, value: str, y: float) -> None:
        """The name of a lane, and at its other end a figure."""
        self.text(12, y, name, "soft")
        self.text(WIDTH - 12, y, value, "right soft")

    def path(self, style: str, path: str) -> None:
        self.lines.append(f'<path class="{style}" d="{path}"/>')

    def boxes(
        self, style: str, boxes: Iterable[tuple[float, float]], top: float, height: float
    ) -> None:
        """Rectangles of one style in a row, each from left to right."""
        path = ""
        for left, right in boxes:
            width = max(right - left, 0.4)
            path += f"M{left:.1f},{top:.1f}h{width:.1f}v{height}h-{width:.1f}z"
        if path:
            self.path(style, path)

    def mostly(self, spans: Iterable[Span]) -> list[tuple[float, float]]:
        """From left to right, the pixels that these spans fill by half or more."""
        shares: Counter = Counter()
        for span in spans:
            left, right = self.x(span.begin), self.x(span.end)
            for pixel in range(int(left), int(right) + 1):
                shares[pixel] += max(0.0, min(right, pixel + 1) - max(left, pixel))
        boxes: list[tuple[float, float]] = []
        for pixel in sorted(pixel for pixel in shares if shares[pixel] >= 0.5):
            begin = boxes.pop()[0] if boxes and boxes[-1][1] == pixel else pixel
            boxes.append((begin, pixel + 1))
        return boxes

    def axis(self) -> None:
        """Of time, with at most eight round numbers."""
        step = 1000
        while self.longest / step > 7:  # 1, 2, 5, 10, 20, 50, ...
            step = step * 5 // 2 if str(step).startswith("2") else step * 2
        self.y += 10
        marks = range(0, self.longest + 1, step)
        ticks = "".join(f"M{self.x(mark):.1f},{self.y}v5" for mark in marks)
        self.path("line", f"M{LEFT},{self.y}h{PLOT}{ticks}")
        for mark in marks:
            text = f"{mark / 1e6:g} ms" if mark else "0"
            self.text(self.x(mark), self.y + 18, text, "middle")
        self.y += 26

    def areas(
        self, times: Sequence[float], layers: dict[str, Sequence[float]], most: float, height: float
    ) -> None:
        """Areas on top of each other, from y upwards; `most` is drawn so high.

        layers: for each style a value from each time on.
        """
        points = self.points(times, layers)
        begin, end = points[0][0], self.x(times[-1])
        for level, style in reversed([*enumerate(layers)]):
            if not any(layers[style]):
                continue
            path = ""
            for x, sums in points:
                path += f"H{x:.1f}V{self.y - height * sums[level] / most:.1f}"
            self.path(style, f"M{begin:.1f},{self.y:.1f}{path}H{end:.1f}V{self.y:.1f}z")
        self.path("line", f"M{begin:.1f},{self.y:.1f}H{end:.1f}")

    def points(
        self, times: Sequence[float], layers: dict[str, Sequence[float]]
    ) -> list[tuple[float, list[float]]]:
        """x, and the height of each layer's upper edge.

        Of the changes within two pixels the largest is drawn.
        """
        points: list[tuple[float, list[float]]] = []
        for when, *values in zip(times, *layers.values(), strict=True):
            x, sums = self.x(when), list(itertools.accumulate(values))
            if points and x - points[-1][0] < 2:
                old_x, old_sums = points[-1]
                points[-1] = (old_x, max(old_sums, sums, key=lambda sums: sums[-1]))
            elif not points or sums != points[-1][1]:
                points.append((x, sums))
        return points

    def svg(self, title: str, description: str) -> str:
        """The whole file."""
        width, height = WIDTH, round(self.y + 10)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}"',
            f'role="img" aria-labelledby="title told"><title id="title">{plain(title)}</title>',
            f'<desc id="told">{plain(description)}</desc>{style()}',
            f'<path class="page" d="M0,0h{width}v{height}h-{width}z"/>',
        ]
        return "\n".join([*lines, *self.lines, "</svg>\n"])


def plain(text: str) -> str:
    """As XML can hold it: without control characters and lone surrogates."""
    return escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "?", text))


def text_width(text: str, size: int = 13) -> float:
    return 0.6 * size * len(text)
