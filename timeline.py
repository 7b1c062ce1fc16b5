"""See what each process does in a step: runs a program, records some of its steps, draws one, says what it found.

    python timeline.py mnist_ddp.py --dataset synthetic                  # starts two processes, or one for each GPU
    python timeline.py --steps-shown 8 -m variants.mnist_local_sgd       # a module; eight steps in one picture
    torchrun --nproc_per_node=2 timeline.py train.py --my-flags          # any program, with or without distributed.py
    python timeline.py --draw a.json b.json --out both                   # two recordings, on one scale

The program is not changed; it needs an optimizer of torch.optim.  timeline.svg has a lane for each rank: forward,
backward, optimizer, waiting; below them messages and memory.  timeline.json has the same, and torch's operations, for
https://ui.perfetto.dev.  docs/timeline.md says how to read them.

A step lies between two steps of the optimizer that came first, and begins where the DataLoader is asked for the next
batch, if it is.  The first steps are left out, the next ones run without the recorder, then some are recorded, then
the program is left.  Before torch 2.14 the recorder takes more time, and can't tell message buffers and groups apart.
On a GPU the lanes show when its kernels run, not what the process does meanwhile, and where only NCCL's kernels run,
it waits; memory is not drawn.  This part was tried on a trace that others recorded on two GPUs, not on a GPU of ours.
"""

import argparse
import contextlib
import ctypes
import hashlib
import io
import itertools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import socket
import statistics
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch warns of memory that is older than the recording
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # of the profiler

import torch  # noqa: E402
from torch import distributed as torch_dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.modules import module as nn_module  # noqa: E402
from torch.optim import optimizer as torch_optimizer  # noqa: E402
from torch.utils.data import dataloader  # noqa: E402

import distributed as dist  # noqa: E402
import launcher  # noqa: E402

WARM_UP = 3  # steps
HAS_MESSAGE_HOOKS = hasattr(torch_dist.ProcessGroup, "register_pre_hook")  # since torch 2.14
KEPT = ("weights", "optimizer state", "gradients", "message buffers")  # kinds of memory
BORN = ("activations", "temporary")
Span = tuple[str, int, int]  # what, begin and end in nanoseconds since 1970

# ------------------------------------------------------------------------------------------------ what a rank records


class Finished(BaseException):
    """Enough was recorded: leaves the program, through all of its `except Exception`."""


