"""--epoch: one whole epoch of the training loader on each rank, without gradients or weights."""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from instruments.command import Line, show
from instruments.meeting import Place
from instruments.observer import Observer
from instruments.program import Finished

from equivalence.batches import digests_of_examples, to_plain
from equivalence.limits import FOLLOWED, OFTEN
from equivalence.loaders import Loaders, without_subsets
from equivalence.notes import Notes, digest_of_ends
from equivalence.observe import print_into
from equivalence.verdict import SAME, Answer, Link, Reason, Verdict, problem, unknown

FIRST = 64  # examples that tell whether the second epoch has another order
GOLDEN = 0x9E3779B97F4A7C15  # times a number, modulo 2**64: as good as random
NO_LOADER = Reason(
    "no DataLoader was seen: batches that a program makes in its loop can't be followed",
    "in a copy, load the data with a DataLoader",
)
OTHER_LOADERS = "only the first DataLoader was followed: others, too, gave batches to train with"
REMEDY = "give each rank its share, once (a DistributedSampler, or islice of a stream)"


class Sample:
    """Counts how often each example came; in a large epoch, of one example in `every`."""

    def __init__(self) -> None:
        self.every, self.counts = 1, Counter()

    def add(self, example: Any) -> None:
        if self.has(example):
            self.counts[example] += 1
        if len(self.counts) > FOLLOWED:
            self.thin(2 * self.every)

    def has(self, example: Any) -> bool:
        number = example if isinstance(example, int) else int(example[:16], 16)
        return (number * GOLDEN % 2**64 >> 32) % self.every == 0

    def thin(self, every: int) -> None:
        self.every = every
        self.counts = Counter({one: count for one, count in self.counts.items() if self.has(one)})


@dataclass
class Epoch:
    """One rank's notes on its loader's first epoch, and on the beginning of the second one."""

    rank: int
    batches: int = 0
    largest: int = 0  # batch
    examples: int = 0
    sample: Sample = field(default_factory=Sample)
    first: list = field(default_factory=list)  # examples that the first epoch begins with
    second: list = field(default_factory=list)  # and those that the second one begins with
    is_whole: bool = False  # the loader has come to its end
    are_numbers: bool = True  # examples are known by their numbers in the data set; else by digests
    length: int = 0  # of the data set; 0: it has none
    data: str = ""  # a digest of the data set's first and last example
    loaders: set[str] = field(default_factory=set)  # that gave batches to train with


def observers(place: Place, log: str) -> list[Observer]:
    return [Follower(place, f"{log}{place.rank}")]


class Follower(Observer):
    """Follows the first loader that gives batches to train with."""

    def __init__(self, place: Place, log: str) -> None:
        self.place, self.log = place, log
        self.noted = Epoch(place.rank)
        self.loaders = Loaders(Notes(place.rank, place.world_size), largest=0)
        self.name = ""  # of the loader

    def installed(self) -> None:
        print_into(self.hooks.undo, self.log)

    def patches(self) -> list[tuple[Any, str, Callable]]:
        return self.loaders.patches()

    def load(self, iterator: Any, original: Callable) -> Any:
        if not torch.is_grad_enabled():
            return original()
        noted, name = self.noted, self.loaders.name_of(iterator)
        self.name = self.name or name
        noted.loaders.add(name)
        if name != self.name:
            return original()
        is_left = not noted.is_whole and self.loaders.rounds[name] > 1
        if is_left or noted.is_whole and len(noted.second) >= len(noted.first):
            raise Finished
        try:
            batch = original()
        except StopIteration:
            if noted.second:
                raise Finished from None  # an epoch of a few examples
            noted.is_whole = True
            raise
        self.follow(iterator, batch)
        return batch

    def follow(self, iterator: Any, batch: Any) -> None:
        noted, indices = self.noted, self.loaders.indices_of(iterator)
        examples = indices or digests_of_examples(to_plain(batch), self.loaders.examples)
        if noted.is_whole:
            noted.second += examples[: len(noted.first) - len(noted.second)]
            return
        noted.are_numbers &= bool(indices)
        noted.batches, noted.examples = noted.batches + 1, noted.examples + len(examples)
        noted.largest = max(noted.largest, len(examples))
        noted.first += examples[: FIRST - len(noted.first)]
        for example in examples:
            noted.sample.add(example)
        with contextlib.suppress(TypeError):  # a stream has no length
            noted.length = len(iterator._dataset)
        if self.place.rank == 0:
            show(f"equivalence: {self.place.world_size} processes, batch {noted.batches}")

    def notes(self, is_own_thread: bool) -> Epoch:
        if is_own_thread and self.noted.length:
            dataset, _ = without_subsets(self.loaders.datasets[self.name], [])
            self.noted.data = digest_of_ends(dataset)
        return self.noted


