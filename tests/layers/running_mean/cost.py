"""What a layer of the running mean costs."""

from megatron_blackmamba.layers import Cost


class MeanCost(Cost):
    def flops(self, model, sequence):
        return {"mean_projections": 2 * 2 * model.hidden_size**2}

    def kept(self, at):
        """in_proj's input, the mean before and after the gain, and the counts that divide it."""
        D = at.model.hidden_size
        return at.width * D * (at.here + 2 * at.whole // at.tensor) + 4 * at.whole
