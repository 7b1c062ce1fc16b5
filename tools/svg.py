"""Parts of the pictures in docs/ that this project draws itself: SVG with its own style, for light, dark and print.

A part is named by a class of PALETTE, which has its colours: light ones, and dark ones for a screen whose reader has
asked for them.  On paper it is always the light ones.
"""

from typing import NamedTuple
from xml.sax.saxutils import escape


class Colours(NamedTuple):
    fill: str
    stroke: str = "none"


LIGHT = {
    "paper": Colours("#ffffff"),
    "text": Colours("#1b1f24"),
    "quiet": Colours("#4b535d"),
    "line": Colours("none", "#5b7083"),
    "head": Colours("#5b7083"),
    "empty": Colours("none", "#5b7083"),
    "blue": Colours("#d8e8fb", "#2f6bb3"),
    "amber": Colours("#fde6bd", "#946000"),
    "green": Colours("#d5efd9", "#2e7d3c"),
    "violet": Colours("#ecdff9", "#7a4bb0"),
    "grey": Colours("#eceff2", "#8a949f"),
}
DARK = {
    "paper": Colours("#14171c"),
    "text": Colours("#eef2f6"),
    "quiet": Colours("#b9c2cc"),
    "line": Colours("none", "#9aa9b8"),
    "head": Colours("#9aa9b8"),
    "empty": Colours("none", "#9aa9b8"),
    "blue": Colours("#17385f", "#6aa5ec"),
    "amber": Colours("#523807", "#dba545"),
    "green": Colours("#1a4526", "#6cc07d"),
    "violet": Colours("#43285f", "#b990e6"),
    "grey": Colours("#272d35", "#7d8893"),
}


def _rules(palette: dict[str, Colours]) -> str:
    return "\n".join(f".{name} {{ fill: {c.fill}; stroke: {c.stroke} }}" for name, c in palette.items())


STYLE = f"""text {{ font: 16px Helvetica, Arial, sans-serif; text-anchor: middle }}
.left {{ text-anchor: start }} .small {{ font-size: 15px }} .strong {{ font-weight: bold }}
.line {{ stroke-width: 1.5 }} .empty {{ stroke-dasharray: 4 4 }}
{_rules(LIGHT)}
@media screen and (prefers-color-scheme: dark) {{
{_rules(DARK)}
}}"""


def rect(kind: str, x: float, y: float, width: float, height: float, radius: float = 3) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'


def text(words: object, x: float, y: float, kind: str = "text") -> str:
    """kind: its classes, such as "quiet small left"; without "left" the text's middle is at x."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(str(words))}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path class="line" marker-end="url(#head)" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>'


_HEAD = '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
_HEAD += '<path class="head" d="M0 0 10 5 0 10z"/></marker>'


def picture(width: int, height: int, title: str, description: str, parts: list[str], style: str = "") -> str:
    """The whole file.  style: more rules of CSS."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(description)}</desc>',
        f"<style>\n{STYLE}\n{style}</style>",
        f"<defs>{_HEAD}</defs>",
        rect("paper", 0, 0, width, height, 8),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
