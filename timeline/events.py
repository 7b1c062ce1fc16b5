"""Reads what torch's profiler has noted: waits and messages of this rank; makes its Recording."""

import itertools
import json
import math
import re
import socket
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from timeline import record
from timeline.data import Allocation, Message, Recording, Span, counted
from timeline.gpu import GPU_WORK, as_on_gpu, gpu_work, is_nccl
from timeline.memory import blocks_of, name_blocks
from timeline.record import Recorder


def recording_of(recorder: Recorder, has_trace: bool = True) -> Recording:
    """All that is known of this rank."""
    events = read_trace(recorder.profiler) if recorder.profiler and has_trace else []
    main = main_thread(events, recorder)
    work = gpu_work(events)
    messages = messages_of(events, work, recorder.calls)
    spans: list[Span] = [span.closed() for span in recorder.spans]
    for event in main:
        if event["name"].endswith("::wait_tensor"):
            spans.append(Span("wait", event["begin"], event["end"]))
    spans += ddp_waits(main, spans, messages)
    end_with_their_waits(messages, spans)
    cut_late_ends(messages, spans, recorder.cuts)
    spans += losses(spans, messages)
    cuts = list(recorder.cuts)
    if cuts and not recorder.open and recorder.next_cut > cuts[-1]:
        cuts.append(recorder.next_cut)  # it ended between two steps
    device = recorder.device
    blocks = blocks_of(events, 1 if device == "cuda" else 0)
    name_blocks(blocks, recorder.tensors, spans, messages)
    if work:
        spans, cuts = as_on_gpu(work, spans, cuts, messages)
        spans += losses(spans, messages)
        blocks = {}
    memory = []
    for block in itertools.chain(*blocks.values()):
        memory.append(Allocation(block.kind, block.bytes, block.born, block.freed))
    boot = Path("/proc/sys/kernel/random/boot_id")
    threads = counted(torch.get_num_threads(), "thread")
    return {
        "rank": recorder.place.rank,
        "ranks": recorder.place.world_size,
        "setting": f"torch {torch.__version__}, {device}, {threads} each",
        "machine": socket.gethostname() + (boot.read_text() if boot.exists() else ""),
        "cuts": cuts,
        "first": recorder.first,
        "last": min(recorder.last, len(cuts) - 2),
        "spans": spans,
        "messages": messages,
        "memory": memory,
        "operations": [Span(event["name"], event["begin"], event["end"]) for event in main],
        "core_waits": recorder.core_waits,
        "has_workers": recorder.has_workers,
        "has_group": bool(recorder.groups) or torch.distributed.is_initialized(),
        "has_compiled": has_compiled(),
    }


def has_compiled() -> bool:
    """Whether torch.compile has made a graph in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters["stats"]["unique_graphs"])


def read_trace(profiler: Any) -> list[dict]:
    """The events in the order of their begins, with `begin` and `end`."""
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_bytes())
    base = trace.get("baseTimeNanoseconds", 0)
    events = []
    for event in trace["traceEvents"]:
        if event["ph"] == "X" or event["name"] == "[memory]":
            event["begin"] = base + round(1000 * event["ts"])
            event["end"] = event["begin"] + round(1000 * event.get("dur", 0))
            events.append(event)
    return sorted(events, key=lambda event: event["begin"])


def main_thread(events: list[dict], recorder: Recorder) -> list[dict]:
    """What the thread that runs the program does on the CPU."""
    found = []
    for event in events:
        is_ours = event["tid"] == recorder.native_thread and event["ph"] == "X"
        if is_ours and not event["name"].startswith("gloo:") and event.get("cat") not in GPU_WORK:
            found.append(event)
    return found


# ----------------------------------------------------------------------------------------- messages

KIND = re.compile(
    "allreduce|allgather|reducescatter|broadcast|reduce|gather|scatter|alltoall|barrier|send|recv"
)
BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2}


def kind_of(event: dict) -> str:
    """The kind of message in c10d::_allgather_base_, gloo:all_gather, ncclDevKernel_AllGather."""
    name = event.get("args", {}).get("Collective name", event["name"])
    found = KIND.search(name.replace("_", "").lower())
    return found[0] if found else "message"


def messages_of(events: list[dict], work: list[dict], calls: list[Message]) -> list[Message]:
    """The calls, each with `begin` and `end` of its run.

    It runs in a thread of gloo's, or as a kernel of NCCL's: runs of a kind are in the calls' order.
    """
    runs = defaultdict(list)
    gloos = [event for event in events if event["name"].startswith("gloo:")]
    for event in [*gloos, *filter(is_nccl, work)]:
        kind = kind_of(event)
        # One kernel may be several sends and receives, and nothing says which.
        if kind not in ("send", "recv") or not work:
            runs[kind].append(event)
    if not record.HAS_MESSAGE_HOOKS:
        calls = [old_call(event) for event in events if event["name"].startswith("c10d::")]
    messages = []
    for call in calls:
        kind = call["kind"]
        if not runs[kind] and kind == "reducescatter":
            kind = "allreduce"
        count = 1 if work else call["runs"]
        mine, runs[kind] = runs[kind][:count], runs[kind][count:]
        times = {"begin": call["issued"], "end": call["issued"]}  # nothing tells when it ran
        if mine:
            times = {"begin": mine[0]["begin"], "end": mine[-1]["end"]}
        messages.append({"bytes": sum(map(bytes_of, mine[:1]))} | call | times)
    return messages


def old_call(event: dict) -> Message:
    """A call, as the profiler of torch before 2.14 knows it."""
    call: Message = {"kind": kind_of(event), "issued": event["begin"], "group": "", "runs": 1}
    call["peer"] = None
    if call["kind"] in ("send", "recv"):
        call["peer"] = int(event["args"]["Concrete Inputs"][2])
    return call


def bytes_of(run: dict) -> int:
    """The bytes that go in, if shapes were recorded, which is so before torch 2.14."""
    shapes = run["args"].get("Input Dims", [])
    dtypes = run["args"].get("Input type", [])
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=False):
        total += BYTES.get(dtype, 1) * math.prod(shape)
    return total


# -------------------------------------------------------------------------------------------- waits


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
                waits.append(Span("wait", now, event["begin"]))
            now = max(now, event["end"])
    return waits


NODE = "autograd::engine::evaluate_function"


def cut_late_ends(messages: list[Message], spans: list[Span], cuts: list[int]) -> None:
    """No message ends later than its step's last wait.

    Gloo's thread notes an end late if the waiting thread goes on first.
    """
    last: dict[int, int] = {}
    for span in spans:
        if span.what == "wait":
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
    waits = sorted((span for span in spans if span.what == "wait"), key=lambda span: span.begin)
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
    found = []
    for span in spans:
        ended = [other for other in spans if other.end <= span.begin]
        if span.what != "backward" or not ended:
            continue
        before = max(ended, key=lambda other: other.end)
        sends = any(before.end <= message["issued"] < span.begin for message in messages)
        if before.what == "forward" and not sends:
            found.append(Span("forward", before.end, span.begin))
    return found
