"""Compares the recordings: one clock, which messages belong together, who waited for whom."""

import itertools
from bisect import bisect_right
from collections import Counter, defaultdict

from timeline.data import KINDS, Allocation, Message, Recording, Span, ms

TIMES = ("issued", "begin", "until", "end")  # of a message
END_TOGETHER = ("allreduce", "allgather", "barrier")  # on all ranks at the same time


def earlier(recording: Recording, by: int) -> Recording:
    """The same, with all times `by` nanoseconds earlier."""
    messages = []
    for message in recording["messages"]:
        moved = {key: message[key] - by for key in TIMES if key in message}
        messages.append(message | moved)
    return recording | {
        "cuts": [cut - by for cut in recording["cuts"]],
        "spans": [span.earlier(by) for span in recording["spans"]],
        "operations": [span.earlier(by) for span in recording["operations"]],
        "memory": [allocation.earlier(by) for allocation in recording["memory"]],
        "messages": messages,
    }


def lengths(recordings: list[Recording], first: int, last: int) -> list[int]:
    """How long each step from the first to the last took, on the rank where it took longest."""
    found = []
    for step in range(first, last + 1):
        cuts = [recording["cuts"] for recording in recordings]
        found.append(max(cut[step + 1] - cut[step] for cut in cuts))
    return found


# ----------------------------------------------------------------------------- the ranks together


def common_names(tables: list[dict]) -> list[str]:
    common = set(tables[0]).intersection(*tables)
    return [name for name in tables[0] if name in common]


def first_difference(tables: list[dict[str, str]]) -> str | None:
    """The first name that is in all tables, and not with the same digest."""
    for name in tables[0]:
        if all(name in table for table in tables) and is_different(tables, name):
            return name
    return None


def is_different(tables: list[dict[str, str]], name: str) -> bool:
    return len({table[name] for table in tables}) > 1


def largest_difference(recordings: list[Recording], name: str) -> float | None:
    """How far the ranks' tensors of this name are apart; None: not known."""
    values = [recording["values"].get(name) for recording in recordings]
    if any(value is None or value.shape != values[0].shape for value in values):
        return None
    gaps = [(value.double() - values[0].double()).abs().max().item() for value in values]
    return max(gaps)


def numbered(recording: Recording) -> dict[tuple, Message]:
    """A rank's messages by what is the same on all ranks that take part.

    That is the k-th of its kind and group in a step.
    """
    counts: Counter = Counter()
    found = {}
    for message in recording["messages"]:
        kind = message["kind"]
        step = bisect_right(recording["cuts"], message["issued"]) - 1
        key: tuple = (kind, message["group"], step)
        if message["peer"] is not None:
            pair = (recording["rank"], message["peer"])
            source, target = pair if kind == "send" else reversed(pair)
            key = ("sent", message["group"], step, source, target)
        found[(*key, counts[key, kind], kind)] = message
        counts[key, kind] += 1
    return found


def align_clocks(recordings: list[Recording]) -> str:
    """Give all ranks one time; between machines all-reduces tell it.  Returns what was done."""
    said = []
    ends = [ends_of(recording) for recording in recordings]
    for place, other in enumerate(recordings):
        rank = other["rank"]
        if other["machine"] == recordings[0]["machine"]:
            continue
        common = [key for key in ends[0] if key in ends[place]]
        differences = sorted(ends[place][key] - ends[0][key] for key in common)
        if not differences:
            said.append(f"rank {rank} is on another machine, and its clock could not be compared")
            continue
        shift = differences[len(differences) // 2]
        quarter = len(differences) // 4
        uncertain = max(differences[-1 - quarter] - shift, shift - differences[quarter])
        than = "ahead of" if shift > 0 else "behind"
        said.append(
            f"rank {rank}'s clock was {ms(abs(shift))} ms {than} rank {recordings[0]['rank']}'s, "
            f"give or take {ms(uncertain, 2)} ms"
        )
        other.update(earlier(other, shift))
    return "; ".join(said)


def ends_of(recording: Recording) -> dict[tuple, int]:
    ends = {}
    for key, message in numbered(recording).items():
        if key[0] in END_TOGETHER:
            ends[key] = message["end"]
    return ends


def match_messages(recordings: list[Recording]) -> list[dict]:
    """Note in each message until when it waited, and for the rank that came `last`.

    Returns the arrows.
    """
    together: dict[tuple, dict] = defaultdict(dict)
    for recording in recordings:
        for key, message in numbered(recording).items():
            message |= {"until": message["begin"], "last": recording["rank"]}
            together[key[:-1]][recording["rank"]] = message
    arrows = []
    for key, messages in together.items():
        if key[0] != "sent":
            last = max(messages, key=lambda rank: messages[rank]["begin"])
            begin = messages[last]["begin"]
            for message in messages.values():
                message |= {"until": min(begin, message["end"]), "last": last}
        elif len(messages) == 2:
            arrows.append(arrow_of(key, messages))
    return arrows


def arrow_of(key: tuple, messages: dict[int, Message]) -> dict:
    """An arrow from a send to the end of the wait for it."""
    _, _, step, source, target, _ = key
    begin = messages[source]["issued"]
    receive = messages[target]
    arrival = max(receive["begin"], begin)
    receive |= {"until": min(arrival, receive["end"]), "last": source}
    return {"step": step, "from": source, "to": target, "begin": begin, "end": receive["end"]}


# -------------------------------------------------------------------------- from a begin to an end


def issued_in(recording: Recording, begin: int, end: int) -> list[Message]:
    return [message for message in recording["messages"] if begin <= message["issued"] < end]


def parts_of(spans: list[Span], begin: int, end: int) -> list[Span]:
    """The time without a gap: what the innermost span says, else "other"."""
    spans = [span for span in spans if span.begin < end and begin < span.end]
    spans.sort(key=lambda span: (span.begin, -span.end))
    borders = {begin, end}
    for span in spans:
        borders |= {time for time in (span.begin, span.end) if begin < time < end}
    parts: list[Span] = []
    for left, right in itertools.pairwise(sorted(borders)):
        what = "other"
        for span in spans:
            if span.begin <= left and right <= span.end:
                what = span.what
        what = {"wait": "waiting", "data": "loading"}.get(what, what)
        if parts and parts[-1].what == what:
            left = parts.pop().begin
        parts.append(Span(what, left, right))
    return parts


def waits_for(parts: list[Span], messages: list[Message]) -> Counter:
    """How long the rank waited for each other rank.

    None: for no rank, as bytes moved or a queue was full.
    """
    found: Counter = Counter()
    by_begin = sorted(messages, key=lambda message: message["begin"])
    for part in parts:
        if part.what != "waiting":
            continue
        now = part.begin
        remaining = part.end - part.begin
        for message in by_begin:
            left, right = max(now, message["begin"]), min(part.end, message["until"])
            if left < right:
                found[message["last"]] += right - left
                remaining -= right - left
                now = right
        found[None] += remaining
    return found


def memory_curve(allocations: list[Allocation], begin: int, end: int) -> dict[str, list[int]]:
    """The "times" of its changes, and the bytes of each of KINDS from then on."""
    changes: dict[float, Counter] = {begin: Counter(), end: Counter()}
    for one in allocations:
        if one.born < end and begin < one.freed:
            changes.setdefault(max(one.born, begin), Counter())[one.kind] += one.bytes
            if one.freed < end:
                changes.setdefault(one.freed, Counter())[one.kind] -= one.bytes
    times = sorted(changes)
    curve = {"times": times}
    for kind in KINDS:
        curve[kind] = list(itertools.accumulate(changes[time][kind] for time in times))
    return curve
