"""The commands that `pip install` brings: ddp-timeline, ddp-equivalence and ddp-doctor.

    pip install .                               # in a clone; or pip install git+ADDRESS
    ddp-timeline train.py --my-flags            # as python PATH/timeline train.py --my-flags
    ddp-equivalence --nproc 3 train.py
    ddp-doctor
    torchrun --nproc_per_node=2 --no-python ddp-timeline train.py

In the wheel the folders of the tools lie beside this file, in this one package; in a clone they lie beside this folder.
So nothing of ours can be imported by accident: the tools find each other as in a clone, by the folder that they are in.
"""

import os
import runpy
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = HERE if os.path.isdir(os.path.join(HERE, "timeline")) else os.path.dirname(HERE)


def _run(name: str) -> None:
    """Run a tool as `python PATH/name` does: run_path puts the tool's own place in front of sys.path."""
    path = os.path.join(FOLDER, name)
    sys.argv[0] = path
    if not sys.path[0] or os.path.isfile(os.path.join(sys.path[0], f"ddp-{name.removesuffix('.py')}")):
        del sys.path[0]  # the folder of the command, which is no place to look for modules
    if path.endswith(".py"):
        sys.path.insert(0, FOLDER)
    runpy.run_path(path, run_name="__main__")


def timeline() -> None:
    _run("timeline")


def equivalence() -> None:
    _run("equivalence")


def doctor() -> None:
    _run("doctor.py")
