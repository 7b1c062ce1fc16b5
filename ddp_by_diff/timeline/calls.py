"""What a process notes of its messages where they are called, and when a backward has ended."""

import contextlib
import functools
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as torch_dist

from ddp_by_diff.timeline.data import Message, Noted
from ddp_by_diff.timeline.messages import kind_of

CHECK = "/distributed.py", "_check_same_call"  # the function that compares the ranks' calls


class Calls:
    """Notes each call of a message: the groups' hooks tell of it (torch 2.14).

    note_memory(kind, tensors) is called with the message's buffers, note_core_wait() where DDP
    begins to wait.
    """

    def __init__(self, noted: Noted, note_memory: Callable, note_core_wait: Callable) -> None:
        self.noted, self.note_memory = noted, note_memory
        self.note_core_wait = note_core_wait
        self.note_end: Any = None  # note_graph_end, that torch.compile leaves alone

    def begin(self, undo: contextlib.ExitStack) -> None:
        """Note the calls in all groups, until `undo`."""
        # C++ calls these functions, also in a backward that torch.compile would compile with them.
        self.note_end = torch.compiler.disable(self.note_graph_end)
        for group in torch_dist.distributed_c10d._world.pg_map:
            ranks = torch_dist.get_process_group_ranks(group)
            note = functools.partial(self.note_message, group.group_name, ranks)
            group.register_pre_hook(id(self), torch.compiler.disable(note))
            undo.callback(group.unregister_pre_hook, id(self))

    def note_message(self, group: str, ranks: list[int], args: Any) -> None:
        issued, name = time.time_ns(), name_of(args.name)
        inputs, outputs = args.input_tensors, args.output_tensors
        tensors = inputs or outputs
        call = Message(
            kind_of(name) or "message",
            group,
            issued=issued,
            peer=ranks[args.root] if name in ("SEND", "RECV") else None,
            bytes=sum(map(size_in_bytes, tensors)),
            runs=len(tensors) if name == "REDUCE_SCATTER" else 1,  # gloo: an all-reduce of each
            is_check=is_check(),
        )
        self.noted.calls.append(call)
        self.note_memory("communication buffers", [*inputs, *outputs])
        if torch._C._current_graph_task_id() != -1:  # called by a hook, such as DDP's
            torch.autograd.Variable._execution_engine.queue_callback(self.note_end)

    def note_graph_end(self, is_last: bool = False) -> None:
        """A backward has computed all.  DDP's own function, which waits, is queued after this one.

        What is queued now comes after that.
        """
        self.noted.graph_ends.append(time.time_ns())
        self.note_core_wait()
        if not is_last:
            again = functools.partial(self.note_end, is_last=True)
            torch.autograd.Variable._execution_engine.queue_callback(again)


def is_check() -> bool:
    """Whether a call comes from CHECK."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    return any(code.co_name == CHECK[1] and code.co_filename.endswith(CHECK[0]) for code in codes)


@functools.cache
def name_of(operation: Any) -> str:
    """Such as ALLREDUCE.  torch looks for it in a list each time."""
    return operation.name


def size_in_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor, or of a sparse tensor's indices and values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes
