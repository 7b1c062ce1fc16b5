"""What is wrong with this machine?

    python doctor.py               # what there is, and a self-test: paste all of it into a bug report
    python doctor.py --report      # all tests on this machine's GPUs, in one file to send in; ten minutes
    kill -USR1 PID                 # where each rank of a run stands; PID is that of the process you started

Each line is ok, or WRONG and what to do.  Exit code 1 if anything is wrong.
"""

import contextlib
import functools
import importlib
import io
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import FrameType

Finding = tuple[bool, str, str]  # ok?, what was looked at, what was found (and what to do)
_NUMBER = r"\d+(\.\d+)?"
_ERROR = r"^[\w.]*(?:Error|Exception)\b.*"  # the last line of a traceback, which names the exception

CUDA_START, CUDA_START_PER_GPU = 30, 10  # seconds in which a new process must have started CUDA; see _time_out
LIMITS = ("DIST_TIMEOUT", "DIST_GRACE")  # the variables that are numbers of seconds

# ----------------------------------------------------------------------------------------------------- what there is


def look() -> Iterator[Finding]:
    """What there is, without starting anything."""
    yield True, "command", shlex.join(["python", *sys.argv])
    yield _python()
    yield _torch()
    yield _torchvision()
    yield _cpu()
    yield _gpus()
    yield _backends()
    yield _launcher()
    yield _limits()
    yield _temporary_folder()
    yield _loopback()
    yield _host_name()


def _judge(ok: bool, what: str, found: str, advice: str) -> Finding:
    return ok, what, found if ok else f"{found}: {advice}"


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.platform(terse=True)}, {platform.machine()}"
    return _judge(sys.version_info >= (3, 10), "python", found, "3.10 or newer is needed")


def _torch() -> Finding:
    import torch

    built = "the CPU only"
    if torch.version.cuda:
        built = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        built = f"ROCm {torch.version.hip}"
    found = f"{torch.__version__}, built for {built}"
    return _judge(torch.__version__ >= (2, 4), "torch", found, "2.4 or newer is needed")


def _torchvision() -> Finding:
    try:
        return True, "torchvision", importlib.import_module("torchvision").__version__
    except Exception as problem:  # a build for another torch raises RuntimeError, for instance
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        return False, "torchvision", f"{reason}: pip install --upgrade torch torchvision (data.py needs it)"


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS")
    fits = threads is None or threads.isdigit() and 1 <= int(threads) <= cores
    found = f"{cores} cores, OMP_NUM_THREADS {threads or 'not set'}"
    return _judge(fits, "CPU", found, f"unset it, or take 1 to {cores}")


def _gpus() -> Finding:
    import torch

    chosen, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    visible = f"CUDA_VISIBLE_DEVICES {'not set' if chosen is None else chosen or 'empty'}"
    if chosen and chosen != "-1" and count < len(chosen.split(",")):
        return False, "GPUs", f"{visible}, but only {count} of those can be used: correct it, or unset it"
    if not count and chosen is None and os.path.exists("/dev/nvidia0"):
        built = f"it is built for CUDA {torch.version.cuda}" if torch.version.cuda else "it is built for the CPU only"
        return False, "GPUs", f"there is one, but torch can't use it ({built}): compare nvidia-smi's CUDA version"
    if not count:
        return True, "GPUs", f"none ({visible}): everything runs on the CPU"
    found = f"{count} ({visible})"
    described, problem = _start_cuda(count)
    if problem:
        built = (torch.version.cuda or torch.version.hip or "").partition(".")[0]  # a driver serves all of 13.x
        needed = f"nvidia-smi must show CUDA {built} or newer" if torch.version.cuda else f"it needs ROCm {built}"
        advice = f"{needed}: update the driver, or install a torch that is built for an older one. "
        advice += "CUDA_VISIBLE_DEVICES=-1 hides the GPUs: everything then runs on the CPU"
        return False, "GPUs", f"{found}, but CUDA can't start: {problem}: {advice}"
    if len(described) < count:
        advice = f"start {len(described)} process(es) with NPROC, or name the cards in CUDA_VISIBLE_DEVICES"
        return False, "GPUs", f"{found} by NVML, but CUDA can use only {len(described)} (MIG?): {advice}"
    return True, "GPUs", "\n".join([found, *described])


