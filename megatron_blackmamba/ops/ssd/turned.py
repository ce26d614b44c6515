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
    """Decay, weights and angles of each token: `[B, L, H]`, or `[B, H]` for one token, in at least fp32."""

    steps: Tensor
    """dt * A, the logarithm of the decay."""
    own: Tensor
    """The weight of the token's own input."""
    before: Tensor
    """The weight of the previous token's input, ahead of this token's decay."""
    turn: Tensor
    """The angles by which B and C turn on: `[B, L, H, S]`."""

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


def turned(V_GN: Tensor, bias_HN: Tensor, angle_HS: Tensor) -> Tensor:
    """Return B or C of each head and one token `[B, H, N]`, with its bias, its first pairs turned by their angles."""
    found_H1N = turned_chunk(V_GN.unsqueeze(-3), bias_HN, angle_HS.unsqueeze(-3), rotation_of(angle_HS.unsqueeze(-2)))
    return found_H1N.squeeze(-2)


def turned_chunk(V_TGN: Tensor, bias_HN: Tensor, angle_THS: Tensor, rotation_HTS: Tensor) -> Tensor:
    """Return B or C of each head and token of a chunk `[..., H, T, N]`, turned by `rotation_of` the angles."""
    found: Tensor = _Turn.apply(V_TGN, bias_HN, angle_THS, rotation_HTS)
    return found


@torch.no_grad()
def rotation_of(angle: Tensor) -> Tensor:
    """Return exp(i * angle)."""
    return torch.polar(torch.ones_like(angle), angle)


class _Turn(torch.autograd.Function):
    """Add a head's bias and multiply its first pairs, as complex numbers, in place.

    The derivative by the angle is the result times i. So nothing but the result and the rotation is kept.
    """

    @staticmethod
    def forward(ctx, V_TGN, bias_HN, angle_THS, rotation_HTS):
        (T, G, N), H = V_TGN.shape[-3:], len(bias_HN)
        found_HTN = V_TGN.new_empty(*V_TGN.shape[:-3], H, T, N)
        V_G1TN, bias_GE1N = V_TGN.transpose(-2, -3).unsqueeze(-3), bias_HN.to(V_TGN.dtype).view(G, -1, 1, N)
        torch.add(V_G1TN, bias_GE1N, out=found_HTN.unflatten(-3, (G, -1)))
        _pairs(found_HTN, rotation_HTS).mul_(rotation_HTS)
        ctx.groups, ctx.bias_type = G, bias_HN.dtype
        ctx.save_for_backward(found_HTN, rotation_HTS)
        return found_HTN

    @staticmethod
    @first_order
    def backward(ctx, grad_HTN):
        found_HTN, rotation_HTS = ctx.saved_tensors
        grad_HTN = grad_HTN.clone(memory_format=torch.contiguous_format)
        pairs, of_angle = _pairs(grad_HTN, rotation_HTS), None
        if ctx.needs_input_grad[2]:
            of_angle = (pairs * _pairs(found_HTN, rotation_HTS).conj()).imag.transpose(-2, -3)
        pairs.mul_(rotation_HTS.conj())
        of_bias_HN = grad_HTN.sum(-2).flatten(0, -3).sum(0).to(ctx.bias_type) if ctx.needs_input_grad[1] else None
        of_V_GTN = grad_HTN.unflatten(-3, (ctx.groups, -1)).sum(-3)
        return of_V_GTN.transpose(-2, -3), of_bias_HN, of_angle, None


def _pairs(V_HTN: Tensor, rotation_HTS: Tensor) -> Tensor:
    """Return a view of the pairs that turn, as complex numbers."""
    return torch.view_as_complex(V_HTN.unflatten(-1, (-1, 2)))[..., : rotation_HTS.shape[-1]]


class Inputs(NamedTuple):
    """Fields whose shape begins with BL have an entry for each token."""

    x_BLHP: Tensor
    steps_BLH: Tensor
    own_BLH: Tensor
    next_BLH: Tensor
    """The next token's `Rates.before`, 0 at the end of a document."""
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
        """Return the terms of inputs in chunks, `[B, K, T, ...]`; without outputs, those that the state needs.

        A token's own output must not see the part of its input that joins with the next token.
        """
        angle_BKTHS, next_BKTH = self.angle_BLHS, self.next_BLH
        rotation = rotation_of(angle_BKTHS.transpose(2, 3).contiguous())
        B_BKHTN = turned_chunk(self.B_BLGN.to(compute), self.B_bias_HN, angle_BKTHS, rotation)
        x_BKTHP = self.x_BLHP.to(compute) * (self.own_BLH + next_BKTH)[..., None]
        if not outputs:
            return Terms(x_BKTHP, self.steps(compute), B_BKHTN)
        C_BKHTN = turned_chunk(self.C_BLGN.to(compute), self.C_bias_HN, angle_BKTHS, rotation)
        return Terms(
            x_BKTHP, self.steps(compute), B_BKHTN, C_BKHTN, self.D_H.to(compute), next_BKTH.to(compute).transpose(2, 3)
        )
