"""Each rank's own gradients, and those that its optimizer gets."""

import dataclasses
import zlib
from collections.abc import Callable, Iterable

import torch

from instruments.tensors import digest, is_sharded, local

Named = Iterable[tuple[str, torch.Tensor]]


@dataclasses.dataclass
class Gradients:
    """The gradients of the step after the recorded ones.

    A projection is the sum of a tensor's elements, each times a random number, the same on all
    ranks.  So the projection of the ranks' mean is the mean of their projections: that says
    whether gradients were averaged, without sending them.
    """

    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    final: dict[str, float] = dataclasses.field(default_factory=dict)  # as the optimizer gets them
    own: dict[str, float] = dataclasses.field(default_factory=dict)  # before any message
    is_zero: bool = False
    is_finite: bool = True

    def watch(self, parameters: Named) -> None:
        """Note what backward computes here, before DDP or the program sends it."""
        for name, parameter in parameters:
            if parameter.requires_grad and not is_sharded(parameter):
                parameter.register_hook(self.adding(name, parameter))

    def adding(self, name: str, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def add(gradient: torch.Tensor) -> None:
            before = self.own.get(name, 0.0)
            if parameter.grad is None or not local(parameter.grad).to_dense().any():
                before = 0.0  # the program has thrown away what was there
            self.own[name] = before + projection(name, gradient)

        return add

    def note(self, parameters: Named) -> None:
        """Note what the optimizer gets."""
        found = []
        for name, parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            self.digests[name] = digest(gradient)
            if not is_sharded(gradient):
                self.final[name] = projection(name, gradient)
            found.append(local(gradient).to_dense())
        self.is_zero = bool(found) and not any(bool(gradient.any()) for gradient in found)
        self.is_finite = all(bool(gradient.isfinite().all()) for gradient in found)


def projection(name: str, gradient: torch.Tensor) -> float:
    values = local(gradient).to_dense().cpu().double()
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    factors = torch.randn(values.shape, generator=draw, dtype=torch.float64)
    return (values * factors).sum().item()