def recorded_steps(count: int) -> tuple[int, int]:
    """The numbers of the first and the last, from 0.  Before them: warm-up, some without the recorder, its first."""
    first = WARM_UP + max(1, count // 2) + 1
    return first, first + count - 1


class Recorder:
    """Notes what this process's program does: spans of time, messages, tensors.  torch's profiler notes the rest."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.first, self.last = recorded_steps(args.steps)
        self.thread = threading.get_ident()
        self.spans: list[list] = []  # [what, begin, end], in the order of their begins
        self.open: list[list] = []  # those that have not ended, the innermost last
        self.optimizer: Any = None  # the first that makes a step
        self.cuts: list[int] = []  # where the steps begin
        self.next_cut, self.next_cut_is_final = 0, True
        self.models: dict[int, nn.Module] = {}  # those with parameters that no other module calls
        self.groups: dict[Any, list[int]] = {}  # process groups: the ranks of each
        self.calls: list[dict] = []  # messages
        self.tensors: list[tuple[int, dict]] = []  # time, {address: (kind, bytes)}
        self.inputs = self.sampler = ""
        self.gradients: dict[str, str] = {}
        self.profiler: Any = None
        self.last_step = time.monotonic()
        self.is_over = threading.Event()

    @property
    def step(self) -> int:
        """The number, from 0, of the step whose optimizer was called last."""
        return len(self.cuts) - 1

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Modules, optimizers, backward, loaders and waits tell this recorder when they begin and end."""
        handles = [
            nn_module.register_module_forward_pre_hook(self.before_module),
            nn_module.register_module_forward_hook(self.after_module, always_call=True),
            torch_optimizer.register_optimizer_step_pre_hook(self.before_optimizer),
            torch_optimizer.register_optimizer_step_post_hook(self.after_optimizer),
        ]
        patched = [
            (torch.autograd, "backward", "backward"),
            (torch.autograd, "grad", "backward"),
            (dataloader._BaseDataLoaderIter, "__next__", "data"),
            (torch_dist.Work, "wait", "wait"),
            (torch_dist, "_broadcast_coalesced", "wait"),  # DDP's, of buffers: it waits in C++
        ]
        originals = [getattr(place, name) for place, name, _ in patched]
        for place, name, what in patched:
            setattr(place, name, self.noted(getattr(place, name), what))
        threading.Thread(target=self.watch, daemon=True).start()
        try:
            yield
        finally:
            self.is_over.set()
            for (place, name, _), original in zip(patched, originals, strict=True):
                setattr(place, name, original)
            for handle in handles:
                handle.remove()
            for group in self.groups if HAS_MESSAGE_HOOKS and torch_dist.is_initialized() else ():
                group.unregister_pre_hook(id(self))

    def noted(self, function: Callable, what: str) -> Callable:
        """The function, with a span for each call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_elsewhere():
                return function(*args, **kwargs)
            if what == "backward":
                self.maybe_start_profiler()
            elif what == "data":
                batches = args[0]._index_sampler  # of a DataLoader without batches it is the sampler itself
                self.sampler = type(getattr(batches, "sampler", batches)).__name__
            self.begin(what)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return call

    def is_elsewhere(self) -> bool:
        """In another thread; or torch.compile is looking at the program."""
        return torch.compiler.is_compiling() or threading.get_ident() != self.thread

    def begin(self, what: str) -> None:
        now = time.time_ns()
        if what == "data" and not self.next_cut_is_final:
            self.next_cut, self.next_cut_is_final = now, True
        self.open.append([what, now, 0])
        self.spans.append(self.open[-1])

    def end(self) -> None:
        self.open.pop()[2] = time.time_ns()

    def before_module(self, module: nn.Module, args: Any) -> None:
        """A forward pass is a call of a module with parameters, by no other module and not to load data."""
        if self.is_elsewhere() or (self.open and self.open[-1][0] in ("forward", "data")):
            return
        if id(module) not in self.models:
            if next(module.parameters(), None) is None:
                return
            self.models[id(module)] = module
        if torch.is_grad_enabled():
            self.maybe_start_profiler()
        self.begin("forward")
        self.open[-1].append(id(module))

    def after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.is_elsewhere() and self.open and self.open[-1][3:] == [id(module)]:
            self.end()

    def before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_elsewhere():
            return
        self.optimizer = self.optimizer or optimizer
        if optimizer is self.optimizer:
            self.cuts.append(self.next_cut or time.time_ns())
            self.last_step = time.monotonic()
            if self.step > self.last:  # all ranks leave here, where the weights are those after the last step
                self.gradients = {name: digest(p.grad) for name, p in self.parameters() if p.grad is not None}
                raise Finished
        if self.step >= self.first:
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients = [parameter.grad for parameter in (*dict(self.parameters()).values(), *stepped)]
            self.note_memory({"gradients": gradients})
        self.begin("optimizer")

    def after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_elsewhere():
            return
        self.end()
        if self.step >= self.first:
            state = [value for values in optimizer.state.values() for value in values.values()]
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            weights = [tensor for model in self.models.values() for tensor in (*model.parameters(), *model.buffers())]
            self.note_memory({"optimizer state": state, "weights": [*weights, *stepped]})
        if self.step == self.last and optimizer is self.optimizer:
            for model in self.models.values():
                model.register_forward_pre_hook(self.note_inputs, with_kwargs=True)
        self.next_cut, self.next_cut_is_final = time.time_ns(), False

    def maybe_start_profiler(self) -> None:
        """At the first forward or backward of a step: torch crashes if it is started inside an optimizer's step."""
        if len(self.cuts) < self.first - 1 or self.profiler:
            return
        for group in torch_dist.distributed_c10d._world.pg_map if torch_dist.is_initialized() else ():
            self.groups[group] = torch_dist.get_process_group_ranks(group)
            if HAS_MESSAGE_HOOKS:
                group.register_pre_hook(id(self), lambda args, group=group: self.note_message(args, group))
        self.profiler = torch.profiler.profile(
            activities=torch.profiler.supported_activities(),  # of the CPU and, if there is one, of the GPU
            profile_memory=True,
            record_shapes=not HAS_MESSAGE_HOOKS,  # costs time: only where no hook says how large a message is
        )
        self.profiler.start()

    def note_message(self, args: Any, group: Any) -> None:
        kind, tensors = args.name.name, args.input_tensors or args.output_tensors
        name = kind.lower().replace("_", "").removesuffix("base")  # torch 2.15 has ALLGATHER_BASE and others
        call = {"kind": name, "issued": time.time_ns(), "group": group.group_name}
        call["bytes"] = sum(tensor.nbytes for tensor in tensors)
        call["runs"] = len(tensors) if kind == "REDUCE_SCATTER" else 1  # gloo makes an all-reduce of each
        call["peer"] = self.groups[group][args.root] if kind in ("SEND", "RECV") else None
        self.calls.append(call)
        self.note_memory({"message buffers": [*args.input_tensors, *args.output_tensors]})

    def note_memory(self, tensors: dict[str, list]) -> None:
        """Where in memory these tensors are."""
        found = {}
        for kind, some in tensors.items():
            for storage in (local(tensor).untyped_storage() for tensor in some if isinstance(tensor, torch.Tensor)):
                found[storage.data_ptr()] = (kind, storage.nbytes())
        self.tensors.append((time.time_ns(), found))

    def note_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Of the first forward pass after the recorded steps."""
        tensors = [value for value in leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        self.inputs = self.inputs or " ".join(map(digest, tensors))

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the models, each once."""
        known, names = set(), set()
        for model in self.models.values():
            for name, parameter in model.named_parameters():
                name = re.sub(r"\b(module|_orig_mod)\.", "", name)
                if id(parameter) not in known:
                    yield f"{type(model).__name__}.{name}" if name in names else name, parameter
                known.add(id(parameter))
                names.add(name)

    def watch(self) -> None:
        """In a thread of its own: ends a program that makes no steps any more."""
        patience = self.args.patience
        while time.monotonic() - self.last_step < patience:
            if self.is_over.wait(min(0.5, patience / 4)):
                return
        own = getattr(sys.modules.get("distributed"), "__file__", "")  # the program's copy of the helper
        frames = []
        for frame, line in traceback.walk_stack(sys._current_frames()[self.thread]):
            path = frame.f_code.co_filename
            if path != __file__:
                frames.append((dist.__file__ if path == own else path, str(line), frame.f_code.co_name))
        said = f"timeline: rank {dist.get_rank()} made no step for {patience:g} s, after {len(self.cuts)}"
        print(f"{said}; it stands in {launcher._where(frames).place}", file=sys.stderr, flush=True)
        if dist.is_primary():
            show_alone(recording_of(self, has_trace=False), self.args)  # another thread can't stop the profiler
        os._exit(1)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor this rank's share."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def digest(tensor: torch.Tensor) -> str:
    """Equal for equal tensors; of a sharded DTensor only that it is sharded."""
    if any(placement.is_shard() for placement in getattr(tensor, "placements", ())):
        return "sharded"
    data = local(tensor).cpu().contiguous()
    content = ctypes.string_at(data.data_ptr(), data.nbytes) if data.nbytes else b""
    return hashlib.blake2b(content + str((data.dtype, *data.shape)).encode(), digest_size=8).hexdigest()


def run_program(recorder: Recorder, command: list[str]) -> None:
    """The program as __main__, in this process."""
    is_module = command[0] == "-m"
    helpers = {name: sys.modules.pop(name) for name in ("distributed", "launcher") if name in sys.modules}  # or its own
    sys.argv = command[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(command[0]))
    try:
        with recorder.installed():
            if is_module:
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(command[0], run_name="__main__")
    except Finished:
        pass
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.modules.update(helpers)


def record(local_rank: int, world_size: int, args: argparse.Namespace) -> list[dict] | None:
    """One rank: runs the program.  On rank 0 it returns the recordings of all ranks."""
    if world_size == 1:
        os.environ["NPROC"] = "1"  # so that a program's own `launch` doesn't start others
    recorder = Recorder(args)
    try:
        run_program(recorder, args.command)
    except Exception:
        show_alone(recording_of(recorder), args)  # the other ranks may be waiting for ever
        raise
    return together(recorder, world_size)


def show_alone(recording: dict, args: argparse.Namespace) -> None:
    """If at least one step was recorded before this rank failed."""
    if recording["last"] >= recording["first"]:
        print(f"timeline: rank {recording['rank']} failed; what it recorded before is drawn, without other ranks")
        show([recording], args)


def together(recorder: Recorder, world_size: int) -> list[dict] | None:
    """The recordings of all ranks, on rank 0; None on the others."""
    mine = recording_of(recorder)
    if world_size == 1:
        return [mine]
    if not torch_dist.is_initialized():  # the program has left its group
        os.environ["DIST_RUN"] = f"{os.environ.get('DIST_RUN', '')} timeline"  # the run's own name was that group's
        with contextlib.redirect_stdout(io.StringIO()):
            dist.init_process_group(backend="gloo")
    group = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=recorder.args.patience))
    recordings: list = [None] * world_size
    torch_dist.all_gather_object(recordings, mine, group=group)
    different = first_difference([recording["weights"] for recording in recordings])
    if different:
        tensors: list = [None] * world_size
        torch_dist.all_gather_object(tensors, local(dict(recorder.parameters())[different]).cpu().double(), group=group)
        if all(tensor.shape == tensors[0].shape for tensor in tensors):
            recordings[0]["difference"] = max((tensor - tensors[0]).abs().max().item() for tensor in tensors)
    return recordings if dist.is_primary() else None


def first_difference(tables: list[dict[str, str]]) -> str | None:
    """The first name that is in all tables, and not with the same digest."""
    names = [name for name in tables[0] if all(name in table for table in tables)]
    return next((name for name in names if len({table[name] for table in tables}) > 1), None)


# -------------------------------------------------------------------------------------- what is computed on each rank


def recording_of(recorder: Recorder, has_trace: bool = True) -> dict:
    """All that is known of this rank, in plain lists and dicts."""
    events = read_trace(recorder.profiler) if recorder.profiler and has_trace else []
    main = [event for event in events if event["tid"] == threading.get_native_id() and event["ph"] == "X"]
    main = [event for event in main if not event["name"].startswith("gloo:") and event.get("cat") not in GPU_WORK]
    work = gpu_work(events)
    messages = messages_of(events, work, recorder.calls)
    spans = [(what, begin, end or time.time_ns()) for what, begin, end, *_ in recorder.spans]
    spans += [("wait", e["begin"], e["end"]) for e in main if e["name"].endswith("::wait_tensor")]
    spans += ddp_waits(main, spans, messages)
    cut_late_ends(messages, spans, recorder.cuts)
    is_between = recorder.cuts and not recorder.open and recorder.next_cut > recorder.cuts[-1]
    cuts = [*recorder.cuts, recorder.next_cut] if is_between else recorder.cuts
    parameters = dict(recorder.parameters())
    device = next(iter(parameters.values()), torch.empty(0)).device.type
    memory = named_allocations(allocations_of(events, 1 if device == "cuda" else 0), recorder.tensors, spans, messages)
    if work:
        spans, cuts, memory = *as_on_gpu(work, spans, cuts, messages), []
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "rank": dist.get_rank(),
        "setting": f"torch {torch.__version__}, {device}, {counted(torch.get_num_threads(), 'thread')} each",
        "machine": socket.gethostname() + (boot.read_text() if boot.exists() else ""),
        "cuts": cuts,
        "first": recorder.first,
        "last": min(recorder.last, len(cuts) - 2),
        "spans": spans,
        "messages": messages,
        "memory": memory,
        "operations": [(event["name"], event["begin"], event["end"]) for event in main],
        "weights": {name: digest(parameter) for name, parameter in parameters.items()},
        "gradients": recorder.gradients,
        "has_group": bool(recorder.groups),
        "inputs": recorder.inputs,
        "sampler": recorder.sampler,
    }


