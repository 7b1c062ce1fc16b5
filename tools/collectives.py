"""The generated parts of docs/collectives.md, and its pictures, docs/collectives/NAME.svg.

A picture is drawn from the output that stands on the page: what a rank holds before and after is what the program of
exercises/collectives.py has printed.  tools/build.py calls all of this.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools import svg
from tools.programs import ROOT

PAGE = ROOT / "docs" / "collectives.md"
PICTURES = ROOT / "docs" / "collectives"
PROGRAM = "exercises/collectives.py"

# The names under which torch has it, and those of distributed.py that do the same or nearly so.
NAMES = {
    "broadcast": (["broadcast", "broadcast_object_list"], ["sync_params"]),
    "reduce": (["reduce"], ["reduce"]),
    "all_reduce": (["all_reduce"], ["all_reduce"]),
    "gather": (["gather", "gather_object", "gather_single"], []),
    "all_gather": (["all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"], ["gather"]),
    "scatter": (["scatter", "scatter_object_list"], []),
    "reduce_scatter": (["reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"], []),
    "all_to_all": (["all_to_all", "all_to_all_single"], []),
    "send_recv": (["send", "recv", "isend", "irecv", "batch_isend_irecv"], []),
    "barrier": (["barrier", "monitored_barrier"], ["barrier", "wait_for_everyone"]),
}


# ------------------------------------------------------------------------------------------------- where each is used


def _modules(tree: ast.Module) -> dict[str, str]:
    """The names that the file's imports define, and what they mean: {"dist": "distributed"}."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _named(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
    """(dotted name, the function around it) for everything such as `torch.distributed.reduce` in the tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute):
            yield ast.unparse(child), inside
        is_scope = isinstance(child, ast.FunctionDef | ast.ClassDef)
        yield from _named(child, f"{inside}.{child.name}".lstrip(".") if is_scope else inside)


@functools.cache
def _meant(path: Path) -> list[tuple[str, str]]:
    """(full name, the function around it): `dist.reduce` is distributed.reduce."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules, found = _modules(tree), []
    for name, function in _named(tree, ""):
        first, _, rest = name.partition(".")
        found.append((f"{modules.get(first, first)}.{rest}", function))
    return found


def users(collective: str, ours: bool, root: Path = ROOT) -> dict[str, list[str]]:
    """{file: [functions]} of the scripts, helpers and variants: those that use torch's function, or ours."""
    torchs_names, our_names = NAMES[collective]
    wanted = {f"distributed.{name}" for name in our_names}
    if not ours:
        wanted = {f"torch.distributed.{name}" for name in torchs_names}
    found: dict[str, list[str]] = {}
    for path in [*sorted(root.glob("*.py")), *sorted(root.glob("variants/*.py"))]:
        for name, function in _meant(path):
            if name in wanted:
                functions = found.setdefault(str(path.relative_to(root)), [])
                functions += [function] * (function not in functions)
    return found


def uses(collective: str) -> str:
    """Two items: who calls torch's function, and who calls ours."""

    def listed(found: dict[str, list[str]]) -> str:
        files = (f"[{file}](../{file}) (`{'`, `'.join(functions)}`)" for file, functions in found.items())
        return ", ".join(files) or "none of the scripts"

    lines = [f"- torch's function: {listed(users(collective, ours=False))}"]
    if NAMES[collective][1]:
        functions = " or ".join(f"`dist.{name}`" for name in NAMES[collective][1])
        lines.append(f"- {functions}: {listed(users(collective, ours=True))}")
    return "\n" + "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------- the pictures


class Rank(NamedTuple):
    before: list[int]
    after: list[int] | None  # None: it has no result


def parsed(printed: str) -> list[Rank]:
    """What the program has printed, for each rank."""
    ranks = []
    for before, after in re.findall(r"^rank \d+: \[(.*?)\] -> (.*)$", printed, re.MULTILINE):
        result = None if after == "no result" else [int(number) for number in re.findall(r"\d+", after)]
        ranks.append(Rank([int(number) for number in re.findall(r"\d+", before)], result))
    return ranks


def origins(number: int) -> list[int]:
    """The ranks whose numbers are in it: 20 is rank 1's, 222 the sum of three."""
    return [rank for rank, digit in enumerate(reversed(str(number))) if digit != "0"]


