"""The promise of docs/extending.md: each worked example is a file or folder that the package does not mention."""

import ast
import re
from pathlib import Path

import pytest

from megatron_blackmamba.hf.recurrent_blackmamba import Recurrent
from megatron_blackmamba.layers import LayerKind, all_kinds
from tests.test_architecture import packages_imported

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
CODE = [path for folder in ("megatron_blackmamba", "data_tools") for path in (ROOT / folder).rglob("*.py")]
EXAMPLES = {  # the example's file, and a pattern for its names
    "layer kind": ("tests/layers/running_mean/kind.py", r"running.?mean"),
    "router": ("tests/routers/unbalanced.py", r"\bunbalanced\b"),
    "last norm": ("tests/model/shifted_norm.py", r"\bshifted.?norm\b"),
    "optimizer": ("tests/optimizers/lion.py", r"\blion\b"),
    "metric": ("tests/training/weight_norm.py", r"\bweights/norm\b"),
    "data preset": ("tests/data_tools/new_preset.py", r"\bforum\b"),
}


def test_every_worked_example_has_its_section():
    assert re.findall(r"^## Add an? (.*)$", PAGE, re.MULTILINE) == list(EXAMPLES)


def test_page_counts_the_files_of_each_example():
    rows = dict(re.findall(r"^\| (?:an? )?([a-z ]+) \| `.*?` \| (\d) \|", PAGE, re.MULTILINE))
    files = len(list((ROOT / EXAMPLES["layer kind"][0]).parent.glob("[!_]*.py")))
    assert rows == dict.fromkeys(EXAMPLES, "1") | {"layer kind": str(files)}


def test_example_with_own_keys_is_shown_whole():
    file = ROOT / "tests/routers/first_experts.py"
    assert file.read_text() in PAGE
    assert [path for path in CODE if re.search(r"first.?experts", path.read_text(), re.IGNORECASE)] == []


@pytest.mark.parametrize("what", EXAMPLES)
def test_worked_example_is_one_file(what):
    file, names = EXAMPLES[what]
    assert (ROOT / file).is_file()
    shown = (ROOT / file).read_text() in PAGE or f"({Path('..') / file})" in PAGE
    assert shown, f"docs/extending.md neither links nor shows {file}"
    known = [str(path) for path in CODE if re.search(names, path.read_text(), re.IGNORECASE)]
    assert known == []


@pytest.mark.parametrize("file", ["kind.py", "module.py"])
def test_router_with_state_is_linked_and_unknown(file):
    assert f"(../tests/routers/levelled/{file})" in PAGE
    assert [str(path) for path in CODE if re.search("levelled", path.read_text(), re.IGNORECASE)] == []


@pytest.mark.parametrize("what", ["layer kind", "router", "optimizer"])
def test_example_is_light_and_stands_alone(what):
    file, _ = EXAMPLES[what]
    top = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = " ".join(ast.unparse(node) for node in top)  # they are imported before the config, so they must be light
    assert not re.search(r"torch|megatron\.core|tests\.", imported), imported
    assert "tests." not in (ROOT / file).read_text()


@pytest.mark.parametrize("what", ["layer kind", "router", "optimizer"])
def test_example_may_move_into_the_package(what):
    file, _ = EXAMPLES[what]
    assert "megatron.core" not in (ROOT / file).read_text()
    assert packages_imported(ROOT / file) <= {f"{what.removesuffix(' kind')}s"}


def test_page_names_the_files_of_a_layer():
    listed = set(re.findall(r"^\| `(\w+\.py)` \|", PAGE, re.MULTILINE))
    for kind in all_kinds():
        if (folder := ROOT / type(kind).__module__.replace(".", "/")).parent.parent.name == "layers":
            assert {"kind.py", "mixer.py", "cost.py", "decode.py"} <= {path.name for path in folder.parent.glob("*.py")}
    assert listed == {path.name for path in (ROOT / EXAMPLES["layer kind"][0]).parent.glob("[!_]*.py")}


def test_page_names_what_an_exported_layer_uses():
    step = re.search(r"^6\. To be exported.*?^Register", PAGE, re.MULTILINE | re.DOTALL)[0]
    for name in ("recalled", "remember", "initialise", "kept_in_fp32"):
        assert f"`{name}`" in step and hasattr(Recurrent, name)
    for name in ("entry", "modeling", "exported_fields", "imported_fields", "derived_fields"):
        assert f"`{name}`" in step and (hasattr(LayerKind, name) or name in LayerKind.__annotations__)


def decides_by_name(path):
    """Yield the lines of a file that compare a router's or an optimizer's kind with a constant."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            text = " ".join(ast.unparse(side) for side in sides)
            named = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
            if named and re.search(r"(router|optimizer|settings)\.kind\b", text):
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_no_file_branches_on_a_layer_kind_name():
    assert [line for path in CODE for line in decides_by_name(path)] == []
