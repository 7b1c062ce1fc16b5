"""--epoch: one whole epoch of the training loader on each rank, without gradients or weights."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ddp_by_diff.equivalence import examples, verdict
from ddp_by_diff.equivalence.batches import digests_of_examples, to_plain
from ddp_by_diff.equivalence.examples import LABEL, Counted
from ddp_by_diff.equivalence.loaders import Loaders
from ddp_by_diff.equivalence.notes import Loader, have_one_dataset
from ddp_by_diff.equivalence.observe import print_into
from ddp_by_diff.equivalence.runs import Runs
from ddp_by_diff.equivalence.verdict import Answer, Check, Reason, Verdict, inconclusive
from ddp_by_diff.instruments.command import show
from ddp_by_diff.instruments.meeting import Place
from ddp_by_diff.instruments.observer import Observer
from ddp_by_diff.instruments.program import Finished

FIRST = 8  # batches that tell whether the second epoch has a different order
NO_LOADER = Reason(
    "no DataLoader gave batches to train with: those that a program makes can't be followed",
    "in a copy, load the data with a DataLoader",
)
OTHER_LOADERS = Reason(
    "only one DataLoader was followed, and others, too, gave batches before each backward pass",
    "in a copy, train with the other DataLoader only, so that its examples are counted",
)
WHOLE = "let the loop read its whole DataLoader (no break, islice, zip), and begin another epoch"
UNEQUAL = Reason(
    "the ranks have unequal numbers of batches",
    "if the program takes care of that (DDP's join()), nothing is wrong; else give all as many",
)
OWN_DATA = Reason(
    "each rank has a dataset of its own: whether these share examples was not compared",
    "in a copy, wrap the dataset: with ConcatDataset([data]), examples are known by their content",
)
UNREAD = Reason(
    "one process reads fewer: it may stop early, or ranks read the same, each changed at random",
    "let a copy draw no random numbers; if an epoch is a fixed number of steps, nothing is wrong",
)


@dataclass
class Round:
    """One iteration over a loader, on one rank."""

    name: str  # the loader's
    batches: list[list] = field(default_factory=list)  # the names of each one's examples
    are_numbers: bool = True  # in the data set; else digests of their contents
    is_whole: bool = False  # it has come to its end
    trains: int = 0  # the backward passes that followed a batch of it
    trains_alone: bool = False  # and no other loader gave a batch before one of them

    @property
    def counts(self) -> Counter:
        """How often each example was read."""
        return Counter(itertools.chain(*self.batches))


class Epoch(NamedTuple):
    """One rank's notes on its loader's first epoch, and on the beginning of the second one.

    A round counts if a backward pass follows its batches before another loader gives one: before
    that a program may look at its data, evaluate, or recompute an average.
    """

    rank: int
    first: Round
    second: Round | None
    loader: Loader
    loaders: set[str]  # that gave batches to train with


def observers(place: Place, length: int, log: str, *_: Any) -> list[Observer]:
    return [Follower(place, f"{log}{place.rank}")]


class Follower(Observer):
    """Follows all loaders, until the first one that trains has begun its second epoch."""

    def __init__(self, place: Place, log: str) -> None:
        self.place, self.log = place, log
        self.loaders = Loaders({})
        self.rounds: dict[tuple[str, int], Round] = {}  # by the loader's name, and their number
        self.pending: list[Round] = []  # that gave batches since the last backward pass

    def installed(self) -> None:
        print_into(self.hooks.undo, self.log)

    def patches(self) -> list[tuple[Any, str, Callable]]:
        return self.loaders.patches()

    def backward(self, original: Callable) -> Any:
        for one in self.pending:
            one.trains += 1
            one.trains_alone |= one is self.pending[-1]
        self.pending = []
        return original()

    def epochs(self) -> list[Round]:
        """The rounds of the first loader that trains, in which it does."""
        some = [one for one in self.rounds.values() if one.trains_alone]
        return [one for one in some if one.name == some[0].name]

    def load(self, iterator: Any, original: Callable) -> Any:
        if not torch.is_grad_enabled():
            return original()
        name = self.loaders.name_of(iterator)
        known = self.rounds.setdefault((name, self.loaders.rounds[name]), Round(name))
        epochs = self.epochs()
        is_next = len(epochs) > 1 and (known not in epochs or len(known.batches) >= FIRST)
        if is_next and known.name == epochs[0].name:  # on all ranks the same step
            raise Finished
        try:
            batch = original()
        except StopIteration:
            known.is_whole = True
            self.loaders.rounds[name] += 1  # persistent workers have one iterator for all epochs
            raise
        indices = self.loaders.indices_of(iterator)
        names = indices or digests_of_examples(to_plain(batch), self.loaders.examples)
        known.batches.append([*names])
        known.are_numbers &= bool(indices)
        self.pending = [one for one in self.pending if one is not known] + [known]
        if self.place.rank == 0:
            show(f"equivalence: {self.place.world_size} processes, batch {len(known.batches)}")
        return batch

    def notes(self, is_own_thread: bool) -> Epoch | None:
        """None if no loader has trained."""
        epochs = self.epochs()
        if not epochs:
            return None
        if is_own_thread:
            self.loaders.look_into_data()
        first, second = epochs[0], epochs[1] if len(epochs) > 1 else None
        loaders = {one.name for one in self.rounds.values() if one.trains > 1}
        return Epoch(self.place.rank, first, second, self.loaders.loaders[first.name], loaders)


def are_cut_off(notes: list) -> bool:
    """Whether ranks failed as others, which have fewer batches, had come to the program's end."""
    ended = [length_of(note) for note in notes if note.ending != "failed"]
    failed = [length_of(note) for note in notes if note.ending == "failed"]
    return bool(ended) and min(ended) > 0 and max(ended) < min(failed)


