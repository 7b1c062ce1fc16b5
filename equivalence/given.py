"""What a run in one process is given: the ranks' batches as one, their weights and gradients."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import torch
from instruments.tensors import tensors_in

from equivalence.batches import digest, digests_of_examples, join
from equivalence.facts import Facts
from equivalence.notes import Event
from equivalence.randomness import RandomState


class Batch(NamedTuple):
    """In place of the one that the program has loaded."""

    value: Any
    examples: list | None  # or these, for the program's own collate_fn
    state: RandomState
    is_equal: bool  # on all ranks, such as numbers of rows: these are no examples

    def has_examples_of(self, value: Any, examples: list | None) -> bool:
        """Whether the program's batch has the same ones, in any order: then it is as good."""
        theirs = digests_of_examples(value, examples if self.examples else None)
        return sorted(digests_of_examples(self.value, self.examples)) == sorted(theirs)


@dataclasses.dataclass
class Given:
    """What a run in one process is given."""

    facts: Facts
    kind: str
    # whole     all examples in one batch; then the gradients that the processes' optimizers got
    # own data  the program's own batches, as one batch can't be made; then those gradients
    # moved     all examples in another order, and each weight changed in its last digit
    # share     one rank's examples, as long as the longest of all; another rank in each step
    left_out: tuple = ()  # kinds of layers
    rates: dict[str, int] = dataclasses.field(default_factory=dict)  # if it takes other batches

    def chosen(self, step: int) -> int:
        """Which has the smallest batches, that become longest; if all are alike, another each."""
        facts, sizes = self.facts, []
        step = min(step, len(facts.steps) - 1)
        for place, rank in enumerate(facts.distinct):
            values = []
            for key in facts.keys:
                values += [event.value for event in facts.events(rank, key, step)]
            size = sum(tensor.numel() for tensor in tensors_in(values))
            sizes.append((size, (place - step) % len(facts.distinct)))
        return sizes.index(min(sizes))

    def batch(self, key: str, number: int) -> Batch | None:
        """In place of the run's batch of this number; None: its own."""
        if self.kind == "own data":
            return None
        shares = [rank.events.get(key, []) for rank in self.facts.distinct]
        before = self.facts.rate(key)
        now = self.rates.get(key, before)
        events = [share[number] for share in shares if number < len(share)]
        if now != before:  # it takes fewer or more batches in a step: each is of so many events
            step, part = divmod(number, max(1, now))
            every: list[Event] = []
            for place in range(step * before, (step + 1) * before):
                every += [share[place] for share in shares if place < len(share)]
            size = len(every) // max(1, now)
            events = every[part * size : (part + 1) * size]
        if not events:
            return None
        only = None
        if self.kind == "share":
            only = self.chosen(number // max(1, before))
            if only >= len(events):
                return None
        return self.union(events, only, number)

    def union(self, events: list[Event], only: int | None, number: int) -> Batch:
        order = torch.Generator().manual_seed(number) if self.kind == "moved" else None
        state = events[only or 0].state
        is_equal = len(events) > 1 and len({digest(event.value) for event in events}) == 1
        if not all(event.examples for event in events):
            value = join([event.value for event in events], only, order)
            return Batch(value, None, state, is_equal)
        examples = []
        for event in events if only is None else [events[only]]:
            examples += event.examples
        if order is not None:
            examples = [examples[row] for row in torch.randperm(len(examples), generator=order)]
        return Batch(None, examples, state, is_equal)

    def value(self, what: str, name: str, step: int, shape: torch.Size) -> torch.Tensor | None:
        """What the ranks had ("weights" or "got"); put together, if they have parts of it."""
        ranks = self.facts.peers
        if self.kind == "share":
            ranks = [self.facts.distinct[self.chosen(step)]]
        return together([getattr(rank.steps[step], what).get(name) for rank in ranks], shape)


def together(parts: list, shape: torch.Size) -> torch.Tensor | None:
    parts = [part for part in parts if part is not None]
    for part in parts:
        if part.shape == shape:
            return part
    for dimension in range(len(shape) if parts else 0):
        with contextlib.suppress(RuntimeError, IndexError):
            whole = torch.cat(parts, dimension)
            if whole.shape == shape:
                return whole
    return None
