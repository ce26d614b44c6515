"""The inputs of the scan for Mamba-3 (`ops/mamba3.py`): decays from the data, and B and C that differ by head.

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state, S angles.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.ssd.inputs import Terms


class Rates(NamedTuple):
    """What a token does to time: `[B, L, H]`, or `[B, H]` for one token, in at least fp32."""

    steps: Tensor
    """dt * A, the logarithm of the decay."""
    own: Tensor
    """How much of the token's own input joins the state."""
    before: Tensor
    """How much more of the input before joins it, ahead of this token's decay."""
    turn: Tensor
    """By how much B and C turn: `[B, L, H, S]`."""

    @classmethod
    def of(cls, dt: Tensor, A: Tensor, trap: Tensor, angle_S: Tensor, dt_bias_H: Tensor, floor: float) -> "Rates":
        """Return them for the projections dt, A and trap `[..., H]`, and angle `[..., S]`; `floor` is A's least."""
        compute = torch.promote_types(dt.dtype, torch.float32)
        dt, A, trap, angle_S = (part.to(compute) for part in (dt, A, trap, angle_S))
        dt = F.softplus(dt + dt_bias_H)
        A = A.clamp_min(0) + 1 / (1 - A.clamp_max(0))  # 1 + A above zero, 1 / (1 - A) below
        own = torch.sigmoid(trap) * dt
        turn = (torch.tanh(angle_S) * torch.pi).unsqueeze(-2) * dt[..., None]
        return cls(-A.clamp_min(floor) * dt, own, dt - own, turn)


def document_sums(x: Tensor, reset_BL: Tensor | None) -> Tensor:
    """Return the running sum of x `[B, L, ...]` along L, which begins anew where `reset_BL` is True.

    It is a product with ones and zeros inside chunks, and another one between them. So nothing of another document
    takes part in a sum or in its gradient.
    """
    if reset_BL is None:
        return x.cumsum(1)
    L = x.shape[1]
    T = max(16, 1 << (L - 1).bit_length() // 2)  # as many tokens as chunks
    more = -L % T
    x_BKTF = F.pad(x.flatten(2), (0, 0, 0, more)).unflatten(1, (-1, T))
    document_BKT = F.pad(reset_BL, (0, more)).long().cumsum(1).unflatten(1, (-1, T))
    same_BKTT = document_BKT[..., None] == document_BKT[..., None, :]
    sums_BKTF = same_BKTT.tril().to(x.dtype) @ x_BKTF
    ends_BK = document_BKT[..., -1]
    before_BK = F.pad(ends_BK[:, :-1], (1, 0), value=-1)
    reached_BKK = (before_BK[..., None] == ends_BK[:, None]).tril(-1)
    starts_BKF = reached_BKK.to(x.dtype) @ sums_BKTF[:, :, -1]
    goes_on_BKT = document_BKT == before_BK[..., None]
    sums_BKTF = sums_BKTF + starts_BKF[:, :, None] * goes_on_BKT[..., None]
    return sums_BKTF.flatten(1, 2)[:, :L].unflatten(2, x.shape[2:])


def turned(V_GN: Tensor, bias_HN: Tensor, angle_HS: Tensor, rotation: Tensor | None = None) -> Tensor:
    """Return B or C of each head `[..., H, N]`: with its bias, its first S pairs of numbers turned by their angles.

    rotation: `rotation_of` these angles, if it is at hand.
    """
    V_HN = V_GN.repeat_interleave(angle_HS.shape[-2] // V_GN.shape[-2], dim=-2) + bias_HN.to(V_GN.dtype)
    found: Tensor = _Turn.apply(V_HN, angle_HS, rotation_of(angle_HS, bias_HN) if rotation is None else rotation)
    return found


@torch.no_grad()
def rotation_of(angle_HS: Tensor, bias_HN: Tensor) -> Tensor:
    """Return exp(i * angle) for each pair of a state, 1 for those that do not turn."""
    rest = bias_HN.shape[-1] // 2 - angle_HS.shape[-1]
    turning_HS = torch.polar(torch.ones_like(angle_HS), angle_HS)
    return torch.cat((turning_HS, turning_HS.new_ones(*angle_HS.shape[:-1], rest)), dim=-1)


class _Turn(torch.autograd.Function):
    """Products of complex numbers. The derivative by the angle is the result times i, so nothing else is kept."""

    @staticmethod
    def forward(ctx, V_HN, angle_HS, rotation):
        turned = _complex(V_HN) * rotation
        ctx.angles = angle_HS.shape[-1]
        ctx.save_for_backward(turned, rotation)
        return torch.view_as_real(turned).flatten(-2)

    @staticmethod
    @first_order
    def backward(ctx, grad_HN):
        turned, rotation = ctx.saved_tensors
        grad = _complex(grad_HN)
        pairs = slice(0, ctx.angles)
        of_angle = (grad[..., pairs] * turned[..., pairs].conj()).imag if ctx.needs_input_grad[1] else None
        return torch.view_as_real(grad * rotation.conj()).flatten(-2), of_angle, None


def _complex(V_HN: Tensor) -> Tensor:
    return torch.view_as_complex(V_HN.contiguous().unflatten(-1, (-1, 2)))


class Inputs(NamedTuple):
    """Fields whose shape begins with BL have an entry for each token."""

    x_BLHP: Tensor
    steps_BLH: Tensor
    own_BLH: Tensor
    next_BLH: Tensor
    """How much of the token joins the state once more before the next one's decay; nothing at the end of a document."""
    angle_BLHS: Tensor
    """The sum of all turns so far."""
    B_BLGN: Tensor
    C_BLGN: Tensor
    B_bias_HN: Tensor
    C_bias_HN: Tensor
    D_H: Tensor
    initial_state_BHPN: Tensor | None = None
    reset_BL: Tensor | None = None

    def steps(self, compute: torch.dtype) -> Tensor:
        """Return the logarithms of the decays, `[B, L, H]`."""
        return self.steps_BLH.to(compute)

    def terms(self, compute: torch.dtype, outputs: bool) -> Terms:
        """Return the terms, B and C for each head; a token's own output must not see what the next one adds of it."""
        rotation = rotation_of(self.angle_BLHS, self.B_bias_HN)
        B_BLHN = turned(self.B_BLGN.to(compute), self.B_bias_HN, self.angle_BLHS, rotation)
        x_BLHP = self.x_BLHP.to(compute) * (self.own_BLH + self.next_BLH)[..., None]
        if not outputs:
            return Terms(x_BLHP, self.steps(compute), B_BLHN, None, None)
        C_BLHN = turned(self.C_BLGN.to(compute), self.C_bias_HN, self.angle_BLHS, rotation)
        skip_BLH = self.D_H.to(compute) - self.next_BLH * (B_BLHN * C_BLHN).sum(-1)
        return Terms(x_BLHP, self.steps(compute), B_BLHN, C_BLHN, skip_BLH)
