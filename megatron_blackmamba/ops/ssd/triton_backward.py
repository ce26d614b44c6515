"""The Triton kernels of the SSD scan's gradients, given the states before chunks and the gradients of those behind.

One computes what belongs to a head, the other what the heads of a group share. Both in one need more registers than a
thread has.

Shapes: B batch, L length, H heads, P channels of a head, N state, K chunks, T and S rows of a chunk.
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.ssd.triton_forward import decays_between, state_at
from megatron_blackmamba.ops.triton_math import load_rows, narrowed, product, sigmoid


@triton.jit
def of_heads(
    x, B, C, rate, A_H, D_H, bias_H, sums_BHL, rest_BHL, weight_BHL, states_BKHPN, dends_BKHPN, dy,
    dx, drate, parts_BKMH,
    rows, x_b, x_l, x_h, B_b, B_l, B_g, C_b, C_l, C_g, dy_b, dy_l, dy_h, dx_b, dx_l, dx_h,
    rate_b, rate_l, drate_b, drate_l, chunks,
    H: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    FROM_DT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of x and of dt in a chunk for a head.

    All terms of a step's gradient are added, none subtracted: what a pair of rows contributes counts for the steps
    between the two. parts: sums over the chunk for A, D and the bias.
    """
    PRODUCTS: tl.constexpr = states_BKHPN.dtype.element_ty
    SUMS: tl.constexpr = "tf32" if tl.bfloat16 == PRODUCTS else "tf32x3"
    k, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h = tl.program_id(2).to(tl.int64)
    g = h // HEADS
    p, n, t = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, T)
    row = k * T + t
    C_TN = load_rows(C + b * C_b + g * C_g, row, C_l, rows, n, N, N == BLOCK_N, PRODUCTS)
    dy_TP = load_rows(dy + b * dy_b + h * dy_h, row, dy_l, rows, p, P, P == BLOCK_P, PRODUCTS)
    state_PN, inside_PN = state_at(states_BKHPN + ((b * chunks + k) * H + h) * P * N, p, n, P, N)
    state_PN = tl.load(state_PN, mask=inside_PN, other=0.0)
    start = ((b * H + h) * chunks + k) * T
    sums, rest, weight = sums_BHL + start, rest_BHL + start, weight_BHL + start
    sums_T, rest_T = tl.load(sums + t), tl.load(rest + t)
    sum_K, rest_K = tl.load(sums + T - 1), tl.load(rest + T - 1)
    weight_S = tl.load(weight + t) if FROM_DT else tl.full((T,), 1.0, tl.float32)
    through_start_T = tl.sum(product(C_TN, tl.trans(state_PN)) * dy_TP.to(tl.float32), 1) * tl.exp2(sums_T + rest_T)
    dend_PN, _ = state_at(dends_BKHPN + ((b * chunks + k) * H + h) * P * N, p, n, P, N)
    dend_PN = tl.load(dend_PN, mask=inside_PN, other=0.0)
    step_K = tl.sum(state_PN.to(tl.float32) * dend_PN.to(tl.float32)) * tl.exp2(sum_K + rest_K)

    B_SN = load_rows(B + b * B_b + g * B_g, row, B_l, rows, n, N, N == BLOCK_N, PRODUCTS)
    x_SP = load_rows(x + b * x_b + h * x_h, row, x_l, rows, p, P, P == BLOCK_P, PRODUCTS)
    left_TS = product(C_TN, tl.trans(B_SN)) * decays_between(sums_T, rest_T, T, R)
    dinput_SP = product(B_SN, tl.trans(dend_PN)) * tl.exp2((sum_K - sums_T) + (rest_K - rest_T))[:, None]
    x_32 = x_SP.to(tl.float32)
    through_end_S = tl.sum(dinput_SP * x_32, 1) * weight_S
    dinput_SP += product(tl.trans(narrowed(left_TS, PRODUCTS)), dy_TP)
    dweight_S, skip = tl.sum(dinput_SP * x_32, 1), tl.sum(dy_TP.to(tl.float32) * x_32)
    dx_SP = dinput_SP * weight_S[:, None]
    if HAS_D:
        dx_SP += tl.load(D_H + h) * dy_TP.to(tl.float32)
    dx_SP, inside_TP = narrowed(dx_SP, dx.dtype.element_ty), (row < rows)[:, None] & (p < P)[None, :]
    tl.store(dx + b * dx_b + h * dx_h + row[:, None] * dx_l + p[None, :], dx_SP, mask=inside_TP)

    # Step I counts in pairs S < I <= T, in outputs I <= T of the start, and in inputs S < I of the end.
    pairs_TS = product(dy_TP, tl.trans(x_SP)) * left_TS * weight_S[None, :]
    from_here_IT = (t[None, :] >= t[:, None]).to(tl.float32)
    step_IS = tl.dot(from_here_IT, pairs_TS, input_precision=SUMS)
    step_IS = tl.where(t[:, None] > t[None, :], step_IS + through_end_S[None, :], through_start_T[None, :])
    drate_T = tl.sum(step_IS, 1) + step_K
    first_rows = (row < rows) & (row % R == 0)
    parts = parts_BKMH + (b * chunks + k) * 3 * H + h
    if FROM_DT:
        raw_T = tl.load(rate + b * rate_b + row // R * rate_l + h, mask=first_rows, other=0.0).to(tl.float32)
        if HAS_BIAS:
            raw_T += tl.load(bias_H + h)
        tl.store(parts, tl.sum(drate_T * weight_S))
        tl.store(parts + H, skip)
        drate_T = drate_T * tl.load(A_H + h) + dweight_S
        drate_T = tl.where(first_rows, drate_T * sigmoid(raw_T), 0.0)
        tl.store(parts + 2 * H, tl.sum(drate_T))
    drate_T = narrowed(drate_T, drate.dtype.element_ty)
    tl.store(drate + b * drate_b + row // R * drate_l + h, drate_T, mask=first_rows)


@triton.jit
def of_groups(
    x, B, C, sums_BHL, rest_BHL, weight_BHL, states_BKHPN, dends_BKHPN, dy, dB, dC,
    rows, x_b, x_l, x_h, B_b, B_l, B_g, C_b, C_l, C_g, dy_b, dy_l, dy_h, dB_b, dB_l, dC_b, dC_l, chunks,
    H: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of B and C in a chunk, for a block of states, summed over SHARE of a group's HEADS."""
    PRODUCTS: tl.constexpr = states_BKHPN.dtype.element_ty
    shares: tl.constexpr = (HEADS + SHARE - 1) // SHARE
    k, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    part = (tl.program_id(2) // blocks).to(tl.int64)
    g, share = part // shares, part % shares
    n = tl.program_id(2) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    p, t = tl.arange(0, BLOCK_P), tl.arange(0, T)
    row = k * T + t
    C_TN = load_rows(C + b * C_b + g * C_g, row, C_l, rows, n, N, N % BLOCK_N == 0, PRODUCTS)
    B_SN = load_rows(B + b * B_b + g * B_g, row, B_l, rows, n, N, N % BLOCK_N == 0, PRODUCTS)
    dB_SN = tl.zeros((T, BLOCK_N), tl.float32)
    dC_TN = tl.zeros((T, BLOCK_N), tl.float32)
    for of_group in range(share * SHARE, tl.minimum((share + 1) * SHARE, HEADS)):
        h = g * HEADS + of_group
        start = ((b * H + h) * chunks + k) * T
        sums, rest, weight = sums_BHL + start, rest_BHL + start, weight_BHL + start
        sums_T, rest_T = tl.load(sums + t), tl.load(rest + t)
        sum_K, rest_K = tl.load(sums + T - 1), tl.load(rest + T - 1)
        weight_S = tl.load(weight + t) if WEIGHTED else tl.full((T,), 1.0, tl.float32)
        dy_TP = load_rows(dy + b * dy_b + h * dy_h, row, dy_l, rows, p, P, P == BLOCK_P, PRODUCTS)
        state_PN, inside_PN = state_at(states_BKHPN + ((b * chunks + k) * H + h) * P * N, p, n, P, N)
        state_PN = tl.load(state_PN, mask=inside_PN, other=0.0)
        left_TP = narrowed(dy_TP.to(tl.float32) * tl.exp2(sums_T + rest_T)[:, None], PRODUCTS)
        dC_TN += product(left_TP, state_PN)
        x_SP = load_rows(x + b * x_b + h * x_h, row, x_l, rows, p, P, P == BLOCK_P, PRODUCTS)
        dend_PN, _ = state_at(dends_BKHPN + ((b * chunks + k) * H + h) * P * N, p, n, P, N)
        dend_PN = tl.load(dend_PN, mask=inside_PN, other=0.0)
        until_end_S = tl.exp2((sum_K - sums_T) + (rest_K - rest_T)) * weight_S
        dB_SN += product(narrowed(x_SP.to(tl.float32) * until_end_S[:, None], PRODUCTS), dend_PN)
        dscores_TS = product(dy_TP, tl.trans(x_SP)) * decays_between(sums_T, rest_T, T, R) * weight_S[None, :]
        dscores_TS = narrowed(dscores_TS, PRODUCTS)
        dC_TN += product(dscores_TS, B_SN)
        dB_SN += product(tl.trans(dscores_TS), C_TN)
    inside_TN = (row < rows)[:, None] & (n < N)[None, :]
    dB_SN, dC_TN = narrowed(dB_SN, dB.dtype.element_ty), narrowed(dC_TN, dC.dtype.element_ty)
    tl.store(dB + b * dB_b + row[:, None] * dB_l + (part * N + n)[None, :], dB_SN, mask=inside_TN)
    tl.store(dC + b * dC_b + row[:, None] * dC_l + (part * N + n)[None, :], dC_TN, mask=inside_TN)
