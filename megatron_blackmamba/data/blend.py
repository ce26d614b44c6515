"""megatron-core's BlendedDataset with its order computed on the fly: no array of samples to build, cache or load."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_blackmamba.data.datasets import Sample, WindowDataset
from megatron_blackmamba.formats.schedule import Schedule

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig


class MixtureDataset(BlendedDataset):
    """The samples of a run, numbered from 0. Sample k is the same however long the run and however many the readers."""

    def __init__(
        self,
        datasets: Sequence[WindowDataset],
        schedule: Schedule,
        samples: int,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.schedule = schedule
        with _without_warnings(BlendedDataset.__module__):  # to it, a blend of one source is a mistake
            super().__init__(list(datasets), [1.0] * len(datasets), samples, config)

    def _build_indices(self) -> tuple[None, None]:
        return None, None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int) -> Sample:
        """Return the sample, with its source number as `dataset_id`; past the planned length the order continues."""
        source, within = self.schedule.locate(sample)
        return {"dataset_id": source, **self.datasets[source][within]}


@contextmanager
def _without_warnings(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
