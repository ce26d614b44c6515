"""The mixture of experts: megatron-core's layer, which sends tokens to the ranks of their experts.

If this rank has all experts and every token goes to K of them, nothing is sent: the tokens are only sorted by expert.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K experts of a token, P = T * K token-expert pairs.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.model.router import KindRouter

from megatron.core.transformer.moe.moe_layer import MoELayer


class MoEMixer(MoELayer):
    def __init__(self, *args: Any, pg_collection: Any, **kwargs: Any):
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        ranks = pg_collection.ep.size() * pg_collection.expt_tp.size()
        self.sorts = ranks == 1 and isinstance(self.router, KindRouter) and self.router.kind.every_token_gets_k

    def forward(self, hidden_SBD: Tensor) -> tuple[Tensor, None]:
        if not self.sorts:
            return super().forward(hidden_SBD)
        weights_TK, choice_TK = self.router(hidden_SBD, as_map=False)
        choice_P, K = choice_TK.flatten(), choice_TK.shape[1]
        tokens_E = torch.zeros_like(self.router.tokens_E).scatter_add_(0, choice_P, torch.ones_like(choice_P))
        order_P = choice_P.argsort(stable=True)
        place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
        x_PD = _Sorted.apply(hidden_SBD.flatten(0, 1), order_P, place_P, K)
        y_PD, _ = self.experts(x_PD, tokens_E, _Sorted.apply(weights_TK.flatten(), order_P, place_P, 1))
        y_TD = _Summed.apply(y_PD, order_P, place_P, K).view(hidden_SBD.shape)
        shared_SBD = self.shared_experts_compute(hidden_SBD)
        return y_TD if shared_SBD is None else y_TD + shared_SBD, None


class _Sorted(torch.autograd.Function):
    """Copy the row of each pair, sorted by expert; the gradient is a gather, not the slower scatter-add."""

    @staticmethod
    def forward(ctx, x, order_P, place_P, K):
        ctx.save_for_backward(order_P, place_P)
        ctx.K = K
        return _sorted(x, order_P, K)

    @staticmethod
    def backward(ctx, grad):
        _, place_P = ctx.saved_tensors
        return _summed(grad, place_P, ctx.K), None, None, None


class _Summed(torch.autograd.Function):
    """Sum the rows of each token's pairs: the inverse of the sort."""

    @staticmethod
    def forward(ctx, x, order_P, place_P, K):
        ctx.save_for_backward(order_P, place_P)
        ctx.K = K
        return _summed(x, place_P, K)

    @staticmethod
    def backward(ctx, grad):
        order_P, _ = ctx.saved_tensors
        return _sorted(grad, order_P, ctx.K), None, None, None


def _sorted(x, order_P, K):
    return x.index_select(0, order_P if K == 1 else order_P // K)


def _summed(x, place_P, K):
    y = x.index_select(0, place_P)
    return y if K == 1 else y.unflatten(0, (len(y) // K, K)).sum(1)
