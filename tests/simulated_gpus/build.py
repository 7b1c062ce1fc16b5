"""Builds the simulated GPUs into a folder.  `environment` is what a program needs to run with them.

As torch asks for its libraries by name, ours are loaded first (LD_PRELOAD) under the names of the true ones.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
TORCH = Path(torch.__file__).parent
NVIDIA = TORCH.parent / "nvidia"
ASKING = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so")
LIMIT = 300  # seconds for one call of the compiler


class CantBuild(Exception):
    """What is missing, in one line: the tests are skipped with it."""


def build(folder: Path) -> None:
    """Compile all into `folder`; the kernels take about a minute.  Errors: CantBuild."""
    cuda = (torch.version.cuda or "").partition(".")[0]
    headers = NVIDIA / f"cu{cuda}" / "include"
    if not shutil.which("g++"):
        raise CantBuild("there is no C++ compiler: install g++")
    if not (headers / "cuda_runtime_api.h").exists():
        raise CantBuild(f"torch {torch.__version__} brings no headers of CUDA 13: pip install torch on Linux does")
    version = re.search(r"NCCL_VERSION_CODE (\d+)", (NVIDIA / "nccl" / "include" / "nccl.h").read_text())[1]
    of_torch = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    libraries = [f"-L{folder}", "-l:libcuda.so.1"]

    compile_library(folder / "libcuda.so.1", ["cuda_driver.cpp"])
    compile_library(folder / "libnvidia-ml.so.1", ["cuda_driver.cpp"])
    runtime, nccl = folder / f"libcudart.so.{cuda}", folder / "libnccl.so.2"
    of_runtime = [f"-I{HERE}", f"-I{headers}", *libraries]
    of_nccl = [f"-DSIM_NCCL_VERSION={version}", *of_torch, f"-L{folder}", f"-l:{runtime.name}"]
    for library, source, flags in (runtime, "cuda_runtime.cpp", of_runtime), (nccl, "nccl.cpp", of_nccl):
        compile_library(library, [source], *flags)
        prefixes = ("nccl",) if library == nccl else ("cuda", "__cuda")
        stubs = folder / f"{library.name}.stubs.cpp"
        stubs.write_text(stubs_for(prefixes, symbols(library, "--defined-only")))
        versions = folder / f"{library.name}.versions"  # torch asks for cudaMalloc@libcudart.so.13
        versions.write_text(library.name + " { global: cuda*; __cuda*; sim_*; };\n")
        by_version = [f"-Wl,--version-script={versions}"] if library == runtime else []
        compile_library(library, [source, str(stubs)], *flags, *by_version)
    with_torch = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    compile_library(folder / "libcpu_kernels.so", ["cpu_kernels.cpp"], *of_torch, *with_torch)
    for file in "boot.py", "operators.py":
        shutil.copyfile(HERE / file, folder / file)
    (folder / "sitecustomize.py").write_text("import boot\n")  # each Python that is started imports it


def compile_library(target: Path, sources: list[str], *flags: str) -> None:
    files = [str(HERE / source) for source in sources]
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", *files]
    done = subprocess.run([*command, "-o", str(target), *flags], capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise CantBuild(f"{sources[0]} doesn't fit torch {torch.__version__}: {done.stderr[-1500:]}")


def symbols(library: Path, which: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines()}


def stubs_for(prefixes: tuple[str, ...], have: set[str]) -> str:
    """Functions for what torch's libraries ask for and `have` lacks: each says its name, and fails."""
    wanted = set()
    for name in ASKING:
        if (TORCH / "lib" / name).exists():
            wanted |= symbols(TORCH / "lib" / name, "--undefined-only")
    missing = sorted(name for name in wanted - have if name.startswith(prefixes))
    code = 5 if "nccl" in prefixes else 801  # an invalid usage; not supported
    lines = ["#include <stdio.h>", 'extern "C" {']
    for name in missing:
        lines.append(f'int {name}() {{ fprintf(stderr, "simulated GPU: {name} is missing\\n"); return {code}; }}')
    return "\n".join([*lines, "}", ""])


def environment(folder: Path, *capabilities: str) -> dict[str, str]:
    """For a machine with one GPU per capability ("8.0", "7.5")."""
    preloaded = [
        str(path) for path in sorted(folder.glob("lib*.so.*")) if path.name.startswith(("libcudart", "libnccl"))
    ]
    preloaded = [path for path in preloaded if path.rpartition(".")[2].isdigit()]
    return {
        "SIM_GPUS": ",".join(capabilities),
        "LD_PRELOAD": ":".join(preloaded),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE.parent.parent)]),
    }
