"""NVIDIA Apex's old mixed precision under the names of torch.amp, for readers of older code.

torch.amp has replaced it.  Apex removed apex.amp on 2025-05-08 (NVIDIA/apex pull request 1896); the last tags that have
it are 25.04 and 25.05.  And `pip install apex` installs another package of that name.  `check` tells these cases apart.

    check(parser.error)                                                # before anything starts
    model, optimizer, scaler = initialize(model, optimizer, "O2")      # before DistributedDataParallel
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

INSTALL = "git clone -b 25.04 https://github.com/NVIDIA/apex and pip install it from there, or use --amp native"


def check(error: Callable[[str], None]) -> None:
    """Call `error` with one line that says what is wrong and what to do, if apex.amp can't be used here."""
    spec = importlib.util.find_spec("apex")
    if spec is None or spec.origin is None:  # without origin: a folder of that name, a clone that isn't installed
        error(f"Apex is not installed: {INSTALL}")
    # Looked for on the disk: importing another apex, or an old one under a new torch, may fail.
    parts = {path.name for folder in spec.submodule_search_locations or () for path in Path(folder).iterdir()}
    if "multi_tensor_apply" not in parts:  # NVIDIA's has had it in every version
        error(f"the installed package apex is not NVIDIA's: pip uninstall apex, then {INSTALL}")
    if "amp" not in parts:
        error(f"this Apex has no apex.amp, which NVIDIA removed after 25.05: {INSTALL}")
    if not torch.cuda.is_available():
        error("Apex needs a CUDA GPU, and none is visible: use --amp native")


class ApexScaler:
    """apex.amp's loss scaling with the methods of torch.amp.GradScaler: one training loop serves both."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def scale(self, loss: torch.Tensor) -> "ApexScaler":
        self.loss = loss
        return self

    def backward(self) -> None:
        from apex import amp

        with amp.scale_loss(self.loss, self.optimizer) as scaled:
            scaled.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()  # Apex has patched it: it skips the step after an overflow

    def update(self) -> None:
        """Nothing: scale_loss has adapted the scale already."""


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, opt_level: str
) -> tuple[nn.Module, torch.optim.Optimizer, ApexScaler]:
    """apex.amp.initialize, and the scaler.  opt_level: O0 fp32, O1 patched functions, O2 half model with fp32 master
    weights, O3 half everything.  The model must be on its GPU, and not yet wrapped."""
    from apex import amp

    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    return model, optimizer, ApexScaler(optimizer)
