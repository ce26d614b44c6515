"""The data of a run, and the micro-batches of this rank, for training and for validation."""

from typing import Any

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.data import BatchStream, DataPlan, build
from megatron_blackmamba.formats.mixture import Mixture
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training.step.progress import Progress

VOCABULARY_MULTIPLE = 128
"""Vocabularies are often padded to a multiple of this, times the tensor-parallel ranks."""


def open_plan(config: RunConfig, progress: Progress, mixture: Mixture | None = None) -> DataPlan:
    """Return the training data up to the end of the run, and the validation data.

    mixture: The content of data.mixture, if that file is not written yet.
    """
    return build(
        config.data,
        vocab_size=config.model.vocab_size,
        total_samples=progress.end_of_data(config),
        eod_reset=config.model.eod_reset,
        mixture=mixture,
    )


def unused_rows(config: RunConfig, plan: DataPlan) -> int:
    """Return the rows of the vocabulary that no token of the data has, beyond usual padding."""
    return plan.unused_rows(config.model.vocab_size, VOCABULARY_MULTIPLE * config.parallel.tensor)


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
