"""What is wrong here: with this machine, or with a script?

    python doctor.py                         # what there is, and a self-test on two processes: paste it in a bug report
    python doctor.py run SCRIPT [ARGS ...]   # the script, with every collective of every rank compared before it runs
    kill -USR1 PID                           # where each rank of a running `launch` stands; PID is the parent's

Each line is ok, or WRONG and what to do.  Exit code 1 if anything is wrong.
"""

import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

Finding = tuple[bool, str, str]  # ok?, what was looked at, what was found (and what to do)


def look() -> Iterator[Finding]:
    """What there is, without starting anything."""
    yield sys.version_info >= (3, 10), "python", f"{platform.python_version()} on {platform.platform(terse=True)}"
    import torch

    import distributed as dist

    yield torch.__version__ >= (2, 4), "torch", f"{torch.__version__} (2.4 or newer is needed)"
    try:
        import torchvision

        yield True, "torchvision", torchvision.__version__
    except Exception as problem:  # it doesn't fit this torch, or is missing: only data.py needs it
        yield False, "torchvision", f"{problem}: pip install --upgrade torch torchvision"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS")
    fits = threads is None or threads.isdigit() and 1 <= int(threads) <= cores
    yield (
        fits,
        "CPU",
        f"{cores} cores, OMP_NUM_THREADS {threads or 'not set'}"
        + ("" if fits else f": unset it, or take 1 to {cores}"),
    )
    yield _gpus(torch)
    backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
    needed = "nccl" if torch.cuda.device_count() else "gloo"
    yield needed in backends, "backends", f"{', '.join(backends) or 'none'}; {needed} is the one for this machine"
    try:
        world = dist._world()
        yield True, "launcher", f"{world}" if world.starter else "none: launch will start the processes"
    except ValueError as problem:
        yield False, "launcher", str(problem)
    try:
        with tempfile.TemporaryDirectory() as folder:
            free = shutil.disk_usage(folder).free
        yield free > 1 << 20, "temporary folder", f"{tempfile.gettempdir()}, {free / 2**30:.1f} GiB free"
    except OSError as problem:
        yield False, "temporary folder", f"{problem}: set TMPDIR to a folder that can be written"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
        yield True, "loopback", "127.0.0.1 answers"
    except OSError as problem:
        yield False, "loopback", f"{problem}: bring the interface up (ip link set lo up)"
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        several = " (not reachable from other machines: there, set GLOO_SOCKET_IFNAME)" * address.startswith("127.")
        yield True, "host name", f"{name} is {address}{several}"
    except OSError:
        advice = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to an interface's name"
        yield False, "host name", f"{name} has no address: under torchrun gloo needs it; {advice}"


def _gpus(torch: object) -> Finding:
    chosen, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    visible = f"CUDA_VISIBLE_DEVICES {chosen if chosen is not None else 'not set'}"
    if chosen and chosen != "-1" and count < len(chosen.split(",")):
        return False, "GPUs", f"{count} of those in {visible} can be used: correct it, or unset it"
    if not count and chosen is None and os.path.exists("/dev/nvidia0"):
        return False, "GPUs", f"there is one, but this torch can't use it (built for CUDA {torch.version.cuda})"
    return True, "GPUs", f"{count} ({names}), {visible}" if count else f"none ({visible}): everything runs on the CPU"


# -------------------------------------------------------------------------------------------------------- self-test


def _expect(answer: object, expected: object) -> None:
    if answer != expected:
        raise AssertionError(f"got {answer}, expected {expected}")


def check_collectives(rank: int, n: int, backend: str) -> None:
    """Every collective of distributed.py, against closed forms."""
    import torch

    import distributed as dist

    dist.init_process_group(rank, n, backend)
    mine = torch.tensor([float(rank)], device=dist.get_device() if backend == "nccl" else "cpu")
    _expect(dist.all_reduce(mine).item(), n * (n - 1) / 2)
    _expect(dist.reduce(mine).item(), (n - 1) / 2)
    _expect(torch.cat(dist.gather(mine.repeat(rank + 1))).tolist(), [float(r) for r in range(n) for _ in range(r + 1)])
    dist.sync_params([mine])
    _expect(mine.item(), 0.0)
    dist.barrier()
    share = list(dist.data_sampler(range(7), True, shuffle=False, pad=False))
    _expect(sorted(torch.cat(dist.gather(torch.tensor(share))).tolist()), list(range(7)))


def check_training(rank: int, n: int, backend: str) -> None:
    """One training step on n processes is the step of one process on the whole batch."""
    import torch

    import distributed as dist

    dist.init_process_group(rank, n, backend)
    torch.manual_seed(0)
    device = dist.get_device() if backend == "nccl" else torch.device("cpu")
    batch = torch.randn(4 * n, 3, device=device)
    single = torch.nn.Linear(3, 1).to(device)
    model = torch.nn.Linear(3, 1).to(device)
    model.load_state_dict(single.state_dict())
    model = dist.prepare_ddp_model(model)
    single(batch).square().mean().backward()
    model(batch[rank::n]).square().mean().backward()
    error = (dist.unwrap_model(model).weight.grad - single.weight.grad).abs().max().item()
    if not error < 1e-5:
        raise AssertionError(f"the gradient differs by {error} from that of one process")


def self_test() -> Iterator[Finding]:
    """Run both checks for real: on two processes with gloo, and on all GPUs with nccl if there are any."""
    import torch

    import distributed as dist

    for name in (*sum(dist._LAUNCHERS.values(), ()), "NPROC"):
        os.environ.pop(name, None)  # they have been looked at
    os.environ |= {"DIST_INIT_TIMEOUT": "10", "DIST_TIMEOUT": "10"}
    runs = [("gloo", 2)] + [("nccl", torch.cuda.device_count())] * bool(torch.cuda.device_count())
    for backend, n in runs:
        for check in (check_collectives, check_training):
            what = f"{check.__name__.removeprefix('check_')}, {backend}"
            started = time.perf_counter()
            try:
                dist.launch(check, backend, nproc=n)
                yield True, what, f"{n} processes, right answers in {time.perf_counter() - started:.1f} s"
            except (SystemExit, Exception) as problem:
                lines = [line for line in str(problem).splitlines() if line.strip()]
                yield False, what, f"{lines[0]} ... {lines[-1]}" if len(lines) > 1 else str(problem)


def main(sections: tuple[Callable[[], Iterator[Finding]], ...] = (look, self_test)) -> int:
    wrong = 0
    for section in sections:
        for ok, what, found in section():
            print(f"{'ok   ' if ok else 'WRONG'}  {what:18}  {found}", flush=True)
            wrong += not ok
    print("all is well" if not wrong else f"{wrong} to put right")
    return min(wrong, 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"] and len(sys.argv) > 2:
        # torch reads this when it is imported, so in a fresh Python; exec keeps the process, its signals and exit code
        os.execve(sys.executable, [sys.executable, *sys.argv[2:]], os.environ | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    sys.exit(main() if not sys.argv[1:] else __doc__)
