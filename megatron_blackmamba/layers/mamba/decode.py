"""Mamba-1 as a recurrence.

Shapes: B batch, L length, D model, I inner, N state, R rank of dt, K convolution width, W = K - 1 window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.decoding import Decoding, Inputs, Runner
from megatron_blackmamba.layers.mamba.arithmetic import of_scan
from megatron_blackmamba.layers.mamba.kind import sizes, x_proj
from megatron_blackmamba.layers.recurrent import NORMS, convolved, normed
from megatron_blackmamba.ops.causal_conv1d import causal_conv1d_step
from megatron_blackmamba.ops.decoding import Step, mamba_step
from megatron_blackmamba.ops.matvec import product
from megatron_blackmamba.ops.selective_scan import selective_scan, selective_scan_step
from megatron_blackmamba.settings import ModelConfig


@dataclass(frozen=True)
class MambaLayer:
    """The weights of one layer. The recurrence's own parameters are fp32 whatever the rest is."""

    in_proj: Tensor
    conv_weight_IK: Tensor
    conv_bias_I: Tensor
    x_proj: Tensor
    dt_proj_IR: Tensor
    dt_bias_I: Tensor
    A_IN: Tensor
    D_I: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class NormedMambaLayer(MambaLayer):
    """The weights of one layer with model.mamba_norms."""

    dt_norm_R: Tensor
    B_norm_N: Tensor
    C_norm_N: Tensor


class MambaDecoding(Decoding):
    """The memory is the last inputs of the convolution `[B, W, I]` and the fp32 state of the scan `[B, I, N]`."""

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> MambaLayer:
        weights = {
            "in_proj": get("in_proj.weight", dtype),
            "conv_weight_IK": get("conv1d.weight")[:, 0].contiguous(),
            "conv_bias_I": get("conv1d.bias"),
            "x_proj": get("x_proj.weight", dtype),
            "dt_proj_IR": get("dt_proj.weight", dtype),
            "dt_bias_I": get("dt_proj.bias"),
            "A_IN": -get("A_log").exp(),
            "D_I": get("D"),
            "out_proj": get("out_proj.weight", dtype),
        }
        if not model.mamba_norms:
            return MambaLayer(**weights)
        dt_norm_R, B_norm_N, C_norm_N = (get(f"{name}.weight") for name in NORMS)
        return NormedMambaLayer(**weights, dt_norm_R=dt_norm_R, B_norm_N=B_norm_N, C_norm_N=C_norm_N)

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        _, I, N, K, _ = sizes(model)
        return [
            torch.zeros(batch, K - 1, I, dtype=torch.float32, device=device),
            torch.zeros(batch, I, N, dtype=torch.float32, device=device),
        ]

    def compiled(self, layer: MambaLayer, norm_D: Tensor, model: ModelConfig) -> Step | None:
        if model.mamba_norms:
            return None
        return mamba_step(norm_D=norm_D, **vars(layer), eps=model.norm_eps, eod=model.eod_reset)

    def step(self, run: Runner, layer: MambaLayer, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        window_BWI, state_BIN = memory
        x_BI, z_BI = run.times(x_BD, layer.in_proj).chunk(2, dim=-1)
        x_BI = causal_conv1d_step(window_BWI, x_BI, layer.conv_weight_IK, layer.conv_bias_I)
        delta_BI, B_BN, C_BN = _of_scan(x_BI, layer, run.config, run.times)
        y_BI = selective_scan_step(
            state_BIN, x_BI, delta_BI, layer.A_IN, B_BN, C_BN, layer.D_I, z_BI, layer.dt_bias_I
        )  # fmt: skip
        return run.times(y_BI, layer.out_proj)

    def read(self, run: Runner, layer: MambaLayer, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        window_BWI, state_BIN = memory
        x_BLI, z_BLI = product(x_BLD, layer.in_proj).chunk(2, dim=-1)
        x_BLI = convolved(x_BLI, layer.conv_weight_IK, layer.conv_bias_I, window_BWI, inputs)
        delta_BLI, B_BLN, C_BLN = _of_scan(x_BLI, layer, run.config, product)
        y_BLI, last_state_BIN = selective_scan(
            x_BLI,
            delta_BLI,
            layer.A_IN,
            B_BLN,
            C_BLN,
            layer.D_I,
            z_BLI=z_BLI,
            delta_bias_I=layer.dt_bias_I,
            initial_state_BIN=state_BIN,
            reset_BL=inputs.reset_BL,
            return_final_state=True,
        )
        state_BIN.copy_(last_state_BIN)
        return product(y_BLI, layer.out_proj)


def _of_scan(
    x: Tensor, layer: MambaLayer, model: ModelConfig, times: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, ...]:
    norms: list[Tensor] = []
    if isinstance(layer, NormedMambaLayer):
        norms = [layer.dt_norm_R, layer.B_norm_N, layer.C_norm_N]
    return of_scan(
        x,
        x_proj(model),
        lambda x: times(x, layer.x_proj),
        [partial(normed, weight=weight, eps=model.norm_eps) for weight in norms],
        lambda dt: times(dt, layer.dt_proj_IR),
    )
