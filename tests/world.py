"""Where the tests run their code: in a kept world of ranks, in forked programs, or in programs as a shell starts them.

    @on_ranks(1, 3)                # a test whose body runs on one rank, and on three that stay alive from test to test
    run(body, 3, *args)            # body(*args) there, within a test; a list of results
    forker().run("min_DDP.py")     # a program, forked from one process that has imported what programs need
    shell("min_DDP.py")            # python min_DDP.py

Starting ranks and importing torch is what makes such tests slow, so most bodies run in the kept world.
"""

import atexit
import contextlib
import functools
import inspect
import io
import json
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch

import distributed as dist
from dev.programs import ENVIRONMENT, LIMIT, ROOT, SHELL, Result, shell  # noqa: F401  for the tests, too

FOLDERS = {"ddp_by_diff", "demos", "dev", "exercises", "tests", "variants"}
# The project's programs.  (.ci/run tests a copy that git knows nothing of.)
FILES = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))]
PROGRAMS = sorted(file.relative_to(ROOT).as_posix() for file in FILES)


NEEDS = {"mnist_fsdp": (2, 9), "mnist_pipeline": (2, 8), "mnist_pipeline_1f1b": (2, 8)}  # versions of torch


def skip_if_refused(variant):
    if torch.__version__ < NEEDS.get(variant, (2, 4)):
        pytest.skip(f"{variant}.py refuses this torch")


def wait_for(condition, seconds=60, seen=lambda: "it did not happen"):
    """For an event; the limit is for a test that has failed, and then says what was seen instead."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.01)


def free_port():
    """One that nobody else gets: those that the system chooses begin at 32768 (on macOS at 49152)."""
    while True:
        port = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def gone(pid):
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def processes_in(folder):
    """Those that stand in this folder; none where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "cwd") == str(folder) and not gone(path.name):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def chromium():
    """A browser without a window, driven by selenium; the test is skipped where it isn't installed."""
    pytest.importorskip("selenium", reason="pip install selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ["--headless=new", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]:
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(driver))


def pictures_to_scroll(browser):
    """How many pictures of this page are shown: each in its natural width, in a box that scrolls to its end."""
    pictures = [one for one in browser.find_elements("css selector", "img") if one.is_displayed()]
    for one in pictures:
        seen = browser.execute_async_script(
            """const [picture, done] = arguments, box = picture.parentElement;
            picture.loading = "eager";
            picture.decode().then(() => {
                box.scrollLeft = picture.naturalWidth;
                const [inside, outside] = [picture.getBoundingClientRect(), box.getBoundingClientRect()];
                done([inside.width - picture.naturalWidth, inside.right - outside.right]);
            });""",
            one,
        )
        assert abs(seen[0]) < 1 and seen[1] < 1, (browser.current_url, one.get_attribute("src"), seen)
    return len(pictures)


# ---------------------------------------------------------------------------------------------------- a kept world


class World:
    """n ranks in one process group, started by `launch` in a process of their own."""

    def __init__(self, n):
        fork = multiprocessing.get_context("fork")
        self.pipes, theirs = zip(*(fork.Pipe() for _ in range(n)), strict=True)
        self.process = fork.Process(target=_start, args=(theirs, n))
        self.process.start()
        atexit.register(self.end)

    def run(self, body, args, limit):
        for pipe in self.pipes:
            pipe.send((body, args))
        try:
            answers = [pipe.recv() if pipe.poll(limit) else (f"no answer after {limit} s", None) for pipe in self.pipes]
        except BaseException:  # the test's time is up: these ranks would answer the next one
            self.end()
            raise
        errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]
        if errors:
            self.end()
            raise AssertionError("\n".join(errors))
        return [result for _, result in answers]

    def end(self):
        self.process.terminate()  # its ranks end with it, and its temporary folder
        self.process.join(10)
        self.process.kill()
        self.process.join()


def _start(pipes, n):
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    dist.launch(_serve, pipes, nproc=n)


def _serve(rank, n, pipes):
    dist.init_process_group()
    while True:
        body, args = pipes[rank].recv()
        try:
            answer = "", inspect.unwrap(body)(*args)
        except BaseException:
            answer = traceback.format_exc(), None
        pipes[rank].send(answer)


_worlds = {}


def run(body, n, *args, limit=100):
    """body(*args) on each of n ranks, in a group of gloo; what it returned, in rank order.  With n = 1: right here.

    body stands at the top level of a test file.  After a failure the ranks are started anew.
    """
    if n == 1:
        return [inspect.unwrap(body)(*args)]
    if n not in _worlds or not _worlds[n].process.is_alive():
        _worlds[n] = World(n)
    return _worlds[n].run(body, args, limit)