def length_of(note: Any) -> int:
    """The number of batches of a rank's first epoch; 0 if no loader has trained."""
    return len(note.value.first.batches) if note.value else 0


def answer(ranks: list[Epoch | None], runs: Runs) -> Answer:
    known = [rank for rank in ranks if rank]
    if len(known) < len(ranks):
        return verdict.unknown(NO_LOADER)
    checks = [batches(known), came(known, runs), order(known)]
    if any(len(rank.loaders) > 1 for rank in known):
        checks.append(inconclusive("loaders", OTHER_LOADERS))
    text = "each rank has its own share of the examples"
    if any(rank.loader.redraws for rank in known):
        text = "the ranks have equally many batches, and draw them at random"
    same = Verdict(verdict.SAME, f"THE SAME examples as one process over one epoch: {text}")
    return Answer(verdict.problem(checks, "one process in an epoch") or same, checks, [])


def batches(ranks: list[Epoch]) -> Check:
    """Whether all ranks have equally many batches; if not, some wait for ever."""
    counts = [len(rank.first.batches) for rank in ranks]
    text = " + ".join(map(str, counts))
    cut = [rank for rank in ranks if not rank.first.is_whole]
    if len(set(counts)) > 1 and len(cut) < len(ranks):
        waits = any(rank.second is None for rank in cut)
        least, most = counts.index(min(counts)), counts.index(max(counts))
        text += " or more" * waits
        text += f": rank {least} has {counts[least]}, rank {most} {counts[most]}"
        if not waits:
            return inconclusive("batches", UNEQUAL, text)
        return Check("batches", False, f"{text}; ranks with more wait for the others forever")
    if cut:
        who = "no rank" if len(cut) == len(ranks) else f"not rank {cut[0].rank}"
        reason = Reason(f"{who} has read its DataLoader to the end", WHOLE)
        return inconclusive("batches", reason, f"{text}, and perhaps there are more")
    return Check("batches", True, text)


def came(ranks: list[Epoch], runs: Runs) -> Check:
    """Whether each example of the data was read once, by one rank."""
    loaders = [rank.loader for rank in ranks]
    are_numbers = all(rank.first.are_numbers for rank in ranks)
    found = examples.counted([rank.first.counts for rank in ranks])
    text = f"{found.different} examples were read"
    pairs = itertools.combinations([rank.first.batches[:FIRST] for rank in ranks], 2)
    are_known = have_one_dataset(loaders) or not are_numbers
    if are_known and any(one == other for one, other in pairs):
        return Check(LABEL, False, f"{text}, the same on two ranks: {examples.remedy(loaders)}")
    if any(loader.redraws for loader in loaders):
        drawn = f"{found.came} examples were read, drawn at random, so they were not counted"
        return Check(LABEL, True, drawn)
    if are_numbers:
        return of_numbers(ranks, loaders, found, runs)
    check = examples.why_not_shared_out(found, f"{text}; ", loaders, False)
    return check or of_stream(ranks, f"{text}, each once, on one rank", found.came, runs)


