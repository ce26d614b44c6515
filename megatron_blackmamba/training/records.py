"""The record of one step, from what the trainer knows after it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_blackmamba.kinds import layers_of
from megatron_blackmamba.training.metrics import RouterLoad, StepMetrics, router_load
from megatron_blackmamba.training.speed import memory_bytes
from megatron_blackmamba.training.step import Losses, Update
from megatron_blackmamba.training.stragglers import slowest

if TYPE_CHECKING:
    from megatron_blackmamba.training.loop import Trainer


def record(trainer: "Trainer", losses: Losses, update: Update, learning_rate: float, seconds: float) -> StepMetrics:
    """Return the line of metrics.jsonl for the step just taken; validates first where that is due."""
    config, progress, sources = trainer.config, trainer.progress, trainer.data.source_names
    of_routers = progress.step % config.training.router_every == 0
    slow = slowest(losses.computing)
    return StepMetrics(
        step=progress.step,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_samples * config.data.sequence_length,
        loss=losses.loss,
        grad_norm=update.grad_norm,
        learning_rate=learning_rate,
        tokens_per_second=config.tokens_per_step / seconds,
        step_seconds=seconds,
        skipped=not update.applied,
        source_loss={
            name: loss
            for name, loss, tokens in zip(sources, losses.source_loss, losses.source_tokens, strict=True)
            if tokens
        },
        source_samples=samples_by_source(trainer),
        memory_bytes=memory_bytes(),
        router_load=router_loads(config.model.pattern, losses.expert_tokens) if of_routers else None,
        validation_loss=trainer.validation_if_due(),
        slowest_rank=slow.rank if slow else None,
        slowest_over_median=slow.over_median if slow else None,
        mfu=trainer.utilisation.of(seconds),
    )


def samples_by_source(trainer: "Trainer") -> dict[str, int]:
    """Return the samples read since the run began, by arithmetic on the position."""
    counts = trainer.data.train.schedule.counts
    total = [0] * len(trainer.data.source_names)
    for first, last in trainer.progress.between(0, trainer.progress.next_sample):
        total = [n + b - a for n, a, b in zip(total, counts(first), counts(last + 1), strict=True)]
    return dict(zip(trainer.data.source_names, total, strict=True))


def router_loads(pattern: str, expert_tokens: Sequence[Sequence[float]]) -> dict[str, RouterLoad]:
    """Return the load of every layer with experts, by its number in the pattern."""
    return {
        f"layer_{number}": router_load(counts)
        for number, (kind, counts) in enumerate(zip(layers_of(pattern), expert_tokens, strict=True))
        if kind.routed
    }
