"""A solution of exercise 10: see exercises/stop_together.py."""

import signal

import torch

import distributed as dist


def stop_together(steps, train_step):
    told = torch.tensor(0)

    def note(number, frame):
        told.fill_(1)

    signal.signal(signal.SIGTERM, note)
    for step in range(steps):
        train_step(step)
        if dist.reduce(told, "max"):  # was any rank asked?  All ranks get the same answer, so all stop here
            return step + 1
    return steps
