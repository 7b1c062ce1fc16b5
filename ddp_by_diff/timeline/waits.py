"""When the process waits for messages, of what it has noted and the profiler tells."""

import itertools
from bisect import bisect_left, bisect_right

from ddp_by_diff.timeline.data import Message, Noted, Span


def ddp_waits(noted: Noted, messages: list[Message]) -> list[Span]:
    """DDP waits for its messages in C++, when the backward has computed all.

    Each DDP does so between two times that are noted.  Before torch 2.14 there are none, and DDP's
    last call is all that is known of when it has computed all.
    """
    waits = []
    for span in noted.spans:
        sent = [message for message in messages if span.begin <= message.issued < span.end]
        if span.what == "backward" and sent:
            arrived = max(message.end for message in sent)
            ends = [time for time in noted.graph_ends if span.begin <= time < span.end]
            for begin, end in itertools.pairwise(ends or [sent[-1].issued, span.end]):
                if begin < min(end, arrived):
                    waits.append(Span("waiting", begin, min(end, arrived)))
    return waits


def ended(messages: list[Message], spans: list[Span], cuts: list[int]) -> list[Message]:
    """The messages with their ends: gloo's thread notes one late if the waiting thread goes on.

    No message ends later than its step's last wait.  If one message was issued since the wait
    before, a wait is for that one.
    """
    waits = sorted((span for span in spans if span.what == "waiting"), key=lambda span: span.begin)
    last: dict[int, int] = {}
    for wait in waits:
        step = bisect_right(cuts, wait.begin) - 1
        last[step] = max(wait.end, last.get(step, 0))
    issued = [message.issued for message in messages]
    latest = [last.get(message.step, 0) for message in messages]
    before = 0
    for wait in waits:
        count = bisect_right(issued, wait.begin)
        if count - before == 1:
            latest[before] = wait.end
        before = max(before, count)
    true = []
    for message, end in zip(messages, latest, strict=True):
        is_late = message.begin < end < message.end
        true.append(message._replace(end=end) if is_late else message)
    return true


def losses(lane: list[Span], messages: list[Message]) -> list[Span]:
    """The time between a forward pass and its backward.

    It counts as forward, unless a message goes out there.
    """
    issued = sorted(message.issued for message in messages)
    between = []
    for before, after in itertools.pairwise(lane):
        sends = bisect_left(issued, before.end) < bisect_left(issued, after.begin)
        if (before.what, after.what) == ("forward", "backward") and not sends:
            between.append(Span("forward", before.end, after.begin))
    return between
