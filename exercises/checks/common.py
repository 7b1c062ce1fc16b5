"""Functions for several checks: compare answers, count collectives, wait without communication."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import distributed as dist

TOLERANCE = 1e-9  # all numbers are float64, of a size of about 1
FLOAT32 = 1e-6  # float32's rounding errors are smaller than this
Answer = dict[str, Any]  # of one rank: the name of a part -> a tensor, or what the function returned instead

# ------------------------------------------------------------------------------------------------------------ compare


def as_answer(value: Any) -> Any:
    """Return the value as a new tensor, if it is a tensor or a number; None for None; else the name of its type."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (int, float)):
        return torch.tensor(value, dtype=torch.float64)
    return None if value is None else f"a {type(value).__name__}"


def distance(answer: Any, right: Any) -> float:
    """Return the largest difference between two tensors' elements, or infinity if they can't be compared."""
    if not (isinstance(answer, torch.Tensor) and isinstance(right, torch.Tensor)):
        return 0.0 if type(answer) is type(right) and answer == right else math.inf
    if answer.shape != right.shape or not torch.equal(answer.isnan(), right.isnan()):
        return math.inf
    difference = (answer.double() - right.double()).nan_to_num(0.0).abs()
    return difference.max().item() if difference.numel() else 0.0


def farthest(answers: list[Answer], right: list[Answer], only: str = "") -> tuple[float, int, str]:
    """Return the largest distance among all ranks and parts (or in one part only), its rank, and its part."""
    found = [
        (distance(answer[part], right[rank][part]), rank, part)
        for rank, answer in enumerate(answers)
        for part in ([only] if only else right[rank])
    ]
    return max(found, key=lambda entry: entry[0])


def compare(answers: list[Answer], right: list[Answer], wrong: dict[str, list[Answer]]) -> str:
    """Return "" if all ranks have the correct answer, else where it is wrong, and which known mistake leads to it."""
    most = farthest(answers, right)[0]
    if most <= TOLERANCE:
        return ""
    # The first part that is wrong, because later errors may follow from it.
    of_parts = (farthest(answers, right, part) for part in right[0])
    first, rank, part = next(found for found in of_parts if found[0] > TOLERANCE)
    answer, expected = answers[rank][part], right[rank][part]
    if expected is None:
        text = f"rank {rank} has a tensor where None is expected ({part})"
    elif not isinstance(answer, torch.Tensor):
        text = f"rank {rank} has {answer}, not a tensor ({part})"
    elif answer.shape != expected.shape:
        text = f"shape {list(answer.shape)}, expected {list(expected.shape)} (rank {rank}, {part})"
    elif first == math.inf:
        text = f"not a number (rank {rank}, {part})"
    elif answer.numel() == 1:
        text = f"distance {first:.2g} (rank {rank}, {part}: {answer.item():.6g}, expected {expected.item():.6g})"
    else:
        text = f"distance {first:.2g} (rank {rank}, {part})"
    for way, values in wrong.items():
        if farthest(answers, values)[0] <= TOLERANCE:
            return f"{text}. Likely mistake: {way}"
    return f"{text}. Likely mistake: it is computed in float32" if most < FLOAT32 else text


# ----------------------------------------------------------------------------------------------------------- messages


class Messages(TorchDispatchMode):
    """Record the communication inside `with`, by Python or by DDP: (kind, number of elements, to which rank)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, torch would import its compiler, which takes seconds in each process

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, name = operation.name().partition("::")
        if library == "c10d":
            kind = name.strip("_")
            tensors = args[1] if kind.startswith("allgather") else args[0]  # its first argument is the outputs
            tensors = tensors if isinstance(tensors, list) else [tensors]
            elements = sum(tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor))
            # distributed.py first compares the calls, by an all-gather of 16 bytes from each rank.
            is_check = kind.startswith("allgather") and elements == 16 and tensors[0].dtype == torch.uint8
            if not is_check:
                self.sent.append((kind, elements, args[2] if kind == "send" else -1))
        return operation(*args, **(kwargs or {}))

    def count(self, *kinds: str) -> int:
        return sum(kind in kinds for kind, *_ in self.sent)


# --------------------------------------------------------------------------------------------------------------- wait


def wait_for_the_others(folder: str, name: str) -> None:
    """Wait for all ranks by means of files, because messages that nobody has received may be in the way."""
    Path(folder, f"{name}.{dist.get_rank()}").touch()
    while not all(Path(folder, f"{name}.{rank}").exists() for rank in range(dist.get_world_size())):
        time.sleep(0.005)
