"""The steps of the course: each script, its parents, and what it adds.  Tables, diffs and side_by_side.html follow."""

import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from dev.programs import ROOT


class Step(NamedTuple):
    script: str
    parents: list[str]
    adds: str

    @property
    def name(self) -> str:
        return Path(self.script).stem.removeprefix("mnist_")

    @property
    def picture(self) -> Path:
        """The picture by dev/timelines.py; not each step has one."""
        return ROOT / "docs/timelines" / f"{self.name}.svg"

    @property
    def replay(self) -> Path:
        """The page by dev/replays.py; not each step has one."""
        return ROOT / "docs/replays" / f"{self.name}.html"


GROUPS = {
    "The course": [
        Step("mnist_single.py", [], "one device: the plain loop"),
        Step("mnist_dataparallel.py", ["mnist_single.py"], "`nn.DataParallel`: one process, all GPUs of a machine"),
        Step(
            "mnist_ddp.py",
            ["mnist_dataparallel.py", "mnist_single.py"],
            "`DistributedDataParallel` (DDP): one process per device (a GPU, or a share of the CPU)",
        ),
        Step(
            "mnist_ddp_plain.py", ["mnist_ddp.py"], "the same in plain torch, without `distributed.py`, under torchrun"
        ),
        Step("mnist_amp.py", ["mnist_ddp.py"], "mixed precision with `torch.amp`: 16-bit numbers where that is safe"),
        Step("mnist_apex.py", ["mnist_ddp.py"], "mixed precision with NVIDIA Apex, as older code has it"),
    ],
    "Inside DDP": [
        Step("variants/mnist_by_hand.py", ["mnist_ddp.py"], "what DDP does, written by hand"),
        Step("variants/mnist_overlap.py", ["variants/mnist_by_hand.py"], "all-reduces that overlap with backward"),
        Step("variants/mnist_zero.py", ["variants/mnist_by_hand.py"], "ZeRO-1: the optimizer state, in shards"),
        Step("variants/mnist_fsdp_by_hand.py", ["variants/mnist_by_hand.py"], "FSDP by hand: everything in shards"),
    ],
    "What if it doesn't fit": [
        Step("variants/mnist_accumulate.py", ["mnist_ddp.py"], "gradient accumulation, if the batch doesn't fit"),
        Step("variants/mnist_fsdp.py", ["mnist_ddp.py"], "`fully_shard` (FSDP2), if the model doesn't fit"),
        Step(
            "variants/mnist_tensor_parallel.py",
            ["mnist_ddp.py"],
            "tensor parallelism: each process has a share of the channels",
        ),
        Step(
            "variants/mnist_mesh.py",
            ["variants/mnist_tensor_parallel.py"],
            "a mesh of processes: data and tensor parallelism",
        ),
        Step("variants/mnist_pipeline.py", ["mnist_ddp.py"], "a pipeline: each process has some of the layers"),
        Step(
            "variants/mnist_pipeline_1f1b.py",
            ["variants/mnist_pipeline.py"],
            "the schedule 1F1B, which keeps fewer activations",
        ),
    ],
    "A transformer": [
        Step("variants/mnist_transformer.py", ["mnist_ddp.py"], "attention between the patches of an image"),
        Step(
            "variants/mnist_context_parallel.py",
            ["variants/mnist_transformer.py"],
            "context parallelism: each process has a share of each sequence; ring attention",
        ),
        Step(
            "variants/mnist_experts.py",
            ["variants/mnist_transformer.py"],
            "expert parallelism: each process has some of the experts",
        ),
    ],
    "Faster": [
        Step("variants/mnist_local_sgd.py", ["mnist_ddp.py"], "local SGD: the weights are averaged every few steps"),
    ],
    "Other engines": [
        Step("variants/mnist_horovod.py", ["mnist_ddp.py"], "the same under Horovod, to read older code"),
        Step("variants/mnist_xla.py", ["mnist_ddp.py"], "the same under PyTorch/XLA, for TPUs"),
    ],
}
STEPS = [step for steps in GROUPS.values() for step in steps]


def git_diff(*args: str) -> str:
    """git's own diff, whatever the user's configuration says."""
    command = ["git", "diff", "--no-index", "--no-ext-diff", "--no-color", "--diff-algorithm=myers", *args]
    env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8")
    if done.returncode not in (0, 1) or done.stderr:
        raise OSError(done.stderr.strip())
    return done.stdout


def diff_lines(before: str, after: str) -> tuple[int, int]:
    """The numbers of lines that git counts as added and removed."""
    added, removed, _ = git_diff("--numstat", before, after).split(maxsplit=2)
    return int(added), int(removed)


def code_digest(script: str) -> str:
    """A digest of a script without its docstring and comments."""
    text = (ROOT / script).read_text(encoding="utf-8")
    code = re.sub(r'\A"""[^"]*"""|\s*#.*', "", text)
    return hashlib.sha256(code.encode()).hexdigest()[:8]


def recorded_from(picture: Path) -> dict[str, str]:
    """{script: its digest when dev/timelines.py recorded it}; empty if there is no such picture."""
    if not picture.exists():
        return {}
    found = re.search("<!-- recorded from (.+) -->", picture.read_text(encoding="utf-8"))
    return dict(script.split(" ") for script in found[1].split(", ")) if found else {}
