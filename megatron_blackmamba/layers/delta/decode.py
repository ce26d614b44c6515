"""The delta rule as a recurrence.

Shapes: B batch, L length, D model, H heads, K key channels of a head, V value channels, Q channels of the convolution.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.layers.decoding import Inputs, Runner
from megatron_blackmamba.layers.delta.arithmetic import mixed
from megatron_blackmamba.layers.delta.kind import by_channel, in_proj, sizes
from megatron_blackmamba.layers.recurrent import ProjectedDecoding, convolved, normed
from megatron_blackmamba.ops.delta import delta, delta_step
from megatron_blackmamba.settings import ModelConfig


class DeltaDecoding(ProjectedDecoding):
    """The memory is the last inputs of the convolution `[B, W, Q]` and the state `[B, H, K, V]`, both fp32."""

    rows_of = staticmethod(in_proj)

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> SimpleNamespace:
        """Return the weights; the parameters of the recurrence are in fp32."""
        return SimpleNamespace(
            in_proj=get("in_proj.weight", dtype),
            conv_weight_QK=get("conv1d.weight")[:, 0].contiguous(),
            decay_proj=get("decay_proj.weight", dtype) if by_channel(model) else None,
            dt_bias=get("dt_bias"),
            A_log_H=get("A_log"),
            norm_V=get("norm.weight"),
            out_proj=get("out_proj.weight", dtype),
        )

    def shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        H, _, K, V = sizes(model)
        return (model.conv_kernel - 1, self.rows.count("q k v")), (H, K, V)

    def mixed(self, run: Runner, layer: Any, projected: Tensor, memory: list[Tensor], inputs: Inputs | None) -> Tensor:
        window_BWQ, state_BHKV = memory

        def decays(decay: Tensor) -> Tensor:
            times = run.times if inputs is None else F.linear
            return decay if layer.decay_proj is None else times(decay, layer.decay_proj)

        def scan(*tokens: Tensor) -> Tensor:
            if inputs is None:
                return delta_step(state_BHKV, *tokens)
            y_BLHV, last_BHKV = delta(*tokens, initial_state_BHKV=state_BHKV, reset_BL=inputs.reset_BL)
            state_BHKV.copy_(last_BHKV)
            return y_BLHV

        return mixed(
            projected,
            self.rows,
            run.config,
            layer.dt_bias,
            layer.A_log_H,
            lambda qkv: convolved(qkv, layer.conv_weight_QK, None, window_BWQ, inputs),
            decays,
            scan,
            partial(normed, weight=layer.norm_V, eps=run.config.norm_eps),
        )
