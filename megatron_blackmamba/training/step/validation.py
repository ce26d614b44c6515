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
    losses, batch = {}, config.training.global_batch
    for name in sorted(data.validation):
        alive(f"validation on {name}")
        held_out, source = data.validation[name], data.source_names.index(name)
        samples = min(len(held_out), batch * config.training.evaluate_batches)
        with micro_batches(config, world, held_out, stop_sample=samples, source_id=source) as stream:
            results = [step.evaluate(stream, routed_as_trained) for _ in range(-(-samples // batch))]
        tokens = sum(result.tokens for result in results)  # the last batch may have fewer
        losses[name] = sum(result.loss * result.tokens for result in results) / tokens
    return losses
