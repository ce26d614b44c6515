"""The micro-batches of this rank, for training and for validation."""

from typing import Any

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.data import BatchStream
from megatron_blackmamba.runtime.world import World


def micro_batches(config: RunConfig, world: World, samples: Any, **where: Any) -> BatchStream:
    """Return this rank's part of each global batch; `where` says where to begin, where to end and what to skip."""
    return BatchStream(
        samples,
        global_batch=config.training.global_batch,
        micro_batch=config.training.micro_batch,
        dp_rank=world.data_rank,
        dp_size=world.data_size,
        part=(world.context_rank, world.parallel.context),
        workers=config.data.workers,
        **where,
    )
