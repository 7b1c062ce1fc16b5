"""Draws Pictures, below each other: a lane for each rank, its messages, its memory."""

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddp_by_diff.timeline.data import BORN, KEPT, KINDS, PARTS, Message, Picture, ms, size_of
from ddp_by_diff.timeline.say import message_sums, of_ranks
from ddp_by_diff.timeline.svg import LEFT, WIDTH, Drawing, text_width

LANE, ROW, AREA = 26, 13, 34  # pixels: heights of a rank, of a row of messages, of memory
MOST_ROWS = 8  # of messages
CLASSES = {"loading": "l", "forward": "f", "backward": "b", "optimizer": "o", "other": "x"}
CLASSES |= {"evaluation": "e", "waiting": "w", "weights": "v", "optimizer state": "s"}
CLASSES |= {"gradients": "b", "communication buffers": "m", "activations": "f", "temporary": "x"}
TEXT_STYLES = {"backward": "light", "waiting": "", "other": ""}  # else dark


def draw(pictures: list[Picture]) -> str:
    """One SVG."""
    drawing = Drawing(max(picture["end"] for picture in pictures))
    ranks = list(itertools.chain(*(picture["ranks"] for picture in pictures)))
    memories = [rank["memory"] for rank in ranks]
    peaks = []  # one for each area of memory: all pictures have the same scale
    for area in (0, 1):
        peaks.append(max(peak_of(memory, two_areas(memory)[area]) for memory in memories))
    for picture in pictures:
        draw_picture(drawing, picture, peaks)
    drawing.axis()
    draw_legend(drawing, ranks, any(picture["arrows"] for picture in pictures))
    drawing.y += 6
    for picture in pictures:
        command = textwrap.shorten(picture["command"], 80, placeholder=" ...")
        for line in textwrap.wrap(f"{command}: {picture['setting']}", 125):
            drawing.y += 15
            drawing.text(12, drawing.y, line, "soft small")
    title = "; ".join(picture["title"] for picture in pictures)
    told = []
    for picture in pictures:
        told += [f"{label}: {text}" for label, text in picture["findings"]]
    return drawing.svg(f"What each process does in a step: {title}", ". ".join(told))


def draw_picture(drawing: Drawing, picture: Picture, peaks: list[int]) -> None:
    shown, ranks = picture["steps"][1], picture["ranks"]
    drawing.y += 18
    title = textwrap.shorten(picture["title"], 60, placeholder=" ...")
    drawing.text(12, drawing.y, title, "title")
    steps = "one step" if shown == 1 else f"{shown} steps"
    drawing.text(WIDTH - 12, drawing.y, f"{steps}: {ms(picture['length'])} ms", "right")
    drawing.y += 17
    drawing.text(12, drawing.y, of_ranks(ranks, message_sums)[:110], "soft")
    drawing.y += 8
    tops, beneath = {}, len(drawing.lines)
    for rank in ranks:
        tops[rank["rank"]] = drawing.y
        draw_rank(drawing, rank)
        if picture["arrows"] and rank is not ranks[-1]:
            drawing.y += 26
    lanes = drawing.lines[beneath:]
    del drawing.lines[beneath:]
    for arrow in picture["arrows"]:
        draw_arrow(drawing, arrow, tops)
    drawing.lines += lanes  # after the arrows, which would strike out their labels
    for rank, memory in memory_lanes(ranks):
        draw_memory(drawing, rank, memory, peaks)
    drawing.y += 6


def draw_rank(drawing: Drawing, rank: dict) -> None:
    """A lane with what the process does, and rows with its messages."""
    top = drawing.y
    waits = sum(part.length for part in rank["parts"] if part.what == "waiting")
    drawing.row(f"rank {rank['rank']}", f"waits {ms(waits)} ms", top + 18)
    for part in PARTS:
        spans = [span for span in rank["parts"] if span.what == part]
        boxes = [(drawing.x(span.begin), drawing.x(span.end)) for span in spans]
        drawing.boxes(CLASSES[part], boxes, top, LANE)
        left, right = max(boxes, key=lambda box: box[1] - box[0], default=(0, 0))
        word = part.replace("waiting", "waits")
        middle, half = (left + right) / 2, text_width(word) / 2
        if right - left > 2 * half + 6:
            if part == "waiting":  # no text on the hatching
                drawing.boxes("page", [(middle - half, middle + half)], top + 5, LANE - 10)
            drawing.text(middle, top + 18, word, f"middle {TEXT_STYLES.get(part, 'dark')}")
    drawing.boxes("i", drawing.mostly(rank["idle"]), top + LANE - 6, 6)  # below the words
    drawing.boxes("line", itertools.pairwise(map(drawing.x, rank["cuts"])), top, LANE)
    drawing.y = top + LANE + 5
    seen = [message for message in rank["messages"] if message.was_seen]
    draw_messages(drawing, [message for message in seen if message.peer is None])
    drawing.y += 5


def draw_arrow(drawing: Drawing, arrow: dict, tops: dict[int, float]) -> None:
    begin, end = tops[arrow["from"]], tops[arrow["to"]]
    begin, end = (begin + LANE, end) if begin < end else (begin, end + LANE)
    x0, x1 = drawing.x(arrow["begin"]), drawing.x(arrow["end"])
    drawing.path("arrow", f"M{x0:.1f},{begin:.1f}L{x1:.1f},{end:.1f}")


