"""The states of all random generators that a program usually draws from."""

import random
from typing import NamedTuple

import numpy
import torch


class RandomState(NamedTuple):
    """Of torch (the CPU's and this process's GPU's), Python and numpy."""

    cpu: torch.Tensor
    gpu: torch.Tensor | None
    python: tuple
    numpy: tuple

    def other_than(self, other: "RandomState") -> set[str]:
        """The generators that are in another state."""
        names = set()
        if not self.cpu.equal(other.cpu):
            names.add("cpu")
        if self.gpu is not None and other.gpu is not None and not self.gpu.equal(other.gpu):
            names.add("gpu")
        if self.python != other.python:
            names.add("python")
        if self.numpy[2] != other.numpy[2] or (self.numpy[1] != other.numpy[1]).any():
            names.add("numpy")
        return names


def random_state() -> RandomState:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return RandomState(torch.get_rng_state(), gpu, random.getstate(), numpy.random.get_state())


def set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state.cpu)
    random.setstate(state.python)
    numpy.random.set_state(state.numpy)
    if state.gpu is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.gpu)
