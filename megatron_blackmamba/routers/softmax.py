"""megatron-core's top-k softmax router with an auxiliary load-balancing loss, for ablations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_blackmamba.routers.base import LOGITS, MEGATRON_MODULE, RouterKind, Use, scaling

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


class Softmax(RouterKind):
    name = "softmax"
    keys = ("aux_loss", "gate", "normalize", *LOGITS)
    depends_on = "the token alone; the loss pulls all tokens of a micro-batch towards balance"
    module = MEGATRON_MODULE

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": model.router.aux_loss,
            "moe_router_score_function": model.router.gate or "softmax",
            "moe_router_pre_softmax": not model.router.normalize,  # a softmax of the chosen experts' logits alone
            "moe_router_topk_scaling_factor": scaling(model),
        }

    def problems(self, model: ModelConfig) -> list[str]:
        if model.router.normalize and model.top_k == 1:
            return ["model.router.normalize: with model.top_k=1 every weight is 1 and the router learns nothing"]
        if model.router.normalize and model.router.gate == "sigmoid":
            return ["model.router.normalize: with model.router.gate=sigmoid the weights of several are divided anyway"]
        return []

    def use(self, model: ModelConfig) -> Use:
        if model.router.gate == "sigmoid":
            return Use("sigmoid", normalized=model.top_k > 1, scale=model.router.scale)
        return Use("softmax", normalized=model.router.normalize, scale=model.router.scale)

    def layouts(self, model: ModelConfig) -> bool:
        return True
