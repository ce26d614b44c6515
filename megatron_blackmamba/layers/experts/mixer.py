"""The mixture of experts: megatron-core's layer, which sends tokens to the ranks of their experts.

If this rank has all experts and every token goes to K of them, nothing is sent: the tokens are only sorted by expert.
With `model.latent_size` the tokens are projected before they are sorted or sent, and their sums behind that.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K experts of a token, P = T * K token-expert pairs.
"""

from dataclasses import replace
from pkgutil import resolve_name

from torch import Tensor

from megatron_blackmamba import routers
from megatron_blackmamba.layers.experts.dispatcher import Order, SortedAllToAll, release_weights
from megatron_blackmamba.layers.experts.grouped import GroupedExperts
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.linears import WholeLinear, linears
from megatron_blackmamba.model.router import KindRouter
from megatron_blackmamba.routers import Routed

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec


class MoEMixer(MoELayer):
    def __init__(self, config: MegatronConfig, layer_number: int, pg_collection: ProcessGroupCollection):
        column, row = linears(config.kernels.linear)
        shared = ModuleSpec(SharedExpertMLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
        router = resolve_name(routers.kind_of(config.described.router.kind).module)
        submodules = MoESubmodules(router=router, experts=GroupedExperts, shared_experts=shared)
        super().__init__(config, submodules, layer_number=layer_number, pg_collection=pg_collection)
        if latent := config.described.latent_size:
            self.latent_down = WholeLinear(config.hidden_size, latent, config)
            self.latent_up = WholeLinear(latent, config.hidden_size, config)
        self.narrows = bool(latent)
        ranks = pg_collection.ep.size() * pg_collection.expt_tp.size()
        sortable = isinstance(self.router, KindRouter) and self.router.kind.gets_k(config.described)
        self.sorts = sortable and ranks == 1
        self.dispatches_sorted = sortable and self.config.moe_token_dispatcher_type == "alltoall"
        if self.dispatches_sorted:
            self.token_dispatcher = SortedAllToAll(
                self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection
            )

    def forward(self, hidden_SBD: Tensor, inputs: LayerInputs) -> Tensor:
        routed = self.router(hidden_SBD, inputs)
        if self.narrows:
            routed = replace(routed, hidden=self.latent_down(routed.hidden))
        y_SBD = (self._sorted(routed) if self.sorts else self._dispatched(routed)).view(routed.hidden.shape)
        if self.narrows:
            y_SBD = self.latent_up(y_SBD)
        shared_SBD = self.shared_experts_compute(hidden_SBD)
        return y_SBD if shared_SBD is None else y_SBD + shared_SBD

    def _sorted(self, routed: Routed) -> Tensor:
        order = Order.of(routed.chosen, routed.experts)
        x_PD, weights_P = order.sort(routed.hidden.flatten(0, 1)), order.sort_pairs(routed.weights.flatten())
        y_PD, _ = self.experts(x_PD, order.pairs_E, weights_P)
        return order.sum(y_PD)

    def _dispatched(self, routed: Routed) -> Tensor:
        dispatcher = self.token_dispatcher
        weights, chosen = (routed.weights, routed.chosen) if self.dispatches_sorted else routed.as_map()
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(routed.hidden, chosen, weights))
        y_PD, _ = self.experts(*dispatcher.dispatch_postprocess(*sent))
        y_SBD = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y_PD)))
        release_weights(dispatcher)
        return y_SBD
