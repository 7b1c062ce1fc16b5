"""Where kernels run on a GPU: a lane shows when they run, not when the process launches them."""

import itertools
from bisect import bisect_left, bisect_right

from timeline.data import Message, Span

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events
GPU_GAP = 20_000  # ns: a shorter pause between two kernels of one phase is not drawn


def gpu_work(events: list[dict]) -> list[dict]:
    """Kernels and copies in the order of their launches, which CUDA numbers.

    Each has the time when it was `launched`.
    """
    numbered = [event for event in events if "correlation" in event.get("args", {})]
    launches = {}
    for event in numbered:
        if event["cat"] not in GPU_WORK:
            launches[event["args"]["correlation"]] = event["begin"]
    work = [event for event in numbered if event["cat"] in GPU_WORK]
    for event in work:
        event["launched"] = launches.get(event["args"]["correlation"], event["begin"])
    return sorted(work, key=lambda event: event["launched"])


def is_nccl(event: dict) -> bool:
    return event["name"].startswith("nccl")


def as_on_gpu(
    work: list[dict], spans: list[Span], cuts: list[int], messages: list[Message]
) -> tuple[list[Span], list[int]]:
    """Spans and cuts of a GPU: a kernel belongs to the span in which it was launched."""
    launched = [event["launched"] for event in work]
    ends = [0, *itertools.accumulate((event["end"] for event in work), max)]
    gpu_cuts = [max(cut, ends[bisect_left(launched, cut)]) for cut in cuts]
    for message in messages:
        step = bisect_right(cuts, message["issued"])
        step_begin = gpu_cuts[step - 1] if step else 0
        message["issued"] = max(message["begin"], step_begin)
    computing = computing_spans(work, spans)
    return [*computing, *uncovered(work, computing)], gpu_cuts


def computing_spans(work: list[dict], spans: list[Span]) -> list[Span]:
    """When kernels compute, and for which span."""
    spans = sorted(spans, key=lambda span: (span.begin, -span.end))
    computing: list[Span] = []
    for event in sorted(work, key=lambda event: event["begin"]):
        if is_nccl(event):
            continue
        covering = [span.what for span in spans if span.begin <= event["launched"] < span.end]
        new = Span(covering[-1] if covering else "other", event["begin"], event["end"])
        old = computing[-1] if computing else None
        if old and old.what == new.what and new.begin < old.end + GPU_GAP:
            computing[-1] = Span(new.what, old.begin, max(new.end, old.end))
        else:
            computing.append(new)
    return computing


def uncovered(work: list[dict], computing: list[Span]) -> list[Span]:
    """When only NCCL's kernels run: that is waiting."""
    waits = []
    for event in filter(is_nccl, work):
        now = event["begin"]
        for span in computing:
            if now < span.begin < event["end"]:
                waits.append(Span("wait", now, span.begin))
            if span.begin < event["end"]:
                now = max(now, span.end)
        if now < event["end"]:
            waits.append(Span("wait", now, event["end"]))
    return waits