def read_trace(profiler: Any) -> list[dict]:
    """The events in the order of their begins, with `begin` and `end`."""
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_bytes())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" or event["name"] == "[memory]"]
    for event in events:
        event["begin"] = trace.get("baseTimeNanoseconds", 0) + round(1000 * event["ts"])
        event["end"] = event["begin"] + round(1000 * event.get("dur", 0))
    return sorted(events, key=lambda event: event["begin"])


GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events
GPU_GAP = 20_000  # ns: a shorter pause between two kernels of one phase is not drawn


def gpu_work(events: list[dict]) -> list[dict]:
    """Kernels and copies in the order of their launches, which CUDA numbers; each with the time `launched`."""
    numbered = [event for event in events if "correlation" in event.get("args", {})]
    launches = {e["args"]["correlation"]: e["begin"] for e in numbered if e["cat"] not in GPU_WORK}
    work = [event for event in numbered if event["cat"] in GPU_WORK]
    for event in work:
        event["launched"] = launches.get(event["args"]["correlation"], event["begin"])
    return sorted(work, key=lambda event: event["launched"])


def is_nccl(event: dict) -> bool:
    return event["name"].startswith("nccl")


def as_on_gpu(
    work: list[dict], spans: list[Span], cuts: list[int], messages: list[dict]
) -> tuple[list[Span], list[int]]:
    """Spans and cuts of a GPU: a kernel belongs to the span in which it was launched, and to the step."""
    spans = sorted([*spans, *losses(spans, messages)], key=lambda span: (span[1], -span[2]))
    launched = [event["launched"] for event in work]
    ends = [0, *itertools.accumulate((event["end"] for event in work), max)]
    gpu_cuts = [max(cut, ends[bisect_left(launched, cut)]) for cut in cuts]
    for message in messages:
        step = bisect_right(cuts, message["issued"])
        message["issued"] = max(message["begin"], gpu_cuts[step - 1] if step else 0)
    computing: list[Span] = []
    for event in sorted(work, key=lambda event: event["begin"]):
        if is_nccl(event):
            continue
        covering = [what for what, begin, end in spans if begin <= event["launched"] < end]
        what, begin, end = covering[-1] if covering else "data", event["begin"], event["end"]
        if computing and computing[-1][0] == what and begin < computing[-1][2] + GPU_GAP:
            begin, end = computing[-1][1], max(end, computing.pop()[2])
        computing.append((what, begin, end))
    waits = []
    for event in filter(is_nccl, work):
        now = event["begin"]
        for _, begin, end in computing:
            if now < begin < event["end"]:
                waits.append(("wait", now, begin))
            if begin < event["end"]:
                now = max(now, end)
        if now < event["end"]:
            waits.append(("wait", now, event["end"]))
    return [*computing, *waits], gpu_cuts


KINDS = re.compile("allreduce|allgather|reducescatter|broadcast|reduce|gather|scatter|alltoall|barrier|send|recv")
BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2}


def kind_of(event: dict) -> str:
    """Of an operation such as c10d::_allgather_base_, gloo:all_gather or ncclDevKernel_AllGather_RING_LL."""
    name = event.get("args", {}).get("Collective name", event["name"])
    found = KINDS.search(name.replace("_", "").lower())
    return found[0] if found else "message"


def messages_of(events: list[dict], work: list[dict], calls: list[dict]) -> list[dict]:
    """The calls, each with `begin` and `end` of its run: in a thread of gloo's, or NCCL's kernel, in their order."""
    runs = defaultdict(list)
    gloos = [event for event in events if event["name"].startswith("gloo:")]
    for event in [*gloos, *filter(is_nccl, work)]:
        kind = kind_of(event)
        if kind not in ("send", "recv") or not work:  # one kernel may be several of these, and nothing says which
            runs[kind].append(event)
    if not HAS_MESSAGE_HOOKS:
        calls = [old_call(event) for event in events if event["name"].startswith("c10d::")]
    messages = []
    for call in calls:
        kind = call["kind"] if runs[call["kind"]] else {"reducescatter": "allreduce"}.get(call["kind"], "")
        count = 1 if work else call["runs"]
        mine, runs[kind] = runs[kind][:count], runs[kind][count:]
        shapes = [(run["args"].get("Input Dims", []), run["args"].get("Input type", [])) for run in mine[:1]]
        sizes = [BYTES.get(dtype, 1) * math.prod(shape) for pair in shapes for shape, dtype in zip(*pair, strict=False)]
        begin, end = (mine[0]["begin"], mine[-1]["end"]) if mine else (call["issued"], call["issued"])  # of NCCL
        messages.append({"bytes": sum(sizes)} | call | {"begin": begin, "end": end})
    return messages


def old_call(event: dict) -> dict:
    """As the profiler of torch before 2.14 knows it."""
    call = {"kind": kind_of(event), "issued": event["begin"], "group": "", "runs": 1, "peer": None}
    if call["kind"] in ("send", "recv"):
        call["peer"] = int(event["args"]["Concrete Inputs"][2])
    return call


def ddp_waits(main: list[dict], spans: list[Span], messages: list[dict]) -> list[Span]:
    """DDP waits for its messages in C++, after the last node of a backward: there each pause of this thread is one."""
    if not any(event["name"] == "DistributedDataParallel.forward" for event in main):
        return []
    begins, waits = [event["begin"] for event in main], []
    for what, begin, end in spans:
        sent = [message for message in messages if begin <= message["issued"] < end]
        if what != "backward" or not sent:
            continue
        inside = main[bisect_left(begins, begin) : bisect_left(begins, end)]
        nodes = [event["end"] for event in inside if event["name"].startswith("autograd::engine::evaluate_function")]
        now = max(nodes, default=end)
        for event in [*(event for event in inside if event["begin"] >= now), {"begin": end, "end": end}]:
            if event["begin"] > now and any(message["end"] > now for message in sent):
                waits.append(("wait", now, event["begin"]))
            now = max(now, event["end"])
    return waits


def cut_late_ends(messages: list[dict], spans: list[Span], cuts: list[int]) -> None:
    """Gloo's thread notes an end late if the waiting thread goes on first: none is later than its step's last wait."""
    last: dict[int, int] = {}
    for what, begin, end in spans:
        if what == "wait":
            step = bisect_right(cuts, begin)
            last[step] = max(end, last.get(step, 0))
    for message in messages:
        latest = last.get(bisect_right(cuts, message["issued"]), 0)
        if message["begin"] < latest:
            message["end"] = min(message["end"], latest)


def allocations_of(events: list[dict], device: int) -> dict[int, list[list]]:
    """For each address its allocations [kind, bytes, begin, end, is the end known]; end 0: it is still there.

    What a call of a message allocates, or a thread of gloo's, are message buffers.
    """
    callers = [event for event in events if event["name"].startswith("c10d::")]
    calls = sorted((event["begin"], event["end"]) for event in callers)
    threads = {event["tid"] for event in events if event["name"].startswith("gloo:")}
    threads -= {event["tid"] for event in callers}  # sends and receives are noted there
    history: dict[int, list[list]] = defaultdict(list)
    for event in events:
        if event["name"] != "[memory]" or event["args"]["Device Type"] != device:
            continue
        size, now, parts = event["args"]["Bytes"], event["begin"], history[event["args"]["Addr"]]
        if size > 0:
            if parts and not parts[-1][3]:  # a thread of gloo's has freed it: such frees are not recorded
                parts[-1][3] = now
            call = bisect_right(calls, (now, now))
            is_message = event["tid"] in threads or (call > 0 and now < calls[call - 1][1])
            parts.append(["message buffers" if is_message else "", size, now, 0, False])
        elif parts:
            parts[-1][3:] = [now, True]
    return history


