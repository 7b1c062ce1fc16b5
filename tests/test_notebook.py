"""mnist_notebook.ipynb runs whole, here and as on Kaggle, and shows what it prints."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys

import pytest
from world import ROOT

from dev.build import same_output
from dev.programs import ENVIRONMENT

NOTEBOOK = ROOT / "mnist_notebook.ipynb"
# No network but 127.0.0.1, and a folder that can't be written to.
ALONE = 'ip link set lo up && mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
UNREACHABLE = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https")}
NOT_SENT = ".*", "__pycache__", "data", "runs", "site", "node_modules", "gpu_check"


def needs(*packages):
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {' '.join(packages)}")


def sources(notebook):
    return ["".join(cell["source"]) for cell in notebook["cells"]]


def printed(cell):
    """What a cell has printed, first its stdout; without line numbers, and the marks below a traceback's lines."""
    outputs = sorted(cell.get("outputs", []), key=lambda output: output.get("name", ""), reverse=True)
    text = "".join("".join(output.get("text") or output["data"]["text/plain"]) for output in outputs)
    return re.sub(r"(?<=, line )\d+|(?<=\.py:)\d+|^ *[~^]+\n", "", text, flags=re.MULTILINE)


def test_the_functions_are_those_of_the_script():
    script = (ROOT / "mnist_ddp.py").read_text(encoding="utf-8")
    cells = sources(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    for start in "class ConvNet", "def train(", "@torch.no_grad()\ndef evaluate(", "def main(":
        (function,) = (cell for cell in cells if cell.startswith(start))
        assert f"\n{function}\n" in script, "run  python -m dev.notebook"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_shows_what_it_prints():
    needs("nbclient", "ipykernel")
    from dev import notebook

    stored, now = json.loads(NOTEBOOK.read_text(encoding="utf-8")), notebook.executed()
    assert sources(stored) == sources(now)
    for old, new in zip(stored["cells"], now["cells"], strict=True):
        assert same_output(printed(old), printed(new)), f"run  python -m dev.notebook\n{printed(old)}\n{printed(new)}"
    said = "".join(map(printed, now["cells"]))
    assert said.count("I am rank 0 of 2; all ranks: [0, 1]\n") == 2
    shares = re.findall(r"epoch \d: rank 0 has (\[.*\]), rank 1 has (\[.*\])\n", said)
    assert len({*shares[:3]}) == 3 and len({*shares[3:]}) == 1 and "UserWarning: call sampler.set_epoch(epoch)" in said
    assert "rank 1 of 2 failed first:" in said and "\nValueError: a mistake on rank 1\n" in said
    assert [*re.findall(r"epoch (\d/\d)  loss", said)] == ["1/3", "2/3", "3/3", "1/1"] + 4 * ["1/1"]
    assert said.endswith("\ngpu_check: torch sees no GPU; to find out why, type  python -m ddp_by_diff.doctor\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_on_kaggle(tmp_path):
    """With papermill, which accepts no error in any cell; without a network, from a dataset that is read-only."""
    needs("papermill", "ipykernel")
    attached, working = tmp_path / "input/ddp", tmp_path / "working"
    shutil.copytree(ROOT, attached, ignore=shutil.ignore_patterns(*NOT_SENT))
    working.mkdir()
    text = NOTEBOOK.read_text(encoding="utf-8").replace("/kaggle/input", str(tmp_path / "input"))
    (working / "in.ipynb").write_text(text, encoding="utf-8")
    alone = ["unshare", "-rnm", "sh", "-c", ALONE, "sh", str(attached)]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"]).returncode:
        alone = []  # not in every container
    command = [*alone, sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb"]
    done = subprocess.run(command, cwd=working, env=ENVIRONMENT | UNREACHABLE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = "".join(map(printed, json.loads((working / "out.ipynb").read_text(encoding="utf-8"))["cells"]))
    assert "ValueError: a mistake on rank 1\n" in said and "gpu_check: torch sees no GPU" in said
    assert "~/ddp-by-diff" not in said and f'File "{working}/ddp-by-diff/distributed.py"' in said


def test_the_first_cell_gets_the_files(tmp_path):
    """Or says what to do.  They are cloned once: the second run has no address."""
    (first,) = (cell for cell in sources(json.loads(NOTEBOOK.read_text(encoding="utf-8"))) if "\nADDRESS = " in cell)
    origin, working = tmp_path / "origin", tmp_path / "working"
    working.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a", "-C", str(origin)]
    subprocess.run(["git", "init", "-q", origin], check=True)
    (origin / "distributed.py").touch()
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "files"], check=True)
    for address, seen in ("", "or attach its files as a dataset\n"), (str(origin), "here"), ("", "here"):
        code = first.replace('ADDRESS = ""', f"ADDRESS = {address!r}") + "\nimport distributed; print('here', end='')"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=working, env=ENVIRONMENT, capture_output=True, text=True
        )
        assert (done.stderr if done.returncode else done.stdout).endswith(seen), done.stderr
