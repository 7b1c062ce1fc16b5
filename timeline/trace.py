"""The Picture as JSON, in Chrome's trace format for Perfetto; and back, for --draw."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from timeline.data import COLLECTIVES, KINDS, Message, Picture, Span


class Trace:
    """The events: a process for each rank, with threads."""

    def __init__(self) -> None:
        self.events: list[dict] = []

    def process(self, rank: int) -> None:
        name = {"name": f"rank {rank}"}
        self.events.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})

    def thread(self, rank: int, number: int, name: str, spans: Iterable[Span], **args: Any) -> None:
        place = {"pid": rank, "tid": number}
        self.events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        for span in spans:
            times = {"ts": span.begin / 1000, "dur": (span.end - span.begin) / 1000}
            event = {"ph": "X", "cat": name, "name": span.what, **place, **times, "args": args}
            self.events.append(event)

    def messages(self, rank: int, messages: list[Message]) -> None:
        """A thread for each row of messages, as those of one thread may not overlap."""
        row_ends: list[int] = []
        for message in messages:
            free = [row for row, end in enumerate(row_ends) if end <= message["issued"]]
            row = free[0] if free else len(row_ends)
            row_ends[row : row + 1] = [message["end"]]
            name = COLLECTIVES.get(message["kind"], message["kind"])
            spans = [
                Span("queue", message["issued"], message["begin"]),
                Span(f"{name} waits", message["begin"], message["until"]),
                Span(name, message["until"], message["end"]),
            ]
            spans = [span for span in spans if span.begin < span.end]
            self.thread(rank, 10 + row, f"messages {row + 1}", spans, bytes=message["bytes"])

    def memory(self, rank: int, memory: dict) -> None:
        for place, when in enumerate(memory["times"]):
            args = {kind: memory[kind][place] for kind in KINDS}
            event = {"ph": "C", "name": "memory", "pid": rank, "ts": when / 1000, "args": args}
            self.events.append(event)

    def arrow(self, number: int, arrow: dict) -> None:
        event = {"cat": "message", "name": "message", "id": number, "tid": 1, "bp": "e"}
        start = {"ph": "s", "pid": arrow["from"], "ts": arrow["begin"] / 1000}
        finish = {"ph": "f", "pid": arrow["to"], "ts": arrow["end"] / 1000}
        self.events += [event | start, event | finish]


def trace_of(picture: Picture) -> dict:
    """The events, and the picture itself."""
    trace = Trace()
    kept = []
    for one in picture["ranks"]:
        rank = one["rank"]
        trace.process(rank)
        trace.thread(rank, 1, "what it does", one["parts"])
        trace.thread(rank, 2, "torch's operations", one["operations"])
        trace.messages(rank, one["messages"])
        trace.memory(rank, one["memory"])
        kept.append({key: value for key, value in one.items() if key != "operations"})
    for number, arrow in enumerate(picture["arrows"]):
        trace.arrow(number, arrow)
    picture = picture | {"ranks": kept}
    return {"traceEvents": trace.events, "displayTimeUnit": "ms", "timeline": picture}


def read_picture(file: str) -> Picture:
    """What `trace_of` has saved; ValueError, KeyError, TypeError or OSError if it is none."""
    picture = json.loads(Path(file).read_text(encoding="utf-8"))["timeline"]
    for one in picture["ranks"]:
        one["parts"] = [Span(*part) for part in one["parts"]]
        for kind in KINDS:
            one["memory"][kind]  # a recording of another version has no such key
    return picture
