"""Programs to run as they are: mistakes, collectives, and programs for equivalence and timeline to examine.

python -m demos.mistakes no_ddp wrong     # docs/mistakes.md
python -m demos.collectives all_reduce    # docs/collectives.md
"""

import os

# They show what processes do, for which CPUs are enough, so that a machine with one GPU can start three.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
