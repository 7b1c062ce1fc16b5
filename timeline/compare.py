"""Brings the recordings together: one clock, which messages belong together, who came last."""

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from timeline.data import Message, Recording, ms

TIMES = ("issued", "begin", "until", "end")  # of a message
END_TOGETHER = ("allreduce", "allgather", "barrier")  # on all ranks at the same time


def earlier_times(times: Any, by: int) -> Any:
    """Of a message or an arrow."""
    return times | {key: times[key] - by for key in TIMES if key in times}


def earlier(recording: Recording, by: int) -> Recording:
    """The same, with all times `by` nanoseconds earlier."""
    blocks = []
    for block in recording["memory"]:
        blocks.append(replace(block, born=block.born - by, freed=block.freed - by))
    return recording | {
        "cuts": [cut - by for cut in recording["cuts"]],
        "lane": [span.earlier(by) for span in recording["lane"]],
        "idle": [span.earlier(by) for span in recording["idle"]],
        "memory": blocks,
        "messages": [earlier_times(message, by) for message in recording["messages"]],
        "trace": [event | {"begin": event["begin"] - by} for event in recording["trace"]],
    }


def numbered(recording: Recording) -> dict[tuple, Message]:
    """A rank's messages by what is the same on all ranks that take part.

    That is the number in its group, if torch tells it; else it is the k-th of its kind in a step.
    """
    counts: Counter = Counter()
    messages = {}
    for message in recording["messages"]:
        kind, group, number = message["kind"], message["group"], message["number"]
        key: tuple = (kind, group, message["step"] if number is None else f"number {number}")
        if message["peer"] is not None:
            pair = (recording["rank"], message["peer"])
            source, target = pair if kind == "send" else reversed(pair)
            key = ("sent", group, message["step"], source, target)
        messages[(*key, counts[key, kind], kind)] = message
        counts[key, kind] += 1
    return messages


def align_clocks(recordings: list[Recording]) -> str:
    """Give all ranks one time; between machines all-reduces tell it.  Returns what was done."""
    said = []
    first, *others = recordings
    its_ends = ends_of(first)
    for recording in others:
        if recording["machine"] == first["machine"]:
            continue
        rank, ends = recording["rank"], ends_of(recording)
        differences = sorted(ends[key] - its_ends[key] for key in ends if key in its_ends)
        if not differences:
            said.append(f"rank {rank} is on another machine, and its clock could not be compared")
            continue
        shift = differences[len(differences) // 2]
        quarter = len(differences) // 4
        uncertain = max(differences[-1 - quarter] - shift, shift - differences[quarter])
        than = "ahead of" if shift > 0 else "behind"
        said.append(
            f"rank {rank}'s clock was {ms(abs(shift))} ms {than} rank {first['rank']}'s, "
            f"give or take {ms(uncertain, 2)} ms"
        )
        recording.update(earlier(recording, shift))
    return "; ".join(said)


def was_seen(message: Message) -> bool:
    """Whether it is known when the message ran."""
    return message["begin"] < message["end"]


def ends_of(recording: Recording) -> dict[tuple, int]:
    ends = {}
    for key, message in numbered(recording).items():
        if key[0] in END_TOGETHER and was_seen(message):
            ends[key] = message["end"]
    return ends


def match_messages(recordings: list[Recording]) -> list[dict]:
    """Note in each message until when it waited, and for the rank that came `last`.

    Returns the arrows: from a send to the end of the wait for it.
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
            _, _, step, source, target, _ = key
            begin, receive = messages[source]["issued"], messages[target]
            arrival = max(receive["begin"], begin)
            receive |= {"until": min(arrival, receive["end"]), "last": source}
            times = {"begin": begin, "end": receive["end"]}
            arrows.append({"step": step, "from": source, "to": target, **times})
    return arrows
