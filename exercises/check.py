"""Checks an exercise: runs your function with 1, 2 and 3 processes.  python -m exercises.check shard

python -m exercises.check all                 # all ten, in their order
python -m exercises.check 5                   # the fifth
python -m exercises.check shard --solution    # the stored solution instead of your function

The exit code is 0 if all is right, and 1 if not.  What your function is compared with stands in exercises/checks/.
"""

import argparse
import contextlib
import faulthandler
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import distributed as dist
import launcher
from exercises.checks import NAMES
from exercises.checks.common import wait_for_the_others

ROOT = Path(__file__).parents[1]
WORLD_SIZES = (1, 2, 3)
LIMIT = 15  # seconds for one number of processes; then each rank is asked where it stands
BLANK, EQUAL, WRONG, ERROR, HANGS = "not implemented yet", "equal", "WRONG", "ERROR", "HANGS"


class Outcome(NamedTuple):
    verdict: str
    text: str = ""


def check(name: str, path: Path, limit: float = LIMIT) -> bool:
    """Print a line for each number of processes; returns whether all are right."""
    print(f"{name} ({short(path)})", flush=True)
    verdicts = []
    for nproc in WORLD_SIZES:
        outcome = examine(name, path, nproc, limit)
        verdicts.append(outcome.verdict)
        if outcome.verdict == BLANK:
            print(f"  {BLANK}: write {name}() in {short(path)}; a hint stands at the end of that file")
            break
        processes = "1 process  " if nproc == 1 else f"{nproc} processes"
        space = "" if outcome.text.startswith("\n") else "  "
        print(f"  {processes}  {outcome.verdict}{space}{outcome.text}".rstrip(), flush=True)
        if outcome.verdict in (ERROR, HANGS):
            break  # more processes would show the same
    return verdicts == [EQUAL] * len(WORLD_SIZES)


def short(path: Path | str) -> str:
    return str(path).replace(f"{ROOT}/", "")


# ------------------------------------------------------------------------------------------- one number of processes


def examine(name: str, path: Path, nproc: int, limit: float = LIMIT) -> Outcome:
    """What comes of it with nproc processes.  They are started by a process of their own, which can be killed."""
    importlib.import_module(f"exercises.checks.{name}")  # here, once; a forked process has it
    method = "fork" if launcher.fork_is_safe() else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, str(path), nproc, folder)
        process = multiprocessing.get_context(method).Process(target=run_all, args=arguments)
        process.start()
        process.join(limit)
        if process.is_alive():
            table = where_they_stand(process.pid, folder, name)
            process.kill()  # launch's guard ends the ranks
            process.join()
            return Outcome(HANGS, f"after {limit} s each rank stands here:\n{table}")
        outcome = Path(folder, "outcome")
        if not outcome.exists():
            code = process.exitcode
            end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return Outcome(ERROR, f"the process {end}\n{read_errors(folder)}")
        return Outcome(*pickle.loads(outcome.read_bytes()))


def read_errors(folder: str) -> str:
    return Path(folder, "stderr").read_text(errors="replace")


