"""Tells an instrument what the program does: it loads, computes, makes a step of an optimizer.

An instrument is a subclass of Hooks, and writes what it wants to know:

    class Counter(Hooks):
        def forward_begins(self, module, args, kwargs):
            self.count += 1

    counter = Counter()
    with counter.installed():
        run_program(["train.py"])

What happens in other threads, and while torch.compile looks at the program, is not told.
"""

import contextlib
import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader

from instruments.program import Refused


class Open(NamedTuple):
    """Something that has begun and not ended."""

    what: str  # "forward", "backward", "load" or "optimizer"
    of: Any = None  # the module, the loader's iterator, or the optimizer


class Hooks:
    """What an instrument overrides, and what calls it.

    A step begins with the first batch after the optimizer's step; if the program has no
    DataLoader, right after the optimizer's step.  `step_begins` is called at both places.  The
    last call before the first optimizer steps again is the one that counts.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.inside: list[Open] = []  # the innermost comes last
        self.models: dict[int, nn.Module] = {}  # those with parameters that no other module calls
        self.optimizer: Any = None  # the first that makes a step
        self.steps = 0  # how many it has begun
        self.last_step = time.monotonic()
        self.undo = contextlib.ExitStack()  # what is done when the program has ended
        self._waits_for_batch = False

    # -------------------------------------------------------------- what an instrument overrides

    def step_begins(self, is_sure: bool) -> None:
        """A step begins here.  Not sure: perhaps with a batch that comes later."""

    def load(self, iterator: Any, original: Callable) -> Any:
        """Return the next batch of a DataLoader: that of original(), or another one."""
        return original()

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        """A module is called by no other module.  May return other args, and change kwargs."""

    def forward_ends(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """May return another output; after an exception the output is None."""

    def backward(self, original: Callable) -> Any:
        """torch.autograd.backward, Tensor.backward or torch.autograd.grad was called."""
        return original()

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins: the first one's, or another's, perhaps inside it."""

    def gradients_are_there(self, optimizer: Any) -> None:
        """The optimizer is about to use them.  With a closure: after each call of the closure."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has ended."""

    def notes(self, is_own_thread: bool) -> Any:
        """What was noted, for `ranks`.  Another thread asks if the program hangs."""
        raise NotImplementedError

    # ------------------------------------------------------------------------- what calls these

    def patches(self) -> list[tuple[Any, str, Callable]]:
        """(place, name, function): function(original, *args, **kwargs) replaces place.name."""
        return [
            (torch.autograd, "backward", self._backward),
            (torch.autograd, "grad", self._backward),
            (dataloader._BaseDataLoaderIter, "__next__", self._load),
            (torch.multiprocessing, "spawn", self._processes),
            (torch.multiprocessing, "start_processes", self._processes),
        ]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A block in which this instrument is called."""
        handles = [
            nn_module.register_module_forward_pre_hook(self._before_module),
            nn_module.register_module_forward_hook(self._after_module, always_call=True),
            torch_optimizer.register_optimizer_step_pre_hook(self._before_optimizer),
            torch_optimizer.register_optimizer_step_post_hook(self._after_optimizer),
        ]
        with self.undo:
            for handle in handles:
                self.undo.callback(handle.remove)
            for place, name, function in self.patches():
                original = getattr(place, name)
                setattr(place, name, replacement(function, original))
                self.undo.callback(setattr, place, name, original)
            yield

    def is_elsewhere(self) -> bool:
        """Whether another thread calls, or torch.compile or torch.func looks at the program.

        In torch.func.grad and vmap there are no tensors whose values can be noted.
        """
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        is_other_thread = threading.get_ident() != self.thread
        return is_other_thread or is_transformed or torch.compiler.is_compiling()

    @contextlib.contextmanager
    def doing(self, what: str, of: Any = None) -> Iterator[None]:
        self.inside.append(Open(what, of))
        try:
            yield
        finally:
            self.inside.pop()

    def _processes(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        raise Refused(
            "the program starts processes of its own, which are not seen: call its worker function "
            "under torchrun --nproc_per_node=2, in place of torch.multiprocessing.spawn"
        )

    def _load(self, original: Callable, iterator: Any) -> Any:
        __tracebackhide__ = True
        if self.is_elsewhere():
            return original(iterator)
        if self._waits_for_batch:
            self._waits_for_batch = False
            self.step_begins(is_sure=True)
        with self.doing("load", iterator):
            return self.load(iterator, functools.partial(original, iterator))

    def _backward(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.is_elsewhere():
            return original(*args, **kwargs)
        with self.doing("backward"):
            return self.backward(functools.partial(original, *args, **kwargs))

    def _before_module(self, module: nn.Module, args: tuple) -> tuple | None:
        """A forward pass is a call of a module with parameters, by no other, not to load data."""
        if self.is_elsewhere():
            return None
        if self.inside and self.inside[-1].what in ("forward", "load"):
            return None
        if id(module) not in self.models:
            if next(module.parameters(), None) is None:
                return None
            self.models[id(module)] = module
        self.inside.append(Open("forward", module))
        # A global hook gets no keyword arguments; torch's function that calls it has them.
        kwargs = sys._getframe(1).f_locals.get("kwargs", {})
        return self.forward_begins(module, args, kwargs)

    def _after_module(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self.is_elsewhere() or not self.inside or self.inside[-1] != ("forward", module):
            return None
        self.inside.pop()
        return self.forward_ends(module, args, output)

    def _before_optimizer(self, optimizer: Any, args: tuple, kwargs: dict) -> tuple | None:
        if self.is_elsewhere():
            return None
        self.optimizer = self.optimizer or optimizer
        if optimizer is self.optimizer:
            self.steps += 1
            self.last_step = time.monotonic()
        self.optimizer_begins(optimizer)
        self.inside.append(Open("optimizer", optimizer))
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.gradients_are_there(optimizer)
            return None

        @functools.wraps(closure)
        def noted_closure() -> Any:
            loss = closure()
            self.gradients_are_there(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": noted_closure}

    def _after_optimizer(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if self.is_elsewhere():
            return
        if self.inside and self.inside[-1] == ("optimizer", optimizer):
            self.inside.pop()
        self.optimizer_ends(optimizer)
        self.step_begins(is_sure=False)
        self._waits_for_batch = True


def replacement(function: Callable, original: Callable) -> Callable:
    """A plain function, as a method must be one: function(original, *args, **kwargs)."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # a warning names the program's line, not this one
        return function(original, *args, **kwargs)

    return call


def plain_name(name: str) -> str:
    return re.sub(r"\b(module|_orig_mod)\.", "", name)
