"""Lanes: spans in the order of time that don't overlap.  All is linear in their number."""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from ddp_by_diff.timeline.data import Span


def flat(spans: Iterable[Span]) -> list[Span]:
    """The lane of spans that may overlap: at each time what began last."""
    lane: list[Span] = []
    still: list[Span] = []  # have begun; the last one is on top
    now = 0
    at_last = Span("", sys.maxsize, sys.maxsize)
    for span in [*sorted(spans, key=lambda span: (span.begin, -span.end)), at_last]:
        while still and now < span.begin:
            top = still[-1]
            end = min(top.end, span.begin)
            if max(now, top.begin) < end:
                lane.append(Span(top.what, max(now, top.begin), end))
            now = end
            if top.end <= span.begin:
                still.pop()
        still.append(span)
    return lane


def beneath(lane: list[Span], under: list[Span]) -> list[Span]:
    """What of the lane `under` is seen in the gaps of the other one."""
    seen = []
    place = 0
    for span in under:
        now = span.begin
        while place < len(lane) and lane[place].end <= now:
            place += 1
        over = place
        while over < len(lane) and lane[over].begin < span.end:
            if now < lane[over].begin:
                seen.append(Span(span.what, now, lane[over].begin))
            now = max(now, lane[over].end)
            over += 1
        if now < span.end:
            seen.append(Span(span.what, now, span.end))
    return seen


def filled(lane: list[Span], under: list[Span]) -> list[Span]:
    """The lane, with what lies beneath its gaps.  Neighbours that do the same become one."""
    wider: list[Span] = []
    for span in sorted([*lane, *beneath(lane, under)], key=lambda span: span.begin):
        if wider and wider[-1].what == span.what and wider[-1].end == span.begin:
            wider[-1] = Span(span.what, wider[-1].begin, span.end)
        else:
            wider.append(span)
    return wider


def inside(lane: list[Span], begin: int, end: int) -> list[Span]:
    """The lane from a begin to an end."""
    first = bisect_right(lane, begin, key=lambda span: span.end)
    last = bisect_left(lane, end, key=lambda span: span.begin)
    spans = []
    for span in lane[first:last]:
        spans.append(Span(span.what, max(span.begin, begin), min(span.end, end)))
    return spans


def parts_of(lane: list[Span], begin: int, end: int) -> list[Span]:
    """The time from a begin to an end, without a gap: what nothing tells is other."""
    return filled(inside(lane, begin, end), [Span("other", begin, end)])


def what_at(lane: list[Span], time: int) -> str:
    place = bisect_right(lane, time, key=lambda span: span.begin)
    return lane[place - 1].what if place and time < lane[place - 1].end else "other"
