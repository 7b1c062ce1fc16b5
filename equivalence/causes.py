"""Causes of a difference in link 2: layers, rounding, a factor, or batches joined wrongly."""

from equivalence import limits, vectors
from equivalence.batches import counts_up, unequal_rows
from equivalence.facts import GOT, PARTS, Facts
from equivalence.notes import Alone
from equivalence.one_batch import Look, Looks, gradient, sides
from equivalence.tensors import tensors_in
from equivalence.verdict import Figures, Link, some_of
from equivalence.view import are_joined_rightly

TOGETHER = "the loss, or a layer, depends on which examples are in a batch together, or on how many"
NOT_SEEN = "the ranks' own gradients were not seen"
OF_PARTS = "the ranks compute parts of one batch, and their gradients don't add up to the batch's"
ALONE_RIGHT = "each rank's examples, computed alone, give that rank's gradient"
OWN_DIFFERS = "a rank's examples, computed in one process, don't give that rank's gradient"
ELSEWHERE = "it depends on other ranks, on padding, or on something unseen"


def label(facts: Facts) -> str:
    """The name of link 2; another one if the ranks' own gradients were not seen."""
    return "gradients" if facts.gradients == GOT else "one batch"


def figures_of(look: Look) -> Figures:
    return Figures(look.worst.far, look.worst.limit)


def unknown(facts: Facts, why: str, text: str = "") -> Link:
    """Link 2, not found out.  why: the reason.  text: the difference that was measured."""
    return Link(label(facts), None, f"not found out: it is {text}" if text else "", why=why)


def right(look: Look) -> Link:
    facts, figures = look.facts, figures_of(look)
    text = f"the ranks' gradients make the gradient of all {look.total} examples in one batch"
    if facts.gradients == GOT:
        text = "the optimizers get one process's gradients"
    return Link(label(facts), True, f"right: {text} {figures}", look.limit, figures=figures)


def different(looks: Looks, look: Look) -> tuple[Link, Look | None]:
    """Link 2 if gradients differ; and the look without BatchNorm or dropout, if that is right.

    A kind of layers is named as the cause only if the difference is gone without it alone.
    """
    facts, worst = look.facts, look.worst
    text = f"different from the gradient of all {look.total} examples in one batch"
    if facts.gradients == GOT:
        text = "different from one process's"
    text += f" {figures_of(look)}"
    text += f", in {worst.name}" if worst.name else ""
    kinds = sorted(facts.kinds)
    if kinds:
        all_kinds = " and ".join(kinds)
        without = without_kinds(looks, kinds)
        if without is None:
            return unknown(facts, f"the program failed without {all_kinds}", text), None
        look, figures = without, figures_of(without)
        if look.is_right:
            cause = " and ".join(look.left_out)
            text += f"; right without {cause} {figures}"
            return Link(label(facts), True, text, look.limit, cause, figures=figures), look
        text += f"; different without {all_kinds}, too {figures}"
    return unexplained(looks, look, text)._replace(figures=figures_of(look)), None


def without_kinds(looks: Looks, kinds: list[str]) -> Look | None:
    """The look without all these layers; or without one kind, if that alone is the cause."""
    without_all = looks.without(tuple(kinds))
    if without_all is None or not without_all.is_right or len(kinds) == 1:
        return without_all
    for kind in kinds:
        look = looks.without((kind,))
        if look is None or look.is_right:
            return look
    return without_all


def unexplained(looks: Looks, look: Look, text: str) -> Link:
    """Link 2 if layers don't explain the difference: wrong, or did joining batches cause it?"""
    facts = look.facts
    if any(rank.steps[0].draws for rank in facts.ranks):
        why = "each step draws random numbers, and one process draws others"
        return unknown(facts, why, text)
    look = looks.with_rounding(look)
    if look.worst.far <= limits.YARDSTICKS * look.worst.rounding:
        why = "rounding, or another order of the same examples, changes a gradient by"
        return unknown(facts, f"{why} {look.worst.rounding:.0e}", text)
    is_direct = facts.gradients == GOT
    if multiple := multiples(look):
        what = "what the optimizers get" if is_direct else "the mean of the ranks' gradients"
        return Link(label(facts), False, f"WRONG: {what} is {multiple}")
    if is_direct and facts.model != PARTS:
        return unknown(facts, NOT_SEEN, text)
    if reason := why_not_joined_well(look) or is_direct and why_not_whole(look):
        return unknown(facts, reason, text)
    if is_direct or len(facts.distinct) == 1 or look.total < facts.total:
        return Link(label(facts), False, text, why="" if is_direct else OF_PARTS)
    if looks.runs.per_step:
        why = "one process takes another number of batches in a step"
        return Link(label(facts), False, text) if look.is_given else unknown(facts, why, text)
    is_own = shares_give_their_own(looks, look)
    if is_own:
        return Link(label(facts), False, f"{text}; {ALONE_RIGHT}", why=TOGETHER)
    if look.is_given and is_own is not None:  # nothing was joined
        return Link(label(facts), False, text, why=OWN_DIFFERS)
    return unknown(facts, f"{OWN_DIFFERS}: {ELSEWHERE}", text)


