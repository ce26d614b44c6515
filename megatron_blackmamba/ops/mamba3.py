"""The recurrence of Mamba-3 (Lahoti et al., arXiv 2603.15569), with one (SISO) or several inputs a head (MIMO).

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

**One SSD scan computes this.** The state receives the input of token s twice. At s its weight is own[s]. At s + 1 it
is before[s + 1], ahead of that token's decay. To all later tokens this is the same as one addition at s:

    state[t] = exp(steps[t]) * state[t - 1] + (own[t] + before[t + 1]) * x[t] * B[t]

Only y[s] itself must not see the second part yet, so before[s + 1] * (C[s] · B[s]) * x[s] is subtracted from it. At the
last token of a document, before[s + 1] is 0.

Products of B and C depend on differences of angles only. The sum of turns still begins anew with each document, so that
no rounding of one document reaches another.

**Several inputs and outputs (MIMO).** With R rows of B and C for each token, x makes R inputs by factors
(`each_input`). The state adds up their products with the rows of B, and each row of C has an output. A chunk of the
scan has R rows for each token, and fewer tokens. So all products of the scan cost R times as much. R = 1 is SISO.

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state, S angles (at most N / 2),
R inputs and outputs of a head.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops import backends, ssd
from megatron_blackmamba.ops.arguments import require_dimensions, require_shapes
from megatron_blackmamba.ops.context import from_next, sum_before
from megatron_blackmamba.ops.ssd.part import scan_cut
from megatron_blackmamba.ops.ssd.turned import Inputs, Rates, document_sums, each_input, turned

__all__ = ["Memory", "Rates", "gated", "mamba3", "mamba3_step"]

BACKENDS = ("auto", "triton", "chunked")


class Memory(NamedTuple):
    """The state that a sequence leaves to its next token: the sum of angles, the scan's state, and the last B and x."""

    angle_BHS: Tensor
    state_BHPN: Tensor
    B_BHRN: Tensor
    x_BHP: Tensor


def mamba3(
    x_BLHP: Tensor,
    rates: Rates,
    B_BLRGN: Tensor,
    C_BLRGN: Tensor,
    B_bias_HRN: Tensor,
    C_bias_HRN: Tensor,
    D_H: Tensor,
    *,
    mix_HRP: Tensor | None = None,
    memory: Memory | None = None,
    reset_BL: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str = "chunked",
) -> tuple[Tensor, Memory | None]:
    """Return y_BLHP, with factors y_BLRHP, in x's dtype, and the memory behind the last token if one was given.

    Args:
        rates: Of `Rates.of`.
        B_BLRGN, C_BLRGN: Normalised.
        mix_HRP: Factors that make the R inputs of a head from its x; None needs R = 1.
        memory: What the tokens before have left.
        reset_BL: True at the first token of a document, which sees nothing of the ones before.
        group: Ranks with the other parts of these sequences, in order; then without a memory.
        backend: "chunked", or "triton" for the scan itself; "auto" takes it where it can.
    """
    require_dimensions("mamba3", "x", x_BLHP, 4)
    (B, L, H, P), (R, G, N) = x_BLHP.shape, B_BLRGN.shape[-3:]
    found: dict[str, Tensor | None] = {
        "x_BLHP": x_BLHP,
        "B_BLRGN": B_BLRGN,
        "C_BLRGN": C_BLRGN,
        "B_bias_HRN": B_bias_HRN,
        "C_bias_HRN": C_bias_HRN,
        "mix_HRP": mix_HRP,
    }
    found |= {"D_H": D_H, "steps_BLH": rates.steps, "turn_BLHS": rates.turn, "reset_BL": reset_BL}
    require_shapes("mamba3", found, B=B, L=L, H=H, P=P, G=G, N=N, R=R, S=rates.turn.shape[-1])
    if H % G or (mix_HRP is None and R > 1):
        wrong = f"{H} heads in {G} groups" if H % G else f"{R} rows of B for each token, and no mix"
        raise ValueError(
            f"mamba3: {wrong}: x is {(B, L, H, P)}, B is {(B, L, R, G, N)}. Make H divisible, and give mix."
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
        x_BLHP, rates.steps, rates.own, next_BLH, angle_BLHS, B_BLRGN, C_BLRGN, B_bias_HRN, C_bias_HRN,
        D_H, mix_HRP, None if memory is None else _start(memory, before_BLH[:, 0], mix_HRP), reset_BL,
    )  # fmt: skip
    scanner = backends.choose(ssd.__name__, BACKENDS[1:], backend, inputs)
    if group is not None:
        return scan_cut(scanner, inputs, group), None
    y_BLHP, state_BHPN = scanner.scan(inputs)
    if memory is None:
        return y_BLHP, None
    B_BHRN = turned(B_BLRGN[:, -1].to(compute), B_bias_HRN, angle_BLHS[:, -1])
    return y_BLHP, Memory(angle_BLHS[:, -1], state_BHPN, B_BHRN, x_BLHP[:, -1].to(compute))