# Started by `python -c`, with the number of GPUs as its argument.
_DESCRIBE_GPUS = """
import sys
import torch
for i in range(int(sys.argv[1])):
    try:
        gpu = torch.cuda.get_device_properties(i)
    except Exception:
        if i == 0:
            raise
        break  # NVML counts more GPUs than CUDA can use
    print(f"{i}: {gpu.name}, {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB")
"""


@functools.cache
def _start_cuda(count: int) -> tuple[list[str], str]:
    """Start CUDA for the first time: a line about each GPU, or why it can't start, in one line.

    device_count only asks the driver's library NVML, which counts GPUs that torch can't use.  CUDA starts in a new
    process, because after that no process could be forked from this one.
    """
    limit = CUDA_START + CUDA_START_PER_GPU * count
    pipe, command = subprocess.PIPE, [sys.executable, "-c", _DESCRIBE_GPUS, str(count)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs inside the driver can't be killed
            child.wait(1)
        return [], f"no answer within {limit:.0f} s"
    if child.returncode == 0:
        return out.splitlines(), ""
    if errors := re.findall(_ERROR, err, re.MULTILINE):
        return [], errors[-1]
    if child.returncode < 0:
        return [], f"ended by {signal.Signals(-child.returncode).name}"
    return [], f"ended with exit code {child.returncode}"


def _backends() -> Finding:
    import torch

    found = []
    if torch.distributed.is_gloo_available():
        found.append("gloo")
    if torch.distributed.is_nccl_available():
        found.append(f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}")
    needed = "nccl" if torch.cuda.device_count() else "gloo"
    is_there = any(backend.startswith(needed) for backend in found)
    advice = f"this machine needs {needed}: install a torch that has it"
    return _judge(is_there, "backends", ", ".join(found) or "none", advice)


def _launcher() -> Finding:
    import distributed as dist

    try:
        place = dist._get_place()
        if place.has_launcher:
            found = f"rank {place.rank} of {place.world_size}, {place.local_world_size} on this machine"
        else:
            default = f"by default {dist._count_processes()}"
            found = f"none: launch will start the processes (NPROC, nproc= or --nproc; {default})"
        return True, "launcher", found
    except ValueError as problem:
        return False, "launcher", str(problem)


def _wrong_limits() -> list[str]:
    """The limits that a run would refuse: by the check that a run makes."""
    import distributed as dist

    wrong = []
    for name, read in zip(LIMITS, (dist.get_timeout, lambda: dist._read_seconds("DIST_GRACE", None)), strict=True):
        try:
            read()
        except ValueError:
            wrong.append(name)
    return wrong


def _limits() -> Finding:
    wrong = _wrong_limits()
    given = {name: os.environ[name] for name in LIMITS if name in os.environ}
    found = ", ".join(f"{name} {value}" for name, value in given.items()) or f"{', '.join(LIMITS)} not set"
    return _judge(not wrong, "limits", found, f"{' and '.join(wrong)} must be a number of seconds; or unset it")


def _temporary_folder() -> Finding:
    chosen = os.environ.get("TMPDIR")
    try:
        used = tempfile.gettempdir()  # passes over a TMPDIR that it can't write, without a word
        if chosen and os.path.realpath(chosen) != os.path.realpath(used):
            return False, "temporary folder", f"TMPDIR is {chosen}, which can't be written: correct it, or unset it"
        free = shutil.disk_usage(used).free
        return _judge(free > 1 << 20, "temporary folder", f"{used}, {free / 2**30:.1f} GiB free", "make room")
    except OSError as problem:
        return False, "temporary folder", f"{problem}: set TMPDIR to a folder that can be written"


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
        return True, "loopback", "127.0.0.1 answers"
    except OSError as problem:
        return False, "loopback", f"{problem}: bring the interface up (ip link set lo up)"


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        advice = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to an interface's name"
        return False, "host name", f"{name} has no address, which torchrun and gloo need: {advice}"
    found = f"{name} is {address}"
    if address.startswith("127."):
        found += " (with several machines, set GLOO_SOCKET_IFNAME and MASTER_ADDR)"
    return True, "host name", found


def send_report(arguments: list[str]) -> None:
    """Become the program that writes the report; it needs the whole project, not only this file."""
    project = os.path.dirname(os.path.abspath(__file__))
    if not os.path.isfile(os.path.join(project, "experiments", "gpu_report.py")):
        sys.exit("doctor.py --report needs the whole project: clone it, and type the same in its folder")
    path = os.pathsep.join([project, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "experiments.gpu_report", *arguments]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})


