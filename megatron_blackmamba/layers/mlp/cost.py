"""What a layer of the dense MLP costs, for plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.costs import Sizes
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.layers.mlp.kind import kept, products

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


class MLPCost(Cost):
    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        return {"mlp": 2 * products(model) * model.hidden_size * (model.mlp_hidden_size or 0)}

    def kept(self, at: Sizes) -> int:
        """Return the bytes of the input, and what is kept for each hidden unit."""
        F = (at.model.mlp_hidden_size or 0) // at.tensor
        return at.width * (at.here * at.model.hidden_size + at.whole * kept(at.model) * F)

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic: the stream is gathered, scattered, and gathered again for the weight gradient."""
        return {"tensor": (2 * passes + 1) * at.stream}
