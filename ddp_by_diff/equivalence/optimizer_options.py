"""Options of the optimizers (learning rates and others): equal on all ranks and in one process?"""

import itertools
from typing import Any, NamedTuple

from ddp_by_diff.equivalence import limits
from ddp_by_diff.equivalence.facts import Facts
from ddp_by_diff.equivalence.notes import Notes
from ddp_by_diff.equivalence.verdict import Link, Reason, inconclusive


class Difference(NamedTuple):
    """A difference between two tables of options."""

    name: str  # of a parameter
    key: str
    value: Any
    other: Any


def options(facts: Facts, alone: Notes | None, command: list[str], own_total: int = 0) -> Link:
    """The optimizers' options; right, but with a text, if only a schedule differs a little.

    own_total: the examples that one process takes in a step by itself; 0: not known.
    """
    for k in facts.steps:
        first = facts.ranks[0].steps[k].options
        for rank in facts.ranks[1:]:
            for name, key, value, theirs in unlike(first, rank.steps[k].options):
                text = f"{key} of {name} is {value} on rank 0, {theirs} on rank {rank.rank}"
                return Link(label(key), False, f"{text}, in step {k + 1}")
    for k in facts.steps if alone else []:
        for difference in unlike(of_all(facts, k), alone.steps[k].options):
            text, is_scheduled = unlike_one_process(facts, alone, k, difference)
            if not is_scheduled or own_total in (0, facts.total):
                return Link(label(difference.key), False, text)
            return scheduled(difference, text, command, own_total, facts.total)
    return Link("options", True)


def unlike_one_process(
    facts: Facts, alone: Notes, step: int, difference: Difference
) -> tuple[str, bool]:
    """The difference in words; and whether the option changes from step to step."""
    name, key, value, alone_value = difference
    what = "" if key == "lr" else f"{key} of {name} is "
    text = f"{what}{show(value)} with {len(facts.ranks)} processes, {show(alone_value)} with one"
    if key == "lr" and alone_value:
        text += f" ({value / alone_value:.4g} times)"
    values = [(of_all(facts, k)[name][key], alone.steps[k].options[name][key]) for k in facts.steps]
    return f"{text}, in step {step + 1}", len(set(values)) > 1


def scheduled(
    difference: Difference, text: str, command: list[str], own_total: int, total: int
) -> Link:
    """The link, if a schedule may count the steps of an epoch, which have other sizes."""
    name, value, alone_value = label(difference.key), difference.value, difference.other
    text += f"; one process takes {own_total} examples per step, all ranks {total}"
    is_number = isinstance(alone_value, int | float)
    if is_number and abs(value - alone_value) <= limits.SCHEDULE * abs(alone_value):
        return Link(name, True, f"{text}: a schedule counts the steps of an epoch")
    flags = [flag for flag, size in itertools.pairwise(command) if size == str(own_total)]
    way_on = f"give --alone with the flag for its batch size, and {total}"
    if flags:
        way_on = f'give --alone="{flags[0]} {total}"'
    return inconclusive(name, Reason("a schedule may count the steps of an epoch", way_on), text)


def of_all(facts: Facts, step: int) -> dict[str, dict[str, Any]]:
    """The options of all ranks' optimizers in a step, by parameter."""
    table: dict[str, dict[str, Any]] = {}
    for rank in facts.ranks:
        table = rank.steps[step].options | table
    return table


def label(key: str) -> str:
    return "learning rate" if key == "lr" else "options"


def unlike(table: dict, other_table: dict) -> list[Difference]:
    differences = []
    for name in table:
        for key, value in table[name].items():
            theirs = other_table.get(name, {}).get(key, value)
            is_start = key.endswith("_lr")  # initial_lr, max_lr: not in use
            if theirs != value and not is_start:
                differences.append(Difference(name, key, value, theirs))
    return differences


def show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
