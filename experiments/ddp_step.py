"""Records one training step with DDP: when each layer computes, and when each bucket of gradients is all-reduced.

    python -m experiments.ddp_step    # writes results/ddp_step.csv, for docs/ddp_step.svg (tools/ddp_step.py draws it)

Two processes, gloo, on the CPU.  LAYERS linear layers of 4 MiB each; a bucket holds the gradients of two (BUCKET_MIB).
Of STEPS steps it is the one of median length.
"""

import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import nn

import distributed as dist
from experiments import measured

LAYERS, WIDTH, BATCH, BUCKET_MIB = 6, 1024, 256, 8
WARM_UP, STEPS = 5, 21
RESULT = measured.RESULTS / "ddp_step.csv"


class Event(NamedTuple):
    rank: int
    kind: str  # forward, backward, all-reduce, optimizer
    layers: str  # their numbers, the first layer is 1; "5 4": the bucket with the gradients of both
    start: float  # seconds, of a clock that all processes of a machine share
    end: float


class Recorder:
    """Hooks that note when things begin and end on this rank."""

    def __init__(self, model: nn.Sequential) -> None:
        self.events: list[Event] = []
        self.last = 0.0  # when the last layer's forward, or the backward of one, has ended
        self.numbers: dict[nn.Parameter, int] = {}
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        for number, layer in enumerate(layers, 1):
            self.numbers[layer.weight] = number
            layer.register_forward_hook(lambda *_, number=number: self.computed("forward", number))
            hook = lambda _, number=number: self.computed("backward", number)  # noqa: E731
            layer.weight.register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        self.events, self.last = [], time.perf_counter()

    def computed(self, kind: str, number: int | str) -> None:
        """It took the time since the last call."""
        now = time.perf_counter()
        self.events.append(Event(dist.get_rank(), kind, str(number), self.last, now))
        self.last = now

    def all_reduce(self, state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """As DDP does it without a hook: the mean over all ranks, while backward goes on."""
        started = time.perf_counter()
        layers = " ".join(str(self.numbers[parameter]) for parameter in bucket.parameters())
        buffer = bucket.buffer().div_(dist.get_world_size())
        work = torch.distributed.all_reduce(buffer, async_op=True)

        def done(future: torch.futures.Future) -> torch.Tensor:
            self.events.append(Event(dist.get_rank(), "all-reduce", layers, started, time.perf_counter()))
            return future.value()[0]

        return work.get_future().then(done)


def length(events: list[Event]) -> float:
    return max(event.end for event in events) - min(event.start for event in events)


def worker(local_rank: int, world_size: int) -> list[Event]:
    """The events of both ranks, of the step of median length."""
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    plain = nn.Sequential(*layers)
    recorder = Recorder(plain)
    model = dist.prepare_ddp_model(plain, bucket_cap_mb=BUCKET_MIB)
    model.register_comm_hook(None, recorder.all_reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(BATCH, WIDTH)
    steps = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        recorder.begin()
        loss = model(inputs).square().mean()
        loss.backward()
        recorder.last = time.perf_counter()
        optimizer.step()
        recorder.computed("optimizer", "")
        optimizer.zero_grad()
        everyone: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(everyone, recorder.events)
        steps.append([Event(*event) for events in everyone for event in events])
    dist.cleanup()
    lengths = [length(step) for step in steps[WARM_UP:]]
    return steps[WARM_UP + lengths.index(statistics.median(lengths))]


def rows_of(events: list[Event]) -> list[dict[str, Any]]:
    """For the file: times in ms since the start of the step."""
    begin = min(event.start for event in events)
    rows = []
    for event in sorted(events, key=lambda event: (event.rank, event.start)):
        times = {"start_ms": f"{1000 * (event.start - begin):.2f}", "end_ms": f"{1000 * (event.end - begin):.2f}"}
        rows.append({"rank": event.rank, "kind": event.kind, "layers": event.layers} | times)
    return rows


if __name__ == "__main__":
    measured.save(RESULT, rows_of(dist.launch(worker, nproc=2)))
    print(f"{RESULT.relative_to(measured.ROOT)} is written; python -m tools.build draws it")
