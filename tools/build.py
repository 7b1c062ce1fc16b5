"""Writes what is generated in README.md and docs/*.md: everything between <!-- kind: what --> and <!-- end -->.

    python -m tools.build                 # rewrites the files in place; does nothing where they are up to date
    python -m tools.build --check         # only compares; exit code 1 if a file is out of date
    python -m tools.build --new-figures   # takes the programs' speeds and losses anew, too
    python -m tools.build --pages         # only docs/index.html and steps.html, in about a second: see pages.py

The same files in, the same pages out.  Only the speeds and times that a program prints differ from run to run, and its
losses a little from CPU to CPU: an output on a page stays as it is while all else in it is true (`same_output`).
The pictures of docs/collectives.md and docs/ddp_step.svg are written, too: see collectives.py and ddp_step.py.

    kind        what                   what is written
    steps       [FOLDER]               the table of the progression (or of its branches in a folder), from STEPS
    lines       PARENT FILE            +added -removed, as git counts them
    diff        PARENT FILE [N]        the diff, with N (1) lines of context
    output      SCRIPT [ARGS ...]      what the program prints (or -m MODULE [ARGS ...])
    program     MODULE                 a program of exercises/, and what it prints with two processes
    report      MODULE                 such a program, and what it says when it is asked where its ranks stand
    mistake     NAME                   a mistake of exercises/mistakes.py, wrong and right: its lines, their output
    collective  NAME                   one of exercises/collectives.py: its picture, its lines, what it prints
    uses        NAME                   which scripts use this collective, and in which functions
    function    FILE NAME              a function of the file
    wrong       COMMAND                what doctor.py finds wrong
    snippet     FILE                   the program in the file's docstring
    benchmark   PART                   of experiments/results/benchmark.csv: table, picture, findings or conditions
    reference   FILE                   a table of the file's public names, from their docstrings
    measured    FILE                   the file: what a tool has measured and written to experiments/results/
"""

import argparse
import ast
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from experiments import benchmark_results
from tools import collectives, ddp_step, pages, programs
from tools.programs import ROOT, SHELL, Result

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OUT_OF_DATE = "{} is out of date: run  python -m tools.build"


class Step(NamedTuple):
    script: str
    parent: str  # "" for the first
    adds: str


STEPS = [
    Step("mnist_single.py", "", "one device: the plain loop"),
    Step("mnist_dataparallel.py", "mnist_single.py", "`nn.DataParallel`: one process, all GPUs of a machine"),
    Step(
        "mnist_ddp.py",
        "mnist_dataparallel.py",
        "`DistributedDataParallel` (DDP): one process per device (a GPU, or a share of the CPU)",
    ),
    Step("mnist_ddp_plain.py", "mnist_ddp.py", "the same in plain torch, without `distributed.py`, under torchrun"),
    Step("mnist_amp.py", "mnist_ddp.py", "mixed precision with `torch.amp`: 16-bit numbers where that is safe"),
    Step("mnist_apex.py", "mnist_ddp.py", "mixed precision with NVIDIA Apex, as older code has it"),
    Step("variants/mnist_by_hand.py", "mnist_ddp.py", "what DDP does, written out"),
    Step("variants/mnist_overlap.py", "variants/mnist_by_hand.py", "the all-reduces run while backward goes on"),
    Step("variants/mnist_zero.py", "variants/mnist_by_hand.py", "ZeRO-1: the optimizer's state in slices"),
    Step("variants/mnist_accumulate.py", "mnist_ddp.py", "gradient accumulation: the batch doesn't fit"),
    Step("variants/mnist_fsdp.py", "mnist_ddp.py", "`fully_shard` (FSDP2): the model doesn't fit"),
    Step("variants/mnist_local_sgd.py", "mnist_ddp.py", "local SGD: averages the weights, every few steps"),
    Step("variants/mnist_compile.py", "mnist_ddp.py", "`torch.compile`: fewer and larger operations"),
    Step(
        "variants/mnist_tensor_parallel.py",
        "mnist_ddp.py",
        "tensor parallelism: a layer's channels are shared out, all processes see the same batch",
    ),
    Step("variants/mnist_pipeline.py", "mnist_ddp.py", "a pipeline: each process has some of the layers"),
    Step("variants/mnist_horovod.py", "mnist_ddp.py", "the same under Horovod, to read older code"),
    Step("variants/mnist_xla.py", "mnist_ddp.py", "the same under PyTorch/XLA, for TPUs"),
]

MEASURED = ROOT / "experiments/results/benchmark.csv"


# ------------------------------------------------------------------------------------------------- progression, diffs


