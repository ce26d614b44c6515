"""The causal depthwise convolution as K shifted products, gradients by autograd, any dtype and device.

Shapes: B batch, L length, I inner channels, K taps, W = K - 1 the window.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.causal_conv1d.inputs import Inputs


def convolve(inputs: Inputs) -> Tensor:
    x_BLI, weight_IK, bias_I, activation, initial_window_BWI, reset_BL = inputs
    L, K = x_BLI.shape[1], weight_IK.shape[1]
    compute = torch.promote_types(x_BLI.dtype, torch.float32)
    if initial_window_BWI is None:
        padded = F.pad(x_BLI.to(compute), (0, 0, K - 1, 0))
    else:
        padded = torch.cat((initial_window_BWI.to(compute), x_BLI.to(compute)), dim=1)
    weight_KI = weight_IK.t().to(compute)
    age_BL = None if reset_BL is None else _tokens_since_reset(reset_BL, K)

    y = padded[:, K - 1 :] * weight_KI[K - 1]
    for back in range(1, K):
        tap = padded[:, K - 1 - back : K - 1 - back + L] * weight_KI[K - 1 - back]
        y = y + (tap if age_BL is None else tap.masked_fill((age_BL < back)[:, :, None], 0.0))
    if bias_I is not None:
        y = y + bias_I
    return (F.silu(y) if activation == "silu" else y).to(x_BLI.dtype)


def _tokens_since_reset(reset_BL: Tensor, K: int) -> Tensor:
    position_L = torch.arange(reset_BL.shape[1], device=reset_BL.device)
    return position_L - torch.where(reset_BL, position_L, -K).cummax(dim=1).values
