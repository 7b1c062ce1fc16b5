"""When the process waits for messages, of what it has noted and the profiler tells."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from timeline.data import Call, Message, Span

NODE = "autograd::engine::evaluate_function"


def ddp_waits(main: list[dict], spans: list[Span], ran: Sequence[tuple[Call, Span]]) -> list[Span]:
    """DDP waits for its messages in C++, after the last node of a backward.

    There each pause of this thread is one.
    """
    if not any(event["name"] == "DistributedDataParallel.forward" for event in main):
        return []
    begins = [event["begin"] for event in main]
    waits = []
    for span in spans:
        sent = [run for call, run in ran if span.begin <= call.issued < span.end]
        if span.what != "backward" or not sent:
            continue
        arrived = max(run.end for run in sent)
        inside = main[bisect_left(begins, span.begin) : bisect_left(begins, span.end)]
        nodes = [event for event in inside if event["name"].startswith(NODE)]
        now = max((event["end"] for event in nodes), default=span.end)
        after = [event for event in inside if event["begin"] >= now]
        for event in [*after, {"begin": span.end, "end": span.end}]:
            if now < event["begin"] and now < arrived:
                waits.append(Span("waiting", now, event["begin"]))
            now = max(now, event["end"])
    return waits


def ends_of(ran: list[tuple[Call, Span]], spans: list[Span], cuts: list[int]) -> list[int]:
    """When each message has ended.  Gloo's thread notes it late if the waiting thread goes on.

    No message ends later than its step's last wait.  If one message was issued since the wait
    before, a wait is for that one.
    """
    waits = sorted((span for span in spans if span.what == "waiting"), key=lambda span: span.begin)
    last: dict[int, int] = {}
    for wait in waits:
        step = bisect_right(cuts, wait.begin)
        last[step] = max(wait.end, last.get(step, 0))
    issued = [call.issued for call, _ in ran]
    latest = [last.get(bisect_right(cuts, when), 0) for when in issued]
    before = 0
    for wait in waits:
        count = bisect_right(issued, wait.begin)
        if count - before == 1:
            latest[before] = wait.end
        before = max(before, count)
    pairs = zip((run for _, run in ran), latest, strict=True)
    return [min(run.end, end) if run.begin < end else run.end for run, end in pairs]


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
