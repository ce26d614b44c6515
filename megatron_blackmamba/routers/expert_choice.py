"""Expert choice: in training each expert takes the tokens with the largest scores for it (arXiv 2202.09368).

Every expert gets the same number of tokens, and a token any number of experts, including none. Whether an expert takes
a token depends on all other tokens of the micro-batch, including later ones, so training losses are not causal.
In evaluation, decoding and exports each token goes to its model.top_k largest scores, which is causal.

Shapes: T tokens of this rank, A tokens of all ranks that are balanced together, E experts, C tokens of an expert.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_blackmamba.costs import FP32, Sizes
from megatron_blackmamba.routers.base import LOGITS, Cannot, RouterKind, Tokens, Use
from megatron_blackmamba.routers.sinkhorn import of_scope

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig


class ExpertChoice(RouterKind):
    name = "expert_choice"
    keys = ("scope", *LOGITS)
    depends_on = "all tokens of the micro-batch, later ones too"
    every_token_gets_k = False
    metrics = MappingProxyType({"unrouted": "Share of tokens without an expert"})

    def problems(self, model: ModelConfig) -> list[str]:
        answer = self.layouts(model)
        return [f"{answer.reason}. Expert choice needs model.router.scope=tensor"] if isinstance(answer, Cannot) else []

    def choose(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        import torch
        import torch.distributed as dist

        scores_TE, group = logits_TE.softmax(-1), at.group
        T, E = scores_TE.shape
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        scores_AE = scores_TE
        if group is not None:
            scores_AE = scores_TE.new_empty(ranks * T, E)
            dist.all_gather_into_tensor(scores_AE, scores_TE.contiguous(), group=group)
        tokens_CE = scores_AE.topk(capacity(len(scores_AE), at.model), dim=0).indices
        chosen_AE = torch.zeros_like(scores_AE, dtype=torch.bool).scatter_(0, tokens_CE, True)
        return chosen_AE[rank * T : (rank + 1) * T]

    def use(self, model: ModelConfig) -> Use:
        return Use("softmax", scale=model.router.scale)

    def layouts(self, model: ModelConfig) -> bool | Cannot:
        return of_scope(model)

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic of gathering all scores in every forward pass."""
        return {"tensor": (passes - 1) * FP32 * at.whole * at.model.experts}


def capacity(tokens: int, model: ModelConfig) -> int:
    """Return the tokens that an expert takes: as many as make top_k a token, rounded up."""
    return min(tokens, -(-tokens * model.top_k // model.experts))
