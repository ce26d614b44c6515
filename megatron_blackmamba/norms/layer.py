"""LayerNorm with a bias, as in the released checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.norms.base import NormKind

if TYPE_CHECKING:
    from torch import Tensor


class LayerNorm(NormKind):
    name = "layer"
    parameters = ("weight", "bias")
    modeling = "megatron_blackmamba.hf.layers_blackmamba:WideLayerNorm"
    released = True

    def apply(self, x: Tensor, parameters_D: tuple[Tensor, ...], eps: float) -> Tensor:
        import torch.nn.functional as F

        weight, bias = parameters_D
        return F.layer_norm(x, weight.shape, weight, bias, eps)
