"""The inputs of the scan for Mamba-3 (`ops/mamba3.py`): decays from the data, and B and C that differ by head.

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state, S angles.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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


def turned(V_GN: Tensor, bias_HN: Tensor, angle_HS: Tensor) -> Tensor:
    """Return B or C of each head `[..., H, N]`: with its bias, its first S pairs of numbers turned by their angles."""
    H, S = angle_HS.shape[-2:]
    V_HN = V_GN.repeat_interleave(H // V_GN.shape[-2], dim=-2) + bias_HN.to(V_GN.dtype)
    pairs_HS = torch.view_as_complex(V_HN[..., : 2 * S].unflatten(-1, (S, 2)).contiguous())
    pairs_HS = pairs_HS * torch.polar(torch.ones_like(angle_HS), angle_HS)
    return torch.cat((torch.view_as_real(pairs_HS).flatten(-2), V_HN[..., 2 * S :]), dim=-1)


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

    def written(self, compute: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what each token adds to the state, as x `[B, L, H, P]` and B `[B, L, H, N]`."""
        B_BLHN = turned(self.B_BLGN.to(compute), self.B_bias_HN, self.angle_BLHS)
        return self.x_BLHP.to(compute) * (self.own_BLH + self.next_BLH)[..., None], B_BLHN

    def read(self, compute: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return C `[B, L, H, N]`, and the skip `[B, L, H]`, less what a token's own output must not see yet."""
        C_BLGN, heads = self.C_BLGN.to(compute), self.x_BLHP.shape[2] // self.C_BLGN.shape[2]
        B_BLHN, C_BLHN = (
            part.to(compute).repeat_interleave(heads, dim=2) + bias_HN.to(compute)
            for part, bias_HN in ((self.B_BLGN, self.B_bias_HN), (C_BLGN, self.C_bias_HN))
        )
        skip_BLH = self.D_H.to(compute) - self.next_BLH * (B_BLHN * C_BLHN).sum(-1)
        return turned(C_BLGN, self.C_bias_HN, self.angle_BLHS), skip_BLH