# -------------------------------------------------------------------------------------------------------- self-test


def _join(rank: int, n: int, backend: str) -> "torch.device":  # noqa: F821
    import torch

    import distributed as dist

    with contextlib.redirect_stdout(None):  # without its line on what it has joined: the table has it
        dist.init_process_group(rank, n, backend)
    return dist.get_device() if backend == "nccl" else torch.device("cpu")


def _expect(what: str, answer: object, expected: object) -> None:
    if answer != expected:
        raise AssertionError(f"{what} gave {answer}, and {expected} is right")


def check_collectives(rank: int, n: int, backend: str) -> None:
    """Every collective of distributed.py, against closed forms."""
    import torch

    import distributed as dist

    mine = torch.tensor([float(rank)], device=_join(rank, n, backend))
    _expect("all_reduce", dist.all_reduce(mine.clone()).item(), n * (n - 1) / 2)
    _expect("reduce", dist.reduce(mine).item(), (n - 1) / 2)
    gathered = torch.cat(dist.gather(mine.repeat(rank + 1))).tolist()
    _expect("gather", gathered, [float(r) for r in range(n) for _ in range(r + 1)])
    dist.sync_params([mine])
    _expect("sync_params", mine.item(), 0.0)
    dist.barrier()
    share = list(dist.data_sampler(range(7), True, shuffle=False, pad=False))
    _expect("data_sampler", sorted(torch.cat(dist.gather(torch.tensor(share))).tolist()), list(range(7)))


def check_training(rank: int, n: int, backend: str) -> None:
    """One training step on n processes is the step of one process on the whole batch."""
    import torch

    import distributed as dist

    device = _join(rank, n, backend)
    torch.manual_seed(0)
    batch = torch.randn(4 * n, 3, device=device)
    single = torch.nn.Linear(3, 1).to(device)
    model = torch.nn.Linear(3, 1).to(device)
    model.load_state_dict(single.state_dict())
    model = dist.prepare_ddp_model(model)
    single(batch).square().mean().backward()
    model(batch[rank::n]).square().mean().backward()
    error = (dist.unwrap_model(model).weight.grad - single.weight.grad).abs().max().item()
    _expect("DDP's gradient", "right" if error < 1e-5 else f"one that is wrong by {error:.2g}", "right")


def self_test() -> Iterator[Finding]:
    """Run both checks for real: on two processes with gloo on the CPU, and on all GPUs with nccl if there are any."""
    import torch

    import distributed as dist

    looked_at = [*dist._TORCHRUN, *dist._OPEN_MPI, *dist._MPICH, *dist._SRUN, "NPROC", *_wrong_limits()]
    if not re.fullmatch(_NUMBER, os.environ.get("OMP_NUM_THREADS", "")):
        looked_at.append("OMP_NUM_THREADS")
    for name in looked_at:
        os.environ.pop(name, None)  # what is wrong with them has been said
    given = dict(os.environ)
    chosen, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    can_start = gpus and not _start_cuda(gpus)[1]  # if not, the line about the GPUs has said why
    runs = [("gloo", 2)]
    if can_start:
        runs.append(("nccl", gpus))
    for backend, n in runs:
        limit = _set_time_out(backend, n, given)
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if backend == "gloo" else chosen or ""
        if backend == "nccl" and chosen is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        for check in (check_collectives, check_training):
            started = time.perf_counter()
            problem = _trouble(check, backend, n, limit)
            processes = "1 process" if n == 1 else f"{n} processes"
            found = problem or f"{processes}, right answers in {time.perf_counter() - started:.1f} s"
            yield not problem, f"{check.__name__.removeprefix('check_')}, {backend}", found


