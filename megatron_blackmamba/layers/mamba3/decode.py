"""Mamba-3 as a recurrence.

Shapes: B batch, L length, D model, I inner, H heads, P channels of a head, G groups, N state, S angles, R rank.
X = 2I + 2RGN + 3H + S rows of in_proj.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.decoding import Inputs, Runner
from megatron_blackmamba.layers.mamba3.arithmetic import mixed
from megatron_blackmamba.layers.mamba3.kind import MIX, in_proj, sizes
from megatron_blackmamba.layers.recurrent import ProjectedDecoding, normed
from megatron_blackmamba.ops.gated_norm import gated_rms_norm
from megatron_blackmamba.ops.mamba3 import Memory, Rates, mamba3, mamba3_step
from megatron_blackmamba.settings import ModelConfig


class Mamba3Decoding(ProjectedDecoding):
    """The memory is that of `ops/mamba3`: the sum of angles, the state, and the last token's B and x, all fp32."""

    rows_of = staticmethod(in_proj)

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> SimpleNamespace:
        """Return the weights; the parameters of the recurrence are in fp32.

        The factors of inputs, gates and outputs are None without model.mamba3.rank above 1.
        """
        x_HRP, z_HRP, o_HRP = (get(name) if model.mamba3.rank > 1 else None for name in MIX)
        return SimpleNamespace(
            in_proj=get("in_proj.weight", dtype),
            dt_bias_H=get("dt_bias"),
            B_bias_HRN=get("B_bias"),
            C_bias_HRN=get("C_bias"),
            D_H=get("D"),
            B_norm_N=get("B_norm.weight"),
            C_norm_N=get("C_norm.weight"),
            out_proj=get("out_proj.weight", dtype),
            norm_I=get("norm.weight") if model.mamba3.output_norm else None,
            x_HRP=x_HRP,
            z_HRP=z_HRP,
            o_HRP=o_HRP,
        )

    def shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        _, _, H, S = sizes(model)
        P, N, R = model.mamba3.head_dim, model.mamba3.state_size, model.mamba3.rank
        return (H, S), (H, P, N), (H, R, N), (H, P)

    def mixed(self, run: Runner, layer: Any, projected: Tensor, memory: list[Tensor], inputs: Inputs | None) -> Tensor:
        model, at = run.config, Memory(*memory)

        def scan(x: Tensor, rates: Rates, B: Tensor, C: Tensor) -> Tensor:
            how = (layer.B_bias_HRN, layer.C_bias_HRN, layer.D_H)
            if inputs is None:
                return mamba3_step(at, x, rates, B, C, *how, layer.x_HRP)
            if inputs.keep_BL1 is not None:
                x = x * inputs.keep_BL1[..., None]
            y, after = mamba3(x, rates, B, C, *how, mix_HRP=layer.x_HRP, memory=at, reset_BL=inputs.reset_BL)
            assert after is not None
            for kept, new in zip(memory, after, strict=True):
                kept.copy_(new)
            return y

        def normed_I(y: Tensor, z: Tensor | None = None) -> Tensor:
            if z is not None:
                return gated_rms_norm(y, z, layer.norm_I, self.rows.count("dt"), model.norm_eps, norm_first=True)
            weight_HP = layer.norm_I.view(-1, model.mamba3.head_dim)
            return normed(y.unflatten(-1, weight_HP.shape), weight_HP, model.norm_eps).flatten(-2)

        return mixed(
            projected,
            self.rows,
            model,
            layer.dt_bias_H,
            [partial(normed, weight=weight_N, eps=model.norm_eps) for weight_N in (layer.B_norm_N, layer.C_norm_N)],
            scan,
            None if layer.norm_I is None else normed_I,
            (layer.z_HRP, layer.o_HRP),
        )
