"""Aligns two scripts, line by line: equal lines face each other, a changed line faces its successor.  For pages.py.

A page is a list of parts, from top to bottom.  A part is a list of rows: either equal lines (those far from any change
are one folded row), or a change.
"""

import difflib
import functools
import itertools
import keyword
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

CONTEXT = 3  # equal lines that stay open on each side of a change
FOLD = 4  # fewer equal lines than this are not folded
JOIN = 2  # at most so many equal lines within one change
SIMILAR = 0.4  # lines that share less than this don't face each other


class Row(NamedTuple):
    """Lines of two scripts that stand side by side; one of the ranges may be empty."""

    old: range  # of lines, from 0
    new: range
    kind: str  # "equal", "folded" or "changed"
    marks: Sequence = ((), ())  # if one line faces its successor: the ranges of their changed characters


@functools.cache
def _words(line: str) -> list[str]:
    return re.findall(r"\w+|\s+|.", line)


@functools.cache
def _counted(line: str) -> Counter:
    return Counter(word for word in _words(line) if not word.isspace())


def similarity(before: str, after: str) -> float:
    """The share of characters, from 0 to 1, in words of both lines; 0.2 more if both begin with the same name."""
    common, both = _counted(before) & _counted(after), _counted(before) + _counted(after)
    shared, total = (sum(len(word) * count for word, count in words.items()) for words in (common, both))
    first, successor = (next(filter(str.isidentifier, _words(line)), "") for line in (before, after))
    same_name = first == successor and not keyword.iskeyword(first)
    return (2 * shared / total if total else 0) + (0.2 if first and same_name else 0)


def changed_words(before: str, after: str) -> list[list[list[int]]]:
    """[ranges of characters in `before`, ranges in `after`] that the other line doesn't have."""
    a, b = _words(before), _words(after)
    ranges: list[list[list[int]]] = [[], []]
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for side, words, first, end in (0, a, i, i_end), (1, b, j, j_end):
            start = len("".join(words[:first]))
            stop = start + len("".join(words[first:end]))
            if tag == "equal" or start == stop:
                continue
            if ranges[side] and start - ranges[side][-1][1] <= 1:  # a dot between two changed names: one mark
                ranges[side][-1][1] = stop
            else:
                ranges[side].append([start, stop])
    return ranges


def faced(before: Sequence[str], after: Sequence[str]) -> list:
    """The rows of one change: "-" and "+" face a gap, [ranges, ranges] are two lines that face each other.

    Both sides keep their order.  Among all ways to do that, the one with the greatest sum of similarities.
    """
    score = [[similarity(a, b) for b in after] for a in before]
    best = [[0.0] * (len(after) + 1) for _ in range(len(before) + 1)]
    for i, j in itertools.product(reversed(range(len(before))), reversed(range(len(after)))):
        together = best[i + 1][j + 1] + score[i][j] if score[i][j] >= SIMILAR else 0
        best[i][j] = max(best[i + 1][j], best[i][j + 1], together)
    rows, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        if score[i][j] >= SIMILAR and best[i][j] == best[i + 1][j + 1] + score[i][j]:
            rows.append(changed_words(before[i], after[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            rows.append("-")
            i += 1
        else:
            rows.append("+")
            j += 1
    return rows + ["-"] * (len(before) - i) + ["+"] * (len(after) - j)


def _change(steps: Sequence, i: int, j: int) -> list[Row]:
    """What `faced` says as rows that begin at these lines; lines removed (or added) one after the other share a row."""
    rows = []
    for _, group in itertools.groupby(steps, key=lambda step: step if isinstance(step, str) else id(step)):
        same = list(group)
        old = range(i, i if same[0] == "+" else i + len(same))
        new = range(j, j if same[0] == "-" else j + len(same))
        i, j = old.stop, new.stop
        rows.append(Row(old, new, "changed", ((), ()) if isinstance(same[0], str) else same[0]))
    return rows


def aligned(before: Sequence[str], after: Sequence[str]) -> list[list[Row]]:
    """The page of two scripts.  A change may hold a few equal lines, but begins and ends with changed ones."""
    parts: list[list[Row]] = []
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            parts.append([Row(range(i, i_end), range(j, j_end), "equal")])
            continue
        change = _change(faced(before[i:i_end], after[j:j_end]), i, j)
        if len(parts) > 1 and len(parts[-1][0].old) <= JOIN:
            parts[-2:] = [parts[-2] + parts[-1] + change]
        else:
            parts.append(change)
    for number, part in enumerate(parts):
        if part[0].kind == "equal":
            head = CONTEXT if number > 0 else 0
            tail = CONTEXT if number < len(parts) - 1 else 0
            parts[number] = _folded(part[0], head, tail)
    return parts


def _folded(row: Row, head: int, tail: int) -> list[Row]:
    """Equal lines; all but `head` and `tail` are folded."""
    end = len(row.old) - tail
    if end - head < FOLD:
        return [row]
    cuts = [(0, head, "equal"), (head, end, "folded"), (end, len(row.old), "equal")]
    return [Row(row.old[first:stop], row.new[first:stop], kind) for first, stop, kind in cuts if first < stop]


def counts(parts: list[list[Row]]) -> tuple[int, int]:
    """Lines added and removed."""
    rows = [row for part in parts for row in part if row.kind == "changed"]
    return sum(len(row.new) for row in rows), sum(len(row.old) for row in rows)
