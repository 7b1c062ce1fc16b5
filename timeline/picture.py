"""Makes a Picture of the recordings: all that is drawn and said, of the shortest step."""

import argparse
import shlex
from pathlib import Path

from timeline import compare
from timeline.data import Picture, Recording, counted
from timeline.say import findings


def picture_of(recordings: list[Recording], args: argparse.Namespace) -> Picture:
    clocks = compare.align_clocks(recordings)
    arrows = compare.match_messages(recordings)
    first = recordings[0]["first"]
    last = min(recording["last"] for recording in recordings)
    number, shown, length = shortest(recordings, first, last, args.steps_shown)
    begins = begins_of(recordings, number, shown)
    ranks = []
    for recording, begin in zip(recordings, begins, strict=True):
        ranks.append(rank_of(compare.earlier(recording, begin), number, shown))
    picture = {
        "command": shlex.join(["python", "-m", "timeline", *args.command]),
        "title": title_of(args.command),
        "setting": f"{counted(len(recordings), 'process')}, {recordings[0]['setting']}",
        "steps": [number, shown],
        "length": length,
        "begin": begins[0],
        "end": max(one["cuts"][-1] for one in ranks),
        "ranks": ranks,
        "arrows": moved_arrows(arrows, begins[0], range(number, number + shown)),
    }
    return picture | {"findings": findings(picture, recordings, first, last, clocks)}


def shortest(
    recordings: list[Recording], first: int, last: int, wanted: int
) -> tuple[int, int, int]:
    """The first step of the shortest window, how many steps it has, and its length."""
    shown = min(wanted, last - first + 1)
    starts = range(first, last + 2 - shown)
    windows = [start for start in starts if start % shown == 0] or [first]
    lengths = {}
    for start in windows:
        lengths[start] = sum(compare.lengths(recordings, start, start + shown - 1))
    number = min(windows, key=lengths.__getitem__)
    return number, shown, lengths[number]


def begins_of(recordings: list[Recording], number: int, shown: int) -> list[int]:
    """Where the picture begins; without messages each rank is drawn from its own begin."""
    begins = [recording["cuts"][number] for recording in recordings]
    for recording in recordings:
        cuts = recording["cuts"]
        if compare.issued_in(recording, cuts[number], cuts[number + shown]):
            return [min(begins)] * len(begins)
    return begins


def title_of(command: list[str]) -> str:
    if command[0] == "-m":
        program, flags = command[1], command[2:]
    else:
        program, flags = Path(command[0]).name, command[1:]
    return shlex.join([program.removesuffix(".py").rpartition(".")[2], *flags])


def rank_of(recording: Recording, number: int, shown: int) -> dict:
    """What is drawn of one rank: so many steps from this one on."""
    cuts = recording["cuts"][number : number + shown + 1]
    begin, end = cuts[0], cuts[-1]
    parts = compare.parts_of(recording["spans"], begin, end)
    messages = compare.issued_in(recording, begin, end)
    waits = compare.waits_for(parts, messages)
    return {
        "rank": recording["rank"],
        "cuts": cuts,
        "parts": parts,
        "waits_for": [[rank, duration] for rank, duration in waits.items() if duration],
        "messages": messages,
        "memory": compare.memory_curve(recording["memory"], begin, end),
        "operations": [span for span in recording["operations"] if begin <= span.begin < end],
    }


def moved_arrows(arrows: list[dict], origin: int, steps: range) -> list[dict]:
    moved = []
    for arrow in arrows:
        if arrow["step"] in steps:
            times = {"begin": arrow["begin"] - origin, "end": arrow["end"] - origin}
            moved.append(arrow | times)
    return moved
