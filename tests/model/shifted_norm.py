"""A last norm in one file, as somebody else would add it: RMSNorm with a gain for all channels, and a shift."""

from megatron_blackmamba.norms import NormKind
from megatron_blackmamba.registry import Cannot


class ShiftedNorm(NormKind):
    name = "shifted_norm"
    parameters = ("weight", "shift")
    ones = ("weight",)
    exported = Cannot("the modeling files have no class for shifted_norm")

    def apply(self, x, parameters_D, eps):
        import torch.nn.functional as F

        weight, shift = parameters_D
        return F.rms_norm(x, weight.shape, weight, eps) + shift
