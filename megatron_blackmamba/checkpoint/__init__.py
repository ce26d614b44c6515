"""Checkpoints: sharded, written while training goes on, complete or absent, loaded under any layout."""

from megatron_blackmamba.checkpoint.manifest import CheckpointError, DamagedCheckpoint, verify
from megatron_blackmamba.checkpoint.reading import CheckpointReader, find_checkpoint


def __getattr__(name: str):
    """Import `Checkpoints` on demand: it imports megatron-core, which code that only reads checkpoints should not."""
    if name in ("Checkpoints", "NotFiniteError", "SaveError"):
        from megatron_blackmamba.checkpoint import lifecycle

        return getattr(lifecycle, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
