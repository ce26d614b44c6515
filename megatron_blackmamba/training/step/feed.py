"""Open the data of a run, and the micro-batches that this rank reads of it."""

from typing import Any

from megatron_blackmamba import data
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.runtime.world import World


def open_plan(config: RunConfig, end: int) -> data.DataPlan:
    """Return the training data up to the sample `end`, and the validation data."""
    model = config.model
    return data.build(config.data, vocab_size=model.vocab_size, total_samples=end, eod_reset=model.eod_reset)


def micro_batches(config: RunConfig, world: World, samples: Any, **where: Any) -> data.BatchStream:
    """Return this rank's part of each global batch; `where` says where to begin, where to end and what to skip."""
    return data.BatchStream(
        samples,
        global_batch=config.training.global_batch,
        micro_batch=config.training.micro_batch,
        dp_rank=world.data_rank,
        dp_size=world.data_size,
        part=(world.context_rank, world.parallel.context),
        workers=config.data.workers,
        **where,
    )
