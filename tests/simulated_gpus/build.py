"""Builds the simulated GPUs' libraries into a folder.  `environment` is what a program needs to run with them.

As torch asks for its libraries by name, ours are loaded first (LD_PRELOAD) under the names of the true ones.
"""

import os
import shutil
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
TORCH = Path(torch.__file__).parent
NVIDIA = TORCH.parent / "nvidia"
CUDA = (torch.version.cuda or "").partition(".")[0]
RUNTIME, NCCL, CUPTI = f"libcudart.so.{CUDA}", "libnccl.so.2", f"libcupti.so.{CUDA}"
ASKING = "torch_cpu torch_cuda c10_cuda torch_python torch_cuda_linalg torch_nvshmem"  # lib*.so
LIMIT = 300  # seconds for one call of the compiler


class CantBuild(Exception):
    """What is missing, in one line: the tests are skipped with it."""


def build(folder: Path) -> None:
    """Compile the libraries, side by side.  Errors: CantBuild."""
    headers = NVIDIA / f"cu{CUDA}" / "include"
    if not shutil.which("g++"):
        raise CantBuild("there is no C++ compiler: install g++")
    if not (headers / "cuda_runtime_api.h").exists():
        raise CantBuild(f"torch {torch.__version__} brings no headers of CUDA 13: pip install torch on Linux does")
    wanted = set().union(*(undefined(TORCH / "lib" / f"lib{name}.so") for name in ASKING.split()))
    cuda = [stubs(folder, wanted, "cuda", "__cuda"), f"-I{HERE}", f"-I{headers}"]
    cupti = [stubs(folder, wanted, "cupti"), f"-I{HERE}", f"-I{headers}"]
    nccl = [stubs(folder, wanted, "nccl"), f"-I{TORCH / 'include'}"]
    compilers = [
        compiler(folder / RUNTIME, "cuda.cpp", *cuda, versions(folder, RUNTIME)),
        compiler(folder / CUPTI, "cupti.cpp", *cupti, versions(folder, CUPTI)),
        compiler(folder / NCCL, "nccl.cpp", *nccl),
    ]
    errors = [process.communicate(timeout=LIMIT)[1] for process in compilers]
    if any(process.returncode for process in compilers):
        raise CantBuild(f"g++ can't build for torch {torch.__version__}: {''.join(errors)[-1500:]}")
    for name in "libcuda.so.1", "libnvidia-ml.so.1":  # the driver, and NVML
        os.symlink(RUNTIME, folder / name)


def compiler(target: Path, *arguments: object) -> subprocess.Popen:
    """A g++ that makes this library.  What it asks for may be missing here: others will have it."""
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-o", str(target)]
    return subprocess.Popen([*command, *map(str, arguments)], cwd=HERE, stderr=subprocess.PIPE, text=True)


def undefined(library: Path) -> set[str]:
    """The functions that it asks for."""
    command = ["nm", "-D", "--undefined-only", library]
    listed = subprocess.run(command, capture_output=True, text=True).stdout if library.exists() else ""
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines()}


def versions(folder: Path, name: str) -> str:
    """The linker's option for it: torch asks for cudaMalloc@libcudart.so.13."""
    file = folder / f"{name}.versions"
    file.write_text(name + " { global: *; };\n")
    return f"-Wl,--version-script={file}"


def stubs(folder: Path, wanted: set[str], *prefixes: str) -> Path:
    """Functions that say their names and end the program.  Being weak, they give way to those that we have.

    The profiler's do nothing: it asks for much that it can do without.
    """
    lines = ["#include <stdio.h>", "#include <stdlib.h>", 'extern "C" {']
    for name in sorted(name for name in wanted if name.startswith(prefixes)):
        text = f'fprintf(stderr, "simulated GPU: {name} is missing\\n"); abort();'
        lines.append(f"__attribute__((weak)) int {name}() {{ {'' if name.startswith('cupti') else text} return 0; }}")
    file = folder / f"{prefixes[0]}_stubs.cpp"
    file.write_text("\n".join([*lines, "}", ""]))
    return file


def environment(folder: Path) -> dict[str, str]:
    """For a machine without GPUs; SIM_GPUS=8.0,7.5 gives it two, with these compute capabilities."""
    return {
        "SIM_GPUS": "",
        "LD_PRELOAD": f"{folder / RUNTIME}:{folder / NCCL}:{folder / CUPTI}",
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent)]),
    }
