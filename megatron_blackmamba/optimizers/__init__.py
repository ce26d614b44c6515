"""Optimizer kinds: one file per `optimizer.kind`, with everything that the rest of the project asks about it.

A file in this package that defines an OptimizerKind is found by itself; `register` adds one from elsewhere.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from megatron_blackmamba.optimizers.base import Cannot, OptimizerKind

if TYPE_CHECKING:
    from megatron_blackmamba.config.run import OptimizerConfig

__all__ = ["Cannot", "OptimizerKind", "all_kinds", "kind_of", "kinds_by_key", "problems", "register", "unregister"]

_KINDS: dict[str, OptimizerKind] = {}
UNSUPPORTED = {
    "muon": "megatron-core's Muon imports the package emerging_optimizers"
    " (https://github.com/NVIDIA-NeMo/Emerging-Optimizers), and this program has no kind for it"
}
"""Names that users look for, with the reason why there is no such kind."""


class KindError(TypeError):
    """An optimizer kind that does not answer every question, or takes another kind's name."""


class UnknownKind(ValueError):
    """A name that no optimizer kind has."""


def register(kind: type[OptimizerKind]) -> OptimizerKind:
    """Add a kind. Refuse one that leaves a question open, by name."""
    missing = [name for name in OptimizerKind.__annotations__ if not hasattr(kind, name)]
    missing += sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise KindError(
            f"{kind.__name__} does not answer: {', '.join(missing)}. Define each; Cannot(reason) is an answer too."
        )
    if kind.name in _KINDS:
        raise KindError(
            f"{kind.__name__}: its name {kind.name!r} is taken by {type(_KINDS[kind.name]).__name__}. Choose another."
        )
    _KINDS[kind.name] = kind()
    return _KINDS[kind.name]


def unregister(name: str) -> None:
    """Remove a kind."""
    del _KINDS[name]


def all_kinds() -> tuple[OptimizerKind, ...]:
    """Return every kind, in the order of their files."""
    return tuple(_KINDS.values())


def kind_of(name: str) -> OptimizerKind:
    """Return the kind of a name."""
    if name not in _KINDS:
        reason = f"not supported: {UNSUPPORTED[name]}" if name in UNSUPPORTED else "no such kind"
        raise UnknownKind(f"optimizer.kind={name}: {reason}. Choose one of {', '.join(_KINDS)}.")
    return _KINDS[name]


def problems(settings: OptimizerConfig) -> list[str]:
    """Return what is wrong with the settings of an optimizer, in the words of config errors."""
    kind = kind_of(settings.kind)
    found = []
    for key, readers in kinds_by_key().items():
        value = getattr(settings, key)
        if key not in kind.keys and value != type(settings).model_fields[key].default:
            found.append(
                f"optimizer.{key}={value}: optimizer.kind={kind.name} does not read this key."
                f" Remove it, or choose optimizer.kind={' or '.join(readers)}."
            )
    if settings.distributed and isinstance(kind.sharding, Cannot):
        found.append(f"optimizer.kind={kind.name} needs optimizer.distributed=false: {kind.sharding.reason}.")
    return found


def kinds_by_key() -> dict[str, list[str]]:
    """Return the names of the kinds that read each key of `optimizer:` that not all of them read."""
    readers: dict[str, list[str]] = {}
    for kind in all_kinds():
        for key in kind.keys:
            readers.setdefault(key, []).append(kind.name)
    return readers


def _load() -> None:
    for module in iter_modules(__path__):
        if module.name == "base":
            continue
        name = f"{__name__}.{module.name}"
        for kind in vars(import_module(name)).values():
            if isinstance(kind, type) and issubclass(kind, OptimizerKind) and kind.__module__ == name:
                register(kind)


_load()