class Box(NamedTuple):
    """A message, in pixels."""

    issued: float
    begin: float
    until: float
    end: float
    text: str


def draw_messages(drawing: Drawing, messages: list[Message]) -> None:
    """Draw each message in the first row that is free."""
    rows: list[list[Box]] = []
    largest = max((message.bytes or 0 for message in messages), default=0)
    for message in messages:
        times = map(drawing.x, message.times)
        size = message.bytes or 0
        text = f"{message.name} {size_of(size)}" if size > largest / 10 else ""
        box = Box(*times, text)
        free = [row for row in rows if row[-1].end + 1 < box.issued]
        if free:
            free[0].append(box)
        elif len(rows) < MOST_ROWS:
            rows.append([box])
    for row in rows:
        draw_row(drawing, row)
        drawing.y += ROW


def draw_row(drawing: Drawing, row: list[Box]) -> None:
    """A line in the queue, a pale box while it waits for a rank, a full one in transfer."""
    top, height = drawing.y, ROW - 2
    queues = [(box.issued, box.begin) for box in row if box.begin - box.issued > 0.5]
    stays = [(box.begin, box.until) for box in row if box.until - box.begin > 0.5]
    drawing.boxes("queue", queues, top + height / 2 - 0.5, 1)
    drawing.boxes("stays", stays, top + 0.5, height - 1)
    drawing.boxes("m", [(box.until, box.end) for box in row], top, height)
    limits = [*(box.issued for box in row[1:]), WIDTH - 12]
    for box, limit in zip(row, limits, strict=True):
        width = text_width(box.text, 11)
        if box.end - box.until > width + 4:
            drawing.text((box.until + box.end) / 2, top + 9, box.text, "middle dark small")
        elif box.text and box.end + width + 8 < limit:
            drawing.text(box.end + 4, top + 9, box.text, "soft small over")


def memory_lanes(ranks: list[dict]) -> list[tuple[str, dict]]:
    """(rank, memory): one for all ranks, without a number, if they hold the same."""
    memories = [rank["memory"] for rank in ranks]
    kept = [peak_of(memory, KEPT[:3]) for memory in memories]
    whole = [peak_of(memory, KINDS) for memory in memories]
    if max(kept) <= 1.05 * min(kept) and max(whole) <= 1.05 * min(whole):
        return [("", memories[0])] if any(whole) else []
    return [(f" {rank['rank']}", rank["memory"]) for rank in ranks]


def draw_memory(drawing: Drawing, rank: str, memory: dict, peaks: list[int]) -> None:
    for name, kinds, peak in zip(("kept", "working"), two_areas(memory), peaks, strict=True):
        drawing.y += AREA + 4
        layers = {f"{CLASSES[kind]} layer": memory[kind] for kind in kinds}
        drawing.areas(memory["times"], layers, max(peak, 1), AREA)
        drawing.row(name + rank, f"peak {size_of(peak_of(memory, kinds))}", drawing.y - 8)


def peak_of(memory: dict, kinds: Iterable[str]) -> int:
    curves = [memory[kind] for kind in kinds]
    return max(map(sum, zip(*curves, strict=True)))


def two_areas(memory: dict) -> tuple[Sequence[str], Sequence[str]]:
    """The kinds in each: what is kept, and activations, which are much more.

    Message buffers may be in either.
    """
    *kept, buffers = KEPT
    if peak_of(memory, [buffers]) <= 2 * peak_of(memory, kept):
        return KEPT, BORN
    return kept, [buffers, *BORN]


def draw_legend(drawing: Drawing, ranks: list[dict], has_arrows: bool) -> None:
    """A legend of what is drawn, and of nothing else."""
    parts, kinds, has_messages = set(), set(), False
    for rank in ranks:
        parts |= {part.what for part in rank["parts"]}
        kinds |= {kind for kind in KINDS if any(rank["memory"][kind])}
        has_messages = has_messages or any(m.peer is None for m in rank["messages"])
    time = [(CLASSES[part], part.replace("waiting", "waits")) for part in PARTS if part in parts]
    if any(rank["idle"] for rank in ranks):
        time.append(("b i", "the GPU has nothing to compute"))
    draw_legend_row(drawing, "time", time)
    if has_messages:
        states = [("queue", "in the queue"), ("stays", "waits for a rank"), ("m", "in transfer")]
        draw_legend_row(drawing, "messages", states)
    if kinds:
        memory = [(CLASSES[kind], kind) for kind in KINDS if kind in kinds]
        draw_legend_row(drawing, "memory", memory)
    if has_arrows:
        drawing.y += 20
        drawing.path("arrow", f"M{LEFT},{drawing.y - 4}h20")
        text = "a message to another rank: from its send to the end of the wait for it"
        drawing.text(LEFT + 27, drawing.y, text)


def draw_legend_row(drawing: Drawing, name: str, entries: list[tuple[str, str]]) -> None:
    drawing.y += 20
    drawing.text(12, drawing.y, name, "soft")
    x = LEFT
    for style, word in entries:
        top, height = (6, 1) if style == "queue" else (11, 13)
        for layer in style.split():
            drawing.boxes(layer, [(x, x + 18)], drawing.y - top, height)
        if style == "w":  # the hatching has no edge of its own
            drawing.boxes("line", [(x, x + 18)], drawing.y - top, height)
        drawing.text(x + 23, drawing.y, word)
        x += round(23 + text_width(word) + 14)
