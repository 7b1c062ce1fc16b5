"""The questions, one after the other: what can be seen of a program says which links are asked."""

from functools import cached_property

from instruments.command import Line

from equivalence import causes, weights
from equivalence.averaging import OWN_PARAMETERS, averaging, in_weights
from equivalence.examples import NO_BATCHES, copies, examples
from equivalence.facts import GOT, NONE_GOT, OWN, UNCLEAR, Facts
from equivalence.layers import NORM_BUFFERS
from equivalence.notes import Alone, Notes
from equivalence.one_batch import Look, Looks
from equivalence.options import options
from equivalence.verdict import SAME, Answer, Link, Verdict, conclude, problem
from equivalence.view import copies_or_parts, facts_of, first_infinite

PARTS_UNCLEAR = "it is not known how the ranks' parts make one model (FSDP1? Use fully_shard)"
MODEL_UNCLEAR = "the ranks' weights differ from the start"
NOT_ASKED = "whether one process computes the same (one batch, weights) was not asked"


def only_averaging(ranks: list[Notes], length: int) -> Answer:
    """The answer to --only averaging: no run in one process."""
    facts = facts_of(ranks, length)
    why = {UNCLEAR: MODEL_UNCLEAR, GOT: causes.NOT_SEEN, NONE_GOT: OWN_PARAMETERS}
    unseen = why.get(facts.model) or why.get(facts.gradients)
    first = Link("averaging", None, why=f"{unseen}: leave out --only")
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
    """Answers all links from the ranks' notes and from runs in one process, each made once."""

    def __init__(self, ranks: list[Notes], length: int, runs: object, command: list[str]) -> None:
        self.runs, self.command = runs, command
        facts = facts_of(ranks, length)
        self.own_data: Alone | None = None  # a run with the program's own batches
        if facts.model == UNCLEAR:
            self.own_data = runs.alone(facts, "own data")
            facts = copies_or_parts(facts, self.own_data)
        self.facts: Facts = facts
        self.looks = Looks(facts, runs)

    # --------------------------------------------------------------------------- what was measured

    @cached_property
    def why_no_batch(self) -> str:
        """Why the ranks' batches can't be joined; "" if they can be."""
        return "" if self.facts.keys else NO_BATCHES

    @cached_property
    def look(self) -> Look | None:
        """The look at a run with all examples in one batch."""
        return None if self.why_no_batch else self.looks.at(self.facts)

    @cached_property
    def complete_look(self) -> Look | None:
        """The look, if its run in one process can be compared."""
        return self.look if self.look and not self.why_no_run(self.look.alone) else None

    @cached_property
    def alone(self) -> Alone | None:
        """A run in one process, with all examples in one batch if that was possible."""
        if self.complete_look:
            return self.complete_look.alone
        return self.own_data or self.runs.alone(self.facts, "own data")

    def why_no_run(self, alone: Alone | None) -> str:
        """Why the run can't be compared; "" if it can."""
        if alone is None:
            return self.runs.failure
        names = ", ".join(alone.unmatched[:3])
        return f"one process has weights that no rank has: {names}" if names else ""

    @cached_property
    def batch_and_look(self) -> tuple[Link, Look | None]:
        """Link 2, and the look in which it is right: perhaps one without BatchNorm or dropout."""
        facts, look = self.facts, self.look
        reason = self.why_no_batch
        if not reason and not (self.complete_look and look.is_given):
            reason = causes.why_not_joined(facts)
        reason = reason or self.why_no_run(look.alone)
        if not reason and not self.runs.per_step and not in_the_same_steps(look):
            reason = "one process takes batches in other steps (does a GradScaler skip steps?)"
        if not reason and not look.steps:
            reason = MODEL_UNCLEAR
        if reason:
            return causes.unknown(facts, reason), None
        if look.is_right:
            return causes.right(look), look
        return causes.different(self.looks, look)

    @cached_property
    def changes(self) -> weights.Changes:
        """Changes of weights: the ranks' beside those of one process."""
        _, right = self.batch_and_look
        if reason := self.why_no_run(self.alone):
            return weights.Changes(reason)
        if all(self.facts.is_forced(k) for k in self.facts.steps):
            return weights.all_changes(self.facts, self.alone, None)
        if right is None:
            return weights.Changes("one process's optimizer gets other gradients than the ranks'")
        right = self.looks.with_rounding(right)
        return weights.all_changes(right.facts, right.alone, right.perturbed)

    @cached_property
    def settings(self) -> Link:
        return options(self.facts, self.alone.notes if self.alone else None, self.command)

    # -------------------------------------------------------------------------------- what is asked

    def links(self) -> list[Link]:
        """The links of the chain; the first one tells if the optimizers' gradients are right."""
        if self.facts.model == UNCLEAR:
            label = causes.label(self.facts)
            return [Link(name, None, why=PARTS_UNCLEAR) for name in ("averaging", label, "weights")]
        batch, right = self.batch_and_look
        links = [batch]
        if self.facts.gradients == OWN:
            links = [averaging(self.facts, right, self.changes), batch]
        if self.facts.gradients == NONE_GOT:
            links = [in_weights(self.changes), batch]
        return [*links, weights.weights(self.changes, links[0], self.settings)]

    def answer(self) -> Answer:
        """All links, the verdict from them, and notes on buffers and random numbers."""
        facts, length = self.facts, len(self.facts.steps)
        if bad := first_infinite(facts.ranks, length):
            links = [examples(facts), copies(facts), Link("gradients", None, why=bad)]
            return Answer(conclude(links, length), links, [])
        total = self.complete_look.total if self.complete_look else 0
        links = [examples(facts, total), copies(facts), self.settings, *self.links()]
        others = self.buffers(links)
        verdict = conclude(links, length, " (but for buffers)" * bool(others))
        return Answer(verdict, links, others + random_numbers(facts) + worker_seeds(facts))

    def buffers(self, links: list[Link]) -> list[Line]:
        """A note on buffers that differ, unless a wrong averaging explains it."""
        is_wrong = any(link.is_right is False and link.label == "averaging" for link in links)
        if is_wrong or not self.complete_look:
            return []
        left_out = NORM_BUFFERS if "BatchNorm" in self.facts.kinds else ()
        limit = self.batch_and_look[0].limit
        return weights.buffers(self.facts, self.complete_look.alone, limit, left_out)


