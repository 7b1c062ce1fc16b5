"""README.md, docs/ and CONTRIBUTING.md can't drift: what tools/build.py generates is generated again, and compared.

Compared exactly, except for the figures that depend on the machine in what a program prints (see `build.masked`).
"""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from world import ROOT, forker

from tools import build

build.run_program = forker().run

TEXTS = [*build.PAGES, ROOT / "CONTRIBUTING.md"]
HELPERS = ["distributed.py", "launcher.py"]
TRAIN = """
def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        loss = loss_fn(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss
"""
NEEDS_A_GPU = ["mnist_apex.py"]  # its output can't be shown
PLAIN = ["mnist_ddp_plain.py"]  # prints what mnist_ddp.py prints: tests/test_scripts.py
ENGINES = ["variants/mnist_horovod.py", "variants/mnist_xla.py"]  # theirs is in docs/results.md: tests/test_engines.py
VARIANTS = sorted(f"variants/{path.name}" for path in ROOT.glob("variants/mnist_*.py"))  # started with python -m
SCRIPTS = sorted([*(path.name for path in ROOT.glob("m*.py")), "cifar10_ddp.py", *VARIANTS])
SLOW = [f"mnist_{step}.py --dataset synthetic" for step in ("single", "ddp", "amp")]  # they train for seconds
SLOW.append("cifar10_ddp.py --dataset synthetic --dry-run")
RUN_VARIANTS = ["mnist_fsdp", "mnist_pipeline"]  # the others print mnist_ddp.py's lines: tests/test_variants.py


def text():
    return "\n".join(page.read_text(encoding="utf-8") for page in TEXTS)


# --------------------------------------------------------------------------------------------------------- the tests


def blocks(*kinds):
    def marks(block):
        slow = block.what in SLOW or block.what.startswith("-m ") or block.kind in ("mistake", "report", "collective")
        return [pytest.mark.slow] if slow else []

    found = build.blocks(*kinds)
    return [pytest.param(b, id=f"{b.page.name}: {b.kind}: {b.what}", marks=marks(b)) for b in found]


def is_run(block):
    """Whether a test runs the program, which takes seconds."""
    return not block.what.startswith("-m variants.") or any(f".{name} " in block.what for name in RUN_VARIANTS)


def script_of(words):
    """The script that these arguments of python start: a file of the root, or -m and a module in a folder of it."""
    return f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]


def out_of_date(block):
    return build.OUT_OF_DATE.format(block.page.relative_to(ROOT))


TAKEN = (
    "steps",
    "diff",
    "lines",
    "reference",
    "program",
    "report",
    "mistake",
    "collective",
    "uses",
    "function",
    "snippet",
    "wrong",
    "benchmark",
    "measured",
)


@pytest.mark.parametrize("block", blocks(*TAKEN))
def test_what_is_taken_from_the_files_equals_them(block):
    assert block.shown == build.generate(block.kind, block.what), out_of_date(block)


@pytest.mark.timeout(300)  # bf16 on a CPU without bf16 instructions takes a while
@pytest.mark.parametrize("block", [param for param in blocks("output") if is_run(param.values[0])])
def test_what_a_program_prints(block):
    from cifar10_ddp import fast_dtype

    what, shown = block.what, block.shown
    if what.startswith("mnist_amp.py") and fast_dtype(torch.device("cpu")) == torch.float32:
        pytest.skip("this CPU has no bf16 instructions: it would take minutes")
    printed = build.generate("output", what)
    assert build.masked(shown) == build.masked(printed), out_of_date(block)
    assert block.now() == shown, f"{out_of_date(block)}\n{printed}"
    if what == "mnist_ddp.py --dataset synthetic":
        assert float(re.findall(r"([\d.]+)% ", printed)[-1]) >= 97  # the promise for this data


def test_figures_are_masked_and_nothing_else():
    line = "epoch 1/3  loss 2.1669  accuracy 67.85% (1357/2000)  6208 images/s\ndone in 6.1 s\n"
    assert build.masked(line) == "epoch 1/3  loss #  accuracy #% (#/2000)  # images/s\ndone in # s\n"
    assert build.masked("epoch 0  loss 0.7531  right 36 of 40 in the last batch\n") == (
        "epoch 0  loss #  right # of 40 in the last batch\n"
    )
    banner = "distributed: 2 processes, gloo, cpu\nsynthetic on cpu, global batch 200 = 2 x 100\n"
    assert build.masked(banner) == banner


