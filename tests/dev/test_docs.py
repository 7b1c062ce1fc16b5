"""The pages hold: generated parts are up to date, links lead somewhere, commands parse, nothing is left unfilled."""

import ast
import re
import shlex
import shutil
import textwrap

import pytest
from torch.distributed.run import get_args_parser
from world import FOLDERS, PROGRAMS, ROOT, ended, forker, on_ranks

import checkpoint
import distributed as dist
from dev import build

build.run_program = forker().run

TEXTS = [*build.PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md", "CHANGES.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in TEXTS]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def without_code(page):
    return re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)


def test_generated_parts_are_up_to_date():
    """But for what programs print."""
    old = [found for page in build.PAGES for found in build.rewrite(page, check=True, quick=True)]
    assert old == [], "run  python -m dev.build --quick"


BLOCKS = [block for page in build.PAGES for block in build.blocks(page)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind in build.PROGRAMS], ids=str)
def test_a_program_prints_what_is_shown(block):
    assert block.now() == block.shown, "run  python -m dev.build"


def test_an_output_is_kept_only_while_it_is_true():
    shown = "epoch 1/3  loss 2.1669  accuracy 97.85% (1957/2000)  6208 images/s\ndone in 6.1 s\n"
    faster = "epoch 1/3  loss 2.1670  accuracy 96.00% (1920/2000)  9999 images/s\ndone in 1.1 s\n"
    assert build.same_output(shown, faster)
    assert not build.same_output(shown, faster.replace("96.00", "90.00"))
    assert not build.same_output(shown, faster.replace("2.1670", "1.8404"))  # examples in another order
    assert not build.same_output(shown, faster.replace("done", "finished"))


AROUND = """
import torch
Net, loss_fn = lambda: torch.nn.Linear(2, 1), torch.nn.functional.mse_loss
dataset = [(torch.ones(2), torch.ones(1))] * 40
def train_step(model, batch, optimizer):
    inputs, labels = batch
    loss = loss_fn(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
def train(model, loader, optimizer):
    for batch in loader:
        loss = train_step(model, batch, optimizer)
    return loss
"""
WATCHED = """
import os, signal
dataset = [(torch.tensor([i / 100, 1]), torch.tensor([i % 2.0])) for i in range(100)]
steps, make_step = 0, train_step
def train_step(model, batch, optimizer):
    global steps
    steps, loss, rate = steps + 1, make_step(model, batch, optimizer), optimizer.param_groups[0]["lr"]
    with open(f"seen{os.environ['RANK']}", "a") as file:
        print((batch[0][:, 0] * 100).round().tolist(), rate, loss.item(), file=file)
    if steps == int(os.environ.get("STOP_AT", 0)) and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return loss
"""
LOOP = next(code for code in re.findall(r"```python\n(.*?)```", text("docs/api.md"), re.DOTALL) if "launch(" in code)


def in_docstring(file):
    """The program there, up to the lines that start it."""
    docstring = ast.get_docstring(ast.parse(text(file)))
    indented = re.search(r"(?:^(?: {4}.*)?\n)+", docstring.split("\n", 1)[1], re.MULTILINE)[0]
    return textwrap.dedent(indented).split("\npython ")[0]


