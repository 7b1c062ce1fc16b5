"""README.md can't drift: what it takes from the files is taken again here, and compared.

    python tests/test_readme.py        # rewrites README.md: everything between <!-- kind: what --> and <!-- end -->

Compared exactly, but for the figures that depend on the machine in what a program prints (see `masked`).
"""

import ast
import contextlib
import functools
import inspect
import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from forked import ROOT, SHELL, forker, shell

REWRITING = __name__ == "__main__"
README = ROOT / "README.md"
SCRIPTS = sorted([*(path.name for path in ROOT.glob("m*.py")), "cifar10_ddp.py"])
STEPS = ["mnist_single.py", "mnist_dataparallel.py", "mnist_ddp.py", "mnist_amp.py"]
BLOCK = re.compile(r"<!-- (diff|lines|output|reference|report|snippet|wrong): (.+?) -->(.*?)<!-- end -->", re.DOTALL)
REWRITE = "README.md is out of date: run  python tests/test_readme.py"


def text():
    return README.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------- what is generated


def git_diff(*args):
    """git's own diff, whatever the user's configuration says."""
    command = ["git", "diff", "--no-index", "--no-ext-diff", "--no-color", "--diff-algorithm=myers", *args]
    env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def diff(before, after):
    """The diff without the four lines that name the files, and without line numbers."""
    hunks = git_diff("-U1", before, after).split("\n@@ ")[1:]
    hunks = ["@@" + hunk.split("@@", 1)[1] for hunk in hunks]
    return "\n```diff\n" + "\n".join(hunks).rstrip("\n") + "\n```\n"


def lines(before, after):
    added, removed, _ = git_diff("--numstat", before, after).split(maxsplit=2)
    return f"+{added} -{removed}"


@functools.cache
def run(command):
    """What `python` prints with these arguments: two processes on a CPU, whatever this machine has."""
    script, *args = shlex.split(command)
    if REWRITING:  # its figures are for readers: all of it as they would run it
        with tempfile.TemporaryDirectory() as folder:  # cifar10_ddp.py leaves a folder behind
            done = shell(ROOT / script, *args, cwd=folder, timeout=280, **SHELL)
    else:
        done = forker().run(script, *args, timeout=280, **SHELL)
    assert done.code == 0, done.err
    return done.out


def output(command):
    return f"\n```console\n$ python {command}\n{run(command)}```\n"


PROGRAMS = {
    "hang.py": """import time

import torch

import distributed as dist


def worker(rank, world_size):
    dist.init_process_group(rank, world_size)
    if rank == 1:
        time.sleep(3600)  # a data loader that never comes back, say
    dist.reduce(torch.tensor(0.5))


if __name__ == "__main__":
    dist.launch(worker)
"""
}


@functools.cache
def report(name):
    """The program, and what it says when it is asked where its ranks stand."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).write_text(PROGRAMS[name], encoding="utf-8")
        job = forker().start(Path(folder, name), cwd=Path(folder), path=[ROOT], NPROC=2)
        out, err = job.files
        for file, count in (out, 1), (err, 3):  # "distributed: 2 processes ...": all have come; and the table
            while file.read_text().count("\n") < count:
                time.sleep(0.05)
            if file == out:
                time.sleep(1)
                os.kill(job.pid, signal.SIGUSR1)
        os.kill(job.pid, signal.SIGTERM)
        said = job.wait().err.replace(os.path.realpath(folder), "/home/you").splitlines(keepends=True)
        table, end = "".join(said[:3]), "".join(said[3:])
    session = f"$ NPROC=2 python {name} &\n$ kill -USR1 $!\n{table}$ kill $!\n{end}"
    return f"\n```python\n{PROGRAMS[name]}```\n\n```console\n{session}```\n"


@functools.cache
def wrong(command):
    """The lines of doctor.py's table that are not ok."""
    *variables, _, script = shlex.split(command)
    done = forker().run(script, **(SHELL | dict(variable.split("=") for variable in variables)))
    lines = "".join(line for line in done.out.splitlines(keepends=True) if line.startswith("WRONG"))
    return f"\n```console\n$ {command} | grep WRONG\n{lines}```\n"