RANKS = ("blue", "amber", "green")
CELL, ROW, TOP = 46, 54, 44
BEFORE, AFTER, WIDTH = 76, 320, 480


def _cells(x: float, y: float, numbers: list[int] | None, nothing: str) -> list[str]:
    """A rank's numbers, in the colour of the rank that they come from."""
    if not numbers:
        return [svg.rect("empty", x, y, 3 * CELL, 34), svg.text(nothing, x + 1.5 * CELL, y + 22, "quiet small")]
    parts = []
    for place, number in enumerate(numbers):
        ranks = origins(number)
        kind = RANKS[ranks[0]] if len(ranks) == 1 else "violet"
        parts.append(svg.rect(kind, x + CELL * place, y, CELL, 34))
        parts.append(svg.text(number, x + CELL * (place + 0.5), y + 22))
    return parts


def described(name: str, ranks: list[Rank]) -> str:
    def told(numbers: list[int] | None) -> str:
        return ", ".join(map(str, numbers)) if numbers else "nothing"

    before = "; ".join(f"rank {number}: {told(rank.before)}" for number, rank in enumerate(ranks))
    after = "; ".join(f"rank {number}: {told(rank.after)}" for number, rank in enumerate(ranks))
    return f"Before {name}: {before}. After it: {after}."


def drawn(name: str, ranks: list[Rank]) -> str:
    """The ranks below each other, before at the left, after at the right, and arrows for who gets whose numbers."""
    if name == "barrier":
        return drawn_barrier(ranks)
    parts = [svg.text("before", BEFORE + 1.5 * CELL, 28, "quiet"), svg.text("after", AFTER + 1.5 * CELL, 28, "quiet")]
    for number, rank in enumerate(ranks):
        y = TOP + ROW * number
        parts.append(svg.text(f"rank {number}", 12, y + 22, "text left"))
        parts += _cells(BEFORE, y, rank.before, "nothing")
        parts += _cells(AFTER, y, rank.after, "no result")
        for source in sorted({origin for value in rank.after or [] for origin in origins(value)}):
            start = BEFORE + CELL * len(ranks[source].before)
            parts.append(svg.arrow(start + 6, TOP + ROW * source + 17, AFTER - 6, y + 17))
    height = TOP + ROW * len(ranks)
    return svg.picture(WIDTH, height, f"{name}: {len(ranks)} ranks before and after", described(name, ranks), parts)


SECOND = 110  # units of the picture


def drawn_barrier(ranks: list[Rank]) -> str:
    """A time axis for each rank: works until it comes, waits until the last has come, goes on."""
    start, end = BEFORE, WIDTH - 16
    zero = start + 60  # the first comes here
    parts = []
    for number, rank in enumerate(ranks):
        y = TOP + ROW * number
        came, left = (zero + SECOND * values[0] for values in (rank.before, rank.after))
        parts.append(svg.text(f"rank {number}", 12, y + 22, "text left"))
        parts.append(svg.rect(RANKS[number], start, y, came - start, 34))
        parts.append(svg.rect(RANKS[number], left, y, end - left, 34))
        parts.append(svg.text("works", (start + min(came, left)) / 2, y + 22))
        parts.append(svg.text("goes on", (left + end) / 2, y + 22))
        if left > came:
            parts.append(svg.rect("empty", came, y + 4, left - came, 26))
            parts.append(svg.text("waits", (came + left) / 2, y + 22, "quiet"))
    last = zero + SECOND * max(rank.after[0] for rank in ranks)
    parts.append(f'<path class="line" d="M{last:g} 36V{TOP + ROW * len(ranks) - 8:g}"/>')
    parts.append(svg.text("the last has come", last, 26, "quiet"))
    told = [f"rank {n} comes after {rank.before[0]} s, goes on after {rank.after[0]} s" for n, rank in enumerate(ranks)]
    height = TOP + ROW * len(ranks)
    return svg.picture(WIDTH, height, "barrier: nobody goes on before the last has come", f"{'; '.join(told)}.", parts)


def pictures(page: str) -> dict[Path, str]:
    """The files' contents, from the text of the page."""
    found = re.findall(r"^\$ python -m exercises\.collectives (\w+)\n((?:rank .*\n)+)", page, re.MULTILINE)
    return {PICTURES / f"{name}.svg": drawn(name, parsed(printed)) for name, printed in found}
