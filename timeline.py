"""See what each process does in a step: runs a program, records some of its steps, draws one, says what it found.

    python timeline.py mnist_ddp.py --dataset synthetic                  # starts two processes, or one for each GPU
    python timeline.py --steps-shown 8 -m variants.mnist_local_sgd       # a module; eight steps in one picture
    torchrun --nproc_per_node=2 timeline.py train.py --my-flags          # any program, with or without distributed.py
    python timeline.py --draw a.json b.json --out both                   # two recordings, on one scale

The program is not changed, and it needs nothing but a torch.optim optimizer.  timeline.svg has a lane for each rank:
forward, backward, optimizer, waiting; below it the messages, then the memory.  timeline.json has the same, and torch's
operations, for https://ui.perfetto.dev.  docs/timeline.md says how to read them.

A step lies between two steps of the (first) optimizer; it begins where the DataLoader is asked for the next batch, if
it is.  The first steps are left out, the next ones run without the recorder, then come those that are recorded; then
the program is left.  No real GPU was seen by this file: there it draws what the process does, not the GPU's kernels.
"""

import argparse
import contextlib
import ctypes
import hashlib
import io
import itertools
import json
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
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns of memory that is older than the recording
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # of the profiler

import torch  # noqa: E402
from torch import distributed as torch_dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.modules import module as nn_module  # noqa: E402
from torch.optim import optimizer as torch_optimizer  # noqa: E402
from torch.utils.data import dataloader  # noqa: E402

import distributed as dist  # noqa: E402

WARM_UP = 3  # steps
HAS_MESSAGE_HOOKS = hasattr(torch_dist.ProcessGroup, "register_pre_hook")  # torch 2.14: which tensors are sent
Span = tuple[str, int, int]  # what, begin, end in nanoseconds since 1970

# ------------------------------------------------------------------------------------------------ what a rank records


