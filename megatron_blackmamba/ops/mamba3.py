"""The recurrence of Mamba-3 (Lahoti et al., arXiv 2603.15569), one input and one output a head (SISO).

in_proj gives each token t of a head x[t], B[t], C[t], and the projections `dt`, `A`, `trap` and `angle`. `Rates.of`
computes from these, with `dt` the softplus of its projection and bias:

    steps  = -dt * rate(A)                the logarithm of the decay; the rate is positive
    own    = dt * sigmoid(trap)           the weight of the token's own input
    before = dt * (1 - sigmoid(trap))     the weight of the previous token's input
    turn   = dt * pi * tanh(angle)        an angle for each pair of numbers that turns

Below, B and C have the bias of their head and are turned by the sum of `turn` up to their token. The trapezoidal rule
weighs two inputs:

    state[t] = exp(steps[t]) * (state[t - 1] + before[t] * x[t - 1] * B[t - 1]) + own[t] * x[t] * B[t]
    y[t]     = (sum over n of C[t] * state[t]) + D * x[t]

**One SSD scan computes this.** The state receives the input of token s twice: at s with weight own[s], and at s + 1
with weight before[s + 1], ahead of that token's decay. To all later tokens this is the same as one addition at s:

    state[t] = exp(steps[t]) * state[t - 1] + (own[t] + before[t + 1]) * x[t] * B[t]

Only y[s] itself must not see the second part yet, so before[s + 1] * (C[s] · B[s]) * x[s] is subtracted from it. At the
last token of a document, before[s + 1] is 0.

Products of B and C depend on differences of angles only. The sum of turns still begins anew with each document, so that
no rounding of one document reaches another.

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state, S angles (at most N / 2).
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.ops.arguments import require_dimensions, require_shapes
from megatron_blackmamba.ops.context import from_next, sum_before
from megatron_blackmamba.ops.ssd.chunked import scan
from megatron_blackmamba.ops.ssd.part import scan_cut
from megatron_blackmamba.ops.ssd.turned import Inputs, Rates, document_sums, turned

__all__ = ["Memory", "Rates", "mamba3", "mamba3_step"]


class Memory(NamedTuple):
    """The state that a sequence leaves to its next token: the sum of angles, the scan's state, and the last B and x."""

    angle_BHS: Tensor
    state_BHPN: Tensor
    B_BHN: Tensor
    x_BHP: Tensor


def mamba3(
    x_BLHP: Tensor,
    rates: Rates,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    B_bias_HN: Tensor,
    C_bias_HN: Tensor,
    D_H: Tensor,
    *,
    memory: Memory | None = None,
    reset_BL: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Memory | None]:
    """Return y_BLHP in x's dtype, and the memory behind the last token if one was given.

    Args:
        rates: Of `Rates.of`.
        B_BLGN, C_BLGN: Normalised.
        memory: What the tokens before have left.
        reset_BL: True at the first token of a document, which sees nothing of the ones before.
        group: Ranks with the other parts of these sequences, in order; then without a memory.
    """
    require_dimensions("mamba3", "x", x_BLHP, 4)
    (B, L, H, P), (G, N) = x_BLHP.shape, B_BLGN.shape[-2:]
    found: dict[str, Tensor | None] = {
        "x_BLHP": x_BLHP,
        "B_BLGN": B_BLGN,
        "C_BLGN": C_BLGN,
        "B_bias_HN": B_bias_HN,
        "C_bias_HN": C_bias_HN,
    }
    found |= {"D_H": D_H, "steps_BLH": rates.steps, "turn_BLHS": rates.turn, "reset_BL": reset_BL}
    require_shapes("mamba3", found, B=B, L=L, H=H, P=P, G=G, N=N, S=rates.turn.shape[-1])
    if H % G:
        raise ValueError(
            f"mamba3: {H} heads in {G} groups: x is {(B, L, H, P)}, B is {(B, L, G, N)}. Make H divisible."
        )
    compute = rates.steps.dtype

    before_BLH = rates.before if reset_BL is None else rates.before.masked_fill(reset_BL[..., None], 0)
    turns = rates.turn if x_BLHP.is_cuda else rates.turn.double()  # which GPUs compute slowly
    angle_BLHS = document_sums(turns, reset_BL)
    start_BHS = None if memory is None else memory.angle_BHS.to(turns.dtype)
    first = torch.zeros_like(before_BLH[:, 0])
    if group is not None:
        first = from_next(before_BLH[:, 0], group)
        ended_B = torch.zeros(B, dtype=torch.bool, device=x_BLHP.device) if reset_BL is None else reset_BL.any(1)
        start_BHS = sum_before(angle_BLHS[:, -1], ended_B, group)
    if start_BHS is not None:
        goes_on = 1 if reset_BL is None else (reset_BL.cumsum(1) == 0)[:, :, None, None]
        angle_BLHS = angle_BLHS + start_BHS[:, None] * goes_on
    angle_BLHS = angle_BLHS.remainder(2 * torch.pi).to(compute)
    next_BLH = torch.cat((before_BLH[:, 1:], first[:, None]), dim=1)
    inputs = Inputs(
        x_BLHP, rates.steps, rates.own, next_BLH, angle_BLHS, B_BLGN, C_BLGN, B_bias_HN, C_bias_HN, D_H,
        None if memory is None else _start(memory, before_BLH[:, 0]), reset_BL,
    )  # fmt: skip
    if group is not None:
        return scan_cut(scan, inputs, group), None
    y_BLHP, state_BHPN = scan(inputs)
    if memory is None:
        return y_BLHP, None
    B_BHN = turned(B_BLGN[:, -1].to(compute), B_bias_HN, angle_BLHS[:, -1])
    return y_BLHP, Memory(angle_BLHS[:, -1], state_BHPN, B_BHN, x_BLHP[:, -1].to(compute))


def _start(memory: Memory, before_BH: Tensor) -> Tensor:
    """Return the state to which the first token's decay applies: the last token counts once more, by the first's dt."""
    x_BHP = memory.x_BHP * before_BH[..., None]
    return memory.state_BHPN + x_BHP[..., None] * memory.B_BHN[:, :, None]


@torch.no_grad()
def mamba3_step(
    memory: Memory,
    x_BHP: Tensor,
    rates: Rates,
    B_BGN: Tensor,
    C_BGN: Tensor,
    B_bias_HN: Tensor,
    C_bias_HN: Tensor,
    D_H: Tensor,
) -> Tensor:
    """Advance `memory` by one token in place and return y_BHP in x's dtype; arguments as for `mamba3`, without L."""
    compute = rates.steps.dtype
    x = x_BHP.to(compute)
    memory.angle_BHS.add_(rates.turn).remainder_(2 * torch.pi)
    B_BHN, C_BHN = (
        turned(part.to(compute), bias, memory.angle_BHS) for part, bias in ((B_BGN, B_bias_HN), (C_BGN, C_bias_HN))
    )
    state_BHPN = _start(memory, rates.before).mul_(rates.steps.exp()[..., None, None])
    state_BHPN.addcmul_((x * rates.own[..., None])[..., None], B_BHN[:, :, None])
    for kept, new in zip(memory[1:], (state_BHPN, B_BHN, x), strict=True):
        kept.copy_(new)
    y_BHP = (state_BHPN @ C_BHN[..., None]).squeeze(-1)
    return (y_BHP + D_H[:, None] * x).to(x_BHP.dtype)
