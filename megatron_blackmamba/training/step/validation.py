"""The validation loss of every source, with the router as in inference, or as in training."""

from collections.abc import Callable

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.data import DataPlan
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training.step.feed import micro_batches
from megatron_blackmamba.training.step.step import Step


def validate(
    config: RunConfig,
    world: World,
    data: DataPlan,
    step: Step,
    alive: Callable[[str], None],
    routed_as_trained: bool = False,
) -> dict[str, float]:
    """Return the mean loss of each source that has validation data, over the same samples on every layout.

    alive: told before each source, for a watchdog. routed_as_trained: balance the experts as in training.
    """
    losses = {}
    for name in sorted(data.validation):
        alive(f"validation on {name}")
        losses[name] = _of_source(config, world, data, step, data.source_names.index(name), routed_as_trained)
    return losses


def _of_source(
    config: RunConfig, world: World, data: DataPlan, step: Step, source: int, routed_as_trained: bool
) -> float:
    batch = config.training.global_batch
    held_out = data.validation[data.source_names[source]]
    samples = min(len(held_out), batch * config.training.evaluate_batches)
    with micro_batches(config, world, held_out, stop_sample=samples, source_id=source) as stream:
        results = [step.evaluate(stream, routed_as_trained) for _ in range(-(-samples // batch))]
    tokens = sum(result.tokens for result in results)
    return sum(result.loss * result.tokens for result in results) / tokens
