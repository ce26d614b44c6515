"""A layer kind whose first matrix has rows of two meanings, and which says nothing of checkpoints or layouts."""

from megatron_blackmamba.layers import Cannot, by_rows, whole
from tests.layers.running_mean.kind import RunningMean


class Fused(RunningMean):
    """The running mean, times the sigmoid of a gate."""

    letter, name = "F", "gated mean"
    entry, modeling = Cannot("gated mean layers (F) have no class in the modeling files"), None

    def weights(self, model):
        D = model.hidden_size
        return super().weights(model) | {"in_proj.weight": by_rows(D, x=D, gate=D), "scale": whole(all=1)}

    def initial(self, name, shape, model, random):
        return super().initial("gain" if name == "scale" else name, shape, model, random)

    def between(self, gate, scale, **rest):
        y, *after = super().between(**rest)
        return y * gate.sigmoid() * scale, *after


class Untold(Fused):
    """The same, but it hides from its declaration that there are two parts."""

    letter, name = "U", "gated mean in one part"

    def weights(self, model):
        D = model.hidden_size
        return super().weights(model) | {"in_proj.weight": by_rows(D, both=2 * D)}

    def between(self, both, **rest):
        x, gate = both.chunk(2, dim=-1)
        return super().between(x=x, gate=gate, **rest)
