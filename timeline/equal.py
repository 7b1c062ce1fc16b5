"""Says whether weights, inputs and gradients are equal on all ranks: yes, no, or not seen."""

import math
from collections.abc import Iterator

from timeline import compare
from timeline.data import Recording, counted
from timeline.gradients import Gradients

SENDS = {"send", "recv"}
NOT_IN_DATA = "a mistake in data parallelism, but not in tensor parallelism or within local SGD"


def equalities(recordings: list[Recording], last: int) -> Iterator[tuple[str, str]]:
    """(subject, sentence)."""
    weights = [recording["weights"] for recording in recordings]
    exchange = exchange_of(recordings)
    if not compare.common_names(weights):
        text = "the ranks have no tensor in common"
        yield "weights", f"{text}: {exchange}" if exchange else text
        return
    steps = sorted({recording["steps"] for recording in recordings})
    if len(steps) > 1:
        text = f"not seen: the ranks ended at different steps ({steps[0]} and {steps[-1]})"
        yield "weights", text
    else:
        yield "weights", weights_in_words(recordings, weights, exchange, last)
    if any(not (one["gradients"].digests or one["inputs"]) for one in recordings):
        text = "and gradients: not looked at, as the program ended before all steps were recorded"
        yield "inputs", text
        return
    yield "inputs", inputs_in_words(recordings, exchange)
    text = gradients_in_words(recordings, exchange)
    if text:
        yield "gradients", text


def exchange_of(recordings: list[Recording]) -> str:
    """What the ranks exchange in place of gradients, in words; else an empty text."""
    kinds = set()
    for recording in recordings:
        kinds |= {message["kind"] for message in recording["messages"]}
    if kinds and kinds <= SENDS:
        return "they send to each other, as the stages of a pipeline do"
    if any(kind.startswith("alltoall") for kind in kinds):
        return "they exchange by all-to-all, as experts do"
    return ""


def weights_in_words(
    recordings: list[Recording], weights: list[dict], exchange: str, last: int
) -> str:
    names = compare.common_names(weights)
    if all(weights[0][name] == "sharded" for name in names):
        return f"{len(names)} tensors are sharded: each rank has its part (FSDP)"
    broken = [one for one in recordings if one["not_finite"]]
    different = [name for name in names if compare.is_different(weights, name)]
    if broken:
        one = broken[0]
        text = f"not finite on {len(broken)} of {len(recordings)} ranks after step {last + 1}"
        return f"{text} (rank {one['rank']}: {one['not_finite'][0]})"
    if not different:
        text = f"{counted(len(names), 'tensor')} equal on all ranks after step {last + 1}"
        return f"{text}: right in data parallelism"
    gap = compare.largest_difference(recordings, different[0])
    by = f"by up to {gap:.3g}" if gap is not None else "by how much was not looked at"
    text = f"{len(different)} of {len(names)} tensors differ after step {last + 1} (the first, "
    return f"{text}{different[0]}, {by}): {exchange or NOT_IN_DATA}"


def inputs_in_words(recordings: list[Recording], exchange: str) -> str:
    """Whether the ranks trained on equal inputs."""
    inputs = {recording["inputs"] for recording in recordings}
    if "" in inputs:
        return "not seen: no forward pass of the training got a tensor from outside of its model"
    if exchange:
        return "equal on all ranks" if len(inputs) == 1 else "different on the ranks"
    if len(inputs) == 1:
        return "equal on all ranks: a mistake in data parallelism, but right in tensor parallelism"
    if len(inputs) < len(recordings):
        text = "equal on some ranks, different on others: right if those share a model"
        return f"{text} (tensor parallelism), else a mistake"
    text = "different on all ranks"
    if any(recording["sampler"] == "RandomSampler" for recording in recordings):
        return (
            f"{text}, but drawn from the whole data set (DataLoader's shuffle=True, no sampler): a "
            "mistake in data parallelism, unless each rank has a data set of its own"
        )
    return f"{text}: right in data parallelism, if a sampler has shared them out"


# --------------------------------------------------------------------------------- the gradients


def gradients_in_words(recordings: list[Recording], exchange: str) -> str:
    """What is known of the gradients; an empty text if there is nothing to say."""
    gradients = [recording["gradients"] for recording in recordings]
    digests = [one.digests for one in gradients]
    names = compare.common_names(digests)
    if not names or all(digests[0][name] == "sharded" for name in names):
        return ""
    broken = [str(r["rank"]) for r in recordings if not r["gradients"].is_finite]
    if broken:
        return f"not finite (NaN or infinite) on rank {', '.join(broken)}"
    if all(one.is_zero for one in gradients):
        return "all zero on all ranks: nothing is trained"
    different = compare.first_difference(digests)
    sent = any(recording["messages"] for recording in recordings)
    silence = "" if sent else ", and no message was sent"
    if different and exchange:
        return f"different on the ranks, {different} first: {exchange}"
    if different:
        text = f"different on the ranks, {different} first{silence}, so not averaged"
        return f"{text}: a mistake in data parallelism, but not in ZeRO or local SGD"
    some = sorted(set().union(*digests) - set(names))
    if some:
        text = f"{counted(len(some), 'tensor')} with a gradient on some ranks only ({some[0]})"
        return f"{text}; the others are equal"
    return f"equal on all ranks{silence}{made_of(gradients)}"


def made_of(gradients: list[Gradients]) -> str:
    """How the optimizers' gradients are made of those that each rank has computed."""
    names = compare.common_names([gradients[0].final, *(one.own for one in gradients)])
    if not names:
        return "; whether they are the mean of the ranks' own was not seen"
    final = [gradients[0].final[name] for name in names]
    own = []
    for one in gradients:
        own.append([one.own[name] for name in names])
    if all(apart(one, own[0]) < 1e-4 for one in own):
        return ", as each rank computes the same"
    mean = [sum(same) / len(own) for same in zip(*own, strict=True)]
    times = dot(final, mean) / max(dot(mean, mean), 1e-300)
    is_multiple = apart(final, [times * value for value in mean]) < 0.02
    if is_multiple and abs(times - 1) < 0.005:
        return ": the mean of the ranks' own, right in data parallelism"
    for rank, one in enumerate(own):
        if apart(final, one) < 1e-4:
            return f": those of rank {rank} alone, not the mean of all"
    if is_multiple and abs(times / len(own) - 1) < 0.005:
        return ": the sum of the ranks' own, not the mean"
    if is_multiple:
        return f": {times:.3g} times the mean of the ranks' own (clipped, or unscaled?)"
    return ", but not the mean of the ranks' own (each value clipped, or changed otherwise?)"


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def apart(one: list[float], other: list[float]) -> float:
    """The length of the difference, relative to that of the second."""
    difference = [a - b for a, b in zip(one, other, strict=True)]
    return math.sqrt(dot(difference, difference) / max(dot(other, other), 1e-300))
