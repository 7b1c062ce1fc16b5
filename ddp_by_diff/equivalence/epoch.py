"""--epoch: one whole epoch of the training loader on each rank, without gradients or weights."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_by_diff.equivalence import examples, verdict
from ddp_by_diff.equivalence.batches import digests_of_examples, to_plain
from ddp_by_diff.equivalence.examples import LABEL, Counted
from ddp_by_diff.equivalence.loaders import Loaders
from ddp_by_diff.equivalence.notes import Loader
from ddp_by_diff.equivalence.observe import print_into
from ddp_by_diff.equivalence.runs import Runs, be_alone
from ddp_by_diff.equivalence.verdict import Answer, Check, Reason, Verdict, inconclusive
from ddp_by_diff.instruments.command import show
from ddp_by_diff.instruments.meeting import Place
from ddp_by_diff.instruments.observer import Observer
from ddp_by_diff.instruments.program import Finished
from ddp_by_diff.instruments.rank import Job

FIRST = 8  # batches that tell whether the second epoch has another order
NO_LOADER = Reason(
    "no DataLoader was seen: batches that a program makes in its loop can't be followed",
    "in a copy, load the data with a DataLoader",
)
OTHER_LOADERS = Reason(
    "only the first DataLoader was followed, and others, too, gave batches to train with",
    "in a copy, train with another one only",
)
WHOLE = "let the loop read its DataLoader to the end (no break, no islice), and begin another epoch"
UNEQUAL = Reason(
    "the ranks have unequal numbers of batches",
    "if the program takes care of that (DDP's join()), nothing is wrong; else give all as many",
)
OWN_DATA = Reason(
    "each rank has a data set of its own: whether these share examples was not compared",
    "in a copy, wrap the data set: with ConcatDataset([data]), examples are known by their content",
)
UNREAD = Reason(
    "others may never come, as one process reads fewer, or not to the end",
    "count the examples of the data; if an epoch is a fixed number of steps, nothing is wrong",
)


@dataclass
class Epoch:
    """One rank's notes on its loader's first epoch, and on the beginning of the second one."""

    rank: int
    batches: int = 0
    again: int = 0  # batches of the second epoch
    largest: int = 0  # batch
    counts: Counter = field(default_factory=Counter)  # how often each example came
    first: list = field(default_factory=list)  # examples that the first epoch begins with
    second: list = field(default_factory=list)  # and those that the second one begins with
    is_whole: bool = False  # the loader has come to its end
    is_over: bool = False  # so it has, or it has begun again before that
    are_numbers: bool = True  # examples are known by their numbers in the data set; else by digests
    loader: Loader = field(default_factory=Loader)
    loaders: set[str] = field(default_factory=set)  # that gave batches to train with


def observers(place: Place, log: str, *_: Any) -> list[Observer]:
    return [Follower(place, f"{log}{place.rank}")]


class Follower(Observer):
    """Follows the first loader that gives batches to train with."""

    def __init__(self, place: Place, log: str) -> None:
        self.place, self.log = place, log
        self.noted = Epoch(place.rank)
        self.loaders = Loaders({})
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
        rounds = self.loaders.rounds[name]
        noted.is_over |= rounds > 1
        if noted.is_over and (rounds > 2 or noted.again >= FIRST):  # on all ranks the same step
            raise Finished
        try:
            batch = original()
        except StopIteration:
            noted.is_whole |= not noted.is_over
            noted.is_over = True
            raise
        self.follow(iterator, batch)
        return batch

    def follow(self, iterator: Any, batch: Any) -> None:
        noted, indices = self.noted, self.loaders.indices_of(iterator)
        names = indices or digests_of_examples(to_plain(batch), self.loaders.examples)
        if noted.is_over:
            noted.second += names
            noted.again += 1
            return
        noted.are_numbers &= bool(indices)
        noted.batches += 1
        noted.largest = max(noted.largest, len(names))
        noted.first += names if noted.batches <= FIRST else []
        noted.counts.update(names)
        if self.place.rank == 0:
            show(f"equivalence: {self.place.world_size} processes, batch {noted.batches}")

    def notes(self, is_own_thread: bool) -> Epoch:
        if is_own_thread and self.name:
            self.loaders.look_into_data()
            self.noted.loader = self.loaders.loaders[self.name]
        return self.noted


def answer(ranks: list[Epoch], runs: Runs) -> Answer:
    if not any(rank.loaders for rank in ranks):
        return verdict.unknown(NO_LOADER)
    checks = [batches(ranks), came(ranks, runs), order(ranks)]
    if any(len(rank.loaders) > 1 for rank in ranks):
        checks.append(inconclusive("loaders", OTHER_LOADERS))
    text = "the ranks share out the examples"
    if any(rank.loader.redraws for rank in ranks):
        text = "the ranks have equally many batches, and draw them with replacement"
    right = Verdict(verdict.SAME, f"RIGHT in one whole epoch: {text}")
    found = verdict.problem(checks, "one process in an epoch") or right
    return Answer(found, checks, [])


def batches(ranks: list[Epoch]) -> Check:
    """Whether all ranks have equally many batches; if not, some wait for ever."""
    text = " + ".join(str(rank.batches) for rank in ranks)
    cut = [rank for rank in ranks if not rank.is_whole]
    most = max(ranks, key=lambda rank: rank.batches)
    least = min(ranks, key=lambda rank: rank.batches)
    if most.batches != least.batches and len(cut) < len(ranks):
        waits = not all(rank.is_over for rank in ranks)
        more = " or more" if waits else ""
        text += f"{more}: rank {least.rank} has {least.batches}, rank {most.rank} {most.batches}"
        if not waits:
            return inconclusive("batches", UNEQUAL, text)
        return Check("batches", False, f"{text}; ranks with more wait for the others forever")
    if cut:
        who = "no rank" if len(cut) == len(ranks) else f"not rank {cut[0].rank}"
        reason = Reason(f"{who} has read its DataLoader to the end", WHOLE)
        return inconclusive("batches", reason, f"{text}, and perhaps there are more")
    return Check("batches", True, text)


def came(ranks: list[Epoch], runs: Runs) -> Check:
    """Whether each example of the data came once, on one rank."""
    loaders, are_numbers = [rank.loader for rank in ranks], all(rank.are_numbers for rank in ranks)
    found = examples.counted([rank.counts for rank in ranks])
    text = f"{found.came} examples came"
    pairs = itertools.combinations(ranks, 2)
    is_same = any(one.first and one.first == other.first for one, other in pairs)
    if is_same and (not are_numbers or examples.have_one_dataset(loaders)):
        return Check(LABEL, False, f"{text}, the same on two ranks: {examples.remedy(loaders)}")
    if any(loader.redraws for loader in loaders):
        return Check(LABEL, True, f"{text}, drawn with replacement, so they were not counted")
    if are_numbers:
        return of_numbers(ranks, loaders, found)
    check = examples.why_not_shared_out(found, f"{text}; ", loaders, False)
    return check or of_stream(ranks, f"{text}, each once, on one rank", found.came, runs)


def of_stream(ranks: list[Epoch], text: str, count: int, runs: Runs) -> Check:
    """The same, if nobody knows how many there are: one process reads the stream, too."""
    if not all(rank.is_whole for rank in ranks):
        return Check(LABEL, True, text)
    log, args = f"{runs.folder}/alone", runs.args
    job = Job("equivalence", [*args.command, *args.alone], args.patience, observers, (log, log))
    notes, _ = runs.run(be_alone, job, 1)
    total = sum(note.value.counts.total() for note in notes if note.value.is_whole)
    missing, batch = total - count, sum(rank.largest for rank in ranks)
    text += f"; {total} in one process" * bool(total) + f", so {missing} never come" * (missing > 0)
    if missing < -batch:
        return inconclusive(LABEL, UNREAD, text)
    if 0 < missing <= batch and not all(rank.loader.drops for rank in ranks):
        return inconclusive(LABEL, examples.NEVER, text)
    return Check(LABEL, missing <= batch, text)


def of_numbers(ranks: list[Epoch], loaders: list[Loader], found: Counted) -> Check:
    """The same, if examples are known by their numbers in the data."""
    batch = sum(rank.largest for rank in ranks)
    # What a sampler may add as padding, and what it or its loader may leave out.
    slack = len(ranks) + batch * (not all(loader.is_known for loader in loaders))
    rest = len(ranks) - 1 + batch * any(loader.drops for loader in loaders)
    length = examples.pool_of(loaders)
    text = f"{found.different} of {length} examples came"
    is_part = all(len(rank.counts) < rank.loader.length for rank in ranks)
    if check := examples.other_number(loaders, is_part and found.shared <= slack):
        return check._replace(text=f"{text}; {check.text}")
    if all(loader.picks for loader in loaders) and not examples.have_one_dataset(loaders):
        text = " + ".join(str(len(rank.counts)) for rank in ranks) + " examples came"
        return inconclusive(LABEL, OWN_DATA, text)
    check = examples.why_not_shared_out(found, f"{text}; ", loaders, True, slack)
    if not check and all(rank.is_whole for rank in ranks):
        check = examples.never_come(found, text, length, len(ranks), rest)
    repeated = found.came - found.different
    second = examples.counted([Counter(rank.second) for rank in ranks])
    if not check and second.shared > len(ranks) >= repeated:
        text += f"; but in the second epoch, {second.shared} of the first {second.different} are on"
        check = Check(LABEL, False, f"{text} more than one rank: {examples.remedy(loaders)}")
    if check:
        return check
    if not repeated:
        return Check(LABEL, True, f"{text}, each once, on one rank")
    text += f", {repeated} of them again"
    check = examples.why_not_shared_out(found, f"{text}; ", loaders, False)
    if check and repeated > len(ranks) and found.different < length:
        return check  # a sampler that pads leaves out none
    return Check(LABEL, True, f"{text} (padding)")


def order(ranks: list[Epoch]) -> Check:
    """Whether a shuffled loader has another order in the next epoch."""
    first = ranks[0].first
    second = ranks[0].second[: len(first)]
    if not second:
        return Check("order", True, "no second epoch was followed")
    if first[: len(second)] != second:
        return Check("order", True, "the second epoch has another order")
    text = "the second epoch has the order of the first"
    if not ranks[0].are_numbers:
        return Check("order", True, f"{text}; whether it is shuffled is not known")
    if first == sorted(first):
        return Check("order", True, f"{text}, which is not shuffled")
    if not ranks[0].loader.sampler:
        return Check("order", True, f"{text}, and its sampler is no DistributedSampler")
    text += ", though it is shuffled: call sampler.set_epoch(epoch) before each epoch"
    return Check("order", False, text)
