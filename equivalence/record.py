"""What a process notes while the program runs.  It changes nothing."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from distributed import unwrap_model
from instruments.meeting import Place
from instruments.tensors import tensors_in
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import clip_grad
from torch.utils.data import dataloader
from torch.utils.data._utils import fetch

from equivalence import layers
from equivalence.batches import digest, to_plain
from equivalence.limits import COARSE
from equivalence.notes import Event, Notes
from equivalence.optimizers import Optimizers
from equivalence.randomness import random_state
from equivalence.shelf import Shelf

LOSSES = [name for name in dir(F) if name.endswith("_loss") or name in ("cross_entropy", "kl_div")]
LOSSES += ["binary_cross_entropy", "binary_cross_entropy_with_logits"]


class Recorder(Optimizers):
    """Notes `length` steps, and how the next one begins."""

    def __init__(
        self, place: Place, length: int, log: str, folder: str | None, left_out: tuple = ()
    ) -> None:
        """folder: for large tensors.  left_out: kinds of layers that are switched off."""
        super().__init__(place, length, Shelf(folder))
        torch.set_num_threads(1)  # in both runs: sums have one order
        if torch.cuda.is_available():
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.left_out = left_out
        self.log = f"{log}{place.rank}"

    def patches(self) -> list[tuple[Any, str, Callable]]:
        patches = super().patches()
        patches += [
            (nn.utils, "clip_grad_norm_", self.clip),
            (clip_grad, "clip_grad_norm_", self.clip),
            (torch.optim.Optimizer, "add_param_group", self.parameters_are_known),
            (dataloader._BaseDataLoaderIter, "_next_index", self.loaders.draw),
            (fetch._MapDatasetFetcher, "fetch", self.loaders.fetch),
            (fetch._IterableDatasetFetcher, "fetch", self.loaders.fetch),
            (dataloader._SingleProcessDataLoaderIter, "_next_data", self.loaders.unpack),
            (dataloader._MultiProcessingDataLoaderIter, "_next_data", self.loaders.unpack),
            (torch.amp.GradScaler, "scale", self.scaled),
        ]
        for name in LOSSES:
            patches.append((F, name, functools.partial(self.loss_function, name)))
        for name in layers.DROPOUTS:
            patches.append((F, name, functools.partial(self.dropout, name)))
        return patches

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """What the program prints goes into a file."""
        with (
            open(self.log, "w", encoding="utf-8") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
            super().installed(),
        ):
            handle = nn_module.register_module_forward_hook(self.note_unsharded)
            try:
                yield
            finally:
                handle.remove()

    # -------------------------------------------------------------------------------- the data

    def event(self, key: str, value: Any, iterator: Any = None) -> Any:
        """Data come into the program, perhaps from a loader's iterator.  Returns them."""
        if iterator is None:
            self.note_draws()
        self.seen[key] += 1
        self.known_state = random_state()
        event = Event(to_plain(value), self.known_state)
        if iterator is not None:
            event = event._replace(
                examples=self.loaders.examples,
                round=self.loaders.rounds[key],
                indices=self.loaders.indices_of(iterator),
            )
        self.noted.events.setdefault(key, []).append(event)
        return value

    def load(self, iterator: Any, original: Callable) -> Any:
        if not torch.is_grad_enabled():
            return original()
        key = self.loaders.name_of(iterator)
        if self.has_stepped:
            self.new_step()
        self.note_draws()
        self.fetched += 1
        batch = original()
        return self.event(key, batch, iterator)

    def loss_function(self, name: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Without a DataLoader the targets come in here."""
        is_inside = self.inside and self.inside[-1].what != "optimizer"
        if self.loaders.owners or is_inside or self.is_elsewhere() or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        is_computed = isinstance(target, torch.Tensor) and target.is_floating_point()
        if target is None or (self.has_taught and is_computed):  # perhaps by a teacher
            return original(*args, **kwargs)
        target = self.event(f"target of {name}", target)
        if "target" in kwargs:
            return original(*args, **{**kwargs, "target": target})
        return original(args[0], target, *args[2:], **kwargs)

    # ------------------------------------------------------------------------ forward, backward

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        if any(call.what == "backward" for call in self.inside):  # again, to save memory
            return None
        self.look_at_layers(module)
        if not torch.is_grad_enabled():
            self.model_begins(module)  # a teacher's weights count, too
            self.has_taught = True
            return None
        if self.has_stepped and self.fetched > 1:  # more than the batch that began this step
            self.new_step()
            self.fetched = 1  # in advance
        for device in "cpu", "cuda":
            if torch.is_autocast_enabled(device):
                self.note_format(torch.get_autocast_dtype(device))
        self.model_begins(module)
        replaced = None
        tensors = list(tensors_in((args, kwargs)))
        is_data = bool(tensors) and not any(tensor.requires_grad for tensor in tensors)
        if not self.loaders.owners and is_data:  # and not what another model has computed
            name = f"inputs of {type(unwrap_model(module)).__name__}"
            replaced, new_kwargs = self.event(name, (args, dict(kwargs)))
            kwargs.update(new_kwargs)
        self.step.inputs += digest((replaced or args, dict(kwargs)))
        return replaced

    def look_at_layers(self, model: nn.Module) -> None:
        for layer in model.modules():
            if kind := layers.kind_of(layer):
                self.noted.kinds.add(kind)
                layer.training = kind not in self.left_out

    def model_begins(self, model: nn.Module) -> None:
        if id(model) in self.step.begun:
            return
        self.step.begun.add(id(model))
        for name, tensor in self.named_tensors(model):
            self.begin(name, tensor)
            self.own.watch(tensor)
        for layer in model.modules():
            for name, parameter in layer._parameters.items():
                self.slots.setdefault((id(layer), name), parameter)

    def forward_ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.is_floating_point():
                self.note_format(tensor.dtype)

    def note_format(self, dtype: torch.dtype) -> None:
        self.noted.is_coarse |= torch.finfo(dtype).eps > COARSE

    def dropout(self, name: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """What is called by nn.Dropout, and by programs themselves."""
        if not torch.compiler.is_compiling() and layers.drops(name, args, kwargs):
            self.noted.kinds.add("dropout")
            if "dropout" in self.left_out:
                args, kwargs = layers.without_dropout(name, args, kwargs)
        return original(*args, **kwargs)

    # -------------------------------------------------------------------------------- the notes

    def notes(self, is_own_thread: bool = True) -> Notes:
        names: dict[str, None] = {}  # each once, in their order
        for model in self.models.values():
            parameters = {id(parameter) for parameter in model.parameters()}
            names |= {name: None for name, t in self.named_tensors(model) if id(t) in parameters}
        for step in self.noted.steps:
            names |= dict.fromkeys(step.options)
        self.noted.parameters = list(names)
        if is_own_thread:
            self.noted.ends = self.loaders.ends()
        return self.noted
