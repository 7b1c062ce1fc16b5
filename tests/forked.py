"""Runs of the scripts, for the tests: forked from one process that has imported what they need, or started by a shell.

Importing torch takes seconds, so most runs are forked; what a user's shell starts is covered by a few true
subprocesses, and by the runs of test_readme.py.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# No GPU, so that the expectations hold on every machine; one thread, so that every run computes the same sums.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("NPROC", "PYTHONPATH")}
ENVIRONMENT |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1"}

# For each line of stdin, a job: its process's id and its exit code, each on a line of stdout.
PROGRAM = """
import json, os, runpy, signal, sys, time, traceback
import filelock, torch, torchvision, tqdm
from PIL import ImageFont
exec(sys.argv[1])
for line in sys.stdin:
    job = json.loads(line)
    pid, ended, deadline = os.fork(), 0, time.monotonic() + job["timeout"]
    if pid == 0:
        break
    print(pid, flush=True)
    while not ended:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended and time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)  # what it has started ends with it
            ended, status = os.waitpid(pid, 0)
        time.sleep(0.005)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    sys.exit()
for fd, (file, mode) in enumerate([(os.devnull, os.O_RDONLY), (job["out"], os.O_WRONLY), (job["err"], os.O_WRONLY)]):
    os.dup2(os.open(file, mode | os.O_CREAT), fd)
os.environ.update(job["environment"])
os.chdir(job["cwd"])
sys.argv = job["argv"]
sys.path[0:1] = [os.path.dirname(sys.argv[0]), *job["path"]]
code = 0
try:
    exec(job["before"])
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:  # as the interpreter does it
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code == 1 and end.code != 1:
        print(end.code, file=sys.stderr)
except BaseException:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
os._exit(code)  # tidying up all of torch's modules would take over a second
"""


class Run(NamedTuple):
    code: int
    out: str
    err: str


class Forker:
    """Starts scripts, one after the other; `imports` is what it runs before the first."""

    def __init__(self, imports=""):
        command, pipe = [sys.executable, "-c", PROGRAM, imports], subprocess.PIPE
        self.process = subprocess.Popen(command, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True)

    def start(self, cwd, script, *args, before="", path=(), timeout=30, **environment):
        """As `python script args` in the folder cwd, with SIGKILL after the timeout; `wait` for it before the next.

        `before` is run first, `path` is PYTHONPATH, `environment` are further variables.
        """
        cwd.mkdir(exist_ok=True)
        files = [Path(f"{cwd}.out"), Path(f"{cwd}.err")]
        for file in files:
            file.write_text("")
        job = {"argv": [str(ROOT / script), *map(str, args)], "cwd": str(cwd), "path": [str(p) for p in path]}
        job |= {"out": str(files[0]), "err": str(files[1]), "before": before, "timeout": timeout}
        job |= {"environment": {name: str(value) for name, value in environment.items()}}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return Job(self.answer, files)

    def answer(self):
        return int(self.process.stdout.readline())

    def end(self):
        self.process.kill()
        self.process.communicate()


class Job:
    def __init__(self, answer, files):
        self.answer, self.files, self.pid, self.over = answer, files, answer(), False

    def wait(self):
        self.over, code = True, self.answer()
        return Run(code, *(file.read_text() for file in self.files))

    def end(self):
        """If nobody has waited for it: the next job's answer must not be this one's."""
        if not self.over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


def shell(*command, cwd, timeout=60):
    # In a group of its own, of which all can be ended if it should hang.
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Run(process.returncode, out, err)
