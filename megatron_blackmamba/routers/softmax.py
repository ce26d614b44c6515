"""megatron-core's top-k softmax router with an auxiliary load-balancing loss, for ablations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_blackmamba.routers.base import MEGATRON_MODULE, RouterKind, Use

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


class Softmax(RouterKind):
    name = "softmax"
    keys = ("aux_loss",)
    depends_on = "the token alone; the loss pulls all tokens of a micro-batch towards balance"
    module = MEGATRON_MODULE

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": model.router.aux_loss,
        }

    def use(self, model: ModelConfig) -> Use:
        return Use("softmax")

    def layouts(self, model: ModelConfig) -> bool:
        return True
