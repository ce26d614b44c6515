"""Kinds of the last norm: one file per `model.final_norm`, with everything that the rest of the project asks about it.

A file in this package that defines a NormKind is found by itself; `register` adds one from elsewhere.
"""

from megatron_blackmamba.norms.base import PREFIX, NormKind
from megatron_blackmamba.registry import Registry

_KINDS = Registry(NormKind, "model.final_norm")  # type: ignore[type-abstract]
_KINDS.discover(__name__, __path__)
register, unregister, all_kinds, kind_of = _KINDS.register, _KINDS.unregister, _KINDS.all_kinds, _KINDS.kind_of
