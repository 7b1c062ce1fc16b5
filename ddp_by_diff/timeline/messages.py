"""Reads when messages ran: those of gloo in its threads, those of NCCL as kernels of the GPU."""

import functools
import re
from bisect import bisect_right
from collections import defaultdict

from ddp_by_diff.timeline.data import Message, Noted
from ddp_by_diff.timeline.gpu import is_nccl

KIND = re.compile(
    "allreduce|allgather|reducescatter|broadcast|reduce|gather|scatter|alltoall|barrier|send|recv"
)
BATCH = "batch_op_issue"  # what NCCL's newer backend calls sends and receives that start together
BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2}


@functools.cache
def kind_of(name: str) -> str:
    """The kind of message in c10d::_allgather_base_, gloo:all_gather, ALLREDUCE_COALESCED."""
    kind = KIND.search(name.replace("_", "").lower())
    return kind[0] if kind else ""


def ran(call: Message, noted: Noted, begin: int, end: int) -> Message:
    """The message of this call, which ran then.  Who came last, compare.py finds out."""
    step = bisect_right(noted.cuts, call.issued) - 1
    return call._replace(step=step, last=noted.rank, begin=begin, until=begin, end=end)


def gloo_messages(noted: Noted, events: list[dict]) -> list[Message]:
    """Gloo's runs of a kind are in the calls' order; each is noted in a thread of its own."""
    runs, told = defaultdict(list), []
    for event in events:
        if event["name"].startswith("gloo:"):
            runs[kind_of(event["name"])].append(event)
        elif event["name"].startswith("c10d::"):  # without sizes and ranks
            told.append(Message(kind_of(event["name"]), issued=event["begin"]))
    messages = []
    for call in sorted(noted.calls, key=lambda call: call.issued) or told:
        kind = call.kind
        if not runs[kind] and kind == "reducescatter":
            kind = "allreduce"
        mine, runs[kind] = runs[kind][: call.runs], runs[kind][call.runs :]
        begin = end = call.issued  # not seen when it ran
        if mine:
            begin, end = mine[0]["begin"], mine[-1]["end"]
        messages.append(ran(call, noted, begin, end))
    return messages


def nccl_messages(noted: Noted, events: list[dict], work: list[dict]) -> list[Message]:
    """Torch tells of each call its group, its number there, its size.

    A kernel belongs to the call in which it was launched.  Calls that are joined are launched
    later, together: when each of them ran is not seen.  Of a BATCH torch tells only that it
    starts, so its sends and receives are those that were noted just before.
    """
    told = []
    for event in events:
        name = event.get("args", {}).get("Collective name", "")
        if event["name"] == "record_param_comms" and (kind_of(name) or name == BATCH):
            told.append(event)
    kernels = defaultdict(list)
    begins = [event["begin"] for event in told]
    for event in filter(is_nccl, work):
        place = bisect_right(begins, event["launched"]) - 1
        if place >= 0 and event["launched"] < told[place]["end"]:
            kernels[place].append(event)
    messages = []
    for place, event in enumerate(told):
        args, issued = event["args"], event["begin"]
        begin = min((run["begin"] for run in kernels[place]), default=issued)
        end = max((run["end"] for run in kernels[place]), default=issued)
        if args["Collective name"] == BATCH:
            before = told[place - 1]["end"] if place else 0
            for call in noted.calls:
                if call.peer is not None and before < call.issued <= event["end"]:
                    messages.append(ran(call, noted, begin, end)._replace(issued=begin))
            continue
        kind = kind_of(args["Collective name"])
        peer = args.get({"send": "Dst Rank", "recv": "Src Rank"}.get(kind, ""))
        size = BYTES.get(args.get("dtype"), 1) * args.get("In msg nelems", 0)
        group = args.get("Process Group Name", "")
        call = Message(kind, group, args.get("Seq"), peer, size, issued=issued)
        # The lane is the GPU's: there is no time before a kernel begins.
        messages.append(ran(call, noted, begin, end)._replace(issued=begin))
    return messages
