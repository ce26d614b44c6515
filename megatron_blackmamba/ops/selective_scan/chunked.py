"""The selective scan in plain PyTorch, a chunk of tokens at a time, for machines without the compiled kernels.

The states of a chunk exist at once, with channels contiguous, and are computed again in the backward: memory grows
with the chunk, not with the sequence. Only decays exp(delta * A) <= 1 are ever formed, no quotients and no sums of
exponents, so no delta is too large.

Shapes: T tokens of a chunk, B batch, L length, I inner channels, N state.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.selective_scan.inputs import Inputs

CHUNK = 16


def scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    u_BLI, delta_BLI, A_IN, B_BLN, C_BLN, D_I, z_BLI, delta_bias_I, delta_softplus, initial_state_BIN, reset_BL = inputs
    compute = torch.promote_types(u_BLI.dtype, torch.float32)
    u, delta, B, C = (x.to(compute).transpose(0, 1).contiguous() for x in (u_BLI, delta_BLI, B_BLN, C_BLN))
    if delta_bias_I is not None:
        delta = delta + delta_bias_I
    if delta_softplus:
        delta = F.softplus(delta)
    state_BNI = u.new_zeros(u.shape[1], *A_IN.t().shape) if initial_state_BIN is None else initial_state_BIN.mT
    keep = None if reset_BL is None else (~reset_BL).to(compute).t()
    y_LBI, state_BNI = _Recurrence.apply(u, delta, A_IN.t().contiguous(), B, C, state_BNI.contiguous(), keep)
    if D_I is not None:
        y_LBI = torch.addcmul(y_LBI, u, D_I)
    y_BLI = y_LBI.transpose(0, 1)
    if z_BLI is not None:
        y_BLI = y_BLI * F.silu(z_BLI.to(compute))
    return y_BLI.to(u_BLI.dtype), state_BNI.mT


class _Recurrence(torch.autograd.Function):
    """state = exp(delta A) state + delta u B;  y = C state."""

    @staticmethod
    def forward(ctx, u_LBI, delta_LBI, A_NI, B_LBN, C_LBN, state_BNI, keep_LB):
        y_LBI, states = torch.empty_like(u_LBI), []
        for part in _chunks(u_LBI):
            states.append(state_BNI)
            u, delta, B, C = u_LBI[part], delta_LBI[part], B_LBN[part], C_LBN[part]
            _, h = _states(u, delta, A_NI, B, state_BNI, None if keep_LB is None else keep_LB[part])
            y_LBI[part] = _sum_over_states(C, h)
            state_BNI = h[-1].clone()
        ctx.save_for_backward(u_LBI, delta_LBI, A_NI, B_LBN, C_LBN, keep_LB, *states)
        return y_LBI, state_BNI

    @staticmethod
    @first_order
    def backward(ctx, grad_y_LBI, grad_state_BNI):
        u_LBI, delta_LBI, A_NI, B_LBN, C_LBN, keep_LB, *states = ctx.saved_tensors
        grad_u, grad_delta, grad_B, grad_C = (torch.empty_like(x) for x in (u_LBI, delta_LBI, B_LBN, C_LBN))
        grad_A_NI = torch.zeros_like(A_NI)
        grad_y_LBI = grad_y_LBI.contiguous()
        for part, state_BNI in zip(reversed(_chunks(u_LBI)), reversed(states), strict=True):
            u, delta, B, C, grad_y = u_LBI[part], delta_LBI[part], B_LBN[part], C_LBN[part], grad_y_LBI[part]
            a, h = _states(u, delta, A_NI, B, state_BNI, None if keep_LB is None else keep_LB[part])
            grad_C[part] = _sum_over_channels(h, grad_y)

            grad_h = grad_y.unsqueeze(2) * C.unsqueeze(3)
            steps, decays = grad_h.unbind(0), a.unbind(0)
            steps[-1].add_(grad_state_BNI)
            for t in range(len(steps) - 2, -1, -1):
                steps[t].addcmul_(decays[t + 1], steps[t + 1])
            grad_state_BNI = decays[0] * steps[0]

            grad_B[part] = _sum_over_channels(grad_h, delta * u)
            grad_delta_u = _sum_over_states(B, grad_h)
            torch.mul(grad_delta_u, delta, out=grad_u[part])

            grad_exponent = grad_h.mul_(a)  # the exponent is delta * A
            grad_exponent[1:].mul_(h[:-1])
            grad_exponent[0].mul_(state_BNI)
            grad_A_NI += torch.mul(grad_exponent, delta.unsqueeze(2), out=a).sum((0, 1))
            grad_delta[part] = grad_exponent.mul_(A_NI).sum(2).addcmul_(grad_delta_u, u)
        return grad_u, grad_delta, grad_A_NI, grad_B, grad_C, grad_state_BNI, None


def _chunks(x_LBI: Tensor) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, len(x_LBI), CHUNK)]


def _states(
    u_TBI: Tensor, delta_TBI: Tensor, A_NI: Tensor, B_TBN: Tensor, state_BNI: Tensor, keep_TB: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the decays and the states of all tokens of a chunk, `[T, B, N, I]`."""
    a_TBNI = (delta_TBI.unsqueeze(2) * (A_NI * math.log2(math.e))).exp2_()
    if keep_TB is not None:
        a_TBNI *= keep_TB[:, :, None, None]
    h_TBNI = (delta_TBI * u_TBI).unsqueeze(2) * B_TBN.unsqueeze(3)
    for a_BNI, h_BNI in zip(a_TBNI.unbind(0), h_TBNI.unbind(0), strict=True):
        state_BNI = h_BNI.addcmul_(a_BNI, state_BNI)
    return a_TBNI, h_TBNI


def _sum_over_states(weight_TBN: Tensor, x_TBNI: Tensor) -> Tensor:
    T, B, N, I = x_TBNI.shape
    return torch.bmm(weight_TBN.reshape(T * B, 1, N), x_TBNI.view(T * B, N, I)).view(T, B, I)


def _sum_over_channels(x_TBNI: Tensor, weight_TBI: Tensor) -> Tensor:
    T, B, N, I = x_TBNI.shape
    return torch.bmm(x_TBNI.view(T * B, N, I), weight_TBI.reshape(T * B, I, 1)).view(T, B, N)
