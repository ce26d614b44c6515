"""Triton kernels of the SSD scan, forward: sums of steps in chunks, states between chunks, and outputs.

A chunk has T rows: tokens, or the R rows of fewer tokens. Steps are in units of log 2. A decay is a power of two of a
sum of steps, which must keep the digits of small steps next to large ones. Sums over a chunk are therefore added in
float64 and split into two fp32 numbers, `sums` and `rest`. Differences of both, added, are as exact as fp32 can be.

A step below FORGOTTEN counts as FORGOTTEN, and so does a reset: the decay is exactly zero in fp32 either way.

Shapes: B batch, L length, H heads, P channels of a head, N state, K chunks, T and S rows of a chunk.
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.triton_math import FORGOTTEN, LOG2E, load_rows, narrowed, product, softplus


@triton.jit
def state_at(states, p, n, P: tl.constexpr, N: tl.constexpr):
    """Return pointers to a head's state, and which of them exist."""
    return states + p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]


@triton.jit
def decays_between(sums_T, rest_T, T: tl.constexpr, R: tl.constexpr):
    """Return how much of row S is left at row T, nothing of rows of later tokens."""
    token = tl.arange(0, T) // R
    exponent_TS = (sums_T[:, None] - sums_T[None, :]) + (rest_T[:, None] - rest_T[None, :])
    return tl.exp2(tl.where(token[:, None] >= token[None, :], exponent_TS, float("-inf")))


@triton.jit
def sum_steps(
    rate, A_H, bias_H, reset, sums_BHL, rest_BHL, weight_BHL,
    L, rate_b, rate_l, chunks,
    H: tl.constexpr, R: tl.constexpr, T: tl.constexpr, BLOCK_H: tl.constexpr,
    FROM_DT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESET: tl.constexpr,
):  # fmt: skip
    """Sum the steps of a chunk up to each row. Compute them, and the weights of inputs, from dt, or take them."""
    k, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = k * T + tl.arange(0, T)
    token = row // R
    inside_T, inside_H = token < L, h < H
    inside_TH = inside_T[:, None] & inside_H[None, :]
    at_TH = ((b * H + h) * chunks * T)[None, :] + row[:, None]
    step_TH = tl.load(rate + b * rate_b + token[:, None] * rate_l + h[None, :], mask=inside_TH, other=0.0)
    step_TH = step_TH.to(tl.float32)
    if FROM_DT:
        if HAS_BIAS:
            step_TH += tl.load(bias_H + h, mask=inside_H, other=0.0)[None, :]
        step_TH = tl.where(inside_TH, softplus(step_TH), 0.0)
        tl.store(weight_BHL + at_TH, step_TH, mask=inside_H[None, :])
        step_TH *= tl.load(A_H + h, mask=inside_H, other=0.0)[None, :]
    step_TH *= LOG2E
    step_TH = tl.where(step_TH < FORGOTTEN, FORGOTTEN, step_TH)
    if HAS_RESET:
        is_reset_T = tl.load(reset + b * L + token, mask=inside_T, other=0) != 0
        step_TH = tl.where(is_reset_T[:, None], FORGOTTEN, step_TH)
    if R > 1:
        step_TH = tl.where((row % R == 0)[:, None], step_TH, 0.0)
    exact_TH = tl.cumsum(step_TH.to(tl.float64), 0)
    sums_TH = exact_TH.to(tl.float32)
    rest_TH = (exact_TH - sums_TH.to(tl.float64)).to(tl.float32)
    tl.store(sums_BHL + at_TH, sums_TH, mask=inside_H[None, :])
    tl.store(rest_BHL + at_TH, rest_TH, mask=inside_H[None, :])


