"""Check whether training on N processes computes the same as on one.  Your program is unchanged.

    python -m ddp_by_diff.equivalence mnist_ddp.py --dataset synthetic  # 2 processes, or 1 per GPU
    python -m ddp_by_diff.equivalence --nproc 3 -m variants.mnist_fsdp  # a module, on 3 processes
    ddp-equivalence train.py --my-flags                     # your program: pip install PATH first
    ddp-equivalence --epoch train.py                        # is each example used once?
    torchrun --nproc_per_node=2 -m ddp_by_diff.equivalence train.py

Every training step is checked in three parts, each with equal input on N processes and on one:

    averaging   do the optimizers receive the mean of the ranks' gradients?
    one batch   is this mean the gradient of all examples in one batch?
    weights     do the weights then change as in one process?

Exit code: 0 the same, up to rounding (or except for BatchNorm or dropout); 1 different;
2 inconclusive, or the program failed.  docs/equivalence.md explains the output.
"""

# A *rank* is one of the N processes, and a run in one process is *alone*.  A local gradient is
# *own* here, and a received one is what an optimizer has *got*.  An *event* is data that come in,
# under a *key* such as "loader 0".  A *look* is the ranks' notes beside a run alone.  That is the
# *same job* if it takes as many examples by itself as all ranks do: runs.py gives it the flags.  A
# *check* is a question with its answer.
#
#   __main__.py        the command line
#   observe.py         observers of a program: inputs.py, gradients.py, layers.py
#   loaders.py         which DataLoader a batch comes from; epoch.py: --epoch
#   notes.py           the notes of a process; facts.py: the ranks' side by side, copies or parts
#   runs.py            more runs; source.py: their data; formats.py: in float64
#   judge.py           what is asked: examples.py, averaging.py, one_batch.py, weights.py;
#                      verdict.py: the answer
#   limits.py          all thresholds; vectors.py, batches.py: arithmetic
