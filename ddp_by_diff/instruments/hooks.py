"""Tells observers what the program does: it loads, computes, makes a step of an optimizer.

What happens in other threads, and while torch.compile looks at the program, is not told.
"""

import contextlib
import functools
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

from ddp_by_diff.instruments.observer import Observer
from ddp_by_diff.instruments.program import Refused


class Open(NamedTuple):
    """Something that has begun and not ended."""

    what: str  # "forward", "backward", "load" or "optimizer"
    of: Any = None  # the module, the loader's iterator, or the optimizer


class Hooks:
    """What calls the observers, in their order; the notes are those of the first one."""

    def __init__(self, observers: list[Observer]) -> None:
        self.observers = observers
        for observer in observers:
            observer.hooks = self
        # Is asked first, because torch.compile reads the hooks, too; without it, a list of modules
        # ends in torch's AssertionError (2.13.0).
        self.is_compiling = torch.compiler.is_compiling
        self.thread = threading.get_ident()
        self.inside: list[Open] = []  # the innermost comes last
        self.models: dict[int, nn.Module] = {}  # those with parameters that no other module calls
        self.optimizer: Any = None  # the first that makes a step
        self.steps = 0  # how many it has begun
        self.last_step = time.monotonic()
        self.undo = contextlib.ExitStack()  # what is done when the program has ended
        self._has_gradients = False  # those of the optimizer's step that has begun were told

    def notes(self, is_own_thread: bool) -> Any:
        """Notes of the first observer, after all others have completed theirs."""
        for observer in reversed(self.observers):
            noted = observer.notes(is_own_thread)
        return noted

    def is_in(self, what: str) -> bool:
        return any(call.what == what for call in self.inside)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A block in which the observers are told."""
        handles = [
            nn_module.register_module_forward_pre_hook(self._before_module),
            nn_module.register_module_forward_hook(self._after_module, always_call=True),
            torch_optimizer.register_optimizer_step_pre_hook(self._before_optimizer),
            torch_optimizer.register_optimizer_step_post_hook(self._after_optimizer),
        ]
        patches: list[tuple[Any, str, Callable]] = [
            (torch.autograd, "backward", self._backward),
            (torch.autograd, "grad", self._backward),
            (dataloader._BaseDataLoaderIter, "__next__", self._load),
            (torch.multiprocessing, "spawn", self._processes),
            (torch.multiprocessing, "start_processes", self._processes),
        ]
        for observer in self.observers:
            patches += observer.patches()
        with self.undo:
            for handle in handles:
                self.undo.callback(handle.remove)
            for place, name, function in patches:
                original = getattr(place, name)
                setattr(place, name, replacement(function, original))
                self.undo.callback(setattr, place, name, original)
            self._tell("installed")
            yield

    def is_elsewhere(self) -> bool:
        """Whether another thread calls, or torch.compile or torch.func looks at the program.

        In torch.func.grad and vmap there are no tensors whose values can be noted.
        """
        if self.is_compiling():
            return True
        if threading.get_ident() != self.thread:
            return not any(observer.is_ours() for observer in self.observers)
        return torch._C._functorch.peek_interpreter_stack() is not None

    def _tell(self, what: str, *args: Any) -> None:
        for observer in self.observers:
            getattr(observer, what)(*args)

    def _around(self, what: str, *args: Any) -> Any:
        """Call the last argument, which is what the program calls, within all observers."""
        *first, original = args
        for observer in reversed(self.observers):
            original = functools.partial(getattr(observer, what), *first, original)
        return original()

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
        with self.doing("load", iterator):
            return self._around("load", iterator, functools.partial(original, iterator))

    def _backward(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.is_elsewhere():
            return original(*args, **kwargs)
        with self.doing("backward"):
            return self._around("backward", functools.partial(original, *args, **kwargs))

    def _before_module(self, module: nn.Module, args: tuple) -> Any:  # torch's types say None
        """A forward pass is a call of a module with parameters, by no other, not to load data."""
        if self.is_compiling():
            return None
        is_inside = self.inside and self.inside[-1].what in ("forward", "load")  # as most are
        if is_inside or self.is_elsewhere():
            return None
        if id(module) not in self.models:
            if next(module.parameters(), None) is None:
                return None
            self.models[id(module)] = module
        self.inside.append(Open("forward", module))
        # A global hook gets no keyword arguments; torch's function that calls it has them.
        kwargs = sys._getframe(1).f_locals.get("kwargs", {})
        replaced = None
        for observer in self.observers:
            other = observer.forward_begins(module, replaced or args, kwargs)
            replaced = replaced if other is None else other
        return replaced

    def _after_module(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self.is_compiling():
            return
        if not self.inside or self.inside[-1] != ("forward", module) or self.is_elsewhere():
            return
        self.inside.pop()
        self._tell("forward_ends", module, args, output)

    def _before_optimizer(self, optimizer: Any, args: tuple, kwargs: dict) -> tuple | None:
        if self.is_elsewhere():
            return None
        self.optimizer = self.optimizer or optimizer
        if optimizer is self.optimizer:
            self.steps += 1
            self.last_step = time.monotonic()
        self._tell("optimizer_begins", optimizer)
        is_inside_another = self.is_in("optimizer")
        self.inside.append(Open("optimizer", optimizer))
        if is_inside_another:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._gradients(optimizer)
            return None

        @functools.wraps(closure)
        def noted_closure() -> Any:
            loss = closure()
            self._gradients(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": noted_closure}

    def _gradients(self, optimizer: Any) -> None:
        is_again, self._has_gradients = self._has_gradients, True
        self._tell("gradients_are_there", optimizer, is_again)

    def _after_optimizer(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if self.is_elsewhere():
            return
        if self.inside and self.inside[-1] == ("optimizer", optimizer):
            self.inside.pop()
        self._has_gradients &= self.is_in("optimizer")
        self._tell("optimizer_ends", optimizer)


def replacement(function: Callable, original: Callable) -> Callable:
    """A plain function, as a method must be one: function(original, *args, **kwargs)."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # a warning names the program's line, not this one
        return function(original, *args, **kwargs)

    return call
