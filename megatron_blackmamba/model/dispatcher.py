"""Tokens sorted by expert, on one rank or on the way through megatron-core's all-to-all dispatcher.

Every token has K experts, so all sizes but the splits among ranks are known to the host, which waits for those alone.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K experts of a token, P = T * K pairs of both, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


@dataclass(frozen=True)
class Order:
    """The pairs in the order of their experts."""

    order_P: Tensor
    """The pair at each place."""
    place_P: Tensor
    """The place of each pair."""
    K: int

    @staticmethod
    def of(choice_TK: Tensor) -> "Order":
        order_P = choice_TK.flatten().argsort(stable=True)
        places_P = torch.arange(len(order_P), device=order_P.device)
        return Order(order_P, torch.empty_like(order_P).scatter_(0, order_P, places_P), choice_TK.shape[1])

    def sort(self, x: Tensor) -> Tensor:
        """Return the row of each pair, of x with a row for each token."""
        y: Tensor = _Sorted.apply(x, self.order_P, self.place_P, self.K)
        return y

    def sort_pairs(self, x: Tensor) -> Tensor:
        """Return the rows of x, which has one for each pair."""
        y: Tensor = _Sorted.apply(x, self.order_P, self.place_P, 1)
        return y

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over each token's pairs, of sorted rows."""
        y: Tensor = _Summed.apply(x, self.order_P, self.place_P, self.K)
        return y


def tokens_of(choice_TK: Tensor, experts: int) -> Tensor:
    """Return the number of tokens of each expert, `[E]`."""
    choice_P = choice_TK.flatten()
    return choice_P.new_zeros(experts).scatter_add_(0, choice_P, torch.ones_like(choice_P))


class SortedAllToAll(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher for routers that return the experts of each token instead of a map.

    megatron-core finds the order of the tokens by `masked_select`, whose size the host waits for.
    """

    def dispatch_preprocess(self, hidden_SBD: Tensor, choice_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and their weights in the order of the experts; the split sizes are on their way."""
        self.hidden_shape, self.probs = hidden_SBD.shape, weights_TK
        as_map_1E = tokens_of(choice_TK, self.num_experts)[None]  # read only for its sum over the first axis
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.preprocess(as_map_1E))
        self.order = Order.of(choice_TK)
        return self.order.sort(hidden_SBD.flatten(0, 1)), self.order.sort_pairs(weights_TK.flatten())

    def combine_postprocess(self, y_PD: Tensor) -> Tensor:
        """Return the sum of each token's outputs."""
        return self.order.sum(y_PD).view(self.hidden_shape)


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
