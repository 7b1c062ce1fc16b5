"""Data that come into the program: batches of DataLoaders, a model's inputs, a loss's targets."""

import argparse
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as torch_dist
from torch import nn

from ddp_by_diff.distributed import unwrap_model
from ddp_by_diff.equivalence.batches import digest, mapped, tensors_in, to_plain
from ddp_by_diff.equivalence.loaders import Loaders
from ddp_by_diff.equivalence.notes import Event, drawn_between, random_state, set_random_state
from ddp_by_diff.instruments.observer import Observer

# Not --warmup-batches, which are counted; nor a --base-batch-size, to which a rate refers.
BATCH_SIZE = re.compile(r"(?i)(?!.*(base|virtual|ghost)).*(batch(?!es)|(?<![a-z])bs(?![a-z])).*")
LOSSES = [name for name in dir(F) if name.endswith("_loss") or name in ("cross_entropy", "kl_div")]
LOSSES += ["binary_cross_entropy", "binary_cross_entropy_with_logits"]


class Data(Observer):
    """Notes the events of each step, digests of models' inputs, and which generators are used."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps
        self.loaders = Loaders(steps.noted.loaders, looks=not steps.source)
        self.outputs: dict[int, list] = {}  # by model: the tensors that its last call has returned

    def patches(self) -> list[tuple[Any, str, Callable]]:
        losses = [(F, name, functools.partial(self.loss, name)) for name in LOSSES]
        parse = (argparse.ArgumentParser, "parse_known_args", self.parsed)
        return [*self.loaders.patches(), *losses, parse]

    def parsed(self, original: Callable, parser: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the flags that may be batch sizes: whole numbers named "batch" or "bs"."""
        found = original(parser, *args, **kwargs)
        for action in parser._actions:
            value, flags = getattr(found[0], action.dest, None), action.option_strings
            if flags and type(value) is int and BATCH_SIZE.fullmatch(f"{action.dest} {flags}"):
                self.steps.noted.sizes[flags[-1]] = value
        return found

    def note_draws(self) -> None:
        """Note which random generators were used since the last event of this step."""
        if known := self.steps.now.known_state:
            self.steps.step.draws |= drawn_between(known, random_state())

    def note_event(self, key: str, value: Any, iterator: Any = None) -> Any:
        """Note an event; returns what the program gets.  iterator: of a DataLoader, or None."""
        event = Event(to_plain(value), random_state(), round=self.loaders.rounds.get(key, 0))
        if iterator is not None:
            indices = self.loaders.indices_of(iterator)
            event = event._replace(examples=self.loaders.examples, indices=indices)
        self.steps.seen[key] += 1
        self.steps.now.known_state = event.state
        if self.steps.source:
            number, step = self.steps.seen[key] - 1, len(self.steps.noted.steps)
            value, state = self.steps.source.batch(key, number, step, event, value, iterator)
            self.steps.now.known_state = state
            set_random_state(state)
        else:
            self.steps.noted.events.setdefault(key, []).append(event)
        return value

    def load(self, iterator: Any, original: Callable) -> Any:
        if not torch.is_grad_enabled():
            return original()
        key = self.loaders.name_of(iterator)
        self.note_draws()
        return self.note_event(key, original(), iterator)

    def loss(self, name: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Note a loss's target as an event, if the program has no DataLoader."""
        hooks = self.hooks
        is_inside = hooks.inside and hooks.inside[-1].what != "optimizer"
        is_other = is_inside or hooks.is_elsewhere() or not torch.is_grad_enabled()
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        is_computed = isinstance(target, torch.Tensor) and target.is_floating_point()
        is_computed &= self.steps.now.has_teacher  # by that, perhaps
        if self.steps.has_loader or is_other or target is None or is_computed:
            return original(*args, **kwargs)
        self.note_draws()
        target = self.note_event(f"target of {name}", target)
        if "target" in kwargs:
            return original(*args, **{**kwargs, "target": target})
        return original(args[0], target, *args[2:], **kwargs)

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        if self.hooks.is_in("backward"):
            return None
        if not torch.is_grad_enabled():
            self.steps.now.has_teacher = True
            return None
        replaced = None
        tensors = list(tensors_in((args, kwargs)))
        are_leaves = all(one.is_leaf and type(one) is not nn.Parameter for one in tensors)
        if not self.steps.has_loader and tensors and are_leaves:  # which no model has computed
            self.note_draws()
            name = f"inputs of {type(unwrap_model(module)).__name__}"
            own, is_state = (args, dict(kwargs)), self.is_state  # a state is not noted, or replaced
            data = mapped(lambda some, key: torch.zeros(()) if is_state(*some) else some[0], [own])
            pair = [own, self.note_event(name, data)]
            replaced, new_kwargs = mapped(lambda some, key: some[not is_state(some[0])], pair)
            kwargs.update(new_kwargs)
        self.steps.step.inputs += digest((replaced or args, dict(kwargs)))
        return replaced

    def is_state(self, leaf: Any) -> bool:
        """Whether a leaf of a model's inputs is what a model has returned (an LSTM's state)."""
        known = [tensor for some in self.outputs.values() for tensor in some]
        is_full = isinstance(leaf, torch.Tensor) and leaf.numel() > 0
        return is_full and any(tensor.data_ptr() == leaf.data_ptr() for tensor in known)

    def forward_ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self.steps.has_loader and torch.is_grad_enabled():
            self.outputs[id(module)] = [tensor.detach() for tensor in tensors_in(output)]

    def gradients_are_there(self, optimizer: Any, is_again: bool) -> None:
        if not is_again:
            self.note_draws()
            self.steps.step.after = random_state()
            self.steps.noted.has_group |= torch_dist.is_initialized()

    def notes(self, is_own_thread: bool) -> None:
        if is_own_thread:
            self.loaders.look_into_data()
