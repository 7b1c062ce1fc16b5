"""Reads what torch's profiler has noted, and makes a rank's Recording of that and what is Noted."""

import json
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch

from timeline.data import WARM_UP, Message, Noted, Recording, Span, counted
from timeline.gpu import GPU_WORK, gpu_cuts, gpu_lane, gpu_work, is_nccl
from timeline.lanes import flat
from timeline.memory import NUMBERS, memory_of, reserved_of
from timeline.messages import gloo_messages, nccl_messages
from timeline.waits import ddp_waits, ended, losses


def recording_of(noted: Noted, profiler: Any) -> Recording:
    """All that is known of this rank; profiler: None if it did not start, or can't be stopped."""
    events = read_trace(profiler) if profiler else []
    work = gpu_work(events)
    main = [event for event in events if event["ph"] == "X" and event["tid"] == noted.thread]
    if any(map(is_nccl, work)):  # it lets the process go on: the GPU waits
        messages = nccl_messages(noted, events, work)
        spans = host_spans(noted, main, [])
    else:
        called = gloo_messages(noted, events)
        spans = host_spans(noted, main, called)
        messages = ended(called, spans, noted.cuts)
    host = host_lane(main, spans, messages)
    lane, idle = gpu_lane(work, host) if work else (host, [])
    cuts = gpu_cuts(work, noted.cuts) if work else noted.cuts
    is_seen = noted.device in NUMBERS
    memory = memory_of(events, noted, spans, messages) if is_seen else []
    if work:  # from the process's steps to those of its GPU
        for block in memory:
            times = numpy.interp((block.born, block.freed), noted.cuts, cuts)
            block.born, block.freed = times.tolist()
    boot = Path("/proc/sys/kernel/random/boot_id")
    threads = counted(torch.get_num_threads(), "thread")
    return {
        "rank": noted.rank,
        "ranks": noted.ranks,
        "setting": f"torch {torch.__version__}, {noted.device}, {threads} each",
        "device": noted.device_name,
        "machine": socket.gethostname() + (boot.read_text() if boot.exists() else ""),
        "cuts": cuts,
        "first": noted.first,
        "last": min(noted.last, len(cuts) - 2),
        "bare": bare_lengths(noted),
        "lane": lane,
        "idle": idle,
        "messages": messages,
        "memory": memory,
        "reserved": reserved_of(events),
        "trace": [event for event in events if event["ph"] in "XsfM"],  # spans, arrows, names
        "core_waits": noted.core_waits,
        "worker_starts": noted.worker_starts,
    }


def read_trace(profiler: Any) -> list[dict]:
    """The events in the order of their begins, with `begin` and `end`."""
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_bytes())
    base = trace.get("baseTimeNanoseconds", 0)
    for event in trace["traceEvents"]:
        event["begin"] = base + round(1000 * event.get("ts", 0))
        event["end"] = event["begin"] + round(1000 * event.get("dur", 0))
    return sorted(trace["traceEvents"], key=lambda event: event["begin"])


def host_spans(noted: Noted, main: list[dict], messages: list[Message]) -> list[Span]:
    """What the process does, and its waits, also where C++ waits for messages of gloo's.

    main: the events of the program's own thread.
    """
    own = []
    for event in main:
        if not event["name"].startswith("gloo:") and event.get("cat") not in GPU_WORK:
            own.append(event)
    spans = noted.spans + waits_in(own, "::wait_tensor")
    return spans + ddp_waits(own, spans, messages)


def host_lane(main: list[dict], spans: list[Span], messages: list[Message]) -> list[Span]:
    """What the process does: also computing its loss, and waiting until its GPU has ended."""
    lane = flat(spans)
    calls = [event for event in main if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return flat([*lane, *losses(lane, messages), *waits_in(calls, "Synchronize")])


def waits_in(events: list[dict], name: str) -> list[Span]:
    """The events whose names have this in them, as waits."""
    named = [event for event in events if name in event["name"]]
    return [Span("waiting", event["begin"], event["end"]) for event in named]


def bare_lengths(noted: Noted) -> list[int]:
    """How long each step without the recorder took; on a GPU its own time, by CUDA's events."""
    lengths = []
    for step in range(WARM_UP, min(noted.first - 1, len(noted.cuts) - 1)):
        length = noted.cuts[step + 1] - noted.cuts[step]
        begin, end = noted.marks[step : step + 2]
        if begin and end and end.query():
            length = round(1e6 * begin.elapsed_time(end))
        lengths.append(length)
    return lengths
