"""Triton kernels of the selective scan, backward, from states that the forward pass saved.

Let G[t] be the gradient of the state before token t:

    dh[t] = G[t + 1] + g[t] C[t]        G[t] = a[t] dh[t]        a = exp(delta A), g = dy silu(z)

`backward` runs backward over a chunk: STEPS states at a time are recomputed into registers, then consumed. If the
states are KEPT, it reads one every STEPS tokens, and also writes the gradients of z and D. A chunk may then be a whole
sequence.

If there are several chunks, they run in parallel. First `chunk_parts` runs forward in time over each, and sums its
contribution to G, which is sum a[first] .. a[t] g[t] C[t]. `carry` chains the chunks. Unless the states are KEPT,
`chunk_parts` also recomputes them from one a chunk, stores one every STEPS tokens, and writes the gradients of z and
D.

No kernel uses atomic additions, so results are reproducible bit for bit. Each block of channels writes a partial sum of
dB and dC, and each chunk writes one of dA, dD and the bias. They are summed afterwards in a fixed order.

Shapes: B batch, L length, G chunks, I channels, N state, K blocks of channels. States lie as [.., N, I].
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.selective_scan.triton_step import decay, load_row, save_state, state_at, time_step
from megatron_blackmamba.ops.triton_math import (
    LN2,
    LOG2E,
    load_channels,
    load_tokens,
    sigmoid,
    store_token,
    store_tokens,
    sum_of_rows,
)

SIZES_OF_PARTS = ["L", "u_b", "delta_b", "z_b", "dy_b", "dz_b"]
SIZES = [*SIZES_OF_PARTS, "raw_b", "du_b", "chunk_length"]  # the gradient of delta lies as du does


@triton.jit(do_not_specialize=SIZES_OF_PARTS)
def chunk_parts(
    u, delta, z, dy, A_NI, BC, D, bias, reset, checkpoints_BGNI,
    parts_BGNI, decays_BGNI, states_BTNI, dz, dD_BGI,
    L, u_b, delta_b, z_b, dy_b, dz_b,
    I: tl.constexpr, U_L: tl.constexpr, DELTA_L: tl.constexpr, Z_L: tl.constexpr, DY_L: tl.constexpr,
    DZ_L: tl.constexpr,
    N: tl.constexpr, BLOCK_I: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESET: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Sum what a chunk adds to the gradient of its first state; unless the states are KEPT, recompute them too."""
    b, chunk = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = i < I
    n = tl.arange(0, N)
    chunk_BG = b * tl.num_programs(2) + chunk
    rate_NI = tl.load(state_at(A_NI, n, i, I, True), mask=inside[None, :], other=0.0) * LOG2E
    D_I = load_channels(D, i, inside, HAS_D, BLOCK_I)
    bias_I = load_channels(bias, i, inside, HAS_BIAS, BLOCK_I)
    if not KEPT:
        h_NI = tl.load(state_at(checkpoints_BGNI + chunk_BG * N * I, n, i, I, True), mask=inside[None, :], other=0.0)
    product_NI = tl.full((N, BLOCK_I), 1.0, tl.float32)
    part_NI = tl.zeros((N, BLOCK_I), tl.float32)
    dD_I = tl.zeros((BLOCK_I,), tl.float32)

    u += b * u_b
    delta += b * delta_b
    z += b * z_b
    dy += b * dy_b
    dz += b * dz_b
    BC += b * L * (2 * N)
    reset += b * L
    states_BTNI += b * tl.cdiv(L, STEPS) * N * I
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, L)
    for t in range(first, last, STEPS):
        if not KEPT:
            save_state(states_BTNI + t // STEPS * N * I, h_NI, n, i, inside, I, EVEN)
            us = load_tokens(u, U_L, t, last, i, inside, STEPS, EVEN)
        deltas = load_tokens(delta, DELTA_L, t, last, i, inside, STEPS, EVEN)
        dys = load_tokens(dy, DY_L, t, last, i, inside, STEPS, EVEN)
        if HAS_Z:
            zs = load_tokens(z, Z_L, t, last, i, inside, STEPS, EVEN)
            dzs = ()
        for k in tl.static_range(STEPS):
            row = t + k if EVEN else tl.minimum(t + k, last - 1)
            C_N = tl.load(BC + row * (2 * N) + N + n)
            delta_I = time_step(deltas[k], bias_I, t + k, last, SOFTPLUS, EVEN)
            g_I = dys[k].to(tl.float32) if EVEN else tl.where(t + k < last, dys[k].to(tl.float32), 0.0)
            a_NI = decay(delta_I, rate_NI, reset, t + k, last, HAS_RESET, EVEN)
            if not KEPT:
                u_I = us[k].to(tl.float32)
                h_NI = a_NI * h_NI + (delta_I * u_I)[None, :] * tl.load(BC + row * (2 * N) + n)[:, None]
            if HAS_Z:
                z_I = zs[k].to(tl.float32)
                gate_I = sigmoid(z_I)
            if HAS_Z and not KEPT:
                y_I = tl.sum(h_NI * C_N[:, None], 0) + D_I * u_I
                dzs = dzs + (g_I * y_I * gate_I * (1.0 + z_I * (1.0 - gate_I)),)
            if HAS_Z:
                g_I *= z_I * gate_I
            product_NI *= a_NI
            part_NI += product_NI * (g_I[None, :] * C_N[:, None])
            if not KEPT:
                dD_I += g_I * u_I
        if HAS_Z and not KEPT:
            store_tokens(dz, DZ_L, dzs, t, last, i, inside, STEPS, EVEN)
    tl.store(state_at(parts_BGNI + chunk_BG * N * I, n, i, I, True), part_NI, mask=inside[None, :])
    tl.store(state_at(decays_BGNI + chunk_BG * N * I, n, i, I, True), product_NI, mask=inside[None, :])
    if not KEPT:
        tl.store(dD_BGI + chunk_BG * I + i, dD_I, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def backward(
    u, delta, z, dy, A_NI, BC, D, bias, reset, carried_BGNI, states_BTNI, raw_y,
    du, ddelta, dz, dA_BGNI, dBC_KBLM, dD_BGI, dbias_BGI, dstart_BNI,
    L, u_b, delta_b, z_b, dy_b, dz_b, raw_b, du_b, chunk_length,
    I: tl.constexpr, U_L: tl.constexpr, DELTA_L: tl.constexpr, Z_L: tl.constexpr, DY_L: tl.constexpr,
    RAW_L: tl.constexpr, DZ_L: tl.constexpr, DU_L: tl.constexpr,
    N: tl.constexpr, BLOCK_I: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESET: tl.constexpr,
    KEPT: tl.constexpr, HAS_END: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one chunk; if the states are KEPT, also of z, D and the initial state."""
    b, chunk = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = i < I
    n = tl.arange(0, N)
    chunk_BG = b * tl.num_programs(2) + chunk
    rate_NI = tl.load(state_at(A_NI, n, i, I, False), mask=inside[None, :], other=0.0) * LOG2E
    D_I = load_channels(D, i, inside, HAS_D, BLOCK_I)
    bias_I = load_channels(bias, i, inside, HAS_BIAS, BLOCK_I)
    G_NI = tl.zeros((N, BLOCK_I), tl.float32)
    if HAS_END:
        G_NI = tl.load(state_at(carried_BGNI + chunk_BG * N * I, n, i, I, False), mask=inside[None, :], other=0.0)
    dA_NI = tl.zeros((N, BLOCK_I), tl.float32)
    dD_I = tl.zeros((BLOCK_I,), tl.float32)
    dbias_I = tl.zeros((BLOCK_I,), tl.float32)

    u += b * u_b
    delta += b * delta_b
    z += b * z_b
    dy += b * dy_b
    raw_y += b * raw_b
    dz += b * dz_b
    du += b * du_b
    ddelta += b * du_b
    BC += b * L * (2 * N)
    dBC_KBLM += (tl.program_id(0) * tl.num_programs(1).to(tl.int64) + b) * L * (2 * N)
    reset += b * L
    states_BTNI += b * tl.cdiv(L, STEPS) * N * I
    first = chunk * chunk_length
    last = tl.minimum(first + chunk_length, L)
    for back in range(tl.cdiv(last - first, STEPS)):
        t = first + (tl.cdiv(last - first, STEPS) - 1 - back) * STEPS
        states_NI = state_at(states_BTNI + t // STEPS * N * I, n, i, I, False)
        h_NI = (tl.load(states_NI) if EVEN else tl.load(states_NI, mask=inside[None, :], other=0.0)).to(tl.float32)
        us = load_tokens(u, U_L, t, last, i, inside, STEPS, EVEN)
        raws = load_tokens(delta, DELTA_L, t, last, i, inside, STEPS, EVEN)
        dys = load_tokens(dy, DY_L, t, last, i, inside, STEPS, EVEN)
        if HAS_Z:
            zs = load_tokens(z, Z_L, t, last, i, inside, STEPS, EVEN)
            if KEPT:
                raw_ys = load_tokens(raw_y, RAW_L, t, last, i, inside, STEPS, EVEN)
        deltas, inputs = (), ()
        for k in tl.static_range(STEPS):
            deltas = deltas + (time_step(raws[k], bias_I, t + k, last, SOFTPLUS, EVEN),)
            inputs = inputs + (deltas[k] * us[k].to(tl.float32),)
        hs = (h_NI,)  # the state before each token, and after the last
        for k in tl.static_range(STEPS):
            a_NI = decay(deltas[k], rate_NI, reset, t + k, last, HAS_RESET, EVEN)
            h_NI = a_NI * h_NI + inputs[k][None, :] * load_row(BC, t + k, last, n, 2 * N, EVEN)[:, None]
            hs = hs + (h_NI,)
        for k in tl.static_range(STEPS - 1, -1, -1):
            g_I = dys[k].to(tl.float32) if EVEN else tl.where(t + k < last, dys[k].to(tl.float32), 0.0)
            if HAS_Z:
                z_I = zs[k].to(tl.float32)
                gate_I = sigmoid(z_I)
                if KEPT:
                    dz_I = g_I * raw_ys[k].to(tl.float32) * gate_I * (1.0 + z_I * (1.0 - gate_I))
                    store_token(dz, DZ_L, dz_I, t + k, last, i, inside, EVEN)
                g_I *= z_I * gate_I
            if KEPT:
                dD_I += g_I * us[k].to(tl.float32)
            dh_NI = G_NI + g_I[None, :] * load_row(BC + N, t + k, last, n, 2 * N, EVEN)[:, None]
            dB_N = tl.sum(dh_NI * inputs[k][None, :], 1)
            dC_N = tl.sum(g_I[None, :] * hs[k + 1], 1)
            dBC = dBC_KBLM + (t + k) * (2 * N) + n
            if EVEN:
                tl.store(dBC, dB_N)
                tl.store(dBC + N, dC_N)
            else:
                tl.store(dBC, dB_N, mask=(n < N) & (t + k < last))
                tl.store(dBC + N, dC_N, mask=(n < N) & (t + k < last))
            G_NI = decay(deltas[k], rate_NI, reset, t + k, last, HAS_RESET, EVEN) * dh_NI
            dinput_I = tl.sum(dh_NI * load_row(BC, t + k, last, n, 2 * N, EVEN)[:, None], 0)
            through_decay_NI = G_NI * hs[k]
            dA_NI += through_decay_NI * deltas[k][None, :]
            ddelta_I = tl.sum(through_decay_NI * rate_NI, 0) * LN2 + dinput_I * us[k].to(tl.float32)
            if SOFTPLUS:
                ddelta_I *= sigmoid(raws[k].to(tl.float32) + bias_I)
            if not EVEN:
                ddelta_I = tl.where(t + k < last, ddelta_I, 0.0)
            dbias_I += ddelta_I
            store_token(du, DU_L, dinput_I * deltas[k] + g_I * D_I, t + k, last, i, inside, EVEN)
            store_token(ddelta, DU_L, ddelta_I, t + k, last, i, inside, EVEN)
    tl.store(state_at(dA_BGNI + chunk_BG * N * I, n, i, I, False), dA_NI, mask=inside[None, :])
    tl.store(dbias_BGI + chunk_BG * I + i, dbias_I, mask=inside)
    if KEPT:
        tl.store(dD_BGI + chunk_BG * I + i, dD_I, mask=inside)
        if chunk == 0:
            tl.store(state_at(dstart_BNI + b * N * I, n, i, I, False), G_NI, mask=inside[None, :])


@triton.jit(do_not_specialize=["P"])
def add_up(
    dA_PNI, dD_PI, dbias_PI, A_IN, sum_A_IN, sum_D_I, sum_bias_I, P, of_A,
    HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, LOG_A: tl.constexpr,
    I: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the parts of sequences and chunks: `of_A` programs the gradients of A, the others those of D and bias."""
    if tl.program_id(0) < of_A:
        x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside, at = x < N * I, (x % I) * N + x // I
        sums = sum_of_rows(dA_PNI, P, N * I, x, inside, BLOCK)
        if LOG_A:
            sums *= -tl.exp2(tl.load(A_IN + at, mask=inside, other=0.0) * LOG2E)
        tl.store(sum_A_IN + at, sums.to(sum_A_IN.dtype.element_ty), mask=inside)
    else:
        i = (tl.program_id(0) - of_A) * BLOCK + tl.arange(0, BLOCK)
        if HAS_D:
            sums = sum_of_rows(dD_PI, P, I, i, i < I, BLOCK)
            tl.store(sum_D_I + i, sums.to(sum_D_I.dtype.element_ty), mask=i < I)
        if HAS_BIAS:
            sums = sum_of_rows(dbias_PI, P, I, i, i < I, BLOCK)
            tl.store(sum_bias_I + i, sums.to(sum_bias_I.dtype.element_ty), mask=i < I)
