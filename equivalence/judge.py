"""Asks the three questions, one after the other, and makes the runs that each needs."""

from equivalence import limits
from equivalence.alone import Runs
from equivalence.averaging import Known
from equivalence.facts import Facts
from equivalence.given import Given
from equivalence.notes import Notes
from equivalence.one_batch import (
    Look,
    are_ragged,
    factors,
    measure,
    most,
    why_not_its_own,
    why_not_joined,
    why_not_joined_well,
)
from equivalence.replay import Alone
from equivalence.weights import LABEL as WEIGHTS
from equivalence.weights import weights
from equivalence.words import PARTS, Link, apart


class Judge:
    """The processes' notes, and what one process has found."""

    def __init__(self, ranks: list[Notes], steps: int, runs: Runs) -> None:
        self.runs, self.count = runs, steps
        self.facts = Facts(ranks, steps)
        self.look: Look | None = None  # at all examples in one batch
        self.known: Known | None = None  # if link 2 was answered
        # The look in which link 2 is right, and the kinds of layers that it was made without.
        self.right: tuple[Look, tuple] | None = None
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
        names = [name for name in alone.weights[0] if name in alone.notes.parameters]
        shapes = {name: alone.weights[0][name].shape for name in names}
        is_other = any(name not in first or first[name].shape != shapes[name] for name in names)
        if is_other:
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
        if look.whole is None:
            return self.unknown(self.runs.failure)
        if look.whole.unmatched:
            names = ", ".join(look.whole.unmatched[:3])
            return self.unknown(f"one process has weights that no rank has: {names}")
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
        whole = self.make("whole", facts, left_out=left_out)
        if whole is None or whole.unmatched:
            return Look(facts, whole, None, [])
        look = Look(facts, whole, None, measure(facts, whole, None))
        may_be_rounding = look.steps and not look.is_right and look.worst.far <= most(facts)
        if may_be_rounding:
            look = self.with_rounding(look, left_out)
        return look

    def with_rounding(self, look: Look, left_out: tuple = ()) -> Look:
        if look.moved:
            return look
        moved = self.make("moved", look.facts, left_out=left_out)
        if moved is None:
            return look
        steps = measure(look.facts, look.whole, moved)
        return Look(look.facts, look.whole, moved, steps)

    def note_known(self, look: Look, left_out: tuple = ()) -> None:
        self.right = look, left_out
        weights = [step.weights for step in look.steps if step.weights]
        if weights:
            weights += [weights[-1]] * (self.count - len(weights))
            self.known = Known(weights, look.facts, look.whole.notes, look.limit)

    def is_one_batch(self, look: Look, but: str = "") -> Link:
        self.note_known(look)
        worst = look.worst
        if self.is_direct:
            text = f"right: one process's {apart(worst.far, worst.limit)}"
        else:
            batch = f"all {self.facts.total()} examples in one batch"
            text = f"right: that is the gradient of {batch} {apart(worst.far, worst.limit)}"
        return Link(self.label, True, text, look.limit, but)

    def differs(self, look: Look) -> Link:
        """Why?  A cause is named only if the difference goes when that alone is switched off."""
        worst = look.worst
        batch = "one process's" if self.is_direct else f"all {self.facts.total()} in one batch"
        text = f"different from {batch} {apart(worst.far, worst.limit)}"
        text += f", in {worst.name}" if worst.name else ""
        kinds = sorted(self.facts.kinds())
        if kinds:
            all_kinds = " and ".join(kinds)
            cause, without = self.without(kinds)
            if without is None:
                return self.unknown(f"the program failed without {all_kinds}", text)
            far, limit = without.worst.far, without.worst.limit
            if cause:
                self.note_known(without, cause)
                names = " and ".join(cause)
                text += f"; without {names} {apart(far, limit)}"
                return Link(self.label, True, text, without.limit, but=names)
            text += f"; without {all_kinds} too {apart(far, limit)}"
            look = without
        return self.accused(look, tuple(kinds), text)

    def accused(self, look: Look, kinds: tuple, text: str) -> Link:
        """Nothing explains the difference: is it the program's?  What was joined was guessed."""
        if any(rank.steps[0].draws for rank in look.facts.ranks):
            return self.unknown(
                "each step draws random numbers, and one process draws others", text
            )
        look = self.with_rounding(look, kinds)
        if look.worst.far <= limits.YARDSTICKS * look.worst.rounding:
            why = "rounding, or another order of the same examples, moves a gradient by"
            return self.unknown(f"{why} {look.worst.rounding:.0e}", text)
        if multiple := factors(look):
            what = "what the optimizers get" if self.is_direct else "the mean of the ranks'"
            return Link(self.label, False, f"WRONG: {what} is {multiple}")
        if self.is_direct:
            return self.unknown("the ranks' own gradients were not seen", text)
        if reason := self.why_not_joined_well(look, kinds):
            return self.unknown(reason, text)
        return Link(self.label, False, text)

    def why_not_joined_well(self, look: Look, kinds: tuple) -> str:
        """What one batch of the ranks' batches is, was guessed: could the guess be wrong?"""
        if are_ragged(look.facts):
            return "examples have different shapes: how a batch is padded may be what differs"
        if not look.whole.is_joined:  # the program's own batches have the same examples
            return ""
        if look.whole.is_mixed:
            return "some batches in one process are the program's own, and others are not"
        if self.runs.rates:
            return "one process takes another number of batches in a step"
        if len(look.facts.distinct) == 1:
            return ""
        if reason := why_not_joined_well(look):
            return reason
        return why_not_its_own(look, self.make("share", look.facts, left_out=kinds))

    def without(self, kinds: list[str]) -> tuple[tuple, Look | None]:
        """The layers without which nothing differs; the last look without all of them."""
        cause: tuple = ()
        without_cause = None
        trials = [tuple(kinds), *[(kind,) for kind in kinds if len(kinds) > 1]]
        for trial in trials:
            ranks = self.runs.several(trial)
            if ranks is None:
                return (), None
            look = self.look_at(Facts(ranks, self.count), trial)
            if not look.steps:
                return (), None
            if look.is_right:
                cause, without_cause = trial, look
                if len(trial) < len(kinds):
                    return cause, without_cause
            elif trial == trials[0]:
                return (), look
        return cause, without_cause

    def unknown(self, why: str, text: str = "") -> Link:
        return Link(self.label, None, f"not found out: it is {text}" if text else "", why=why)

    # ------------------------------------------------------------------------------ link 3

    def weights(self) -> Link:
        """One process gets the gradients that the processes' optimizers got."""
        if self.facts.may_have_parts:
            return Link(WEIGHTS, None, why=PARTS)
        alone = self.alone()
        if alone is None:
            return Link(WEIGHTS, None, why=self.runs.failure)
        if alone.unmatched:
            return Link(WEIGHTS, None, why=f"no rank has {', '.join(alone.unmatched[:3])}")
        if all(self.facts.is_forced(k) for k in self.facts.steps):
            return weights(self.facts, alone, None)
        if self.right is None:
            return Link(WEIGHTS, None, why="one process's optimizer gets other gradients")
        look, left_out = self.right
        look = self.with_rounding(look, left_out)
        return weights(look.facts, look.whole, look.moved)

    def alone(self) -> Alone | None:
        """A run in one process, with the batches of all if there is one."""
        if self.look:
            return self.look.whole
        if self.own_data is None:
            self.own_data = self.make("own data")
        return self.own_data
