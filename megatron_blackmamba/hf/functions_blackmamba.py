"""The functions of BlackMamba's layers in plain PyTorch.

Shapes: B batch, L length, T tokens, I inner, N state, K taps, E experts. In Mamba-2 and 3: H heads of P channels in G
groups, S angles of a state. In attention: H heads of C channels.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def widen(x: Tensor) -> Tensor:
    """Return the tensor in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normalized(x: Tensor, eps: float) -> Tensor:
    """Return x, in at least fp32, over the root mean square of its last axis."""
    x = widen(x)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer in at least fp32, under autocast too."""
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        return F.linear(widen(x), widen(weight), None if bias is None else widen(bias))


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap), or without a cap the logits themselves."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def relu2(x: Tensor) -> Tensor:
    """Return the square of ReLU."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu2": relu2}


def activated(x: Tensor, activation: str, gated: bool) -> Tensor:
    """Return the activation of x; with a gate, of its first half, times the second."""
    if not gated:
        return ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def bounded(dt: Tensor, bias_H: Tensor, least: float) -> Tensor:
    """Return dt such that softplus(dt + bias) is at least `least`."""
    return dt.maximum((math.log(math.expm1(least)) - bias_H).to(dt.dtype)) if least else dt


def rotated(x_BHLC: Tensor, first: int, theta: float) -> Tensor:
    """Return queries or keys, rotated by their positions, which count from `first`."""
    L, C = x_BHLC.shape[2:]
    rates = theta ** (-torch.arange(0, C, 2, device=x_BHLC.device).float() / C)
    angles_LC = torch.outer(torch.arange(first, first + L, device=x_BHLC.device).float(), rates).repeat(1, 2)
    x = widen(x_BHLC)
    half, other = x.chunk(2, dim=-1)
    return (x * angles_LC.cos() + torch.cat((-other, half), dim=-1) * angles_LC.sin()).to(x_BHLC.dtype)


