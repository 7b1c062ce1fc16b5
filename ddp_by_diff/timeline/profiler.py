"""torch's profiler, as a recording uses it, and no other beside it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as torch_dist
from torch._C._profiler import RecordScope

from ddp_by_diff.instruments.program import Refused

HAS_MESSAGE_HOOKS = hasattr(torch_dist.ProcessGroup, "register_pre_hook")  # since torch 2.14


class Profiler:
    """Starts torch's profiler once; a program that starts one, too, is refused.

    Two at once end in a segmentation fault.
    """

    def __init__(self, ops: bool) -> None:
        self.ops = ops  # whether torch's operations are noted, too
        self.device = "cpu"
        self.profile: Any = None  # torch.profiler.profile
        self.has_started = False

    def patches(self) -> list[tuple[Any, str, Callable]]:
        """What each profiler of torch calls when it starts."""
        place = torch.autograd.profiler
        return [
            (place, "_prepare_profiler", self.start_or_refuse),
            (place, "_enable_profiler", self.enable),
        ]

    def start(self, device: str) -> None:
        self.device = device
        self.profile = torch.profiler.profile(
            activities=torch.profiler.supported_activities(),  # CPU and, if any, GPU
            profile_memory=True,
        )
        self.profile.start()
        self.has_started = True

    def start_or_refuse(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        if self.has_started or not self.profile:
            raise Refused(
                "the program starts torch.profiler itself, and two can't run at once: "
                "switch it off there"
            )
        original(*args, **kwargs)

    def enable(self, original: Callable, *args: Any) -> None:
        """Note memory, messages of gloo and what the program names (record_function).

        To note operations, too, costs 10 % of a step.  Calls of NCCL are among these, and before
        torch 2.14 all calls.
        """
        if not self.ops and self.device == "cpu" and HAS_MESSAGE_HOOKS:
            args = *args, {RecordScope.USER_SCOPE}
        self.start_or_refuse(original, *args)
