"""The inputs of the scan for Mamba-3 (`ops/mamba3.py`): decays from the data, and B and C that differ by head.

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state, S angles,
R inputs and outputs of a head. K chunks of T tokens, U = T * R.
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


def turned(V_RGN: Tensor, bias_HRN: Tensor, angle_HS: Tensor) -> Tensor:
    """Return B or C of each head for one token `[..., H, R, N]`: with its bias, its first pairs turned."""
    rotation_H1S = rotation_of(angle_HS.unsqueeze(-2))
    return turned_chunk(V_RGN.unsqueeze(-4), bias_HRN, angle_HS.unsqueeze(-3), rotation_H1S).squeeze(-3)


def turned_chunk(V_TRGN: Tensor, bias_HRN: Tensor, angle_THS: Tensor, rotation_HTS: Tensor) -> Tensor:
    """Return B or C of each head and token of a chunk `[..., H, T, R, N]`, turned by `rotation_of` the angles."""
    return _Turn.apply(V_TRGN, bias_HRN, angle_THS, rotation_HTS.unsqueeze(-2))


@torch.no_grad()
def rotation_of(angle: Tensor) -> Tensor:
    """Return exp(i * angle)."""
    return torch.polar(torch.ones_like(angle), angle)


class _Turn(torch.autograd.Function):
    """Add a head's bias and multiply its first pairs, as complex numbers, in place.

    The derivative by the angle is the result times i. So nothing but the result and the rotation is kept.
    """

    @staticmethod
    def forward(ctx, V_TRGN, bias_HRN, angle_THS, rotation_HT1S):
        (T, R, G, N), H = V_TRGN.shape[-4:], len(bias_HRN)
        found_HTRN = V_TRGN.new_empty(*V_TRGN.shape[:-4], H, T, R, N)
        V_G1TRN, bias_HRN_ = V_TRGN.movedim(-2, -4).unsqueeze(-4), bias_HRN.to(V_TRGN.dtype)
        torch.add(V_G1TRN, bias_HRN_.view(G, -1, 1, R, N), out=found_HTRN.unflatten(-4, (G, -1)))
        _pairs(found_HTRN, rotation_HT1S).mul_(rotation_HT1S)
        ctx.groups, ctx.bias_type = G, bias_HRN.dtype
        ctx.save_for_backward(found_HTRN, rotation_HT1S)
        return found_HTRN

    @staticmethod
    @first_order
    def backward(ctx, grad_HTRN):
        found_HTRN, rotation_HT1S = ctx.saved_tensors
        grad_HTRN = grad_HTRN.clone(memory_format=torch.contiguous_format)
        pairs, of_angle, of_bias = _pairs(grad_HTRN, rotation_HT1S), None, None
        if ctx.needs_input_grad[2]:
            of_angle = (pairs * _pairs(found_HTRN, rotation_HT1S).conj()).imag.sum(-2).transpose(-2, -3)
        pairs.mul_(rotation_HT1S.conj())
        if ctx.needs_input_grad[1]:
            of_bias = grad_HTRN.sum(-3).flatten(0, -4).sum(0).to(ctx.bias_type)
        of_V_GTRN = grad_HTRN.unflatten(-4, (ctx.groups, -1)).sum(-4)
        return of_V_GTRN.movedim(-4, -2), of_bias, of_angle, None


def _pairs(V_HTRN: Tensor, rotation_HT1S: Tensor) -> Tensor:
    """Return a view of the pairs that turn, as complex numbers."""
    return torch.view_as_complex(V_HTRN.unflatten(-1, (-1, 2)))[..., : rotation_HT1S.shape[-1]]


class Inputs(NamedTuple):
    """Fields whose shape begins with BL have an entry for each token."""

    x_BLHP: Tensor
    steps_BLH: Tensor
    own_BLH: Tensor
    next_BLH: Tensor
    """The next token's `Rates.before`, 0 at the end of a document."""
    angle_BLHS: Tensor
    """The sum of all turns so far."""
    B_BLRGN: Tensor
    C_BLRGN: Tensor
    B_bias_HRN: Tensor
    C_bias_HRN: Tensor
    D_H: Tensor
    mix_HRP: Tensor | None = None
    """Factors that make the R inputs of a head from its x; None: x is the only one."""
    initial_state_BHPN: Tensor | None = None
    reset_BL: Tensor | None = None

    @property
    def rows(self) -> int:
        """Return R, the rows of B and C of a token."""
        return len(self.B_bias_HRN[0])

    @property
    def state_size(self) -> int:
        """Return N."""
        return self.B_BLRGN.shape[-1]

    def steps(self, compute: torch.dtype) -> Tensor:
        """Return the logarithms of the decays, `[B, L, H]`."""
        return self.steps_BLH.to(compute)

    def terms(self, compute: torch.dtype, outputs: bool) -> Terms:
        """Return the terms of inputs in chunks, `[B, K, T, ...]`; without outputs, those that the state needs."""
        angle_BKTHS, next_BKTH = self.angle_BLHS, self.next_BLH.to(compute)
        rotation = rotation_of(angle_BKTHS.transpose(2, 3).contiguous())
        B_BKHUN = turned_chunk(self.B_BLRGN.to(compute), self.B_bias_HRN, angle_BKTHS, rotation).flatten(3, 4)
        x_BKTHP, steps = self.x_BLHP.to(compute), self.steps(compute)
        x_BKUHP = self._rows(x_BKTHP * (self.own_BLH.to(compute) + next_BKTH)[..., None])
        if not outputs:
            return Terms(x_BKUHP, steps, B_BKHUN)
        C_BKHUN = turned_chunk(self.C_BLRGN.to(compute), self.C_bias_HRN, angle_BKTHS, rotation).flatten(3, 4)
        input_BKUHP, less_BKHT = self._rows(x_BKTHP), next_BKTH.transpose(2, 3)
        return Terms(x_BKUHP, steps, B_BKHUN, C_BKHUN, input_BKUHP, self.D_H.to(compute), less_BKHT)

    def _rows(self, x_BKTHP: Tensor) -> Tensor:
        """Return the inputs that x makes, `[B, K, U, H, P]`."""
        return x_BKTHP if self.mix_HRP is None else each_input(x_BKTHP, self.mix_HRP).flatten(2, 3)


def each_input(x_HP: Tensor, mix_HRP: Tensor | None) -> Tensor:
    """Return the inputs of a head that its x makes, `[..., R, H, P]`; without factors x itself."""
    return x_HP if mix_HRP is None else x_HP.unsqueeze(-3) * mix_HRP.to(x_HP.dtype).transpose(0, 1)
