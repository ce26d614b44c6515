"""Every private name of another package stands in one list, and a missing one is named before a run begins."""

import ast
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_blackmamba.engine import foreign
from megatron_blackmamba.launch import software

ROOT = Path(__file__).resolve().parents[2]
LISTS = ("foreign.py", "changes.py")
STANDARD = {"_asdict", "_replace", "_exit", "_current_frames"}
"""Python's own, documented or without another way."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def names_in(trees: dict[Path, ast.AST]) -> tuple[set[str], dict[str, set[str]]]:
    """Return the names that our code defines, and the private ones that it uses, with the files."""
    defined: set[str] = set()
    used: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    defined.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                    defined.add(name)
                case ast.Attribute(attr=name) if private(name):
                    used[name].add(path.name)
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr" | "setattr" | "replace" | "private" | "require"),
                    args=[_, *names],
                ):
                    texts = [str(name.value) for name in names if isinstance(name, ast.Constant)]
                    for name in filter(private, texts):
                        used[name].add(path.name)
                case ast.ImportFrom(module=str(module), level=0, names=names) if "megatron_blackmamba" not in module:
                    deep = any(map(private, module.split(".")))
                    for alias in names:
                        if deep or private(alias.name):
                            used[alias.name].add(path.name)
    return defined, used


def test_the_list_is_what_the_code_uses():
    files = [*(ROOT / "megatron_blackmamba").rglob("*.py"), *(ROOT / "data_tools").glob("*.py")]
    trees = {path: ast.parse(path.read_text()) for path in files if path.name not in LISTS}
    defined, used = names_in(trees)
    listed = {name for entry in foreign.touched() for name in entry.names}
    theirs = {name: sorted(files) for name, files in used.items() if name not in defined | STANDARD}
    assert {name: files for name, files in theirs.items() if name not in listed} == {}, (
        "list them in foreign.py, or in changes.py"
    )
    text = "\n".join(path.read_text() for path in trees)
    assert [name for name in sorted(listed) if name not in text] == [], "nothing uses these any more"
    for entry in foreign.touched():
        for path in entry.used_by.split(", "):
            content = (ROOT / "megatron_blackmamba" / path).read_text()
            assert any(name in content for name in entry.names), f"{path} uses none of {entry.names}"


def test_the_installed_packages_have_what_training_needs():
    assert {entry.module: gone for entry, gone in foreign.report() if entry.needed} == {}


@pytest.fixture
def renamed(monkeypatch):
    """megatron-core as if it had renamed a method."""
    source_of = foreign.source_of
    monkeypatch.setattr(foreign, "source_of", lambda m: source_of(m).replace("_get_model_param_range_map", "_other"))
    foreign.missing.cache_clear()
    yield
    foreign.missing.cache_clear()


def test_a_renamed_method_is_named_before_training(renamed):
    with pytest.raises(foreign.ForeignNameError, match=r"megatron-core .* has no _get_model_param_range_map"):
        foreign.refuse_missing()
    found = [finding for finding in software.foreign_names() if finding.status == "problem"]
    assert found and all("has no _get_model_param_range_map for engine/" in finding.found for finding in found)


def test_parts_require_no_name_when_imported():
    """A run asks `refuse_missing` first, which says why a name is needed; it imports these files before."""
    for path in (ROOT / "megatron_blackmamba/engine/parts").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            assert getattr(called, "id", None) not in ("require", "replace", "private"), path


def test_change_that_fails_on_import_gives_its_reason():
    script = (
        "from megatron_blackmamba.engine import changes, checked, foreign\n"
        "def fail(): raise checked.EngineError('no reason')\n"
        "changes.install = fail\n"
        "entry = foreign.Foreign('torch.nn', ('_gone_tomorrow',), 'x', 'a test', 'nothing')\n"
        "foreign.FOREIGN = (entry,)\n"
        "import megatron_blackmamba.engine.parts\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ForeignNameError: torch" in done.stderr and "_gone_tomorrow (torch.nn), which" in done.stderr


def test_training_asks_first(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "from megatron_blackmamba.engine import foreign\n"
        "entry = foreign.Foreign('torch.nn', ('_gone_tomorrow',), 'x', 'a test', 'nothing')\n"
        "foreign.FOREIGN = (entry,)\n"
    )
    words = [sys.executable, "-m", "megatron_blackmamba", "train", "tiny", f"folder={tmp_path}/runs"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2 and "has no _gone_tomorrow (torch.nn)" in done.stderr
    assert done.stderr.count("\n") == 1
