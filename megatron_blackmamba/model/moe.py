"""The mixture of experts: megatron-core's layer, which sends tokens to the ranks of their experts.

Where all experts are here and each token has one, nothing needs to be sent: tokens are sorted by expert.

Shapes: S sequence, B batch, D model, T = S * B tokens of this rank.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.model.router import SinkhornRouter

from megatron.core.transformer.moe.moe_layer import MoELayer


class MoEMixer(MoELayer):
    def __init__(self, *args: Any, pg_collection: Any, **kwargs: Any):
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        ranks = pg_collection.ep.size() * pg_collection.expt_tp.size()
        self.sorts = ranks == 1 and isinstance(self.router, SinkhornRouter)

    def forward(self, hidden_SBD: Tensor) -> tuple[Tensor, None]:
        if not self.sorts:
            return super().forward(hidden_SBD)
        weights_T, choice_T = self.router(hidden_SBD, as_map=False)
        tokens_E = torch.zeros_like(self.router.tokens_E).scatter_add_(0, choice_T, torch.ones_like(choice_T))
        order_T = choice_T.argsort(stable=True)
        place_T = torch.empty_like(order_T).scatter_(0, order_T, torch.arange(len(order_T), device=order_T.device))
        x_TD = _Reordered.apply(hidden_SBD.flatten(0, 1), order_T, place_T)
        y_TD, _ = self.experts(x_TD, tokens_E, _Reordered.apply(weights_T, order_T, place_T))
        return _Reordered.apply(y_TD, place_T, order_T).view(hidden_SBD.shape), None


class _Reordered(torch.autograd.Function):
    """x_T[order_T], for a permutation and its inverse: its gradient is as cheap, where that of indexing adds up."""

    @staticmethod
    def forward(ctx, x, order_T, inverse_T):
        ctx.save_for_backward(order_T, inverse_T)
        return x.index_select(0, order_T)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.saved_tensors[1]), None, None
