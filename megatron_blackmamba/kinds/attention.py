"""Causal self-attention with rotary positions, as in the paper's transformer baselines."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.kinds.base import FP32, Cannot, Division, LayerKind, Sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.config import ModelConfig


class Attention(LayerKind):
    letter, name = "*", "attention"
    block = "megatron_blackmamba.model.specs:attention_block"
    rotary = True
    writes_to_residual = ("linear_proj.weight",)

    def problems(self, model: ModelConfig) -> list[str]:
        heads = model.attention.heads
        if model.hidden_size % heads == 0:
            return []
        return [f"model.hidden_size={model.hidden_size} is not divisible by model.attention.heads={heads}"]

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        heads = model.attention.heads
        return {"num_attention_heads": heads, "kv_channels": model.hidden_size // heads}

    def divisions(self, model: ModelConfig) -> list[Division]:
        return [
            Division("model.attention.heads", model.attention.heads, "tensor"),
            Division("model.attention.kv_heads", _kv_heads(model), "tensor"),
        ]

    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        return {"attention": Fraction(1)}

    def part_of(self, parameter: str) -> str:
        return "attention"

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        D = model.hidden_size
        return {"linear_qkv.weight": (D + 2 * _key_values(model), D), "linear_proj.weight": (D, D)}

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        return None

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        D = model.hidden_size
        return {
            "attention_projections": 2 * D * (2 * D + 2 * _key_values(model)),
            "attention_scores": 4 * D * (sequence + 1) // 2,
        }

    def kept(self, at: Sizes) -> int:
        """The input; queries, keys and values as projected, the first two also as rotated; the output and its
        log-sums; the tables of the rotation."""
        model, heads = at.model, at.model.attention.heads
        D = model.hidden_size // at.tensor
        channels = 3 * D + 3 * D * _kv_heads(model) // heads
        kept = at.width * channels + FP32 * heads // at.tensor
        tables = 4 * at.width * at.sequence * model.hidden_size // heads
        return at.width * at.here * model.hidden_size + at.whole * kept + tables

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """The stream is gathered and scattered, and gathered once more for the weight gradient."""
        return {"tensor": (2 * passes + 1) * at.stream}

    def exported(self, model: ModelConfig) -> Cannot:
        return Cannot("attention layers (*) do not convert yet")

    def decoding(self, model: ModelConfig) -> Cannot:
        return Cannot("attention layers (*) do not decode yet")


def _kv_heads(model: ModelConfig) -> int:
    return model.attention.kv_heads or model.attention.heads


def _key_values(model: ModelConfig) -> int:
    """Width of the keys, and of the values."""
    return model.hidden_size * _kv_heads(model) // model.attention.heads