def test_rewriting_changes_the_blocks_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    marker, end = "<!-- lines: mnist_single.py mnist_ddp.py -->", "<!-- end -->"
    page.write_text(f"before {marker}+1 -1{end} after <!-- command: test --> and more")
    new = build.generate("lines", "mnist_single.py mnist_ddp.py")
    assert re.fullmatch(r"\+\d+ -\d+", new) and new != "+1 -1"
    assert build.rewritten(page) == f"before {marker}{new}{end} after <!-- command: test --> and more"


def test_an_output_is_kept_only_while_it_is_true():
    shown = "epoch 1/3  loss 2.1669  accuracy 97.85% (1957/2000)  6208 images/s\ndone in 6.1 s\n"
    faster = "epoch 1/3  loss 2.1670  accuracy 96.00% (1920/2000)  9999 images/s\ndone in 1.1 s\n"
    assert build.same_output("x.py", shown, faster)
    assert not build.same_output("x.py", shown, faster.replace("96.00", "90.00"))
    assert build.same_output("x.py --dry-run", shown, faster.replace("96.00", "90.00"))
    assert not build.same_output("x.py", shown, faster.replace("done", "finished"))
    assert not build.same_output("x.py --dry-run", shown, shown.replace("2.1669", "1.8404"))  # in another order


def test_every_step_and_every_script_is_shown():
    shown = [(block.kind, block.what) for block in build.blocks()]
    for step in build.STEPS[1:]:
        assert ("diff", f"{step.parent} {step.script}") in shown
        assert step.script in NEEDS_A_GPU or ("lines", f"{step.parent} {step.script}") in shown
    outputs = {script_of(what.split()) for kind, what in shown if kind == "output"}
    laboratory = {name for name in outputs if name.startswith(("experiments/", "exercises/"))}
    assert sorted(outputs - laboratory) == [name for name in SCRIPTS if name not in NEEDS_A_GPU + ENGINES + PLAIN]
    assert ("steps", "") in shown
    pages = "".join(page.read_text(encoding="utf-8") for page in build.PAGES)
    assert len(build.BLOCK.findall(pages)) == pages.count("<!-- end -->"), "a marker is misspelt"


def test_the_table_has_every_script_of_the_progression():
    """Also one that was added without a word to build.py."""
    assert {*(path.name for path in ROOT.glob("mnist_*.py")), *VARIANTS} == {step.script for step in build.STEPS}


@pytest.mark.parametrize("file", [*HELPERS, "checkpoint.py", "report.py"])
def test_reference_is_complete(file):
    """By importing, not by parsing: nothing public is left out, and each one-line description is of something real."""
    with mock.patch.object(sys, "path", [str(ROOT), *sys.path]):
        module = importlib.import_module(file.removesuffix(".py"))
    described = {re.match(r"\w+", name)[0] for name, _ in build.definitions(file)}
    ours = {name for name, value in vars(module).items() if inspect.getmodule(value) is module}
    assert {name for name in ours if not name.startswith("_")} <= described
    assert all(hasattr(module, name) for name in described)
    assert ("reference", file) in [(block.kind, block.what) for block in build.blocks()]
    if file == "distributed.py":
        used = set(re.findall(r"`(?:dist|distributed)\.(\w+)", text())) - {"py"}
        assert used <= described


def run_snippet(file, folder):
    prelude = "import torch\nNet, loss_fn = lambda: torch.nn.Linear(2, 1), torch.nn.functional.mse_loss\n"
    prelude += "dataset = [(torch.ones(2), torch.ones(1))] * 10\n" + TRAIN
    program = re.search(r"```python\n(.*?)```", build.snippet(file), re.DOTALL)[1]
    (folder / "train.py").write_text(prelude + program, encoding="utf-8")
    for helper in {*HELPERS, file}:  # as the README says: copied beside the program
        shutil.copy(ROOT / helper, folder)
    done = forker().run(folder / "train.py", cwd=folder, NPROC=2)
    assert done.code == 0, done.err
    assert "2 processes" in done.out
    return done.out