def named_allocations(
    history: dict[int, list], notes: list[tuple[int, dict]], spans: list[Span], messages: list[dict]
) -> list[list]:
    """All allocations with their kinds, and those that are noted and older than the recording (begin 0)."""
    for now, kinds in notes:
        for address, (kind, size) in kinds.items():
            alive = [part for part in history[address] if part[2] <= now and (not part[3] or now < part[3])]
            if alive and alive[0][0] in ("", "message buffers"):
                alive[0][0] = kind
            elif size and address and not history[address]:
                history[address].append([kind, size, 0, 0, True])
    issued = [message["issued"] for message in messages]
    backwards = sorted((begin, end) for what, begin, end in spans if what == "backward")
    parts = [part for parts in history.values() for part in parts]
    for part in parts:
        if not part[0]:
            place = bisect_right(backwards, (part[2], 0))  # of the next backward
            is_in_backward = place > 0 and part[2] < backwards[place - 1][1]
            is_kept = place < len(backwards) and (not part[3] or backwards[place][0] < part[3])
            part[0] = "activations" if is_kept and not is_in_backward else "temporary"
        elif part[0] == "message buffers" and not part[4] and issued and part[2] >= issued[0]:
            part[3] = max(part[2], messages[bisect_right(issued, part[2]) - 1]["end"])
    return [part[:4] for part in parts]


# ------------------------------------------------------------------------------- what is computed from all recordings

PARTS = ("forward", "backward", "optimizer", "waiting", "other")
NAMES = {"allreduce": "all-reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter"}


def numbered(recording: dict) -> dict[tuple, dict]:
    """A rank's messages by what is the same on all ranks that take part: the k-th of its kind and group in a step."""
    counts: Counter = Counter()
    found = {}
    for message in recording["messages"]:
        kind, step = message["kind"], bisect_right(recording["cuts"], message["issued"]) - 1
        key: tuple = (kind, message["group"], step)
        if message["peer"] is not None:
            pair = (recording["rank"], message["peer"])
            key = ("sent", message["group"], step, *(pair if kind == "send" else reversed(pair)))
        found[(*key, counts[key, kind], kind)] = message
        counts[key, kind] += 1
    return found


