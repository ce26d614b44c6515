"""What recurrent layers have in common."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.layers.decoding import Inputs
    from megatron_blackmamba.settings import ModelConfig


NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
"""With model.mamba_norms: behind x_proj, with Jamba's names. Mamba-2 has the last two, in front of its scan."""


def initial_dt_bias(shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor:
    """Return the bias whose softplus is log-uniform between model.init.dt_min and dt_max."""
    import torch

    low, high = math.log(model.init.dt_min), math.log(model.init.dt_max)
    dt = torch.exp(torch.rand(shape, generator=random) * (high - low) + low).clamp(min=model.init.dt_floor)
    return dt + torch.log(-torch.expm1(-dt))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over as many channels as the last axis of the weight has, in x's dtype."""
    import torch.nn.functional as F

    return (F.rms_norm(x.float(), weight.shape[-1:], None, eps) * weight).to(x.dtype)


def convolved(x_BLI: Tensor, weight_IK: Tensor, bias_I: Tensor | None, window_BWI: Tensor, inputs: Inputs) -> Tensor:
    """Convolve tokens after those in the window, which moves on."""
    from megatron_blackmamba.ops.causal_conv1d import causal_conv1d

    keep_BL1 = inputs.keep_BL1
    if keep_BL1 is not None:
        x_BLI = x_BLI * keep_BL1
    y_BLI, last_window_BWI = causal_conv1d(
        x_BLI, weight_IK, bias_I, initial_window=window_BWI, reset_BL=inputs.reset_BL, return_final_window=True
    )
    window_BWI.copy_(last_window_BWI)
    # The convolution's bias alone must not feed the state at padding.
    return y_BLI if keep_BL1 is None else y_BLI * keep_BL1
