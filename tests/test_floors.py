"""The house stands: rooms import only from the floors below, the front door is light, no file has outgrown its room."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_blackmamba"
FLOORS = [
    {"config", "kinds", "tokenizer", "formats", "ops", "hf"},
    {"runtime"},
    {"model", "data"},
    {"checkpoint"},
    {"interchange", "plan"},
    {"training", "inference"},
    {"report", "launch"},
    {"quickstart"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
TOOLS_MAY_USE = {"config", "tokenizer", "formats"}
MOST_LINES = 500


def files_of(folder):
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """Full names of everything a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path):
    names = (name.split(".") for name in imported(path))
    return {parts[1] for parts in names if parts[0] == "megatron_blackmamba" and len(parts) > 1 and parts[1] in FLOOR}


@pytest.mark.parametrize("path", files_of(PACKAGE), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_from_floors_below(path):
    room = room_of(path)
    if room == "__init__":
        assert not rooms_imported(path)
        return
    assert room in FLOOR, f"{room} has no floor: give it one here and in docs/architecture.md"
    for other in rooms_imported(path) - {room}:
        same_floor_at_the_bottom = FLOOR[other] == FLOOR[room] == 0
        assert FLOOR[other] < FLOOR[room] or same_floor_at_the_bottom, f"{room} imports {other}"


def test_what_travels_inside_an_export_needs_only_our_operations():
    for path in files_of(PACKAGE / "hf"):
        assert rooms_imported(path) <= {"ops", "hf"}, path


def test_the_mathematics_knows_nothing_of_megatron():
    for path in files_of(PACKAGE / "ops"):
        assert not any(name.split(".")[0] == "megatron" for name in imported(path)), path


@pytest.mark.parametrize("path", files_of(ROOT / "data_tools"), ids=lambda path: path.name)
def test_data_tools_use_neither_torch_nor_the_upper_floors(path):
    assert not any(name.split(".")[0] in ("torch", "megatron") for name in imported(path))
    assert rooms_imported(path) <= TOOLS_MAY_USE


def test_the_front_door_opens_without_torch():
    heavies = ("torch", "megatron.core", "transformers")
    check = f"import sys, megatron_blackmamba.cli; print([m for m in {heavies} if m in sys.modules])"
    heavy = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert heavy.strip() == "[]"


def test_every_room_is_in_the_architecture():
    described = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {room_of(path) for path in files_of(PACKAGE)} - {"__init__", "__main__"}
    assert [room for room in sorted(rooms) if f"{room}" not in described] == []


def test_no_file_has_outgrown_its_room():
    code = [
        path
        for folder in ("megatron_blackmamba", "data_tools", "tests", "benchmarks")
        for path in files_of(ROOT / folder)
    ]
    assert [f"{p.relative_to(ROOT)}: {n}" for p in code if (n := len(p.read_text().splitlines())) > MOST_LINES] == []


def test_no_benchmark_hides_a_module_of_the_standard_library():
    assert not {path.stem for path in files_of(ROOT / "benchmarks")} & set(sys.stdlib_module_names)
