"""Open the data of a run, and the micro-batches that this rank reads of it."""

from typing import Any

from megatron_blackmamba import data
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.mixture import Mixture
from megatron_blackmamba.runtime.world import World


def open_plan(config: RunConfig, end: int, mixture: Mixture | None = None) -> data.DataPlan:
    """Return the training data up to the sample `end`, and the validation data.

    mixture: The content of data.mixture, if that file is not written yet.
    """
    model = config.model
    sizes = {"vocab_size": model.vocab_size, "total_samples": end}
    return data.build(config.data, **sizes, eod_reset=model.eod_reset, mixture=mixture)


def micro_batches(
    config: RunConfig, world: World, samples: Any, consumed: int | None = None, **where: Any
) -> data.BatchStream:
    """Return this rank's part of each global batch; `where` says where to begin, where to end and what to skip.

    consumed: Samples that the run has consumed before, which decide the sizes of batches; None for validation.
    """
    return data.BatchStream(
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
