"""How evenly the experts of each layer are used, every training.router_every steps."""

from collections.abc import Iterator

from megatron_blackmamba.kinds import layers_of
from megatron_blackmamba.training.metrics.base import Key, Taken, metric


def due(taken: Taken) -> bool:
    """Return whether the router is looked at in this step."""
    return taken.trainer.progress.step % taken.trainer.config.training.router_every == 0


@metric("experts/*/max_over_mean", "Busiest expert over the mean", format=".2f", due=due, order=70)
def max_over_mean(taken: Taken) -> dict[str, float]:
    """Return by layer: 1 is perfect balance, the number of experts is collapse."""
    return {layer: max(counts) * len(counts) / (sum(counts) or 1) for layer, counts in expert_tokens(taken)}


@metric("experts/*/share/*", "Tokens by expert", format=".3f", due=due, order=71)
def shares(taken: Taken) -> dict[Key, float]:
    """Return the share of a layer's tokens that each expert gets."""
    return {
        (layer, str(expert)): round(count / (sum(counts) or 1), 6)
        for layer, counts in expert_tokens(taken)
        for expert, count in enumerate(counts)
    }


def expert_tokens(taken: Taken) -> Iterator[tuple[str, list[int]]]:
    """Yield the layers with experts, by their number in the pattern, and the tokens that each expert got."""
    layers = zip(layers_of(taken.trainer.config.model.pattern), taken.losses.expert_tokens, strict=True)
    return ((str(number), counts) for number, (kind, counts) in enumerate(layers) if kind.routed)