def recorded_steps(count: int) -> tuple[int, int]:
    """The first and the last, counted from 0.  Before them are steps without the recorder, and the one that starts it."""
    first = WARM_UP + max(1, count // 2) + 1
    return first, first + count - 1


class Finished(BaseException):
    """Enough was recorded: leaves the program, through all of its `except Exception`."""


class Recorder:
    """Notes what this process's program does: spans of time, messages, tensors.  torch's profiler notes the rest."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.first, self.last = recorded_steps(args.steps)
        self.is_over = threading.Event()
        self.thread = threading.get_ident()
        self.spans: list[list] = []  # [what, begin, end], in the order of their begins
        self.open: list[list] = []  # those that have not ended, the innermost last
        self.optimizer: Any = None  # the first that makes a step
        self.cut, self.cut_is_final = 0, True  # where the next step begins
        self.cuts: list[int] = []  # where the steps begin
        self.step_begins = True
        self.last_event = time.monotonic()  # for the watch
        self.models: dict[int, nn.Module] = {}  # those with parameters that no other module calls
        self.calls: list[dict] = []  # messages
        self.tensors: list[tuple[int, dict]] = []  # time, {address: (kind, bytes)}
        self.groups: dict = {}
        self.inputs = ""
        self.gradients: dict[str, str] = {}
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            profile_memory=True,
            record_shapes=not HAS_MESSAGE_HOOKS,  # costs time: only where no hook says how large a message is
        )
        self.is_profiling = False

    @property
    def step(self) -> int:
        """The number, from 0, of the step whose optimizer was called last."""
        return len(self.cuts) - 1

    def is_recorded(self, step: int) -> bool:
        return self.first <= step <= self.last

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Whoever calls a module, backward, an optimizer, a loader's batch or a wait tells it to this recorder."""
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
        originals = [(place, name, getattr(place, name)) for place, name, _ in patched]
        for place, name, what in patched:
            setattr(place, name, self.noted(getattr(place, name), what))
        threading.Thread(target=self.watch, daemon=True).start()
        try:
            yield
        finally:
            self.is_over.set()
            for place, name, original in originals:
                setattr(place, name, original)
            for handle in handles:
                handle.remove()

    def noted(self, function: Callable, what: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_elsewhere():
                return function(*args, **kwargs)
            if what == "backward":
                self.maybe_begin_step()
            self.begin(what)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return call

    def begin(self, what: str) -> None:
        now = time.time_ns()
        if what == "data" and not self.cut_is_final:
            self.cut, self.cut_is_final = now, True
        self.open.append([what, now, 0])
        self.spans.append(self.open[-1])

    def end(self) -> None:
        self.open.pop()[2] = time.time_ns()

    def is_elsewhere(self) -> bool:
        return torch.compiler.is_compiling() or threading.get_ident() != self.thread

    def before_module(self, module: nn.Module, args: Any) -> None:
        """A forward pass is a call of a module with parameters, by no other module and not to load data."""
        if self.is_elsewhere() or (self.open and self.open[-1][0] in ("forward", "data")):
            return
        if id(module) not in self.models:
            if next(module.parameters(), None) is None:
                return
            self.models[id(module)] = module
        if torch.is_grad_enabled():
            self.maybe_begin_step()
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
            self.cuts.append(self.cut or time.time_ns())
            self.last_event = time.monotonic()
        if self.is_recorded(self.step):
            self.note_tensors(optimizer, "gradients")
        if self.step > self.last and optimizer is self.optimizer:
            self.gradients = {name: digest(p.grad) for name, p in self.parameters(optimizer) if p.grad is not None}
            raise Finished  # here, where all ranks are at the same place and the weights are those after the last step
        self.begin("optimizer")

    def after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_elsewhere():
            return
        self.end()
        if self.is_recorded(self.step):
            self.note_tensors(optimizer, "weights")
        if optimizer is self.optimizer:
            self.step_begins = True
            if self.step == self.last:
                for model in self.models.values():
                    model.register_forward_pre_hook(self.note_inputs, with_kwargs=True)
        self.cut, self.cut_is_final = time.time_ns(), False

    def maybe_begin_step(self) -> None:
        """Called at each forward and backward, as torch crashes if its profiler is started inside an optimizer's step."""
        if not self.step_begins or not self.cuts:
            return
        self.step_begins = False
        if len(self.cuts) == self.first - 1:
            self.hook_groups()
            self.profiler.start()
            self.is_profiling = True

    def hook_groups(self) -> None:
        """Let the process groups say what they send: with torch 2.14 and newer."""
        for group in torch_dist.distributed_c10d._world.pg_map if torch_dist.is_initialized() else ():
            self.groups[group.group_name] = torch_dist.get_process_group_ranks(group)
            if HAS_MESSAGE_HOOKS:
                group.register_pre_hook(38, lambda args, name=group.group_name: self.note(args, name))

    def note(self, args: Any, group: str) -> None:
        tensors = args.input_tensors or args.output_tensors
        self.calls.append(
            {
                "kind": args.name.name.lower().replace("_", ""),
                "bytes": sum(tensor.nbytes for tensor in tensors),
                "runs": len(tensors) if args.name.name == "REDUCE_SCATTER" else 1,
                "peer": self.groups[group][args.root] if args.name.name in ("SEND", "RECV") else None,
                "group": group,
                "issued": time.time_ns(),
            }
        )
        buffers = {memory_of(tensor): tensor for tensor in (*args.input_tensors, *args.output_tensors)}
        sizes = {address: ("message buffers", t.untyped_storage().nbytes()) for address, t in buffers.items()}
        self.tensors.append((time.time_ns(), sizes))

    def parameters(self, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the models, by their names, and what only the optimizer knows."""
        known, names = set(), set()
        for model in self.models.values():
            for name, parameter in model.named_parameters():
                name = re.sub(r"\b(module|_orig_mod)\.", "", name)
                if id(parameter) not in known:
                    yield f"{type(model).__name__}.{name}" if name in names else name, parameter
                known.add(id(parameter))
                names.add(name)
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(stepped):
            if id(parameter) not in known:
                yield f"the optimizer's parameter {number}", parameter

    def note_tensors(self, optimizer: Any, kind: str) -> None:
        """Where in memory weights and optimizer state are, or gradients."""
        parameters = [parameter for _, parameter in self.parameters(optimizer)]
        if kind == "gradients":
            tensors = [(kind, parameter.grad) for parameter in parameters]
        else:
            buffers = [buffer for model in self.models.values() for buffer in model.buffers()]
            state = [value for values in optimizer.state.values() for value in values.values()]
            tensors = [("optimizer state", value) for value in state] + [(kind, t) for t in (*parameters, *buffers)]
        found = [(kind, local(tensor)) for kind, tensor in tensors if isinstance(tensor, torch.Tensor)]
        sizes = {memory_of(tensor): (kind, tensor.untyped_storage().nbytes()) for kind, tensor in found}
        self.tensors.append((time.time_ns(), sizes))

    def note_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Of the first forward pass after the recorded steps."""
        tensors = [value for value in flat((args, kwargs)) if isinstance(value, torch.Tensor)]
        if not self.inputs and tensors:
            self.inputs = " ".join(map(digest, tensors))

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.parameters(self.optimizer)) if self.optimizer else {}

    def watch(self) -> None:
        """In a thread of its own: ends a program that makes no steps any more."""
        patience = self.args.patience
        while time.monotonic() - self.last_event < patience:
            if self.is_over.wait(min(0.5, patience / 4)):
                return
        frame, libraries = sys._current_frames()[self.thread], (os.path.dirname(torch.__file__), __file__)
        while frame.f_back and frame.f_code.co_filename.startswith(libraries):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"
        said = f"timeline: rank {dist.get_rank()} has made no step for {patience:g} s, {len(self.cuts)} before"
        print(f"{said}; it stands in {place}", file=sys.stderr, flush=True)
        if dist.is_primary():
            show_alone(self)
        os._exit(1)


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from flat(part)
    else:
        yield value


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor this rank's share."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def digest(tensor: torch.Tensor) -> str:
    """Equal for equal tensors; of a sharded DTensor only that it is sharded."""
    if any(placement.is_shard() for placement in getattr(tensor, "placements", ())):
        return "sharded"
    data = local(tensor).cpu().contiguous()
    values = ctypes.string_at(data.data_ptr(), data.nbytes) if data.nbytes else b""
    return hashlib.blake2b(values + str((data.dtype, *data.shape)).encode(), digest_size=8).hexdigest()


def run_program(recorder: Recorder, command: list[str]) -> None:
    """The program as __main__, in this process."""
    # The program may have files of its own with these names.
    helpers = {name: sys.modules.pop(name) for name in ("distributed", "launcher") if name in sys.modules}
    sys.argv = command[1:] if command[0] == "-m" else list(command)
    sys.path[0] = os.getcwd() if command[0] == "-m" else os.path.dirname(os.path.abspath(command[0]))
    with recorder.installed(), contextlib.suppress(Finished):
        try:
            if command[0] == "-m":
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.modules.update(helpers)


def record(local_rank: int, world_size: int, args: argparse.Namespace) -> list[dict] | None:
    """One rank: runs the program.  On rank 0 it returns the recordings of all ranks."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} | alone).items():
        os.environ.setdefault(name, value)  # so that a program in one process doesn't start others
    recorder = Recorder(args)
    try:
        run_program(recorder, args.command)
    except (Exception, SystemExit):
        show_alone(recorder)
        raise
    return together(recorder, world_size)


def show_alone(recorder: Recorder) -> None:
    """After a failure: the others may be waiting, so that only this rank's recording can be had."""
    recording = recording_of(recorder)
    if recording["last"] >= recording["first"]:
        print(f"timeline: rank {recording['rank']} failed; what it had recorded is drawn, without the other ranks")
        show([recording], recorder.args)


def together(recorder: Recorder, world_size: int) -> list[dict] | None:
    """The recordings of all ranks, on rank 0; None on the others."""
    recording = recording_of(recorder)
    if world_size == 1:
        return [recording]
    if not torch_dist.is_initialized():  # the program has left its group
        with contextlib.redirect_stdout(io.StringIO()):
            dist.init_process_group(backend="gloo")
    group = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=recorder.args.patience))
    recordings: list = [None] * world_size
    torch_dist.all_gather_object(recordings, recording, group=group)
    name = first_difference([found["weights"] for found in recordings])
    if name:
        tensors: list = [None] * world_size
        torch_dist.all_gather_object(tensors, local(recorder.weights()[name]).cpu(), group=group)
        if len({tensor.shape for tensor in tensors}) == 1:
            recording["largest"] = max((tensor.double() - tensors[0].double()).abs().max().item() for tensor in tensors)
    torch_dist.destroy_process_group(group)
    recordings[dist.get_rank()] = recording
    return recordings if dist.is_primary() else None


def first_difference(tables: list[dict[str, str]]) -> str | None:
    """The first name that all ranks have, with different digests."""
    common = [name for name in tables[0] if all(name in table for table in tables)]
    return next((name for name in common if len({table[name] for table in tables}) > 1), None)


def recording_of(recorder: Recorder) -> dict:
    """All that is known of this rank, in plain lists and dicts."""
    events = read_trace(recorder)
    main = [event for event in events if event["tid"] == threading.get_native_id() and event["ph"] == "X"]
    messages = messages_of(events, recorder.calls)
    spans = [(what, begin, end or time.time_ns()) for what, begin, end, *_ in recorder.spans]
    spans += [("wait", e["begin"], e["end"]) for e in main if e["name"].endswith("::wait_tensor")]
    spans += ddp_waits(main, spans, messages)
    cuts = [*recorder.cuts, recorder.cut] if recorder.step_begins and recorder.cuts else recorder.cuts
    return {
        "rank": dist.get_rank(),
        "machine": machine(),
        "cuts": cuts,
        "first": recorder.first,
        "last": min(recorder.last, len(cuts) - 2),
        "spans": sorted(spans, key=lambda span: (span[1], -span[2])),
        "messages": messages,
        "groups": recorder.groups,
        "operations": [(event["name"], event["begin"], event["end"]) for event in main],
        "memory": memory_by_kind(events, recorder.tensors, spans),
        "weights": {name: digest(tensor) for name, tensor in recorder.weights().items()},
        "gradients": recorder.gradients,
        "inputs": recorder.inputs,
        "setting": f"torch {torch.__version__}, {device_of(recorder)}, {counted(torch.get_num_threads(), 'thread')} each",
    }


