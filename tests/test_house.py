"""The house of design: the course in the root knows nothing of the folders, and the product nothing of the tests."""

import ast
import re

import pytest
from world import ROOT

ELSEWHERE = (".", "node_modules")  # how the folders begin that are not ours
FILES = {tuple(path.relative_to(ROOT).parts): path for path in ROOT.rglob("*.py")}
FILES = {parts: path for parts, path in FILES.items() if not any(part.startswith(ELSEWHERE) for part in parts)}
FOLDERS = {parts[0] for parts in FILES if len(parts) > 1}
COURSE = sorted(path for parts, path in FILES.items() if len(parts) == 1)
PRODUCT = sorted(path for parts, path in FILES.items() if parts[0] != "tests")
TEST_MODULES = {path.stem for parts, path in FILES.items() if parts[0] == "tests"}


def imported(path):
    """The modules that the file imports, by all the names under which a module could be meant: a, a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = path.relative_to(ROOT).parent.parts
            parts = [*folder[: len(folder) - node.level + 1], node.module] if node.level else [node.module]
            module = ".".join(filter(None, parts))
            found |= {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
    return found


def name(path):
    return str(path.relative_to(ROOT))


def test_there_is_a_course_and_a_laboratory():
    assert {"distributed.py", "mnist_ddp.py"} <= {name(path) for path in COURSE}
    assert {"exercises", "experiments", "tests", "tools", "variants"} == FOLDERS


@pytest.mark.parametrize("path", COURSE, ids=name)
def test_the_course_imports_no_folder(path):
    assert not [module for module in imported(path) if module.split(".")[0] in FOLDERS]


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_the_product_imports_no_test(path):
    assert not [module for module in imported(path) if {"tests", *TEST_MODULES} & set(module.split("."))]


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_no_product_file_needs_to_change_where_python_looks(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\bsys\.path\b|noqa: E402", text)


def test_the_root_holds_what_a_student_runs_or_copies():
    assert len(COURSE) <= 14, "a program that measures or writes pages goes into a folder"
