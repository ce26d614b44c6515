"""The dense MLP for a few tokens.

Shapes: B batch, L length, D model, F hidden units, G = 2F gate and up; without a gate, G = F.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.decoding import Decoding, Inputs, Runner
from megatron_blackmamba.ops.decoding import Step, mlp_step
from megatron_blackmamba.ops.matvec import product
from megatron_blackmamba.settings import ModelConfig


class MLPDecoding(Decoding):
    """No memory."""

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> SimpleNamespace:
        """Return the weights; the rows of fc1 are [gate | up], or all alike without a gate."""
        return SimpleNamespace(fc1_GD=get("linear_fc1.weight", dtype), fc2_DF=get("linear_fc2.weight", dtype))

    def compiled(self, layer: Any, norm_D: Tensor, model: ModelConfig) -> Step | None:
        if not model.gated or model.activation not in ("silu", "gelu"):
            return None
        return mlp_step(norm_D=norm_D, **vars(layer), activation=model.activation, eps=model.norm_eps)

    def step(self, run: Runner, layer: Any, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        return run.times(run.activated(run.times(x_BD, layer.fc1_GD)), layer.fc2_DF)

    def read(self, run: Runner, layer: Any, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        return product(run.activated(product(x_BLD, layer.fc1_GD)), layer.fc2_DF)
