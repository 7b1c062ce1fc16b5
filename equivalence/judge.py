"""Asks the three questions.  What can be seen is decided first; it says which links are asked."""

from collections.abc import Callable
from functools import cached_property

from instruments.command import Line

from equivalence import causes, weights
from equivalence.averaging import averaging, in_weights
from equivalence.examples import copies, examples
from equivalence.facts import GOT, NONE_GOT, OWN, UNKNOWN, Facts
from equivalence.layers import AVERAGES
from equivalence.notes import Alone, Notes
from equivalence.one_batch import Look, Looks
from equivalence.options import options
from equivalence.verdict import SAME, Answer, Link, Verdict, conclude, problem
from equivalence.view import beside_one, facts_of, infinite

PARTS = (
    "the ranks have parts of one process's model, and how these make it was not seen (FSDP1? Use "
    "fully_shard)"
)
COPIES_OR_PARTS = "the ranks' weights differ from the start: copies, or parts of one model?"
NOT_SEEN = "the ranks' own gradients were not seen"
NONE_SEEN = "the optimizer has parameters of its own"
NOT_ASKED = "whether one process computes the same (one batch, weights) was not asked"


def only_averaging(ranks: list[Notes], length: int) -> Answer:
    """What the processes' notes alone say."""
    facts = facts_of(ranks, length)
    why = {UNKNOWN: COPIES_OR_PARTS, GOT: NOT_SEEN, NONE_GOT: NONE_SEEN}
    unseen = why.get(facts.model) or why.get(facts.gradients)
    first = Link("averaging", None, why=unseen)
    if not unseen:
        first = averaging(facts, None, weights.Changes("one process was not asked"))
    if first.text and first.is_right is None:  # no other link will tell
        first = first._replace(is_right=False, why="")
    links = [examples(facts), copies(facts), options(facts, None, []), first]
    text = f"AVERAGING RIGHT in the {length} steps compared: the ranks have one model, and average"
    text += f" their gradients; the test notices differences larger than {first.limit:.0e}"
    other = "ranks that train one model with the mean of their gradients"
    verdict = problem(links, other) or Verdict(SAME, text)
    return Answer(verdict, links, [Line("note", NOT_ASKED)])


