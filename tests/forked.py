"""Runs of programs, for the tests: forked from one process that has imported what they need, or as a shell starts them.

Importing torch takes seconds, so most runs are forked; what a user's shell starts is covered by a few true
subprocesses.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.programs import ENVIRONMENT, LIMIT, ROOT, SHELL, Result, shell

__all__ = ["ENVIRONMENT", "ROOT", "SEVERAL", "SHELL", "TWO", "WORLDS", "Forker", "Result", "forker", "shell"]

TWO = pytest.param(2, marks=pytest.mark.slow)  # three processes find what two find, and more
WORLDS = pytest.mark.parametrize("n", [1, TWO, 3])
SEVERAL = pytest.mark.parametrize("n", [TWO, 3])

# For each line of stdin, a job: its process's id and its exit code, each on a line of stdout.
PROGRAM = """
import io, json, os, runpy, signal, sys, tempfile, time, traceback
import filelock, torch, torch._dynamo, torch.utils.tensorboard, torchvision, tqdm
from matplotlib.figure import Figure
from PIL import ImageFont
axes = Figure().subplots()
axes.plot([1], label="a")
axes.legend()
axes.figure.savefig(io.BytesIO(), format="png")  # the first picture looks for fonts
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
for name, value in job["environment"].items():
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
tempfile.tempdir = None  # torch._dynamo has asked for it, before TMPDIR was set
os.chdir(job["cwd"])
sys.argv = job["argv"]
sys.path[0:1] = [job["folder"], *job["path"]]
code = 0
try:
    exec(job["before"])
    if job["module"]:
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:  # as the interpreter does it
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code == 1 and end.code != 1:
        print(end.code, file=sys.stderr)
except BaseException:
    traceback.print_exc()
    code = 1
if sys.stdout:  # or the test has closed it
    sys.stdout.flush()
os._exit(code)  # tidying up all of torch's modules would take over a second
"""


class Forker:
    """Starts programs, one after the other."""

    def __init__(self, **environment):
        command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
        self.process = subprocess.Popen(command, env=ENVIRONMENT | environment, stdin=pipe, stdout=pipe, text=True)
        self.folder, self.job = tempfile.TemporaryDirectory(), None

    def start(self, script, *args, cwd=None, before="", path=(), timeout=LIMIT, **environment):
        """As `python script args` in the folder cwd (or an empty one), with SIGKILL after the timeout.

        `-m` and a module, as for python itself, runs a module of the repository: "-m", "variants.mnist_by_hand".
        `before` is run first, `path` is PYTHONPATH, `environment` are further variables; None: not set.
        """
        if self.job:
            self.job.end()  # or the next answer would be this one's
        cwd = cwd or Path(tempfile.mkdtemp(dir=self.folder.name), "cwd")
        cwd.mkdir(exist_ok=True)
        files = [Path(f"{cwd}.out"), Path(f"{cwd}.err")]
        for file in files:
            file.write_text("")
        module = None
        if script == "-m":
            module, *args = args
            script = f"{module.replace('.', '/')}.py"
        file = ROOT / script
        job = {"argv": [str(file), *map(str, args)], "cwd": str(cwd), "path": [str(p) for p in path]}
        job |= {"module": module, "folder": str(ROOT if module else file.parent)}
        job |= {"out": str(files[0]), "err": str(files[1]), "before": before, "timeout": timeout}
        job |= {"environment": {name: value if value is None else str(value) for name, value in environment.items()}}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        self.job = Job(self.answer, files)
        return self.job

    def run(self, *args, **options):
        return self.start(*args, **options).wait()

    def answer(self):
        return int(self.process.stdout.readline())

    def end(self):
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()


@functools.cache
def forker():
    """The one Forker, for all tests."""
    made = Forker()
    atexit.register(made.end)
    return made


class Job:
    def __init__(self, answer, files):
        self.answer, self.files, self.pid, self.over = answer, files, answer(), False

    def wait(self):
        code, self.over = self.answer(), True
        return Result(code, *(file.read_text() for file in self.files))

    def end(self):
        """If nobody has waited for it."""
        if not self.over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()
