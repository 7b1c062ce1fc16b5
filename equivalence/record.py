"""What a process notes while the program runs.  It changes nothing."""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from instruments.hooks import Hooks, plain_name
from instruments.meeting import Place
from instruments.program import Finished
from instruments.tensors import parameters_of, tensors_in, whole
from torch import nn
from torch.nn.utils import clip_grad

from equivalence import progress
from equivalence.batches import RandomState, count_examples, random_state, to_plain
from equivalence.layers import DROPOUTS, drops, kinds_in, without_dropout
from equivalence.loaders import Loaders
from equivalence.notes import Event, Notes, Step

LOSSES = [name for name in dir(F) if name.endswith("_loss") or name in ("cross_entropy", "kl_div")]
LOSSES += ["binary_cross_entropy", "binary_cross_entropy_with_logits"]


class Recorder(Hooks):
    """Notes `length` steps, and how the next one begins."""

    def __init__(self, place: Place, length: int) -> None:
        super().__init__()
        torch.set_num_threads(1)  # in both runs: sums have one order
        self.place, self.length = place, length
        self.run, self.terminal = f"{place.world_size} processes", 2
        self.noted: list[Step] = [Step()]  # the current one is the last
        self.events: dict[str, list[Event]] = {}
        self.seen: Counter = Counter()
        self.counts: list[Counter] = []
        self.examples: dict[str, int] = {}
        self.loaders = Loaders()
        self.looks: dict[str, tuple[weakref.ref, int, int]] = {}  # iterator, steps before, batches
        self.own_optimizers: set[int] = set()
        self.stepping = 0  # optimizers inside optimizers
        self.has_gradients = False  # an optimizer's step has begun, and its gradients are noted
        self.has_stepped = False  # the first optimizer has, since this step began
        self.fetched = 0  # batches, since this step began
        self.known_state: RandomState | None = None  # in this step, at a batch or forward pass
        self.precision = 0.0
        self.has_dropout = False
        self.loose = 0

    @property
    def step(self) -> Step:
        return self.noted[-1]

    def new_step(self) -> None:
        """At the first batch after the optimizer's step.

        If there is none, or it came before that step: at the first forward pass.
        """
        self.noted.append(Step())
        self.has_stepped, self.fetched, self.known_state = False, 0, None

    def patches(self) -> list[tuple[Any, str, Callable]]:
        found = super().patches()
        found += [
            (nn.utils, "clip_grad_norm_", self.clip),
            (clip_grad, "clip_grad_norm_", self.clip),
        ]
        for name in LOSSES:
            found.append((F, name, functools.partial(self.loss_function, name)))
        for name in DROPOUTS:
            found.append((F, name, functools.partial(self.dropout, name)))
        return found

    # -------------------------------------------------------------------------------- the data

    def event(self, key: str, value: Any) -> Any:
        """Data come into the program.  Returns them."""
        self.seen[key] += 1
        self.known_state = random_state()
        self.events.setdefault(key, []).append(Event(to_plain(value), self.known_state))
        return value

    def load(self, iterator: Any, original: Callable) -> Any:
        if not torch.is_grad_enabled():
            return original()
        key = self.loaders.name_of(iterator)
        if self.has_stepped:
            self.new_step()
        self.fetched += 1
        self.forget_a_look(key, iterator)
        batch = original()
        if key not in self.examples:
            self.examples[key] = count_examples(to_plain(batch))
        return self.event(key, batch)

    def forget_a_look(self, key: str, iterator: Any) -> None:
        """If no step was made with the batches of the iterator before: `next(iter(loader))`."""
        own = weakref.ref(iterator)
        last, begun, count = self.looks.get(key, (own, len(self.counts), 0))
        if last() is iterator:
            self.looks[key] = (own, begun, count + 1)
            return
        if begun == len(self.counts):
            self.forget(key, count)
        self.looks[key] = (own, len(self.counts), 1)

    def forget(self, key: str, count: int) -> None:
        self.seen[key] -= count
        del self.events[key][len(self.events[key]) - count :]

    def loss_function(self, name: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Without a DataLoader the targets come in here."""
        is_inside = self.inside and self.inside[-1].what != "optimizer"
        if self.loaders.owners or is_inside or self.is_elsewhere() or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if len(args) > 1:
            args = (args[0], self.event(f"target of {name}", args[1]), *args[2:])
        elif "target" in kwargs:
            kwargs["target"] = self.event(f"target of {name}", kwargs["target"])
        return original(*args, **kwargs)

    # ------------------------------------------------------------------------ forward, backward

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        is_again = any(one.what == "backward" for one in self.inside)  # to save memory
        if is_again or not torch.is_grad_enabled():
            return None
        if self.has_stepped and self.fetched > 1:  # more than the batch that began this step
            self.new_step()
            self.fetched = 1  # in advance
        for kind in "cpu", "cuda":
            if torch.is_autocast_enabled(kind):
                self.note_precision(torch.get_autocast_dtype(kind))
        if id(module) not in self.step.begun:
            self.step.begun.add(id(module))
            self.model_begins(module)
        self.note_state()
        if self.loaders.owners or next(tensors_in((args, kwargs)), None) is None:
            return None
        name = f"inputs of {type(unwrapped(module)).__name__}"
        args, new_kwargs = self.event(name, (args, dict(kwargs)))
        kwargs.update(new_kwargs)
        return args

    def note_state(self) -> None:
        self.look_at_state()
        self.step.states.append(self.known_state)

    def look_at_state(self) -> None:
        """Which random numbers were drawn since a batch was there, or a forward pass began?"""
        state = random_state()
        if self.known_state is not None:
            self.step.draws |= state.other_than(self.known_state)
        self.known_state = state

    def model_begins(self, model: nn.Module) -> None:
        """It is called for the first time in this step."""
        for name, tensor in self.named_tensors(model):
            self.step.weights[name] = whole(tensor)

    def forward_ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.is_floating_point():
                self.note_precision(tensor.dtype)

    def note_precision(self, dtype: torch.dtype) -> None:
        self.precision = max(self.precision, torch.finfo(dtype).eps)

    def clip(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        self.step.norms.append(float(whole(norm)))
        return norm

    def dropout(self, name: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """What is called by nn.Dropout, and by programs themselves."""
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if drops(name, args, kwargs):
            self.has_dropout = True
            if self.leaves_out_dropout():
                args, kwargs = without_dropout(name, args, kwargs)
        return original(*args, **kwargs)

    def leaves_out_dropout(self) -> bool:
        return False

    # ---------------------------------------------------------------------------- the optimizer

    def optimizer_begins(self, optimizer: Any) -> None:
        if not self.stepping:
            self.own_optimizers.add(id(optimizer))
        self.stepping += 1
        if optimizer is self.optimizer and self.has_stepped:
            self.new_step()

    def gradients_are_there(self, optimizer: Any) -> None:
        if self.has_gradients and self.stepping == 1:
            self.step.is_repeated = True
            return
        self.has_gradients = True
        self.look_at_state()
        if optimizer is self.optimizer and len(self.counts) < self.steps:
            self.counts.append(self.seen.copy())
            self.step_is_complete()
            self.step.rates = [float(group["lr"]) for group in optimizer.param_groups]
        known = {id(parameter) for parameter in parameters_of(optimizer)}
        loose = {id(one) for one in parameters_of(optimizer) if one.grad is not None}
        for model in self.models.values():
            for name, tensor in self.named_tensors(model):
                loose.discard(id(tensor))
                if id(tensor) in known:
                    gradient = tensor.grad
                    self.step.gradients[name] = None if gradient is None else whole(gradient)
        self.loose = max(self.loose, len(loose))

    def step_is_complete(self) -> None:
        if self.place.rank == 0:
            text = f"equivalence: {self.run}, step {len(self.counts)} of {self.length + 1}"
            progress.show(text, self.terminal)
        if len(self.noted) > self.length:
            raise Finished

    def optimizer_ends(self, optimizer: Any) -> None:
        self.stepping -= 1  # torch's ZeroRedundancyOptimizer calls another one
        self.has_gradients = False
        if optimizer is self.optimizer:
            self.has_stepped = True
            if not self.loaders.owners:
                self.new_step()

    # -------------------------------------------------------------------------------- the notes

    def named_tensors(self, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Parameters and buffers, each once, with the name that the first model gives it.

        A second model's names begin with its class.
        """
        names: dict[int, str] = {}
        for number, other in enumerate(self.models.values()):
            prefix = f"{type(other).__name__} {number + 1}: " if number else ""
            own = [*other.named_parameters(), *other.named_buffers()]
            for name, tensor in own:
                names.setdefault(id(tensor), prefix + plain_name(name))
            if other is model:
                break
        return [(names[id(tensor)], tensor) for _, tensor in own]

    def notes(self, is_own_thread: bool = True) -> Notes:
        names = {}  # each once, in their order
        for model in self.models.values():
            parameters = {id(parameter) for parameter in model.parameters()}
            names |= {name: 1 for name, t in self.named_tensors(model) if id(t) in parameters}
        tensors = list(tensors_in([list(self.events.values()), [vars(s) for s in self.noted]]))
        return Notes(
            rank=self.place.rank,
            world_size=self.place.world_size,
            steps=self.noted,
            events=self.events,
            counts=self.counts,
            parameters=list(names),
            loose=self.loose,
            kinds=kinds_in(self.models.values()) | ({"dropout"} if self.has_dropout else set()),
            precision=self.precision,
            optimizers=len(self.own_optimizers),
            indices=self.loaders.indices,
            lengths=self.loaders.lengths,
            examples=self.examples,
            batch_sizes=self.loaders.batch_sizes,
            size=sum(tensor.nbytes for tensor in tensors),
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(module, wrappers) or hasattr(module, "_orig_mod"):
        module = module._orig_mod if hasattr(module, "_orig_mod") else module.module
    return module


class QuietRecorder(Recorder):
    """What the program prints goes into a file."""

    def __init__(self, place: Place, length: int, folder: str) -> None:
        super().__init__(place, length)
        self.log = f"{folder}/log{place.rank}"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with (
            open(self.log, "w", encoding="utf-8") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
            super().installed(),
        ):
            yield