def on_ranks(*sizes):
    """A test of this body for each of these numbers of ranks; it gets fixtures and parameters as any test does."""

    def as_test(body):
        names = [*inspect.signature(body).parameters]

        @functools.wraps(body)  # the ranks find it by its name
        def test(n, **fixtures):
            run(test, n, *(fixtures[name] for name in names))

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("n", *names)]
        test.__signature__ = inspect.Signature(parameters)  # for pytest
        return pytest.mark.parametrize("n", sizes)(test)

    return as_test


def run_in_a_group_of_one(body, *args):
    """body(*args) in a forked process: pytest's own stays fit to be forked."""
    with multiprocessing.get_context("fork").Pool(1, dist.init_process_group) as pool:
        return pool.apply_async(body, args).get(60)


def error_of(function, *args, **kwargs):
    """The error as text, or what was returned."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def ended(script, *args, **variables):
    """(exit code, stdout, stderr) of `python script args`, here in this process: it ends as it reads its flags."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(mock.patch.object(sys, "argv", [script, *map(str, args)]))
        stack.enter_context(mock.patch.object(dist, "launch", lambda *_, **__: pytest.fail(f"{script} {args} starts")))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        end = stack.enter_context(pytest.raises(SystemExit))
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return end.value.code, out.getvalue(), err.getvalue()


def refused(script, *words, flags=(), **variables):
    """With these flags it ends as P9 says: one line on stderr, with all the words, and exit code 2."""
    code, out, err = ended(script, *flags, **variables)
    assert (code, out) == (2, "") and re.fullmatch(r"[^\n]+: [^\n]+\n", err), (script, flags, out, err)
    assert [word for word in words if word not in err] == [], err


# ------------------------------------------------------------------------------------------------- forked programs

# `before`, for programs with made-up digits: to draw all 14,000 takes half a second in each process.
FEW_DIGITS = "import data; digits = data._digits; data._digits = lambda count, seed: digits(150, seed)\n"

# For each line of stdin, a job: its process's id and its exit code, each on a line of stdout.
PROGRAM = """
import gc, io, json, os, runpy, signal, sys, tempfile, threading, time, traceback
import filelock, torch, torch._dynamo, torch.utils.tensorboard, torchvision, tqdm
from matplotlib.figure import Figure
from PIL import ImageFont
axes = Figure().subplots()
axes.plot([1], label="a")
axes.legend()
axes.figure.savefig(io.BytesIO(), format="png")  # the first picture looks for fonts
tqdm.tqdm.set_lock(threading.RLock())  # its own would be a semaphore, which Python 3.14 would miss at the end
gc.freeze()  # a program that looked at all these objects would get a copy of their memory
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
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
for fd, (file, mode) in enumerate([(os.devnull, os.O_RDONLY), (job["out"], os.O_WRONLY), (job["err"], os.O_WRONLY)]):
    os.dup2(os.open(file, mode | os.O_CREAT), fd)
sys.stdout = open(1, "w", closefd=False)  # not frozen: distributed_launcher.py looks for open files
sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
for name, value in job["environment"].items():
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
tempfile.tempdir = None  # torch._dynamo has asked for it, before TMPDIR was set
os.chdir(job["cwd"])
sys.argv = job["argv"]
sys.path[0:1] = [job["folder"], *job["path"]]
given = os.environ.get("PYTHONPATH")  # simulated GPUs need theirs
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*job["path"], given]))  # for what the program starts
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

        `-m` and a module, as for python itself: of the folder cwd, or of the repository ("-m", "dev.build").
        `before` is run first, `path` is PYTHONPATH, `environment` are further variables; None: not set.
        """
        if self.job:
            self.job.end()  # or the next answer would be this one's
        cwd = cwd or Path(tempfile.mkdtemp(dir=self.folder.name), "cwd")
        cwd.mkdir(exist_ok=True)
        files = [Path(tempfile.mkdtemp(dir=self.folder.name), name) for name in ("out", "err")]
        for file in files:
            file.write_text("")
        module, root = None, ROOT
        if script == "-m":
            module, *args = args
            script = f"{module.replace('.', '/')}.py"
            root = cwd if (cwd / script).exists() else ROOT
        file = root / script
        job = {"argv": [str(file), *map(str, args)], "cwd": str(cwd), "path": [str(p) for p in path]}
        job |= {"module": module, "folder": str(root if module else file.parent)}
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

    def err(self):
        """What it has printed so far."""
        return self.files[1].read_text()

    def end(self):
        """If nobody has waited for it."""
        if not self.over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()