def machine() -> str:
    """Equal on ranks that share a clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.exists() else "")


def device_of(recorder: Recorder) -> str:
    return next((str(tensor.device) for tensor in recorder.weights().values()), "cpu")


def read_trace(recorder: Recorder) -> list[dict]:
    """The profiler's events in the order of their begins, with `begin` and `end` in ns.  It must be left running until
    the program's last event has ended: so it is stopped here, and nowhere else."""
    if not recorder.is_profiling:
        return []
    recorder.is_profiling = False
    recorder.profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        recorder.profiler.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_bytes())
    base, events = trace.get("baseTimeNanoseconds", 0), []
    for event in trace["traceEvents"]:
        if event["ph"] == "X" or event["name"] == "[memory]":
            event["begin"] = base + round(1000 * event["ts"])
            event["end"] = event["begin"] + round(1000 * event.get("dur", 0))
            events.append(event)
    return sorted(events, key=lambda event: event["begin"])


KINDS = re.compile("allreduce|allgather|reducescatter|broadcast|reduce|gather|scatter|alltoall|barrier|send|recv")
SIZES = {"double": 8, "float": 4, "long int": 8, "int": 4, "unsigned char": 1, "signed char": 1}


def kind_of(name: str) -> str:
    """Of an operation such as c10d::_allgather_base_, or gloo:all_gather."""
    found = KINDS.search(name.replace("_", ""))
    return found[0] if found else "message"


def messages_of(events: list[dict], calls: list[dict]) -> list[dict]:
    """Each call of a collective, with the `begin` and the `end` of its run: gloo runs them in threads of its own."""
    runs = defaultdict(list)
    for event in events:
        if event["name"].startswith("gloo:"):
            runs[kind_of(event["name"])].append(event)
    if not HAS_MESSAGE_HOOKS:
        called = [event for event in events if event["name"].startswith("c10d::") and event["ph"] == "X"]
        calls = [{"kind": kind_of(event["name"]), "issued": event["begin"], "peer": peer_of(event)} for event in called]
    messages = []
    for call in calls:
        kind = "allreduce" if call["kind"] == "reducescatter" and not runs["reducescatter"] else call["kind"]
        count = call.get("runs", 1)
        mine, runs[kind] = runs[kind][:count], runs[kind][count:]
        if not mine:
            continue
        if not HAS_MESSAGE_HOOKS:
            shapes = zip(mine[0]["args"].get("Input Dims", []), mine[0]["args"].get("Input type", []), strict=False)
            call["bytes"] = sum(SIZES.get(dtype, 2) * product(shape) for shape, dtype in shapes)
        messages.append(call | {"begin": mine[0]["begin"], "end": mine[-1]["end"]})
    return messages


def peer_of(event: dict) -> int | None:
    """Of a send or a receive, as torch before 2.14 records it."""
    given = event["args"].get("Concrete Inputs", [])
    return int(given[2]) if kind_of(event["name"]) in ("send", "recv") and len(given) > 2 and given[2] else None


