"""The validation loss of every source, with the router as in inference, or as in training; the bytes of its text."""

from collections.abc import Callable
from pathlib import Path

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.data import DataPlan
from megatron_blackmamba.data.datasets import WindowDataset
from megatron_blackmamba.runtime.world import World, gathered
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

    alive: told before each batch, for a watchdog. routed_as_trained: balance the experts as in training.
    """
    losses, batch = {}, config.training.global_batch
    for name in sorted(data.validation):
        held_out, source = data.validation[name], data.source_names.index(name)
        samples, results = _samples(config, held_out), []
        with micro_batches(config, world, held_out, stop_sample=samples, source_id=source) as stream:
            for _ in range(-(-samples // batch)):
                alive(f"validation on {name}")
                results.append(step.evaluate(stream, routed_as_trained))
        tokens = sum(result.tokens for result in results)  # the last batch may have fewer
        losses[name] = sum(result.loss * result.tokens for result in results) / tokens
    return losses


def bytes_per_token(config: RunConfig, world: World, data: DataPlan, alive: Callable[[str], None]) -> dict[str, float]:
    """Return the bytes of text per validated token of each source; empty if the tokenizer does not tell them.

    Read from the samples that `validate` reads, without the model; the ranks share them. Tokens that do not count have
    no bytes either.
    """
    counts = gathered(_counts(config, data, alive, world.rank, world.size))
    if None in counts:
        return {}
    totals = {name: [sum(of_rank[name][i] for of_rank in counts) for i in (0, 1)] for name in data.validation}
    return {name: size / tokens for name, (size, tokens) in totals.items() if size}


def _counts(
    config: RunConfig, data: DataPlan, alive: Callable[[str], None], rank: int, ranks: int
) -> dict[str, tuple[int, int]] | None:
    """Return the bytes and tokens of every `ranks`-th sample by source; None if the tokenizer does not tell."""
    described = data.record["tokenizer"]
    if not described or not described["file"] or not Path(described["file"]).is_file():
        return None
    bytes_V = load_tokenizer(described["file"], eod=data.shards[0].manifest.eod_id).token_bytes
    if bytes_V is None:
        return None
    found = {}
    for name, held_out in data.validation.items():
        size = tokens = 0
        for number in range(rank, _samples(config, held_out), ranks):
            alive(f"the bytes of {name}")
            sample = held_out[number]
            counted = sample["labels"][sample["loss_mask"] > 0]
            size, tokens = size + int(bytes_V[counted.numpy()].sum()), tokens + len(counted)
        found[name] = size, tokens
    return found


def _samples(config: RunConfig, held_out: WindowDataset) -> int:
    return min(len(held_out), config.training.global_batch * config.training.evaluate_batches)