def git_diff(*args: str) -> str:
    """git's own diff, whatever the user's configuration says."""
    command = ["git", "diff", "--no-index", "--no-ext-diff", "--no-color", "--diff-algorithm=myers", *args]
    env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def diff(before: str, after: str, context: str = "1") -> str:
    """The diff without the four lines that name the files, and without line numbers."""
    hunks = git_diff(f"-U{context}", before, after).split("\n@@ ")[1:]
    hunks = ["@@" + hunk.split("@@", 1)[1].rstrip("\n").removesuffix("\n ") for hunk in hunks]  # no empty last line
    return "\n```diff\n" + "\n".join(hunks) + "\n```\n"


def lines(before: str, after: str) -> str:
    added, removed, _ = git_diff("--numstat", before, after).split(maxsplit=2)
    return f"+{added} -{removed}"


def steps(folder: str = ".") -> str:
    """The trunk in the root, or the branches in a folder."""
    rows = ["| script | what it adds | diff lines |", "|---|---|---|"]
    for step in STEPS:
        if str(Path(step.script).parent) == folder:
            changed = f"{lines(step.parent, step.script)} from `{step.parent}`" if step.parent else ""
            link = step.script if folder == "." else f"../{step.script}"
            rows.append(f"| [{step.script}]({link}) | {step.adds} | {changed} |")
    return "\n" + "\n".join(rows) + "\n"


def benchmark(part: str, path: str = "") -> str:
    """The picture (path: from the page to it), the table, or sentences within a paragraph."""
    if part == "picture":
        return f"\n![Images per second of each program; a black line marks the limit]({path})\n"
    text = getattr(benchmark_results, part)(benchmark_results.from_csv(MEASURED))
    return f"\n{text}" if part == "table" else " ".join(text.splitlines())


# --------------------------------------------------------------------------------------------- programs, what they say


run_program = programs.shell  # the tests put a faster one in its place, with the same arguments


def run(script: str | Path, *args: str, limit: float = 280, **environment: object) -> Result:
    """`python script args` (or -m MODULE) in an empty folder, with the root's files to be imported."""
    with tempfile.TemporaryDirectory() as folder:  # cifar10_ddp.py leaves a folder behind
        cwd = Path(folder, "cwd")
        cwd.mkdir()
        script = script if script == "-m" else ROOT / script
        return run_program(script, *args, cwd=cwd, path=[ROOT], timeout=limit, **environment)


@functools.cache
def printed(command: str) -> str:
    """What `python` prints with these arguments: two processes on a CPU, whatever this machine has."""
    script, *args = shlex.split(command)
    done = run(script, *args, **SHELL)
    assert done.code == 0, done.err
    return done.out


def output(command: str) -> str:
    return f"\n```console\n$ python {command}\n{printed(command)}```\n"


