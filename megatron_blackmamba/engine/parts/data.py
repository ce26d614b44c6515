"""megatron-core's blend of datasets without its array of all samples."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_blackmamba.engine.checked import require

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset

require(BlendedDataset, "_build_indices")


class Blend(BlendedDataset):
    """Datasets whose order is computed when a sample is asked for: nothing to build, cache or load."""

    def __init__(self, datasets: Sequence[MegatronDataset], samples: int, config: BlendedMegatronDatasetConfig) -> None:
        with _without_warnings(BlendedDataset.__module__):  # to it, a blend of one source is a mistake
            super().__init__(list(datasets), [1.0] * len(datasets), samples, config)

    def _build_indices(self) -> tuple[None, None]:
        return None, None


@contextmanager
def _without_warnings(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
