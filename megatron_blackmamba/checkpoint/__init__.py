"""Checkpoints: sharded, written while training goes on, complete or absent, loaded under any layout."""

from megatron_blackmamba.checkpoint.manifest import CheckpointError, DamagedCheckpoint, verify
from megatron_blackmamba.checkpoint.reading import CheckpointReader, find_checkpoint

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "Checkpoints",
    "DamagedCheckpoint",
    "SaveError",
    "find_checkpoint",
    "verify",
]


def __getattr__(name: str):
    """`Checkpoints` brings megatron-core with it; who only reads a checkpoint does not need that."""
    if name in ("Checkpoints", "SaveError"):
        from megatron_blackmamba.checkpoint import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
