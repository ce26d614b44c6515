"""Tokens sorted by expert, on one rank or on the way through megatron-core's all-to-all dispatcher.

Every token has K experts, so all sizes but the splits among ranks are known to the host, which waits for those alone.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K experts of a token, P = T * K pairs of both, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_blackmamba.engine.parts.layers import AllToAll
from megatron_blackmamba.ops.order import order_of


@dataclass(frozen=True)
class Order:
    """The pairs in the order of their experts."""

    order_P: Tensor
    """The pair at each place."""
    place_P: Tensor
    """The place of each pair."""
    pairs_E: Tensor
    """The number of pairs of each expert."""
    K: int

    @staticmethod
    def of(choice_TK: Tensor, experts: int) -> "Order":
        return Order(*order_of(choice_TK.flatten(), experts), choice_TK.shape[1])

    def sort(self, x: Tensor) -> Tensor:
        """Return the row of each pair, of x with a row for each token."""
        return self._gather(x, self.K, sort=True)

    def sort_pairs(self, x: Tensor) -> Tensor:
        """Return the rows of x, which has one for each pair."""
        return self._gather(x, 1, sort=True)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over each token's pairs, of sorted rows."""
        return self._gather(x, self.K, sort=False)

    def _gather(self, x: Tensor, K: int, sort: bool) -> Tensor:
        return _Gather.apply(x, self.order_P, self.place_P, K, sort)


class SortedAllToAll(AllToAll):
    """The all-to-all dispatcher for routers that return the experts of each token instead of a map.

    megatron-core finds the order of the tokens by `masked_select`, whose size the host waits for.
    """

    def dispatch_preprocess(self, hidden_SBD: Tensor, choice_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and their weights in the order of the experts; the split sizes are on their way."""
        self.hidden_shape, self.probs = hidden_SBD.shape, weights_TK
        self.order = Order.of(choice_TK, self.num_experts)
        as_map_1E = self.order.pairs_E[None]  # read only for its sum over the first axis
        self.tokens_per_expert = self.fetch_split_sizes(self.preprocess(as_map_1E))
        return self.order.sort(hidden_SBD.flatten(0, 1)), self.order.sort_pairs(weights_TK.flatten())

    def combine_postprocess(self, y_PD: Tensor) -> Tensor:
        """Return the sum of each token's outputs."""
        return self.order.sum(y_PD).view(self.hidden_shape)


def release_weights(dispatcher: object) -> None:
    """Forget the weights that a dispatcher keeps: the graph of their gradients would live until the next forward pass.

    A CUDA graph could not be captured meanwhile, since the graph that lives belongs to another stream.
    """
    kept = [name for name, x in vars(dispatcher).items() if isinstance(x, Tensor) and x.requires_grad]
    vars(dispatcher).update(dict.fromkeys(kept))


class _Gather(torch.autograd.Function):
    """Copy each token's row to its sorted pairs, or sum the sorted rows of each token's pairs.

    Each is the gradient of the other, so both directions gather; autograd would use the slower scatter-add.
    """

    @staticmethod
    def forward(ctx, x, order_P, place_P, K, sort):
        ctx.save_for_backward(order_P, place_P)
        ctx.K, ctx.sort = K, sort
        return _gather(x, order_P, place_P, K, sort)

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad, *ctx.saved_tensors, ctx.K, not ctx.sort), None, None, None, None


def _gather(x, order_P, place_P, K, sort):
    if sort:
        return x.index_select(0, order_P if K == 1 else order_P // K)
    y = x.index_select(0, place_P)
    return y if K == 1 else y.unflatten(0, (len(y) // K, K)).sum(1)
