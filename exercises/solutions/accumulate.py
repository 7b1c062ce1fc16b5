"""A solution of exercise 7: see exercises/accumulate.py."""

import contextlib

import torch.nn.functional as F


def accumulate(model, inputs, targets, parts):
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)  # with one process, the model is not wrapped in DDP
    micro_batches = list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))
    for number, (x, y) in enumerate(micro_batches, 1):
        with no_sync() if number < len(micro_batches) else contextlib.nullcontext():  # the last one averages
            loss = F.mse_loss(model(x), y) * len(y) / len(targets)  # its share of the mean over the batch
            loss.backward()
