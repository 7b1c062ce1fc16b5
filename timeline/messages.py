"""Reads when messages ran: those of gloo in its threads, those of NCCL as kernels of the GPU."""

import re
from bisect import bisect_right
from collections import defaultdict

from timeline.data import Message, Noted
from timeline.gpu import is_nccl

KIND = re.compile(
    "allreduce|allgather|reducescatter|broadcast|reduce|gather|scatter|alltoall|barrier|send|recv"
)
BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}


def kind_of(name: str) -> str:
    """The kind of message in c10d::_allgather_base_, gloo:all_gather, ALLREDUCE_COALESCED."""
    kind = KIND.search(name.replace("_", "").lower())
    return kind[0] if kind else ""


def messages_of(
    noted: Noted, events: list[dict], work: list[dict], has_nccl: bool
) -> list[Message]:
    """The messages in the order of their calls, each with `begin` and `end` of its run."""
    if has_nccl:
        messages = nccl_messages(events, work)
    else:
        messages = gloo_messages(noted.calls or calls_without_hooks(events), events)
    for message in messages:
        message["step"] = bisect_right(noted.cuts, message["issued"]) - 1
        if has_nccl:  # the lane is the GPU's: there is no time before a kernel begins
            message["issued"] = message["begin"]
    return messages


# --------------------------------------------------------------------------------------------- gloo


def gloo_messages(calls: list[Message], events: list[dict]) -> list[Message]:
    """Gloo's runs of a kind are in the calls' order; each is noted in a thread of its own."""
    runs = defaultdict(list)
    for event in events:
        if event["name"].startswith("gloo:"):
            runs[kind_of(event["name"])].append(event)
    messages = []
    for call in calls:
        kind = call["kind"]
        if not runs[kind] and kind == "reducescatter":
            kind = "allreduce"
        mine, runs[kind] = runs[kind][: call["runs"]], runs[kind][call["runs"] :]
        call |= {"begin": call["issued"], "end": call["issued"]}  # not seen when it ran
        if mine:
            call |= {"begin": mine[0]["begin"], "end": mine[-1]["end"]}
        messages.append(call)
    return messages


def calls_without_hooks(events: list[dict]) -> list[Message]:
    """As the profiler tells of them before torch 2.14: without sizes and ranks."""
    calls = []
    for event in events:
        if event["name"].startswith("c10d::"):
            call: Message = {"kind": kind_of(event["name"]), "group": "", "issued": event["begin"]}
            calls.append(call | {"number": None, "peer": None, "bytes": None, "runs": 1})
    return calls


# --------------------------------------------------------------------------------------------- NCCL


def nccl_messages(events: list[dict], work: list[dict]) -> list[Message]:
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
    messages = []
    for place, event in enumerate(told):
        args, runs = event["args"], kernels[place]
        kind = kind_of(args["Collective name"])
        size = BYTES.get(args.get("dtype"), 1) * args.get("In msg nelems", 0)
        message: Message = {"kind": kind, "bytes": size, "issued": event["begin"]}
        message |= {"group": args.get("Process Group Name", ""), "number": args.get("Seq")}
        message["peer"] = args.get({"send": "Dst Rank", "recv": "Src Rank"}.get(kind, ""))
        message["begin"] = min((run["begin"] for run in runs), default=event["begin"])
        message["end"] = max((run["end"] for run in runs), default=event["begin"])
        messages.append(message)
    return messages
