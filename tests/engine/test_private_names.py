"""Nothing outside engine/ touches a private name of megatron-core, or assigns to its modules, classes and objects."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from megatron_blackmamba.engine.changes import CHANGES

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_blackmamba"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "engine" not in path.parents]
ASSIGN = {"setattr", "vars", "mock.patch.object", "patch.object"}


def private(name: str) -> bool:
    return re.fullmatch(r"_[^_]\w*", name) is not None


TOUCHED = {name for change in CHANGES for names in change.touches.values() for name in names.split() if private(name)}


@cache
def defined_by_megatron() -> set[str]:
    """Return the private names that megatron-core defines or assigns."""
    (folder,) = importlib.util.find_spec("megatron.core").submodule_search_locations
    definition = re.compile(r"(?:def |class |self\.|^)(_[^_\W]\w*)", re.MULTILINE)
    return {name for path in Path(folder).rglob("*.py") for name in definition.findall(path.read_text())}


def offences(source: str) -> list[str]:
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = [(node.module or "", alias) for node in imports for alias in node.names]
    theirs = {alias.asname or alias.name for module, alias in imported if module.split(".")[0] == "megatron"}
    parents = theirs | {alias.name for module, alias in imported if ".engine.parts" in module}
    objects = set()  # that their classes have built, or that an annotation names
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and root(node.value.func) in theirs:
            objects |= {ast.unparse(target) for target in node.targets}
        if isinstance(node, ast.arg) and node.annotation and root(node.annotation) in theirs:
            objects.add(node.arg)

    def is_theirs(owner: ast.expr) -> bool:
        return root(owner) in theirs or ast.unparse(owner) in objects

    found = [name for name in TOUCHED if re.search(rf"\b{name}\b", source)]
    found += [alias.name for module, alias in imported if "megatron." in module and private(alias.name)]
    found += [alias.name for module, alias in imported if module == "megatron_blackmamba.engine.checked"]
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(bases=bases) if any(root(base) in parents for base in bases):
                inside = {getattr(part, "name", getattr(part, "attr", "")) or "" for part in ast.walk(node)}
                found += sorted(inside & defined_by_megatron())
            case ast.Attribute(attr=name, ctx=context, value=owner) if is_theirs(owner):
                if private(name) or isinstance(context, ast.Store):
                    found.append(ast.unparse(node))
            case ast.Call(func=function, args=[owner, *_]) if ast.unparse(function) in ASSIGN and is_theirs(owner):
                found.append(ast.unparse(node))
    return found


def root(node: ast.expr) -> str:
    return ast.unparse(node).split(".")[0].split("[")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_engine_touches_megatron_core(path):
    assert offences(path.read_text()) == [], "do it in engine/, with an entry in engine/changes.py"


@pytest.mark.parametrize(
    "line",
    [
        "a._forward_impl = None",
        "from megatron_blackmamba.engine.checked import replace",
        "getattr(a, '_forward_impl')",
        "from megatron.core.tensor_parallel.random import _get_cuda_rng_state",
        "random._get_all_rng_states()",
        "random.anything = None",
        "setattr(random, name, None)",
        "mock.patch.object(random.CudaRNGStatesTracker, 'fork')",
        "tracker = random.CudaRNGStatesTracker()\ntracker.states_ = {}",
        "def change(tracker: random.CudaRNGStatesTracker):\n    tracker.states_ = {}",
        "class Mine(random.CudaRNGStatesTracker):\n    def _call(self): self._current_state_name",
    ],
)
def test_the_rule_finds(line):
    assert offences(f"from megatron.core.tensor_parallel import random\n{line}")
    assert not offences("from megatron.core.tensor_parallel import random\nrandom.CudaRNGStatesTracker().states_")
