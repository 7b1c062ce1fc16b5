"""The Picture as JSON, for Perfetto."""

from itertools import chain

from ddp_by_diff.timeline.data import Picture

OWN_THREAD = 0  # torch's have the system's numbers


def trace_of(picture: Picture) -> dict:
    """What torch has exported on each rank, joined, with what each rank does."""
    events = chain.from_iterable(map(events_of, picture["ranks"]))
    return {"traceEvents": [*events], "displayTimeUnit": "ms"}


def events_of(rank: dict) -> list[dict]:
    """Torch's events, and a thread of ours; no other rank has the same numbers and arrows."""
    own = 1000 * (rank["rank"] + 1)
    called = f"rank {rank['rank']}"
    place = {"pid": own, "tid": OWN_THREAD}
    name = {"ph": "M", "name": "process_name", "pid": own, "args": {"name": called}}
    events = [name, {"ph": "M", "name": "thread_name", **place, "args": {"name": "what it does"}}]
    for part in rank["parts"]:
        times = {"ts": part.begin / 1000, "dur": part.length / 1000}
        events.append({"ph": "X", "cat": "timeline", "name": part.what, **place, **times})
    numbers: dict = {}  # of torch's processes, which are CPU and GPUs
    for event in rank["trace"]:
        number = numbers.setdefault(event["pid"], own + 1 + len(numbers))
        event = event | {"pid": number}
        begin = event.pop("begin")
        event.pop("end", None)
        event.pop("launched", None)
        if "ts" in event:
            event["ts"] = begin / 1000
        if "id" in event:
            event["id"] = f"{rank['rank']} {event['id']}"
        if event["name"] == "process_name":
            event["args"] = {"name": f"{called}: {event['args']['name']}"}
        events.append(event)
    return events
