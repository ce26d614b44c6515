"""A layer kind whose first matrix has rows of two meanings, and whose mixer says nothing of checkpoints or layouts."""

from megatron_blackmamba.layers import Cannot, by_rows
from tests.layers.running_mean.kind import RunningMean


class Fused(RunningMean):
    """The running mean, times the sigmoid of a gate."""

    letter, name = "F", "gated mean"
    mixer = "tests.layers.fused_mixer:GatedMixer"
    entry, modeling = Cannot("gated mean layers (F) have no class in the modeling files"), None

    def weights(self, model):
        D = model.hidden_size
        return super().weights(model) | {"in_proj.weight": by_rows(D, x=D, gate=D)}


class Untold(Fused):
    """The same, but it hides from its declaration that there are two parts."""

    letter, name = "U", "gated mean in one part"

    def weights(self, model):
        D = model.hidden_size
        return super().weights(model) | {"in_proj.weight": by_rows(D, both=2 * D)}