def train_beside_the_helpers(folder, program, n, **variables):
    """As the README says: they are copied beside the program."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(AROUND + program, encoding="utf-8")
    for helper in "distributed.py", "distributed_launcher.py", "checkpoint.py":
        shutil.copy(ROOT / helper, folder)
    return forker().run(folder / "train.py", cwd=folder, NPROC=n, **variables)


@pytest.mark.parametrize("program", [LOOP, in_docstring("distributed.py")], ids=["docs/api.md", "distributed.py"])
def test_a_program_to_begin_with_runs(program, tmp_path):
    done = train_beside_the_helpers(tmp_path, program, 3)
    assert done.code == 0 and "3 processes" in done.out, done.err
    losses, accuracies = (
        [float(x) for x in re.findall(rf"{word} ([\d.]+)", done.out)] for word in ("loss", "accuracy")
    )
    assert losses == sorted(losses, reverse=True) and accuracies[:1] <= accuracies[-1:]  # it trains


@on_ranks(1, 3)
def test_each_ranks_value_comes_back_from_a_checkpoint(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", text("docs/api.md"), re.DOTALL)
    save_and_restore = next(code for code in blocks if "from_all" in code)
    names = {"dist": dist, "checkpoint": checkpoint, "step": 1, "position": 100 * dist.get_rank()}
    exec(save_and_restore, names | {"keeper": checkpoint.Keeper(tmp_path)}, found := {})
    assert found == {"position": 100 * dist.get_rank()}


@pytest.mark.parametrize("n", [1, 3])
def test_a_port_computes_what_the_script_does_and_each_rank_draws_its_own_numbers(n, tmp_path):
    """In copies without random numbers, in float64, as docs/porting.md says."""
    printed, copies = [], [("0.9, 1.1", "1, 1"), ("(0, 0.1,", "(0, 0,"), ("float32", "float64"), (":.4f", ":.9f")]
    for program in re.findall(r"```python\n(.*?)```", text("docs/porting.md"), re.DOTALL):
        for words in copies:
            program = program.replace(*words)
        program = re.sub("( *)for step", r"\1print('drew', random.random(), numpy.random.rand())\n\g<0>", program)
        program = "import torch\ntorch.set_default_dtype(torch.float64)\n" + program
        printed.append(train_beside_the_helpers(tmp_path, program, n).out)
    one, port = (re.findall("loss (.*)", out) for out in printed)
    assert one == port and len(set(re.findall(r"\b0\.\d{6,}", re.sub("loss.*", "", printed[1])))) == 2 * n


def test_the_program_of_checkpoint_goes_on_in_the_middle_of_an_epoch(tmp_path):
    """Every example of the epoch once, the schedule goes on, and losses are equal to the last bit."""
    seen = []
    for folder, stops in (tmp_path / "whole", [0]), (tmp_path / "stopped", [8, 0]):
        program = WATCHED + in_docstring("checkpoint.py")
        runs = [train_beside_the_helpers(folder, program, 2, STOP_AT=stop) for stop in stops]
        assert [run.code for run in runs] == [143 if stop else 0 for stop in stops], runs
        seen.append([(folder / f"seen{rank}").read_text().splitlines() for rank in range(2)])
    assert seen[0] == seen[1]
    assert [len(lines) for lines in seen[0]] == [25, 25]  # 5 epochs of 5 steps
    second = [ast.literal_eval(line.split("]")[0] + "]") for rank in seen[1] for line in rank[5:10]]
    assert sorted(sum(second, [])) == list(range(100))  # the epoch in which it was stopped


def anchors(page):
    """Of its headings, as GitHub makes them; of a page of HTML its ids."""
    if page.suffix == ".html":
        return re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", without_code(text(page)), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links_and_paths_lead_somewhere():
    for name in NAMES:
        for target in re.findall(r"\]\(([^)\s]+)\)", text(name)):
            path, _, anchor = target.partition("#")
            page = (ROOT / name).parent / path if path else ROOT / name
            assert target.startswith("https://") or page.exists(), (name, target)
            assert not anchor or path.startswith("https://") or anchor in anchors(page.resolve()), (name, target)
        for path in re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?)`", text(name)):
            assert path.split("/")[0] not in {*FOLDERS, "docs"} or (ROOT / path).exists(), (name, path)


def test_the_readme_lists_each_file_and_folder():
    """Each entry of the tree is there; each program in the root and each folder is in the tree once."""
    tree = re.search(r"^## The files\n.*?```text\n(.*?)```", text("README.md"), re.DOTALL | re.MULTILINE)[1]
    entries = [re.fullmatch(r"(\S+?)(/?) {2,}(\w.*)", line).groups() for line in tree.splitlines()]
    listed = []
    for entry, slash, _ in entries:
        found = list(ROOT.glob(entry))
        assert found and all(path.is_dir() == bool(slash) for path in found), entry
        listed += found
    programs = [path for path in ROOT.iterdir() if path.suffix in (".py", ".ipynb")]
    wanted = [*programs, *(ROOT / folder for folder in {*FOLDERS, "docs"})]
    assert sorted(listed) == sorted(wanted)


def launch_lines():
    """The command lines in the programs' docstrings: at the start of a line, or after two spaces."""
    for file in PROGRAMS:
        if not file.startswith("tests/"):
            docstring = ast.get_docstring(ast.parse(text(file))) or ""
            pattern = r"(?:^|(?<=  ))((?:\w+=\S+ )*(?:python|torchrun) \S.+?)(?=  |$)"
            found = re.findall(pattern, docstring, re.MULTILINE)
            yield from (re.sub(r"\[.*", "", line) for line in found if "..." not in line)  # without [OPTIONAL ...]


