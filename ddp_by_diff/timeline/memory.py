"""Reads what torch's profiler has noted of memory, and names what each block is for."""

import itertools
import math
from bisect import bisect_right
from collections import defaultdict

from ddp_by_diff.timeline.data import Block, Message, Noted, Span

NUMBERS = {"cpu": 0, "cuda": 1}  # of kinds of devices, in torch


def memory_events(events: list[dict], device: str) -> list[dict]:
    """Each allocation and release.  (A span of the program's own may have the same name.)"""
    points = [event for event in events if (event["ph"], event["name"]) == ("i", "[memory]")]
    return [event for event in points if event["args"]["Device Type"] == NUMBERS[device]]


def blocks_of(events: list[dict], device: str, thread: int) -> dict[int, list[Block]]:
    """The blocks of each address of this kind of device, in the order of time.

    Message buffers are what a thread of gloo allocates.
    """
    threads = {event["tid"] for event in events if event["name"].startswith("gloo:")}
    threads -= {thread}  # sends and receives are noted there
    blocks: dict[int, list[Block]] = defaultdict(list)
    for event in memory_events(events, device):
        size, now = event["args"]["Bytes"], event["begin"]
        here = blocks[event["args"]["Addr"]]
        if size > 0:
            if here and not here[-1].is_end_known:
                here[-1].freed = now  # a thread of gloo's has freed it: that is not recorded
            is_message = event["tid"] in threads
            here.append(Block("communication buffers" if is_message else "", size, now))
        elif here:
            here[-1].freed = now
            here[-1].is_end_known = True
    return blocks


def memory_of(
    events: list[dict], noted: Noted, spans: list[Span], messages: list[Message]
) -> list[Block]:
    """All blocks with their kinds, and those that are noted and older than the recording.

    Times are the process's, also of a GPU's memory: it allocates before the kernels run.
    """
    blocks = blocks_of(events, noted.device, noted.thread)
    for now, kinds in noted.tensors:
        for address, (kind, size) in kinds.items():
            name_block(blocks[address], now, kind, size if address else 0)
    named = list(itertools.chain(*blocks.values()))
    backwards = sorted((span.begin, span.end) for span in spans if span.what == "backward")
    issued = [message.issued for message in messages]
    for block in named:
        if not block.kind:
            block.kind = kind_by_time(block, backwards)
        elif block.kind == "communication buffers" and not block.is_end_known:
            call = bisect_right(issued, block.born)
            if call > 0:
                block.freed = max(block.born, messages[call - 1].end)
    return named


def reserved_of(events: list[dict]) -> int:
    """The most bytes that torch's allocator has taken from the GPU; 0 on a CPU, which has none."""
    noted = [event["args"]["Total Reserved"] for event in memory_events(events, "cuda")]
    return max(noted, default=0)


def name_block(here: list[Block], now: int, kind: str, size: int) -> None:
    """Note that the address held such a tensor at this time."""
    for block in here:
        if block.born <= now < block.freed:
            if block.kind in ("", "communication buffers"):
                block.kind = kind
            return
    if size and not here:
        here.append(Block(kind, size, -math.inf, is_end_known=True))


def kind_by_time(block: Block, backwards: list[tuple[int, int]]) -> str:
    """Activations are kept from forward to backward."""
    place = bisect_right(backwards, (block.born, 0))  # the next backward
    is_in_backward = place > 0 and block.born < backwards[place - 1][1]
    is_kept = place < len(backwards) and backwards[place][0] < block.freed
    return "activations" if is_kept and not is_in_backward else "temporary"
