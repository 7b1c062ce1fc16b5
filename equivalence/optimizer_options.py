"""Options of the optimizers (learning rates and others): equal on all ranks and in one process?"""

from typing import Any, NamedTuple

from equivalence import limits
from equivalence.facts import Facts
from equivalence.notes import Notes
from equivalence.verdict import Link


class Difference(NamedTuple):
    """A difference between two tables of options."""

    name: str  # of a parameter
    key: str
    value: Any
    other: Any


def options(facts: Facts, alone: Notes | None, command: list[str]) -> Link:
    """The optimizers' options; right, but with a text, if only a schedule differs a little."""
    for k in facts.steps:
        first = facts.ranks[0].steps[k].options
        for rank in facts.ranks[1:]:
            for name, key, value, theirs in unlike(first, rank.steps[k].options):
                text = f"{key} of {name} is {value} on rank 0, {theirs} on rank {rank.rank}"
                return Link(label(key), False, f"{text}, in step {k + 1}")
    for k in facts.steps if alone else []:
        for difference in unlike(of_all(facts, k), alone.steps[k].options):
            return unlike_one_process(facts, alone, command, k, difference)
    return Link("options", True)


def unlike_one_process(
    facts: Facts, alone: Notes, command: list[str], step: int, difference: Difference
) -> Link:
    """The link of an option that has another value in one process."""
    name, key, value, alone_value = difference
    what = "" if key == "lr" else f"{key} of {name} is "
    text = f"{what}{show(value)} with {len(facts.ranks)} processes, {show(alone_value)} with one"
    are_numbers = isinstance(value, int | float) and isinstance(alone_value, int | float)
    if are_numbers and key == "lr" and alone_value:
        text += f" ({value / alone_value:.4g} times)"
    text += f", in step {step + 1}"
    size, total = sizes(facts, alone)
    if size == total or not is_scheduled(facts, alone, name, key):
        return Link(label(key), False, text)
    text += f"; one process takes {size} examples in a step, all ranks {total}"
    if are_numbers and abs(value - alone_value) <= limits.SCHEDULE * abs(alone_value):
        return Link(label(key), True, f"{text}: a schedule counts the steps of an epoch")
    flag = batch_flag(command, size) or "--batch-size"
    text += f', and a schedule may count steps: give --alone="{flag} {total}"'
    return Link(label(key), None, text, why=text)


def is_scheduled(facts: Facts, alone: Notes, name: str, key: str) -> bool:
    """Whether the option changes from step to step."""
    values = set()
    for k in facts.steps:
        values.add((of_all(facts, k)[name][key], alone.steps[k].options[name][key]))
    return len(values) > 1


def of_all(facts: Facts, step: int) -> dict[str, dict[str, Any]]:
    """The options of all ranks' optimizers in a step, by parameter."""
    table: dict[str, dict[str, Any]] = {}
    for rank in facts.ranks:
        table = rank.steps[step].options | table
    return table


def batch_flag(command: list[str], size: int) -> str:
    """The program's flag that was given the batch size; "" if none was."""
    for flag, value in zip(command, command[1:], strict=False):
        if value == str(size) and flag.startswith("-"):
            return flag
    return ""


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


def sizes(facts: Facts, alone: Notes) -> tuple[int, int]:
    """The examples in a step of one process by itself, and of all ranks; 0, 0: not known."""
    if not facts.keys or len(alone.counts) < 2:
        return 0, 0
    key = facts.keys[0]
    if not all(key in notes.loaders for notes in (alone, *facts.distinct)):
        return 0, 0
    size = alone.loaders[key].batch_size
    many = sum(rank.loaders[key].batch_size for rank in facts.distinct)
    if not size or not many:
        return 0, 0
    return size * alone.per_step(key), many * facts.per_step(key)


def show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
