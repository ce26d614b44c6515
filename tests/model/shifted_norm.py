"""A last norm as somebody else would add it: RMSNorm with a gain and a shift of each channel, times a factor."""

from megatron_blackmamba.norms import NormKind
from megatron_blackmamba.settings import Section


class ShiftedSettings(Section):
    factor: float = 1.0
    """Factor of the norm before the shift."""


class ShiftedNorm(NormKind):
    name = "shifted_norm"
    parameters = ("gain", "shift")
    ones = ("gain",)
    settings = ShiftedSettings
    modeling = f"{__package__}.exported_norm:ShiftedNorm"

    def apply(self, x, parameters_D, eps, settings):
        import torch.nn.functional as F

        gain, shift = parameters_D
        return settings.factor * F.rms_norm(x, gain.shape, gain, eps) + shift