def in_the_same_steps(look: Look) -> bool:
    """Whether one process takes the batches in the steps in which the ranks take theirs."""
    many, alone = look.facts.ranks[0], look.alone.notes
    if many.counts == alone.counts:
        return True
    ahead = [key for key in look.facts.keys if many.reads_ahead(key) or alone.reads_ahead(key)]
    return bool(ahead) and all(many.per_step(key) == alone.per_step(key) for key in look.facts.keys)


def random_numbers(facts: Facts) -> list[Line]:
    """A note, if ranks with different examples draw the same random numbers (dropout)."""
    ranks = facts.distinct
    drawn = set().union(*(rank.steps[0].draws for rank in ranks))
    firsts = [list(rank.events.values())[0][0] for rank in ranks if rank.events]
    states = [event.state for event in firsts]
    if len(states) < 2 or not drawn:
        return []
    others = set().union(*(state.other_than(states[0]) for state in states[1:]))
    if drawn & others:
        return []
    text = "all ranks draw the same random numbers, so they have the same dropout masks (or noise)"
    return [Line("note", f"{text}: seed them differently")]


def worker_seeds(facts: Facts) -> list[Line]:
    """A note, if loader workers of ranks with different examples draw the same random numbers."""
    seeds = [tuple(rank.worker_seeds.values()) for rank in facts.distinct]
    if len(seeds) < 2 or not seeds[0] or len(set(seeds)) > 1:
        return []
    text = "the loader workers of all ranks draw the same random numbers (augmentation): give each"
    return [Line("note", f"{text} rank's DataLoader a generator with a seed of its own")]