def why_not_joined(facts: Facts) -> str:
    """Why the ranks' batches can't be made one; "" if they can."""
    for key in facts.keys:
        shares = [rank.events.get(key, []) for rank in facts.distinct]
        for events in zip(*shares, strict=False):
            if all(event.examples for event in events):
                continue  # the program's own collate_fn makes it
            if sizes := unequal_rows([event.value for event in events]):
                return f"the tensors of a batch have {sizes} rows, not one for each example"
    return ""


def multiples(look: Look) -> str:
    """Each tensor as a multiple of one process's, in words: no batch joined wrongly makes these."""
    actual, wanted = sides(look.facts, look.alone.notes, look.worst_step.step)
    names: dict[float, list[str]] = {}
    for name, goal in wanted.items():
        fit = vectors.fit({name: actual.get(name, goal * 0)}, [{name: goal}])
        is_one = abs(fit.factors[0] - 1) <= limits.EQUAL
        if fit.left > limits.EQUAL or goal.numel() < 2 and not is_one:  # any number is a multiple
            return ""
        names.setdefault(round(fit.factors[0], 3), []).append(name)
    right = names.pop(1.0, [])
    texts = []
    for times, some in names.items():
        place = f" of {some_of(some)}" if right or len(names) > 1 else ""
        texts.append(f"{times:.3g} times one process's gradient{place}")
    return " and ".join(texts) + " (the others are right)" * bool(texts and right)


def why_not_joined_well(look: Look) -> str:
    """Why the one batch, made of the ranks' batches by a guess, may be wrong; "" if it is right."""
    facts = look.facts
    if are_ragged(facts):
        return "examples have different shapes: how a batch is padded may be what differs"
    if look.is_given:
        return ""
    if look.alone.is_mixed:
        return "some batches in one process are the program's own, and others are not"
    rounding = max(step.apart.most_rounding for step in look.steps)
    if rounding > limits.YARDSTICKS * facts.rounding_limit:
        return f"in another order the examples have another gradient (difference {rounding:.0e})"
    for rank in facts.ranks:
        for events in rank.events.values():
            if any(counts_up(event.value) for event in events[:1] if not event.examples):
                return "a tensor numbers groups of rows, and can't be joined with another rank's"
    return ""


def why_not_whole(look: Look) -> str:
    """Why the ranks' parts may not be put together rightly; "" if one process has them so, too."""
    if not look.is_given:
        return "one process has other batches than the ranks together"
    if not are_joined_rightly(look.facts, look.alone):
        return "one process begins with other weights than the ranks' parts make"
    return ""


def shares_give_their_own(looks: Looks, look: Look) -> bool | None:
    """Whether each rank's examples, alone in one process, give its own gradient; None: not run."""
    for turn in range(len(look.facts.distinct)):
        share = looks.runs.alone(look.facts, "one share", look.left_out, turn)
        if share is None:
            return None
        if not is_its_own(look, share, turn):
            return False
    return True


def is_its_own(look: Look, share: Alone, turn: int) -> bool:
    """Whether a run with one rank's examples gives that rank's own gradient, or a multiple.

    If not, padding or joining may be wrong.  turn: see Facts.share_in_turn.
    """
    facts = look.facts
    for k in facts.comparable:
        rank = facts.distinct[facts.share_in_turn(k, turn)]
        own = vectors.only(rank.steps[k].own, facts.comparable_names(k))
        wanted = vectors.only(gradient(facts, share.notes, k, "own"), set(own))
        limit = max(facts.rounding_limit / limits.CLEARLY, limits.EQUAL)
        if vectors.fit(own, [wanted]).left > limit:
            return False
    return True


def are_ragged(facts: Facts) -> bool:
    """Whether the program's own collate_fn makes batches of examples of different shapes."""
    shapes: dict[str, set] = {key: set() for key in facts.keys}
    for rank in facts.ranks:
        for key, known in shapes.items():
            for event in rank.events.get(key, []):
                for example in event.examples or []:
                    known.add(tuple(tensor.shape for tensor in tensors_in(example)))
    return any(len(known) > 1 for known in shapes.values())
