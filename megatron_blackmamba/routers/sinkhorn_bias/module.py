"""The router of `sinkhorn_bias` as a torch module.

Shapes: T tokens, E experts.
"""

from dataclasses import replace

from torch import Tensor

from megatron_blackmamba.model.state_router import BiasRouter
from megatron_blackmamba.routers import Tokens


class SinkhornBiasRouter(BiasRouter):
    """The bias follows the mean of the plans' over the micro-batches of a step."""

    def nothing(self) -> Tensor:
        """Return room for the sum of the biases and, last, the number of plans."""
        return self.zero_counts(self.num_experts + 1).double()

    def routing(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        return super().routing(logits_TE, replace(at, plan_bias_E=self.gathered[:-1]) if self.gathers else at)

    def gather(self, logits_TE: Tensor, chosen: Tensor) -> None:
        self.gathered[-1] += 1  # the plan has added its bias

    def move(self) -> None:
        self.approach(self.gathered[:-1] / self.gathered[-1].clamp(min=1))