def of_stream(ranks: list[Epoch], text: str, count: int, runs: Runs) -> Check:
    """The same, if nobody knows how many there are: one process reads the stream, too."""
    if not all(rank.first.is_whole for rank in ranks):
        return Check(LABEL, True, text)
    command = [*runs.args.command, *runs.args.alone]
    notes, _ = runs.run(1, command, (0, f"{runs.folder}/alone"), observers)
    read = [note.value for note in notes if note.value and note.value.first.is_whole]
    total = sum(one.first.counts.total() for one in read)
    missing, batch = total - count, global_batch(ranks)
    text += f"; {total} in one process" * bool(total)
    text += f", so {missing} are never read" * (missing > 0)
    if missing < -batch:
        return inconclusive(LABEL, UNREAD, text)
    if 0 < missing <= batch and not all(rank.loader.drops for rank in ranks):
        return inconclusive(LABEL, examples.NEVER, text)
    return Check(LABEL, missing <= batch, text)


def global_batch(ranks: list[Epoch]) -> int:
    """The largest number of examples in a step of all ranks."""
    return sum(max(map(len, rank.first.batches)) for rank in ranks)


def of_numbers(ranks: list[Epoch], loaders: list[Loader], found: Counted, runs: Runs) -> Check:
    """The same, if examples are known by their numbers in the data."""
    batch = global_batch(ranks)
    # What a sampler may add as padding, and what it or its loader may leave out.
    slack = len(ranks) + batch * (not all(loader.is_known for loader in loaders))
    rest = len(ranks) - 1 + batch * any(loader.drops for loader in loaders)
    length, is_one_pool = examples.pool_of(loaders), examples.have_one_pool(loaders)
    repeated = found.came - found.different
    text = f"{found.different}{f' of {length}' * is_one_pool} examples were read"
    is_part = all(len(rank.first.counts) < rank.loader.length for rank in ranks)
    if check := examples.other_number(f"{text}; ", loaders, is_part and found.shared <= slack):
        return check
    if len({loader.length for loader in loaders}) > 1 or examples.have_own_data(loaders):
        text = " + ".join(str(len(rank.first.counts)) for rank in ranks) + " examples were read"
        return inconclusive(LABEL, OWN_DATA, text)
    is_proven = have_one_dataset(loaders)
    check = examples.why_not_shared_out(found, f"{text}; ", loaders, is_proven, slack)
    if not check and all(rank.first.is_whole for rank in ranks):
        check = examples.never_come(found, text, length, len(ranks), rest)
    if not (check or is_one_pool or repeated):  # only one process knows of what these are Subsets
        return of_stream(ranks, f"{text}, each once, on one rank", found.different, runs)
    second = examples.counted([rank.second.counts for rank in ranks if rank.second])
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
    """Whether a shuffled loader has a different order in the next epoch."""
    first, second = ranks[0].first, ranks[0].second
    if second is None:
        return Check("order", True, "no second epoch was followed")
    count = min(len(first.batches), len(second.batches))
    if first.batches[:count] != second.batches[:count]:
        return Check("order", True, "the second epoch has a different order")
    text, names = "the second epoch has the order of the first", [*itertools.chain(*first.batches)]
    if not first.are_numbers:
        return Check("order", True, f"{text}; whether it is shuffled is not known")
    if names == sorted(names):
        return Check("order", True, f"{text}, which is not shuffled")
    if not ranks[0].loader.sampler:
        return Check("order", True, f"{text}, and its sampler is no DistributedSampler")
    text += ", though it is shuffled: call sampler.set_epoch(epoch) before each epoch"
    return Check("order", False, text)
