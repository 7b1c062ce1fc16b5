"""The answers to the links; the verdict from all of them; names and numbers as lines say them."""

from typing import NamedTuple

from instruments.command import Line

from equivalence import limits

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
BY_DESIGN = {
    "BatchNorm": ": each process normalises its own share",
    "dropout": ", which draws other numbers in each process",
}


class Link(NamedTuple):
    """The answer to one question."""

    label: str  # what a verdict calls it
    is_right: bool | None  # None: not found out
    text: str = ""  # its line; "" if it has none
    limit: float = 0.0  # a difference above it would have been seen
    but: str = ""  # "BatchNorm": the only thing that differs
    why: str = ""  # why it was not found out, or why it is wrong

    @property
    def line(self) -> list[Line]:
        return [Line(self.label, self.text)] if self.text else []


class Verdict(NamedTuple):
    """What all links come to."""

    code: int  # of the program's exit
    text: str


def problem(links: list[Link], other: str) -> Verdict | None:
    """What is wrong, or else what is not known.  other: from what it is different."""
    wrong = list(dict.fromkeys(link.label for link in links if link.is_right is False))
    if wrong:
        causes = [link.why for link in links if link.is_right is False and link.why]
        if causes and len(wrong) == 1:
            return Verdict(DIFFERENT, f"DIFFERENT from {other}: {causes[0]}")
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


def lines_of(verdict: Verdict, links: list[Link], more: list[Line]) -> list[Line]:
    lines = [Line("verdict", verdict.text)]
    for link in links:
        lines += link.line
    return lines + more


# ----------------------------------------------------------------------------------------- words


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