def _start(memory: Memory, before_BH: Tensor, mix_HRP: Tensor | None) -> Tensor:
    """Return the state to which the first token's decay applies: the last token counts once more, by the first's dt."""
    return memory.state_BHPN + _written(memory.x_BHP * before_BH[..., None], memory.B_BHRN, mix_HRP)


def _written(x_BHP: Tensor, B_BHRN: Tensor, mix_HRP: Tensor | None) -> Tensor:
    """Return what a token adds to the state, `[B, H, P, N]`."""
    if mix_HRP is None:
        return x_BHP[..., None] * B_BHRN
    return each_input(x_BHP, mix_HRP).permute(0, 2, 3, 1) @ B_BHRN


@torch.no_grad()
def mamba3_step(
    memory: Memory,
    x_BHP: Tensor,
    rates: Rates,
    B_BRGN: Tensor,
    C_BRGN: Tensor,
    B_bias_HRN: Tensor,
    C_bias_HRN: Tensor,
    D_H: Tensor,
    mix_HRP: Tensor | None = None,
) -> Tensor:
    """Advance `memory` by one token in place and return y_BHP, with factors y_BRHP, in x's dtype.

    Arguments are as for `mamba3`, without L.
    """
    compute = rates.steps.dtype
    x = x_BHP.to(compute)
    memory.angle_BHS.add_(rates.turn).remainder_(2 * torch.pi)
    B_BHRN, C_BHRN = (
        turned(part.to(compute), bias, memory.angle_BHS) for part, bias in ((B_BRGN, B_bias_HRN), (C_BRGN, C_bias_HRN))
    )
    state_BHPN = _start(memory, rates.before, mix_HRP).mul_(rates.steps.exp()[..., None, None])
    state_BHPN += _written(x * rates.own[..., None], B_BHRN, mix_HRP)
    for kept, new in zip(memory[1:], (state_BHPN, B_BHRN, x), strict=True):
        kept.copy_(new)
    y_BHPR = state_BHPN @ C_BHRN.mT
    y = y_BHPR.squeeze(-1) if mix_HRP is None else y_BHPR.permute(0, 3, 1, 2)
    return (y + D_H[:, None] * each_input(x, mix_HRP)).to(x_BHP.dtype)


def gated(y: Tensor, z_I: Tensor, gate_HRP: Tensor | None, out_HRP: Tensor | None) -> Tensor:
    """Return a layer's output in front of out_proj, `[..., I]`: y `[..., H, P]` times SiLU of z.

    With factors, y is `[..., R, H, P]`. Each of the R outputs has its own gate, made from z, and the result is their
    weighted sum.
    """
    if gate_HRP is None or out_HRP is None:
        return y.flatten(-2) * F.silu(z_I)
    z_RHP = each_input(z_I.unflatten(-1, y.shape[-2:]).to(gate_HRP.dtype), gate_HRP)
    return (y * F.silu(z_RHP) * out_HRP.transpose(0, 1)).sum(-3).flatten(-2).to(z_I.dtype)
