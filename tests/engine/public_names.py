"""Print the table of megatron-core's public names in docs/architecture.md: `python -m tests.engine.public_names`.

Which names the package imports from megatron-core, and which it reads of modules that it imports. Changes are apart, in
`changes_table.py`.
"""

import ast
import importlib.util
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_blackmamba"
HEAD = "| part of `megatron.core` | names; **subclassed** |\n|---|---|\n"


def names_in(tree: ast.AST) -> set[tuple[str, bool]]:
    """Return the dotted names of a file below megatron.core, each with whether a class here derives from it."""
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("megatron.core.")
        for alias in node.names
    }
    bases = {ast.unparse(b) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for b in node.bases}
    modules = {name for name, full in imported.items() if name[0].islower() and is_module(full)}
    found = {(full, name in bases) for name, full in imported.items() if name not in modules}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found.add((f"{imported[node.value.id]}.{node.attr}", ast.unparse(node) in bases))
    return {(full.removeprefix("megatron.core."), base) for full, base in found if full.split(".")[-1][0] != "_"}


def is_module(full: str) -> bool:
    """Return whether a dotted name of megatron-core is a module."""
    (folder,) = importlib.util.find_spec("megatron.core").submodule_search_locations
    path = Path(folder).joinpath(*full.split(".")[2:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def table() -> str:
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    for path in PACKAGE.rglob("*.py"):
        for full, base in names_in(ast.parse(path.read_text())):
            part, _, name = full.partition(".")
            name = name.rpartition(".")[2] or part
            found[part][name] = found[part].get(name, False) or base
    rows = (
        f"| `{part}` | {', '.join(f'**{name}**' if base else name for name, base in sorted(names.items()))} |\n"
        for part, names in sorted(found.items())
    )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(table(), end="")