def commands():
    """The launch lines of the texts (```sh blocks, inline code, after $ in outputs) and docstrings."""
    found = list(launch_lines())
    for name in NAMES:
        found += [
            line for block in re.findall(r"```sh\n(.*?)```", text(name), re.DOTALL) for line in block.splitlines()
        ]
        found += re.findall(r"`([^`\n]+)`", without_code(text(name)))
        found += re.findall(r"^\$ (.+)$", text(name), re.MULTILINE)
    starts = re.compile(
        r"(?:\w+=\S* )*(?:\S*/)?(?:(?:python|torchrun|srun|mpirun)\d? .*(?:\.py\b|-m \w)|ddp-\w+ .*\.py)"
    )
    lines = [part.strip(" &") for line in found for part in re.sub(r"(^|\s)#.*", "", line).split("&&")]
    return sorted({line for line in lines if starts.match(line) and not re.search(r"\.\.\.|…|NAME", line)})


def refused(script, args):
    """What the script's own parser has against these arguments; --help comes last, so that nothing is run."""
    code, *streams = ended(script, *args, "--help")
    flags = {arg.split("=")[0] for arg in args if arg.startswith("--")}
    unknown = flags - set(re.findall(r"--[\w-]+", "".join(streams).split("options:")[-1]))
    return unknown or (code and "".join(streams))


TOOLS = "ddp_by_diff.replay", "ddp_by_diff.timeline", "ddp_by_diff.equivalence"


def wrong_with(command):
    """A file or a flag that doesn't exist; or nothing."""
    words = shlex.split(command)
    program = next(place for place, word in enumerate(words) if re.match(r"\S*(python\d?|torchrun)$|ddp-", word))
    args = words[program + 1 :]
    if words[program].startswith("ddp-"):  # what pip installs
        args = ["-m", words[program].replace("ddp-", "ddp_by_diff."), *args]
    if words[program] == "torchrun":
        parsed = get_args_parser().parse_args(args)
        args = [*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args]
    if args[0] == "-m" and args[1] in TOOLS:  # its own flags, then a program and the program's
        place = next((i for i, word in enumerate(args[2:], 2) if word == "-m" or word.endswith(".py")), len(args))
        program = args[place:] and wrong_with(shlex.join(["python", *args[place:]]))
        return refused(args[1].replace(".", "/"), args[2:place]) or program
    if args[0] == "-m":
        args = [f"{args[1].replace('.', '/')}.py", *args[2:]]
    if re.match(r"train\.py|pytest|pip|venv|torch/|folder/", args[0]):  # the reader's own, or another package's
        return None
    if not (ROOT / args[0]).is_file():
        return f"{args[0]} doesn't exist"
    return "ArgumentParser" in text(args[0]) and refused(args[0], args[1:])


def test_commands_name_files_and_flags_that_exist():
    found = {command: wrong_with(command) for command in commands()}
    assert len(found) > 50
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


CAPITALS = r"(?<![\w$])[A-Z][A-Z0-9_]{3,}(?!\w)"
KNOWN = {"CHANGES", "CONTRIBUTING", "HEAD", "HSDP", "IOMMU", "LBFGS", "LICENSE", "SBATCH", "TERM"}


def test_nothing_is_left_to_be_filled_in():
    """A word in capitals is a known abbreviation, or stands in a program, too."""
    programs = [text(file) for file in PROGRAMS if not file.startswith("tests/")]
    known = KNOWN.union(*(re.findall(CAPITALS, program) for program in programs))
    for name in NAMES:
        starts, ends = (re.findall(rf"(?<!`)<!-- {which}\b", text(name)) for which in (r"(?!end|command)\w+", "end"))
        assert len(starts) == len(ends) == len(build.BLOCK.findall(text(name))), f"{name}: a marker without an end"
        own = re.sub(r"<!-- \w+.*?<!-- end -->|`[^`\n]+`", "", text(name), flags=re.DOTALL)
        unknown = set(re.findall(CAPITALS, own)) - known
        assert {word for word in unknown if not word.startswith(("MALLOC_", "NCCL_", "RAY_", "TORCH_"))} == set(), name
        assert not re.search(r"TODO|XXX|FIXME", text(name)), name
        empty = re.search(r"^(#+) .+\n+(?=\1 |\Z)", without_code(text(name)), re.MULTILINE)
        assert not empty, f"{name}: the section {empty[0]} is empty"