def _time_out(backend: str, n: int) -> float:
    """The time-out of the start and of each collective of a check with n processes, in seconds."""
    if backend == "gloo":
        return 10
    # Without persistence mode the driver unloads a GPU that no process uses.  The processes of each check then start
    # all GPUs again, which takes up to some seconds for each, and only then do they come together.  NCCL connects all
    # GPUs with each other before or in the first collective, which takes longer the more there are.
    return 20 + 5 * n


def _set_time_out(backend: str, n: int, given: dict[str, str]) -> float:
    """Set the environment's time-out for a check; returns the seconds after which the whole check is given up.

    given: the user's own settings.  They can lower the time-out, but not raise it.
    """
    seconds = _time_out(backend, n)
    with contextlib.suppress(KeyError, ValueError):
        seconds = min(seconds, float(given["DIST_TIMEOUT"]))
    os.environ["DIST_TIMEOUT"] = str(seconds)
    return 5.0 + 2 * seconds  # for starting and ending the processes; for the start, and for a collective


def _trouble(check: Callable, backend: str, n: int, limit: float) -> str:
    """Run the check on n processes; what went wrong, and what to do.  It ends, even if the check never would."""
    import distributed as dist

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), _time_limit(limit):
            dist.launch(check, backend, nproc=n)
        return ""
    except TimeoutError as problem:
        return _explain(f"TimeoutError: {problem}\n{said.getvalue()}", backend)
    except (SystemExit, Exception) as problem:
        if isinstance(problem, SystemExit) and not isinstance(problem.code, str):
            raise  # Ctrl-C
        return _explain(str(problem), backend)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError after so many seconds and one; before the last, `launch` prints where each rank stands.

    An alarm, because a process of its own for each check, with a limit, would import torch each time.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, 1)
        os.kill(os.getpid(), signal.SIGUSR1)

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {seconds:.0f} s")

    given = signal.signal(signal.SIGALRM, ask)
    given_question = signal.signal(signal.SIGUSR1, lambda number, frame: None)  # `launch` handles it while it watches
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, given)
        signal.signal(signal.SIGUSR1, given_question)


def _explain(text: str, backend: str) -> str:
    """The cause in one line with what to do, and a line for each rank, from what `launch` has said of its failure."""
    import launcher

    head, _, stand = text.partition("where each rank stands:\n")
    first = re.match(r"rank \d+ of \d+ failed first:", head)
    who = f"{first[0]} " if first else ""
    errors = re.findall(_ERROR, head, re.MULTILINE)  # not the whole traceback
    cause = errors[-1] if errors else head.removeprefix(who).strip()
    if "AssertionError" in cause:
        advice = "don't train with this torch: reinstall it, and report this if it stays so"
    elif launcher.TIMED_OUT.search(cause):
        advice = "is a firewall or a security tool in the way, or has the machine no time? Else report this"
    else:
        advice = "report this"
    if backend == "nccl":
        advice += ", with what NCCL_DEBUG=INFO python doctor.py says"
    return "\n".join([f"{who}{cause.strip()}: {advice}", *re.findall(r"^  rank .*", stand, re.MULTILINE)])


# ------------------------------------------------------------------------------------------------------- the command


def main(sections: tuple[Callable[[], Iterator[Finding]], ...] = (look, self_test)) -> int:
    """Print the table; 1 if anything is wrong, else 0."""

    def show(ok: bool, what: str, found: str) -> None:
        print(f"{'ok' if ok else 'WRONG':5}  {what:17}  " + found.replace("\n", "\n" + 26 * " "), flush=True)

    for needed in ("torch", "distributed"):
        try:
            importlib.import_module(needed)
        except Exception as problem:
            advice = "pip install torch" if needed == "torch" else "put distributed.py and launcher.py beside this file"
            show(False, needed, f"{problem}: {advice}")
            return 1
    if os.environ.get("LOCAL_RANK", "0") != "0":  # under a launcher: one table per machine
        return 0
    wrong = 0
    for section in sections:
        for ok, what, found in section():
            show(ok, what, found)
            wrong += not ok
    print("all is well" if not wrong else f"{wrong} to put right")
    return min(wrong, 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--report"]:
        send_report(sys.argv[2:])
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.exit(print(__doc__))
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
