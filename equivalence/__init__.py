"""Is my training with N processes that of one?  Runs any program twice, unchanged, and says.

    python -m equivalence mnist_ddp.py --dataset synthetic     # two processes, or one for each GPU
    python -m equivalence --nproc 3 -m variants.mnist_fsdp     # a module
    python PATH/equivalence train.py --my-flags                # from any folder
    torchrun --nproc_per_node=2 PATH/equivalence train.py      # torchrun starts the processes

First the program runs with N processes, for a few steps.  Noted are the batches that its
DataLoaders return, the weights before each step, and the gradients that the optimizer gets.  Then
it runs in one process, where each step is a test of its own: it gets the weights that the N
processes had, and their examples: all of them in one batch, or one rank's share.  So differences
don't add up, and it does not matter how the program shuffles.

    exit code   0  the same, up to rounding (or but for BatchNorm, or dropout)
                1  different
                2  it could not be found out, or the program failed

docs/equivalence.md says how to read the answer.  On GPUs each rank uses its own, and the run in one
process the first; that was tried on simulated GPUs only, not on real ones.
"""

# The files, as the data flow:
#
#   __main__.py   the command line
#   record.py     run A: what each process notes while the program runs; notes.py
#   plan.py       which tests follow from the notes
#   alone.py      run B, in a process of its own; replay.py: what happens in it
#   evidence.py   both runs side by side, and the yardsticks
#   gradients.py  the two questions about gradients
#   verdict.py    the answer
#   batches.py, vectors.py   arithmetic on examples, and on gradients