# --------------------------------------------------------------------------------- the answer


def answer(ranks: list[Epoch]) -> Answer:
    if not any(rank.loaders for rank in ranks):
        return unknown(NO_LOADER)
    links = [batches(ranks), examples(ranks), order(ranks)]
    verdict = problem(links, "one process in an epoch")
    text = "RIGHT in one whole epoch: each example came once, on one rank"
    more = any(len(rank.loaders) > 1 for rank in ranks)
    return Answer(verdict or Verdict(SAME, text), links, [Line("note", OTHER_LOADERS)] * more)


def batches(ranks: list[Epoch]) -> Link:
    """Whether all ranks have equally many batches; if not, some wait for ever."""
    text = " + ".join(str(rank.batches) for rank in ranks)
    cut = [rank for rank in ranks if not rank.is_whole]
    whole = [rank for rank in ranks if rank.is_whole]
    if not whole:
        why = "no rank reached the end of its loader: let the program train for a whole epoch"
        return Link("batches", None, f"{text}, before the end of the loader", why=why)
    most = max(ranks, key=lambda rank: rank.batches)
    least = min(ranks, key=lambda rank: rank.batches)
    if most.batches != least.batches:
        more = " or more" if cut else ""
        text += f"{more}: rank {least.rank} has {least.batches}, rank {most.rank} {most.batches}"
        return Link("batches", False, f"{text}: ranks with more wait for the others for ever")
    if cut:
        why = f"rank {cut[0].rank} did not reach the end of its loader"
        return Link("batches", None, text, why=why)
    return Link("batches", True, text)


def examples(ranks: list[Epoch]) -> Link:
    """Whether each example of the data set came once, on one rank."""
    every = max(rank.sample.every for rank in ranks)
    for rank in ranks:
        rank.sample.thin(every)
    owners: Counter = Counter()  # how many ranks had an example
    times: Counter = Counter()  # how often it came
    for rank in ranks:
        owners.update(rank.sample.counts.keys())
        times.update(rank.sample.counts)
    slack = (len(ranks) + sum(rank.largest for rank in ranks)) / every
    total = sum(rank.examples for rank in ranks)
    length = ranks[0].length if ranks[0].are_numbers else 0
    text = f"{total} came" + f" of {length}" * bool(length)
    if every > 1:
        text += f" (one of {every} was followed)"
    if ranks[0].are_numbers and len({rank.data for rank in ranks} - {""}) > 1:
        why = "each rank has a data set of its own: whether these share examples was not looked at"
        return Link("examples", None, text, why=why)
    shared = sum(count > 1 for count in owners.values())
    again = sum(times[one] > owners[one] for one in times)
    if shared > slack and (ranks[0].are_numbers or shared > OFTEN * len(owners)):
        return Link("examples", False, f"{text}; {shared} are on more than one rank: {REMEDY}")
    if again > slack:
        text += f"; {again} came more than once on their rank"
        why = "" if ranks[0].are_numbers else "some came more than once on their rank, or are equal"
        return Link("examples", None if why else False, text, why=why)
    missing = length / every - len(owners)
    if missing > slack and all(rank.is_whole for rank in ranks):
        text += f", only {len(owners)} different ones: {missing:.0f} never come"
        if abs(len(owners) * len(ranks) - length / every) <= slack * len(ranks):
            text += ", as if each rank took its share of its share"
        return Link("examples", False, text)
    if shared > slack:
        return Link("examples", None, text, why="some may be on more than one rank")
    return Link("examples", True, f"{text}, each once, on one rank")


def order(ranks: list[Epoch]) -> Link:
    """Whether a shuffled loader has another order in the next epoch."""
    first, second = ranks[0].first, ranks[0].second
    if not second:
        return Link("order", True, "no second epoch was seen")
    if first[: len(second)] != second:
        return Link("order", True, "the second epoch has another order")
    text = "the second epoch has the order of the first"
    if not ranks[0].are_numbers:
        return Link("order", True, f"{text}; whether it is shuffled is not known")
    if first == sorted(first):
        return Link("order", True, f"{text}, which is not shuffled")
    text += ", though it is shuffled: call sampler.set_epoch(epoch) before each epoch"
    return Link("order", False, text)
