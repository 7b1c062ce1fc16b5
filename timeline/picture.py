"""Makes a Picture of the recordings: all that is drawn and said, of a step that is worth a look."""

import argparse
import shlex
from collections import Counter
from pathlib import Path

from timeline.compare import earlier_message
from timeline.data import Picture, Recording, counted
from timeline.say import findings
from timeline.steps import Step, Table, memory_curve, table_of
from timeline.why import Reason, why


def picture_of(recordings: list[Recording], args: argparse.Namespace) -> Picture:
    table = table_of(recordings)
    reason = why(table, all(recording["has_workers"] for recording in recordings))
    number, shown = step_to_draw(table, args.steps_shown, reason)
    drawn = slice(number - table.first, number - table.first + shown)
    windows = {rank: steps[drawn] for rank, steps in table.ranks.items()}
    begins = begins_of(windows)
    ranks = []
    for recording in recordings:
        rank = recording["rank"]
        ranks.append(rank_of(recording, windows[rank], begins[rank]))
    picture = {
        "command": shlex.join(["python", "-m", "timeline", *args.command]),
        "title": title_of(args.command),
        "setting": f"{counted(len(recordings), 'process')}, {recordings[0]['setting']}",
        "steps": [number, shown],
        "length": sum(table.lengths[drawn]),
        "begin": begins[ranks[0]["rank"]],
        "end": max(rank["cuts"][-1] for rank in ranks),
        "ranks": ranks,
        "arrows": moved_arrows(table, min(begins.values()), range(number, number + shown)),
    }
    return picture | {"findings": findings(picture, recordings, table, reason)}


def step_to_draw(table: Table, wanted: int, reason: Reason) -> tuple[int, int]:
    """The first step of the usual window, and how many steps it has.

    Usual is what is nearest to the median; of those that have what the reason says.
    """
    count = len(table.lengths)
    shown = min(wanted, count)
    places = [place for place in range(0, count + 1 - shown, shown)]
    named = {number - table.first for number in reason.steps}
    some = [place for place in places if named.intersection(range(place, place + shown))]
    places = some or places
    lengths = {place: sum(table.lengths[place : place + shown]) for place in places}
    by_length = sorted(places, key=lengths.__getitem__)
    return table.first + by_length[(len(by_length) - 1) // 2], shown


def begins_of(windows: dict[int, list[Step]]) -> dict[int, int]:
    """Where the picture begins; without messages each rank is drawn from its own begin."""
    begins = {rank: steps[0].begin for rank, steps in windows.items()}
    for steps in windows.values():
        if any(step.messages for step in steps):
            return dict.fromkeys(begins, min(begins.values()))
    return begins


def title_of(command: list[str]) -> str:
    if command[0] == "-m":
        program, flags = command[1], command[2:]
    else:
        program, flags = Path(command[0]).name, command[1:]
    return shlex.join([program.removesuffix(".py").rpartition(".")[2], *flags])


def rank_of(recording: Recording, steps: list[Step], origin: int) -> dict:
    """What is drawn of one rank's steps, from this time on."""
    begin, end = steps[0].begin, steps[-1].end
    drawn: dict = {"rank": recording["rank"], "cuts": [begin - origin], "waits_for": []}
    drawn |= {"parts": [], "idle": [], "messages": [], "trace": []}
    waits: Counter = Counter()
    for step in steps:
        drawn["cuts"].append(step.end - origin)
        drawn["parts"] += [part.earlier(origin) for part in step.parts]
        drawn["idle"] += [pause.earlier(origin) for pause in step.idle]
        drawn["messages"] += [earlier_message(message, origin) for message in step.messages]
        waits += step.waits_for
    drawn["waits_for"] = [[rank, duration] for rank, duration in waits.items() if duration]
    drawn["memory"] = memory_curve(recording["memory"], begin, end)
    drawn["memory"]["times"] = [time + begin - origin for time in drawn["memory"]["times"]]
    for event in recording["trace"]:
        if event["ph"] == "M" or begin <= event["begin"] < end:
            drawn["trace"].append(event | {"begin": event["begin"] - origin})
    return drawn


def moved_arrows(table: Table, origin: int, steps: range) -> list[dict]:
    moved = []
    for arrow in table.arrows:
        if arrow["step"] in steps:
            times = {"begin": arrow["begin"] - origin, "end": arrow["end"] - origin}
            moved.append(arrow | times)
    return moved
