"""The validation loss of every source, with the router as in inference, or as in training."""

from collections.abc import Callable

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.data import BatchStream, DataPlan
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training.step import Step


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
    stream = BatchStream(
        held_out,
        global_batch=batch,
        micro_batch=config.training.micro_batch,
        dp_rank=world.data_rank,
        dp_size=world.data_size,
        part=(world.context_rank, world.parallel.context),
        workers=config.data.workers,
        stop_sample=samples,
        source_id=source,
    )
    with stream:
        results = [step.evaluate(stream, routed_as_trained) for _ in range(-(-samples // batch))]
    tokens = sum(result.tokens for result in results)
    return sum(result.loss * result.tokens for result in results) / tokens
