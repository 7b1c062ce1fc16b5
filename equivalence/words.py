"""What an answer is made of; names and numbers as a line says them."""

from typing import NamedTuple

from instruments.command import Line

PARTS = (
    "the ranks have parts of one process's model, and how these make it was not seen (FSDP1? Use "
    "fully_shard)"
)


class Link(NamedTuple):
    """The answer to one of the three questions."""

    label: str  # what a verdict calls it
    is_right: bool | None  # None: not found out
    text: str = ""  # its line; "" if it has none
    limit: float = 0.0  # a difference above it would have been seen
    but: str = ""  # "BatchNorm": the only thing that differs
    why: str = ""  # why it was not found out

    @property
    def line(self) -> list[Line]:
        return [Line(self.label, self.text)] if self.text else []


def refusal_in(error: str) -> str:
    """Why a run of ours was refused, without its rank and our name; "" if it was not."""
    text = error.partition("failed first: ")[2] or error
    return text.partition("equivalence: ")[2] if text.startswith("equivalence: ") else ""


def apart(far: float, limit: float) -> str:
    return f"(apart by {far:.0e}; up to {limit:.0e} is rounding)"


def made_of(weights: list[float]) -> str:
    texts = []
    for number, weight in enumerate(weights):
        weight = 0 if abs(weight) < 1e-6 else weight
        texts.append(f"{weight:.3g} x rank {number}'s")
    return " + ".join(texts)


def percent(weights: list[float]) -> str:
    total = sum(weights) or 1
    return " and ".join(f"{100 * weight / total:.1f} %" for weight in weights)


def some_of(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
