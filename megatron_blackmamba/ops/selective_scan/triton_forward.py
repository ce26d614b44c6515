"""Triton kernels of the selective scan, forward: one pass, or segments of the sequence in parallel.

One pass fills the GPU if there are enough channels. Otherwise `segment_ends` computes how much each segment adds to
the state, and by how much it decays. `carry` chains these into the initial state of each segment, the only sequential
part, which is tiny. `forward` then runs all segments at once.

A thread owns whole channels, so the sum over the state stays in its registers. All channels share B and C, which are
read once per warp instead of once per channel.

Shapes: B batch, L length, S segments, I channels, N state, G checkpoints. States lie as [.., N, I].
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.selective_scan.triton_step import decay, reset_exponent, save_state, state_at, time_step
from megatron_blackmamba.ops.triton_math import LOG2E, load_channels, load_tokens, sigmoid, store_tokens

SIZES = ["L", "u_b", "delta_b", "z_b", "y_b", "segment"]


@triton.jit(do_not_specialize=SIZES)
def forward(
    u, delta, z, A_NI, BC, D, bias, reset, starts_BSNI, y, raw_y, saved_BGNI, final_BNI,
    L, u_b, delta_b, z_b, y_b, segment,
    I: tl.constexpr, U_L: tl.constexpr, DELTA_L: tl.constexpr, Z_L: tl.constexpr, Y_L: tl.constexpr,
    N: tl.constexpr, BLOCK_I: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESET: tl.constexpr,
    HAS_START: tl.constexpr, SAVE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Compute y for one segment and a block of channels.

    For the backward pass, SAVE stores the state every CHUNK tokens. With KEEP > 0 it does so every KEEP tokens instead,
    and also stores y before the gate.
    """
    b, s = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = i < I
    n = tl.arange(0, N)
    rate_NI = tl.load(state_at(A_NI, n, i, I, True), mask=inside[None, :], other=0.0) * LOG2E
    D_I = load_channels(D, i, inside, HAS_D, BLOCK_I)
    bias_I = load_channels(bias, i, inside, HAS_BIAS, BLOCK_I)
    h_NI = tl.zeros((N, BLOCK_I), tl.float32)
    if HAS_START:
        starts_BSNI += (b * tl.num_programs(2) + s) * N * I
        h_NI = tl.load(state_at(starts_BSNI, n, i, I, True), mask=inside[None, :], other=0.0)

    u += b * u_b
    delta += b * delta_b
    z += b * z_b
    BC += b * L * (2 * N)
    y += b * y_b
    reset += b * L
    raw_y += b * y_b
    saved_BGNI += b * tl.cdiv(L, KEEP if KEEP else CHUNK) * N * I
    first = s * segment
    last = tl.minimum(first + segment, L)
    next_u = load_tokens(u, U_L, first, last, i, inside, STEPS, EVEN)
    next_delta = load_tokens(delta, DELTA_L, first, last, i, inside, STEPS, EVEN)
    next_z = load_tokens(z, Z_L, first, last, i, inside, STEPS, EVEN)
    for chunk in range(first, last, CHUNK):
        if SAVE and not KEEP:
            save_state(saved_BGNI + chunk // CHUNK * N * I, h_NI, n, i, inside, I, EVEN)
        for t in range(chunk, tl.minimum(chunk + CHUNK, last), STEPS):
            us, deltas, zs = next_u, next_delta, next_z
            next_u = load_tokens(u, U_L, t + STEPS, last, i, inside, STEPS, EVEN)
            next_delta = load_tokens(delta, DELTA_L, t + STEPS, last, i, inside, STEPS, EVEN)
            if HAS_Z:
                next_z = load_tokens(z, Z_L, t + STEPS, last, i, inside, STEPS, EVEN)
            ys, raw_ys = (), ()
            for k in tl.static_range(STEPS):
                if SAVE and KEEP and k % KEEP == 0:
                    state = saved_BGNI + (t + k) // KEEP * N * I
                    save_state(state, h_NI, n, i, inside & (t + k < last), I, EVEN)
                row = t + k if EVEN else tl.minimum(t + k, last - 1)
                B_N = tl.load(BC + row * (2 * N) + n)
                C_N = tl.load(BC + row * (2 * N) + N + n)
                u_I = us[k].to(tl.float32)
                delta_I = time_step(deltas[k], bias_I, t + k, last, SOFTPLUS, EVEN)
                h_NI = (
                    decay(delta_I, rate_NI, reset, t + k, last, HAS_RESET, EVEN) * h_NI
                    + (delta_I * u_I)[None, :] * B_N[:, None]
                )
                y_I = tl.sum(h_NI * C_N[:, None], 0)
                if HAS_D:
                    y_I += D_I * u_I
                if HAS_Z:
                    raw_ys = raw_ys + (y_I,)
                    z_I = zs[k].to(tl.float32)
                    y_I *= z_I * sigmoid(z_I)
                ys = ys + (y_I,)
            store_tokens(y, Y_L, ys, t, last, i, inside, STEPS, EVEN)
            if SAVE and KEEP and HAS_Z:
                store_tokens(raw_y, Y_L, raw_ys, t, last, i, inside, STEPS, EVEN)
    if last == L:
        tl.store(state_at(final_BNI + b * N * I, n, i, I, True), h_NI, mask=inside[None, :])


@triton.jit(do_not_specialize=["L", "u_b", "delta_b", "segment"])
def segment_ends(
    u, delta, A_NI, BC, bias, reset, ends_BSNI, decays_BSNI,
    L, u_b, delta_b, segment,
    I: tl.constexpr, U_L: tl.constexpr, DELTA_L: tl.constexpr,
    N: tl.constexpr, BLOCK_I: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESET: tl.constexpr,
):  # fmt: skip
    """Compute a segment's final state from a zero start, and the factor by which its start decays."""
    b, s = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = i < I
    n = tl.arange(0, N)
    rate_NI = tl.load(state_at(A_NI, n, i, I, True), mask=inside[None, :], other=0.0) * LOG2E
    bias_I = load_channels(bias, i, inside, HAS_BIAS, BLOCK_I)
    h_NI = tl.zeros((N, BLOCK_I), tl.float32)
    duration_I = tl.zeros((BLOCK_I,), tl.float32)
    forgotten = 0.0

    u += b * u_b
    delta += b * delta_b
    BC += b * L * (2 * N)
    reset += b * L
    first = s * segment
    last = tl.minimum(first + segment, L)
    next_u = load_tokens(u, U_L, first, last, i, inside, STEPS, EVEN)
    next_delta = load_tokens(delta, DELTA_L, first, last, i, inside, STEPS, EVEN)
    for t in range(first, last, STEPS):
        us, deltas = next_u, next_delta
        next_u = load_tokens(u, U_L, t + STEPS, last, i, inside, STEPS, EVEN)
        next_delta = load_tokens(delta, DELTA_L, t + STEPS, last, i, inside, STEPS, EVEN)
        for k in tl.static_range(STEPS):
            row = t + k if EVEN else tl.minimum(t + k, last - 1)
            B_N = tl.load(BC + row * (2 * N) + n)
            delta_I = time_step(deltas[k], bias_I, t + k, last, SOFTPLUS, EVEN)
            duration_I += delta_I
            if HAS_RESET:
                forgotten = tl.minimum(forgotten, reset_exponent(reset, t + k, last, EVEN))
            input_I = delta_I * us[k].to(tl.float32)
            h_NI = decay(delta_I, rate_NI, reset, t + k, last, HAS_RESET, EVEN) * h_NI + input_I[None, :] * B_N[:, None]
    segment_BS = (b * tl.num_programs(2) + s) * N * I
    tl.store(state_at(ends_BSNI + segment_BS, n, i, I, True), h_NI, mask=inside[None, :])
    decay_NI = tl.exp2(duration_I[None, :] * rate_NI + forgotten)
    tl.store(state_at(decays_BSNI + segment_BS, n, i, I, True), decay_NI, mask=inside[None, :])


@triton.jit(do_not_specialize=["S", "states"])
def carry(
    parts_BSX,
    decays_BSX,
    start_BX,
    end_BX,
    S,
    states,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_START: tl.constexpr,
):
    """Replace what each segment adds by what it starts with: start[s + 1] = part[s] + decay[s] start[s]. X = N * I."""
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1).to(tl.int64)
    inside = x < states
    carried_X = tl.zeros((BLOCK,), tl.float32)
    if HAS_START:
        carried_X = tl.load(start_BX + b * states + x, mask=inside, other=0.0)
    for step in range(S):
        s = S - 1 - step if REVERSE else step
        at = (b * S + s) * states + x
        part_X = tl.load(parts_BSX + at, mask=inside, other=0.0)
        decay_X = tl.load(decays_BSX + at, mask=inside, other=0.0)
        tl.store(parts_BSX + at, carried_X, mask=inside)
        carried_X = part_X + decay_X * carried_X
    tl.store(end_BX + b * states + x, carried_X, mask=inside)
