"""The largest attention logit of each layer that optimizer.qk_clip watches, every training.router_every steps."""

from megatron_blackmamba.training.metrics.base import Taken, metric
from megatron_blackmamba.training.metrics.experts import due


@metric("attention/*/largest_logit", "Largest attention logit", format=".2f", reduce="max", order=73,
        due=lambda taken: taken.config.optimizer.qk_clip is not None and due(taken))  # fmt: skip
def largest_logit(taken: Taken) -> dict[str, float]:
    """Return by layer the largest logit of the batch, before the update shrinks queries and keys."""
    noted = taken.trainable.largest_logits
    return {name.removeprefix("decoder.layers.").removesuffix(".mixer"): float(h.max()) for name, h in noted.items()}
