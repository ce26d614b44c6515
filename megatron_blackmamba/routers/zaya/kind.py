"""ZAYA1's router: a small MLP whose input remembers the routers of earlier layers.

A token's hidden state becomes R numbers. The R numbers of the expert layer before are added, each times a learned
factor; so routers see an exponential mean over the depth. A norm and three linears make the logits. A bias without a
gradient chooses but does not weigh. An Adam of its own moves it: its gradient is an expert's share of a step's choices
less an equal share. One more choice may stand behind the experts, of which a token gets nothing; its share counts too.

Shapes: E experts, or with the choice that skips one more, R numbers that pass from layer to layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_blackmamba.costs import BOOL, FP32, Sizes
from megatron_blackmamba.routers.base import BIAS_METRICS, LOGITS, RouterKind, Tokens, Use, largest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8
"""Of the bias's Adam."""


class Zaya(RouterKind):
    name = "zaya"
    keys = ("hidden_size", "bias_update_rate", "skip", *LOGITS)
    depends_on = "the token, the routers of earlier layers, and the expert loads of earlier steps"
    balances_micro_batches = False
    module = f"{__package__}.module:ZayaRouter"
    modeling = "megatron_blackmamba.hf.layers_blackmamba:ZayaRouter"
    state = ("expert_bias", "bias_mean", "bias_square", "bias_steps")
    by_adam = ("down", "first", "second")
    metrics = MappingProxyType({**BIAS_METRICS, "skipped": "Share of choices that skip the experts"})

    def choices(self, model: ModelConfig) -> int:
        return model.experts + model.router.skip

    def measures(self, model: ModelConfig) -> Mapping[str, str]:
        return self.metrics if model.router.skip else BIAS_METRICS

    def inputs(self, model: ModelConfig) -> int:
        return model.router.hidden_size

    def carried(self, model: ModelConfig) -> int:
        return model.router.hidden_size

    def inside(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        R = model.router.hidden_size
        found: dict[str, tuple[int, ...]] = {"down": (R, model.hidden_size), "down_bias": (R,), "carry": (R,)}
        return found | {"norm": (R,), "first": (R, R), "first_bias": (R,), "second": (R, R), "second_bias": (R,)}

    def initial(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor | None:
        """Keep the size of what the MLP computes: else the first steps of the bias outweigh all logits."""
        import torch

        if name in ("carry", "norm"):
            return torch.ones(shape)
        return (
            torch.randn(shape, generator=random) * shape[-1] ** -0.5 if name in ("first", "second", "weight") else None
        )

    def logits(
        self, hidden_D: Tensor, weights: Mapping[str, Tensor], carried_R: Tensor | None, model: ModelConfig
    ) -> tuple[Tensor, Tensor]:
        from torch.nn.functional import linear

        from megatron_blackmamba.routers.zaya.arithmetic import logits_and_state

        down_R = linear(hidden_D, weights["down"], weights["down_bias"])
        return logits_and_state(down_R, carried_R, weights, model.norm_eps)

    def choose(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        return largest(self.selecting(logits_TE, at), at.model.top_k)

    def use(self, model: ModelConfig) -> Use:
        return Use("softmax", biased=True, scale=model.router.scale)

    def layouts(self, model: ModelConfig) -> bool:
        return True

    def flops(self, model: ModelConfig) -> int:
        R = model.router.hidden_size
        return 2 * R * (model.hidden_size + 2 * R + self.choices(model))

    def kept(self, at: Sizes) -> int:
        """Add the inputs of the linears, of both GELUs and of the norm, and the state before, to what all keep."""
        width = FP32 if at.device == "cpu" else at.width
        inside = FP32 * 7 * at.model.router.hidden_size
        return width * at.model.hidden_size + inside + (2 * FP32 + 2 * BOOL) * self.choices(at.model)
