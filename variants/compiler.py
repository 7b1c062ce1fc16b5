"""What mnist_compile.py needs beside its idea: can torch.compile work on this machine?"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch


def check(error: Callable[[str], None]) -> None:
    """Call `error` with one line (argparse's `parser.error`, say), if torch.compile can't compile here.

    On CPUs it writes C++ code, which includes Python's header; on GPUs it writes code for Triton.
    """
    if torch.cuda.device_count():
        if importlib.util.find_spec("triton") is None:
            error("torch.compile needs Triton for GPUs, and it is not installed: pip install triton")
        return
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
    if shutil.which(compiler) is None:
        error(f"torch.compile needs a C++ compiler, and {compiler} is not found: apt-get install g++, or set CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        error("torch.compile needs Python.h, Python's header file for C++: on Debian, apt-get install python3-dev")
