"""Balance of the experts of each layer, every training.router_every steps."""

from collections.abc import Iterator

from megatron_blackmamba import routers
from megatron_blackmamba.layers import kind_of, layers_of
from megatron_blackmamba.routers.base import Z_LOSS
from megatron_blackmamba.training.metrics.base import Key, MetricError, Number, Taken, metric


def due(taken: Taken) -> bool:
    """Return whether the router is looked at in this step."""
    return taken.step % taken.config.training.router_every == 0


@metric("experts/*/max_over_mean", "Busiest expert over the mean", due=due, order=70)
def max_over_mean(taken: Taken) -> dict[str, float]:
    """Return by layer: 1 is perfect balance, the number of experts is collapse."""
    return {layer: max(counts) * len(counts) / (sum(counts) or 1) for layer, counts in expert_tokens(taken)}


@metric("experts/*/share/*", "Tokens by expert", due=due, order=71)
def shares(taken: Taken) -> dict[Key, float]:
    """Return the share of a layer's tokens that each expert gets."""
    return {
        (layer, str(expert)): round(count / (sum(counts) or 1), 6)
        for layer, counts in expert_tokens(taken)
        for expert, count in enumerate(counts)
    }


@metric("experts/*/router/*", "Router", due=due, reduce="mean", order=72)
def router(taken: Taken) -> dict[Key, Number]:
    """Return by layer the numbers that the router kind's `metrics` names, as sums and what to divide them by."""
    model = taken.config.model
    names = sorted([*routers.kind_of(model.router.kind).measures(model), *([Z_LOSS] if model.router.z_loss else [])])
    if not names:
        return {}
    found: dict[Key, Number] = {}
    for layer, block in taken.trainable.model.decoder.layers.named_children():  # counts, which nothing gathers
        if kind_of(model.pattern[int(layer)]).routed:
            every = block.mixer.router.measured()
            if sorted(every) != names:
                raise MetricError(
                    f"the router kind {model.router.kind} names the metrics {names}, but its module measures"
                    f" {sorted(every)}. Make `metrics` and `measured` agree"
                )
            found |= {(layer, name): (float(every[name][0]), float(every[name][1])) for name in names}
    return found


def expert_tokens(taken: Taken) -> Iterator[tuple[str, list[int]]]:
    """Yield the layers with experts, by their number in the pattern, and the tokens that each expert got."""
    layers = zip(layers_of(taken.config.model.pattern), taken.losses.expert_tokens, strict=True)
    return ((str(number), counts) for number, (kind, counts) in enumerate(layers) if kind.routed)
