"""Mamba-2 as a recurrence.

Shapes: B batch, L length, D model, I inner, H heads, P channels of a head, G groups, N state.
K convolution width, W = K - 1 window, Q = I + 2GN channels of the convolution, X = I + Q + H rows of in_proj.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.decoding import Decoding, Inputs, Runner
from megatron_blackmamba.layers.mamba2.kind import in_proj, sizes
from megatron_blackmamba.layers.recurrent import NORMS, normed
from megatron_blackmamba.ops.causal_conv1d import causal_conv1d, causal_conv1d_step
from megatron_blackmamba.ops.decoding import Step, mamba2_step
from megatron_blackmamba.ops.gated_norm import gated_rms_norm
from megatron_blackmamba.ops.matvec import product
from megatron_blackmamba.ops.ssd import ssd, ssd_step
from megatron_blackmamba.settings import ModelConfig


@dataclass(frozen=True)
class Mamba2Layer:
    """The weights of one layer; the parameters of the recurrence are in fp32."""

    in_proj: Tensor
    conv_weight_QK: Tensor
    conv_bias_Q: Tensor
    dt_bias_H: Tensor
    A_H: Tensor
    D_H: Tensor
    norm_I: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class NormedMamba2Layer(Mamba2Layer):
    """The weights of one layer with model.mamba_norms."""

    B_norm_GN: Tensor
    C_norm_GN: Tensor


class Mamba2Decoding(Decoding):
    """The memory is the last inputs of the convolution `[B, W, Q]` and the fp32 state of the scan `[B, H, P, N]`."""

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> Mamba2Layer:
        weights = {
            "in_proj": get("in_proj.weight", dtype),
            "conv_weight_QK": get("conv1d.weight")[:, 0].contiguous(),
            "conv_bias_Q": get("conv1d.bias"),
            "dt_bias_H": get("dt_bias"),
            "A_H": -get("A_log").exp(),
            "D_H": get("D"),
            "norm_I": get("norm.weight"),
            "out_proj": get("out_proj.weight", dtype),
        }
        if not model.mamba_norms:
            return Mamba2Layer(**weights)
        groups = (model.mamba2.groups, -1)
        B_norm_GN, C_norm_GN = (get(f"{name}.weight").view(groups) for name in NORMS[1:])
        return NormedMamba2Layer(**weights, B_norm_GN=B_norm_GN, C_norm_GN=C_norm_GN)

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        I, H, GN = sizes(model)
        return [
            torch.zeros(batch, model.conv_kernel - 1, I + 2 * GN, dtype=torch.float32, device=device),
            torch.zeros(batch, H, model.mamba2.head_dim, model.mamba2.state_size, dtype=torch.float32, device=device),
        ]

    def compiled(self, layer: Mamba2Layer, norm_D: Tensor, model: ModelConfig) -> Step | None:
        if model.mamba_norms or model.mamba2.time_step_min:
            return None
        return mamba2_step(norm_D=norm_D, **vars(layer), groups=model.mamba2.groups, eps=model.norm_eps)

    def step(self, run: Runner, layer: Mamba2Layer, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        window_BWQ, state_BHPN = memory
        z_BI, xBC_BQ, dt_BH = in_proj(run.config).split(run.times(x_BD, layer.in_proj), "z", "x B C", "dt")
        dt_BH = bounded(dt_BH, layer.dt_bias_H, run.config.mamba2.time_step_min)
        xBC_BQ = causal_conv1d_step(window_BWQ, xBC_BQ, layer.conv_weight_QK, layer.conv_bias_Q)
        x_BHP, B_BGN, C_BGN = _x_B_C(xBC_BQ, layer, run.config)
        y_BHP = ssd_step(state_BHPN, x_BHP, dt_BH, layer.A_H, B_BGN, C_BGN, layer.D_H, layer.dt_bias_H)
        return run.times(_normed(y_BHP, z_BI, layer, run.config), layer.out_proj)

    def read(self, run: Runner, layer: Mamba2Layer, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        keep_BL1, reset_BL = inputs.keep_BL1, inputs.reset_BL
        window_BWQ, state_BHPN = memory
        z_BLI, xBC_BLQ, dt_BLH = in_proj(run.config).split(product(x_BLD, layer.in_proj), "z", "x B C", "dt")
        dt_BLH = bounded(dt_BLH, layer.dt_bias_H, run.config.mamba2.time_step_min)
        if keep_BL1 is not None:
            xBC_BLQ = xBC_BLQ * keep_BL1
        xBC_BLQ, last_window_BWQ = causal_conv1d(
            xBC_BLQ,
            layer.conv_weight_QK,
            layer.conv_bias_Q,
            initial_window=window_BWQ,
            reset_BL=reset_BL,
            return_final_window=True,
        )
        if keep_BL1 is not None:
            xBC_BLQ = xBC_BLQ * keep_BL1  # the convolution's bias alone must not feed the state at padding
        x_BLHP, B_BLGN, C_BLGN = _x_B_C(xBC_BLQ, layer, run.config)
        y_BLHP, last_state_BHPN = ssd(
            x_BLHP,
            dt_BLH,
            layer.A_H,
            B_BLGN,
            C_BLGN,
            layer.D_H,
            dt_bias_H=layer.dt_bias_H,
            initial_state_BHPN=state_BHPN,
            reset_BL=reset_BL,
            return_final_state=True,
        )
        window_BWQ.copy_(last_window_BWQ)
        state_BHPN.copy_(last_state_BHPN)
        return product(_normed(y_BLHP, z_BLI, layer, run.config), layer.out_proj)


def _x_B_C(xBC: Tensor, layer: Mamba2Layer, model: ModelConfig) -> tuple[Tensor, ...]:
    x, B, C = in_proj(model).split(xBC, "x", "B", "C")
    groups = (model.mamba2.groups, -1)
    B, C = B.unflatten(-1, groups), C.unflatten(-1, groups)
    if isinstance(layer, NormedMamba2Layer):
        B, C = normed(B, layer.B_norm_GN, model.norm_eps), normed(C, layer.C_norm_GN, model.norm_eps)
    return x.unflatten(-1, (-1, model.mamba2.head_dim)), B, C


def _normed(y: Tensor, z: Tensor, layer: Mamba2Layer, model: ModelConfig) -> Tensor:
    return gated_rms_norm(y.flatten(-2), z, layer.norm_I, model.mamba2.groups, model.norm_eps)


def bounded(dt: Tensor, bias_H: Tensor, least: float) -> Tensor:
    """Return dt such that softplus(dt + bias) is at least `least`."""
    if not least:
        return dt
    return dt.maximum((math.log(math.expm1(least)) - bias_H).to(dt.dtype))