def test_the_snippet_runs(tmp_path):
    out = run_snippet("distributed.py", tmp_path)
    assert "epoch 9  loss 0.0" in out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0]  # it trains


@pytest.mark.slow
def test_the_snippet_of_checkpoints_runs_and_goes_on(tmp_path):
    import checkpoint

    run_snippet("checkpoint.py", tmp_path)
    last = tmp_path / "run" / "last.pt"
    assert checkpoint.read(last)["step"] == 1000 and checkpoint.read(last.with_name("previous.pt"))["step"] == 900
    os.replace(last.with_name("previous.pt"), last)
    run_snippet("checkpoint.py", tmp_path)
    assert checkpoint.read(last)["step"] == 1000 and checkpoint.read(last.with_name("previous.pt"))["step"] == 900


def launch_lines():
    """The command lines in the programs' docstrings: at the start of a line, or after two spaces."""
    for folder in ".", "variants", "exercises", "experiments", "experiments/baselines", "tools":
        for path in sorted((ROOT / folder).glob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            lines = re.findall(
                r"(?:^|(?<=  ))((?:\w+=\S+ )*(?:python|torchrun) \S.+?)(?=  |$)", docstring, re.MULTILINE
            )
            yield from (re.sub(r"\[.*", "", line) for line in lines if "..." not in line)  # without [OPTIONAL ...]


def commands():
    """Every command line in the texts (```sh blocks, inline code, after $ in outputs) and docstrings."""
    found = [line for block in re.findall(r"```sh\n(.*?)```", text(), re.DOTALL) for line in block.splitlines()]
    found += re.findall(r"`((?:\w+=\S* )*(?:python|torchrun|srun|mpirun|sbatch|uv) [^`]+)`", text())
    found += re.findall(r"^\$ (.+)$", text(), re.MULTILINE)
    found += launch_lines()
    found = [part.strip(" &") for line in found for part in re.sub(r"(^|\s)#.*", "", line).split("&&")]
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
    if words[0] == "uv":  # then a script, or a program of the environment
        assert words[:5] == shlex.split("uv run --no-project --with-requirements requirements.txt")
        words = words[5:] if words[5] == "torchrun" else ["python", *words[5:]]
    program, args = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(args)
        program, args = "python", [parsed.training_script, *parsed.training_script_args]
        args = ["-m", *args] if parsed.module else args
    if program in ("srun", "mpirun"):
        program, args = "python", args[args.index("python") + 1 :]
    if program == "python" and args[:2] != ["-m", "pytest"] and args[0] == "-m":
        if args[1] in ("variants.NAME", "folder.name") or args[1].startswith("torch."):  # any of them; torch's own
            return
        args = [script_of(args), *args[2:]]
    if program == "python" and args[0].endswith(".py"):
        if args[0] == "train.py":  # the reader's own
            return
        assert (ROOT / args[0]).is_file(), f"{args[0]} doesn't exist"
        assert "ArgumentParser" not in (ROOT / args[0]).read_text(encoding="utf-8") or not refused(args[0], args[1:])
    elif program == "pip":
        assert args[:2] != ["install", "-r"] or (ROOT / args[2]).is_file()
    else:
        known = ("python", "python3", "kill", "lscpu", "pip", "git", "cd", "sbatch", "ruff", ".ci/run", "py-spy")
        assert program in known, f"{program}: is this a command of the README's?"


@functools.cache
def strings():
    """All string constants of the programs."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.glob("*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [node.value for node in nodes if isinstance(node.value, str)]


@pytest.mark.parametrize("message", re.findall(r"^> (?!\*\*torch)(.+)$", text(), re.MULTILINE))
def test_a_quoted_message_is_in_the_source(message):
    """Quoted lines are our own messages, with … for what varies; torch's are in test_messages.py."""
    for part in message.strip("`").split("…"):
        assert any(part.strip() in string for string in strings()), f"no file says: {part}"


def anchors(page):
    """Of its headings, as GitHub makes them: lower case, no punctuation, spaces to hyphens, -1 for the second ..."""
    if page.suffix == ".html":
        return re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8"))
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = []
    for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return found


@pytest.mark.parametrize("page", [*TEXTS, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Each relative link to a file, and each anchor to a heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}: {linked.name} has no such heading"


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in [*TEXTS[1:], ROOT / "CHANGELOG.md"]:
        assert f"]({page.relative_to(ROOT)})" in readme, page.name


def test_environment_variables_exist():
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))
    for variable in set(re.findall(r"\b(?:DIST_\w+|NPROC)\b", text())):
        assert variable in sources, variable