def definitions(file):
    """(signature or name, one sentence) for everything public in the file, in its order."""
    source = (ROOT / file).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign):
            name = node.targets[0].id
        if not name or name.startswith("_"):
            continue
        if isinstance(node, ast.Assign):
            if isinstance(node.value, ast.Name):
                yield name, f"`{node.value.id}` by another name."
            else:
                comment = source.splitlines()[node.lineno - 1].partition("  # ")[2]
                yield ast.unparse(node), comment[:1].upper() + comment[1:] + "."
            continue
        sentence = re.split(r"(?<=\.)\s", " ".join(ast.get_docstring(node).split()))[0]
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            for argument in [*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
                if argument:
                    argument.annotation = None
            name = f"{name}({ast.unparse(arguments)})"
        yield name, sentence


def reference(file):
    rows = [f"| `{name}` | {sentence} |" for name, sentence in definitions(file)]
    return "\n" + "\n".join(["| name | what it is |", "|---|---|", *rows]) + "\n"


def snippet(file):
    """The program in the file's docstring: its first indented block, up to the lines that launch it."""
    docstring = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    block = textwrap.dedent(re.search(r"(?:^(?: {4}.*)?\n)+", docstring.split("\n", 1)[1], re.MULTILINE)[0])
    program = re.sub(r"\n\n(?=def |if )", "\n\n\n", block.split("\npython ")[0].strip("\n"))
    return "\n```python\n" + re.sub(r" {2,}# ", "  # ", program) + "\n```\n"  # as ruff formats it


def generate(kind, what):
    return globals()[kind](*([what] if kind in ("output", "wrong") else what.split()))


def masked(printed):
    """Without the figures that depend on the machine: its speed, and how its CPU rounds."""
    printed = re.sub(r"-\d{8}-\d{6}\b", "-TIME", printed)
    return re.sub(r"(loss |accuracy |train |test |top-\d |\(|right |in |  )\d+(\.\d+)?(?=%|/| |\n)", r"\1#", printed)


def rewrite():
    README.write_text(
        BLOCK.sub(lambda m: f"<!-- {m[1]}: {m[2]} -->{generate(m[1], m[2])}<!-- end -->", text()), encoding="utf-8"
    )


# --------------------------------------------------------------------------------------------------------- the tests


def blocks(*kinds):
    return [pytest.param(m[1], m[2], m[3], id=f"{m[1]}: {m[2]}") for m in BLOCK.finditer(text()) if m[1] in kinds]


@pytest.mark.parametrize(("kind", "what", "shown"), blocks("diff", "lines", "reference", "report", "snippet", "wrong"))
def test_what_is_taken_from_the_files_equals_them(kind, what, shown):
    assert shown == generate(kind, what), REWRITE


@pytest.mark.timeout(300)  # bf16 on a CPU without bf16 instructions takes a while
@pytest.mark.parametrize(("kind", "what", "shown"), blocks("output"))
def test_what_a_program_prints(kind, what, shown):
    from cifar10_ddp import fast_dtype

    if what.startswith("mnist_amp.py") and fast_dtype(torch.device("cpu")) == torch.float32:
        pytest.skip("this CPU has no bf16 instructions: it would take minutes")
    printed = generate(kind, what)
    assert masked(shown) == masked(printed), REWRITE
    for before, now in zip(re.findall(r"([\d.]+)% ", shown)[-1:], re.findall(r"([\d.]+)% ", printed)[-1:], strict=True):
        assert float(now) == pytest.approx(float(before), abs=3 if "dry-run" not in what else 100), REWRITE
        assert what != "mnist_ddp.py --dataset synthetic" or float(now) >= 97  # the promise for this data


def test_figures_are_masked_and_nothing_else():
    line = "epoch 1/3  loss 2.1669  accuracy 67.85% (1357/2000)  6208 images/s\ndone in 6.1 s\n"
    assert masked(line) == "epoch 1/3  loss #  accuracy #% (#/2000)  # images/s\ndone in # s\n"
    assert masked("epoch 0  loss 0.7531  right 36 of 40 in the last batch\n") == (
        "epoch 0  loss #  right # of 40 in the last batch\n"
    )
    banner = "distributed: 2 processes, gloo, cpu\nsynthetic on cpu, --batch-size 200: global batch 200 = 2 x 100\n"
    assert masked(banner) == banner


def test_every_step_and_every_script_is_shown():
    shown = [(m[1], m[2]) for m in BLOCK.finditer(text())]
    for before, after in zip(STEPS, STEPS[1:], strict=False):
        assert ("diff", f"{before} {after}") in shown and ("lines", f"{before} {after}") in shown
    assert sorted({what.split()[0] for kind, what in shown if kind == "output"}) == SCRIPTS
    assert len(BLOCK.findall(text())) == text().count("<!-- end -->"), "a marker is misspelt"


def test_reference_is_complete():
    """By importing, not by parsing: nothing public is left out, and each one-line description is of something real."""
    with mock.patch.object(sys, "path", [str(ROOT), *sys.path]):
        import distributed
    described = {re.match(r"\w+", name)[0] for name, _ in definitions("distributed.py")}
    ours = {name for name, value in vars(distributed).items() if inspect.getmodule(value) is distributed}
    assert {name for name in ours if not name.startswith("_")} <= described
    assert all(hasattr(distributed, name) for name in described)
    used = set(re.findall(r"`(?:dist|distributed)\.(\w+)", text())) - {"py"}
    assert used <= described


def run_snippet(file, folder):
    prelude = "import torch\nNet, dataset, loss = lambda: torch.nn.Linear(2, 1), range(10), torch.tensor(0.25)\n"
    program = re.search(r"```python\n(.*?)```", snippet(file), re.DOTALL)[1]
    (folder / "train.py").write_text(prelude + program, encoding="utf-8")
    done = forker().run(folder / "train.py", cwd=folder, path=[ROOT], timeout=60, NPROC=2)
    assert done.code == 0, done.err
    assert "2 processes" in done.out
    return done.out


def test_the_snippet_runs(tmp_path):
    assert "0.25" in run_snippet("distributed.py", tmp_path)


def test_the_snippet_of_checkpoints_runs_and_goes_on(tmp_path):
    import checkpoint

    run_snippet("checkpoint.py", tmp_path)
    last = tmp_path / "run" / "last.pt"
    assert checkpoint.read(last)["step"] == 1000 and checkpoint.read(last.with_name("previous.pt"))["step"] == 900
    os.replace(last.with_name("previous.pt"), last)
    run_snippet("checkpoint.py", tmp_path)
    assert checkpoint.read(last)["step"] == 1000 and checkpoint.read(last.with_name("previous.pt"))["step"] == 900


def commands():
    """Every command line in README.md: in ```sh blocks, in inline code, and after $ in what programs print."""
    found = [line for block in re.findall(r"```sh\n(.*?)```", text(), re.DOTALL) for line in block.splitlines()]
    found += re.findall(r"`((?:\w+=\S* )*(?:python|torchrun|srun|mpirun) [^`]+)`", text())
    found += re.findall(r"^\$ (.+)$", text(), re.MULTILINE)
    found = [part.strip() for line in found for part in re.sub(r"(^|\s)#.*", "", line).split("&&")]
    return sorted({command for command in found if command})


def refused(script, args):
    """What the script's own parser has against these arguments; --help comes last, so that nothing is run."""
    streams = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [script, *args, "--help"]))
        stack.enter_context(mock.patch.object(sys, "path", [str(ROOT), *sys.path]))
        stack.enter_context(contextlib.redirect_stdout(streams))
        stack.enter_context(contextlib.redirect_stderr(streams))
        end = stack.enter_context(pytest.raises(SystemExit))
        runpy.run_path(str(ROOT / script), run_name="__main__")
    flags = {arg.split("=")[0] for arg in args if arg.startswith("--")}
    unknown = flags - set(re.findall(r"--[\w-]+", streams.getvalue().split("options:")[-1]))
    return unknown or (end.value.code and streams.getvalue())


