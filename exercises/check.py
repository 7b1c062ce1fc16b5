"""Check an exercise: run your function with 1, 2 and 3 processes.  python -m exercises.check shard

python -m exercises.check all                 # all twelve, in their order
python -m exercises.check 5                   # the fifth exercise
python -m exercises.check shard --hint        # print a hint
python -m exercises.check shard --solution    # check the stored solution instead

The exit code is 0 if all results are correct, else 1.  exercises/checks/ holds what your function is compared with, and
exercises/solved.json, which is not committed, which of your files have passed.
"""

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import io
import itertools
import json
import os
import pickle
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

import distributed as dist
import distributed_launcher as launcher
from exercises.checks import NAMES
from exercises.checks.common import wait_for_the_others

ROOT = Path(__file__).parents[1]
WORLD_SIZES = (1, 2, 3)
LIMIT = 20  # seconds for one number of processes; then each rank is asked where it is
BLANK, EQUAL, WRONG, ERROR, HANGS = "not implemented yet", "equal", "WRONG", "ERROR", "HANGS"
SOLVED = ROOT / "exercises" / "solved.json"  # {name: the digest of the file that has passed}
TABLE = "where each rank is:"  # the first line of what distributed_launcher.py prints when it gets SIGUSR1


class Outcome(NamedTuple):
    verdict: str
    text: str = ""


def check(name: str, path: Path, limit: float = LIMIT) -> str:
    """Print a line for each number of processes; return EQUAL, or the first verdict that differs."""
    print(f"{name} ({short(path)})", flush=True)
    verdict = EQUAL
    for nproc in WORLD_SIZES:
        outcome = examine(name, path, nproc, limit)
        if outcome.verdict == BLANK:
            print(f"  {BLANK}: write {name}() in {short(path)}; for a hint: python -m exercises.check {name} --hint")
            return BLANK
        processes = "1 process  " if nproc == 1 else f"{nproc} processes"
        print(f"  {processes}  {outcome.verdict}  {outcome.text}".rstrip(), flush=True)
        if outcome.verdict in (ERROR, HANGS):
            return outcome.verdict  # more processes would show the same
        verdict = outcome.verdict if verdict == EQUAL else verdict
    return verdict


def print_summary(verdicts: dict[str, str]) -> None:
    """Print which exercises are solved, which are incorrect, and which are blank."""
    groups: dict[str, list[str]] = {"solved": [], "incorrect": [], "blank": []}
    for name, verdict in verdicts.items():
        groups[{EQUAL: "solved", BLANK: "blank"}.get(verdict, "incorrect")].append(name)
    print()
    for title, names in groups.items():
        print(f"{title:<9} {len(names):>2} of {len(verdicts)}  {', '.join(names)}".rstrip())


def solved_with(verdicts: dict[str, str]) -> list[str]:
    """Note which exercises have passed; return all that have, and whose files have not been changed since."""
    digests = {}
    for name in NAMES:
        digests[name] = hashlib.sha256((ROOT / "exercises" / f"{name}.py").read_bytes()).hexdigest()
    noted = json.loads(SOLVED.read_text()) if SOLVED.exists() else {}
    for name, verdict in verdicts.items():
        noted[name] = digests[name] if verdict == EQUAL else ""
    SOLVED.write_text(json.dumps(noted))
    return [name for name in NAMES if noted.get(name) == digests[name]]


def short(path: Path | str) -> str:
    return str(path).replace(f"{ROOT}/", "")


# ------------------------------------------------------------------------------------------- one number of processes


def examine(name: str, path: Path, nproc: int, limit: float = LIMIT) -> Outcome:
    """Start the ranks, and judge their answers."""
    said = io.StringIO()  # by the launcher: the table of where each rank is
    with tempfile.TemporaryDirectory() as folder:
        try:
            with contextlib.redirect_stderr(said), asks_after(limit, said):
                launcher.run(worker, (name, path, folder), nproc)
        except TimeoutError:
            table = short(said.getvalue().rpartition(f"{TABLE}\n")[2]).rstrip()
            text = f"after {limit} s (on a busy machine, try again); where each rank is:\n{table}"
            return Outcome(HANGS, text + named(name, table))
        except SystemExit as end:  # raised by the launcher, with the error of the rank that failed first
            if isinstance(end.code, int):  # Ctrl-C, SIGTERM
                raise
            is_blank = str(end.code).splitlines()[0].endswith(BLANK)
            return Outcome(BLANK) if is_blank else Outcome(ERROR, str(end.code) + named(name, str(end.code)))
        answers = [pickle.loads(Path(folder, f"answer{rank}").read_bytes()) for rank in range(nproc)]
        problem = judge(name, path, answers, folder)
        return Outcome(WRONG, problem) if problem else Outcome(EQUAL)


