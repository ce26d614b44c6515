"""Mamba-3 as a recurrence.

Shapes: B batch, L length, D model, I inner, H heads, P channels of a head, G groups, N state, S angles, R rank.
X = 2I + 2RGN + 3H + S rows of in_proj.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.decoding import Decoding, Inputs, Runner
from megatron_blackmamba.layers.mamba3.kind import MIX, in_proj, sizes
from megatron_blackmamba.layers.recurrent import normed
from megatron_blackmamba.ops.mamba3 import Memory, Rates, gated, mamba3, mamba3_step
from megatron_blackmamba.ops.matvec import product
from megatron_blackmamba.settings import ModelConfig


@dataclass(frozen=True)
class Mamba3Layer:
    """The weights of one layer; the parameters of the recurrence are in fp32."""

    in_proj: Tensor
    dt_bias_H: Tensor
    B_bias_HRN: Tensor
    C_bias_HRN: Tensor
    D_H: Tensor
    B_norm_N: Tensor
    C_norm_N: Tensor
    out_proj: Tensor
    norm_I: Tensor | None
    """With model.mamba3.output_norm."""
    x_HRP: Tensor | None
    """Factors of inputs, gates and outputs, with model.mamba3.rank above 1."""
    z_HRP: Tensor | None
    o_HRP: Tensor | None


class Mamba3Decoding(Decoding):
    """The memory is that of `ops/mamba3`: the sum of angles, the state, and the last token's B and x, all fp32."""

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> Mamba3Layer:
        x_HRP, z_HRP, o_HRP = (get(name) if model.mamba3.rank > 1 else None for name in MIX)
        return Mamba3Layer(
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

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        _, _, H, S = sizes(model)
        P, N, R = model.mamba3.head_dim, model.mamba3.state_size, model.mamba3.rank
        shapes = ((H, S), (H, P, N), (H, R, N), (H, P))
        return [torch.zeros(batch, *shape, dtype=torch.float32, device=device) for shape in shapes]

    def step(self, run: Runner, layer: Mamba3Layer, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        z_BI, x_BHP, B_BRGN, C_BRGN, rates = _parts(run.times(x_BD, layer.in_proj), layer, run.config)
        how = (layer.B_bias_HRN, layer.C_bias_HRN, layer.D_H, layer.x_HRP)
        y = mamba3_step(Memory(*memory), x_BHP, rates, B_BRGN, C_BRGN, *how)
        return run.times(_gated(y, z_BI, layer, run.config), layer.out_proj)

    def read(self, run: Runner, layer: Mamba3Layer, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        z_BLI, x_BLHP, B_BLRGN, C_BLRGN, rates = _parts(product(x_BLD, layer.in_proj), layer, run.config)
        if inputs.keep_BL1 is not None:
            x_BLHP = x_BLHP * inputs.keep_BL1[..., None]
        how = (layer.B_bias_HRN, layer.C_bias_HRN, layer.D_H)
        last, mix_HRP = Memory(*memory), layer.x_HRP
        y, after = mamba3(
            x_BLHP, rates, B_BLRGN, C_BLRGN, *how, mix_HRP=mix_HRP, memory=last, reset_BL=inputs.reset_BL
        )  # fmt: skip
        assert after is not None
        for kept, new in zip(memory, after, strict=True):
            kept.copy_(new)
        return product(_gated(y, z_BLI, layer, run.config), layer.out_proj)


def _parts(projected: Tensor, layer: Mamba3Layer, model: ModelConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Rates]:
    """Split in_proj's output into z, x, B, C and the rates."""
    z, x, B, C, dt, A, trap, angle = in_proj(model).split(projected)
    groups = (model.mamba3.rank, model.mamba3.groups, -1)
    B = normed(B.unflatten(-1, groups), layer.B_norm_N, model.norm_eps)
    C = normed(C.unflatten(-1, groups), layer.C_norm_N, model.norm_eps)
    rates = Rates.of(dt, A, trap, angle, layer.dt_bias_H, model.mamba3.a_floor)
    return z, x.unflatten(-1, (-1, model.mamba3.head_dim)), B, C, rates


def _gated(y: Tensor, z: Tensor, layer: Mamba3Layer, model: ModelConfig) -> Tensor:
    if layer.norm_I is not None:
        y = normed(y, layer.norm_I.view(y.shape[-2:]), model.norm_eps)
    return gated(y, z, layer.z_HRP, layer.o_HRP)
