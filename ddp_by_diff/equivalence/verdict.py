"""Checks with their answers, the verdict from all of them, and words for names and numbers."""

import math
from typing import Any, NamedTuple

from ddp_by_diff.equivalence import limits
from ddp_by_diff.instruments.command import Line

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
BY_DESIGN = {
    "BatchNorm": " (its statistics are not those of one batch)",
    "dropout": " (each process draws its own masks)",
}


class Figures(NamedTuple):
    """The largest difference, relative to its tensor's size; below the threshold it is rounding."""

    difference: float
    threshold: float

    def __str__(self) -> str:
        digits = 0
        while digits < 9 and f"{self[0]:.{digits}e}" == f"{self[1]:.{digits}e}":
            digits += 1  # so that the two can be told apart
        difference, threshold = (f"{number:.{digits}e}" for number in self)
        return f"(largest difference {difference}, rounding threshold {threshold})"


class Reason(NamedTuple):
    """Why something is inconclusive, and what settles it."""

    sentence: str
    way_on: str


class Check(NamedTuple):
    """A question with its answer."""

    label: str  # the question's name
    is_right: bool | None  # None: inconclusive
    text: str = ""  # the line that is printed; "" for none
    limit: float = 0.0  # a difference above it would have been seen
    but: str = ""  # the only cause of a difference: "BatchNorm"
    why: str = ""  # why it is inconclusive, or why it is wrong
    figures: Figures | None = None
    way_on: str = ""  # what settles it, if it is inconclusive


def inconclusive(label: str, reason: Reason, text: str = "", figures: Any = None) -> Check:
    """A check without an answer.  text: what was measured all the same."""
    text = f"inconclusive: {text}" if text else ""
    return Check(label, None, text, why=reason.sentence, figures=figures, way_on=reason.way_on)


class Verdict(NamedTuple):
    """The verdict from all checks."""

    code: int  # the exit code: SAME, DIFFERENT or UNKNOWN
    text: str
    ways_on: tuple[str, ...] = ()


class Answer(NamedTuple):
    """The whole answer, as lines or as one object of JSON."""

    verdict: Verdict
    checks: list[Check]
    notes: list[Line]
    error: str = ""  # of a run of the tool's own

    def lines(self) -> list[Line]:
        lines = [Line("verdict", self.verdict.text)]
        lines += [Line("to settle it", way_on) for way_on in self.verdict.ways_on]
        lines += [Line(check.label, check.text) for check in self.checks if check.text]
        return lines + self.notes

    def as_json(self) -> dict[str, Any]:
        """The object that --json writes; docs/equivalence.md explains its names, which stay."""
        states = {True: "right", False: "wrong", None: "not found out"}
        checks = []
        for check in self.checks:
            state: str = states[check.is_right]
            answer: dict[str, Any] = {"name": check.label, "state": state, "text": check.text}
            for field, value in zip(Figures._fields, check.figures or (None, None), strict=True):
                answer[field] = value if value is None or math.isfinite(value) else None
            checks.append(answer | {"but_for": check.but or None, "why": check.why or None})
        name = ["same", "different", "not found out"][self.verdict.code]
        notices = max((check.limit for check in self.checks), default=0.0) or None
        found = {"verdict": name, "text": self.verdict.text, "links": checks, "notices": notices}
        more = {"to_settle_it": self.verdict.ways_on, "error_of_own_run": self.error or None}
        return found | {"notes": [note.text for note in self.notes]} | more


def problem(checks: list[Check], other: str) -> Verdict | None:
    """The verdict if a check is wrong, or else if one is not known; None if all are right."""
    if wrong := [check for check in checks if check.is_right is False]:
        names = " in: " + ", ".join(check.label for check in wrong)
        what = f": {wrong[0].why}" if len(wrong) == 1 and wrong[0].why else names
        return Verdict(DIFFERENT, f"DIFFERENT from {other}{what}")
    labels: dict[str, list[str]] = {}  # by what is not known
    open_checks = [check for check in checks if check.is_right is None]
    for check in open_checks:
        labels.setdefault(check.why, []).append(check.label)
    reasons = [f"{', '.join(labels[why])}: {why}" for why in labels]
    ways_on = tuple(dict.fromkeys(check.way_on for check in open_checks if check.way_on))
    return Verdict(UNKNOWN, f"INCONCLUSIVE: {'; '.join(reasons)}", ways_on) if reasons else None


def unknown(reason: Reason) -> Answer:
    return Answer(Verdict(UNKNOWN, f"INCONCLUSIVE: {reason.sentence}", (reason.way_on,)), [], [])


def conclude(checks: list[Check], steps: int, other: str = "one process") -> Verdict:
    """The verdict from the checks of so many steps.  other: what N processes are compared with."""
    if bad := problem(checks, other):
        return bad
    limit = max(check.limit for check in checks)
    unseen = f"differences below {limit:.0e} would not be detected"
    if limit > limits.SEEN:
        way_on = "compare a copy that computes in float32, with another optimizer (torch.optim.SGD)"
        return Verdict(UNKNOWN, f"INCONCLUSIVE: nothing differs, but {unseen}", (way_on,))
    causes = [check.but + BY_DESIGN.get(check.but, "") for check in checks if check.but]
    what = "up to rounding"
    if causes:
        what = f"except for {' and '.join(causes)}"
        unseen = f"apart from that, {unseen}"
    return Verdict(SAME, f"THE SAME as {other}, {what}, in the {steps} steps compared ({unseen})")


def refusal_in(error: str) -> str:
    """The reason in the error of a run that this tool refused; "" if it did not refuse it."""
    text = error.partition("failed first: ")[2] or error
    return text.partition("equivalence: ")[2] if text.startswith("equivalence: ") else ""


def made_of(factors: list[float]) -> str:
    rounded = [0 if abs(factor) < limits.EQUAL else factor for factor in factors]
    return " + ".join(f"{factor:.3g} x rank {rank}'s" for rank, factor in enumerate(rounded))


def percent(factors: list[float]) -> str:
    total = sum(factors) or 1
    return " and ".join(f"{100 * factor / total:.1f} %" for factor in factors)


def span(counts: list[int]) -> str:
    """The numbers from the smallest to the largest."""
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)}-{max(counts)}"


def some_of(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
