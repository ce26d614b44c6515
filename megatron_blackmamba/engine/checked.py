"""Reach and replace names of megatron-core; a name that is missing is an error at once, with package and version."""

import importlib
import types
from importlib import metadata
from typing import Any

TRIED, NEXT = "0.16.1 to 0.19", "0.20"
"""The versions that were tried, and the first that was not."""


class EngineError(ValueError):
    """A megatron-core that cannot be changed as this project needs it."""


def replace(owner: Any, name: str, new: Any) -> None:
    """Assign to a name that a module, class or object has."""
    require(owner, name)
    setattr(owner, name, new)


def private(owner: Any, name: str) -> Any:
    """Return what a module, class or object has under a name."""
    require(owner, name)
    return getattr(owner, name)


def require(owner: Any, *names: str) -> None:
    """Refuse a megatron-core that lacks names which this project changes, overrides or calls."""
    if missing := [name for name in names if not hasattr(owner, name)]:
        kind = owner if isinstance(owner, type) else type(owner)
        where = owner.__name__ if isinstance(owner, types.ModuleType) else f"{kind.__module__}.{kind.__qualname__}"
        version = metadata.version("megatron-core")  # 0.19's own version ends in the commit of a repository
        raise EngineError(
            f"megatron-core {version} has no {', '.join(missing)} in {where}, which this project changes or calls. "
            f"Install a version from {TRIED} (`pip install 'megatron-core<{NEXT}'`)"
        )


def torch_with(**replaced: Any) -> types.ModuleType:
    """Return a copy of torch's namespace for modules of megatron-core whose `torch` it becomes."""
    namespace = types.ModuleType("torch")
    vars(namespace).update(vars(importlib.import_module("torch")), **replaced)
    return namespace
