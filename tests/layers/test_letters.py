"""Only the files of `layers/` know what a letter of the pattern means, or what a kind is called.

Any constant that is a letter, a run of letters or the name of a kind counts, wherever it is written: in a comparison, a
set, a `match`, a key. `*` and `-` are common characters; they count where code decides by them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_blackmamba import layers

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_blackmamba"
LETTERS = {kind.letter for kind in layers.all_kinds()}
NAMES = {kind.name for kind in layers.all_kinds()}
QUESTIONS = {"count", "endswith", "find", "get", "index", "pop", "startswith"}
"""Methods of strings and dicts that answer for the constant in them."""
ALLOWED = {
    ("settings/values.py", "G"): "a thousand million",
    ("settings/values.py", "M"): "a million",
    ("data_tools/progress.py", "G"): "a thousand million",
    ("data_tools/progress.py", "M"): "a million",
    ("plan/table.py", "G"): "a thousand million",
    ("launch/job.py", "-G"): "an option of sbatch",
    ("plan/table.py", "M"): "a million",
    ("report/charts.py", "M"): "a million",
    ("evaluation/paper.py", "Mamba"): "a row of the paper's table",
    ("ops/backends.py", "attention"): "a row of the table of kernels",
    ("ops/sinkhorn/triton.py", "E"): "an axis of a kernel's argument",
    ("ops/selective_scan/triton_forward.py", "S"): "an axis of a kernel's argument",
    ("ops/decoding/triton.py", "E"): "an axis of a kernel's argument",
    ("ops/decoding/triton.py", "M"): "an axis of a kernel's argument",
    ("ops/decoding/triton.py", "R"): "an axis of a kernel's argument",
    ("ops/order/triton.py", "E"): "an axis of a kernel's argument",
    ("config/checks.py", "attention"): "a section of the config",
    ("settings/model.py", "attention"): "a section of the config",
    ("cli/hints.py", "--"): "the start of an option",
    ("cli/hints.py", "-"): "the start of an option",
    ("runtime/deadman.py", "-S"): "an option of Python",
    ("interchange/families.py", "Mamba"): "a family of models in transformers",
    ("interchange/families.py", "Mamba-2"): "a family of models in transformers",
    ("interchange/refresh.py", "--"): "a mark in a name of the hub",
    ("interchange/native/nemotron_h.py", "M*-E"): "letters of Nemotron-H",
    ("settings/run.py", "-"): "the start of an option",
    ("data_tools/cleaning_commands.py", "-"): "standard input",
    ("inference/commands.py", "-"): "standard input",
    ("launch/job.py", "-"): "the start of an option",
    ("training/metrics/base.py", "*"): "a wildcard in a metric's name",
}
"""Constants that mean something else, with what they mean."""


def decides(tree: ast.AST) -> set[int]:
    """Return the ids of the constants that code compares, matches or looks up with."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            roots += [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            roots.append(node.pattern)
        elif isinstance(node, ast.Dict):
            roots += [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Set):
            roots.append(node)
        elif isinstance(node, ast.Subscript):
            roots.append(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in QUESTIONS:
            roots += [node.func.value, *node.args]
    return {id(node) for root in roots for node in below(root)}


def below(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its parts, but not the parts of a call, which decide nothing by themselves."""
    yield node
    if not isinstance(node, ast.Call):
        for part in ast.iter_child_nodes(node):
            yield from below(part)


def letters_in(source: str) -> list[tuple[int, str]]:
    """Return the lines and constants that name a kind of layer."""
    tree = ast.parse(source)
    deciding = decides(tree)
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value):
            continue
        text = node.value
        plain = not any(character.isalpha() for character in text)
        if (text in NAMES or set(text) <= LETTERS) and (not plain or id(node) in deciding):
            found.append((node.lineno, text))
    return found


@pytest.fixture(scope="module")
def found():
    """(file, constant) -> lines, for the package without `layers/` and the modeling files of exports."""
    places: dict[tuple[str, str], list[int]] = {}
    for folder in (PACKAGE, PACKAGE / "data_tools"):
        for path in folder.rglob("*.py"):
            name = path.relative_to(PACKAGE).as_posix()
            if not name.startswith(("layers/", "hf/")):
                theirs = name.startswith("interchange/native/")  # whose formats have names of their own for layers
                for line, text in letters_in(path.read_text()):
                    if not (theirs and text in NAMES):
                        places.setdefault((name, text), []).append(line)
    return places


def test_no_file_decides_by_a_letter(found):
    found_now = {place: lines for place, lines in found.items() if place not in ALLOWED}
    assert found_now == {}, "ask the kind instead; a constant that means something else belongs to ALLOWED"


def test_every_allowed_constant_is_still_there(found):
    assert [place for place in ALLOWED if place not in found] == []
