"""Links with their answers, the verdict from all of them, and words for names and numbers."""

import math
from typing import Any, NamedTuple

from instruments.command import Line

from equivalence import limits

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
BY_DESIGN = {
    "BatchNorm": ": each process normalises its own share",
    "dropout": ", which draws other numbers in each process",
}


class Figures(NamedTuple):
    """The largest difference, relative to its tensor's size; below the threshold it is rounding."""

    difference: float
    threshold: float

    def __str__(self) -> str:
        below = f"below {self.threshold:.0e} it is rounding"
        return f"(largest difference {self.difference:.0e}; {below})"


class Link(NamedTuple):
    """A question with its answer."""

    label: str  # the question's name
    is_right: bool | None  # None: not found out
    text: str = ""  # the line that is printed; "" for none
    limit: float = 0.0  # a difference above it would have been seen
    but: str = ""  # the only cause of a difference: "BatchNorm"
    why: str = ""  # why it was not found out, or why it is wrong
    figures: Figures | None = None

    @property
    def line(self) -> list[Line]:
        return [Line(self.label, self.text)] if self.text else []


class Verdict(NamedTuple):
    """The verdict from all links."""

    code: int  # the exit code: SAME, DIFFERENT or UNKNOWN
    text: str


class Answer(NamedTuple):
    """The whole answer, as lines or as one object of JSON."""

    verdict: Verdict
    links: list[Link]
    notes: list[Line]

    def lines(self) -> list[Line]:
        lines = [Line("verdict", self.verdict.text)]
        for link in self.links:
            lines += link.line
        return lines + self.notes

    def as_json(self) -> dict[str, Any]:
        """The object that --json writes; docs/equivalence.md explains its names, which stay."""
        links, states = [], {True: "right", False: "wrong", None: "not found out"}
        for link in self.links:
            answer = {"name": link.label, "state": states[link.is_right], "text": link.text}
            for field, value in zip(Figures._fields, link.figures or (None, None), strict=True):
                answer[field] = value if value is None or math.isfinite(value) else None
            links.append(answer | {"but_for": link.but or None, "why": link.why or None})
        name = ["same", "different", "not found out"][self.verdict.code]
        notices = max((link.limit for link in self.links), default=0.0) or None
        found = {"verdict": name, "text": self.verdict.text, "links": links}
        return found | {"notices": notices, "notes": [note.text for note in self.notes]}


def problem(links: list[Link], other: str) -> Verdict | None:
    """The verdict if a link is wrong, or else if one is not known; None if all are right."""
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


def unknown(text: str) -> Answer:
    return Answer(Verdict(UNKNOWN, f"NOT FOUND OUT: {text}"), [], [])


def conclude(links: list[Link], steps: int, but: str = "") -> Verdict:
    """The verdict from the links of so many steps.  but: other exceptions, in words."""
    if bad := problem(links, "one process"):
        return bad
    limit = max(link.limit for link in links)
    if limit > limits.SEEN:
        text = f"nothing differs, but the test notices only differences larger than {limit:.0e}"
        return Verdict(UNKNOWN, f"NOT FOUND OUT: {text}")
    notices = f"the test notices differences larger than {limit:.0e}"
    same = f"THE SAME as one process in the {steps} steps compared"
    causes = [link.but for link in links if link.but]
    if causes:
        text = f"{same}, but for {causes[0]}{BY_DESIGN.get(causes[0], '')}{but}"
        return Verdict(SAME, f"{text}; apart from that {notices}")
    return Verdict(SAME, f"{same}, up to rounding{but}; {notices}")


# ----------------------------------------------------------------------------------------- words


def refusal_in(error: str) -> str:
    """The reason in the error of a run that this tool refused; "" if it did not refuse it."""
    text = error.partition("failed first: ")[2] or error
    return text.partition("equivalence: ")[2] if text.startswith("equivalence: ") else ""


def made_of(factors: list[float]) -> str:
    rounded = [0 if abs(factor) < 1e-6 else factor for factor in factors]
    return " + ".join(f"{factor:.3g} x rank {rank}'s" for rank, factor in enumerate(rounded))


def percent(factors: list[float]) -> str:
    total = sum(factors) or 1
    return " and ".join(f"{100 * factor / total:.1f} %" for factor in factors)


def some_of(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
