"""Router kinds: one file per `model.router.kind`, with everything that the rest of the project asks about it.

A file in this package that defines a RouterKind is found by itself; `register` adds one from elsewhere.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.routers.base import OWN_MODULE, Cannot, RouterKind, Tokens, Use

if TYPE_CHECKING:
    from megatron_blackmamba.config.model import RouterConfig

__all__ = [
    "Cannot",
    "RouterKind",
    "Tokens",
    "Use",
    "all_kinds",
    "kind_of",
    "kinds_by_key",
    "problems",
    "register",
    "unread",
    "unregister",
]

_KINDS: dict[str, RouterKind] = {}


class KindError(TypeError):
    """A router kind that does not answer every question, or takes another kind's name."""


class UnknownKind(ValueError):
    """A name that no router kind has."""


def register(kind: type[RouterKind]) -> RouterKind:
    """Add a kind. Refuse one that leaves a question open, by name."""
    missing = [name for name in ("name", "keys", "depends_on") if not hasattr(kind, name)]
    missing += sorted(getattr(kind, "__abstractmethods__", ()))
    if kind.module == OWN_MODULE and kind.choose is RouterKind.choose:
        missing.append("choose")
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


def all_kinds() -> tuple[RouterKind, ...]:
    """Return every kind, in the order of their files."""
    return tuple(_KINDS.values())


def kind_of(name: str) -> RouterKind:
    """Return the kind of a name."""
    if name not in _KINDS:
        raise UnknownKind(f"model.router.kind={name}: no such kind. Choose one of {', '.join(_KINDS)}.")
    return _KINDS[name]


def kinds_by_key() -> dict[str, list[str]]:
    """Return the names of the kinds that read each key of `model.router` that not all of them read."""
    readers: dict[str, list[str]] = {}
    for kind in all_kinds():
        for key in kind.keys:
            readers.setdefault(key, []).append(kind.name)
    return readers


def unread(kind: str) -> set[str]:
    """Return the keys of `model.router` that a kind does not read."""
    return set(kinds_by_key()) - set(kind_of(kind).keys)


def problems(settings: RouterConfig) -> list[str]:
    """Return what is wrong with the settings of a router, in the words of config errors."""
    defaults: dict[str, Any] = {name: field.default for name, field in type(settings).model_fields.items()}
    return [
        f"model.router.{key}={getattr(settings, key)}: model.router.kind={settings.kind} does not read this key."
        f" Remove it, or choose model.router.kind={' or '.join(kinds_by_key()[key])}."
        for key in sorted(unread(settings.kind))
        if getattr(settings, key) != defaults[key]
    ]


def _load() -> None:
    for module in iter_modules(__path__):
        if module.name == "base":
            continue
        name = f"{__name__}.{module.name}"
        for kind in vars(import_module(name)).values():
            if isinstance(kind, type) and issubclass(kind, RouterKind) and kind.__module__ == name:
                register(kind)


_load()
