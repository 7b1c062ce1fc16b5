"""docs/ddp_step.svg: one training step with DDP on a time axis, from the events that experiments/ddp_step.py recorded.

On a screen a cursor moves over the axis, three times, and shows what happens at the same time.  What it has not reached
yet is pale, but there: browsers print an <img> as it is at that moment, and don't tell it that they print.  Where they
tell, and for readers who have asked their system for less motion, the picture is still.  tools/build.py calls this.
"""

from typing import NamedTuple

from experiments import measured
from tools import svg
from tools.programs import ROOT

EVENTS = measured.RESULTS / "ddp_step.csv"
PICTURE = ROOT / "docs" / "ddp_step.svg"

WIDTH, HEIGHT = 520, 448
LEFT, RIGHT = 16, 500  # of the time axis
LANES = {0: 62, 1: 254}  # y of each rank's computing
FIRST_BUCKET, BUCKET = 108, 48  # y of the first bucket, and from one to the next
AXIS = 324
SECONDS, TIMES = 14, 3  # of the moving picture
SWEEP = (0.03, 0.80)  # the cursor moves in this part of it
COLOURS = {"forward": "grey", "backward": "blue", "all-reduce": "amber", "optimizer": "green"}


class Event(NamedTuple):
    rank: int
    kind: str  # one of COLOURS
    layers: list[str]
    start: float  # ms since the step's start
    end: float


def recorded() -> list[Event]:
    return [
        Event(int(row["rank"]), row["kind"], row["layers"].split(), float(row["start_ms"]), float(row["end_ms"]))
        for row in measured.read(EVENTS)
    ]


class Step:
    """The events, and where they stand in the picture."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.length = max(event.end for event in events)
        self.buckets = [event.layers for event in self.of("all-reduce") if event.rank == 0]

    def of(self, *kinds: str) -> list[Event]:
        return sorted((event for event in self.events if event.kind in kinds), key=lambda event: event.start)

    def x(self, ms: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * ms / self.length, 1)

    def share(self, ms: float) -> float:
        """When the cursor is there, as a share of the moving picture."""
        return SWEEP[0] + (SWEEP[1] - SWEEP[0]) * ms / self.length

    def bar(self, kind: str, start: float, end: float, y: float, height: float) -> str:
        return svg.rect(kind, self.x(start), y, round(self.x(end) - self.x(start), 1), height, 2)


def computing(step: Step) -> list[str]:
    """A lane for each rank: forward and backward of each layer, and the optimizer's step."""
    events = step.of("forward", "backward", "optimizer")
    return [step.bar(COLOURS[event.kind], event.start, event.end, LANES[event.rank], 32) for event in events]


def numbers(step: Step) -> list[str]:
    """The layers' numbers in these lanes, where there is room."""
    parts = []
    for event in step.of("forward", "backward"):
        start, end = step.x(event.start), step.x(event.end)
        if end - start >= 12:
            parts.append(svg.text(event.layers[0], (start + end) / 2, LANES[event.rank] + 21, "text small"))
    return parts


def exchanging(step: Step) -> list[str]:
    """Two bars for each bucket, rank 0's above rank 1's: it fills (dashed), then it is all-reduced."""
    ready = {(event.rank, event.layers[0]): event.end for event in step.of("backward")}
    parts = []
    for event in step.of("all-reduce"):
        y = FIRST_BUCKET + BUCKET * step.buckets.index(event.layers) + 20 * event.rank
        parts.append(step.bar("empty", ready[event.rank, event.layers[0]], event.start, y, 18))
        parts.append(step.bar(COLOURS[event.kind], event.start, event.end, y, 18))
    return parts


def labels(step: Step) -> list[str]:
    """What is never covered: the names of the lanes, the axis and the legend."""
    parts = [svg.text("One training step with DDP in two processes", WIDTH / 2, 26, "text strong")]
    parts.append(
        svg.text("rank 0: its half of the batch, through layers 1 to 6 and back", LEFT, 54, "quiet small left")
    )
    parts.append(svg.text("rank 1: the other half, at the same time", LEFT, 306, "quiet small left"))
    for number, layers in enumerate(step.buckets):
        words = f"bucket {number + 1}: layers {', '.join(layers)}"
        parts.append(svg.text(words, LEFT, FIRST_BUCKET + BUCKET * number + 24, "text small left"))
    parts.append(f'<path class="line" d="M{LEFT} {AXIS}H{RIGHT}"/>')
    for ms in range(0, int(step.length) + 1, 100):
        parts.append(f'<path class="line" d="M{step.x(ms):g} {AXIS}v6"/>')
        parts.append(svg.text(f"{ms} ms" if ms else "0", step.x(ms), AXIS + 22, "quiet small"))
    return parts + legend()


