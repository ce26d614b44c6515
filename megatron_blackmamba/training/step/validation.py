"""The validation loss of every source, with the router as in inference, or as in training; the bytes of its text."""

from collections.abc import Callable
from pathlib import Path

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.data import DataPlan
from megatron_blackmamba.data.datasets import WindowDataset
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.tokenizer import load_tokenizer
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
        samples = _samples(config, held_out)
        with micro_batches(config, world, held_out, stop_sample=samples, source_id=source) as stream:
            results = [step.evaluate(stream, routed_as_trained) for _ in range(-(-samples // batch))]
        tokens = sum(result.tokens for result in results)  # the last batch may have fewer
        losses[name] = sum(result.loss * result.tokens for result in results) / tokens
    return losses


def bytes_per_token(config: RunConfig, data: DataPlan, alive: Callable[[str], None]) -> dict[str, float]:
    """Return the bytes of text per validated token of each source; empty if the tokenizer does not tell them.

    Read from the samples that `validate` reads, without the model. Tokens that do not count have no bytes either.
    """
    described = data.record["tokenizer"]
    if not described or not described["file"] or not Path(described["file"]).is_file():
        return {}
    bytes_V = load_tokenizer(described["file"], eod=data.shards[0].manifest.eod_id).token_bytes
    if bytes_V is None:
        return {}
    found = {}
    for name, held_out in data.validation.items():
        alive(f"the bytes of {name}")
        size = tokens = 0.0
        for number in range(_samples(config, held_out)):
            sample = held_out[number]
            counted = sample["labels"][sample["loss_mask"] > 0]
            size, tokens = size + int(bytes_V[counted.numpy()].sum()), tokens + len(counted)
        if size:
            found[name] = size / tokens
    return found


def _samples(config: RunConfig, held_out: WindowDataset) -> int:
    return min(len(held_out), config.training.global_batch * config.training.evaluate_batches)
