"""Validation loss in nats per token and in bits per byte, as one number and by source."""

import math
from collections.abc import Mapping

from megatron_blackmamba.training.metrics.base import Taken, metric


def due(taken: Taken) -> bool:
    """Return whether the step was validated."""
    return bool(taken.validation)


@metric("validation/loss", "Validation loss", due=due, label="validation loss", in_line=True, order=60)
def validation_loss(taken: Taken) -> float:
    """Return the mean over the sources, weighted by the samples that the whole run takes from each."""
    return weighted(taken, taken.validation)


@metric("validation/bits_per_byte", "Validation, bits per byte", due=lambda taken: bool(taken.bytes_per_token),
        label="bits per byte", in_line=True, order=61)  # fmt: skip
def validation_bits_per_byte(taken: Taken) -> float:
    """Return the bits of the validated text over its bytes, its sources weighted as in the loss."""
    losses = {name: taken.validation[name] for name in taken.bytes_per_token}
    return weighted(taken, losses) / math.log(2) / weighted(taken, taken.bytes_per_token)


@metric("validation/bits_per_byte/*", "Bits per byte by source", due=lambda taken: bool(taken.bytes_per_token),
        order=61)  # fmt: skip
def validation_bits_by_source(taken: Taken) -> dict[str, float]:
    """Return the bits per byte of each source with a known number of bytes."""
    return {name: taken.validation[name] / math.log(2) / size for name, size in taken.bytes_per_token.items()}


@metric("validation/loss/*", "Validation loss by source", due=due, label="by source", in_line=True, order=62)
def validation_loss_by_source(taken: Taken) -> dict[str, float]:
    """Return the loss of each source that has validation data."""
    return dict(taken.validation)


@metric("validation/loss_balanced", "Validation loss, experts balanced as in training",
        due=lambda taken: bool(taken.validation_as_trained), label="balanced", in_line=True, order=63)  # fmt: skip
def validation_loss_as_trained(taken: Taken) -> float:
    """Return the same mean with the router as in training. It differs if training relies on the balancing."""
    return weighted(taken, taken.validation_as_trained)


@metric("validation/ema_loss", "Validation loss of the averaged weights",
        due=lambda taken: bool(taken.validation_of_average), label="averaged", in_line=True, order=64)  # fmt: skip
def validation_loss_of_average(taken: Taken) -> float:
    """Return the same mean with the moving average of the weights (training.ema) in their place."""
    return weighted(taken, taken.validation_of_average)


def weighted(taken: Taken, losses: Mapping[str, float]) -> float:
    """Return the mean of losses by source, weighted by the samples that the whole run takes from each."""
    counts = taken.data.train.schedule.counts(taken.progress.end_of_data(taken.config))
    samples = dict(zip(taken.data.source_names, counts, strict=True))
    weights = {name: samples[name] for name in losses}
    total = sum(weights.values())
    if not total:  # a mixture may leave out all sources with validation data
        return sum(losses.values()) / len(losses)
    return sum(loss * weights[name] for name, loss in losses.items()) / total
