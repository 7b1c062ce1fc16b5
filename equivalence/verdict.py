"""The answer, and the lines below it."""

from typing import NamedTuple

from instruments.command import Line

from equivalence import examples as seen
from equivalence import limits
from equivalence.averaging import averaging
from equivalence.facts import Facts
from equivalence.judge import Judge
from equivalence.layers import AVERAGES
from equivalence.options import options
from equivalence.weights import buffers
from equivalence.words import Link

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
BATCH = "the loss, or a layer, depends on which examples are in a batch together"
BY_DESIGN = {
    "BatchNorm": ": each process normalises its own share",
    "dropout": ", which draws other numbers in each process",
}
COPIES_OR_PARTS = "the ranks' weights differ from the start: copies, or parts of one model?"
NOT_ASKED = "whether one process computes the same (one batch, weights) was not asked"


class Verdict(NamedTuple):
    code: int  # of the program's exit
    text: str


def only_averaging(facts: Facts) -> tuple[int, list[Line]]:
    """What the processes' notes alone say."""
    facts.may_have_parts = facts.first_unequal == 0 and not facts.has_parts  # or they are copies
    first = averaging(facts, None)
    if facts.may_have_parts:
        first = first._replace(why=COPIES_OR_PARTS)
    elif first.text and first.is_right is None:  # no other link will tell
        first = first._replace(is_right=False)
    links = [seen.examples(facts), seen.copies(facts), options(facts, None, []), first]
    text = "AVERAGING RIGHT: the ranks have one model, and average their gradients; a difference"
    right = Verdict(SAME, f"{text} above {first.limit:.0e} would have been seen")
    verdict = problem(links, "ranks that train one model with the mean of their gradients") or right
    return answer(verdict, links, [Line("note", NOT_ASKED)])


def all_three(judge: Judge, command: list[str]) -> tuple[int, list[Line]]:
    facts = judge.facts
    links = [seen.examples(facts), seen.copies(facts)]
    if bad := facts.infinite():
        links.append(Link("gradients", None, why=bad))
        return answer(conclude(links), links, [])
    batch = judge.one_batch()
    alone = judge.alone()
    settings = options(facts, alone.notes if alone else None, command)
    first = averaging(facts, judge.right)
    first, batch, change = corrected(judge, first, batch, judge.weights(), settings)
    links += [settings, first, batch, change]
    others: list[Line] = []
    if judge.look and first.is_right is not False:
        left_out = AVERAGES if "BatchNorm" in facts.kinds() else ()
        others = buffers(facts, judge.look.whole, batch.limit, left_out)
    verdict = conclude(links, " (but for buffers)" * bool(others))
    return answer(verdict, links, others + random_numbers(facts))


def corrected(
    judge: Judge, first: Link, batch: Link, change: Link, settings: Link
) -> tuple[Link, Link, Link]:
    """What only another link's answer shows."""
    facts = judge.facts
    got_none = not facts.ranks[0].steps[0].got
    if judge.is_direct and batch.is_right is not None:  # compared with one process's instead
        first = Link("averaging", batch.is_right, limit=batch.limit)
    elif first.is_right is None and got_none and change.is_right is not None:
        text = f"seen in the weights only: {first.why}"
        first = Link("averaging", True, text, change.limit)
    are_free = not any(facts.is_forced(k) for k in facts.steps)  # one process's own change, then
    if first.is_right is False and are_free and change.is_right and not facts.unequal:
        text = first.text.removeprefix("WRONG: ")
        text += "; the weights are averaged after the step, which is the same"
        first = Link("averaging", True, text, change.limit)
    if first.is_right is False and change.is_right is False:
        change = Link("weights", None, why="not looked at, as the gradients are wrong")
    if change.is_right is False and settings.is_right is None:
        change = Link("weights", None, why="not looked at, as the rates differ")
    is_near = change.limit <= 2 * limits.SCHEDULE  # if the rates are nearly those of one process
    if change.is_right is False and settings.is_right and settings.text and is_near:
        text = "they change as in one process, but for the schedule's other rates"
        change = Link("weights", True, f"{text} (apart by {change.limit:.0e})", change.limit)
    return first, batch, change


def problem(links: list[Link], other: str) -> Verdict | None:
    """What is wrong, or else what is not known.  other: from what it is different."""
    wrong = list(dict.fromkeys(link.label for link in links if link.is_right is False))
    if wrong == ["one batch"]:
        return Verdict(DIFFERENT, f"DIFFERENT from {other}: {BATCH}")
    if wrong:
        return Verdict(DIFFERENT, f"DIFFERENT from {other} in: {', '.join(wrong)}")
    labels: dict[str, list[str]] = {}  # by what is not known
    for link in links:
        if link.is_right is None:
            labels.setdefault(link.why, []).append(link.label)
    reasons = [f"{', '.join(labels[why])}: {why}" for why in labels]
    return Verdict(UNKNOWN, f"NOT FOUND OUT: {'; '.join(reasons)}") if reasons else None


def conclude(links: list[Link], but: str = "") -> Verdict:
    if bad := problem(links, "one process"):
        return bad
    limit = max(link.limit for link in links)
    if limit > limits.SEEN:
        text = f"NOT FOUND OUT: nothing differs, but only differences above {limit:.0e} can be seen"
        return Verdict(UNKNOWN, text)
    seen_above = f"a difference above {limit:.0e} would have been seen"
    causes = [link.but for link in links if link.but]
    if causes:
        text = f"THE SAME, but for {causes[0]}{BY_DESIGN.get(causes[0], '')}{but}"
        return Verdict(SAME, f"{text}; else {seen_above}")
    return Verdict(SAME, f"THE SAME as one process, up to rounding{but}; {seen_above}")


def answer(verdict: Verdict, links: list[Link], more: list[Line]) -> tuple[int, list[Line]]:
    lines = [Line("verdict", verdict.text)]
    for link in links:
        lines += link.line
    return verdict.code, lines + more


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
