"""Mamba-1 as a recurrence.

Shapes: B batch, L length, D model, I inner, N state, R rank of dt, K convolution width, W = K - 1 window.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.decoding import Inputs, Runner
from megatron_blackmamba.layers.mamba.arithmetic import of_scan
from megatron_blackmamba.layers.mamba.kind import sizes, x_proj
from megatron_blackmamba.layers.recurrent import NORMS, ProjectedDecoding, convolved, normed
from megatron_blackmamba.ops.decoding import Step, mamba_step
from megatron_blackmamba.ops.matvec import product
from megatron_blackmamba.ops.selective_scan import selective_scan, selective_scan_step
from megatron_blackmamba.settings import ModelConfig


class MambaDecoding(ProjectedDecoding):
    """The memory is the last inputs of the convolution `[B, W, I]` and the fp32 state of the scan `[B, I, N]`."""

    rows_of = staticmethod(x_proj)

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> SimpleNamespace:
        """Return the weights. The recurrence's own parameters are fp32 whatever the rest is."""
        return SimpleNamespace(
            in_proj=get("in_proj.weight", dtype),
            conv_weight_IK=get("conv1d.weight")[:, 0].contiguous(),
            conv_bias_I=get("conv1d.bias"),
            x_proj=get("x_proj.weight", dtype),
            dt_proj_IR=get("dt_proj.weight", dtype),
            dt_bias_I=get("dt_proj.bias"),
            A_IN=-get("A_log").exp(),
            D_I=get("D"),
            out_proj=get("out_proj.weight", dtype),
            **{name: get(f"{name}.weight") for name in NORMS if model.mamba_norms},
        )

    def shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        _, I, N, K, _ = sizes(model)
        return (K - 1, I), (I, N)

    def compiled(self, layer: Any, norm_D: Tensor, model: ModelConfig) -> Step | None:
        if model.mamba_norms:
            return None
        return mamba_step(norm_D=norm_D, **vars(layer), eps=model.norm_eps, eod=model.eod_reset)

    def mixed(self, run: Runner, layer: Any, projected: Tensor, memory: list[Tensor], inputs: Inputs | None) -> Tensor:
        window_BWI, state_BIN = memory
        x, z = projected.chunk(2, dim=-1)
        x = convolved(x, layer.conv_weight_IK, layer.conv_bias_I, window_BWI, inputs)
        times, names = run.times if inputs is None else product, NORMS if run.config.mamba_norms else ()
        delta, B, C = of_scan(
            x,
            self.rows,
            lambda x: times(x, layer.x_proj),
            [partial(normed, weight=getattr(layer, name), eps=run.config.norm_eps) for name in names],
            lambda dt: times(dt, layer.dt_proj_IR),
        )
        if inputs is None:
            return selective_scan_step(state_BIN, x, delta, layer.A_IN, B, C, layer.D_I, z, layer.dt_bias_I)
        how: Any = {"delta_bias_I": layer.dt_bias_I, "initial_state_BIN": state_BIN, "reset_BL": inputs.reset_BL}
        y_BLI, last_state_BIN = selective_scan(
            x, delta, layer.A_IN, B, C, layer.D_I, z_BLI=z, **how, return_final_state=True
        )
        state_BIN.copy_(last_state_BIN)
        return y_BLI
