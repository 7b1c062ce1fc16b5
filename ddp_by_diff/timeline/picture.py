"""Makes a Picture of the recordings: all that is drawn and said, of a step that is worth a look."""

import argparse
import re
import shlex
from collections import Counter
from itertools import chain

from ddp_by_diff.instruments.command import started_as
from ddp_by_diff.timeline.compare import earlier
from ddp_by_diff.timeline.data import Picture, Recording, counted
from ddp_by_diff.timeline.figures import figures_of
from ddp_by_diff.timeline.say import findings
from ddp_by_diff.timeline.steps import Table, memory_curve, step_of, table_of
from ddp_by_diff.timeline.why import Reason, steps_named, why


def picture_of(recordings: list[Recording], args: argparse.Namespace) -> tuple[Picture, dict]:
    """The picture, and the figures for --json."""
    table = table_of(recordings)
    reasons = why(table)
    number, shown = step_to_draw(table, args.steps_shown, reasons)
    place = number - table.first
    origin = min(steps[place].begin for steps in table.ranks.values())
    moved = [earlier(recording, origin) for recording in table.recordings]
    numbers = range(number, number + shown)
    arrows = []
    for arrow in table.arrows:
        if arrow["step"] in numbers:
            times = {key: arrow[key] - origin for key in ("begin", "end")}
            arrows.append(arrow | times)
    ranks = [rank_of(recording, numbers) for recording in moved]
    picture = {
        "command": f"{started_as('timeline')} {shlex.join(args.command)}",
        "title": title_of(args.command),
        "setting": f"{counted(len(recordings), 'process')}, {recordings[0]['setting']}",
        "steps": [number, shown],
        "length": max(rank["cuts"][-1] - rank["cuts"][0] for rank in ranks),
        "end": max(rank["cuts"][-1] for rank in ranks),
        "ranks": ranks,
        "arrows": arrows,
    }
    lines = findings(picture, recordings, table, reasons)
    figures = figures_of(args.command, recordings, table, reasons, lines)
    return picture | {"findings": lines}, figures


def step_to_draw(table: Table, wanted: int, reasons: list[Reason]) -> tuple[int, int]:
    """The first step of the usual window, and how many steps it has.

    Usual is what is nearest to the median; of those that have what a reason says of some steps.
    A window is as long as it is drawn: until the last rank ends, since the first one began.
    """
    count = len(table.lengths)
    shown = min(wanted, count)
    places = range(0, count + 1 - shown, shown)
    named = {number - table.first for number in steps_named(reasons)}
    some = [place for place in places if named.intersection(range(place, place + shown))]
    lengths = {}
    for place in places:
        begin = min(steps[place].begin for steps in table.ranks.values())
        lengths[place] = max(steps[place + shown - 1].end for steps in table.ranks.values()) - begin
    by_length = sorted(some or places, key=lengths.__getitem__)
    return table.first + by_length[(len(by_length) - 1) // 2], shown


def title_of(command: list[str]) -> str:
    program, *flags = command[1:] if command[0] == "-m" else command
    name = re.split(r"[/.]", program.removesuffix(".py"))[-1]
    return shlex.join([name, *flags])


def rank_of(recording: Recording, numbers: range) -> dict:
    """What is drawn of one rank's steps."""
    steps = [step_of(recording, number) for number in numbers]
    begin, end = steps[0].begin, steps[-1].end
    waits = sum((step.waits_for for step in steps), Counter())
    trace = recording["trace"]
    return {
        "rank": recording["rank"],
        "cuts": [begin, *(step.end for step in steps)],
        "parts": [*chain(*(step.parts for step in steps))],
        "idle": [*chain(*(step.idle for step in steps))],
        "messages": [*chain(*(step.messages for step in steps))],
        "memory": memory_curve(recording["memory"], begin, end),
        "reserved": recording["reserved"],
        "waits_for": sorted(waits.items(), key=lambda item: (item[0] is None, item[0])),
        "trace": [one for one in trace if one["ph"] == "M" or begin <= one["begin"] < end],
    }
