"""Runs mnist_notebook.ipynb and stores what its cells print.  Before that it copies mnist_ddp.py's functions into it.

pip install nbclient ipykernel && python -m dev.notebook
"""

import re
import sys
import tempfile

from dev.programs import ENVIRONMENT, ROOT

try:
    import nbclient
    import nbformat
except ImportError:
    sys.exit("dev.notebook: type  pip install nbclient ipykernel")

NOTEBOOK = ROOT / "mnist_notebook.ipynb"
FUNCTION = re.compile(r"(?:@.+\n)?(?:class|def) (\w+)")


def executed() -> nbformat.NotebookNode:
    """Return the notebook after a run in a new kernel without a GPU, with no trace of this machine in it."""
    notebook = nbformat.read(NOTEBOOK, 4)
    blocks = (ROOT / "mnist_ddp.py").read_text(encoding="utf-8").split("\n\n\n")
    functions = {found[1]: block for block in blocks if (found := FUNCTION.match(block))}
    for cell in notebook.cells:
        found = FUNCTION.match(cell.source)
        cell.source = functions.get(found and found[1], cell.source)
    resources = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources, coalesce_streams=True).execute(env=ENVIRONMENT)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was run
    notebook.metadata.language_info.pop("version")
    text = nbformat.writes(notebook).replace(str(ROOT), "~/ddp-by-diff")
    file = rf"{tempfile.gettempdir()}/ipykernel_\d+/\d+\.py"
    return nbformat.reads(re.sub(file, "/tmp/ipykernel_1/cell.py", text), 4)


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
