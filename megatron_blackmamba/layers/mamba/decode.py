"""Mamba-1 as a recurrence.

Shapes: B batch, L length, D model, I inner, N state, R rank of dt, K convolution width, W = K - 1 window.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.decoding import Decoding, Inputs, Runner
from megatron_blackmamba.layers.mamba.arithmetic import of_scan
from megatron_blackmamba.layers.mamba.kind import sizes, x_proj
from megatron_blackmamba.layers.recurrent import NORMS, convolved, normed
from megatron_blackmamba.ops.decoding import Step, mamba_step
from megatron_blackmamba.ops.matvec import product
from megatron_blackmamba.ops.selective_scan import selective_scan, selective_scan_step
from megatron_blackmamba.settings import ModelConfig


class MambaDecoding(Decoding):
    """The memory is the last inputs of the convolution `[B, W, I]` and the fp32 state of the scan `[B, I, N]`."""

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

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        _, I, N, K, _ = sizes(model)
        return [
            torch.zeros(batch, K - 1, I, dtype=torch.float32, device=device),
            torch.zeros(batch, I, N, dtype=torch.float32, device=device),
        ]

    def compiled(self, layer: Any, norm_D: Tensor, model: ModelConfig) -> Step | None:
        if model.mamba_norms:
            return None
        return mamba_step(norm_D=norm_D, **vars(layer), eps=model.norm_eps, eod=model.eod_reset)

    def step(self, run: Runner, layer: Any, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        window_BWI, state_BIN = memory
        x_BI, z_BI = run.times(x_BD, layer.in_proj).chunk(2, dim=-1)
        x_BI = convolved(x_BI, layer.conv_weight_IK, layer.conv_bias_I, window_BWI, None)
        delta_BI, B_BN, C_BN = _of_scan(x_BI, layer, run.config, run.times)
        y_BI = selective_scan_step(
            state_BIN, x_BI, delta_BI, layer.A_IN, B_BN, C_BN, layer.D_I, z_BI, layer.dt_bias_I
        )  # fmt: skip
        return run.times(y_BI, layer.out_proj)

    def read(self, run: Runner, layer: Any, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        window_BWI, state_BIN = memory
        x_BLI, z_BLI = product(x_BLD, layer.in_proj).chunk(2, dim=-1)
        x_BLI = convolved(x_BLI, layer.conv_weight_IK, layer.conv_bias_I, window_BWI, inputs)
        delta_BLI, B_BLN, C_BLN = _of_scan(x_BLI, layer, run.config, product)
        how: Any = {"delta_bias_I": layer.dt_bias_I, "initial_state_BIN": state_BIN, "reset_BL": inputs.reset_BL}
        y_BLI, last_state_BIN = selective_scan(
            x_BLI, delta_BLI, layer.A_IN, B_BLN, C_BLN, layer.D_I, z_BLI=z_BLI, **how, return_final_state=True
        )
        state_BIN.copy_(last_state_BIN)
        return product(y_BLI, layer.out_proj)


def _of_scan(
    x: Tensor, layer: Any, model: ModelConfig, times: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, ...]:
    names = NORMS if model.mamba_norms else ()
    return of_scan(
        x,
        x_proj(model),
        lambda x: times(x, layer.x_proj),
        [partial(normed, weight=getattr(layer, name), eps=model.norm_eps) for name in names],
        lambda dt: times(dt, layer.dt_proj_IR),
    )