def align_clocks(recordings: list[dict]) -> str:
    """Between machines: all-reduces and their like end on all ranks at the same time.  Returns what was done."""
    said = []
    ends = [
        {key: m["end"] for key, m in numbered(recording).items() if key[0] in ("allreduce", "allgather", "barrier")}
        for recording in recordings
    ]
    for rank, other in enumerate(recordings):
        if other["machine"] == recordings[0]["machine"]:
            continue
        differences = sorted(ends[rank][key] - ends[0][key] for key in ends[0] if key in ends[rank])
        if not differences:
            said.append(f"rank {rank} is on another machine, and its clock could not be compared")
            continue
        shift, quarter = differences[len(differences) // 2], len(differences) // 4
        uncertain = max(differences[-1 - quarter] - shift, shift - differences[quarter])
        than = "ahead of" if shift > 0 else "behind"
        said.append(f"rank {rank}'s clock was {ms(abs(shift))} ms {than} rank 0's, give or take {ms(uncertain, 2)} ms")
        other["cuts"] = [cut - shift for cut in other["cuts"]]
        for key in ("spans", "operations"):
            other[key] = [(what, begin - shift, end - shift) for what, begin, end in other[key]]
        other["memory"] = [[kind, size, *(t and t - shift for t in times)] for kind, size, *times in other["memory"]]
        for message in other["messages"]:
            message |= {key: message[key] - shift for key in ("issued", "begin", "end")}
    return "; ".join(said)


def match_messages(recordings: list[dict]) -> list[dict]:
    """Note in each message until when it waited, and for the rank that came `last`.  Returns the arrows."""
    together: dict[tuple, dict] = defaultdict(dict)
    for recording in recordings:
        for key, message in numbered(recording).items():
            message |= {"until": message["begin"], "last": recording["rank"]}
            together[key[:-1]][recording["rank"]] = message
    arrows = []
    for key, messages in together.items():
        if key[0] != "sent":
            last = max(messages, key=lambda rank: messages[rank]["begin"])
            for message in messages.values():
                message |= {"until": min(messages[last]["begin"], message["end"]), "last": last}
        elif len(messages) == 2:
            step, source, target = key[2:5]
            begin, receive = messages[source]["issued"], messages[target]
            receive |= {"until": min(max(receive["begin"], begin), receive["end"]), "last": source}
            arrows.append({"step": step, "from": source, "to": target, "begin": begin, "end": receive["end"]})
    return arrows


def parts_of(recording: dict, begin: int, end: int) -> list[Span]:
    """The time from begin to end without a gap: what the innermost span says, else "other"."""
    spans = [span for span in recording["spans"] if span[1] < end and begin < span[2]]
    spans = sorted([*spans, *losses(spans, recording["messages"])], key=lambda span: (span[1], -span[2]))
    borders = sorted({begin, end, *(t for span in spans for t in span[1:] if begin < t < end)})
    parts: list[Span] = []
    for left, right in itertools.pairwise(borders):
        covering = [what for what, first, last in spans if first <= left and right <= last]
        what = {"wait": "waiting", "data": "other"}.get(covering[-1], covering[-1]) if covering else "other"
        if parts and parts[-1][0] == what:
            left = parts.pop()[1]
        parts.append((what, left, right))
    return parts


def losses(spans: list[Span], messages: list[dict]) -> Iterator[Span]:
    """Between a forward pass and its backward is the loss: forward, too, unless a message goes out there."""
    for what, begin, _ in spans:
        before = max((span for span in spans if span[2] <= begin), key=lambda span: span[2], default=("", 0, 0))
        sends = any(before[2] <= message["issued"] < begin for message in messages)
        if what == "backward" and before[0] == "forward" and not sends:
            yield ("forward", before[2], begin)


def waits_for(parts: list[Span], messages: list[dict]) -> Counter:
    """Of the waiting the nanoseconds for each rank; None: for none of them, as bytes moved or a queue was full."""
    found: Counter = Counter()
    for what, begin, end in parts:
        if what == "waiting":
            now = begin
            for message in sorted(messages, key=lambda message: message["begin"]):
                left, right = max(now, message["begin"]), min(end, message["until"])
                if left < right:
                    found[message["last"]] += right - left
                    now = right
                    begin += right - left
            found[None] += end - begin
    return found


def issued_in(recording: dict, begin: int, end: int) -> list[dict]:
    return [message for message in recording["messages"] if begin <= message["issued"] < end]


def memory_curve(allocations: list[list], begin: int, end: int) -> list[list[int]]:
    """[time, bytes of each of KEPT and BORN] at each change, from begin to end."""
    changes: dict[int, list[int]] = {begin: [0] * 6}
    for kind, size, born, freed in allocations:
        place = (*KEPT, *BORN).index(kind)
        if born < end and not 0 < freed <= begin:
            changes.setdefault(max(born, begin), [0] * 6)[place] += size
            if freed and freed < end:
                changes.setdefault(freed, [0] * 6)[place] -= size
    held, curve = [0] * 6, []
    for when in sorted(changes):
        held = [size + change for size, change in zip(held, changes[when], strict=True)]
        curve.append([when, *held])
    return [*curve, [end, *held]]


def lengths(recordings: list[dict], first: int, last: int) -> list[int]:
    """Of the steps from the first to the last, each on the rank where it took longest."""
    cuts = [recording["cuts"] for recording in recordings]
    return [max(cut[step + 1] - cut[step] for cut in cuts) for step in range(first, last + 1)]


def picture_of(recordings: list[dict], args: argparse.Namespace) -> dict:
    """All that is drawn and said; times in nanoseconds from the left end of the picture."""
    clocks = align_clocks(recordings)
    arrows = match_messages(recordings)
    first, last = recordings[0]["first"], min(recording["last"] for recording in recordings)
    shown = min(args.steps_shown, last - first + 1)
    windows = [step for step in range(first, last + 2 - shown) if step % shown == 0] or [first]
    step = min(windows, key=lambda step: sum(lengths(recordings, step, step + shown - 1)))
    begins = [recording["cuts"][step] for recording in recordings]
    if any(issued_in(recording, recording["cuts"][step], recording["cuts"][step + shown]) for recording in recordings):
        begins = [min(begins)] * len(begins)  # else each rank is drawn from its own begin
    ranks = []
    for recording, origin in zip(recordings, begins, strict=True):
        cuts = recording["cuts"][step : step + shown + 1]
        messages = issued_in(recording, cuts[0], cuts[-1])
        parts = parts_of(recording, cuts[0], cuts[-1])
        operations = [span for span in recording["operations"] if cuts[0] <= span[1] < cuts[-1]]
        times = ("issued", "begin", "until", "end")
        one = {
            "rank": recording["rank"],
            "cuts": [cut - origin for cut in cuts],
            "parts": [(what, begin - origin, end - origin) for what, begin, end in parts],
            "waits_for": [pair for pair in waits_for(parts, messages).items() if pair[1]],
            "messages": [message | {key: message[key] - origin for key in times} for message in messages],
            "memory": [[t - origin, *held] for t, *held in memory_curve(recording["memory"], cuts[0], cuts[-1])],
            "operations": [(what, begin - origin, end - origin) for what, begin, end in operations],
        }
        ranks.append(one)
    is_module = args.command[0] == "-m"
    program = args.command[1] if is_module else Path(args.command[0]).name
    picture = {
        "command": shlex.join(["timeline.py", *args.command]),
        "title": shlex.join([program.removesuffix(".py").rpartition(".")[2], *args.command[1 + is_module :]]),
        "setting": f"{counted(len(recordings), 'process')}, {recordings[0]['setting']}",
        "steps": [step, shown],
        "length": sum(lengths(recordings, step, step + shown - 1)),
        "begin": begins[0],
        "end": max(one["cuts"][-1] for one in ranks),
        "ranks": ranks,
        "arrows": [
            arrow | {"begin": arrow["begin"] - begins[0], "end": arrow["end"] - begins[0]}
            for arrow in arrows
            if step <= arrow["step"] < step + shown
        ],
    }
    return picture | {"findings": findings(picture, recordings, first, last, clocks)}


# --------------------------------------------------------------------------------------------------- what is said


def ms(nanoseconds: float, digits: int = 1) -> str:
    return f"{nanoseconds / 1e6:.{digits}f}"


def size_of(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.{0 if unit == 'kB' and count >= 1e4 else 1}f} {unit}"
    return f"{count} B"


def counted(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "es" if name.endswith(("s", "ch")) else "s")


def message_sums(one: dict) -> str:
    """Such as: 2 broadcasts 400 B together, 1 all-reduce 116 kB."""
    sizes = defaultdict(list)
    for message in one["messages"]:
        if message["kind"] != "recv":
            sizes[message["kind"]].append(message["bytes"])
    texts = []
    for kind, some in sizes.items():
        together = " together" if len(some) > 1 else ""
        texts.append(f"{counted(len(some), NAMES.get(kind, kind))} {size_of(sum(some))}{together}")
    return ", ".join(texts) or "no messages"


def memory_sums(one: dict) -> str:
    """The largest of each kind."""
    peaks = [max(column) for column in zip(*(held for _, *held in one["memory"]), strict=True)]
    texts = [f"{kind} {size_of(peak)}" for kind, peak in zip((*KEPT, *BORN), peaks, strict=True) if peak]
    return ", ".join(texts) or "not seen"


def part_sums(one: dict, has_others: bool) -> str:
    sums: Counter = Counter()
    for what, begin, end in one["parts"]:
        sums[what] += end - begin
    text = ", ".join(f"{part} {ms(sums[part])}" for part in PARTS if part in sums) + " ms"
    waits = [f"{ms(ns)} for rank {rank}" for rank, ns in one["waits_for"] if rank is not None]
    waits += [f"{ms(ns)} while bytes move" for rank, ns in one["waits_for"] if rank is None]
    return text + (f" (waiting: {', '.join(waits)})" if waits and has_others else "")


def of_ranks(texts: list[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    if len(set(texts)) == 1:
        return f"each rank: {texts[0]}"
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def who_came_last(recordings: list[dict], first: int, last: int) -> str:
    """In how many of the recorded steps the others waited longest for which rank."""
    messages = [message for recording in recordings for message in recording["messages"]]
    if messages and not any(message["begin"] < message["end"] for message in messages):
        return "not seen, as the profiler tells no times of messages"
    steps: Counter = Counter()
    waited: Counter = Counter()
    for step in range(first, last + 1):
        caused: Counter = Counter()
        for recording in recordings:
            begin, end = recording["cuts"][step : step + 2]
            caused += waits_for(parts_of(recording, begin, end), issued_in(recording, begin, end))
        del caused[None]
        if caused:
            rank, duration = caused.most_common(1)[0]
            steps[rank] += 1
            waited[rank] += duration
    count = last - first + 1
    texts = [
        f"for rank {rank} in {steps[rank]} of {count} steps, {ms(waited[rank] / steps[rank])} ms on average"
        for rank, _ in steps.most_common()
    ]
    return f"the others waited longest {'; '.join(texts)}" if texts else "no rank waited for another"


def findings(picture: dict, recordings: list[dict], first: int, last: int, clocks: str) -> list[tuple[str, str]]:
    """(subject, sentence) for each line."""
    (step, shown), ranks = picture["steps"], picture["ranks"]
    bare = lengths(recordings, WARM_UP, first - 2)
    steps = lengths(recordings, first, last)
    which = f"step {step + 1}" if shown == 1 else f"steps {step + 1} to {step + shown}"
    text = f"{ms(picture['length'])} ms: {which}, the shortest of {len(steps)} recorded (median of a step: "
    text += f"{ms(statistics.median(steps))} ms; of {len(bare)} without the recorder: {ms(statistics.median(bare))} ms)"
    lines = [("step", text)]
    lines += [(f"rank {one['rank']}", part_sums(one, len(ranks) > 1)) for one in ranks]
    drawn = {what for one in ranks for what, _, _ in one["parts"]}
    if missing := [part for part in PARTS[:2] if part not in drawn]:
        lines.append(("other", f"{' and '.join(missing)} can't be told apart, and are drawn as other"))
    if len(ranks) > 1:
        lines.append(("waiting", who_came_last(recordings, first, last)))
    text = of_ranks([message_sums(one) for one in ranks])
    if len(ranks) > 1 and not any(one["messages"] for one in ranks):
        text += ", so each rank is drawn from the beginning of its own step"
    lines.append(("messages", text))
    lines.append(("memory", "at most, " + of_ranks([memory_sums(one) for one in ranks])))
    if clocks:
        lines.append(("clocks", clocks))
    if len({recording["last"] for recording in recordings}) > 1:
        lines.append(("ranks", "they made different numbers of steps: with DDP those with more wait for ever"))
    if len(ranks) > 1 and any(recording["has_group"] for recording in recordings):
        lines += equalities(recordings, last)
    elif len(ranks) > 1:
        text = "they are in no process group: separate programs, which average nothing (--nproc 1 starts only one)"
        lines.append(("ranks", text))
    return lines


def equalities(recordings: list[dict], last: int) -> Iterator[tuple[str, str]]:
    """Whether weights, inputs and gradients are equal on all ranks, and what that means."""
    weights, gradients = ([recording[key] for recording in recordings] for key in ("weights", "gradients"))
    names = [name for name in weights[0] if all(name in table for table in weights)]
    if not names:
        yield "weights", "the ranks have no tensor in common: a pipeline"
        return
    elif all(weights[0][name] == "sharded" for name in names):
        yield "weights", f"{len(names)} tensors are sharded: each rank has its part (FSDP)"
    elif first_difference(weights):
        count = sum(len({table[name] for table in weights}) > 1 for name in names)
        by = f"by up to {recordings[0]['difference']:.3g}" if "difference" in recordings[0] else "even in its shape"
        text = f"{count} of {len(names)} tensors differ after step {last + 1}"
        text += f" (the first, {first_difference(weights)}, {by}): "
        yield "weights", text + "a mistake in data parallelism, but not in tensor parallelism or within local SGD"
    else:
        yield "weights", f"{len(names)} tensors are equal on all ranks after step {last + 1}: right in data parallelism"
    yield from inputs_of(recordings)
    names = [name for name in gradients[0] if all(name in table for table in gradients)]
    if not names or all(gradients[0][name] == "sharded" for name in names):
        return
    if first_difference(gradients):
        text = f"different on the ranks, {first_difference(gradients)} first, so not averaged: a mistake in data "
        yield "gradients", text + "parallelism, but not in ZeRO, tensor parallelism or local SGD"
    elif len({recording["inputs"] for recording in recordings}) == 1:
        yield "gradients", "equal on all ranks, as the inputs are"
    else:
        yield "gradients", "equal on all ranks, though the inputs are not: they were averaged"


def inputs_of(recordings: list[dict]) -> Iterator[tuple[str, str]]:
    """Whether the ranks trained on the same."""
    inputs = {recording["inputs"] for recording in recordings}
    if inputs == {""}:
        if not any(recording["gradients"] for recording in recordings):
            yield "inputs", "and gradients: not looked at, as the program ended before all steps were recorded"
    elif len(inputs) == 1:
        yield "inputs", "equal on all ranks: a mistake in data parallelism, but right in tensor parallelism"
    else:
        are = "different on all ranks" if len(inputs) == len(recordings) else "equal on some ranks, different on others"
        means = ": right in data parallelism, if a sampler has shared them out"
        if any(recording["sampler"] == "RandomSampler" for recording in recordings):
            means = ", but drawn from the whole data set (DataLoader's shuffle=True, no sampler): a mistake in data "
            means += "parallelism, unless each rank has a data set of its own"
        yield "inputs", are + means


def say(lines: Iterable[tuple[str, str]]) -> None:
    width = max(40, shutil.get_terminal_size().columns - 1)
    for subject, sentence in lines:
        print(textwrap.fill(f"{subject:9} {sentence}", width, subsequent_indent=" " * 10), flush=True)


# ---------------------------------------------------------------------------------------------------- what is drawn

LEFT, PLOT, WIDTH = 84, 640, 860  # pixels: where the time begins, how long it is; the whole
LANE, ROW, AREA = 26, 13, 34  # heights: of a rank, of a row of messages, of memory
MOST_ROWS = 8  # of messages
CLASSES = {"forward": "f", "backward": "b", "optimizer": "o", "other": "x", "waiting": "w"}
CLASSES |= {"weights": "v", "optimizer state": "s", "gradients": "b", "message buffers": "m"}
CLASSES |= {"activations": "f", "temporary": "x"}
STYLE = """<style>
svg{--page:#fff;--ink:#1c2128;--soft:#57606a;--forward:#9ccbf2;--backward:#1f63ac;--optimizer:#35b58a;--other:#cdd1d6;
--hatch:#c0322b;--message:#f0a32a;--edge:#a86a00;--weights:#3a434d;--state:#6fd0ae}
@media(prefers-color-scheme:dark){svg{--page:#0d1117;--ink:#e6edf3;--soft:#9aa4af;--forward:#7fb5e2;--backward:#2f74c0;
--other:#565d66;--hatch:#ff8a80;--message:#e39a2b;--edge:#f2c572;--weights:#aeb8c2;--state:#4fb795}}
text{font:13px system-ui,sans-serif;fill:var(--ink)}.title{font-weight:600;font-size:15px}.soft{fill:var(--soft)}
.right{text-anchor:end}.middle{text-anchor:middle}.small{font-size:11px}.light{fill:#fff}.dark{fill:#1c2128}
.page{fill:var(--page)}.f{fill:var(--forward)}.b{fill:var(--backward)}.o{fill:var(--optimizer)}.x{fill:var(--other)}
.w{fill:url(#hatch)}.m{fill:var(--message)}.v{fill:var(--weights)}.s{fill:var(--state)}.queue{fill:var(--edge)}
.stays{fill:var(--message);fill-opacity:.18;stroke:var(--edge);stroke-dasharray:2.5 1.5}
.line{stroke:var(--soft);fill:none}.arrow{stroke:var(--edge);stroke-width:1.4;marker-end:url(#head)}.hatch{stroke:var(--hatch)}
.layer{stroke:var(--page);stroke-width:.7}.limit{stroke:var(--hatch);stroke-dasharray:5 3}
</style><defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path class="hatch" d="M0,0v6"/></pattern><marker id="head" class="queue" viewBox="0 0 6 6" refX="5" refY="3"
markerWidth="5" markerHeight="5" orient="auto"><path d="M0,0L6,3L0,6z"/></marker></defs>"""


class Drawing:
    """Lines of SVG, from top to bottom; y is where the next thing is drawn."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.y = 8.0
        self.lines: list[str] = []

    def x(self, time: float) -> float:
        return LEFT + PLOT * time / self.longest

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        self.lines.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def row(self, name: str, value: str, y: float) -> None:
        """The name of a lane, and at its other end a figure."""
        self.text(12, y, name, "soft")
        self.text(WIDTH - 12, y, value, "right soft")

    def path(self, style: str, path: str) -> None:
        self.lines.append(f'<path class="{style}" d="{path}"/>')

    def boxes(self, style: str, boxes: Iterable[tuple[float, float]], top: float, height: float) -> None:
        """Rectangles of one style in a row, each from left to right."""
        sides = [(left, max(right - left, 0.4)) for left, right in boxes]
        if sides:
            self.path(style, "".join(f"M{x:.1f},{top:.1f}h{width:.1f}v{height}h-{width:.1f}z" for x, width in sides))


def text_width(text: str, size: int = 13) -> float:
    return 0.6 * size * len(text)


def draw(pictures: list[dict]) -> str:
    """One SVG with the pictures below each other, on one scale."""
    drawing = Drawing(max(picture["end"] for picture in pictures))
    curves = [one["memory"] for picture in pictures for one in picture["ranks"]]
    peaks = [max(peak_of(curve, two_areas(curve)[area]) for curve in curves) for area in (0, 1)]
    for picture in pictures:
        draw_picture(drawing, picture, peaks)
    draw_axis(drawing)
    draw_legend(drawing, pictures)
    drawing.y += 6
    for picture in pictures:
        drawing.y += 15
        command = textwrap.shorten(picture["command"], 70, placeholder=" ...")
        drawing.text(12, drawing.y, f"{command}: {picture['setting']}", "soft small")
    width, height = WIDTH, round(drawing.y + 10)
    title = "What each process does in a step: " + "; ".join(picture["title"] for picture in pictures)
    told = ". ".join(f"{subject}: {sentence}" for picture in pictures for subject, sentence in picture["findings"])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"',
        f'role="img" aria-labelledby="title told"><title id="title">{escape(title)}</title>',
        f'<desc id="told">{escape(told)}</desc>{STYLE}',
        f'<path class="page" d="M0,0h{width}v{height}h-{width}z"/>',
    ]
    return "\n".join([*lines, *drawing.lines, "</svg>\n"])


def draw_picture(drawing: Drawing, picture: dict, peaks: list[int]) -> None:
    shown, ranks = picture["steps"][1], picture["ranks"]
    drawing.y += 18
    drawing.text(12, drawing.y, textwrap.shorten(picture["title"], 60, placeholder=" ..."), "title")
    steps = "one step" if shown == 1 else f"{shown} steps"
    drawing.text(WIDTH - 12, drawing.y, f"{steps}: {ms(picture['length'])} ms", "right")
    drawing.y += 17
    drawing.text(12, drawing.y, of_ranks([message_sums(one) for one in ranks])[:110], "soft")
    drawing.y += 8
    tops = {}
    for one in ranks:
        tops[one["rank"]] = drawing.y
        draw_rank(drawing, one)
        drawing.y += 26 if picture["arrows"] and one is not ranks[-1] else 0
    for arrow in picture["arrows"]:
        is_down = tops[arrow["to"]] > tops[arrow["from"]]
        ends = (tops[arrow["from"]] + LANE * is_down, tops[arrow["to"]] + LANE * (not is_down))
        x, y = [drawing.x(arrow[key]) for key in ("begin", "end")], ends
        drawing.path("arrow", f"M{x[0]:.1f},{y[0]:.1f}L{x[1]:.1f},{y[1]:.1f}")
    for link in picture.get("links", []):
        draw_link(drawing, link)
    for rank, curve in memory_lanes(ranks):
        for name, kinds, peak in zip(("kept", "working"), two_areas(curve), peaks, strict=True):
            draw_memory(drawing, name + rank, curve, kinds, max(peak, 1))
    drawing.y += 6


def draw_rank(drawing: Drawing, one: dict) -> None:
    """A lane with what the process does, and rows with its messages."""
    top = drawing.y
    waits = sum(end - begin for what, begin, end in one["parts"] if what == "waiting")
    drawing.row(f"rank {one['rank']}", f"waits {ms(waits)} ms", top + 18)
    for part in PARTS:
        spans = [(begin, end) for what, begin, end in one["parts"] if what == part]
        drawing.boxes(CLASSES[part], [(drawing.x(begin), drawing.x(end)) for begin, end in spans], top, LANE)
        begin, end = max(spans, key=lambda span: span[1] - span[0], default=(0, 0))
        word, middle = part.replace("waiting", "waits"), drawing.x((begin + end) / 2)
        half = text_width(word) / 2
        if drawing.x(end) - drawing.x(begin) > 2 * half + 6:
            if part == "waiting":  # no text on the hatching
                drawing.boxes("page", [(middle - half, middle + half)], top + 5, LANE - 10)
            style = {"backward": "light", "waiting": "", "other": ""}.get(part, "dark")
            drawing.text(middle, top + 18, word, f"middle {style}")
    cuts = [drawing.x(cut) for cut in one["cuts"]]
    drawing.boxes("line", itertools.pairwise(cuts), top, LANE)
    drawing.y = top + LANE + 5
    draw_messages(drawing, [message for message in one["messages"] if message["peer"] is None])
    drawing.y += 5


def draw_messages(drawing: Drawing, messages: list[dict]) -> None:
    """Each in the first row that is free: a line in the queue, a pale box while it waits, a full one after that."""
    rows: list[list[tuple]] = []
    largest = max((message["bytes"] for message in messages), default=0)
    for message in messages:
        name = f"{NAMES.get(message['kind'], message['kind'])} {size_of(message['bytes'])}"
        text = name if message["bytes"] > largest / 10 else ""
        place = (*(drawing.x(message[key]) for key in ("issued", "begin", "until", "end")), text)
        row = next((row for row in rows if row[-1][3] + 1 < place[0]), None)
        if row:
            row.append(place)
        elif len(rows) < MOST_ROWS:
            rows.append([place])
    for row in rows:
        top, height = drawing.y, ROW - 2
        drawing.boxes("queue", [(x0, x1) for x0, x1, *_ in row if x1 - x0 > 0.5], top + height / 2 - 0.5, 1)
        drawing.boxes("stays", [(x1, x2) for _, x1, x2, *_ in row if x2 - x1 > 0.5], top + 0.5, height - 1)
        drawing.boxes("m", [(x2, x3) for _, _, x2, x3, _ in row], top, height)
        begins = [*(x0 for x0, *_ in row[1:]), WIDTH - 12]
        for (_, _, x2, x3, text), following in zip(row, begins, strict=True):
            if x3 - x2 > text_width(text, 11) + 4:
                drawing.text((x2 + x3) / 2, top + 9, text, "middle dark small")
            elif text and x3 + text_width(text, 11) + 8 < following:
                drawing.text(x3 + 4, top + 9, text, "soft small")
        drawing.y += ROW


def memory_lanes(ranks: list[dict]) -> list[tuple[str, list]]:
    """(rank, curve): one for all ranks, without a number, if they hold the same."""
    curves = [one["memory"] for one in ranks]
    peaks = [[peak_of(curve, kinds) for curve in curves] for kinds in ((0, 1, 2), range(6))]
    if all(max(some) <= 1.05 * min(some) for some in peaks):
        return [("", curves[0])] if any(peaks[1]) else []
    return [(f" {one['rank']}", one["memory"]) for one in ranks]


def peak_of(curve: list[list[int]], kinds: Iterable[int]) -> int:
    return max(sum(held[kind] for kind in kinds) for _, *held in curve)


def two_areas(curve: list[list[int]]) -> tuple[list[int], list[int]]:
    """The kinds in each: what is kept, and activations, which are much more.  Message buffers may be either."""
    if peak_of(curve, [3]) <= 2 * peak_of(curve, [0, 1, 2]):
        return [0, 1, 2, 3], [4, 5]
    return [0, 1, 2], [3, 4, 5]


def draw_memory(drawing: Drawing, name: str, curve: list[list[int]], kinds: list[int], peak: int) -> None:
    """Areas on top of each other; of the changes within two pixels the largest sum is drawn."""
    drawing.y += AREA + 4
    base = drawing.y
    points: list[tuple[float, list[int]]] = []
    for when, *held in curve:
        x, sums = drawing.x(when), list(itertools.accumulate(held[kind] for kind in kinds))
        if points and x - points[-1][0] < 2:
            points[-1] = (points[-1][0], max(points[-1][1], sums, key=lambda sums: sums[-1]))
        elif not points or sums != points[-1][1]:
            points.append((x, sums))
    begin, end = points[0][0], drawing.x(curve[-1][0])
    for level in reversed(range(len(kinds))):
        if peak_of(curve, [kinds[level]]):
            path = "".join(f"H{x:.1f}V{base - AREA * sums[level] / peak:.1f}" for x, sums in points)
            style = CLASSES[(*KEPT, *BORN)[kinds[level]]]
            drawing.path(f"{style} layer", f"M{begin:.1f},{base:.1f}{path}H{end:.1f}V{base:.1f}z")
    drawing.path("line", f"M{begin:.1f},{base:.1f}H{end:.1f}")
    drawing.row(name, f"peak {size_of(peak_of(curve, kinds))}", base - 8)


def draw_link(drawing: Drawing, link: dict) -> None:
    """What left a network link: {name, rates: [[time, bytes per second]], limit, sent}; experiments/timelines.py."""
    drawing.y += 28
    base, top = drawing.y, max(link["limit"], *(rate for _, rate in link["rates"]), 1)
    path = "".join(f"H{drawing.x(when):.1f}V{base - 24 * rate / top:.1f}" for when, rate in link["rates"])
    begin, end = drawing.x(link["rates"][0][0]), drawing.x(link["rates"][-1][0])
    drawing.path("m", f"M{begin:.1f},{base}{path}V{base}z")
    drawing.path("line", f"M{begin:.1f},{base}H{end:.1f}")
    if link["limit"]:
        drawing.path("limit", f"M{begin:.1f},{base - 24 * link['limit'] / top:.1f}H{end:.1f}")
    drawing.row(link["name"], f"sent {size_of(link['sent'])}", base - 6)


def draw_axis(drawing: Drawing) -> None:
    steps = [digit * 10**power for power in range(3, 13) for digit in (1, 2, 5)]
    step = next(step for step in steps if drawing.longest / step <= 7)
    drawing.y += 10
    marks = range(0, drawing.longest + 1, step)
    ticks = "".join(f"M{drawing.x(mark):.1f},{drawing.y}v5" for mark in marks)
    drawing.path("line", f"M{LEFT},{drawing.y}h{PLOT}{ticks}")
    for mark in marks:
        drawing.text(drawing.x(mark), drawing.y + 18, f"{mark / 1e6:g} ms" if mark else "0", "middle")
    drawing.y += 26


def draw_legend(drawing: Drawing, pictures: list[dict]) -> None:
    """Only what is drawn."""
    ranks = [one for picture in pictures for one in picture["ranks"]]
    drawn = {what for one in ranks for what, _, _ in one["parts"]}
    held = [kind for place, kind in enumerate((*KEPT, *BORN)) if any(peak_of(one["memory"], [place]) for one in ranks)]
    rows = {
        "time": [(CLASSES[part], part.replace("waiting", "waits")) for part in PARTS if part in drawn],
        "messages": [("queue", "in the queue"), ("stays", "waits for a rank"), ("m", "bytes move")],
        "memory": [(CLASSES[kind], kind) for kind in held],
    }
    if not any(message["peer"] is None for one in ranks for message in one["messages"]):
        del rows["messages"]
    if not held:
        del rows["memory"]
    for name, entries in rows.items():
        drawing.y += 20
        drawing.text(12, drawing.y, name, "soft")
        x = LEFT
        for style, word in entries:
            drawing.boxes(
                style, [(x, x + 18)], drawing.y - (6 if style == "queue" else 11), 1 if style == "queue" else 13
            )
            drawing.boxes("line", [(x, x + 18)] if style == "w" else [], drawing.y - 11, 13)
            drawing.text(x + 23, drawing.y, word)
            x += round(23 + text_width(word) + 14)
    if any(picture["arrows"] for picture in pictures):
        drawing.y += 20
        drawing.path("arrow", f"M{LEFT},{drawing.y - 4}h20")
        drawing.text(LEFT + 27, drawing.y, "a message to another rank: from its send to the end of the wait for it")


def trace_of(picture: dict) -> dict:
    """Chrome's trace format, for Perfetto: a process for each rank; and the picture itself, for --draw."""
    events: list[dict] = []

    def add(rank: int, thread: int, name: str, spans: Iterable[tuple], **args: Any) -> None:
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
        for what, begin, end in spans:
            place = {"pid": rank, "tid": thread, "ts": begin / 1000, "dur": (end - begin) / 1000}
            events.append({"ph": "X", "cat": name, "name": what, **place, "args": args})

    for one in picture["ranks"]:
        rank, rows = one["rank"], []  # a thread for each row of messages, as those of one thread may not overlap
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        add(rank, 1, "what it does", one["parts"])
        add(rank, 2, "torch's operations", one["operations"])
        for message in one["messages"]:
            row = next((row for row, end in enumerate(rows) if end <= message["issued"]), len(rows))
            rows[row : row + 1] = [message["end"]]
            name = NAMES.get(message["kind"], message["kind"])
            parts = [("queue", "issued", "begin"), (f"{name} waits", "begin", "until"), (name, "until", "end")]
            spans = [
                (what, message[begin], message[end]) for what, begin, end in parts if message[begin] < message[end]
            ]
            add(rank, 10 + row, f"messages {row + 1}", spans, bytes=message["bytes"])
        for when, *held in one["memory"]:
            args = dict(zip((*KEPT, *BORN), held, strict=True))
            events.append({"ph": "C", "name": "memory", "pid": rank, "ts": when / 1000, "args": args})
    for number, arrow in enumerate(picture["arrows"]):
        for phase, rank, when in (("s", arrow["from"], arrow["begin"]), ("f", arrow["to"], arrow["end"])):
            event = {"ph": phase, "cat": "message", "name": "message", "id": number, "pid": rank, "tid": 1, "bp": "e"}
            events.append(event | {"ts": when / 1000})
    kept = picture | {"ranks": [{key: one[key] for key in one if key != "operations"} for one in picture["ranks"]]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "timeline": kept}


# ------------------------------------------------------------------------------------------------ the command line


def show(recordings: list[dict], args: argparse.Namespace) -> int:
    """Say, draw and save what was recorded; returns the exit code."""
    if min(recording["last"] for recording in recordings) < recordings[0]["first"]:
        made = min(max(0, len(recording["cuts"]) - 1) for recording in recordings)
        said = (
            f"the program made {counted(made, 'step')}; --steps {args.steps} records from step "
            f"{recorded_steps(args.steps)[0] + 1} on"
        )
        said += ": let it make more, or give fewer --steps"
        if not any(recording["cuts"] for recording in recordings):
            said = "no optimizer of torch.optim made a step, so there is no step to draw"
        print(f"timeline: {said}", file=sys.stderr)
        return 1
    picture = picture_of(recordings, args)
    Path(f"{args.out}.json").write_text(json.dumps(trace_of(picture), separators=(",", ":")), encoding="utf-8")
    Path(f"{args.out}.svg").write_text(draw([picture]), encoding="utf-8")
    say([*picture["findings"], ("written", f"{args.out}.svg, {args.out}.json")])
    return 0


def draw_files(files: list[str], out: str) -> int:
    """What `show` has saved, below each other."""
    pictures = []
    for file in files:
        try:
            pictures.append(json.loads(Path(file).read_text(encoding="utf-8"))["timeline"])
        except (OSError, ValueError, KeyError, TypeError) as problem:
            print(f"timeline: {file} is no recording of timeline.py: {problem!r}", file=sys.stderr)
            return 2
    Path(f"{out}.svg").write_text(draw(pictures), encoding="utf-8")
    say([("written", f"{out}.svg")])
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--steps", type=int, default=20, help="to record (default: %(default)s)")
    parser.add_argument("--steps-shown", type=int, default=1, help="in the picture (default: %(default)s)")
    parser.add_argument("--out", default="timeline", help="writes OUT.svg and OUT.json (default: %(default)s)")
    parser.add_argument("--nproc", type=int, help="processes (default: one per GPU; without a GPU, 2)")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for a step (default: %(default)s)")
    parser.add_argument("--draw", nargs="+", metavar="FILE", help="draw these recordings, run nothing")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module, and its flags")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a program, and its flags")
    args = parser.parse_args()
    args.command = ["-m", *args.module] if args.module else args.script
    if bool(args.draw) == bool(args.command):
        parser.error("give a program, such as mnist_ddp.py --dataset synthetic, or --draw and recordings")
    if not 1 <= args.steps_shown <= args.steps:
        parser.error("--steps must be at least 1, and --steps-shown between 1 and --steps")
    if not args.patience > 0 or (args.nproc is not None and args.nproc < 1):
        parser.error("--nproc must be at least 1, and --patience greater than 0")
    if args.command and args.command[0] != "-m" and not os.path.isfile(args.command[0]):
        parser.error(f"there is no file {args.command[0]}")
    return args


def main() -> int:
    args = parse_args()
    if args.draw:
        return draw_files(args.draw, args.out)
    recordings = dist.launch(record, args, nproc=args.nproc)
    return show(recordings, args) if recordings else 0


if __name__ == "__main__":
    sys.exit(main())
