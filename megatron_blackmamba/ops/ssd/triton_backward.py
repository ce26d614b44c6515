"""The Triton kernel of the SSD scan's gradients, given the states before chunks and the gradients of those behind.

Shapes: B batch, L length, H heads, P channels of a head, N state, K chunks, T and S rows of a chunk.
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.ssd.triton_forward import decays_between, load_rows, product, state_at
from megatron_blackmamba.ops.triton_decode_shared import narrowed
from megatron_blackmamba.ops.triton_math import sigmoid


@triton.jit
def gradients(
    x, B, C, rate, A_H, D_H, bias_H, sums_BHL, rest_BHL, weight_BHL, states_BKHPN, dends_BKHPN, dy,
    dx, drate, dB, dC, parts_BKMH,
    rows, x_b, x_l, x_h, B_b, B_l, B_g, C_b, C_l, C_g, rate_b, rate_l, dy_b, dy_l, dy_h,
    dx_b, dx_l, dx_h, drate_b, drate_l, dB_b, dB_l, dC_b, dC_l, chunks,
    H: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    FROM_DT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk for SHARE of a group's HEADS, and this share of the sums over heads.

    All terms of a step's gradient are added, none subtracted: what a pair of rows contributes counts for the steps
    between the two, `step_TS`. parts: sums over the chunk for A, D and the bias.
    """
    PRODUCTS: tl.constexpr = states_BKHPN.dtype.element_ty
    SUMS: tl.constexpr = "tf32" if PRODUCTS == tl.bfloat16 else "tf32x3"
    shares: tl.constexpr = (HEADS + SHARE - 1) // SHARE
    k, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    g, share = (tl.program_id(2) // shares).to(tl.int64), tl.program_id(2) % shares
    p, n, t = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, T)
    row = k * T + t
    first_rows = (row < rows) & (row % R == 0)
    C_TN = load_rows(C + b * C_b + g * C_g, row, C_l, rows, n, N, N == BLOCK_N, PRODUCTS)
    B_SN = load_rows(B + b * B_b + g * B_g, row, B_l, rows, n, N, N == BLOCK_N, PRODUCTS)
    scores_TS = product(C_TN, tl.trans(B_SN))
    from_here_IT = (t[:, None] <= t[None, :]).to(tl.float32)
    inside_TP = (row < rows)[:, None] & (p < P)[None, :]
    dB_SN = tl.zeros((T, BLOCK_N), tl.float32)
    dC_TN = tl.zeros((T, BLOCK_N), tl.float32)
    for of_group in range(share * SHARE, tl.minimum((share + 1) * SHARE, HEADS)):
        h = g * HEADS + of_group
        at_T = (b * H + h) * chunks * T + row
        last = (b * H + h) * chunks * T + k * T + T - 1
        x_SP = load_rows(x + b * x_b + h * x_h, row, x_l, rows, p, P, P == BLOCK_P, PRODUCTS)
        dy_TP = load_rows(dy + b * dy_b + h * dy_h, row, dy_l, rows, p, P, P == BLOCK_P, PRODUCTS)
        head = ((b * chunks + k) * H + h) * P * N
        state_PN, inside_PN = state_at(states_BKHPN + head, p, n, P, N)
        dend_PN, _ = state_at(dends_BKHPN + head, p, n, P, N)
        state_PN = tl.load(state_PN, mask=inside_PN, other=0.0)
        dend_PN = tl.load(dend_PN, mask=inside_PN, other=0.0)
        sums_T, rest_T = tl.load(sums_BHL + at_T), tl.load(rest_BHL + at_T)
        sum_K, rest_K = tl.load(sums_BHL + last), tl.load(rest_BHL + last)
        since_start_T = tl.exp2(sums_T + rest_T)
        until_end_S = tl.exp2((sum_K - sums_T) + (rest_K - rest_T))
        weight_S = tl.load(weight_BHL + at_T) if FROM_DT else tl.full((T,), 1.0, tl.float32)

        # The inputs: through the outputs of this chunk, and through the state behind it.
        left_TS = decays_between(sums_T, rest_T, T, R)
        through_end_SP = product(B_SN, tl.trans(dend_PN)) * until_end_S[:, None]
        dinput_SP = product(tl.trans(narrowed(left_TS * scores_TS, PRODUCTS)), dy_TP) + through_end_SP
        x_32 = x_SP.to(tl.float32)
        dx_SP = dinput_SP * weight_S[:, None]
        if HAS_D:
            dx_SP += tl.load(D_H + h) * dy_TP.to(tl.float32)
        dx_SP = narrowed(dx_SP, dx.dtype.element_ty)
        tl.store(dx + b * dx_b + h * dx_h + row[:, None] * dx_l + p[None, :], dx_SP, mask=inside_TP)

        # B and C.
        dscores_TS = product(dy_TP, tl.trans(x_SP))
        skip = tl.sum(tl.where(t[:, None] == t[None, :], dscores_TS, 0.0))
        dscores_TS *= left_TS * weight_S[None, :]
        of_start_TN = product(dy_TP, state_PN) * since_start_T[:, None]
        dC_TN += of_start_TN + product(narrowed(dscores_TS, PRODUCTS), B_SN)
        dB_SN += product(tl.trans(narrowed(dscores_TS, PRODUCTS)), C_TN)
        dB_SN += product(x_SP, dend_PN) * (until_end_S * weight_S)[:, None]

        # The steps: step I counts in pairs S < I <= T, in outputs I <= T of the start, in inputs S < I of the end.
        through_start_T = tl.sum(of_start_TN * C_TN.to(tl.float32), 1)
        through_end_S = tl.sum(through_end_SP * x_32, 1) * weight_S
        step_IS = tl.dot(from_here_IT, dscores_TS * scores_TS, input_precision=SUMS)
        step_IS = tl.where(t[:, None] > t[None, :], step_IS + through_end_S[None, :], through_start_T[None, :])
        through_both = tl.sum(state_PN.to(tl.float32) * dend_PN.to(tl.float32)) * tl.exp2(sum_K + rest_K)
        drate_T = tl.sum(step_IS, 1) + through_both

        parts = parts_BKMH + (b * chunks + k) * 3 * H + h
        rates = b * rate_b + row // R * rate_l + h
        if FROM_DT:
            tl.store(parts, tl.sum(drate_T * weight_S))
            raw_T = tl.load(rate + rates, mask=first_rows, other=0.0).to(tl.float32)
            if HAS_BIAS:
                raw_T += tl.load(bias_H + h)
            drate_T = drate_T * tl.load(A_H + h) + tl.sum(dinput_SP * x_32, 1)
            drate_T = tl.where(first_rows, drate_T * sigmoid(raw_T), 0.0)
            tl.store(parts + H, skip)
            tl.store(parts + 2 * H, tl.sum(drate_T))
        drate_T = narrowed(drate_T, drate.dtype.element_ty)
        tl.store(drate + b * drate_b + row // R * drate_l + h, drate_T, mask=first_rows)

    part = tl.program_id(2).to(tl.int64) * N
    inside_TN = (row < rows)[:, None] & (n < N)[None, :]
    tl.store(dB + b * dB_b + row[:, None] * dB_l + (part + n)[None, :], narrowed(dB_SN, dB.dtype.element_ty), mask=inside_TN)
    tl.store(dC + b * dC_b + row[:, None] * dC_l + (part + n)[None, :], narrowed(dC_TN, dC.dtype.element_ty), mask=inside_TN)
