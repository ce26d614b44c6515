"""A layer kind whose first matrix has rows of two meanings, and whose mixer says nothing of checkpoints or layouts."""

from megatron_blackmamba.layers import by_rows
from tests.layers.running_mean import RunningMean, block_of, sums


class Fused(RunningMean):
    """The running mean, times the sigmoid of a gate."""

    letter, name = "F", "gated mean"
    block = f"{__name__}:block"

    def weights(self, model):
        D = model.hidden_size
        return super().weights(model) | {"in_proj.weight": by_rows(D, x=D, gate=D)}


class Untold(Fused):
    """The same, but it hides from its declaration that there are two parts."""

    letter, name = "U", "gated mean in one part"

    def weights(self, model):
        D = model.hidden_size
        return super().weights(model) | {"in_proj.weight": by_rows(D, both=2 * D)}


def gated(mixer, product_SBJ, reset_BS):
    import torch

    x, gate = product_SBJ.transpose(0, 1).chunk(2, dim=-1)
    return sums(x, reset_BS) / sums(torch.ones_like(x[..., :1]), reset_BS) * gate.sigmoid() * mixer.gain


def block(model, kernels):
    return block_of(kernels, 2, gated)
