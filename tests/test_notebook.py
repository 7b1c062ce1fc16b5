"""mnist_notebook.ipynb: the cells are mnist_ddp.py's, and what a kernel makes of them is what is stored.

PYTHONPATH=. python tests/test_notebook.py      # runs it, and stores the outputs anew
"""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
from world import ROOT, forker

from tools import build

NOTEBOOK = ROOT / "mnist_notebook.ipynb"


def cells(kind="code"):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def functions(source):
    """{name: text} of the functions and classes."""
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def test_the_functions_are_those_of_the_script():
    script = functions((ROOT / "mnist_ddp.py").read_text(encoding="utf-8"))
    here = functions("\n".join(cells()))
    for name in "ConvNet", "train", "evaluate", "main":
        assert here[name] == script[name], name


def test_the_cell_that_clones_does_nothing_where_the_files_are(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", "")  # git would not be found
    exec(cells()[0], {})
    assert Path.cwd() == ROOT


def test_the_cell_that_clones_uses_the_address_of_the_readme(monkeypatch, tmp_path):
    address = re.search(r"git clone (\S+)", (ROOT / "README.md").read_text(encoding="utf-8"))[1]
    calls = []

    def clone(command, check):
        calls.append((command, check))
        (tmp_path / command[-1]).mkdir()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", clone)
    exec(cells()[0], {})
    assert calls == [(["git", "clone", address, "ddp-by-diff"], True)]
    assert Path.cwd() == tmp_path / "ddp-by-diff"
    monkeypatch.chdir(tmp_path)
    exec(cells()[0], {})  # a second kernel in the same folder
    assert len(calls) == 1 and Path.cwd() == tmp_path / "ddp-by-diff"


ONE_GPU = """
import torch
torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda device: None
"""


@pytest.mark.slow
def test_two_processes_start_on_one_gpu_too(tmp_path):
    """As on notebooks of the web.  All launches but the training, which would need the GPU itself."""
    launches = [cell for cell in cells() if "nproc=2" in cell]
    assert len(launches) == 5
    hello, shares, broken, failing, again = launches
    failing = failing.replace("dist.launch(", "try:\n    dist.launch(")
    failing += "\nexcept SystemExit as end:\n    print(end)\n"
    again = f"print({again.partition('  #')[0]})\n"
    program = "\n".join(["import torch", "import distributed as dist", hello, shares, broken, failing, again])
    (tmp_path / "cells.py").write_text(program)
    done = forker().run(tmp_path / "cells.py", before=ONE_GPU, path=[ROOT])
    assert done.code == 0, done.err
    assert "rank 1 of 2 failed first: " in done.out and "a mistake on rank 1" in done.out
    assert done.out.splitlines()[-1] == "0.5"


def execute():
    """The notebook after a run in a fresh kernel, with no trace of this machine in it."""
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources, coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was run
    text = nbformat.writes(notebook)
    text = text.replace(str(ROOT), "~/ddp-by-diff")
    return nbformat.reads(re.sub(r"/tmp/ipykernel_\d+/\d+\.py", "/tmp/ipykernel_1/cell.py", text), 4)


def told(notebook):
    """What the outputs say, but for speeds, times, losses and the line of the helper that called the worker."""
    from tools import build

    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("evalue") or output.get("data", {}).get("text/plain")
            text = re.sub(r'(distributed\.py", line) \d+', r"\1 #", "".join(text))
            found.append((output["output_type"], build.masked(text)))
    return found


def test_the_stored_outputs_are_those_of_a_run():
    """As far as it can be seen without a kernel: nothing is missing, and nothing names a machine."""
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert str(ROOT) not in text and "/home/" not in text
    outputs = told(json.loads(text))
    assert [kind for kind, _ in outputs].count("error") == 1
    assert sum("done in " in said for _, said in outputs) == 2, "two runs, one after the other"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_runs_in_a_kernel():
    for package in "nbclient", "ipykernel":
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install nbclient ipykernel")
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    now = execute()
    assert [kind for kind, _ in told(now)] == [kind for kind, _ in told(stored)]
    for (_, before), (_, after) in zip(told(stored), told(now), strict=True):
        assert build.same_output(before, after), "PYTHONPATH=. python tests/test_notebook.py stores the outputs anew"
    accuracy = re.search(r"3/3 .*?accuracy ([\d.]+)%", json.dumps(now))[1]
    assert float(accuracy) >= 97


if __name__ == "__main__":
    import nbformat

    nbformat.write(execute(), NOTEBOOK)