def causal_conv1d(
    x_BLI: Tensor, weight_IK: Tensor, bias_I: Tensor | None, *, initial_window: Tensor, reset_BL: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Apply the depthwise convolution and SiLU; return y_BLI and the window for the next tokens."""
    L, K = x_BLI.shape[1], weight_IK.shape[1]
    inputs = torch.cat((initial_window.to(x_BLI.dtype), x_BLI), dim=1)
    if reset_BL is None:
        y = F.conv1d(inputs.transpose(1, 2), weight_IK[:, None], bias_I, groups=x_BLI.shape[2]).transpose(1, 2)
        return F.silu(y), inputs[:, L:].clone()
    document = F.pad(reset_BL.long().cumsum(dim=1), (K - 1, 0))
    y = inputs.new_zeros(()) if bias_I is None else inputs.new_zeros(()) + bias_I
    for k in range(K):  # the last tap is the token itself
        same = document[:, k : k + L] == document[:, K - 1 :]
        y = y + weight_IK[:, k] * inputs[:, k : k + L] * same[:, :, None]
    ongoing = document[:, L:] == document[:, -1:]
    return F.silu(y), inputs[:, L:] * ongoing[:, :, None]


def selective_scan(
    u_BLI: Tensor,
    delta_BLI: Tensor,
    A_IN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_I: Tensor,
    z_BLI: Tensor,
    delta_bias_I: Tensor,
    initial_state_BIN: Tensor,
    reset_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the Mamba-1 recurrence token by token in fp32; return y_BLI in u's dtype and the last state."""
    u, B, C = widen(u_BLI), widen(B_BLN), widen(C_BLN)
    delta = F.softplus(widen(delta_BLI) + delta_bias_I)
    delta_u = delta * u
    keep_BL = None if reset_BL is None else (~reset_BL).to(u.dtype)
    state = initial_state_BIN
    chunk = max(1, min(64, 2**20 // max(1, state.numel())))  # exponentials of a chunk at once, while they fit a cache
    y_parts = []
    for start in range(0, u.shape[1], chunk):
        here = slice(start, start + chunk)
        decay = torch.exp(delta[:, here].transpose(0, 1).unsqueeze(-1) * A_IN)
        if keep_BL is not None:
            decay = decay * keep_BL[:, here].t()[:, :, None, None]
        states = []
        for t in range(decay.shape[0]):
            state = torch.addcmul(delta_u[:, start + t, :, None] * B[:, start + t, None, :], decay[t], state)
            states.append(state)
        y_parts.append(torch.einsum("lbin,bln->bli", torch.stack(states), C[:, here]))
    y = torch.cat(y_parts, dim=1) + D_I * u
    return (y * F.silu(widen(z_BLI))).to(u_BLI.dtype), state


def ssd(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    initial_state_BHPN: Tensor,
    reset_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the Mamba-2 recurrence in fp32; return y_BLHP in x's dtype and the last state."""
    x, heads = widen(x_BLHP), x_BLHP.shape[2] // B_BLGN.shape[2]
    dt_BLH = F.softplus(widen(dt_BLH) + dt_bias_H)
    B, C = (widen(tensor).repeat_interleave(heads, dim=2) for tensor in (B_BLGN, C_BLGN))
    y, state = _decaying_sums(x * dt_BLH[..., None], dt_BLH * A_H, B, C, initial_state_BHPN, reset_BL)
    return (y + D_H[:, None] * x).to(x_BLHP.dtype), state


def mamba3(
    x_BLHP: Tensor,
    rates: Sequence[Tensor],
    B_BLRHN: Tensor,
    C_BLRHN: Tensor,
    D_H: Tensor,
    mix_HRP: Tensor,
    last: tuple[Tensor, Tensor, Tensor, Tensor],
    reset_BL: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Run the Mamba-3 recurrence in fp32; return y_BLRHP in x's dtype and the next `last`.

    rates: steps, own, before `[B, L, H]` and turn `[B, L, H, S]`. B and C have their biases.
    mix_HRP: factors that make the R inputs of a head from x.
    last: the sum of turns, the state, and B and x of the token before.
    """
    steps, own, before, turn = rates
    x, R, (angle, state, last_B, last_x) = widen(x_BLHP), B_BLRHN.shape[2], last
    if reset_BL is not None:
        before = before.masked_fill(reset_BL[..., None], 0)
    angles = document_sums(turn, angle, reset_BL).remainder(2 * torch.pi)
    B, C = turned(B_BLRHN, angles[:, :, None]), turned(C_BLRHN, angles[:, :, None])
    x_BLRHP = x[:, :, None] * mix_HRP.transpose(0, 1)
    start = state + ((last_x * before[:, 0, :, None])[:, :, None] * mix_HRP).mT @ last_B
    # Later tokens count a token as it and the next one write it. Its R rows are scanned like tokens without a decay.
    later = own + F.pad(before[:, 1:], (0, 0, 0, 1))
    steps_BUH = F.pad(steps[:, :, None], (0, 0, 0, R - 1)).flatten(1, 2)
    reset_BU = None if reset_BL is None else F.pad(reset_BL[..., None], (0, R - 1)).flatten(1)
    rows = (part.flatten(1, 2) for part in (x_BLRHP * later[:, :, None, :, None], B, C))
    x_BUHP, B_BUHN, C_BUHN = rows
    y, state = _decaying_sums(x_BUHP, steps_BUH, B_BUHN, C_BUHN, start, reset_BU)
    # A row has seen its token's rows up to itself, as later tokens do. It should see all, as they write themselves.
    scores_BLHRR = C.transpose(2, 3) @ B.transpose(2, 3).mT
    owed_BLHRR = own[..., None, None] * scores_BLHRR - later[..., None, None] * scores_BLHRR.tril()
    y = y.unflatten(1, (-1, R)) + (owed_BLHRR @ x_BLRHP.transpose(2, 3)).transpose(2, 3) + D_H[:, None] * x_BLRHP
    return y.to(x_BLHP.dtype), (angles[:, -1], state, B[:, -1].transpose(1, 2), x[:, -1])


def mamba3_rates(
    dt: Tensor, A: Tensor, trap: Tensor, angle: Tensor, bias_H: Tensor, floor: float
) -> tuple[Tensor, ...]:
    """Return steps, own, before `[B, L, H]` and turn `[B, L, H, S]` from the projections."""
    dt, A, trap, angle = (widen(part) for part in (dt, A, trap, angle))
    dt = F.softplus(dt + bias_H)
    A = A.clamp_min(0) + 1 / (1 - A.clamp_max(0))
    own = torch.sigmoid(trap) * dt
    return -A.clamp_min(floor) * dt, own, dt - own, (torch.tanh(angle) * torch.pi)[..., None, :] * dt[..., None]


def delta_rule(
    q_BLHK: Tensor,
    k_BLHK: Tensor,
    erase_BLHK: Tensor,
    written_BLHV: Tensor,
    log_decay_BLHD: Tensor,
    state_BHKV: Tensor,
    reset_BL: Tensor | None,
    chunk: int = 16,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule in fp32; return y_BLHV and the last state.

    What a token changes depends on what earlier ones of its chunk changed: a triangular system.
    """
    document_BL = torch.zeros(q_BLHK.shape[:2], device=q_BLHK.device) if reset_BL is None else reset_BL.cumsum(1)
    last_B, y_parts = document_BL.new_zeros(len(q_BLHK)), []
    for here in (slice(first, first + chunk) for first in range(0, q_BLHK.shape[1], chunk)):
        q, k, erase, written, log_decay = (
            x[:, here].transpose(1, 2) for x in (q_BLHK, k_BLHK, erase_BLHK, written_BLHV, log_decay_BLHD)
        )
        document_BT = document_BL[:, here]
        same_BTT = (document_BT[..., None] == document_BT[:, None]).tril()
        exact = log_decay.dtype if log_decay.device.type == "mps" else torch.float64  # digits of small steps stay
        sums = log_decay.clamp_min(-1000.0).to(exact).cumsum(2)
        between = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(~same_BTT[:, None, :, :, None], -torch.inf)
        left_BHTSK = between.to(q.dtype).exp() * k[:, :, None]
        since, until = sums.to(q.dtype).exp(), (sums[:, :, -1:] - sums).to(q.dtype).exp()
        since = since * (document_BT == last_B[:, None])[:, None, :, None]
        until = until * (document_BT == document_BT[:, -1:])[:, None, :, None]
        to_changes = (erase[:, :, :, None] * left_BHTSK).sum(-1)
        own = written - (erase * since) @ state_BHKV
        changes = torch.linalg.solve_triangular(to_changes, own, upper=False, unitriangular=True)
        y_parts.append((q * since) @ state_BHKV + (q[:, :, :, None] * left_BHTSK).sum(-1) @ changes)
        state_BHKV = since[:, :, -1, :, None] * state_BHKV + (k * until).mT @ changes
        last_B = document_BT[:, -1]
    return torch.cat(y_parts, dim=2).transpose(1, 2), state_BHKV


def document_sums(x: Tensor, start: Tensor, reset_BL: Tensor | None, chunk: int = 64) -> Tensor:
    """Return the running sum of x `[B, L, ...]` from `start` on, anew in each document: exactly, so no plain cumsum."""
    document_BL = torch.zeros(x.shape[:2], device=x.device) if reset_BL is None else reset_BL.cumsum(1)
    last_B, parts = document_BL.new_zeros(len(x)), []
    for here in (slice(first, first + chunk) for first in range(0, x.shape[1], chunk)):
        document_BT = document_BL[:, here]
        same_BTT = (document_BT[..., None] == document_BT[:, None]).tril().to(x.dtype)
        goes_on_BT = (document_BT == last_B[:, None]).view(*document_BT.shape, *[1] * (x.dim() - 2))
        sums = (same_BTT @ x[:, here].flatten(2)).view_as(x[:, here]) + start[:, None] * goes_on_BT
        start, last_B = sums[:, -1], document_BT[:, -1]
        parts.append(sums)
    return torch.cat(parts, dim=1)


def turned(V_HN: Tensor, angle_HS: Tensor) -> Tensor:
    """Turn the first S pairs of neighbours by their angles."""
    first, second = V_HN[..., : 2 * angle_HS.shape[-1]].unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle_HS.cos(), angle_HS.sin()
    pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return torch.cat((pairs.flatten(-2), V_HN[..., 2 * angle_HS.shape[-1] :]), dim=-1)


def _decaying_sums(
    x: Tensor, steps: Tensor, B: Tensor, C: Tensor, state: Tensor, reset_BL: Tensor | None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """Run state = exp(steps) * state + x * B and y = C · state as matrix products; return y and the last state."""
    x, B, C, exponent_BHL = x.transpose(1, 2), B.transpose(1, 2), C.transpose(1, 2), steps.transpose(1, 2)
    if reset_BL is not None:
        exponent_BHL = exponent_BHL.masked_fill(reset_BL[:, None], -torch.inf)
    y_parts = []
    for start in range(0, x.shape[2], chunk):
        here = slice(start, start + chunk)
        exponent_BHT, C_T = exponent_BHL[..., here], C[:, :, here]
        T = exponent_BHT.shape[-1]
        not_after_TT = torch.ones(T, T, dtype=torch.bool, device=x.device).triu()
        # Each column sums from its own token on: a difference of running sums would be inexact.
        sums = exponent_BHT[..., None].expand(-1, -1, T, T).masked_fill(not_after_TT, 0.0).cumsum(dim=-2)
        decay_BHTT = sums.masked_fill(not_after_TT.triu(1), -torch.inf).exp()
        since_start_BHT1 = exponent_BHT.cumsum(dim=-1).exp()[..., None]
        scores_BHTT = C_T @ B[:, :, here].mT * decay_BHTT
        y_parts.append(scores_BHTT @ x[:, :, here] + C_T @ state.mT * since_start_BHT1)
        left_BHTP = x[:, :, here] * decay_BHTT[..., -1, :, None]
        state = state * since_start_BHT1[:, :, -1:] + left_BHTP.mT @ B[:, :, here]
    return torch.cat(y_parts, dim=2).transpose(1, 2), state


MOST_ITERATIONS, LOAD_BOUND = 16, 1.2  # of iterations="auto", as in pretraining


@torch.no_grad()
def sinkhorn(logits_TE: Tensor, iterations: int | str = 1, temperature: float = 2.0, start: str = "balanced") -> Tensor:
    """Return the logarithms of a plan that gives every expert the same share of the tokens, as in pretraining.

    A token's choice is its largest entry, so the last step normalizes the experts and rows may differ by a factor.
    """
    most, bound = (MOST_ITERATIONS, LOAD_BOUND) if iterations == "auto" else (int(iterations), 0.0)
    plan_TE = widen(logits_TE) * temperature
    if start == "balanced":
        plan_TE = plan_TE - plan_TE.logsumexp(dim=0)
    for number in range(most):
        rows_TE = plan_TE.log_softmax(dim=1)
        load_E = rows_TE.logsumexp(dim=0)
        if bound and number:
            settled = load_E.exp().amax() <= bound * load_E.exp().mean()
            plan_TE = torch.where(settled, plan_TE, rows_TE - load_E)
        else:
            plan_TE = rows_TE - load_E
    return plan_TE


def hashed(x: Tensor) -> Tensor:
    """Return 32-bit hashes of 32-bit numbers, as pretraining computes them."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


BLOCK = 512
"""Queries that attention masks at once."""


def attended(q: Tensor, k: Tensor, v: Tensor, segment_BL: Tensor, segment_BS: Tensor, scale: float | None) -> Tensor:
    """Return what the last L of S tokens find among those of their segment up to themselves, `[B, H, L, C]`.

    Queries are taken in blocks, which see the keys from their first segment on. So no mask has L x S numbers, and short
    documents save work. The backward pass makes the masks again.
    """
    L, S = q.shape[2], k.shape[2]
    if torch.compiler.is_compiling() or L <= BLOCK:  # a graph takes any length
        return _block(q, k, v, segment_BL, segment_BS, S - L, scale)
    begins = range(0, L, BLOCK)
    tokens_BL = segment_BL.masked_fill(segment_BL < 0, torch.iinfo(segment_BL.dtype).max)
    least_BK = torch.stack([part.amin(dim=1) for part in tokens_BL.split(BLOCK, dim=1)], dim=1)
    lows_BK = torch.searchsorted(segment_BS.cummax(dim=1).values, least_BK)
    found = []
    for begin, low in zip(begins, lows_BK.amin(dim=0).tolist(), strict=True):
        low = min(low, S - L + begin)  # where all is padding
        here, there = slice(begin, begin + BLOCK), slice(low, S - L + min(begin + BLOCK, L))
        given = (q[:, :, here], k[:, :, there], v[:, :, there], segment_BL[:, here], segment_BS[:, there])
        first = S - L + begin - low
        if torch.is_grad_enabled():
            found.append(checkpoint(_block, *given, first, scale, use_reentrant=False, preserve_rng_state=False))
        else:
            found.append(_block(*given, first, scale))
    return torch.cat(found, dim=2)


def _block(
    q: Tensor, k: Tensor, v: Tensor, segment_BL: Tensor, segment_BS: Tensor, first: int, scale: float | None
) -> Tensor:
    """Attend with one mask; the first query is the key number `first`."""
    here_L = torch.arange(first, first + q.shape[2], device=q.device)[:, None]
    there_S = torch.arange(k.shape[2], device=q.device)
    same_BLS = segment_BL[:, :, None] == segment_BS[:, None]  # padding sees padding: no NaN
    seen_BLS = (there_S <= here_L) & same_BLS
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, seen_BLS[:, None], scale=scale, enable_gqa=grouped)
