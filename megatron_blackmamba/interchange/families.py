"""Families of models in transformers that conversions read and write: the one list of them, without torch."""

from collections.abc import Callable
from typing import TypeVar

FAMILIES = {
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "nemotron_h": "Nemotron-H",
    "llama": "Llama",
    "mixtral": "Mixtral",
    "granitemoehybrid": "Granite 4",
}
"""By model_type, the name that people use; `native/` has a file of that name. The first of equals wins."""
F = TypeVar("F", bound=Callable[..., None])


def listed(last: str) -> str:
    """Return the names with commas, and a word before the last one."""
    *names, end = FAMILIES.values()
    return f"{', '.join(names)} {last} {end}"


def named(command: F) -> F:
    """Fill `{or_families}` and `{and_families}` in the help text of a command."""
    text = command.__doc__ or ""  # none with PYTHONOPTIMIZE=2
    command.__doc__ = text.replace("{or_families}", listed("or")).replace("{and_families}", listed("and"))
    return command
