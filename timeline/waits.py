"""When the process waits for messages, of what it has noted and the profiler tells."""

from bisect import bisect_left, bisect_right

from timeline.data import Message, Span

NODE = "autograd::engine::evaluate_function"


def ddp_waits(main: list[dict], spans: list[Span], messages: list[Message]) -> list[Span]:
    """DDP waits for its messages in C++, after the last node of a backward.

    There each pause of this thread is one.
    """
    if not any(event["name"] == "DistributedDataParallel.forward" for event in main):
        return []
    begins = [event["begin"] for event in main]
    waits = []
    for span in spans:
        sent = [message for message in messages if span.begin <= message["issued"] < span.end]
        if span.what != "backward" or not sent:
            continue
        arrived = max(message["end"] for message in sent)
        now = span.end
        inside = main[bisect_left(begins, span.begin) : bisect_left(begins, span.end)]
        nodes = [event for event in inside if event["name"].startswith(NODE)]
        if nodes:
            now = max(event["end"] for event in nodes)
        after = [event for event in inside if event["begin"] >= now]
        for event in [*after, {"begin": span.end, "end": span.end}]:
            if now < event["begin"] and now < arrived:
                waits.append(Span("waiting", now, event["begin"]))
            now = max(now, event["end"])
    return waits


def cut_late_ends(messages: list[Message], spans: list[Span], cuts: list[int]) -> None:
    """No message ends later than its step's last wait.

    Gloo's thread notes an end late if the waiting thread goes on first.
    """
    last: dict[int, int] = {}
    for span in spans:
        if span.what == "waiting":
            step = bisect_right(cuts, span.begin)
            last[step] = max(span.end, last.get(step, 0))
    for message in messages:
        latest = last.get(bisect_right(cuts, message["issued"]), 0)
        if message["begin"] < latest:
            message["end"] = min(message["end"], latest)


def end_with_their_waits(messages: list[Message], spans: list[Span]) -> None:
    """A collective that blocks has ended when the wait for it ends, whatever gloo's thread notes.

    That is so for a wait before which one message was issued since the wait before.
    """
    waits = sorted((span for span in spans if span.what == "waiting"), key=lambda span: span.begin)
    by_issue = sorted(messages, key=lambda message: message["issued"])
    issued = [message["issued"] for message in by_issue]
    before = 0
    for wait in waits:
        count = bisect_right(issued, wait.begin)
        if count - before == 1:
            message = by_issue[before]
            message["end"] = min(message["end"], max(wait.end, message["begin"]))
        before = max(before, count)


def losses(spans: list[Span], messages: list[Message]) -> list[Span]:
    """The time between a forward pass and its backward.

    It counts as forward, unless a message goes out there.
    """
    by_end = sorted(spans, key=lambda span: span.end)
    ends = [span.end for span in by_end]
    issued = sorted(message["issued"] for message in messages)
    spans_between = []
    for span in spans:
        place = bisect_right(ends, span.begin)
        if span.what != "backward" or not place:
            continue
        before = by_end[place - 1]
        sends = bisect_left(issued, before.end) < bisect_left(issued, span.begin)
        if before.what == "forward" and not sends:
            spans_between.append(Span("forward", before.end, span.begin))
    return spans_between
