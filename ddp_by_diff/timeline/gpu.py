"""The lane of a GPU: when its kernels run, and why it has nothing to compute."""

import itertools
from bisect import bisect_left

from ddp_by_diff.timeline.data import PHASES, Span
from ddp_by_diff.timeline.lanes import beneath, filled, flat, inside, what_at

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events


def gpu_work(events: list[dict]) -> list[dict]:
    """Kernels and copies in the order of their begins; each has the time of its launch.

    CUDA numbers the launches: `correlation`.
    """
    numbered = [event for event in events if "correlation" in event.get("args", {})]
    launches = {}
    for event in numbered:
        if event["cat"] not in GPU_WORK:
            launches[event["args"]["correlation"]] = event["begin"]
    work = [event for event in numbered if event["cat"] in GPU_WORK]
    for event in work:
        event["launched"] = launches.get(event["args"]["correlation"], event["begin"])
    return sorted(work, key=lambda event: event["begin"])


def is_nccl(event: dict) -> bool:
    return event["name"].startswith("nccl")


def gpu_lane(work: list[dict], host: list[Span]) -> tuple[list[Span], list[Span]]:
    """The GPU's lane, and in it where it has nothing to compute, as a phase launches nothing.

    A kernel belongs to what the process did when it launched it.  Before the next kernel is
    launched, a pause belongs to what the process does then.  After that the kernel is in the
    queue: where one of NCCL's runs, it waits for that; else the pause is a part of it.
    """
    kernels, messages, queued = [], [], []
    unlaunched: list[Span] = []
    begin = end = work[0]["begin"]  # what was before is not known
    for event in work:
        if is_nccl(event):
            messages.append(Span("waiting", event["begin"], event["end"]))
            continue
        what = what_at(host, event["launched"])
        kernels.append(Span(what, event["begin"], event["end"]))
        if end < event["launched"]:
            unlaunched += inside(host, end, min(event["launched"], event["begin"]))
        elif end < event["begin"]:
            queued.append(Span(what, end, event["begin"]))
        end = max(end, event["end"])
    busy = filled(filled(flat(kernels), unlaunched), flat(messages))
    busy = filled(busy, queued)
    pauses = [*unlaunched, *beneath(busy, host)]
    idle = [pause for pause in pauses if pause.what in PHASES and pause.begin >= begin]
    return filled(busy, host), sorted(idle, key=lambda pause: pause.begin)


def gpu_cuts(work: list[dict], cuts: list[int]) -> list[int]:
    """Where steps begin on the GPU: when all that was launched before has ended."""
    by_launch = sorted(work, key=lambda event: event["launched"])
    launched = [event["launched"] for event in by_launch]
    ends = [0, *itertools.accumulate((event["end"] for event in by_launch), max)]
    return [max(cut, ends[bisect_left(launched, cut)]) for cut in cuts]
