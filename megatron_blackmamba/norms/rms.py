"""RMSNorm, as before every layer: no mean is subtracted, and there is no bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.norms.base import NormKind

if TYPE_CHECKING:
    from torch import Tensor


class RMSNorm(NormKind):
    name = "rms"
    module = "megatron_blackmamba.model.norms:RMSNorm"
    parameters = ("weight",)
    modeling = "megatron_blackmamba.hf.recurrent_blackmamba:RMSNorm"

    def apply(self, x: Tensor, parameters_D: tuple[Tensor, ...], eps: float) -> Tensor:
        import torch.nn.functional as F

        (weight,) = parameters_D
        return F.rms_norm(x, weight.shape, weight, eps)
