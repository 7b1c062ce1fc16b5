"""See what each process does in a step: runs a program, records steps, draws one, says it.

    python -m timeline mnist_ddp.py --dataset synthetic              # two processes, or one per GPU
    python -m timeline --steps-shown 8 -m variants.mnist_local_sgd   # a module; eight steps
    torchrun --nproc_per_node=2 PATH/timeline train.py --my-flags    # any program, from any folder
    python PATH/timeline train.py                                    # the same without torchrun
    python -m timeline --draw a.json b.json --out both               # recordings, on one scale

PATH is where this project lies.  Under torchrun no other file is needed.

The program is not changed; it needs an optimizer of torch.optim.  timeline.svg has a lane for each
rank: forward, backward, optimizer, waiting; below them messages and memory.  timeline.json has the
same, and torch's operations, for https://ui.perfetto.dev.  docs/timeline.md says how to read them.

A step lies between two steps of the optimizer that came first.  It begins where the DataLoader is
asked for the next batch, if it is.  The first steps are left out, the next ones run without the
recorder, then some are recorded, then the program is left.  Before torch 2.14 the recorder takes
more time, and can't tell message buffers and groups apart.
On a GPU the lanes show when its kernels run, not what the process does meanwhile.  Where only
NCCL's kernels run, it waits; memory is not drawn.  This part was tried on a trace that others
recorded on two GPUs, not on a GPU of ours.
"""

# The files, as the data flow:
#
#   data.py                   what is passed from one file to the next
#   record.py                 while the program runs: what each rank notes
#   events.py, memory.py      read what torch's profiler has noted beside it: a Recording
#   gpu.py                    the same where kernels run on a GPU
#   compare.py                all Recordings: one clock, matching messages, who waited for whom
#   picture.py                a Picture of the shortest step
#   say.py, why.py            that in sentences
#   draw.py, svg.py           the Picture as SVG
#   trace.py                  the Picture as JSON, for Perfetto and for --draw
#   show.py                   all of it, for the processes of a run
#   __main__.py               the command line
