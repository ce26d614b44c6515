"""Optimizer kinds: one file per `optimizer.kind`, with everything that the rest of the project asks about it.

A file in this package that defines an OptimizerKind is found by itself; `register` adds one from elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.optimizers.base import OptimizerKind
from megatron_blackmamba.registry import Cannot, Registry

if TYPE_CHECKING:
    from megatron_blackmamba.settings import OptimizerConfig

_KINDS = Registry(OptimizerKind, "optimizer.kind")  # type: ignore[type-abstract]
_KINDS.discover(__name__, __path__)
register, unregister, all_kinds, kind_of = _KINDS.register, _KINDS.unregister, _KINDS.all_kinds, _KINDS.kind_of
kinds_by_key, check_keys = _KINDS.kinds_by_key, _KINDS.check_keys


def problems(settings: OptimizerConfig) -> list[str]:
    """Return what is wrong with the settings of an optimizer, in the words of config errors."""
    found, kind = _KINDS.unread(settings), kind_of(settings.kind)
    if settings.distributed and isinstance(kind.sharding, Cannot):
        found.append(f"optimizer.kind={kind.name} needs optimizer.distributed=false: {kind.sharding.reason}.")
    if not settings.distributed and isinstance(kind.unsharded, Cannot):
        found.append(f"optimizer.kind={kind.name} needs optimizer.distributed=true: {kind.unsharded.reason}.")
    return found
