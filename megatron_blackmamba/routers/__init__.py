"""Router kinds: one file per `model.router.kind`, with everything that the rest of the project asks about it.

A file in this package that defines a RouterKind is found by itself; `register` adds one from elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.registry import Cannot, Registry
from megatron_blackmamba.routers.base import LOGITS, Routed, RouterKind, Tokens, Use, largest

if TYPE_CHECKING:
    from megatron_blackmamba.settings import RouterConfig

_KINDS = Registry(RouterKind, "model.router.kind")  # type: ignore[type-abstract]
_KINDS.discover(__name__, __path__)
register, unregister, all_kinds, kind_of = _KINDS.register, _KINDS.unregister, _KINDS.all_kinds, _KINDS.kind_of
kinds_by_key, check_keys = _KINDS.kinds_by_key, _KINDS.check_keys


def states() -> tuple[str, ...]:
    """Return the names, within a layer, of what routers keep beside weights; it begins at zero."""
    return tuple(f"router.{name}" for kind in all_kinds() for name in kind.state)


def problems(settings: RouterConfig) -> list[str]:
    """Return what is wrong with the settings of a router, in the words of config errors."""
    return _KINDS.unread(settings)
