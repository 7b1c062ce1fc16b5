"""The house of design: the course in the root knows nothing of the folders, and the product nothing of the tests."""

import re

from world import FOLDERS, PROGRAMS, ROOT


def imported(file):
    """The first names of the modules that the file imports; inside its own package, nothing."""
    return set(re.findall(r"^ *(?:from|import) (\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


def test_the_root_imports_no_folder_and_no_folder_the_tests():
    course = [file for file in PROGRAMS if "/" not in file]
    assert {"distributed.py", "mnist_ddp.py"} <= set(course)
    assert {file: imported(file) & FOLDERS for file in course if imported(file) & FOLDERS} == {}
    tests = {"tests", "world", "conftest", *(file.stem for file in (ROOT / "tests").glob("test_*.py"))}
    product = [file for file in PROGRAMS if not file.startswith("tests/")]
    assert {file: imported(file) & tests for file in product if imported(file) & tests} == {}
