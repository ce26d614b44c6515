"""The paper's router: a balanced choice by Sinkhorn in training, and the largest logits in inference.

Shapes: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.routers.base import LOGITS, Cannot, RouterKind, Tokens, Use

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig


class Sinkhorn(RouterKind):
    name = "sinkhorn"
    balanced_by_exports = True
    counts_tokens = True
    keys = ("iterations", "temperature", "start", "scope", "gate", *LOGITS)
    depends_on = "all tokens of the micro-batch, later ones too"

    def choose(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        from megatron_blackmamba.ops.sinkhorn import sinkhorn_choice

        router, top_k = at.model.router, at.model.top_k
        choice = sinkhorn_choice(
            logits_TE,
            top_k=top_k,
            iterations=router.iterations,
            temperature=router.temperature,
            start=router.start,
            group=at.group,
            tokens_E=at.tokens_E,
            bias_E=at.plan_bias_E,
        )
        return choice.view(-1, top_k)

    def use(self, model: ModelConfig) -> Use:
        return Use(model.router.gate or "sigmoid", scale=model.router.scale)

    def layouts(self, model: ModelConfig) -> bool | Cannot:
        return of_scope(model)


def of_scope(model: ModelConfig) -> bool | Cannot:
    """Return the answer of a kind that balances the tokens of model.router.scope together."""
    changes = {
        "rank": "balances the tokens of each rank apart: the choice depends on parallel.tensor",
        "data": "balances the tokens of all data-parallel ranks: the choice depends on how many there are",
    }
    reason = changes.get(model.router.scope)
    return Cannot(f"model.router.scope={model.router.scope} {reason}") if reason else True