def source_of(module: str) -> str:
    return (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


@functools.cache
def program(module: str) -> str:
    done = run("-m", module, NPROC=2)
    assert done.code == 0, done.err
    return f"\n```python\n{source_of(module)}```\n\n```console\n$ NPROC=2 python -m {module}\n{done.out}```\n"


@functools.cache
def report(module: str) -> str:
    """The program, and what it says when it is asked where its ranks stand."""
    with programs.start("-m", module, NPROC=2) as process:
        process.stdout.readline()  # "distributed: 2 processes ...": all have come
        time.sleep(1)
        process.send_signal(signal.SIGUSR1)
        table = "".join(process.stderr.readline() for _ in range(3))
        process.terminate()
        end = process.stderr.read()
    table = table.replace(str(ROOT), "/home/you/ddp-by-diff")
    session = f"$ NPROC=2 python -m {module} &\n$ kill -USR1 $!\n{table}$ kill $!\n{end}"
    return f"\n```python\n{source_of(module)}```\n\n```console\n{session}```\n"


def function_lines(file: str, name: str) -> list[str]:
    source = (ROOT / file).read_text(encoding="utf-8")
    node = next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    return source.splitlines()[node.lineno - 1 : node.end_lineno]


def function_body(file: str, name: str) -> str:
    """The lines of a function, without its head."""
    return textwrap.dedent("\n".join(function_lines(file, name)[1:])) + "\n"


def function(file: str, name: str) -> str:
    return "\n```python\n" + "\n".join(function_lines(file, name)) + "\n```\n"


@functools.cache
def collective(name: str) -> str:
    """Its picture, its function, and what it prints, but for the line that says that the processes have met."""
    done = run("-m", "exercises.collectives", name)
    assert done.code == 0, done.err
    printed = done.out.replace("distributed: 3 processes, gloo, cpu\n", "")
    picture = f"![{name}: three ranks before and after; the output below has its numbers](collectives/{name}.svg)"
    session = f"```console\n$ python -m exercises.collectives {name}\n{printed}```\n"
    return f"\n{picture}\n{function(collectives.PROGRAM, name)}\n{session}"


HANG = ("collective", "early_stop", "rank_0_works")  # mistakes after which a rank waits: for a second, on the page


@functools.cache
def mistake(name: str) -> str:
    """Both ways, each with what it prints, but for the line that says that the processes have met."""
    shown = ""
    hangs = {"DIST_TIMEOUT": "1"} if name in HANG else {}
    for way in "wrong", "right":
        done = run("-m", "exercises.mistakes", name, way, limit=100, **hangs)
        assert way == "wrong" or done.code == 0, done.err
        printed = done.out.replace("distributed: 2 processes, gloo, cpu\n", "") + told(done.err)
        shown += f"\n{way.capitalize()}:\n\n```python\n{function_body('exercises/mistakes.py', f'{name}_{way}')}```\n"
        variables = "".join(f"{variable}={value} " for variable, value in hangs.items())
        shown += f"\n```console\n$ {variables}python -m exercises.mistakes {name} {way}\n{printed}```\n"
    return shown


def told(stderr: str) -> str:
    """The warnings, and of an error the table of the ranks if there is one, else the last message of the traceback."""
    text = stderr.replace(f"{ROOT}/", "")
    text = re.sub(r"\bfor rank \d", "for rank 0", text)  # of two ranks with the same error either may be the first
    found = re.search(r"^where each rank stands:.*", text, re.DOTALL | re.MULTILINE)
    found = found or re.search(r"^\w+Error: (?!.*^\w+Error: ).*", text, re.DOTALL | re.MULTILINE)
    warned = dict.fromkeys(re.findall(r"^\S+:\d+: (\w+Warning: .*\n)", text, re.MULTILINE))  # each once, not per rank
    return "".join(warned) + (found[0] if found else "")


@functools.cache
def wrong(command: str) -> str:
    """The lines of doctor.py's table that are not ok."""
    *variables, _, script = shlex.split(command)
    done = run(script, **(SHELL | dict(variable.split("=") for variable in variables)))
    lines = "".join(line for line in done.out.splitlines(keepends=True) if line.startswith("WRONG"))
    return f"\n```console\n$ {command} | grep WRONG\n{lines}```\n"


def masked(text: str) -> str:
    """Without the figures that depend on the machine: its speed, and how its CPU rounds."""
    text = re.sub(r"-\d{8}-\d{6}\b", "-TIME", text)
    text = re.sub(r"\d+ MiB", "# MiB", text)
    return re.sub(r"(loss |accuracy |train |test |top-\d |\(|right |in |  )\d+(\.\d+)?(?=%|/| |\n)", r"\1#", text)


def same_output(what: str, shown: str, now: str) -> bool:
    """The same text, but for speeds, and for losses and a last accuracy that differ by no more than rounding explains.

    CPUs round differently, and training makes that larger.  Another order of the examples gives greater differences.
    """
    if masked(shown) != masked(now):
        return False
    pairs = zip(re.findall(r"loss ([\d.]+)", shown), re.findall(r"loss ([\d.]+)", now), strict=True)
    if any(abs(float(before) - float(after)) > 0.01 + 0.05 * float(before) for before, after in pairs):
        return False
    before, after = ([float(figure) for figure in re.findall(r"([\d.]+)% ", text)[-1:]] for text in (shown, now))
    tolerance = 100 if "dry-run" in what else 3  # in percentage points
    return all(abs(a - b) <= tolerance for a, b in zip(before, after, strict=True))


# ----------------------------------------------------------------------------------------------------- from docstrings


def definitions(file: str) -> Iterator[tuple[str, str]]:
    """(signature or name, one sentence) for everything public in the file, in its order."""
    source = (ROOT / file).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign):
            name = getattr(node.targets[0], "id", None)
        if not name or name.startswith("_"):
            continue
        if isinstance(node, ast.Assign):
            yield _variable(node, name, source.splitlines())
            continue
        sentence = re.split(r"(?<=[.?])\s", " ".join(ast.get_docstring(node).split()))[0]
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            for argument in [*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
                if argument:
                    argument.annotation = None
            name = f"{name}({ast.unparse(arguments)})"
        yield name, sentence


def _variable(node: ast.Assign, name: str, source: list[str]) -> tuple[str, str]:
    if isinstance(node.value, ast.Name):
        return name, f"`{node.value.id}` by another name."
    number = node.lineno - 1
    comment = source[number].partition("  # ")[2]
    while not comment and source[number - 1].startswith("# "):  # a comment above it, of several lines perhaps
        number -= 1
        comment = source[number].removeprefix("# ") if not source[number - 1].startswith("# ") else ""
    value = ast.unparse(node) if isinstance(node.value, ast.Constant) else name
    if not comment:
        return value, f"`{ast.unparse(node.value)}`."
    comment = comment.rstrip(".").split(".  ")[0]
    return value, comment[:1].upper() + comment[1:] + "."


def reference(file: str) -> str:
    rows = ["| `{}` | {} |".format(name, sentence.replace("|", "\\|")) for name, sentence in definitions(file)]
    return "\n" + "\n".join(["| name | what it is |", "|---|---|", *rows]) + "\n"


def snippet(file: str) -> str:
    """The program in the file's docstring: its first indented block, up to the lines that launch it."""
    docstring = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    block = textwrap.dedent(re.search(r"(?:^(?: {4}.*)?\n)+", docstring.split("\n", 1)[1], re.MULTILINE)[0])
    text = re.sub(r"\n\n(?=def |if )", "\n\n\n", block.split("\npython ")[0].strip("\n"))
    return "\n```python\n" + re.sub(r" {2,}# ", "  # ", text) + "\n```\n"  # as ruff formats it


def measured(file: str) -> str:
    """What a tool has written, as it is."""
    return "\n" + (ROOT / file).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- the pages

_GENERATORS = [steps, lines, diff, output, program, report, mistake, collective, collectives.uses, function, wrong]
_GENERATORS += [snippet, reference, benchmark, measured]
KINDS: dict[str, Callable[..., str]] = {generator.__name__: generator for generator in _GENERATORS}
BLOCK = re.compile(rf"<!-- ({'|'.join(KINDS)})(?:: (.+?))? -->(.*?)<!-- end -->", re.DOTALL)


def generate(kind: str, what: str) -> str:
    generator = KINDS[kind]
    return generator(what) if kind in ("output", "wrong") else generator(*what.split())


class Block(NamedTuple):
    page: Path
    kind: str
    what: str
    shown: str

    def now(self) -> str:
        """What should be shown: the text as it is, if only figures have changed that depend on the machine."""
        new = generate(self.kind, self.what)
        return self.shown if self.kind == "output" and same_output(self.what, self.shown, new) else new


def blocks(*kinds: str) -> list[Block]:
    """All generated blocks of these kinds (or of all), in the order of the pages."""
    found = [
        Block(page, m[1], m[2] or "", m[3]) for page in PAGES for m in BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]
    return [block for block in found if not kinds or block.kind in kinds]


def rewritten(page: Path, new_figures: bool = False) -> str:
    """The page's text with all its blocks up to date."""

    def replace(m: re.Match) -> str:
        block = Block(page, m[1], m[2] or "", m[3])
        new = generate(block.kind, block.what) if new_figures else block.now()
        marker = f"{m[1]}: {m[2]}" if m[2] else m[1]
        return f"<!-- {marker} -->{new}<!-- end -->"

    return BLOCK.sub(replace, page.read_text(encoding="utf-8"))


def drawings() -> dict[Path, str]:
    """The pictures that are drawn from the text of a page, and from recorded events."""
    return collectives.pictures(collectives.PAGE.read_text(encoding="utf-8")) | {ddp_step.PICTURE: ddp_step.drawn()}


def written(path: Path, text: str, check: bool) -> bool:
    """Write the file if it is out of date (check: only say so); returns whether it was up to date."""
    if path.exists() and text == path.read_text(encoding="utf-8"):
        return True
    name = path.relative_to(ROOT)
    if check:
        print(OUT_OF_DATE.format(name))
        return False
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{name} is rewritten")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    parser.add_argument("--new-figures", action="store_true", help="take the figures that programs print anew")
    parser.add_argument("--pages", action="store_true", help="only docs/index.html and docs/steps.html")
    args = parser.parse_args()
    code = pages.report_problems(STEPS)
    up_to_date = []
    if not args.pages:
        up_to_date += [written(page, rewritten(page, args.new_figures), args.check) for page in PAGES]
        up_to_date += [written(picture, text, args.check) for picture, text in drawings().items()]
    up_to_date += [written(page, text, args.check) for page, text in pages.generated(STEPS).items()]
    return code or int(not all(up_to_date))


if __name__ == "__main__":
    sys.exit(main())
