"""Print the table of changes in docs/engine_changes.md: `python -m tests.engine.changes_table`."""

from megatron_blackmamba.engine.changes import CHANGES, Change
from megatron_blackmamba.engine.checked import TRIED

HEAD = "| change | applied | why | names of `megatron.core` | code, test |\n|---|---|---|---|---|\n"


def row(change: Change) -> str:
    names = "; ".join(f"`{module}`: {names.replace(' ', ', ')}" for module, names in change.touches.items())
    why = change.why if change.versions == TRIED else f"{change.why} (needed by {change.versions})"
    if change.differs:
        why += f". **Differs:** {change.differs}"
    return f"| `{change.name}` | {change.when} | {why} | {names} | `{change.file}`, `{change.test}` |\n"


def table() -> str:
    return HEAD + "".join(map(row, CHANGES))


if __name__ == "__main__":
    print(table(), end="")
