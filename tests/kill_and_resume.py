"""Kill a training again and again, at random moments, and see that it ends as if nothing had happened.

    python tests/kill_and_resume.py [--kills 10] [--nproc 2] [--seed N]

It starts cifar10_ddp.py as a user would, once to the end; then once more, and kills that run with SIGKILL: in turn all
of its processes, the first one alone, and whichever while a checkpoint is half written.  Each time it is resumed.  At
the end every tensor of the two last checkpoints must be the same, bit by bit, every file readable, none left over.
Takes some minutes; exit code 0 if all is well, else 1.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import checkpoint  # noqa: E402

FLAGS = ["--dataset", "synthetic", "--width", "2", "--batch-size", "200", "--epochs", "3", "--checkpoint-every", "1"]
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # a GPU's sums depend on the moment
ENVIRONMENT.pop("NPROC", None)


def start(cwd, nproc, *args):
    """In cwd, its temporary files too: with all processes killed nobody is left to remove them."""
    command = [sys.executable, str(ROOT / "cifar10_ddp.py"), *FLAGS, "--nproc", str(nproc), *args]
    options = {"cwd": cwd, "env": ENVIRONMENT | {"TMPDIR": str(cwd)}, "start_new_session": True}
    with open(cwd / "output.txt", "a") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options)


def family(pid):
    """The process and all its descendants; each worker has a group of its own, so killing a group isn't enough."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(int(child)))]


def run_folder(cwd):
    return next((path for path in cwd.glob("runs/*") if path.is_dir()), None)


def last_saved(cwd):
    """A number that every new last.pt changes; None while there is none."""
    try:
        return (run_folder(cwd) / "last.pt").stat().st_mtime_ns
    except (TypeError, OSError):
        return None


def kill(process, cwd, how, delay):
    """Kill it `delay` seconds after its first checkpoint, or at the next write; returns what was done, or None."""
    before = last_saved(cwd)
    while process.poll() is None and last_saved(cwd) in (None, before):  # until it has saved something of its own
        time.sleep(0.001)
    time.sleep(delay)
    half = ""
    if how == "in a write":
        while process.poll() is None and not half:
            half = "a half written file was there" if (run_folder(cwd) / ".last.pt.tmp").exists() else ""
    if process.poll() is not None:
        return None
    victims = [process.pid] if how == "the first process alone" else family(process.pid)
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    process.wait()
    return f"killed {len(victims)} process(es) {delay:.2f} s after a checkpoint, {how}" + (half and f": {half}")


def differences(one, other, name="checkpoint"):
    """Where two checkpoints differ, but for the speed in `history`."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [name]
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{name}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        skipped = {"training_images_per_s"}
        return [
            line for key in one if key not in skipped for line in differences(one[key], other[key], f"{name}.{key}")
        ]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for number, (a, b) in pairs for line in differences(a, b, f"{name}[{number}]")]
    return [] if one == other else [f"{name}: {one} and {other}"]


def faults(whole, broken):
    """All that is wrong with a run that has come to its end, a line for each."""
    folder = run_folder(broken)
    found = [f"left over: {path.name}" for pattern in (".*.tmp", "*.corrupt") for path in folder.glob(pattern)]
    for path in folder.glob("*.pt"):
        try:
            checkpoint.read(path)
        except checkpoint.CheckpointError as problem:
            found.append(str(problem))
    if not found:
        states = [checkpoint.read(run_folder(cwd) / "last.pt") for cwd in (whole, broken)]
        found += [f"differs: {line}" for line in differences(*states)]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.nproc} process(es): cifar10_ddp.py {' '.join(FLAGS)}", flush=True)
    chance, kills, runs = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        whole, broken = Path(temporary, "whole"), Path(temporary, "broken")
        whole.mkdir()
        broken.mkdir()

        def stop(problems):
            sys.exit(f"{chr(10).join(problems)}\nThe killed run said:\n{(broken / 'output.txt').read_text()[-6000:]}")

        begun = time.monotonic()
        if start(whole, args.nproc).wait():
            sys.exit(f"the uninterrupted run failed:\n{(whole / 'output.txt').read_text()}")
        took = time.monotonic() - begun
        print(f"the uninterrupted run took {took:.1f} s", flush=True)
        while kills < args.kills or run_folder(broken):
            resume = ["--resume", f"runs/{run_folder(broken).name}"] if run_folder(broken) else []
            process, done = start(broken, args.nproc, *resume), None
            if kills < args.kills:
                how = ("all of them", "the first process alone", "in a write")[kills % 3]
                done = kill(process, broken, how, chance.uniform(0, 1.2 * took / (args.kills + 1)))
            if done:
                kills += 1
                path, corrupt = checkpoint.newest(run_folder(broken))
                if corrupt:
                    stop(corrupt)
                state = checkpoint.read(path)
                where = f"{path.name}, epoch {state['epoch'] + 1}, batch {state['batch']}"
                print(f"kill {kills}: {done}; goes on from {where}", flush=True)
                continue
            if process.wait():
                stop([f"a run ended with code {process.returncode}"])
            if problems := faults(whole, broken):
                stop(problems)
            print(f"after {kills} kills it has come to its end: every tensor is the uninterrupted run's", flush=True)
            runs += 1
            shutil.rmtree(run_folder(broken))
    print(f"{kills} kills in {runs} run(s): bit by bit what an uninterrupted run gives")


if __name__ == "__main__":
    main()
