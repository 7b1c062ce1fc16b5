"""The progression stays what it is for: files that differ by one idea, in a handful of lines."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHAIN = ["mnist_single.py", "mnist_dataparallel.py", "mnist_ddp.py", "mnist_amp.py"]
GOALS = [  # lines added + removed, at most
    ("mnist_single.py", "mnist_dataparallel.py", 5),
    ("mnist_dataparallel.py", "mnist_ddp.py", 36),
    ("mnist_single.py", "mnist_ddp.py", 34),
    ("mnist_ddp.py", "mnist_ddp_plain.py", 44),
    ("mnist_ddp.py", "mnist_amp.py", 19),
    ("mnist_ddp.py", "mnist_apex.py", 36),
    ("mnist_ddp.py", "variants/mnist_by_hand.py", 12),
    ("variants/mnist_by_hand.py", "variants/mnist_overlap.py", 14),
    ("variants/mnist_by_hand.py", "variants/mnist_zero.py", 25),
    ("mnist_ddp.py", "variants/mnist_accumulate.py", 20),
    ("mnist_ddp.py", "variants/mnist_fsdp.py", 16),
    ("mnist_ddp.py", "variants/mnist_local_sgd.py", 17),
    ("mnist_ddp.py", "variants/mnist_compile.py", 6),
    ("mnist_ddp.py", "variants/mnist_tensor_parallel.py", 40),
    ("mnist_ddp.py", "variants/mnist_pipeline.py", 52),
    ("mnist_ddp.py", "variants/mnist_horovod.py", 42),
    ("mnist_ddp.py", "variants/mnist_xla.py", 38),
]
SCRIPTS = list(dict.fromkeys(script for before, after, _ in GOALS for script in (before, after)))  # parents first
CHANGED = {  # functions whose text differs from the others'; main and parse_args are compared in their own tests
    "mnist_amp.py": ["train"],
    "mnist_apex.py": ["train"],
    "variants/mnist_by_hand.py": ["train"],
    "variants/mnist_overlap.py": ["train"],
    "variants/mnist_zero.py": ["train"],
    "variants/mnist_local_sgd.py": ["train"],
    "variants/mnist_accumulate.py": ["train"],
    "variants/mnist_pipeline.py": ["train", "evaluate"],
    "variants/mnist_xla.py": ["train", "evaluate"],
}
ENGINES = {"variants/mnist_horovod.py": "hvd.", "variants/mnist_xla.py": "xs."}  # other words in the place of dist.
SAME_BATCH = ["variants/mnist_tensor_parallel.py"]  # on all ranks: each has the sums already
ADDED = {  # functions
    "mnist_apex.py": ["check_apex"],
    "variants/mnist_overlap.py": ["start_all_reduce"],
    "variants/mnist_zero.py": ["flatten"],
    "variants/mnist_pipeline.py": ["pipeline"],
    "variants/mnist_tensor_parallel.py": ["share_channels", "sum_input_gradients", "sum_outputs"],
}
FLAGS = {  # more than the parent's
    "mnist_ddp_plain.py": ["--backend"],
    "mnist_amp.py": ["--dtype"],
    "mnist_apex.py": ["--opt-level"],
    "variants/mnist_accumulate.py": ["--accumulate"],
    "variants/mnist_fsdp.py": ["--param-dtype"],
    "variants/mnist_local_sgd.py": ["--every"],
}


def source(script, name=None):
    """The text of a script, or of one function or class in it."""
    text = (ROOT / script).read_text(encoding="utf-8")
    if name is None:
        return text
    node = next(node for node in ast.parse(text).body if getattr(node, "name", None) == name)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def loop(script):
    """The part of main that runs the epochs, as lines; whoever prints, it is print."""
    before, found, after = source(script, "main").partition("    started = time.perf_counter()\n")
    assert found
    return [re.sub(r"^( +)(dist\.print_primary|print_primary|log)\(", r"\1print(", line) for line in after.splitlines()]


def test_no_script_is_excluded():
    files = [*ROOT.glob("mnist_*.py"), *ROOT.glob("variants/mnist_*.py")]
    assert sorted(str(path.relative_to(ROOT)) for path in files) == sorted(SCRIPTS)


@pytest.mark.parametrize(("before", "after", "goal"), GOALS)
def test_a_step_is_small(before, after, goal):
    command = ["git", "diff", "--no-index", "--numstat", before, after]
    env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    printed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8").stdout
    added, removed = (int(number) for number in printed.split()[:2])
    assert 0 < added + removed <= goal


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_what_scripts_share_is_the_same_text(script):
    first = CHAIN[0]
    for name in "ConvNet", "train", "evaluate":
        same = source(script, name) == source(first, name)
        assert same == (name not in CHANGED.get(script, [])), f"{name} in {first} and {script}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_skeleton_is_the_same(script):
    body = ast.parse(source(script)).body
    names = [node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    assert names == ["ConvNet", "train", "evaluate", "main", *ADDED.get(script, []), "parse_args"]
    assert source(script).splitlines()[1:3] == source(CHAIN[0]).splitlines()[1:3]  # of the docstring


def test_the_loop_over_epochs_grows_by_the_idea_alone():
    single, parallel, ddp, amp = (loop(script) for script in CHAIN)
    apex = loop("mnist_apex.py")
    assert parallel == single and apex == ddp
    added = [line for line in ddp if line not in single]
    assert [line for line in ddp if line in single] == single
    assert all("dist." in line or "set_epoch" in line for line in added) and len(added) <= 4
    assert [line.replace(", dtype, scaler)", ")") for line in amp] == ddp
    for script in SCRIPTS:
        if script in ENGINES:
            without = [line for line in ddp if "dist." not in line]
            assert [line for line in loop(script) if line in without] == without, script
            assert all(line in without or ENGINES[script] in line for line in loop(script)), script
        elif script in SAME_BATCH:
            assert loop(script) == [line for line in ddp if "dist.all_reduce" not in line], script
        elif script.startswith("variants/"):
            lines = [re.sub(r", (args\.accumulate|args\.every|weights, mine)\)", ")", line) for line in loop(script)]
            lines = [re.sub(r"sharded\.whole\(model, ConvNet\(.*?\)\)", "model", line) for line in lines]
            assert [line for line in lines if line in ddp] == ddp, script
            added = [line for line in lines if line not in ddp]
            assert all("dist." in line or "sharded." in line for line in added) and len(added) <= 1, script


def test_mixed_precision_has_no_if_in_the_training_loop():
    for script in "mnist_amp.py", "mnist_apex.py":
        assert not [node for node in ast.walk(ast.parse(source(script, "train"))) if isinstance(node, ast.If)]


def test_flags_are_the_same_in_the_same_order():
    """Flag by flag, with default and help; a later script only adds flags.

    With several processes --batch-size is shared out, and its help says so.
    """

    def flags(script):
        calls = [node for node in ast.walk(ast.parse(source(script, "parse_args"))) if isinstance(node, ast.Call)]
        calls = [call for call in calls if getattr(call.func, "attr", None) == "add_argument"]
        texts = [ast.unparse(call) for call in sorted(calls, key=lambda call: call.lineno)]
        return [text.replace("of all processes together", "images per step") for text in texts]

    parents = {after: before for before, after, _ in GOALS}
    assert len(flags(CHAIN[0])) >= 7
    for script, parent in parents.items():
        inherited, here = flags(parent), flags(script)
        assert here[: len(inherited)] == inherited, script
        added = [ast.literal_eval(ast.parse(call).body[0].value.args[0]) for call in here[len(inherited) :]]
        assert added == FLAGS.get(script, []), script


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_are_checked_in_the_same_way(script):
    """From the first check to the end parse_args is the same, but for lines that are added."""
    kept = source(CHAIN[0], "parse_args").partition("parser.parse_args()\n")[2].splitlines()
    here = source(script, "parse_args").splitlines()
    assert len(kept) >= 5
    assert [line for line in here if line in kept] == kept


def test_no_function_of_the_root_is_longer_than_a_screen():
    lengths = {}
    for file in ROOT.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lengths[f"{file.name}: {node.name}"] = node.end_lineno - node.lineno + 1
    assert len(lengths) >= 100
    assert {name: length for name, length in lengths.items() if length > 45} == {}


def test_who_touches_what():
    """launcher.py never touches a tensor, and needs no other file."""
    assert not re.search(r"torch\.(tensor|empty|zeros|ones|Tensor)|import distributed", source("launcher.py"))
