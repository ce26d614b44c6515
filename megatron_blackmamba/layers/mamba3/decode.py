"""Mamba-3 as a recurrence.

Shapes: B batch, L length, D model, I inner, H heads, P channels of a head, G groups, N state, S angles, R rank.
X = 2I + 2RGN + 3H + S rows of in_proj.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.decoding import Decoding, Inputs, Runner
from megatron_blackmamba.layers.mamba3.arithmetic import mixed
from megatron_blackmamba.layers.mamba3.kind import MIX, in_proj, sizes
from megatron_blackmamba.layers.recurrent import normed
from megatron_blackmamba.layers.rows import Weight
from megatron_blackmamba.ops.gated_norm import gated_rms_norm
from megatron_blackmamba.ops.mamba3 import Memory, Rates, mamba3, mamba3_step
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

    def __init__(self, rows: Weight) -> None:
        self.rows = rows

    @classmethod
    def of(cls, model: ModelConfig) -> "Mamba3Decoding":
        return cls(in_proj(model))

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
        def scan(x_BHP: Tensor, rates: Rates, B_BRGN: Tensor, C_BRGN: Tensor) -> Tensor:
            how = (layer.B_bias_HRN, layer.C_bias_HRN, layer.D_H, layer.x_HRP)
            return mamba3_step(Memory(*memory), x_BHP, rates, B_BRGN, C_BRGN, *how)

        return run.times(_mixed(run.times(x_BD, layer.in_proj), self.rows, layer, run.config, scan), layer.out_proj)

    def read(self, run: Runner, layer: Mamba3Layer, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        def scan(x_BLHP: Tensor, rates: Rates, B_BLRGN: Tensor, C_BLRGN: Tensor) -> Tensor:
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
            return y

        return product(_mixed(product(x_BLD, layer.in_proj), self.rows, layer, run.config, scan), layer.out_proj)


def _mixed(projected: Tensor, rows: Weight, layer: Mamba3Layer, model: ModelConfig, scan: Any) -> Tensor:
    def normed_I(y: Tensor, z: Tensor | None = None) -> Tensor:
        if z is not None:
            weight_I: Any = layer.norm_I
            return gated_rms_norm(y, z, weight_I, rows.count("dt"), model.norm_eps, norm_first=True)
        weight_HP = layer.norm_I.view(-1, model.mamba3.head_dim)  # type: ignore[union-attr]
        return normed(y.unflatten(-1, weight_HP.shape), weight_HP, model.norm_eps).flatten(-2)

    return mixed(
        projected,
        rows,
        model,
        layer.dt_bias_H,
        [partial(normed, weight=weight_N, eps=model.norm_eps) for weight_N in (layer.B_norm_N, layer.C_norm_N)],
        scan,
        None if layer.norm_I is None else normed_I,
        (layer.z_HRP, layer.o_HRP),
    )