@pytest.mark.parametrize("command", commands())
def test_a_command_names_files_and_flags_that_exist(command):
    words = shlex.split(command)
    while re.match(r"\w+=", words[0]):
        words.pop(0)
    program, args = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(args)
        program, args = "python", [parsed.training_script, *parsed.training_script_args]
    if program in ("srun", "mpirun"):
        program, args = "python", args[args.index("python") + 1 :]
    if args[:2] == ["doctor.py", "run"]:
        args = args[2:]
    if program == "python" and args[0].endswith(".py"):
        if args[0] in ("train.py", *PROGRAMS):  # the reader's own
            return
        assert (ROOT / args[0]).is_file(), f"{args[0]} doesn't exist"
        assert args[0] not in SCRIPTS or not refused(args[0], args[1:])
    elif program == "pip":
        assert args[:2] != ["install", "-r"] or (ROOT / args[2]).is_file()
    else:
        assert program in ("python", "python3", "kill", "lscpu", "pip"), (
            f"{program}: is this a command of the README's?"
        )


@pytest.mark.parametrize("message", re.findall(r"^> (.+)$", text(), re.MULTILINE))
def test_a_quoted_message_is_in_the_source(message):
    """Quoted lines are our own messages, with … for what varies."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.glob("*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    strings = [node.value for node in nodes if isinstance(node.value, str)]
    for part in message.strip("`").split("…"):
        assert any(part.strip() in string for string in strings), f"no file says: {part}"


def test_links_and_environment_variables_exist():
    for target in re.findall(r"\]\(([^)#\s]+)", text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))
    for variable in set(re.findall(r"\b(?:DIST_\w+|NPROC)\b", text())):
        assert variable in sources, variable


def test_ci_finds_its_commands():
    """.ci/run takes them from here."""
    for name, part in ("train", "mnist_ddp.py"), ("test", "pytest"):
        assert re.search(rf"^<!-- command: {name} -->\n```sh\n[^\n]*{part}[^\n]*\n```$", text(), re.MULTILINE)


if __name__ == "__main__":
    rewrite()