@contextlib.contextmanager
def asks_after(limit: float, said: io.StringIO):
    """After `limit` seconds, ask the launcher where each rank is; raise TimeoutError when it has answered."""

    def ask(number, frame):
        if TABLE in said.getvalue():
            raise TimeoutError
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.setitimer(signal.ITIMER_REAL, 1)  # look again

    before = signal.signal(signal.SIGALRM, ask)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def named(name: str, text: str) -> str:
    """Return the mistake, if the check recognises it by where the ranks are or by their error, else ""."""
    for pattern, mistake in getattr(module_of(name), "SIGNS", {}).items():
        if re.search(pattern, text):
            return f"\n  Likely mistake: {mistake}"
    places = re.findall(r"^\s*(rank \d+): (.*)", text, re.MULTILINE)
    returned = [rank for rank, place in places if "checks/common.py:" in place]  # in wait_for_the_others
    others = [rank for rank, place in places if "checks/common.py:" not in place]
    if returned and others:
        mistake = f"{' and '.join(returned)} returned, and left out a call that is needed by {' and '.join(others)}"
        return f"\n  Likely mistake: {mistake}. All ranks must make the same calls"
    return ""


def judge(name: str, path: Path, answers: list, folder: str) -> str:
    """Return what is wrong with the answers of all ranks, in words, or ""."""
    problem = module_of(name).judge(answers)
    if not problem and len(answers) == 1 and hasattr(module_of(name), "alone"):
        problem = module_of(name).alone(load(name, path), folder)
    return problem


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"exercises.checks.{name}")


# --------------------------------------------------------------------------------------------------------- on each rank


def worker(name: str, path: Path, folder: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the exercises are about processes, so the CPU is enough
    with contextlib.redirect_stdout(io.StringIO()):  # without "distributed: 2 processes, gloo, cpu"
        dist.init_process_group(backend="gloo")
    try:
        result = answer(name, path, folder)
    except NotImplementedError as error:
        sys.exit(explain(error, path) if str(error) else BLANK)
    except (Exception, SystemExit) as error:
        sys.exit(explain(error, path))
    Path(folder, f"answer{dist.get_rank()}").write_bytes(pickle.dumps(result))
    wait_for_the_others(folder, "answered")
    dist.cleanup()


def answer(name: str, path: Path, folder: str) -> Any:
    """Return this rank's answer, which the check judges."""
    torch.manual_seed(dist.get_rank())  # random numbers differ between ranks, as in a script that sets no seed
    function, calls = load(name, path), itertools.count()

    def called(*args: Any) -> Any:
        result = function(*args)
        wait_for_the_others(folder, f"call{next(calls)}")  # else its next call would answer one that they still make
        return result

    waits_itself = hasattr(module_of(name), "WAITS_ITSELF")
    return module_of(name).run(function if waits_itself else called, folder)


def load(name: str, path: Path) -> Callable:
    """Return the function with this name in this file."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise AttributeError(f"there is no function {name} in {short(path)}")
    return getattr(module, name)


def explain(error: BaseException, path: Path) -> str:
    """Return the lines of the reader's file that led to the error, and the first lines of the error."""
    if isinstance(error, SystemExit):
        error = RuntimeError(f"sys.exit({error.code!r}) was called")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    lines = [f"{short(path)}:{frame.lineno}, in {frame.name}:  {frame.line}" for frame in frames]
    lines += "".join(traceback.format_exception_only(error)).splitlines()[:8]
    return "".join(f"\n    {line}" for line in lines)


# ---------------------------------------------------------------------------------------------------------- the program


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, usage=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [str(number) for number in range(1, len(NAMES) + 1)]
    parser.add_argument("name", choices=[*NAMES, *numbers, "all"], metavar="NAME", help="name, number, or all")
    parser.add_argument("--hint", action="store_true", help="print a hint instead of checking")
    parser.add_argument("--solution", action="store_true", help="check the stored solution instead of your function")
    args = parser.parse_args()
    try:
        if dist.get_world_size() > 1:
            raise ValueError("the check starts its own processes: type python -m exercises.check NAME")
    except ValueError as problem:  # or a launcher's variables contradict each other
        parser.error(str(problem))
    if args.name in numbers:
        args.name = NAMES[int(args.name) - 1]
    return args


def main() -> int:
    """Return 0 if all exercises that were asked for are correct, else 1."""
    args = parse_args()
    names = NAMES if args.name == "all" else [args.name]
    if args.hint:
        for name in names:
            print(f"{name}:{module_of(name).HINT}")
        return 0
    folder = ROOT / "exercises" / "solutions" if args.solution else ROOT / "exercises"
    torch.set_num_threads(1)  # no pool of threads, so processes can be forked
    verdicts = {name: check(name, folder / f"{name}.py") for name in names}
    is_right = set(verdicts.values()) == {EQUAL}
    solved = [] if args.solution else solved_with(verdicts)
    if args.name == "all":
        print_summary(verdicts)
    elif is_right:
        blank = [name for name in NAMES[NAMES.index(args.name) + 1 :] + NAMES if name not in solved]
        print("passed", *([] if args.solution else [f"{len(solved)} of {len(NAMES)} solved"]), sep="; ", end="")
        print(f"; next: {blank[0]}" if blank else "")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
