"""mnist_notebook.ipynb: the cells are mnist_ddp.py's, and all of them run in a kernel.

PYTHONPATH=. python tests/test_notebook.py      # runs it, and stores the outputs anew
"""

import importlib.util
import json
import re
import tempfile

import pytest
from world import FEW_DIGITS, ROOT

NOTEBOOK = ROOT / "mnist_notebook.ipynb"


def test_the_functions_are_those_of_the_script():
    script = (ROOT / "mnist_ddp.py").read_text(encoding="utf-8")
    cells = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]]
    for start in "class ConvNet", "def train(", "@torch.no_grad()\ndef evaluate(", "def main(":
        (function,) = (cell for cell in cells if cell.startswith(start))
        assert f"\n{function}\n" in script


def execute(before=""):
    """The notebook after a run in a fresh kernel, with no trace of this machine in it; `before` is run first."""
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, 4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source = before + first.source
    resources = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources, coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was run
    text = nbformat.writes(notebook)
    text = text.replace(str(ROOT), "~/ddp-by-diff")
    file = rf"{tempfile.gettempdir()}/ipykernel_\d+/\d+\.py"
    return nbformat.reads(re.sub(file, "/tmp/ipykernel_1/cell.py", text), 4)


@pytest.mark.slow
def test_it_runs_in_a_kernel():
    """An error in another cell than that of the mistake would end it."""
    for package in "nbclient", "ipykernel":
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install nbclient ipykernel")
    outputs = [output for cell in execute(FEW_DIGITS).cells for output in cell.get("outputs", [])]
    said = "".join(output.get("text", "") for output in outputs)
    assert said.count("I am rank 0 of 2; all ranks: [0, 1]\n") == 2
    shares = re.findall(r"epoch \d: rank 0 has (\[.*\]), rank 1 has (\[.*\])\n", said)
    assert len({*shares[:3]}) == 3 and len({*shares[3:]}) == 1 and "UserWarning: call sampler.set_epoch(epoch)" in said
    (error,) = (output["evalue"] for output in outputs if output["output_type"] == "error")
    assert error.startswith("rank 1 of 2 failed first:") and error.endswith("ValueError: a mistake on rank 1")
    assert [*re.findall(r"epoch (\d/\d)  loss", said)] == ["1/3", "2/3", "3/3", "1/1"]
    assert said.count("/150)") == 4


if __name__ == "__main__":
    import nbformat

    nbformat.write(execute(), NOTEBOOK)
