"""Helpers for tests of whole runs: a run of 30 small steps, and functions that read its files."""

from megatron_blackmamba.formats.events import Event, read_events
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import metrics_so_far
from megatron_blackmamba.training.metrics import metric_of

SMALL = [
    *("data.sequence_length=64", "training.global_batch=16", "training.tokens=30720"),  # 30 steps
    *("training.evaluate_every=0", "checkpoint.every=10"),
]
ON_TWO = [*SMALL, "parallel.expert=2"]


def metrics(folder):
    return list(metrics_so_far(RunFolder(folder / "run").metrics))


def scalars(record, metric):
    """Return a metric of a record by key."""
    return metric_of(metric).of(record)


def samples_of(folder):
    """Return the samples that a run has read of each source."""
    return scalars(metrics(folder)[-1], "source/samples/*")


def losses(folder):
    return [record["loss"] for record in metrics(folder)]


def events_of(folder, kind=Event):
    """Return the events of one kind that a run has recorded, in order."""
    return [found.event for found in read_events(RunFolder(folder / "run").events) if isinstance(found.event, kind)]


def log(folder):
    return RunFolder(folder / "run").log.read_text()
