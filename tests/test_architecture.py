"""The package's structure: layers import downwards only, files stay short, and docs/architecture.md matches exactly."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_blackmamba"
LAYERS = [
    {
        "config",
        "registry",
        "kinds",
        "routers",
        "optimizers",
        "tokenizer",
        "short_texts",
        "formats",
        "ops",
        "hf",
        "interrupts",
        "progress",
    },
    {"runtime"},
    {"model", "data"},
    {"checkpoint"},
    {"interchange", "plan"},
    {"training", "inference"},
    {"evaluation", "serving"},
    {"report", "launch", "trace"},
    {"quickstart", "study", "errors", "hints"},
    {"api", "cli"},
]
LAYER = {package: height for height, packages in enumerate(LAYERS) for package in packages} | {"__main__": len(LAYERS)}
TOOLS_MAY_USE = {"config", "tokenizer", "formats", "interrupts", "progress"}
MOST_LINES = 500
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def files_of(folder):
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def package_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path, at_import=False):
    """Full names of everything a file imports anywhere, or only what it imports when it is imported itself."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
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
        both_at_the_bottom = LAYER[other] == LAYER[package] == 0
        assert LAYER[other] < LAYER[package] or both_at_the_bottom, f"{package} imports {other}"


def test_modeling_files_import_only_ops():
    for path in files_of(PACKAGE / "hf"):
        assert packages_imported(path) <= {"ops", "hf"}, path


def test_ops_and_kinds_do_not_import_megatron():
    for path in [path for package in ("ops", "kinds", "routers", "optimizers") for path in files_of(PACKAGE / package)]:
        assert not any(name.split(".")[0] == "megatron" for name in imported(path)), path


@pytest.mark.parametrize("package", sorted({package_of(path) for path in files_of(PACKAGE)} - {"model", "data"}))
def test_megatron_is_patched_before_it_is_imported(package):
    patched = ("megatron_blackmamba.model", "megatron_blackmamba.data", "megatron_blackmamba.training.step.optimizer")
    for path in files_of(PACKAGE / package):
        for line in path.read_text().splitlines():
            if line == "patches.install()  # before megatron-core is imported" or line.startswith(
                ("from megatron_blackmamba import model ", *(f"from {name}{end}" for name in patched for end in " ."))
            ):
                break
            assert not re.match(r"(from|import) megatron\.", line), path


def test_kinds_import_torch_only_inside_methods():
    for path in [path for package in ("kinds", "routers", "optimizers") for path in files_of(PACKAGE / package)]:
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


def test_workers_are_spawned_with_interrupts_blocked():
    """Python's resource tracker unblocks SIGINT as it starts: `interrupts.spawn_context` blocks it again."""
    for path in [*files_of(PACKAGE), *files_of(ROOT / "data_tools")]:
        if path != PACKAGE / "interrupts.py":
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


def test_architecture_page_lists_exactly_the_patches():
    from megatron_blackmamba.runtime.patches import PATCHES

    assert first_column(section("The runtime")) == [patch.name for patch in PATCHES]


def test_architecture_page_lists_exactly_the_fixes():
    from megatron_blackmamba.training.fixes import FIXES

    listed = first_column(section("Fixes of megatron-core's optimizer"))
    assert listed == [fix.name for fix in FIXES]


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
        for folder in ("megatron_blackmamba", "data_tools", "tests", "benchmarks")
        for path in files_of(ROOT / folder)
    ]
    assert [f"{p.relative_to(ROOT)}: {n}" for p in code if (n := len(p.read_text().splitlines())) > MOST_LINES] == []


def test_folders_of_tests_are_packages():
    """Without `__init__.py` two files of one name in two folders stop the whole collection."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists()) == []


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
