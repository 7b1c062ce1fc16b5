"""Reads what torch's profiler has noted, and makes a rank's Recording of that and what is Noted."""

import json
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch

from ddp_by_diff.timeline.data import WARM_UP, CoreWait, Noted, Recording, Span, counted
from ddp_by_diff.timeline.gpu import gpu_cuts, gpu_lane, gpu_work, is_nccl
from ddp_by_diff.timeline.lanes import flat
from ddp_by_diff.timeline.memory import NUMBERS, memory_of, reserved_of
from ddp_by_diff.timeline.messages import gloo_messages, nccl_messages
from ddp_by_diff.timeline.waits import ddp_waits, ended, losses


def recording_of(noted: Noted, profiler: Any) -> Recording:
    """All that is known of this rank; profiler: None if it did not start, or can't be stopped."""
    events = read_trace(profiler) if profiler else []
    work = gpu_work(events)
    if any(map(is_nccl, work)):  # it lets the process go on: the GPU waits
        messages = nccl_messages(noted, events, work)
        spans = noted.spans
    else:
        called = gloo_messages(noted, events)
        is_ddp = any(event["name"] == "DistributedDataParallel.forward" for event in events)
        spans = noted.spans + (ddp_waits(noted, called) if is_ddp else [])
        messages = ended(called, spans, noted.cuts)
    lane = flat(spans)
    host = flat([*lane, *losses(lane, messages), *gpu_waits(events, noted.thread)])
    lane, idle = gpu_lane(work, host) if work else (host, [])
    cuts = gpu_cuts(work, noted.cuts) if work else noted.cuts
    is_seen = noted.device in NUMBERS
    memory = memory_of(events, noted, spans, messages) if is_seen else []
    core_waits = noted.core_waits
    if work:  # from the process's steps to those of its GPU
        times = numpy.interp([wait.time for wait in core_waits], noted.cuts, cuts)
        core_waits = [*map(CoreWait, times.tolist(), (wait.total for wait in core_waits))]
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
        "core_waits": core_waits,
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


def gpu_waits(events: list[dict], thread: int) -> list[Span]:
    """Where this thread waits until its GPU has ended."""
    waits = []
    for event in events:
        is_call = event["tid"] == thread and event.get("cat") in ("cuda_runtime", "cuda_driver")
        if is_call and "Synchronize" in event["name"]:
            waits.append(Span("waiting", event["begin"], event["end"]))
    return waits


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
