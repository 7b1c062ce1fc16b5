"""The answer, and the lines below it."""

from typing import NamedTuple

from instruments.command import Line

from equivalence import examples as seen
from equivalence import limits
from equivalence.averaging import averaging
from equivalence.facts import Facts
from equivalence.judge import Judge
from equivalence.layers import AVERAGES
from equivalence.options import Options, options
from equivalence.weights import buffers
from equivalence.words import Link

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
BATCH = "the loss, or a layer, depends on which examples are in a batch together"
BY_DESIGN = {
    "BatchNorm": ": each process normalises its own share",
    "dropout": ", which draws other numbers in each process",
}
NOT_ASKED = "whether one process computes the same (one batch, weights) was not asked"


class Answer(NamedTuple):
    code: int
    lines: list[Line]  # the first one is the verdict


def only_averaging(facts: Facts) -> Answer:
    """What the processes' notes alone say."""
    facts.may_have_parts = facts.first_unequal == 0 and not facts.has_parts  # or they are copies
    lines, wrong, reasons = of_notes(facts)
    if facts.may_have_parts:
        reasons.append("the ranks' weights differ from the start: copies, or parts of one model?")
    settings = options(facts, None, [])
    lines += settings.lines
    wrong += [line.label for line in settings.lines]
    link = averaging(facts, None)
    lines += link.line
    if link.is_right is False or link.text and link.is_right is None:
        wrong.append("averaging")
    elif link.is_right is None and not facts.may_have_parts:
        reasons.append(f"averaging: {link.why}")
    lines.append(Line("note", NOT_ASKED))
    if wrong:
        names = ", ".join(dict.fromkeys(wrong))
        text = "DIFFERENT from ranks that train one model with the mean of their gradients"
        return answer(DIFFERENT, f"{text}: {names}", lines)
    if reasons:
        return answer(UNKNOWN, f"NOT FOUND OUT: {'; '.join(reasons)}", lines)
    text = "AVERAGING RIGHT: the ranks have one model, and average their gradients; a difference"
    return answer(SAME, f"{text} above {link.limit:.0e} would have been seen", lines)


def all_three(judge: Judge, command: list[str]) -> Answer:
    facts = judge.facts
    lines, wrong, reasons = of_notes(facts)
    if bad := facts.infinite():
        lines.append(Line("gradients", bad))
        reasons.append("gradients are infinite or NaN")
        return conclude(wrong, reasons, [], lines)
    batch = judge.one_batch()
    alone = judge.alone()
    settings = options(facts, alone.notes if alone else None, command)
    lines += settings.lines
    if settings.is_right is False:
        wrong += [line.label for line in settings.lines]
    elif settings.is_right is None:
        reasons += [f"{line.label}: {line.text}" for line in settings.lines]
    links = corrected(judge, averaging(facts, judge.known), batch, judge.weights(), settings)
    for link in links:
        lines += link.line
    others: list[Line] = []
    if judge.look and links[0].is_right is not False:
        left_out = AVERAGES if "BatchNorm" in facts.kinds() else ()
        others = buffers(facts, judge.look.whole, batch.limit, left_out)
    lines += others + random_numbers(facts)
    return conclude(wrong, reasons, links, lines, " (but for buffers)" * bool(others))


def of_notes(facts: Facts) -> tuple[list[Line], list[str], list[str]]:
    """Lines about examples and copies; what is wrong; what is not known."""
    lines, are_shares = seen.examples(facts)
    copies = seen.copies(facts)
    wrong = ["examples"] * (are_shares is False) + ["copies"] * bool(copies)
    reasons = ["examples may be on more than one rank"] * (are_shares is None)
    return lines + copies, wrong, reasons


def corrected(
    judge: Judge, first: Link, batch: Link, change: Link, settings: Options
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
    if change.is_right is False and settings.is_schedule and change.limit <= 2 * limits.SCHEDULE:
        text = "they change as in one process, but for the schedule's other rates"
        change = Link("weights", True, f"{text} (apart by {change.limit:.0e})", change.limit)
    return first, batch, change


def conclude(
    wrong: list[str], reasons: list[str], links: tuple | list, lines: list[Line], but: str = ""
) -> Answer:
    wrong = list(dict.fromkeys(wrong + [link.label for link in links if link.is_right is False]))
    if wrong == ["one batch"]:
        return answer(DIFFERENT, f"DIFFERENT from one process: {BATCH}", lines)
    if wrong:
        return answer(DIFFERENT, f"DIFFERENT from one process in: {', '.join(wrong)}", lines)
    labels: dict[str, list[str]] = {}  # by what is not known
    for link in links:
        if link.is_right is None:
            labels.setdefault(link.why, []).append(link.label)
    reasons = [*reasons, *[f"{', '.join(labels[why])}: {why}" for why in labels]]
    if reasons:
        return answer(UNKNOWN, f"NOT FOUND OUT: {'; '.join(dict.fromkeys(reasons))}", lines)
    limit = max(link.limit for link in links)
    if limit > limits.SEEN:
        text = f"NOT FOUND OUT: nothing differs, but only differences above {limit:.0e} can be seen"
        return answer(UNKNOWN, text, lines)
    seen_above = f"a difference above {limit:.0e} would have been seen"
    causes = [link.but for link in links if link.but]
    if causes:
        text = f"THE SAME, but for {causes[0]}{BY_DESIGN.get(causes[0], '')}{but}"
        return answer(SAME, f"{text}; else {seen_above}", lines)
    return answer(SAME, f"THE SAME as one process, up to rounding{but}; {seen_above}", lines)


def answer(code: int, text: str, lines: list[Line]) -> Answer:
    return Answer(code, [Line("verdict", text), *lines])


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