@triton.jit
def pass_states(
    x, B, sums_BHL, rest_BHL, weight_BHL, start_BHPN, states_BKHPN, end_BHPN,
    rows, x_b, x_l, x_h, B_b, B_l, B_g, chunks,
    H: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    REVERSE: tl.constexpr, WEIGHTED: tl.constexpr, HAS_START: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks of a head, and save the state before each.

    REVERSE: x and B are the gradient of y, and C; then it saves the gradient of the state behind each chunk. HEADS
    are those of a group.
    """
    PRODUCTS: tl.constexpr = states_BKHPN.dtype.element_ty
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    b, h = tl.program_id(1).to(tl.int64), (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    p, t = tl.arange(0, BLOCK_P), tl.arange(0, T)
    head = (b * H + h) * P * N
    x += b * x_b + h * x_h
    B += b * B_b + h // HEADS * B_g
    at_T = (b * H + h) * chunks * T + t
    state_PN = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if HAS_START:
        start_PN, inside_PN = state_at(start_BHPN + head, p, n, P, N)
        state_PN = tl.load(start_PN, mask=inside_PN, other=0.0)
    for step in range(chunks):
        k = tl.cast(chunks - 1 - step if REVERSE else step, tl.int64)
        saved_PN, inside_PN = state_at(states_BKHPN + ((b * chunks + k) * H + h) * P * N, p, n, P, N)
        if SAVE:
            tl.store(saved_PN, narrowed(state_PN, PRODUCTS), mask=inside_PN)
        x_TP = load_rows(x, k * T + t, x_l, rows, p, P, P == BLOCK_P, PRODUCTS)
        B_TN = load_rows(B, k * T + t, B_l, rows, n, N, N % BLOCK_N == 0, PRODUCTS)
        sums_T, rest_T = tl.load(sums_BHL + at_T + k * T), tl.load(rest_BHL + at_T + k * T)
        last = (b * H + h) * chunks * T + k * T + T - 1
        sum_K, rest_K = tl.load(sums_BHL + last), tl.load(rest_BHL + last)
        factor_T = sums_T + rest_T if REVERSE else (sum_K - sums_T) + (rest_K - rest_T)
        factor_T = tl.exp2(factor_T)
        if WEIGHTED:
            factor_T *= tl.load(weight_BHL + at_T + k * T)
        x_TP = narrowed(x_TP.to(tl.float32) * factor_T[:, None], PRODUCTS)
        state_PN = tl.exp2(sum_K + rest_K) * state_PN + product(tl.trans(x_TP), B_TN)
    end_PN, inside_PN = state_at(end_BHPN + head, p, n, P, N)
    tl.store(end_PN, state_PN, mask=inside_PN)


@triton.jit
def outputs(
    x, B, C, D_H, sums_BHL, rest_BHL, weight_BHL, states_BKHPN, y,
    rows, x_b, x_l, x_h, B_b, B_l, B_g, C_b, C_l, C_g, y_b, y_l, y_h, chunks,
    H: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    WEIGHTED: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a chunk for SHARE of a group's HEADS, from its rows and the states before it."""
    PRODUCTS: tl.constexpr = states_BKHPN.dtype.element_ty
    shares: tl.constexpr = (HEADS + SHARE - 1) // SHARE
    k, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    g, share = (tl.program_id(2) // shares).to(tl.int64), tl.program_id(2) % shares
    p, n, row = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), k * T + tl.arange(0, T)
    C_TN = load_rows(C + b * C_b + g * C_g, row, C_l, rows, n, N, N == BLOCK_N, PRODUCTS)
    B_SN = load_rows(B + b * B_b + g * B_g, row, B_l, rows, n, N, N == BLOCK_N, PRODUCTS)
    scores_TS = product(C_TN, tl.trans(B_SN))
    inside_TP = (row < rows)[:, None] & (p < P)[None, :]
    for of_group in range(share * SHARE, tl.minimum((share + 1) * SHARE, HEADS)):
        h = g * HEADS + of_group
        at_T = (b * H + h) * chunks * T + row
        x_TP = load_rows(x + b * x_b + h * x_h, row, x_l, rows, p, P, P == BLOCK_P, PRODUCTS)
        state_PN, inside_PN = state_at(states_BKHPN + ((b * chunks + k) * H + h) * P * N, p, n, P, N)
        state_PN = tl.load(state_PN, mask=inside_PN, other=0.0)
        sums_T, rest_T = tl.load(sums_BHL + at_T), tl.load(rest_BHL + at_T)
        left_TS = decays_between(sums_T, rest_T, T, R) * scores_TS
        if WEIGHTED:
            left_TS *= tl.load(weight_BHL + at_T)[None, :]
        y_TP = product(C_TN, tl.trans(state_PN)) * tl.exp2(sums_T + rest_T)[:, None]
        y_TP += product(narrowed(left_TS, PRODUCTS), x_TP)
        if HAS_D:
            y_TP += tl.load(D_H + h) * x_TP.to(tl.float32)
        y_TP = narrowed(y_TP, y.dtype.element_ty)
        tl.store(y + b * y_b + h * y_h + row[:, None] * y_l + p[None, :], y_TP, mask=inside_TP)
