"""Asks the three questions, one after the other, and makes the runs that each needs."""

from equivalence import limits
from equivalence.facts import Facts
from equivalence.notes import Alone, Notes
from equivalence.one_batch import (
    Look,
    factors,
    measured,
    most,
    why_not_its_own,
    why_not_joined,
    why_not_joined_well,
)
from equivalence.runs import Runs
from equivalence.source import Given
from equivalence.weights import LABEL as WEIGHTS
from equivalence.weights import weights
from equivalence.words import PARTS, Link, apart


class Judge:
    """The processes' notes, and what one process has found."""

    def __init__(self, ranks: list[Notes], steps: int, runs: Runs) -> None:
        self.runs, self.count = runs, steps
        self.facts = Facts(ranks, steps)
        self.look: Look | None = None  # at all examples in one batch
        self.right: Look | None = None  # the look in which link 2 is right
        self.own_data: Alone | None = None  # a run with the program's own batches
        if self.facts.first_unequal == 0 and not self.facts.has_parts:
            self.look_for_parts()
        self.is_direct = not self.facts.are_own_seen()
        self.label = "gradients" if self.is_direct else "one batch"

    def look_for_parts(self) -> None:
        """Weights that differ from the start: copies, or parts of one process's model?"""
        alone = self.own_data = self.make("own data")
        if alone is None:
            return
        first = self.facts.ranks[0].steps[0].weights
        for name, tensor in alone.notes.steps[0].weights.items():
            is_other = name not in first or first[name].shape != tensor.shape
            if is_other and name in alone.notes.parameters:
                self.facts.has_parts = not alone.unmatched
                self.facts.may_have_parts = bool(alone.unmatched)

    def make(self, kind: str, facts: Facts | None = None, **more: object) -> Alone | None:
        return self.runs.alone(Given(facts or self.facts, kind, **more))

    # ------------------------------------------------------------------------------ link 2

    def one_batch(self) -> Link:
        if self.facts.may_have_parts:
            return self.unknown(PARTS)
        if not self.facts.keys:
            return self.unknown("no batch was seen that each step takes from the same place")
        if reason := why_not_joined(self.facts):
            return self.unknown(reason)
        look = self.look_at(self.facts)
        if reason := self.why_no_run(look.whole):
            return self.unknown(reason)
        self.look = look
        if not self.runs.rates and look.whole.notes.counts != self.facts.ranks[0].counts:
            return self.unknown("one process takes its batches in other steps (a GradScaler's?)")
        if not look.steps:
            return self.unknown("the ranks' weights differ from the start")
        if look.is_right:
            return self.is_one_batch(look)
        return self.differs(look)

    def look_at(self, facts: Facts, left_out: tuple = ()) -> Look:
        """Rounding is measured only where it matters."""
        look = Look(facts, left_out, self.make("whole", facts, left_out=left_out))
        if look.whole is None or look.whole.unmatched:
            return look
        look = measured(look)
        may_be_rounding = look.steps and not look.is_right and look.worst.far <= most(facts)
        return self.with_rounding(look) if may_be_rounding else look

    def with_rounding(self, look: Look) -> Look:
        moved = look.moved or self.make("moved", look.facts, left_out=look.left_out)
        return measured(look._replace(moved=moved)) if moved else look

    def is_one_batch(self, look: Look) -> Link:
        self.right = look
        worst = look.worst
        if self.is_direct:
            text = f"right: one process's {apart(worst.far, worst.limit)}"
        else:
            batch = f"all {self.facts.total()} examples in one batch"
            text = f"right: that is the gradient of {batch} {apart(worst.far, worst.limit)}"
        return Link(self.label, True, text, look.limit)

    def differs(self, look: Look) -> Link:
        """Why?  A cause is named only if the difference goes when that alone is switched off."""
        worst = look.worst
        batch = "one process's" if self.is_direct else f"all {self.facts.total()} in one batch"
        text = f"different from {batch} {apart(worst.far, worst.limit)}"
        text += f", in {worst.name}" if worst.name else ""
        kinds = sorted(self.facts.kinds())
        if kinds:
            all_kinds = " and ".join(kinds)
            look = self.without(kinds)
            if look is None:
                return self.unknown(f"the program failed without {all_kinds}", text)
            far = apart(look.worst.far, look.worst.limit)
            if look.is_right:
                self.right = look
                cause = " and ".join(look.left_out)
                text += f"; without {cause} {far}"
                return Link(self.label, True, text, look.limit, but=cause)
            text += f"; without {all_kinds} too {far}"
        return self.accused(look, text)

    def accused(self, look: Look, text: str) -> Link:
        """Nothing explains the difference: is it the program's?  What was joined was guessed."""
        if any(rank.steps[0].draws for rank in look.facts.ranks):
            return self.unknown(
                "each step draws random numbers, and one process draws others", text
            )
        look = self.with_rounding(look)
        if look.worst.far <= limits.YARDSTICKS * look.worst.rounding:
            why = "rounding, or another order of the same examples, moves a gradient by"
            return self.unknown(f"{why} {look.worst.rounding:.0e}", text)
        if multiple := factors(look):
            what = "what the optimizers get" if self.is_direct else "the mean of the ranks'"
            return Link(self.label, False, f"WRONG: {what} is {multiple}")
        if self.is_direct:
            return self.unknown("the ranks' own gradients were not seen", text)
        reason = why_not_joined_well(look)
        if not reason and not look.is_given:
            if self.runs.rates:
                return self.unknown("one process takes another number of batches in a step", text)
            share = self.make("share", look.facts, left_out=look.left_out)
            reason = why_not_its_own(look, share)
        return self.unknown(reason, text) if reason else Link(self.label, False, text)

    def without(self, kinds: list[str]) -> Look | None:
        """Without all these layers; if then nothing differs, without the one that is the cause."""
        without_all = self.look_without(tuple(kinds))
        if without_all is None or not without_all.is_right or len(kinds) == 1:
            return without_all
        for kind in kinds:
            look = self.look_without((kind,))
            if look is None or look.is_right:
                return look
        return without_all

    def look_without(self, kinds: tuple) -> Look | None:
        ranks = self.runs.several(kinds)
        look = self.look_at(Facts(ranks, self.count), kinds) if ranks else None
        return look if look and look.steps else None

    def why_no_run(self, alone: Alone | None) -> str:
        """Why a run in one process says nothing; "" if it does."""
        if alone is None:
            return self.runs.failure
        names = ", ".join(alone.unmatched[:3])
        return f"one process has weights that no rank has: {names}" if names else ""

    def unknown(self, why: str, text: str = "") -> Link:
        return Link(self.label, None, f"not found out: it is {text}" if text else "", why=why)

    # ------------------------------------------------------------------------------ link 3

    def weights(self) -> Link:
        """One process gets the gradients that the processes' optimizers got."""
        if self.facts.may_have_parts:
            return Link(WEIGHTS, None, why=PARTS)
        alone = self.alone()
        if reason := self.why_no_run(alone):
            return Link(WEIGHTS, None, why=reason)
        if all(self.facts.is_forced(k) for k in self.facts.steps):
            return weights(self.facts, alone, None)
        if self.right is None:
            return Link(WEIGHTS, None, why="one process's optimizer gets other gradients")
        look = self.with_rounding(self.right)
        return weights(look.facts, look.whole, look.moved)

    def alone(self) -> Alone | None:
        """A run in one process, with the batches of all if there is one."""
        if self.look:
            return self.look.whole
        if self.own_data is None:
            self.own_data = self.make("own data")
        return self.own_data
