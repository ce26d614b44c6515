"""megatron-core's top-k softmax router with an auxiliary load-balancing loss, for ablations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_blackmamba.routers.base import (
    GROUPS,
    LOGITS,
    MEGATRON_MODULE,
    Cannot,
    RouterKind,
    Use,
    groups_in_megatron,
    groups_of,
    scaling,
)

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig

LOSSES = {"tensor": "aux_loss", "sequence": "seq_aux_loss", "data": "global_aux_loss"}
"""megatron-core's names of the loss by model.router.scope."""


class Softmax(RouterKind):
    name = "softmax"
    keys = ("aux_loss", "scope", "gate", "normalize", *GROUPS, *LOGITS)
    depends_on = "the token alone; the loss pulls all tokens of a micro-batch towards balance"
    scopes = tuple(LOSSES)
    module = MEGATRON_MODULE

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "moe_router_load_balancing_type": LOSSES[model.router.scope],
            "moe_aux_loss_coeff": model.router.aux_loss,
            "moe_router_score_function": model.router.gate or "softmax",
            "moe_router_pre_softmax": not model.router.normalize,  # a softmax of the chosen experts' logits alone
            "moe_router_topk_scaling_factor": scaling(model),
            **groups_in_megatron(model),
        }

    def problems(self, model: ModelConfig) -> list[str]:
        if model.router.normalize and model.top_k == 1:
            return ["model.router.normalize: with model.top_k=1 every weight is 1 and the router learns nothing"]
        if model.router.normalize and model.router.gate == "sigmoid":
            return ["model.router.normalize: with model.router.gate=sigmoid the weights of several are divided anyway"]
        return []

    def use(self, model: ModelConfig) -> Use:
        if model.router.gate == "sigmoid":
            return Use("sigmoid", normalized=model.top_k > 1, scale=model.router.scale, groups=groups_of(model))
        return Use("softmax", normalized=model.router.normalize, scale=model.router.scale, groups=groups_of(model))

    def layouts(self, model: ModelConfig) -> bool | Cannot:
        if model.router.scope != "data" or not model.router.aux_loss:
            return True
        return Cannot(
            "model.router.scope=data balances the micro-batches so far of all data-parallel ranks: the loss depends on"
            " how many there are"
        )
