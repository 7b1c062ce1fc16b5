"""Check this machine: is the problem in the machine, or in the script?  Paste the whole output into a bug report.

    python -m ddp_by_diff.doctor                          # this machine: all GPUs, or two processes if there is no GPU
    torchrun --nproc_per_node=2 -m ddp_by_diff.doctor     # or srun, mpirun: a launcher's processes, on all machines
    kill -USR1 PID            # PID of a hanging `python train.py`, which then prints where each of its ranks is
    python -m ddp_by_diff.replay train.py     # if the script is the problem: what each of its lines does on all ranks

Each line begins with ok, or with WRONG and then tells what to do.  The exit code is 1 if a line is WRONG.
"""

import argparse
import contextlib
import io
import os
import platform
import re
import sys

try:
    import torch
except Exception as problem:  # not only ImportError: a missing library of CUDA is an OSError
    sys.exit(f"WRONG  torch     {problem}: pip install torch")

import ddp_by_diff.distributed_launcher as launcher
from ddp_by_diff import __version__
from ddp_by_diff import distributed as dist
from ddp_by_diff.instruments.command import started_as

VARIABLES = [*launcher.LAUNCHER_VARIABLES, "NPROC"]
ADVICE = [  # (a pattern of an error, what to do); the first one that matches is printed
    ("driver", "nvidia-smi shows the driver's newest CUDA: update the driver, or install torch for an older CUDA"),
    ("out of memory", "nvidia-smi shows which processes use the GPU's memory"),
    ("tim(ed|e) ?out|connect|resolve", "a firewall? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface"),
    ("", "look it up in docs/troubleshooting.md, or report it with this output (NCCL: set NCCL_DEBUG=INFO)"),
]


def show(is_ok: bool, what: str, found: str) -> bool:
    """Print a line of the table; return is_ok."""
    print(f"{'ok' if is_ok else 'WRONG':5}  {what:8}  {found}\n", end="", flush=True)  # in one piece: all ranks print
    return is_ok


def check_software() -> bool:
    found = f"{platform.python_version()} on {platform.platform(terse=True)}, {platform.machine()}"
    is_new = sys.version_info >= (3, 10)
    python_ok = show(is_new, "python", found if is_new else f"{found}: install 3.10 or newer")
    built = "CUDA " + torch.version.cuda if torch.version.cuda else "ROCm" if torch.version.hip else "the CPU only"
    found = f"{torch.__version__}, built for {built}"
    is_new = torch.__version__ >= (2, 4)
    return show(is_new, "torch", found if is_new else f"{found}: install 2.4 or newer") and python_ok


def check_devices() -> bool:
    """Print the cores and the GPUs.  check_rank tests each GPU in a process of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    show(True, "CPU", f"{cores} cores, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}")
    count, chosen = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"{count}, CUDA_VISIBLE_DEVICES {'not set' if chosen is None else repr(chosen)}"
    if chosen and chosen != "-1" and count < len(chosen.split(",")):
        return show(False, "GPUs", f"{found} names GPUs that torch doesn't see: correct it, or unset it")
    if count == 0 and chosen is None and os.path.exists("/dev/nvidia0"):
        return show(False, "GPUs", f"{found}, but the machine has a GPU: compare torch's CUDA with nvidia-smi's")
    return show(True, "GPUs", found)


def check_launcher() -> bool:
    variables = " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    refusal = io.StringIO()
    try:
        with contextlib.redirect_stderr(refusal):
            count = dist.count_processes()
    except SystemExit:
        return show(False, "launcher", refusal.getvalue().removeprefix("distributed: ").strip())
    has_launcher = "RANK" in os.environ  # srun's and mpirun's variables have been translated
    started = "its processes" if has_launcher else "none; `launch` starts the processes"
    return show(True, "launcher", f"{started}: {count} ({variables or 'no variable set'})")


def check_rank(local_rank: int, world_size: int) -> None:
    """Test, on each rank, that its device computes correctly, and so does an all-reduce over all devices."""
    device = dist.get_device()
    ones = torch.ones(64, 64, device=device)
    total = (ones @ ones).sum().item()
    if total != 64**3:
        raise ArithmeticError(f"{device} computes {total} instead of {64**3}: don't train on it")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    show(True, f"rank {dist.get_rank()}", f"{device} computes ({name})")
    dist.init_process_group(timeout=60)
    rank_sum = dist.all_reduce(torch.tensor(dist.get_rank())).item()
    expected = world_size * (world_size - 1) // 2
    if rank_sum != expected:
        raise ArithmeticError(f"the all-reduce returns {rank_sum} instead of {expected}: don't train with this torch")


def check_ranks() -> bool:
    try:
        dist.launch(check_rank)
        return not dist.is_primary() or show(True, "together", "an all-reduce over all devices returns the correct sum")
    except (SystemExit, Exception) as problem:
        if isinstance(problem, SystemExit) and isinstance(problem.code, int):
            raise  # Ctrl-C
        text = f"{type(problem).__name__}: {problem}" if isinstance(problem, Exception) else str(problem)
        advice = next(advice for pattern, advice in ADVICE if re.search(pattern, text, re.IGNORECASE))
        return show(False, "together", f"{text.rstrip()}\n       -> {advice}")


def main() -> int:
    """Print the table; return 1 if anything is wrong, else 0."""
    parse_args()
    try:
        dist.check_variables()
        is_primary = dist.is_primary()
    except ValueError:  # check_launcher reports it
        is_primary = True
    findings = [check_software(), check_devices(), check_launcher()] if is_primary else [True]
    if findings[-1]:  # with wrong variables, no process learns its rank and world size
        findings.append(check_ranks())
    return int(not all(findings))


def parse_args() -> None:
    parser = argparse.ArgumentParser(
        prog=started_as("doctor"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"ddp-by-diff {__version__}")
    parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
