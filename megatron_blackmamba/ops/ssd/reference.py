"""The SSD scan as its definition reads: one token after another, gradients by autograd, any dtype.

Slow, and the yardstick for the other backends: give it float64.

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.ssd.inputs import Inputs


def scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, reset_BL = inputs
    compute = torch.promote_types(x_BLHP.dtype, torch.float32)
    x, dt, B, C = (tensor.to(compute) for tensor in (x_BLHP, dt_BLH, B_BLGN, C_BLGN))
    dt = F.softplus(dt if dt_bias_H is None else dt + dt_bias_H)
    heads_of_group = x.shape[2] // B.shape[2]
    B_BLHN, C_BLHN = (tensor.repeat_interleave(heads_of_group, dim=2) for tensor in (B, C))

    if state_BHPN is None:
        state_BHPN = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3])
    y_steps = []
    for t in range(x.shape[1]):
        if reset_BL is not None:
            state_BHPN = state_BHPN.masked_fill(reset_BL[:, t, None, None, None], 0.0)
        decay_BH = torch.exp(dt[:, t] * A_H)
        added_BHPN = (dt[:, t, :, None] * x[:, t])[..., None] * B_BLHN[:, t, :, None]
        state_BHPN = decay_BH[..., None, None] * state_BHPN + added_BHPN
        y_steps.append((state_BHPN * C_BLHN[:, t, :, None]).sum(-1))
    y = torch.stack(y_steps, dim=1) if y_steps else torch.zeros_like(x)
    if D_H is not None:
        y = y + D_H[:, None] * x
    return y.to(x_BLHP.dtype), state_BHPN
