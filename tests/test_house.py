"""The house of design: the course in the root knows nothing of the folders, and the product nothing of the tests."""

import ast

from world import FOLDERS, PROGRAMS, ROOT

COURSE = [file for file in PROGRAMS if "/" not in file]
PRODUCT = [file for file in PROGRAMS if not file.startswith("tests/")]


def imported(file):
    """The modules that the file imports, by all the names under which a module could be meant: a, a.b."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = file.split("/")[:-1]
            parts = [*folder[: len(folder) - node.level + 1], node.module] if node.level else [node.module]
            module = ".".join(filter(None, parts))
            found |= {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
    return found


def importing(files, modules):
    """{file: what it imports of these modules, or from within them}."""
    found = {file: {name for name in imported(file) if modules & set(name.split("."))} for file in files}
    return {file: names for file, names in found.items() if names}


def test_the_course_imports_no_folder():
    assert {"distributed.py", "mnist_ddp.py"} <= set(COURSE)
    assert importing(COURSE, FOLDERS) == {}


def test_the_product_imports_no_test():
    test_modules = {file.rsplit("/")[-1].removesuffix(".py") for file in PROGRAMS if file.startswith("tests/")}
    assert importing(PRODUCT, {"tests", *test_modules} - {"build", "operators", "__init__"}) == {}