def where_they_stand(pid: int, folder: str, name: str) -> str:
    """A line for each rank: launch's table, which SIGUSR1 asks for."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
    written = read_errors(folder)
    lines = re.findall(r"^  rank .*", written.rpartition("where each rank stands:")[2], re.MULTILINE)
    if not lines:  # one process: it has answered itself, with its frames, the innermost first
        frames = re.findall(r'File "(.+)", line (\d+) in (.+)', written)
        ours = [f"{path}:{line}, {function}" for path, line, function in frames if f"/{name}.py" in path]
        lines = [f"  rank 0: {(ours or ['no answer'])[0]}"]
    for number, line in enumerate(lines):
        if "wait_for_the_others" in line:
            lines[number] = f"{line.partition(':')[0]}: your function has returned"
    return "\n".join(f"  {short(line)}" for line in lines)


# ------------------------------------------------------------------------------------- in the process that starts them


def run_all(name: str, path: str, nproc: int, folder: str) -> None:
    """Start the ranks, and judge their answers; the outcome goes into a file."""
    sys.stderr = open(f"{folder}/stderr", "w", buffering=1)  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)  # of what is not Python, too
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the exercises are about processes: the CPU is enough
    torch.set_num_threads(1)
    if nproc == 1:  # launch starts none then, and has no table
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    try:
        dist.launch(worker, name, path, folder, nproc=nproc)
        outcome = (EQUAL, "")
        problem = judge(name, path, nproc, folder)
        if problem:
            outcome = (WRONG, problem)
    except SystemExit as end:  # of launch, with the first rank's error
        is_blank = str(end.code).splitlines()[0].endswith(BLANK)
        outcome = (BLANK, "") if is_blank else (ERROR, str(end.code))
    Path(folder, "outcome.tmp").write_bytes(pickle.dumps(outcome))
    os.replace(f"{folder}/outcome.tmp", f"{folder}/outcome")


def judge(name: str, path: str, nproc: int, folder: str) -> str:
    """What is wrong, in words, or ""."""
    module = importlib.import_module(f"exercises.checks.{name}")
    problem = module.judge([pickle.loads(Path(folder, f"answer{rank}").read_bytes()) for rank in range(nproc)])
    if not problem and nproc == 1 and hasattr(module, "alone"):
        problem = module.alone(load(name, path), folder)
    return problem


# --------------------------------------------------------------------------------------------------------- on each rank


def worker(local_rank: int, world_size: int, name: str, path: str, folder: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # without "distributed: 2 processes, gloo, cpu"
        dist.init_process_group(backend="gloo")
    torch.manual_seed(dist.get_rank())  # random numbers differ between ranks, as in a script that sets no seed
    try:
        answer = importlib.import_module(f"exercises.checks.{name}").run(load(name, path), folder)
    except NotImplementedError as error:
        sys.exit(explain(error, path) if str(error) else BLANK)
    except (Exception, SystemExit) as error:
        sys.exit(explain(error, path))
    Path(folder, f"answer{dist.get_rank()}").write_bytes(pickle.dumps(answer))
    wait_for_the_others(folder, "answered")
    dist.cleanup()


def load(name: str, path: str) -> Callable:
    """The function of this name in this file."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise AttributeError(f"there is no function {name} in {short(path)}")
    return getattr(module, name)


def explain(error: BaseException, path: str) -> str:
    """The lines of the reader's file that led there, and the error's first lines."""
    if isinstance(error, SystemExit):
        error = RuntimeError(f"sys.exit({error.code!r}) was called")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    lines = [f"{short(path)}:{frame.lineno}, in {frame.name}:  {frame.line}" for frame in frames]
    lines += "".join(traceback.format_exception_only(error)).splitlines()[:8]
    return "".join(f"\n    {line}" for line in lines)


# ---------------------------------------------------------------------------------------------------------- the program


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [str(number) for number in range(1, len(NAMES) + 1)]
    parser.add_argument("name", choices=[*NAMES, *numbers, "all"], metavar="NAME")
    parser.add_argument("--solution", action="store_true", help="check the stored solution")
    args = parser.parse_args()
    try:
        if dist.get_world_size() > 1:
            raise ValueError("it starts its processes itself: type python -m exercises.check")
    except ValueError as problem:
        parser.error(str(problem))
    if args.name in numbers:
        args.name = NAMES[int(args.name) - 1]
    return args


def main() -> int:
    """0 if all exercises that were asked for are right, else 1."""
    args = parse_args()
    folder = ROOT / "exercises" / "solutions" if args.solution else ROOT / "exercises"
    names = NAMES if args.name == "all" else [args.name]
    torch.set_num_threads(1)  # no pool of threads, so that processes can be forked
    right = sum(check(name, folder / f"{name}.py") for name in names)
    if args.name == "all":
        print(f"{right} of {len(names)} are right")
    elif right:
        later = NAMES[NAMES.index(args.name) + 1 :]
        print(f"passed; next: {later[0]}" if later else "passed: that was the last one")
    return 0 if right == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
