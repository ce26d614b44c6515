"""Loss and samples of every source of the mixture."""

from megatron_blackmamba.training.metrics.base import Taken, metric


@metric("source/loss/*", "Loss by source", format=".3f", in_table=True, order=50)
def source_loss(taken: Taken) -> dict[str, float]:
    """Return the mean loss of each source that the batch has samples of."""
    losses, names = taken.losses, taken.data.source_names
    found = zip(names, losses.source_loss, losses.source_tokens, strict=True)
    return {name: loss for name, loss, tokens in found if tokens}


@metric("source/samples/*", "Samples by source", format=",.0f", in_table=True, in_report=False, order=51)
def source_samples(taken: Taken) -> dict[str, int]:
    """Return the samples read since the run began, by arithmetic on the position."""
    counts, names = taken.data.train.schedule.counts, taken.data.source_names
    total = [0] * len(names)
    for first, last in taken.progress.between(0, taken.progress.next_sample):
        total = [n + b - a for n, a, b in zip(total, counts(first), counts(last + 1), strict=True)]
    return dict(zip(names, total, strict=True))