def test_the_front_door_is_small():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 170
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_ci_finds_its_commands():
    """.ci/run takes them from README.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, part in ("train", "mnist_ddp.py"), ("test", "pytest"):
        assert re.search(rf"^<!-- command: {name} -->\n```sh\n[^\n]*{part}[^\n]*\n```$", readme, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_batch_script_for_slurm(tmp_path):
    """As it is in docs/launching.md, but for the data: one node, two tasks, a dry run."""
    from test_variables import srun_command

    _, env = srun_command()  # skips where no SLURM serves this machine
    script = re.search(r"```bash\n(#!.*?)```", text(), re.DOTALL)[1]
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(
        f"PATH={Path(sys.executable).parent}:$PATH\nexport PYTHONPATH={ROOT}\n"
    )
    for path in ROOT.glob("*.py"):
        (tmp_path / path.name).symlink_to(path)
    small = "--dataset synthetic --dry-run --width 8 --batch-size 64"
    assert "cifar10_ddp.py --amp ||" in script
    (tmp_path / "train.sbatch").write_text(script.replace("cifar10_ddp.py --amp ||", f"cifar10_ddp.py {small} ||"))
    options = "--nodes=1 --gpus-per-node=0 --ntasks-per-node=2 --cpus-per-task=1 --overcommit --output=log --parsable"
    command = ["sbatch", *options.split(), "train.sbatch"]
    env = {name: value for name, value in (os.environ | env).items() if not name.startswith("OMP_")}
    job = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)
    assert job.returncode == 0, job.stderr
    log = tmp_path / "log"
    try:
        while not log.exists() or "done in" not in log.read_text():
            assert not log.exists() or "error" not in log.read_text().lower(), log.read_text()
            time.sleep(0.5)
    finally:
        subprocess.run(["scancel", job.stdout.strip()], env=env, capture_output=True, timeout=30)
    assert "distributed: 2 processes, gloo, cpu" in log.read_text()


# -------------------------------------------------------------------------------------------------------- the glossary

GLOSSARY_WORDS = {  # what one meets -> the entry
    r"ranks?": "rank",
    r"world size": "world-size",
    r"collectives?": "collective",
    r"backends?": "backend",
    r"global batch": "global-batch",
    r"shards?": "shard",
    r"buckets?": "bucket",
    r"rings?": "ring",
    r"buffers?": "parameter-and-buffer",
    r"bf16": "fp32-fp16-bf16",
    r"torchrun": "torchrun",
    r"SLURM": "slurm",
    r"FSDP": "fsdp",
    r"XLA": "xla",
    r"forks?|forked|spawn|spawned": "fork-and-spawn",
}
PAGES_WITH_LINKED_WORDS = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
PAGES_WITH_LINKED_WORDS.remove("docs/glossary.md")
CODE, GENERATED, NO_PARAGRAPH = r"```.*?```|`[^`\n]*`", r"<!-- [\w]+: .*?<!-- end -->|<[^>]*>", r"^(?:#|\||>).*?$"
NOT_PROSE = re.compile(f"{CODE}|{GENERATED}|{NO_PARAGRAPH}", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")


def unlinked_words(page):
    """(position, word, entry) of each word of the glossary whose first place in the page's prose is no link to it."""
    prose = NOT_PROSE.sub(lambda match: " " * len(match[0]), page)
    links = [(match.start(), match.end(), match[2]) for match in LINK.finditer(prose)]
    found = []
    for word, entry in GLOSSARY_WORDS.items():
        for match in re.finditer(rf"(?<![\w/.\-])(?:{word})(?![\w/.]\w|-)\b", prose):
            around = [target for start, end, target in links if start <= match.start() < end]
            if around and "glossary.md#" not in around[0]:
                continue  # a part of another link's words, or of its address
            if not around:
                found.append((match.start(), match[0], entry))
            break
    return found


@pytest.mark.parametrize("page", PAGES_WITH_LINKED_WORDS)
def test_a_words_first_place_links_to_the_glossary(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [word for _, word, _ in unlinked_words(text)] == []
