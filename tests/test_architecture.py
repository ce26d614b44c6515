"""The package's structure: layers import downwards only, files stay short, and docs/architecture.md matches exactly."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_blackmamba.cli import EXTRAS
from tests.engine import changes_table, public_names

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_blackmamba"
LAYERS = [
    {"version", "settings", "registry", "console"},
    {"costs", "formats", "optimizers"},
    {"ops", "tokenizer"},
    {"routers", "norms", "hf"},
    {"layers"},
    {"config"},
    {"engine"},
    {"runtime"},
    {"model", "data"},
    {"checkpoint"},
    {"interchange", "plan"},
    {"training", "inference"},
    {"evaluation", "serving"},
    {"report", "launch", "trace"},
    {"quickstart", "study"},
    {"api", "cli"},
]
TRAINING = [
    *({"start", "watch"}, {"step"}, {"metrics", "keep", "branch"}, {"record"}),
    *({"loop", "launcher"}, {"verb"}, {"anneal"}),
]
"""The groups of `training`, lowest first."""
IN_TRAINING = {group: height for height, groups in enumerate(TRAINING, 1) for group in groups}
LAYER = {package: height for height, packages in enumerate(LAYERS) for package in packages} | {"__main__": len(LAYERS)}
KINDS = ("layers", "routers", "norms", "optimizers")
OF_KINDS = {"__init__", "base", "cost", "decoding", "kind", "recurrent", "rows"}
"""The files of layers and routers that the config reads. The others in a kind's folder are part of the model."""
TOOLS_MAY_USE = {"version", "config", "tokenizer", "formats", "console"}
MOST_LINES = 500
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def files_of(folder):
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def package_of(path):
    package, *inside = path.relative_to(PACKAGE).parts
    of_model = package == "layers" or (package == "routers" and len(inside) > 1)
    return "model" if of_model and path.stem not in OF_KINDS else package.removesuffix(".py")


def imported(path, at_import=False):
    """Full names of everything a file imports anywhere, or only what it imports when it is imported itself."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages_imported(path):
    names = (name.split(".") for name in imported(path))
    return {parts[1] for parts in names if parts[0] == "megatron_blackmamba" and len(parts) > 1 and parts[1] in LAYER}


def section(title):
    """A section of docs/architecture.md."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]


def first_column(text):
    """Every name in backticks in the first column of a table."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def rows_of_kinds(key):
    """The rows of docs/training.md's table of kinds that a config key chooses, by name."""
    page = (ROOT / "docs" / "training.md").read_text()
    table = re.search(rf"^\| `{re.escape(key)}` .*?\n\n", page, re.DOTALL | re.MULTILINE)[0]
    return {re.search(r"`(\w+)`", row)[1]: row for row in table.strip().splitlines()[2:]}


