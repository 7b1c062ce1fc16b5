"""Aligns two scripts, line by line: equal lines face each other, a changed line faces its successor.  For pages.py.

    aligned(before, after)    # [3, "20", 3, [[[[4, 9]], [[4, 12]]], "+"], 5]

says, from top to bottom: three equal lines, twenty more that the page folds, another three, then a change, in which a
line faces its successor (with the ranges of their changed characters) and one is added, then five equal lines.
"""

import difflib
import functools
import itertools
import keyword
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

CONTEXT = 3  # equal lines that stay open on each side of a change
FOLD = 4  # fewer equal lines than this are not folded
JOIN = 2  # at most so many equal lines within one change
SIMILAR = 0.4  # lines that share less than this don't face each other


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


def aligned(before: Sequence[str], after: Sequence[str]) -> list:
    """The page of two scripts, from top to bottom: 3 = three equal lines, "3" = the same, folded, [...] = a change.

    A change holds the rows of `faced`, and numbers of equal lines between them.
    """
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    stretches: list = []
    for tag, i, i_end, j, j_end in codes:
        if tag == "equal":
            stretches.append(i_end - i)
            continue
        rows = faced(before[i:i_end], after[j:j_end])
        if len(stretches) > 1 and stretches[-1] <= JOIN:
            stretches[-2:] = [[*stretches[-2], stretches[-1], *rows]]
        else:
            stretches.append(rows)
    return [part for number, stretch in enumerate(stretches) for part in _folded(stretch, number, len(stretches))]


def _folded(stretch: Any, number: int, count: int) -> list:
    if isinstance(stretch, list):
        return [stretch]
    head = CONTEXT if number else 0
    tail = CONTEXT if number < count - 1 else 0
    hidden = stretch - head - tail
    parts = [head, str(hidden), tail] if hidden >= FOLD else [stretch]
    return [part for part in parts if part]


def counts(pair: list) -> tuple[int, int]:
    """Lines added and removed."""
    rows = [row for part in pair if isinstance(part, list) for row in part if not isinstance(row, int)]
    facing = sum(isinstance(row, list) for row in rows)
    return rows.count("+") + facing, rows.count("-") + facing
