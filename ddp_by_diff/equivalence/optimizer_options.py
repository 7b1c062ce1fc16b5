"""Options of the optimizers (learning rates and others): equal on all ranks and in one process?"""

import itertools
import math
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_by_diff.equivalence import limits
from ddp_by_diff.equivalence.facts import Facts
from ddp_by_diff.equivalence.notes import Notes
from ddp_by_diff.equivalence.verdict import Link, Reason, inconclusive


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
    found = []
    for k in facts.steps if alone else []:
        found += [(k, *one) for one in unlike(of_all(facts, k), alone.steps[k].options)]
    if not found:
        return Link("options", True)
    k, name, key, value, one = max(found, key=lambda difference: far_apart(*difference[3:]))
    text = "" if key == "lr" else f"{key} of {name} is "
    text += f"{show(value)} with {len(facts.ranks)} processes, {show(one)} with one"
    text += f" ({value / one:.4g} times)" if key == "lr" and one else ""
    text += f", in step {k + 1}"
    tables = [(of_all(facts, step), alone.steps[step].options) for step in facts.steps]
    values = {(table[name][key], ones[name][key]) for table, ones in tables}
    if len(values) == 1 or own_total in (0, facts.total):  # it does not change: no schedule
        return Link(label(key), False, text)
    text += f"; one process takes {own_total} examples per step, all ranks {facts.total}"
    is_near = far_apart(value, one) <= limits.SCHEDULE
    return scheduled(label(key), text, is_near, command, own_total, facts.total)


def far_apart(value: Any, other: Any) -> float:
    """The relative difference of two values of an option."""
    are_numbers = isinstance(value, int | float) and isinstance(other, int | float)
    return abs(value - other) / abs(other) if are_numbers and other else math.inf


def scheduled(
    name: str, text: str, is_near: bool, command: list[str], own_total: int, total: int
) -> Link:
    """The link, if a schedule may count the steps of an epoch, which have other sizes."""
    if is_near:
        return Link(name, True, f"{text}: a schedule counts the steps of an epoch")
    flags = [flag for flag, size in itertools.pairwise(command) if size == str(own_total)]
    way_on = f"give --alone with the flag for its batch size, and {total}"
    if flags:
        way_on = f'give --alone="{flags[0]} {total}"'
    return inconclusive(name, Reason("a schedule may count the steps of an epoch", way_on), text)


def of_all(facts: Facts, step: int) -> Mapping[str, dict[str, Any]]:
    """The options of all ranks' optimizers in a step, by parameter."""
    return ChainMap(*(rank.steps[step].options for rank in facts.ranks))


def label(key: str) -> str:
    return "learning rate" if key == "lr" else "options"


def unlike(table: Mapping, other_table: Mapping) -> Iterator[tuple[str, str, Any, Any]]:
    """Parameter, option and both values of each difference between two tables of options."""
    for name in table:
        for key, value in table[name].items():
            theirs = other_table.get(name, {}).get(key, value)
            if theirs != value and not key.endswith("_lr"):  # initial_lr, max_lr: not in use
                yield name, key, value, theirs


def show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
