"""The micro-batches of this rank, for training and for validation."""

from typing import Any

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.data import BatchStream
from megatron_blackmamba.runtime.world import World


def micro_batches(
    config: RunConfig, world: World, samples: Any, consumed: int | None = None, **where: Any
) -> BatchStream:
    """Return this rank's part of each global batch; `where` says where to begin, where to end and what to skip.

    consumed: Samples that the run has consumed before, which decide the sizes of batches; None for validation.
    """
    return BatchStream(
        samples,
        global_batch=(
            config.training.global_batch if consumed is None else lambda served: config.batch_at(consumed + served)
        ),
        micro_batch=config.training.micro_batch,
        dp_rank=world.data_rank,
        dp_size=world.data_size,
        part=(world.context_rank, world.parallel.context),
        workers=config.data.workers,
        **where,
    )
