"""Balance without an auxiliary loss: a bias for each expert, which chooses but does not weigh (arXiv 2408.15664).

megatron-core's: after each step the bias of an expert with fewer tokens than the mean rises by a fixed amount, and
that of one with more sinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_blackmamba.routers.base import (
    BIAS_METRICS,
    GROUPS,
    LOGITS,
    MEGATRON_MODULE,
    RouterKind,
    Use,
    groups_in_megatron,
    groups_of,
    scaling,
)

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


class ExpertBias(RouterKind):
    name = "expert_bias"
    keys = ("bias_update_rate", *GROUPS, *LOGITS)
    depends_on = "the token, and the expert loads of earlier steps"
    balances_micro_batches = False
    module = MEGATRON_MODULE
    state = ("expert_bias",)
    metrics = BIAS_METRICS

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": model.router.bias_update_rate,
            "moe_router_topk_scaling_factor": scaling(model),
            **groups_in_megatron(model),
        }

    def use(self, model: ModelConfig) -> Use:
        return Use(
            "sigmoid", normalized=model.top_k > 1, biased=True, scale=model.router.scale, groups=groups_of(model)
        )

    def layouts(self, model: ModelConfig) -> bool:
        return True
