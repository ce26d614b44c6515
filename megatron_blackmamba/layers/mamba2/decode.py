"""Mamba-2 as a recurrence.

Shapes: B batch, L length, D model, I inner, H heads, P channels of a head, G groups, N state.
K convolution width, W = K - 1 window, Q = I + 2GN channels of the convolution, X = I + Q + H rows of in_proj.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.decoding import Inputs, Runner
from megatron_blackmamba.layers.mamba2.arithmetic import mixed
from megatron_blackmamba.layers.mamba2.kind import in_proj, sizes
from megatron_blackmamba.layers.recurrent import NORMS, ProjectedDecoding, convolved, normed
from megatron_blackmamba.ops.decoding import Step, mamba2_step
from megatron_blackmamba.ops.gated_norm import gated_rms_norm
from megatron_blackmamba.ops.ssd import ssd, ssd_step
from megatron_blackmamba.settings import ModelConfig


class Mamba2Decoding(ProjectedDecoding):
    """The memory is the last inputs of the convolution `[B, W, Q]` and the fp32 state of the scan `[B, H, P, N]`."""

    rows_of = staticmethod(in_proj)

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> SimpleNamespace:
        """Return the weights; the parameters of the recurrence are in fp32."""
        groups = (model.mamba2.groups, -1)
        return SimpleNamespace(
            in_proj=get("in_proj.weight", dtype),
            conv_weight_QK=get("conv1d.weight")[:, 0].contiguous(),
            conv_bias_Q=get("conv1d.bias"),
            dt_bias_H=get("dt_bias"),
            A_H=-get("A_log").exp(),
            D_H=get("D"),
            norm_I=get("norm.weight"),
            out_proj=get("out_proj.weight", dtype),
            **{name: get(f"{name}.weight").view(groups) for name in NORMS[1:] if model.mamba_norms},
        )

    def shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        I, H, GN = sizes(model)
        return (model.conv_kernel - 1, I + 2 * GN), (H, model.mamba2.head_dim, model.mamba2.state_size)

    def compiled(self, layer: Any, norm_D: Tensor, model: ModelConfig) -> Step | None:
        if model.mamba_norms or model.mamba2.time_step_min:
            return None
        return mamba2_step(norm_D=norm_D, **vars(layer), groups=model.mamba2.groups, eps=model.norm_eps)

    def mixed(self, run: Runner, layer: Any, projected: Tensor, memory: list[Tensor], inputs: Inputs | None) -> Tensor:
        window_BWQ, state_BHPN = memory
        model = run.config

        def scan(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
            if inputs is None:
                return ssd_step(state_BHPN, x, dt, layer.A_H, B, C, layer.D_H, layer.dt_bias_H)
            how: Any = {"dt_bias_H": layer.dt_bias_H, "initial_state_BHPN": state_BHPN, "reset_BL": inputs.reset_BL}
            y_BLHP, last_state_BHPN = ssd(x, dt, layer.A_H, B, C, layer.D_H, **how, return_final_state=True)
            state_BHPN.copy_(last_state_BHPN)
            return y_BLHP

        norms = [getattr(layer, name) for name in NORMS[1:]] if model.mamba_norms else []
        return mixed(
            projected,
            self.rows,
            model,
            layer.dt_bias_H,
            lambda xBC: convolved(xBC, layer.conv_weight_QK, layer.conv_bias_Q, window_BWQ, inputs),
            [partial(_normed, weight_GN=weight_GN, eps=model.norm_eps) for weight_GN in norms],
            scan,
            lambda y, z: gated_rms_norm(y, z, layer.norm_I, model.mamba2.groups, model.norm_eps),
        )


def _normed(part: Tensor, weight_GN: Tensor, eps: float) -> Tensor:
    return normed(part.unflatten(-1, weight_GN.shape), weight_GN, eps).flatten(-2)
