"""Every promise in a table whose last column is "Test" names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = re.compile(r"^\| (?:Fault \| What happens|Claim \| Foreign reader) \| Test \|$", re.MULTILINE)
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if HEADER.search(page.read_text())]
PROGRAM = re.compile(r"`python -m (tests\.[\w.]+)[^`]*`")
TEST = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`")


def promises(page):
    """Yield the first two cells and the named tests of every row; a name without a file is in the file named before it.

    A long test may be a program of its own, `python -m tests.…`.
    """
    for table in HEADER.split(page.read_text())[1:]:
        for line in table.strip().splitlines()[1:]:
            if not line.startswith("|"):
                break
            promise, how, tests = (cell.strip() for cell in line.strip().strip("|").split(" | "))
            found, file = [], None
            for named, test in TEST.findall(tests):
                file = named or file
                found.append((file, test))
            found += [(f"{module.replace('.', '/')}.py", "main") for module in PROGRAM.findall(tests)]
            yield promise, how, found


@cache
def named_tests(file):
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_promises_are_in_tables():
    assert {"faults.md", "measured.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_promise_names_existing_tests(page):
    rows = list(promises(page))
    assert len(rows) > 3
    for promise, how, tests in rows:
        assert promise and how
        assert tests, f"{page.name}: no test is named for: {promise}"
        for file, test in tests:
            assert file and (ROOT / file).is_file(), f"{page.name}: {file} for {test} does not exist"
            assert test in named_tests(file), f"{page.name}: {file} has no {test}"
