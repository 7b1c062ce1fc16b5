"""A source for the run in one process: it gives step k the ranks' batch, weights and gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed as torch_dist
from torch import nn

from ddp_by_diff.equivalence import batches
from ddp_by_diff.equivalence.batches import digest, digests_of_examples, to_plain
from ddp_by_diff.equivalence.facts import Facts, count_in
from ddp_by_diff.equivalence.formats import InFloat64, in_float64
from ddp_by_diff.equivalence.notes import Alone, Event, Notes, RandomState
from ddp_by_diff.equivalence.vectors import put_together
from ddp_by_diff.instruments.observer import Observer
from ddp_by_diff.instruments.program import Refused

SHARES = ("one share", "repeated share")  # kinds of runs


class Source(Observer):
    """What a run in one process is given: the observers ask for a step's batch and weights.

    all examples  in one batch; and the gradients that the ranks' optimizers got
    own data      the program's own batches, as one can't be made; and these gradients
    given state   the batches of an earlier run, and in each step the ranks' buffers
    in float64    the batches of an earlier run, in float64
    other order   all examples, in a different order
    one share     one rank's examples, padded to the longest of all
    repeated share  the same, as often as there are ranks: as many examples as all have
    """

    rank = 0  # whose share: its place in Facts.distinct
    batches: Mapping = {}  # of the earlier run (Alone.batches)
    own_in = -1  # the last step in which a batch was left as it is
    joined_in = -1  # and in which one was replaced
    is_mixed = False
    is_collated = True

    def __init__(
        self, facts: Facts, kind: str, per_step: dict[str, int], left_out: tuple, **given: Any
    ) -> None:
        """per_step: of runs.py.  left_out: kinds of layers.  given: rank, batches."""
        self.facts, self.kind, self.per_step, self.left_out = facts, kind, per_step, left_out
        vars(self).update(given)
        self.matched: dict[str, bool] = {}  # whether the ranks had such a weight, in some step
        self.taken: dict[str, int] = {}  # examples of the first step's own batches, by digest
        self.left: dict[tuple[str, int], list[Event]] = {}  # of a step, what no batch has got yet
        self.noted: dict[tuple[str, int], tuple] = {}  # what the program got, and the state

    def installed(self) -> None:
        if self.kind == "in float64":
            torch.set_default_dtype(torch.float64)
            self.hooks.undo.enter_context(InFloat64())

    def patches(self) -> list[tuple[Any, str, Callable]]:
        return [(torch_dist, "init_process_group", self.group_begins)]

    def group_begins(self, original: Callable, *args: Any, **kwargs: Any) -> None:
        """Refuse a program that waits for more processes, as it has their number by itself."""
        size = kwargs.get("world_size", 1)
        if size > 1:
            raise Refused(
                f"in one process the program waits for {size} processes: give the flags with "
                'which it does not, such as --alone="--devices 1"'
            )
        original(*args, **kwargs)

    def batch(
        self, key: str, number: int, step: int, own: Event, value: Any, iterator: Any
    ) -> tuple[Any, RandomState]:
        """The batch that the program gets, and the random state after it.

        own, value: the run's own, as an event and as it is.
        """
        if (key, number) in self.batches:
            plain, state = self.batches[key, number]
            return self.in_format(batches.from_plain(plain, own=value)), state
        takes = self.per_step.get(key, self.facts.per_step(key))
        state, events = own.state, self.events_of_ranks(key, number, own)
        if number < takes and key in self.facts.keys[:1]:
            names = [digest(event.value) for event in (own, *events)]
            self.taken["".join(names)] = count_in(own)  # once: LBFGS repeats it
        if not events:
            if not self.facts.per_step(key) and step <= len(self.facts.steps):
                self.joined_in = step  # whether it has the ranks' examples is not known
            return value, state
        joined = self.join(events, number, iterator)
        if not self.keeps_own(joined, events, step, own, iterator):
            state = joined.state
            if joined.examples:
                value = iterator._collate_fn(batches.plain_copy(joined.examples))
            else:
                value = batches.from_plain(joined.value, own=value)
        self.noted[key, number] = to_plain(value), state
        return value, state

    def in_format(self, value: Any) -> Any:
        """The value, in float64 if this run is."""
        return batches.mapped(in_float64, [value]) if self.kind == "in float64" else value

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        kwargs.update(self.in_format(kwargs))
        return self.in_format(args)

    def events_of_ranks(self, key: str, number: int, own: Event) -> list[Event]:
        """The ranks' batches that replace the run's own of this number; []: it keeps its own."""
        shares = [rank.events.get(key, []) for rank in self.facts.distinct]
        ranks_take = self.facts.per_step(key)  # so many batches in a step
        if self.kind == "own data" or self.per_step and not ranks_take:  # which is not known
            return []
        takes = self.per_step.get(key, ranks_take)
        events = [share[number] for share in shares if number < len(share)]
        if takes != ranks_take:  # its batches are joined of fewer or more of the step's events
            step = number // max(1, takes)
            places = range(step * ranks_take, (step + 1) * ranks_take)
            every = [share[place] for place in places for share in shares if place < len(share)]
            left = self.left.setdefault((key, step), [*every])
            same = [event for event in left if digest(event.value) == digest(own.value)]
            events = same[:1] or left[: len(every) // max(1, takes)]
            left[:] = [event for event in left if not any(event is one for one in events)]
        if self.kind == "repeated share":
            events = events[self.rank : self.rank + 1] * len(events)
        return events if len(events) > self.rank else []

    def join(self, events: list[Event], number: int, iterator: Any) -> Event:
        """One batch of the ranks' batches, or of the examples of one: see batches.join."""
        only = self.rank if self.kind == "one share" else None
        order = torch.Generator().manual_seed(number) if self.kind == "other order" else None
        state = events[only or 0].state
        if not self.facts.are_collated(events):
            return Event(batches.join([event.value for event in events], only, order), state)
        for event in events:  # it may draw from a generator of its own
            again = to_plain(iterator._collate_fn(batches.plain_copy(event.examples)))
            self.is_collated &= digest(again) == digest(event.value)
        examples: list = []  # for the program's own collate_fn
        for event in events if only is None else [events[only]]:
            examples += event.examples or []
        if order is not None:
            examples = [examples[row] for row in torch.randperm(len(examples), generator=order)]
        return Event(None, state, examples)

    def value(self, what: str, name: str, step: int, shape: torch.Size) -> torch.Tensor | None:
        """A tensor of the ranks' "weights" or "got"; of one rank, if its examples are computed."""
        if self.kind not in SHARES:
            return self.facts.whole(what, name, step, shape)
        rank = self.facts.distinct[self.rank]
        if name not in self.facts.trained and rank.has_buffers_of_first:
            rank = self.facts.ranks[0]
        return put_together([getattr(rank.steps[step], what).get(name)], shape)

    def keeps_own(
        self, joined: Event, events: list[Event], step: int, own: Event, iterator: Any
    ) -> bool:
        """Whether the program's own batch has the same examples: it is better than a joined one."""
        if self.kind in SHARES:
            return False
        digests = {digest(event.value) for event in (own, *events)}
        if iterator is None and len(digests) == 1 < len(events):
            return True  # on all ranks and here: a graph, a grid, and no examples
        if self.joined_in != step and have_same_examples(joined, events, own):
            self.own_in = step
            return True
        self.joined_in = step
        self.is_mixed |= self.own_in == step
        return False

    def set_weight(self, name: str, step: int, tensor: torch.Tensor) -> None:
        """Set a weight to the ranks' value.  What no optimizer trains is set once: it goes on here.

        A buffer (a codebook, a queue, a running mean) is moved by the program itself.
        """
        value = self.value("weights", name, step, tensor.shape)
        goes_on = name not in self.facts.trained and self.kind not in ("given state", *SHARES)
        is_set = self.matched.get(name, False)
        self.matched[name] = is_set or value is not None
        if value is None or goes_on and is_set:
            return
        with torch.no_grad():  # .data: the program may have used the weight in a graph (a penalty)
            batches.local(tensor).data.copy_(value)

    def set_gradient(self, name: str, step: int, parameter: torch.Tensor) -> None:
        """Set a parameter's gradient to the one that the ranks' optimizers got."""
        if self.kind != "in float64" and step in self.facts.forced:
            value = self.value("got", name, step, parameter.shape)
            if value is not None:
                put_gradient(parameter, value)

    def result(self, noted: Notes) -> Alone:
        """The run's notes, and what it was given."""
        unmatched = sorted(name for name, is_matched in self.matched.items() if not is_matched)
        is_joined = self.joined_in >= 0 or self.kind == "own data"
        total = sum(self.taken.values())
        more = self.noted, self.is_collated
        return Alone(noted, unmatched, is_joined, self.is_mixed, total, *more)


def have_same_examples(joined: Event, events: list[Event], own: Event) -> bool:
    """Whether the program's own batch has those that are joined of the ranks' batches."""
    parts = [event.value for event in events]
    if not own.examples and len(parts) > 1 and batches.is_made_of(own.value, parts):
        return True
    theirs = digests_of_examples(own.value, own.examples if joined.examples else None)
    return sorted(digests_of_examples(joined.value, joined.examples)) == sorted(theirs)


def put_gradient(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter's gradient in the form that it has: sparse, sharded."""
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:
        parameter.grad = value.to(gradient.dtype).to_sparse(gradient.sparse_dim())
    elif gradient is None:
        parameter.grad = None if hasattr(parameter, "to_local") else value.to(parameter, copy=True)
    else:
        with torch.no_grad():
            batches.local(gradient).copy_(value)
