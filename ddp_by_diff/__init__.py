"""The tools that `pip install PATH` brings: ddp-replay, ddp-timeline, ddp-equivalence and ddp-doctor.

    ddp-replay train.py --my-flags
    ddp-timeline train.py --my-flags                # in a clone: python -m ddp_by_diff.timeline mnist_ddp.py
    ddp-equivalence --nproc 3 train.py
    ddp-doctor
    torchrun --nproc_per_node=2 -m ddp_by_diff.timeline train.py

The tools use the two helpers as ddp_by_diff.distributed and ddp_by_diff.distributed_launcher, so that they never meet a
program's own copies.  The wheel has copies of the two files in this folder; in a clone they are one folder up.
"""

import os

__version__ = "1.0"

_here = os.path.dirname(os.path.abspath(__file__))
if not os.path.exists(os.path.join(_here, "distributed.py")):
    __path__.append(os.path.dirname(_here))
