"""Is the mean of the shares' gradients that of the whole batch?

It isn't with BatchNorm, or a contrastive loss.
"""

from typing import NamedTuple

from equivalence import vectors
from equivalence.evidence import Evidence
from equivalence.gradients import Line
from equivalence.plan import FACTOR, Test

KINK = 0.01  # one step of several may be off by so much, where rounding crosses a ReLU's corner


class OneBatch(NamedTuple):
    line: Line
    cause: str = ""  # "BatchNorm", "dropout", "random numbers", if that explains the difference
    unknown: str = ""  # why that can't be found out


def one_batch(evidence: Evidence) -> OneBatch:
    wanted = evidence.raws("whole")
    rounding = evidence.rounding()
    made = [evidence.plan.mean(step, evidence.raw) for step in evidence.steps]
    far = vectors.distances(made, wanted)
    off = vectors.median(far)
    if off <= FACTOR * rounding and max(far) > KINK:
        off = max(far)
    batch = f"all{number_of_examples(evidence)} examples in one batch"
    if min(far) <= FACTOR * rounding < off:
        wrong = [str(k + 1) for k in evidence.steps if far[k] > FACTOR * rounding]
        batch += f" in step {', '.join(wrong)}"
    apart = f"apart by {off:.0e}; rounding alone makes {rounding:.0e}"
    if off <= FACTOR * rounding:
        return OneBatch(Line("one batch", f"right: that is the gradient of {batch} ({apart})"))
    cause = ""
    left = without_layers(evidence)
    kinds = sorted(evidence.result.notes.kinds)  # BatchNorm first
    if left is not None and left <= FACTOR * evidence.rounding(is_neutral=True):
        cause = kinds[0] if kinds else "dropout"
        apart += f"; without {cause} {left:.0e}"
    elif evidence.changed_by("reseeded") > off / FACTOR:
        if left is not None:
            why = (
                f"without {' and '.join(kinds)} the gradient still differs from that of one batch "
            )
            why += f"(apart by {left:.0e}), and the step draws random numbers: switch them off"
            return OneBatch(Line("one batch", f"different from {batch} ({apart})"), unknown=why)
        cause = "random numbers"
    elif left is None and any(rank.steps[0].draws for rank in evidence.plan.ranks):
        why = "the step draws random numbers, which may be why its gradient is not that of one "
        why += "batch: switch them off"
        return OneBatch(Line("one batch", f"different from {batch} ({apart})"), unknown=why)
    return OneBatch(Line("one batch", f"different from {batch} ({apart})", True), cause)


def number_of_examples(evidence: Evidence) -> str:
    """With a space before it; "" if the steps have different ones."""
    totals = {evidence.examples(step) for step in evidence.steps}
    return f" {totals.pop()}" if len(totals) == 1 else ""


def without_layers(evidence: Evidence) -> float | None:
    """The same distance without BatchNorm and dropout; None if that was not tried."""
    if Test("whole", 0, 0, True) not in evidence.result.steps:
        return None
    made = []
    for step in evidence.steps:
        shares = [evidence.raw(Test("share", step, c, True)) for c in evidence.shares]
        weights = evidence.plan.weights_of_shares(step, evidence.raw)
        made.append(vectors.combine(shares, weights))
    return vectors.median(vectors.distances(made, evidence.raws("whole", is_neutral=True)))
