"""The selective scan as its definition reads: one token after another, gradients by autograd, any dtype.

Slow, and the yardstick for the other backends: give it float64.

Shapes: B batch, L length, I inner channels, N state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.selective_scan.inputs import Inputs


def scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    u_BLI, delta_BLI, A_IN, B_BLN, C_BLN, D_I, z_BLI, delta_bias_I, delta_softplus, initial_state_BIN, reset_BL = inputs
    compute = torch.promote_types(u_BLI.dtype, torch.float32)
    u, delta, B, C = (x.to(compute) for x in (u_BLI, delta_BLI, B_BLN, C_BLN))
    if delta_bias_I is not None:
        delta = delta + delta_bias_I
    if delta_softplus:
        delta = F.softplus(delta)

    state_BIN = initial_state_BIN
    if state_BIN is None:
        state_BIN = u.new_zeros(u.shape[0], *A_IN.shape)
    y_steps = []
    for t in range(u.shape[1]):
        if reset_BL is not None:
            state_BIN = state_BIN.masked_fill(reset_BL[:, t, None, None], 0.0)
        decay_BIN = torch.exp(delta[:, t, :, None] * A_IN)
        state_BIN = decay_BIN * state_BIN + (delta[:, t] * u[:, t])[:, :, None] * B[:, t, None, :]
        y_steps.append((state_BIN * C[:, t, None, :]).sum(-1))
    y = torch.stack(y_steps, dim=1) if y_steps else torch.zeros_like(u)
    if D_I is not None:
        y = y + D_I * u
    if z_BLI is not None:
        y = y * F.silu(z_BLI.to(compute))
    return y.to(u_BLI.dtype), state_BIN
