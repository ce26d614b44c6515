"""The samples of a run, each found when it is read: no array of samples to build, cache or load."""

from collections.abc import Sequence

from megatron_blackmamba.data.datasets import Sample, WindowDataset
from megatron_blackmamba.formats.source_schedule import Schedule


class MixtureDataset:
    """The samples of a run, numbered from 0. Sample k is the same however long the run and however many the readers."""

    def __init__(self, datasets: Sequence[WindowDataset], schedule: Schedule, samples: int) -> None:
        self.datasets, self.schedule, self.samples = list(datasets), schedule, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> Sample:
        """Return the sample, with its source number as `dataset_id`; past the planned length the order continues."""
        source, within = self.schedule.locate(sample)
        return {"dataset_id": source, **self.datasets[source][within]}
