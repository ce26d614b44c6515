"""Dense SwiGLU MLP, as in the paper's transformer baseline."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from megatron_blackmamba.kinds.base import Cannot, Division, LayerKind, Sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.config import ModelConfig


class MLP(LayerKind):
    letter, name = "-", "dense MLP"
    block = "megatron_blackmamba.model.specs:mlp_block"
    writes_to_residual = ("linear_fc2.weight",)

    def problems(self, model: ModelConfig) -> list[str]:
        return [] if model.mlp_hidden_size else ["the pattern has - layers: set model.mlp_hidden_size"]

    def divisions(self, model: ModelConfig) -> list[Division]:
        return [Division("model.mlp_hidden_size", model.mlp_hidden_size or 0, "tensor")]

    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        return {"mlp": Fraction(1)}

    def part_of(self, parameter: str) -> str:
        return "mlp"

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        D, F = model.hidden_size, model.mlp_hidden_size or 0
        return {"linear_fc1.weight": (2 * F, D), "linear_fc2.weight": (D, F)}  # rows [gate | up]

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        return None

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        return {"mlp": 6 * model.hidden_size * (model.mlp_hidden_size or 0)}

    def kept(self, at: Sizes) -> int:
        """The input; gate and up, the activation, the product."""
        F = (at.model.mlp_hidden_size or 0) // at.tensor
        return at.width * (at.here * at.model.hidden_size + at.whole * 4 * F)

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """The stream is gathered and scattered, and gathered once more for the weight gradient."""
        return {"tensor": (2 * passes + 1) * at.stream}

    def exported(self, model: ModelConfig) -> Cannot:
        return Cannot("dense MLP layers (-) do not convert yet")

    def decoding(self, model: ModelConfig) -> Cannot:
        return Cannot("dense MLP layers (-) do not decode yet")