class Judge:
    """The processes' notes beside runs in one process.  Each property is computed once."""

    def __init__(self, ranks: list[Notes], length: int, runs: object, command: list[str]) -> None:
        self.runs, self.command = runs, command
        facts = facts_of(ranks, length)
        self.own_data: Alone | None = None  # a run with the program's own batches
        if facts.model == UNKNOWN:
            self.own_data = runs.alone(facts, "own data")
            facts = beside_one(facts, self.own_data)
        self.facts: Facts = facts
        self.looks = Looks(facts, runs)

    # --------------------------------------------------------------------------- what was measured

    @cached_property
    def why_no_batch(self) -> str:
        """Why the ranks' batches can't be made one."""
        return (
            "" if self.facts.keys else "no batch was seen that each step takes from the same place"
        )

    @cached_property
    def look(self) -> Look | None:
        """All examples in one batch."""
        return None if self.why_no_batch else self.looks.at(self.facts)

    @cached_property
    def alone(self) -> Alone | None:
        """A run in one process, with the batches of all if there is one."""
        if self.look and self.is_run(self.look.whole):
            return self.look.whole
        return self.own_data or self.runs.alone(self.facts, "own data")

    @staticmethod
    def is_run(alone: Alone | None) -> bool:
        return alone is not None and not alone.unmatched

    def why_no_run(self, alone: Alone | None) -> str:
        """Why a run in one process says nothing; "" if it does."""
        if alone is None:
            return self.runs.failure
        names = ", ".join(alone.unmatched[:3])
        return f"one process has weights that no rank has: {names}" if names else ""

    @cached_property
    def tested(self) -> tuple[Link, Look | None]:
        """Link 2, and the look in which nothing differs."""
        facts, look = self.facts, self.look
        reason = self.why_no_batch
        if not reason and not (self.is_run(look.whole) and look.is_given):
            reason = causes.why_not_joined(facts)
        reason = reason or self.why_no_run(look.whole)
        if not reason and not self.runs.rates and not in_the_same_steps(look):
            reason = "one process takes its batches in other steps (a GradScaler's?)"
        if not reason and not look.steps:
            reason = "the ranks' weights differ from the start"
        if reason:
            return causes.unknown(facts, reason), None
        if look.is_right:
            return causes.right(look), look
        return causes.differs(self.looks, look)

    @cached_property
    def changes(self) -> weights.Changes:
        """How one process changes the weights, with the gradients that the optimizers got."""
        right = self.tested[1]
        if reason := self.why_no_run(self.alone):
            return weights.Changes(reason)
        if all(self.facts.is_forced(k) for k in self.facts.steps):
            return weights.measured(self.facts, self.alone, None)
        if right is None:
            return weights.Changes("one process's optimizer gets other gradients")
        right = self.looks.with_rounding(right)
        return weights.measured(right.facts, right.whole, right.moved)

    @cached_property
    def settings(self) -> Link:
        return options(self.facts, self.alone.notes if self.alone else None, self.command)

    # -------------------------------------------------------------------------------- what is asked

    def batch(self) -> Link:
        return self.tested[0]

    def averaging(self) -> Link:
        return averaging(self.facts, self.tested[1], self.changes)

    def in_weights(self) -> Link:
        return in_weights(self.changes)

    def links(self) -> list[Link]:
        """The chain's, in its order.  The first one says whether optimizers get the right ones."""
        if self.facts.model == UNKNOWN:
            label = causes.label(self.facts)
            return [Link(name, None, why=PARTS) for name in ("averaging", label, "weights")]
        asked: dict[str, list[Callable[[], Link]]] = {
            OWN: [self.averaging, self.batch],
            GOT: [self.batch],
            NONE_GOT: [self.in_weights, self.batch],
        }
        links = [ask() for ask in asked[self.facts.gradients]]
        return [*links, weights.weights(self.changes, links[0], self.settings)]

    def all_three(self) -> Answer:
        facts, length = self.facts, len(self.facts.steps)
        if bad := infinite(facts.ranks, length):
            links = [examples(facts), copies(facts), Link("gradients", None, why=bad)]
            return Answer(conclude(links, length), links, [])
        total = self.look.total if self.look and self.is_run(self.look.whole) else 0
        links = [examples(facts, total), copies(facts), self.settings, *self.links()]
        others = self.buffers(links)
        verdict = conclude(links, length, " (but for buffers)" * bool(others))
        return Answer(verdict, links, others + random_numbers(facts) + worker_seeds(facts))

    def buffers(self, links: list[Link]) -> list[Line]:
        is_wrong = any(link.is_right is False and link.label == "averaging" for link in links)
        if is_wrong or not self.look or not self.is_run(self.look.whole):
            return []
        left_out = AVERAGES if "BatchNorm" in self.facts.kinds else ()
        return weights.buffers(self.facts, self.look.whole, self.tested[0].limit, left_out)


def in_the_same_steps(look: Look) -> bool:
    """Whether one process takes the batches in the steps in which the ranks take theirs."""
    many, alone = look.facts.ranks[0], look.whole.notes
    if many.counts == alone.counts:
        return True
    ahead = [key for key in look.facts.keys if many.reads_ahead(key) or alone.reads_ahead(key)]
    return bool(ahead) and all(many.rate(key) == alone.rate(key) for key in look.facts.keys)


def random_numbers(facts: Facts) -> list[Line]:
    """Whether all ranks draw the same ones, though their examples differ."""
    ranks = facts.distinct
    drawn = set().union(*(rank.steps[0].draws for rank in ranks))
    states = []
    for rank in ranks:
        for events in list(rank.events.values())[:1]:
            states.append(events[0].state)
    if len(states) < 2 or not drawn:
        return []
    others = set().union(*(state.other_than(states[0]) for state in states[1:]))
    if drawn & others:
        return []
    text = "all ranks draw the same random numbers, so they have the same dropout masks (or noise)"
    return [Line("note", f"{text}: seed them differently")]


def worker_seeds(facts: Facts) -> list[Line]:
    """Whether loader workers of ranks with other examples draw the same random numbers."""
    seeds = [tuple(rank.worker_seeds.values()) for rank in facts.distinct]
    if len(seeds) < 2 or not seeds[0] or len(set(seeds)) > 1:
        return []
    text = "the loader workers of all ranks draw the same random numbers (augmentation): give each"
    return [Line("note", f"{text} rank's DataLoader a generator with a seed of its own")]
