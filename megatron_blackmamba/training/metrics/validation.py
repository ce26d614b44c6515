"""Validation loss, as one number and by source."""

from megatron_blackmamba.training.metrics.base import Taken, metric


def due(taken: Taken) -> bool:
    """Return whether the step was validated."""
    return bool(taken.validation)


@metric("validation/loss", "Validation loss", due=due, label="validation loss", in_line=True, order=60)
def validation_loss(taken: Taken) -> float:
    """Return the mean over the sources, weighted by the samples that the whole run takes from each."""
    trainer = taken.trainer
    counts = trainer.data.train.schedule.counts(trainer.end_of_data)
    samples = dict(zip(trainer.data.source_names, counts, strict=True))
    weights = {name: samples[name] for name in taken.validation}
    total = sum(weights.values())
    if not total:  # a mixture may leave out all sources with validation data
        return sum(taken.validation.values()) / len(taken.validation)
    return sum(loss * weights[name] for name, loss in taken.validation.items()) / total


@metric("validation/loss/*", "Validation loss by source", due=due, label="by source", in_line=True, order=61)
def validation_loss_by_source(taken: Taken) -> dict[str, float]:
    """Return the loss of each source that has validation data."""
    return dict(taken.validation)
