"""The mixture of experts: megatron-core's layer, which sends tokens to the ranks of their experts.

If this rank has all experts and every token goes to K of them, nothing is sent: the tokens are only sorted by expert.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K experts of a token, P = T * K token-expert pairs.
"""

from typing import Any

from torch import Tensor

from megatron_blackmamba.model.dispatcher import Order, SortedAllToAll, tokens_of
from megatron_blackmamba.model.router import KindRouter

from megatron.core.transformer.moe.moe_layer import MoELayer


class MoEMixer(MoELayer):
    def __init__(self, *args: Any, pg_collection: Any, **kwargs: Any):
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        ranks = pg_collection.ep.size() * pg_collection.expt_tp.size()
        sortable = isinstance(self.router, KindRouter) and self.router.kind.every_token_gets_k
        self.sorts = sortable and ranks == 1
        self.dispatches_sorted = sortable and self.config.moe_token_dispatcher_type == "alltoall"
        if self.dispatches_sorted:
            self.token_dispatcher = SortedAllToAll(
                self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection
            )

    def route(self, hidden_SBD: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights and experts as the dispatcher takes them; megatron-core's forward calls this."""
        if self.dispatches_sorted:
            weights_TK, choice_TK, read_SBD = self.router(hidden_SBD, padding_mask, as_map=False)
            self.token_dispatcher.read_SBD = read_SBD
            return weights_TK, choice_TK
        weights_TE, chosen_TE = self.router(hidden_SBD, padding_mask)
        return weights_TE, chosen_TE

    def forward(self, hidden_SBD: Tensor) -> tuple[Tensor, None]:
        if not self.sorts:
            return super().forward(hidden_SBD)
        weights_TK, choice_TK, read_SBD = self.router(hidden_SBD, as_map=False)
        order = Order.of(choice_TK)
        x_PD, weights_P = order.sort(read_SBD.flatten(0, 1)), order.sort_pairs(weights_TK.flatten())
        y_PD, _ = self.experts(x_PD, tokens_of(choice_TK, self.config.num_moe_experts), weights_P)
        y_SBD = order.sum(y_PD).view(hidden_SBD.shape)
        shared_SBD = self.shared_experts_compute(hidden_SBD)
        return y_SBD if shared_SBD is None else y_SBD + shared_SBD, None
