"""Reads when messages ran: those of gloo in its threads, those of NCCL as kernels of the GPU."""

import re
from bisect import bisect_right
from collections import defaultdict

from timeline.data import Call, Message, Noted, Span
from timeline.gpu import is_nccl

KIND = re.compile(
    "allreduce|allgather|reducescatter|broadcast|reduce|gather|scatter|alltoall|barrier|send|recv"
)
BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}


def kind_of(name: str) -> str:
    """The kind of message in c10d::_allgather_base_, gloo:all_gather, ALLREDUCE_COALESCED."""
    kind = KIND.search(name.replace("_", "").lower())
    return kind[0] if kind else ""


def messages_of(noted: Noted, ran: list[tuple[Call, Span]], ends: list[int]) -> list[Message]:
    """The messages in the order of their calls.  Who came last, compare.py finds out."""
    messages = []
    for (call, run), end in zip(ran, ends, strict=True):
        step = bisect_right(noted.cuts, call.issued) - 1
        what = call.kind, call.group, call.number, call.peer, call.bytes, step, noted.rank
        # Of NCCL's the lane is the GPU's: there is no time before a kernel begins.
        issued = run.begin if run.what == "nccl" else call.issued
        messages.append(Message(*what, issued, run.begin, run.begin, end))
    return messages


# --------------------------------------------------------------------------------------------- gloo


def gloo_runs(calls: list[Call], events: list[dict]) -> list[tuple[Call, Span]]:
    """Gloo's runs of a kind are in the calls' order; each is noted in a thread of its own."""
    runs = defaultdict(list)
    for event in events:
        if event["name"].startswith("gloo:"):
            runs[kind_of(event["name"])].append(event)
    ran = []
    for call in calls or calls_without_hooks(events):
        kind = call.kind
        if not runs[kind] and kind == "reducescatter":
            kind = "allreduce"
        mine, runs[kind] = runs[kind][: call.runs], runs[kind][call.runs :]
        run = Span("gloo", call.issued, call.issued)  # not seen when it ran
        if mine:
            run = Span("gloo", mine[0]["begin"], mine[-1]["end"])
        ran.append((call, run))
    return ran


def calls_without_hooks(events: list[dict]) -> list[Call]:
    """As the profiler tells of them before torch 2.14: without sizes and ranks."""
    calls = [event for event in events if event["name"].startswith("c10d::")]
    return [Call(kind_of(event["name"]), event["begin"]) for event in calls]


# --------------------------------------------------------------------------------------------- NCCL


def nccl_runs(events: list[dict], work: list[dict]) -> list[tuple[Call, Span]]:
    """Torch tells of each call its group, its number there, its size.

    A kernel belongs to the call in which it was launched.  Calls that are joined are launched
    later, together: when each of them ran is not seen.
    """
    told = []
    for event in events:
        name = event.get("args", {}).get("Collective name", "")
        if event["name"] == "record_param_comms" and kind_of(name):
            told.append(event)
    kernels = defaultdict(list)
    begins = [event["begin"] for event in told]
    for event in filter(is_nccl, work):
        place = bisect_right(begins, event["launched"]) - 1
        if place >= 0 and event["launched"] < told[place]["end"]:
            kernels[place].append(event)
    ran = []
    for place, event in enumerate(told):
        args, issued = event["args"], event["begin"]
        kind = kind_of(args["Collective name"])
        peer = args.get({"send": "Dst Rank", "recv": "Src Rank"}.get(kind, ""))
        size = BYTES.get(args.get("dtype"), 1) * args.get("In msg nelems", 0)
        group = args.get("Process Group Name", "")
        begin = min((run["begin"] for run in kernels[place]), default=issued)
        end = max((run["end"] for run in kernels[place]), default=issued)
        ran.append(
            (Call(kind, issued, group, args.get("Seq"), peer, size), Span("nccl", begin, end))
        )
    return ran