def product(numbers: Iterable[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


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


def memory_by_kind(events: list[dict], notes: list[tuple[int, dict]], spans: list[Span]) -> list[list]:
    """Each allocation as [kind, bytes, begin, end]; begin 0: before the recording, end 0: it is still there."""
    history: dict[int, list] = defaultdict(list)  # address: its allocations
    late: Counter = Counter()
    for event in events:
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0:
            address, size = event["args"]["Addr"], event["args"]["Bytes"]
            parts = history[address]
            if size > 0:
                if parts and not parts[-1][3]:  # another thread has freed it, and its event comes later
                    parts[-1][3] = event["begin"]
                    late[address] += 1
                parts.append(["", size, event["begin"], 0])
            elif late[address]:
                late[address] -= 1
            elif parts:
                parts[-1][3] = event["begin"]
    for now, kinds in notes:
        for address, (kind, size) in kinds.items():
            alive = [part for part in history[address] if part[2] <= now and (not part[3] or now < part[3])]
            if alive:
                alive[0][0] = alive[0][0] if alive[0][0] not in ("", "message buffers") else kind
            elif size and address and not history[address]:
                history[address].append([kind, size, 0, 0])
    backwards = sorted((begin, end) for what, begin, end in spans if what == "backward")
    begins = [begin for begin, _ in backwards]
    for part in (part for parts in history.values() for part in parts if not part[0]):
        following = bisect_right(begins, part[2])
        is_kept = following < len(begins) and (not part[3] or begins[following] < part[3])
        is_in_backward = following > 0 and part[2] < backwards[following - 1][1]
        part[0] = "activations" if is_kept and not is_in_backward else "temporary"
    return [part for parts in history.values() for part in parts]


# ------------------------------------------------------------------------------- what is computed from the recordings

PARTS = ("forward", "backward", "optimizer", "waiting", "other")
KEPT = ("weights", "optimizer state", "gradients", "message buffers")
BORN = ("activations", "temporary")


def align_clocks(recordings: list[dict]) -> str:
    """Machines' clocks differ: all-reduces and their like end at the same time on all ranks.  Returns what was done."""
    said = []
    for other in recordings[1:]:
        if other["machine"] == recordings[0]["machine"]:
            continue
        ends = [
            {key: m["end"] for key, m in numbered(one).items() if key[0] in ("allreduce", "allgather", "barrier")}
            for one in (recordings[0], other)
        ]
        differences = sorted(ends[1][key] - ends[0][key] for key in ends[0] if key in ends[1])
        if not differences:
            said.append(f"rank {other['rank']}'s clock could not be compared with rank 0's")
            continue
        shift = differences[len(differences) // 2]
        quarter = len(differences) // 4
        uncertain = max(differences[-1 - quarter] - shift, shift - differences[quarter])
        said.append(f"rank {other['rank']}'s clock was set by {ms(-shift)} ms, within {ms(uncertain, 2)} ms")
        other["cuts"] = [cut - shift for cut in other["cuts"]]
        for key in ("spans", "operations"):
            other[key] = [(what, begin - shift, end - shift) for what, begin, end in other[key]]
        other["memory"] = [[kind, size, *(t and t - shift for t in times)] for kind, size, *times in other["memory"]]
        for message in other["messages"]:
            message |= {key: message[key] - shift for key in ("issued", "begin", "end")}
    return "; ".join(said)


def numbered(recording: dict) -> dict[tuple, dict]:
    """A rank's messages by what is the same on all ranks that take part: the k-th of its kind and group in a step."""
    counts: Counter = Counter()
    found = {}
    for message in recording["messages"]:
        kind = message["kind"]
        key = (kind, message.get("group"), bisect_right(recording["cuts"], message["issued"]))
        if message["peer"] is not None:
            pair = (recording["rank"], message["peer"])
            key = ("sent", *key[1:], *(pair if kind == "send" else reversed(pair)))
        found[*key, counts[key, kind], kind] = message
        counts[key, kind] += 1
    return found


def match_messages(recordings: list[dict]) -> list[dict]:
    """Note in each message until when it waited, and for whom: for the rank that came last.  Returns the arrows."""
    together = defaultdict(dict)
    arrows = []
    for recording in recordings:
        for key, message in numbered(recording).items():
            message |= {"until": message["begin"], "last": recording["rank"]}
            together[key[:-1]][recording["rank"]] = message
    for key, messages in together.items():
        if key[0] == "sent":
            source, target = key[3:5]
            if source in messages and target in messages:
                send, receive = messages[source], messages[target]
                receive |= {"until": min(max(receive["begin"], send["begin"]), receive["end"]), "last": source}
                arrows.append({"from": source, "to": target, "begin": send["begin"], "end": receive["end"]})
            continue
        last = max(messages, key=lambda rank: messages[rank]["begin"])
        for message in messages.values():
            message |= {"until": min(messages[last]["begin"], message["end"]), "last": last}
    return arrows


def parts_of(recording: dict, begin: int, end: int) -> list[Span]:
    """The time from begin to end, without gaps: what the innermost span says, else "other"."""
    spans = [span for span in recording["spans"] if span[1] < end and begin < span[2]]
    spans = sorted([*spans, *losses(spans, recording["messages"])], key=lambda span: (span[1], -span[2]))
    borders = sorted({begin, end, *(t for span in spans for t in span[1:] if begin < t < end)})
    parts: list[Span] = []
    for left, right in itertools.pairwise(borders):
        covering = [what for what, first, last in spans if first <= left and right <= last]
        what = {"wait": "waiting", "data": "other"}.get(covering[-1], covering[-1]) if covering else "other"
        if parts and parts[-1][0] == what:
            parts[-1] = (what, parts[-1][1], right)
        else:
            parts.append((what, left, right))
    return parts


def losses(spans: list[Span], messages: list[dict]) -> Iterator[Span]:
    """Between a forward pass and its backward is the loss: forward, too, unless a message goes out there."""
    for what, begin, _ in spans:
        before = max((span for span in spans if span[2] <= begin), key=lambda span: span[2], default=None)
        if what == "backward" and before and before[0] == "forward":
            if not any(before[2] <= message["issued"] < begin for message in messages):
                yield ("forward", before[2], begin)


def lengths(recording: dict, first: int, last: int) -> list[int]:
    return [recording["cuts"][step + 1] - recording["cuts"][step] for step in range(first, last + 1)]


def choose(recordings: list[dict], first: int, last: int, shown: int) -> int:
    """The first of the `shown` steps that took the shortest time: such a window begins at a multiple of `shown`."""
    starts = [step for step in range(first, last + 2 - shown) if step % shown == 0] or [first]
    return min(starts, key=lambda step: max(sum(lengths(one, step, step + shown - 1)) for one in recordings))


def memory_curve(allocations: list[list], begin: int, end: int) -> list[list[int]]:
    """[time, bytes of each of KEPT and BORN] at each change, from begin to end."""
    changes: dict[int, list[int]] = {begin: [0] * 6}
    for kind, size, born, freed in allocations:
        place = (*KEPT, *BORN).index(kind)
        for when, change in ((max(born, begin), size), (freed, -size)):
            if when and born < end and (not freed or freed > begin) and when < end:
                changes.setdefault(when, [0] * 6)[place] += change
    held, curve = [0] * 6, []
    for when in sorted(changes):
        held = [size + change for size, change in zip(held, changes[when], strict=True)]
        curve.append([when, *held])
    return [*curve, [end, *held]]


def waits_for(parts: list[Span], messages: list[dict]) -> Counter:
    """Of this rank's waiting the nanoseconds in which a message waited for a rank; None: bytes moved, or a queue."""
    found: Counter = Counter()
    for _, begin, end in (part for part in parts if part[0] == "waiting"):
        now = begin
        for message in sorted(messages, key=lambda message: message["begin"]):
            left, right = max(now, message["begin"]), min(end, message["until"])
            if left < right:
                found[message["last"]] += right - left
                now = right
        found[None] += end - begin
    found[None] -= sum(duration for rank, duration in found.items() if rank is not None)
    return found


def picture_of(recordings: list[dict], args: argparse.Namespace) -> dict:
    """All that is drawn and said, with times from the begin of the picture, in nanoseconds."""
    clocks = align_clocks(recordings)
    arrows = match_messages(recordings)
    first, last = recordings[0]["first"], min(recording["last"] for recording in recordings)
    shown = min(args.steps_shown, last - first + 1)
    step = choose(recordings, first, last, shown)
    origin = min(recording["cuts"][step] for recording in recordings)
    stop = max(recording["cuts"][step + shown] for recording in recordings)
    ranks = []
    for recording in recordings:
        begin, end = recording["cuts"][step], recording["cuts"][step + shown]
        messages = [m for m in recording["messages"] if begin <= m["issued"] < end]
        parts = parts_of(recording, begin, end)
        ranks.append(
            {
                "rank": recording["rank"],
                "cuts": [cut - origin for cut in recording["cuts"][step : step + shown + 1]],
                "parts": [(what, left - origin, right - origin) for what, left, right in parts],
                "waits_for": [[rank, duration] for rank, duration in waits_for(parts, messages).items() if duration],
                "messages": [m | {key: m[key] - origin for key in ("issued", "begin", "until", "end")} for m in messages],
                "memory": [[t - origin, *held] for t, *held in memory_curve(recording["memory"], begin, end)],
                "operations": [
                    (name, left - origin, right - origin)
                    for name, left, right in recording["operations"]
                    if begin <= left < end
                ],
            }
        )
    found = {
        "title": title_of(args.command),
        "command": shlex.join(["timeline.py", *args.command]),
        "setting": f"{counted(len(recordings), 'process')}, {recordings[0]['setting']}",
        "shown": [step, shown],
        "end": stop - origin,
        "length": max(sum(lengths(recording, step, step + shown - 1)) for recording in recordings),
        "ranks": ranks,
        "arrows": [
            arrow | {"begin": arrow["begin"] - origin, "end": arrow["end"] - origin}
            for arrow in arrows
            if origin <= arrow["begin"] and arrow["end"] < stop
        ],
    }
    return found | {"findings": findings(found, recordings, first, last, clocks)}


def title_of(command: list[str]) -> str:
    program = command[1] if command[0] == "-m" else Path(command[0]).stem
    return " ".join([program.rpartition(".")[2], *command[1 + (command[0] == "-m") :]])[:60]


# --------------------------------------------------------------------------------------------------- what is said

NAMES = {"allreduce": "all-reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter", "alltoall": "all-to-all"}


def ms(nanoseconds: float, digits: int = 1) -> str:
    return f"{nanoseconds / 1e6:.{digits}f}"


def size_of(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.{0 if unit == 'kB' and count >= 1e4 else 1}f} {unit}"
    return f"{count} B"


def counted(count: int, name: str) -> str:
    plural = "es" if name.endswith(("s", "ch")) else "s"
    return f"{count} {name}" + (plural if count != 1 else "")


def message_sums(messages: list[dict]) -> str:
    """Such as: 2 broadcasts 404 B, 1 all-reduce 116 kB."""
    kinds = list(dict.fromkeys(message["kind"] for message in messages if message["kind"] != "recv"))
    parts = []
    for kind in kinds:
        sizes = [message["bytes"] for message in messages if message["kind"] == kind]
        parts.append(f"{counted(len(sizes), NAMES.get(kind, kind))} {size_of(sum(sizes))}")
    return ", ".join(parts) or "no messages"


def of_ranks(texts: list[str]) -> str:
    """One text if all ranks have the same."""
    if len(texts) == 1:
        return texts[0]
    if len(set(texts)) == 1:
        return f"each rank: {texts[0]}"
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def findings(found: dict, recordings: list[dict], first: int, last: int, clocks: str) -> list[list[str]]:
    """[subject, sentence] for each line."""
    step, shown = found["shown"]
    count = last - first + 1
    steps = [max(some) for some in zip(*(lengths(recording, first, last) for recording in recordings), strict=True)]
    bare = [
        max(some) for some in zip(*(lengths(recording, WARM_UP, first - 2) for recording in recordings), strict=True)
    ]
    which = f"step {step + 1}" if shown == 1 else f"steps {step + 1} to {step + shown}"
    lines = [
        [
            "step",
            f"{ms(found['length'])} ms: {which}, the shortest of {count} recorded (median of a step "
            f"{ms(statistics.median(steps))} ms; without the recorder {ms(statistics.median(bare))} ms, of {len(bare)})",
        ]
    ]
    for one in found["ranks"]:
        sums: Counter = Counter()
        for what, begin, end in one["parts"]:
            sums[what] += end - begin
        text = ", ".join(f"{part} {ms(sums[part])}" for part in PARTS if part in sums) + " ms"
        waits = [f"{ms(ns)} for rank {rank}" for rank, ns in one["waits_for"] if rank is not None]
        rest = [f"{ms(ns)} while bytes move" for rank, ns in one["waits_for"] if rank is None and len(recordings) > 1]
        lines.append([f"rank {one['rank']}", text + (f" (waiting: {', '.join(waits + rest)})" if waits + rest else "")])
    lines += [["waiting", text] for text in [who_came_last(recordings, first, last)] if text]
    lines.append(["messages", of_ranks([message_sums(one["messages"]) for one in found["ranks"]])])
    lines.append(["memory", "at most, " + of_ranks([memory_sums(one["memory"]) for one in found["ranks"]])])
    lines += [["clocks", clocks]] if clocks else []
    return lines + equalities(recordings, last)


def who_came_last(recordings: list[dict], first: int, last: int) -> str:
    """Over all recorded steps: in how many of them which rank made the others wait longest."""
    if len(recordings) == 1:
        return ""
    waited: Counter = Counter()
    steps: Counter = Counter()
    for step in range(first, last + 1):
        caused: Counter = Counter()
        for recording in recordings:
            begin, end = recording["cuts"][step : step + 2]
            messages = [message for message in recording["messages"] if begin <= message["issued"] < end]
            caused += waits_for(parts_of(recording, begin, end), messages)
        del caused[None]
        if caused:
            rank, duration = caused.most_common(1)[0]
            waited[rank] += duration
            steps[rank] += 1
    texts = [
        f"for rank {rank} in {count} of {last - first + 1} steps, {ms(waited[rank] / count)} ms on average"
        for rank, count in steps.most_common()
    ]
    return f"the others waited longest {'; '.join(texts)}" if texts else "no rank waited for another"


def memory_sums(curve: list[list[int]]) -> str:
    peaks = [max(column) for column in zip(*(held for _, *held in curve), strict=True)]
    return ", ".join(f"{kind} {size_of(peak)}" for kind, peak in zip((*KEPT, *BORN), peaks, strict=True) if peak)


def equalities(recordings: list[dict], last: int) -> list[list[str]]:
    """Whether weights, inputs and gradients are equal on all ranks, and what that means."""
    if len(recordings) == 1:
        return []
    lines = []
    weights = [recording["weights"] for recording in recordings]
    shared = [name for name in weights[0] if all(name in table for table in weights)]
    sharded = sum(weights[0][name] == "sharded" for name in shared)
    different = sum(len({table[name] for table in weights}) > 1 for name in shared)
    name = first_difference(weights)
    if name:
        largest = recordings[0].get("largest")
        by = f"by up to {largest:.3g}" if largest is not None else "even in its shape"
        text = f"{different} of {len(shared)} tensors differ, {name} first, {by}: with data parallelism a mistake; "
        text += "a pipeline and tensor parallelism share the layers out, local SGD averages the weights later"
    elif not shared:
        text = "the ranks have no tensor in common: as in a pipeline"
    else:
        text = f"{len(shared) - sharded} tensors are equal on all ranks: as data parallelism needs it"
    if sharded:
        text = f"{sharded} of {len(shared)} tensors are sharded, each rank has its part" + (
            f"; {text}" if len(shared) > sharded else ""
        )
    lines.append(["weights", text])
    inputs = [recording["inputs"] for recording in recordings]
    if any(inputs):
        same = "equal on all ranks: with data parallelism a mistake, as the ranks do the same work; tensor parallelism needs it"
        parted = "different on the ranks: as data parallelism needs it"
        lines.append(["inputs", same if len(set(inputs)) == 1 else parted if len(set(inputs)) == len(inputs) else
                      "equal on some ranks: as with tensor parallelism in groups"])
    gradients = [recording["gradients"] for recording in recordings]
    names = [name for name in gradients[0] if all(name in table for table in gradients)]
    if names and not all(gradients[0][name] == "sharded" for name in names):
        if first_difference(gradients):
            text = f"different on the ranks ({first_difference(gradients)} first): they were not averaged; "
            text += "with data parallelism a mistake, unless the optimizer has a part of the weights (ZeRO) or local SGD is meant"
        elif len(set(inputs)) == 1:
            text = "equal on all ranks, as the inputs are"
        else:
            text = "equal on all ranks though the inputs are not: they were averaged"
        lines.append(["gradients", text])
    return lines


def say(lines: list[list[str]]) -> None:
    width = shutil.get_terminal_size().columns - 1
    for subject, sentence in lines:
        print(textwrap.fill(f"{subject:9} {sentence}", max(width, 40), subsequent_indent=" " * 10), flush=True)


# ---------------------------------------------------------------------------------------------------- what is drawn

LEFT, PLOT, WIDTH = 84, 640, 860  # pixels: where the time begins, how long it is, the whole
LANE, ROW, AREA = 26, 13, 34  # heights: of a rank, of a row of messages, of the memory
MOST_ROWS = 8
CLASS = {
    "forward": "f", "backward": "b", "optimizer": "o", "other": "x", "waiting": "w",
    "weights": "s1", "optimizer state": "s2", "gradients": "b", "message buffers": "m", "activations": "f",
    "temporary": "x",
}  # fmt: skip
STYLE = """
svg{--page:#fff;--ink:#1c2128;--soft:#57606a;--forward:#9ccbf2;--backward:#1f63ac;--optimizer:#35b58a;--other:#cdd1d6}
svg{--hatch:#c0322b;--message:#f0a32a;--edge:#a86a00;--weights:#3a434d;--state:#6fd0ae}
@media(prefers-color-scheme:dark){svg{--page:#0d1117;--ink:#e6edf3;--soft:#9aa4af;--forward:#7fb5e2;--backward:#2f74c0}
svg{--other:#565d66;--hatch:#ff8a80;--message:#e39a2b;--edge:#f2c572;--weights:#aeb8c2;--state:#4fb795}}
text{font:13px system-ui,sans-serif;fill:var(--ink)}.t{font-weight:600;font-size:15px}.n{fill:var(--soft)}.r{text-anchor:end}
.c{text-anchor:middle}.i{fill:#fff}.d{fill:#1c2128}.l{font-size:11px}.g{fill:var(--page)}.f{fill:var(--forward)}
.b{fill:var(--backward)}.o{fill:var(--optimizer)}.x{fill:var(--other)}.w{fill:url(#hatch)}.m{fill:var(--message)}
.s1{fill:var(--weights)}.s2{fill:var(--state)}.q{fill:var(--message);fill-opacity:.18;stroke:var(--edge);stroke-dasharray:2.5 1.5}.u{fill:var(--edge)}
.a{stroke:var(--edge);stroke-width:1.4;marker-end:url(#head)}.k{stroke:var(--soft);fill:none}.h{stroke:var(--hatch)}
.e{stroke:var(--page);stroke-width:.7}.y{stroke:var(--hatch);stroke-dasharray:5 3}
"""
DEFS = """<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path class="h" d="M0,0v6"/></pattern><marker id="head" class="u" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5"
markerHeight="5" orient="auto"><path d="M0,0L6,3L0,6z"/></marker></defs>"""


class Drawing:
    """Lines of SVG from top to bottom; y is where the next thing is drawn."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.y = 8.0
        self.lines: list[str] = []

    def x(self, time: float) -> float:
        return LEFT + PLOT * time / self.longest

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        self.lines.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def boxes(self, style: str, boxes: Iterable[tuple[float, float, float, float]]) -> None:
        """Rectangles (left, right, top, height) of one style, as one path."""
        path = "".join(
            f"M{left:.1f},{top:.1f}h{max(right - left, 0.4):.1f}v{height:.1f}h-{max(right - left, 0.4):.1f}z"
            for left, right, top, height in boxes
        )
        if path:
            self.lines.append(f'<path class="{style}" d="{path}"/>')


def text_width(text: str, size: int = 13) -> float:
    return 0.58 * size * len(text)


def draw(pictures: list[dict]) -> str:
    """One SVG with all pictures below each other, on one scale of time."""
    drawing = Drawing(max(picture["end"] for picture in pictures))
    curves = [one["memory"] for picture in pictures for one in picture["ranks"]]
    lanes = [max((area_peak(curve, kinds(curve)) for curve in curves), default=1) or 1 for kinds in (kept_kinds, born_kinds)]
    for picture in pictures:
        draw_picture(drawing, picture, lanes)
    draw_axis(drawing)
    draw_legend(drawing, pictures)
    drawing.y += 6
    for picture in pictures:
        drawing.y += 15
        drawing.text(12, drawing.y, f"{picture['command']}: {picture['setting']}"[:130], "n l")
    height = drawing.y + 10
    title = "What each process does in a step: " + "; ".join(picture["title"] for picture in pictures)
    told = ". ".join(f"{subject}: {sentence}" for picture in pictures for subject, sentence in picture["findings"])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-labelledby="t d"'
    lines = [head + f' width="{WIDTH}" height="{height:.0f}">', f'<title id="t">{escape(title)}</title>']
    lines += [f'<desc id="d">{escape(told)}</desc>', f"<style>{STYLE}</style>", DEFS]
    lines += [f'<path class="g" d="M0,0h{WIDTH}v{height:.0f}h-{WIDTH}z"/>']
    return "\n".join([*lines, *drawing.lines, "</svg>\n"])


def draw_picture(drawing: Drawing, picture: dict, peaks: list[int]) -> None:
    drawing.y += 18
    steps = "one step" if picture["shown"][1] == 1 else f"{picture['shown'][1]} steps"
    drawing.text(12, drawing.y, picture["title"], "t")
    drawing.text(WIDTH - 12, drawing.y, f"{steps}: {ms(picture['length'])} ms", "r")
    drawing.y += 17
    drawing.text(12, drawing.y, of_ranks([message_sums(one["messages"]) for one in picture["ranks"]])[:110], "n")
    drawing.y += 8
    tops = {}
    for one in picture["ranks"]:
        tops[one["rank"]] = drawing.y
        draw_rank(drawing, one, is_last=one is picture["ranks"][-1], has_arrows=bool(picture["arrows"]))
    for arrow in picture["arrows"]:
        up = tops[arrow["to"]] < tops[arrow["from"]]
        begin = tops[arrow["from"]] + (0 if up else LANE)
        end = tops[arrow["to"]] + (LANE if up else 0)
        place = f'x1="{drawing.x(arrow["begin"]):.1f}" y1="{begin:.1f}" x2="{drawing.x(arrow["end"]):.1f}" y2="{end:.1f}"'
        drawing.lines.append(f'<line class="a" {place}/>')
    for link in picture.get("links", []):
        draw_link(drawing, link)
    for name, curve in memory_lanes(picture["ranks"]):
        for kinds, peak in zip((kept_kinds, born_kinds), peaks, strict=True):
            draw_memory(drawing, name, curve, kinds(curve), peak)
    drawing.y += 6


def draw_rank(drawing: Drawing, one: dict, is_last: bool, has_arrows: bool) -> None:
    """A lane for what the process does, and rows for its messages."""
    top = drawing.y
    drawing.text(12, top + 18, f"rank {one['rank']}")
    waited = sum(end - begin for what, begin, end in one["parts"] if what == "waiting")
    drawing.text(WIDTH - 12, top + 18, f"waits {ms(waited)} ms", "r n")
    for what in PARTS:
        parts = [(begin, end) for kind, begin, end in one["parts"] if kind == what]
        drawing.boxes(CLASS[what], [(drawing.x(begin), drawing.x(end), top, LANE) for begin, end in parts])
    left, right = drawing.x(one["cuts"][0]), drawing.x(one["cuts"][-1])
    drawing.boxes("k", [(left, right, top, LANE)])
    for cut in one["cuts"][1:-1]:
        drawing.lines.append(f'<path class="k" d="M{drawing.x(cut):.1f},{top - 3}v{LANE + 6}"/>')
    for what, style in (("forward", "d"), ("backward", "i"), ("waiting", "")):
        parts = [(end - begin, begin, end) for kind, begin, end in one["parts"] if kind == what]
        duration, begin, end = max(parts, default=(0, 0, 0))
        word = "waits" if what == "waiting" else what
        middle, width = drawing.x((begin + end) / 2), text_width(word)
        if drawing.x(end) - drawing.x(begin) > width + 6:
            if what == "waiting":
                drawing.boxes("g", [(middle - width / 2, middle + width / 2, top + 5, LANE - 10)])
            drawing.text(middle, top + 18, word, f"c {style}")
    drawing.y = top + LANE + 5
    draw_messages(drawing, [m for m in one["messages"] if m["peer"] is None])
    if has_arrows and not is_last:
        drawing.y += 26
    drawing.y += 5


def draw_messages(drawing: Drawing, messages: list[dict]) -> None:
    rows: list[list[dict]] = []
    for message in messages:
        free = [row for row in rows if drawing.x(row[-1]["end"]) + 1 < drawing.x(message["issued"])]
        if free:
            free[0].append(message)
        elif len(rows) < MOST_ROWS:
            rows.append([message])
    largest = max((message["bytes"] for message in messages), default=0)
    for row in rows:
        top, height = drawing.y, ROW - 2
        x = [[drawing.x(message[key]) for key in ("issued", "begin", "until", "end")] for message in row]
        drawing.boxes("u", [(x0, x1, top + height / 2 - 0.5, 1) for x0, x1, _, _ in x if x1 - x0 > 0.5])
        drawing.boxes("q", [(x1, x2, top + 0.5, height - 1) for _, x1, x2, _ in x if x2 - x1 > 0.5])
        drawing.boxes("m", [(x2, x3, top, height) for _, _, x2, x3 in x])
        for place, message in enumerate(row):
            text = f"{NAMES.get(message['kind'], message['kind'])} {size_of(message['bytes'])}"
            room = x[place + 1][0] if place + 1 < len(row) else WIDTH - 12
            width = text_width(text, 11)
            if message["bytes"] < largest / 10 or not largest:
                continue
            if x[place][3] - x[place][2] > width + 4:
                drawing.text((x[place][2] + x[place][3]) / 2, top + 9, text, "c d l")
            elif x[place][3] + width + 6 < room:
                drawing.text(x[place][3] + 4, top + 9, text, "n l")
        drawing.y += ROW


def memory_lanes(ranks: list[dict]) -> list[tuple[str, list]]:
    """One for all ranks, if the same is held on all of them."""
    sums = [memory_sums(one["memory"]).split(", activations")[0] for one in ranks]
    peaks = [area_peak(one["memory"], range(6)) for one in ranks]
    if len(set(sums)) == 1 and max(peaks) <= 1.05 * min(peaks):
        return [("memory", ranks[0]["memory"])] if peaks[0] else []
    return [(f"memory {one['rank']}", one["memory"]) for one in ranks]


def kept_kinds(curve: list[list[int]]) -> list[int]:
    """Message buffers stand beside the weights, if they are not much larger."""
    buffers = max((held[3] for _, *held in curve), default=0)
    return [0, 1, 2, 3] if buffers <= 2 * area_peak(curve, [0, 1, 2]) else [0, 1, 2]


def born_kinds(curve: list[list[int]]) -> list[int]:
    return [kind for kind in (3, 4, 5) if kind not in kept_kinds(curve)]


def area_peak(curve: list[list[int]], kinds: Iterable[int]) -> int:
    return max((sum(held[kind] for kind in kinds) for _, *held in curve), default=0)


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
    right = drawing.x(curve[-1][0])
    for level in reversed(range(len(kinds))):
        if not any(sums[level] > (sums[level - 1] if level else 0) for _, sums in points):
            continue
        path = "".join(f"H{x:.1f}V{base - AREA * sums[level] / peak:.1f}" for x, sums in points)
        style = f"{CLASS[(*KEPT, *BORN)[kinds[level]]]} e"
        drawing.lines.append(f'<path class="{style}" d="M{points[0][0]:.1f},{base}{path}H{right:.1f}V{base}z"/>')
    drawing.lines.append(f'<path class="k" d="M{points[0][0]:.1f},{base}H{right:.1f}"/>')
    drawing.text(12, base - 8, name, "n")
    drawing.text(WIDTH - 12, base - 8, f"peak {size_of(area_peak(curve, kinds))}", "r n")


def draw_link(drawing: Drawing, link: dict) -> None:
    """What left a rank's network link, as bytes per second; with its limit."""
    drawing.y += 28
    base, top = drawing.y, max([link["limit"], *(rate for _, rate in link["rates"])])
    path = "".join(f"H{drawing.x(when):.1f}V{base - 24 * rate / top:.1f}" for when, rate in link["rates"])
    begin, end = drawing.x(link["rates"][0][0]), drawing.x(link["rates"][-1][0])
    drawing.lines.append(f'<path class="m" d="M{begin:.1f},{base}{path}V{base}z"/>')
    drawing.lines.append(f'<path class="k" d="M{begin:.1f},{base}H{end:.1f}"/>')
    if link["limit"]:
        drawing.lines.append(f'<path class="y" d="M{begin:.1f},{base - 24 * link["limit"] / top:.1f}H{end:.1f}"/>')
    drawing.text(12, base - 6, link["name"], "n")
    drawing.text(WIDTH - 12, base - 6, f"sent {size_of(link['sent'])}", "r n")


def draw_axis(drawing: Drawing) -> None:
    steps = [digit * 10**power for power in range(4, 13) for digit in (1, 2, 5)]
    step = next(step for step in steps if drawing.longest / step <= 7)
    drawing.y += 10
    marks = [number * step for number in range(int(drawing.longest / step) + 1)]
    path = "".join(f"M{drawing.x(mark):.1f},{drawing.y}v5" for mark in marks)
    drawing.lines.append(f'<path class="k" d="M{LEFT},{drawing.y}h{PLOT}{path}"/>')
    for mark in marks:
        drawing.text(drawing.x(mark), drawing.y + 18, f"{mark / 1e6:g} ms" if mark else "0", "c")
    drawing.y += 26


def draw_legend(drawing: Drawing, pictures: list[dict]) -> None:
    ranks = [one for picture in pictures for one in picture["ranks"]]
    messages = [message for one in ranks for message in one["messages"] if message["peer"] is None]
    held = [max(column) for column in zip(*(held for one in ranks for _, *held in one["memory"]), strict=True)]
    drawn = {what for one in ranks for what, _, _ in one["parts"]}
    rows = {
        "time": [(CLASS[what], {"waiting": "waits"}.get(what, what)) for what in PARTS if what in drawn],
        "messages": [("q", "waits for a rank"), ("m", "bytes move"), ("u", "in the queue")] if messages else [],
        "memory": [(CLASS[kind], kind) for kind, size in zip((*KEPT, *BORN), held, strict=True) if size],
    }
    for name, entries in rows.items():
        if not entries:
            continue
        drawing.y += 20
        drawing.text(12, drawing.y, name, "n")
        x = float(LEFT)
        for style, word in entries:
            thin = style == "u"
            drawing.boxes(style, [(x, x + 18, drawing.y - (6 if thin else 11), 1 if thin else 13)])
            if style == "w":
                drawing.boxes("k", [(x, x + 18, drawing.y - 11, 13)])
            drawing.text(x + 23, drawing.y, word)
            x += 23 + text_width(word) + 16
    if any(picture["arrows"] for picture in pictures):
        drawing.y += 20
        drawing.lines.append(f'<line class="a" x1="{LEFT}" y1="{drawing.y - 4}" x2="{LEFT + 20}" y2="{drawing.y - 4}"/>')
        drawing.text(LEFT + 27, drawing.y, "a message from rank to rank: from the send to the end of the wait for it")


# ------------------------------------------------------------------------------------------------- for Perfetto


def trace_of(picture: dict) -> dict:
    """Chrome's trace format: a process for each rank; and the picture itself, for --draw."""
    events: list[dict] = []

    def slices(rank: int, thread: int, name: str, spans: Iterable[tuple]) -> None:
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
        for what, begin, end, *more in spans:
            place = {"pid": rank, "tid": thread, "ts": begin / 1000, "dur": (end - begin) / 1000}
            events.append({"ph": "X", "cat": name, "name": what, **place, "args": more[0] if more else {}})

    for one in picture["ranks"]:
        rank = one["rank"]
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        slices(rank, 1, "what it does", one["parts"])
        slices(rank, 2, "torch's operations", one["operations"])
        rows: list[int] = []  # a thread for each row, as slices of one thread may not overlap
        for message in one["messages"]:
            row = next((row for row, end in enumerate(rows) if end <= message["issued"]), len(rows))
            rows[row : row + 1] = [message["end"]]
            name = NAMES.get(message["kind"], message["kind"])
            parts = [("queue", "issued", "begin"), (f"{name}: waits", "begin", "until"), (name, "until", "end")]
            found = [(what, message[a], message[b], {"bytes": message["bytes"]}) for what, a, b in parts]
            slices(rank, 10 + row, f"messages {row + 1}", [part for part in found if part[1] < part[2]])
        for when, *held in one["memory"]:
            args = dict(zip((*KEPT, *BORN), held, strict=True))
            events.append({"ph": "C", "name": "memory", "pid": rank, "ts": when / 1000, "args": args})
    for number, arrow in enumerate(picture["arrows"]):
        for phase, rank, when in (("s", arrow["from"], arrow["begin"]), ("f", arrow["to"], arrow["end"])):
            event = {"ph": phase, "cat": "message", "name": "message", "id": number, "pid": rank, "tid": 1}
            events.append(event | {"ts": when / 1000} | ({"bp": "e"} if phase == "f" else {}))
    kept = picture | {"ranks": [{k: v for k, v in one.items() if k != "operations"} for one in picture["ranks"]]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "timeline": kept}


# ------------------------------------------------------------------------------------------------- the command line


def write(pictures: list[dict], out: str) -> None:
    Path(f"{out}.svg").write_text(draw(pictures), encoding="utf-8")


def show(recordings: list[dict], args: argparse.Namespace) -> int:
    """Say, draw and save what was recorded; returns the exit code."""
    first, last = recordings[0]["first"], min(recording["last"] for recording in recordings)
    made = min(len(recording["cuts"]) - 1 for recording in recordings)
    if last < first:
        needed = recorded_steps(args.steps)[0] + 1
        if made < 1:
            said = "no optimizer of torch.optim made a step, so there is no step to draw"
        else:
            said = f"the program made {made} steps; --steps {args.steps} needs at least {needed}"
            said += ": let it make more, or give a smaller --steps"
        print(f"timeline: {said}", file=sys.stderr)
        return 1
    picture = picture_of(recordings, args)
    Path(f"{args.out}.json").write_text(json.dumps(trace_of(picture), separators=(",", ":")), encoding="utf-8")
    write([picture], args.out)
    say([*picture["findings"], ["written", f"{args.out}.svg, {args.out}.json"]])
    return 0


def draw_files(files: list[str], out: str) -> int:
    pictures = []
    for file in files:
        try:
            pictures.append(json.loads(Path(file).read_text(encoding="utf-8"))["timeline"])
        except (OSError, ValueError, KeyError, TypeError) as problem:
            print(f"timeline: {file} is no recording of timeline.py: {problem!r}", file=sys.stderr)
            return 2
    write(pictures, out)
    say([["written", f"{out}.svg"]])
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--steps", type=int, default=20, help="that are recorded (default: %(default)s)")
    parser.add_argument("--steps-shown", type=int, default=1, help="in the picture (default: %(default)s)")
    parser.add_argument("--out", default="timeline", help="writes OUT.svg and OUT.json (default: %(default)s)")
    parser.add_argument("--nproc", type=int, help="processes (default: one per GPU; without a GPU, 2)")
    parser.add_argument("--patience", type=float, default=300, help="seconds for a step (default: %(default)s)")
    parser.add_argument("--draw", nargs="+", metavar="FILE", help="draw these recordings; run nothing")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its flags")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a program and its flags")
    args = parser.parse_args()
    args.command = ["-m", *args.module] if args.module else args.script
    if bool(args.draw) == bool(args.command):
        parser.error("give a program, as in timeline.py mnist_ddp.py --dataset synthetic, or --draw and recordings")
    if args.steps < 1 or not 1 <= args.steps_shown <= args.steps:
        parser.error("--steps must be at least 1, and --steps-shown between 1 and --steps")
    if args.nproc is not None and args.nproc < 1:
        parser.error("--nproc must be at least 1")
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
