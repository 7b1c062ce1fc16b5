"""Gives CUDA tensors their kernels, as soon as torch is imported.  Each Python with the simulated GPUs imports this."""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path


class _Torch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            import operators

            kernels = Path(__file__).with_name("libcpu_kernels.so")
            module.ops.load_library(kernels)
            ctypes.CDLL(str(kernels)).install()
            operators.install(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SIM_GPUS") is not None:
    sys.meta_path.insert(0, _Torch())
