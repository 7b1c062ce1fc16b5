"""Exercise 10: stop after the same step, on SIGTERM to any rank.   python -m exercises.check stop_together"""

import signal
from collections.abc import Callable

import torch

import distributed as dist


def stop_together(steps: int, train_step: Callable[[int], None]) -> int:
    """Call train_step(0), train_step(1), ..., at most `steps` of them, and return how many steps were made.

    A cluster that needs the machine back sends SIGTERM, perhaps to only one rank.  Then all ranks must stop after the
    step in which the signal was received.  A rank that stops alone leaves the others waiting, because train_step calls
    a collective.  After signal.signal(signal.SIGTERM, function), Python calls function(number, frame) for each signal.
    Without a signal, make all steps.  stop_together may be called several times in one process.
    """
    raise NotImplementedError
