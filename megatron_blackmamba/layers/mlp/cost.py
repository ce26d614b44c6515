"""What a layer of the dense MLP costs, for plans."""

from megatron_blackmamba.costs import Sizes
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.layers.mlp.kind import kept, products
from megatron_blackmamba.settings import ModelConfig


class MLPCost(Cost):
    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        return {"mlp": 2 * products(model) * model.hidden_size * (model.mlp_hidden_size or 0)}

    def kept(self, at: Sizes) -> int:
        """Return the bytes of the input, and what is kept for each hidden unit."""
        F = (at.model.mlp_hidden_size or 0) // at.tensor
        return at.width * (at.here * at.model.hidden_size + at.whole * kept(at.model) * F)
