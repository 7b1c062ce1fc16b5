"""What a rank notes while the program runs: spans of time, messages, tensors.

torch's profiler notes the rest; events.py reads both.
"""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import distributed as torch_dist
from torch import nn

from ddp_by_diff.instruments.meeting import Place
from ddp_by_diff.instruments.observer import Observer, parameters_of
from ddp_by_diff.instruments.program import Finished
from ddp_by_diff.timeline.calls import Calls
from ddp_by_diff.timeline.data import CoreWait, Noted, Recording, Span, recorded_steps
from ddp_by_diff.timeline.events import recording_of
from ddp_by_diff.timeline.profiler import HAS_MESSAGE_HOOKS, Profiler


def observers(place: Place, steps: int, ops: bool = False) -> list[Observer]:
    """What looks at a rank: one recorder."""
    return [Recorder(place, steps, ops)]


class Watched(functools.partial):
    """A call of watch(function, ...), in place of function(...), with the function's hash.

    torch finds an operator in its tables by that.
    """

    def __hash__(self) -> int:
        return hash(self.args[0])


class Recorder(Observer):
    """Notes what this process's program does, from the first step to the last."""

    def __init__(self, place: Place, steps: int, ops: bool = False) -> None:
        thread = threading.get_native_id()
        self.noted = Noted(place.rank, place.world_size, thread, *recorded_steps(steps))
        self.open: list[tuple[str, int]] = []  # spans that have not ended, the innermost last
        self.next_cut = 0
        self.next_mark: Any = None  # an event of CUDA at the same place
        self.waits_for_batch = False  # the step's first
        self.evaluated_until = 0  # where an evaluation's last call ended; 0: the program trains
        self.backward_thread = 0  # autograd's own for a GPU
        self.profiler = Profiler(ops)
        self.calls = Calls(self.noted, self.note_memory, self.note_core_wait)
        self.held: dict[tuple[int, int], tuple[set, set]] = {}  # see tensors_of

    @property
    def step(self) -> int:
        """The number, from 0, of the step whose optimizer was called last."""
        return len(self.noted.cuts) - 1

    def patches(self) -> list[tuple[Any, str, Callable]]:
        """More waits, and profilers."""
        return [
            *self.profiler.patches(),
            (torch_dist.Work, "wait", self.wait),
            (torch_dist, "_broadcast_coalesced", self.wait),  # DDP's, of buffers: it waits in C++
        ]

    def installed(self) -> None:
        """See the waits for functional collectives, which are tensor parallelism's, too."""
        wait_tensor = torch.ops._c10d_functional.wait_tensor
        for operator in wait_tensor, wait_tensor.default:  # torch.compile's code calls this one
            self.hooks.undo.callback(setattr, operator, "_op", operator._op)
            operator._op = Watched(self.wait, operator._op)

    def notes(self, is_own_thread: bool) -> Recording:
        noted, now = self.noted, time.time_ns()
        noted.spans += [Span(what, begin, now) for what, begin in self.open]
        if noted.cuts and not self.open and self.next_cut > noted.cuts[-1]:
            noted.cuts.append(self.next_cut)  # the program ended between two steps
            noted.marks.append(self.next_mark)
        profiler = self.profiler.profile if is_own_thread else None  # another can't stop it
        return recording_of(noted, profiler)

    def begin(self, what: str, when: int | None = None) -> None:
        self.note_core_wait()
        self.open.append((what, when or time.time_ns()))

    def end(self) -> None:
        span = Span(*self.open.pop(), time.time_ns())
        self.noted.spans.append(span)
        if span.what == "evaluation":
            self.evaluated_until = span.end
        self.note_core_wait()

    def note_core_wait(self) -> None:
        """Note it at most once in a millisecond, because to read it takes 20 microseconds."""
        waits, now = self.noted.core_waits, time.time_ns()
        if self.profiler.has_started and (not waits or now > waits[-1].time + 1_000_000):
            waits.append(CoreWait(now, core_wait(self.noted.thread)))

    @contextlib.contextmanager
    def spanning(self, what: str, when: int | None = None) -> Iterator[None]:
        self.begin(what, when)
        try:
            yield
        finally:
            self.end()

    def wait(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.hooks.is_elsewhere():
            return original(*args, **kwargs)
        self.maybe_start_profiler()
        with self.spanning("waiting"):
            return original(*args, **kwargs)

    def load(self, iterator: Any, original: Callable) -> Any:
        __tracebackhide__ = True
        if not torch.is_grad_enabled():
            with self.spanning("evaluation", self.evaluated_until):
                return original()
        self.evaluated_until = 0
        is_first = iterator._num_workers > 0 and iterator._num_yielded == 0
        if is_first and not (iterator._persistent_workers and self.noted.worker_starts):
            self.noted.worker_starts.append(len(self.noted.cuts))
        when = None
        if self.waits_for_batch:
            self.step_begins()
            self.waits_for_batch, when = False, self.next_cut
        self.maybe_start_profiler()
        with self.spanning("loading", when):
            return original()

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.is_grad_enabled():
            self.maybe_start_profiler()
            self.evaluated_until = 0
        if self.evaluated_until:  # with what the program did since then, such as counting
            self.begin("evaluation", self.evaluated_until)
        else:  # also without gradients, as a teacher's
            self.begin("forward")

    def forward_ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.end()

    def backward(self, original: Callable) -> Any:
        self.maybe_start_profiler()
        self.backward_thread = 0
        with self.spanning("backward"):
            return original()

    def is_ours(self) -> bool:
        """Whether autograd's thread calls, while the program's waits for it.

        It runs the backward of a GPU, with what activation checkpointing computes again.
        """
        if torch._C._current_graph_task_id() == -1 or not self.open:
            return False
        self.backward_thread = self.backward_thread or threading.get_ident()  # the first GPU's
        return self.backward_thread == threading.get_ident()

    def step_begins(self) -> None:
        """Called after an optimizer's step, and again at the first batch after it, if one comes."""
        self.next_cut = time.time_ns()
        if self.noted.device == "cuda" and not self.profiler.has_started:
            self.next_mark = torch.cuda.Event(enable_timing=True)
            self.next_mark.record(
                torch.cuda.current_stream(parameters_of(self.hooks.optimizer)[0].device)
            )

    def optimizer_begins(self, optimizer: Any) -> None:
        if optimizer is self.hooks.optimizer:
            self.noted.cuts.append(self.next_cut or time.time_ns())
            self.noted.marks.append(self.next_mark)
            self.noted.device = parameters_of(optimizer)[0].device.type
            if self.step > self.noted.last:
                raise Finished
        self.begin("optimizer")

    def gradients_are_there(self, optimizer: Any, is_again: bool) -> None:
        if self.step >= self.noted.first - 1:
            parameters, _ = self.tensors_of(optimizer)
            self.note_memory("gradients", [parameter.grad for parameter in parameters])

    def optimizer_ends(self, optimizer: Any) -> None:
        self.end()
        if self.step >= self.noted.first:
            parameters, buffers = self.tensors_of(optimizer)
            self.note_memory("weights", [*parameters, *buffers])
            states = [state.values() for state in optimizer.state.values()]
            self.note_memory("optimizer state", itertools.chain(*states))
        self.step_begins()
        self.waits_for_batch = True

    def tensors_of(self, optimizer: Any) -> tuple[set, set]:
        """The parameters that this optimizer or a model holds, and the buffers: found out once."""
        key = id(optimizer), len(self.hooks.models)
        if key not in self.held:
            parameters, buffers = {*parameters_of(optimizer)}, set()
            for model in self.hooks.models.values():
                parameters.update(model.parameters())
                buffers.update(model.buffers())
            self.held[key] = parameters, buffers
        return self.held[key]

    def maybe_start_profiler(self) -> None:
        """Start it at the first call of a step that is seen, not in an optimizer's step.

        torch crashes if an optimizer's step starts it.  (torch.func and torch.compile hide forward
        and backward.)
        """
        is_early = len(self.noted.cuts) < self.noted.first - 1
        if self.profiler.has_started or is_early or self.hooks.is_in("optimizer"):
            return
        if HAS_MESSAGE_HOOKS and torch_dist.is_initialized():
            self.calls.begin(self.hooks.undo)
        is_gpu = self.noted.device == "cuda"
        self.noted.device_name = torch.cuda.get_device_name() if is_gpu else self.noted.device
        self.profiler.start(self.noted.device)

    def note_memory(self, kind: str, values: Iterable) -> None:
        """Note where in memory the tensors are: {address: (kind, bytes)}.

        No call of torch that its profiler would note.
        """
        addresses = {}
        for value in values:
            value = getattr(value, "_local_tensor", value)  # this rank's share of a DTensor
            is_here = isinstance(value, torch.Tensor) and value.device.type == self.noted.device
            if is_here and value.layout == torch.strided:
                storage = value.untyped_storage()
                addresses[storage.data_ptr()] = (kind, storage.nbytes())
        self.noted.tensors.append((time.time_ns(), addresses))


def core_wait(thread: int) -> int:
    """How long the thread was ready to run, but had no core; 0 where Linux doesn't tell."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1])
    except OSError:
        return 0