@pytest.mark.parametrize("path", files_of(PACKAGE), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_packages_import_only_lower_layers(path):
    package = package_of(path)
    if package == "__init__":  # loads the Python API when it is used: tests/test_api.py
        return
    assert package in LAYER, f"{package} has no layer: give it one here and in docs/architecture.md"
    for other in packages_imported(path) - {package}:
        assert LAYER[other] < LAYER[package], f"{package} imports {other}"


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    inside = () if parts[0] == PACKAGE.name else (PACKAGE.name,)  # data_tools is a subpackage by a link
    return ".".join((*inside, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def file_graph():
    """The files of the package and data_tools by module, with those that each imports anywhere in it.

    An import of a module runs the packages above it too, unless the importing file is inside them.
    """
    files = {module_of(path): path for folder in (PACKAGE, ROOT / "data_tools") for path in files_of(folder)}
    graph = {module: set() for module in files}
    for module, path in files.items():
        for name in imported(path):
            while name and name not in files:
                name = name.rpartition(".")[0]
            found = name
            while name:
                if name != module and (name == found or not f"{module}.".startswith(f"{name}.")):
                    graph[module].add(name)
                name = name.rpartition(".")[0]
    return graph


def circles(graph):
    """Files that import each other in a circle: what is left once files that import nothing left are taken away."""
    left = {module: set(others) for module, others in graph.items()}
    while free := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in free}
    while free := left.keys() - set().union(*left.values()):
        left = {module: others for module, others in left.items() if module not in free}
    return left


def test_no_files_import_each_other_in_a_circle():
    """Imports in functions and for types count too: such a circle is hidden, not broken."""
    found = circles(file_graph())
    assert {module: sorted(others & found.keys()) for module, others in found.items()} == {}


@pytest.mark.parametrize("path", files_of(PACKAGE / "training"), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_training_groups_import_one_way(path):
    group = path.relative_to(PACKAGE / "training").parts[0].removesuffix(".py")
    parts = [name.split(".") for name in imported(path) if name.startswith("megatron_blackmamba.training.")]
    others = {part[2] for part in parts} - {group}
    assert all(IN_TRAINING.get(other, 0) < IN_TRAINING.get(group, 1) for other in others), f"{group} imports {others}"


def test_modeling_files_import_only_ops():
    for path in files_of(PACKAGE / "hf"):
        assert packages_imported(path) <= {"ops", "hf"}, path


def test_ops_and_kinds_do_not_import_megatron():
    for path in [path for path in files_of(PACKAGE) if package_of(path) in ("ops", *KINDS)]:
        assert not any(name.split(".")[0] == "megatron" for name in imported(path)), path


CHANGING = ("megatron_blackmamba.engine.parts", "megatron_blackmamba.model")
"""Packages whose import changes megatron-core."""


@pytest.mark.parametrize("path", files_of(PACKAGE), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_megatron_is_changed_before_it_is_imported(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for name in (module, *imported(path, at_import=True)):
        if name.startswith(CHANGING):
            return
        assert name.split(".")[0] != "megatron", f"import {CHANGING[0]} first"


def test_model_changes_megatron_first():
    first = next(imported(PACKAGE / "model" / "__init__.py", at_import=True))
    assert first == "megatron_blackmamba.engine.parts"


def test_kinds_import_torch_only_inside_methods():
    for path in [path for path in files_of(PACKAGE) if package_of(path) in KINDS]:
        assert not any(name.split(".")[0] == "torch" for name in imported(path, at_import=True)), path


@pytest.mark.parametrize("path", files_of(ROOT / "data_tools"), ids=lambda path: path.name)
def test_data_tools_import_neither_torch_nor_upper_layers(path):
    assert not any(name.split(".")[0] in ("torch", "megatron") for name in imported(path))
    assert packages_imported(path) <= TOOLS_MAY_USE


@pytest.mark.parametrize("module", ["megatron_blackmamba.cli", "megatron_blackmamba.config"])
def test_command_line_and_config_start_without_torch(module):
    heavies = ("torch", "megatron.core", "transformers")
    check = f"import sys, {module}; print([m for m in {heavies} if m in sys.modules])"
    heavy = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert heavy.strip() == "[]"


def test_no_other_package_imports_an_extra():
    extras = {name.rpartition(".")[2] for name in EXTRAS.values()}
    users = [path for path in files_of(PACKAGE) if packages_imported(path) & extras - {package_of(path)}]
    assert users == [], "name its commands in cli.EXTRAS instead"


def test_workers_are_spawned_with_interrupts_blocked():
    """Python's resource tracker unblocks SIGINT as it starts: `interrupts.spawn_context` blocks it again."""
    for path in [*files_of(PACKAGE), *files_of(ROOT / "data_tools")]:
        if path != PACKAGE / "console" / "interrupts.py":
            assert not re.search(
                r"get_context\(\"(spawn|forkserver)|multiprocessing\.(Process|Pool)", path.read_text()
            ), path


def test_architecture_page_lists_exactly_the_packages():
    packages = {package_of(path) for path in files_of(PACKAGE)} - {"__init__", "__main__"}
    listed = first_column(section("Packages"))
    assert sorted(listed) == sorted(packages)


def test_architecture_page_shows_exactly_the_layers():
    drawn = re.search(r"```\n(.*?)```", section("Layers"), re.DOTALL)[1].splitlines()
    assert [set(line.split()) for line in drawn] == LAYERS


def test_architecture_page_has_the_table_of_changes():
    assert changes_table.table() in section("The engine"), "python -m tests.engine.changes_table prints it"


def test_table_of_public_names_is_complete():
    assert public_names.table() in section("The engine"), "python -m tests.engine.public_names prints it"


def test_changes_name_their_reason_code_and_test():
    from megatron_blackmamba.engine.changes import CHANGES

    assert len({change.name for change in CHANGES}) == len(CHANGES)
    for change in CHANGES:
        assert len(change.why) > 40 and (ROOT / change.test).is_file(), change.name
        defined = {getattr(node, "name", "") for node in ast.parse((PACKAGE / change.file).read_text()).body}
        assert change.place.partition(":")[2] in defined, change.name


def test_architecture_page_lists_exactly_the_plans_files():
    files = {path.name for path in files_of(PACKAGE / "plan")} - {"__init__.py"}
    assert sorted(first_column(section("The plan"))) == sorted(files)


def test_training_page_lists_exactly_the_optimizers():
    from megatron_blackmamba.optimizers import all_kinds

    rows = rows_of_kinds("optimizer.kind")
    assert sorted(rows) == sorted(kind.name for kind in all_kinds())
    assert all(f"`{key}`" in rows[kind.name] for kind in all_kinds() for key in kind.keys)


def test_training_page_lists_exactly_the_routers():
    from megatron_blackmamba.routers import all_kinds

    rows = rows_of_kinds("model.router.kind")
    assert sorted(rows) == sorted(kind.name for kind in all_kinds())
    for kind in all_kinds():
        assert kind.depends_on in rows[kind.name]
        assert all(f"`{key}`" in rows[kind.name] for key in kind.keys)


def test_files_stay_under_500_lines():
    code = [
        path
        for folder in ("megatron_blackmamba", "data_tools", "tests", "benchmarks", "studies")
        for path in files_of(ROOT / folder)
    ]
    assert [f"{p.relative_to(ROOT)}: {n}" for p in code if (n := len(p.read_text().splitlines())) > MOST_LINES] == []


def test_names_of_tests_have_at_most_eight_words():
    names = [
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 2000 and [name for name in names if len(name.split("_")) > 9] == []


def test_folders_of_tests_are_packages():
    """Without `__init__.py` two files of one name in two folders stop the whole collection."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists()) == []


MAY_CHANGE = {
    "formats/events.py": "the table of events, filled as their classes are defined",
    "training/metrics/base.py": "the table of metrics, filled as their functions are defined",
    "evaluation/workers.py": "the tokenizer of a worker process",
}
"""Files outside runtime/, engine/ and console/interrupts.py with module-level state that changes."""
CHANGES_IT = {"append", "add", "clear", "pop", "update", "extend", "remove", "setdefault", "insert", "discard"}


def changes_state(tree):
    """Return whether a function assigns to a global name, or changes what a module-level name refers to."""
    names = {node.id for top in tree.body for node in ast.walk(top) if isinstance(top, ast.Assign | ast.AnnAssign)
             and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}  # fmt: skip
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        inside = list(ast.walk(function))
        own = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in inside if isinstance(node, ast.arg)}
        for node in inside:
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", None) in CHANGES_IT
            stored = isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load)
            target = getattr(node.func if called else node, "value", None) if called or stored else None
            if isinstance(node, ast.Global) or (isinstance(target, ast.Name) and target.id in names - own):
                return True
    return False


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("A = []\ndef f():\n    A.append(1)", True),
        ("a = 1\ndef f():\n    global a\n    a = 2", True),
        ("A = {}\ndef f():\n    A[1] = 2", True),
        ("A = []\ndef f(A):\n    A.append(1)", False),
    ],
)
def test_changes_to_module_state_are_found(code, changes):
    assert changes_state(ast.parse(code)) == changes


def test_module_state_changes_in_few_places():
    found = {str(path.relative_to(PACKAGE)) for path in files_of(PACKAGE) if changes_state(ast.parse(path.read_text()))}
    found |= {path.name for path in files_of(ROOT / "data_tools") if changes_state(ast.parse(path.read_text()))}
    free = {name for name in found if name.startswith(("runtime/", "engine/")) or name == "console/interrupts.py"}
    assert found - free == MAY_CHANGE.keys()


def test_no_benchmark_hides_a_standard_module():
    assert not {path.stem for path in files_of(ROOT / "benchmarks")} & set(sys.stdlib_module_names)


MAKERS = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace"}


@pytest.mark.parametrize("path", files_of(PACKAGE / "ops"), ids=lambda path: str(path.relative_to(PACKAGE / "ops")))
def test_new_tensors_of_ops_name_their_dtype(path):
    """A kernel writes float32 into a buffer; under a 16-bit default dtype an unnamed buffer would be too small."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    made = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr) in {("torch", maker) for maker in MAKERS}
    ]
    unnamed = [call for call in made if not {"dtype", "out", None} & {word.arg for word in call.keywords}]
    assert [f"{path.name}:{call.lineno}" for call in unnamed] == []


def test_text_files_are_utf_8_in_any_locale():
    """Python reads and writes in the encoding of the locale where no other is named."""
    unnamed = []
    for path in [*files_of(PACKAGE), *files_of(ROOT / "data_tools")]:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            words, given = {word.arg for word in call.keywords}, call.args
            match ast.unparse(call.func).rpartition(".")[2]:
                case "open" if isinstance(call.func, ast.Name):
                    named = len(given) > 1 and "b" in ast.unparse(given[1])
                case "read_text":
                    named = bool(given)
                case "write_text":
                    named = len(given) > 1
                case _:
                    named = True
            if not named and "encoding" not in words:
                unnamed.append(f"{path}:{call.lineno}")
    assert unnamed == []
