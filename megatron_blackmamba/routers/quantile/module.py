"""The router of `quantile` as a torch module.

Shapes: T tokens, E experts.
"""

from torch import Tensor

from megatron_blackmamba.model.state_router import BiasRouter
from megatron_blackmamba.routers.quantile.kind import BINS, balancing_bias, histogram_of_needs


class QuantileRouter(BiasRouter):
    """The bias follows the quantiles of what tokens need to reach an expert."""

    def nothing(self) -> Tensor:
        return self.zero_counts(self.num_experts, BINS)

    def gather(self, logits_TE: Tensor, chosen: Tensor) -> None:
        self.gathered += histogram_of_needs(self.use.scored(logits_TE), self.expert_bias, self.described.top_k)

    def move(self) -> None:
        self.approach(balancing_bias(self.gathered, self.expert_bias, self.described.top_k))