def legend() -> list[str]:
    parts = []
    names = [("grey", "forward"), ("blue", "backward"), ("empty", "bucket fills"), ("amber", "all-reduce: the mean")]
    names.append(("green", "optimizer step"))
    for place, (kind, name) in enumerate(names):
        x, y = LEFT + (0, 122, 250, 0, 250)[place], 364 if place < 3 else 388
        parts.append(svg.rect(kind, x, y, 22, 16, 2))
        parts.append(svg.text(name, x + 30, y + 13, "text small left"))
    return parts


def phases(step: Step) -> list[tuple[float, str]]:
    """When each sentence below the picture begins, in ms."""
    backward, exchanged = step.of("backward"), step.of("all-reduce")
    return [
        (0, "Forward: each rank computes the loss of its own images."),
        (backward[0].start, "Backward: the last layer's gradients are ready first."),
        (exchanged[0].start, "A full bucket is all-reduced while backward goes on."),
        (max(event.end for event in backward), "Backward has ended; the last bucket is on its way."),
        (step.of("optimizer")[0].start, "Both have the same mean gradients: the same step."),
    ]


STILL = "All-reduces run during backward; then both take the same step."


def moving(step: Step) -> str:
    """The rules of CSS for the cursor and the sentences.  Without them, all that is recorded is shown."""
    begin, end = (f"{100 * share:.2f}%" for share in SWEEP)
    way = RIGHT - LEFT
    rules = [f"@keyframes sweep {{ 0%, {begin} {{ transform: none }} {end} {{ transform: translateX({way}px) }}"]
    rules[0] += f" {100 * SWEEP[1] + 0.01:.2f}%, 100% {{ transform: translateX({WIDTH}px) }} }}"
    starts = [step.share(ms) for ms, _ in phases(step)]
    starts[0] = 0.0
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], 0.90], strict=True)):
        rules.append(_shown(f"says{number}", start, stop))
    rules.append(_shown("still", 0.90, 1.0))
    animated = ["sweep", *(f"says{number}" for number in range(len(starts))), "still"]
    rules.append("@media screen and (prefers-reduced-motion: no-preference) {")
    rules.append(".sweep { visibility: visible }")
    rules += [f".{name} {{ animation: {name} {SECONDS}s linear {TIMES} forwards }}" for name in animated]
    hidden = [".sweep { visibility: hidden }", ".says { opacity: 0 }"]
    hidden += [".curtain { opacity: 0.65 }", ".cursor { stroke-width: 2 }"]
    return "\n".join([*hidden, *rules, "}"]) + "\n"


def _shown(name: str, start: float, stop: float) -> str:
    """Keyframes: to be seen between these shares of the time only."""
    before = f"0%, {100 * start - 0.01:.2f}% {{ opacity: 0 }} " if start else ""
    after = f" {100 * stop + 0.01:.2f}%, 100% {{ opacity: 0 }}" if stop < 1 else ""
    return f"@keyframes {name} {{ {before}{100 * start:.2f}%, {100 * stop:.2f}% {{ opacity: 1 }}{after} }}"


def described(step: Step) -> str:
    last = max(event.end for event in step.of("backward"))
    told = []
    for number, layers in enumerate(step.buckets, 1):
        events = [event for event in step.of("all-reduce") if event.layers == layers]
        start, end = (f(getattr(event, at) for event in events) for f, at in ((min, "start"), (max, "end")))
        told.append(
            f"Bucket {number}, with the gradients of layers {' and '.join(layers)}: {start:.0f} to {end:.0f} ms."
        )
    return (
        "Recorded with two processes on a CPU. Each computes forward and backward on its half of the batch. The "
        f"all-reduce of a bucket of gradients starts when the bucket is full. {' '.join(told)} "
        f"The backward passes end after {last:.0f} ms. Then both ranks take the same optimizer step."
    )


def drawn() -> str:
    step = Step(recorded())
    curtain = svg.rect("paper curtain", LEFT - 1, 60, WIDTH, AXIS - 62, 0)
    cursor = f'<path class="line cursor" d="M{LEFT - 1} 60V{AXIS}"/>'
    sentences = [f'<g class="still">{svg.text(STILL, WIDTH / 2, HEIGHT - 18)}</g>']
    for number, (_, words) in enumerate(phases(step)):
        sentences.append(f'<g class="says says{number}">{svg.text(words, WIDTH / 2, HEIGHT - 18)}</g>')
    parts = [*computing(step), *exchanging(step), f'<g class="sweep">{curtain}{cursor}</g>', *numbers(step)]
    parts += [*labels(step), *sentences]
    title = "One training step with DDP in two processes"
    return svg.picture(WIDTH, HEIGHT, title, described(step), parts, moving(step))
