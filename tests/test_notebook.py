"""mnist_notebook.ipynb: the cells are mnist_ddp.py's, and what a kernel makes of them is what is stored.

PYTHONPATH=. python tests/test_notebook.py      # runs it, and stores the outputs anew
"""

import ast
import importlib.util
import json
import re
import tempfile

import pytest
from world import ROOT

from tools import build

NOTEBOOK = ROOT / "mnist_notebook.ipynb"


def cells(kind="code"):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def functions(source):
    """{name: code, without comments} of the functions and classes."""
    nodes = ast.parse(source).body
    return {node.name: ast.unparse(node) for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_the_functions_are_those_of_the_script():
    script = functions((ROOT / "mnist_ddp.py").read_text(encoding="utf-8"))
    here = functions("\n".join(cells()))
    for name in "ConvNet", "train", "evaluate", "main":
        assert here[name] == script[name], name


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
    file = rf"{tempfile.gettempdir()}/ipykernel_\d+/\d+\.py"
    return nbformat.reads(re.sub(file, "/tmp/ipykernel_1/cell.py", text), 4)


def told(notebook):
    """What the outputs say, but for speeds, times, losses and the line of the helper that called the worker."""
    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("evalue") or output.get("data", {}).get("text/plain")
            text = re.sub(r'(distributed\.py", line) \d+', r"\1 #", "".join(text))
            found.append((output["output_type"], build.masked(text)))
    return found


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
