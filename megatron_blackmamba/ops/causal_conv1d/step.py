"""One token of the causal depthwise convolution, for decoding: the window moves on in place.

Shapes: B batch, I inner channels, K taps, W = K - 1 the window.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.arguments import require_dimensions, require_shapes


@torch.no_grad()
def causal_conv1d_step(
    window_BWI: Tensor,
    x_BI: Tensor,
    weight_IK: Tensor,
    bias_I: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """Put `x_BI` at the end of `window_BWI`, its oldest input dropped, in place, and return y_BI in x's dtype."""
    require_dimensions("causal_conv1d_step", "window", window_BWI, 3)
    B, W, I = window_BWI.shape
    tensors = {"window_BWI": window_BWI, "x_BI": x_BI, "weight_IK": weight_IK, "bias_I": bias_I}
    require_shapes("causal_conv1d_step", tensors, B=B, W=W, I=I, K=W + 1)
    compute = torch.promote_types(x_BI.dtype, torch.float32)
    inputs_BKI = torch.cat((window_BWI, x_BI[:, None].to(window_BWI.dtype)), dim=1)
    y = (inputs_BKI.to(compute) * weight_IK.t().to(compute)).sum(dim=1)
    if bias_I is not None:
        y = y + bias_I
    window_BWI.copy_(inputs_BKI[:, 1:])
    return (F.silu(y) if activation == "silu" else y).to(x_BI.dtype)
