"""P9: a bad flag ends a program before anything starts, with exit code 2 and one line that says what to type."""

import pytest
import torch
from world import ROOT, refused

from dev.steps import STEPS

PLAIN, FSDP, PIPELINE = "mnist_ddp_plain.py", "variants/mnist_fsdp.py", "variants/mnist_pipeline.py"
FOUR = ["mnist_single.py", "mnist_dataparallel.py", "mnist_ddp.py", "mnist_amp.py"]
CIFAR10, CONTEXT, MESH = "cifar10_ddp.py", "variants/mnist_context_parallel.py", "variants/mnist_mesh.py"
MISTAKES, CHECK, TIMELINE = "demos/mistakes.py", "exercises/check.py", "ddp_by_diff/timeline/__main__.py"
PLACE = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
TRAINING = ["min_DDP.py", CIFAR10, *(step.script for step in STEPS)]


def text(script):
    return (ROOT / script).read_text(encoding="utf-8")


def having(flag, but=()):
    return [script for script in TRAINING if f'"{flag}"' in text(script) and script not in but]


ONE_EACH = "at least the number of processes, because each needs an example"
TABLE = [  # the scripts; what is typed; words of the line, or else the flag is in it
    (having("--epochs"), "--epochs 0"),
    (having("--epochs"), "--epochs 1.5"),
    (having("--batch-size"), "--batch-size -8"),
    (having("--lr"), "--lr 0"),
    (having("--lr"), "--lr nan"),
    (having("--lr"), "--lr inf"),
    (having("--seed"), "--seed -1"),
    (having("--seed"), "--seed 4294967296"),
    (having("--dataset"), "--dataset nope", "--dataset", "invalid choice: 'nope'"),
    (having("--nproc"), "--nproc 0", "nproc (or NPROC) is 0: start at least 1 process"),
    (having("--nproc", but=[CONTEXT]), "--nproc 2 --batch-size 1", ONE_EACH),
    ([PLAIN], "", "torchrun --nproc_per_node=2 mnist_ddp_plain.py"),
    ([PLAIN], "--batch-size 2", ONE_EACH),
    (FOUR, "--dataset mnist --data-dir a_file", "mnist can't be read from a_file", "--dataset synthetic"),
    (["mnist_amp.py"], "--dtype float64", "--dtype", "float16", "bfloat16"),
    ([CIFAR10], "--model resnet19", "--model resnet19 is unknown", "resnet18"),
    ([CIFAR10], "--model alexnet", "--model alexnet can't train on images of 32 x 32"),
    ([CIFAR10], "--batch-size 12001", "--batch-size 12001 is too large for the 12000 examples of synthetic"),
    ([CIFAR10], "--checkpoint-every 0", "--checkpoint-every", "at least 1"),
    ([CIFAR10], "--weight-decay -1"),
    ([CIFAR10], "--warmup 1.5", "--warmup", "from 0 to 1"),
    ([CIFAR10], "--label-smoothing 1"),
    ([CIFAR10], "--dtype float16", "--dtype", "add --amp"),
    ([CIFAR10], "--clearml", "pip install clearml"),
    ([CIFAR10], "--run-dir a_file", "can't write to --run-dir a_file (File exists): choose another"),
    ([CIFAR10], "--run-dir foreign", "foreign/step-1.pt is damaged, or not a checkpoint", "choose another --run-dir"),
    (["variants/mnist_accumulate.py"], "--accumulate 0", "--accumulate 0", "at least 1"),
    (["variants/mnist_local_sgd.py"], "--every 0", "--every 0", "at least 1"),
    ([FSDP], "--param-dtype float16", "--param-dtype", "'bfloat16'"),
    ([PIPELINE, PIPELINE.replace(".py", "_1f1b.py")], "--nproc 4", "three stages", "at most 3 processes"),
    (["variants/mnist_tensor_parallel.py"], "--nproc 33", "32 channels", "at most 32"),
    (["variants/mnist_experts.py"], "--nproc 3", "4 experts", "1, 2 or 4 processes"),
    ([CONTEXT], "--nproc 17", "16 tokens", "at most 16"),
    ([MESH], "--nproc 3", "--tensor-parallel 2", "divide the number of processes"),
    ([MESH], "--nproc 33 --tensor-parallel 33", "--tensor-parallel 33", "1 to 32"),
    ([MISTAKES], "no_dpd", "invalid choice: 'no_dpd'"),
    ([MISTAKES], "padding", "type python -m demos.mistakes padding wrong"),
    ([CHECK], "shrad", "invalid choice: 'shrad'"),
    ([CHECK], "0", "invalid choice: '0'"),
    ([CHECK], "13", "invalid choice: '13'"),  # there are twelve
    ([TIMELINE], "", "give a program, such as mnist_ddp.py --dataset synthetic"),
    ([TIMELINE], "nothing.py", "there is no file nothing.py"),
    ([TIMELINE], "--out no/x a_file", "no/x.svg can't be written"),
    ([TIMELINE], "--steps 0 a_file", "--steps must be at least 1"),
    ([TIMELINE], "a_file --nproc 3", "python -m ddp_by_diff.timeline: error: put --nproc before the program"),
]


@pytest.mark.parametrize("script", [*TRAINING, MISTAKES, CHECK, TIMELINE])
def test_a_bad_flag_is_one_line(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # even if this machine has ClearML
    (tmp_path / "foreign").mkdir()
    for file in "a_file", "foreign/step-1.pt":
        (tmp_path / file).write_text("neither a folder nor a checkpoint")
    base = ["--dataset", "synthetic"] if script in having("--dataset") else []
    rows = [row for scripts, *row in TABLE if script in scripts]
    assert rows
    for typed, *words in rows:
        place = PLACE if script == PLAIN and typed else {}
        refused(script, *(words or [typed.split()[0]]), flags=[*base, *typed.split()], **place)


@pytest.mark.parametrize(("script", "version", "needed"), [(FSDP, "2.8.0", "2.9"), (PIPELINE, "2.7.1", "2.8")])
def test_a_torch_that_is_too_old_is_one_line(script, version, needed, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(f"{version}+cpu"))
    refused(script, f"torch {needed}", version, "upgrade", flags=["--dataset", "synthetic"])
