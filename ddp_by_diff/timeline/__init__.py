"""See what each process does in a step: runs a program, records steps, draws one, says it.

    python -m ddp_by_diff.timeline mnist_ddp.py --dataset synthetic     # 2 processes, or 1 per GPU
    python -m ddp_by_diff.timeline --steps-shown 8 -m variants.mnist_local_sgd    # a module
    ddp-timeline train.py --my-flags                        # your program: pip install PATH first
    torchrun --nproc_per_node=2 -m ddp_by_diff.timeline train.py

PATH is where this project lies.  Under torchrun no other file is needed.

The program is not changed; it needs an optimizer of torch.optim.  timeline.svg has a lane for each
rank: forward, backward, optimizer, waiting; below them messages and memory.  timeline.json has
torch's own trace of all ranks, for https://ui.perfetto.dev; with --ops each operation, too.
docs/timeline.md says how to read it.

A step begins after the optimizer step before it, where the DataLoader is asked for the next batch,
if there is one.  An evaluation that follows a step belongs to it.  The first steps are left out,
the next ones run without profiling, then some are recorded, then the program is left.  Before torch
2.14 the sizes of messages are not seen.
On a GPU a lane shows what its kernels do.  Where it has nothing to compute, the lane shows what the
process does then; a hatch of its own says that a phase launches no kernel.  Where only NCCL's
kernels run, the GPU waits.  All this was tried on synthetic traces and on simulated GPUs.
"""

# The files in the order of the data; each imports only those before it, and says in its first line
# what it does: data, lanes, gpu, messages, waits, memory, events, profiler, calls, record; compare,
# steps, habit, why, say, figures, picture, svg, draw, trace, show.  record notes while the program
# runs, and calls events at its end; the files after it look at all ranks.
