"""Triton kernels of the delta rule, forward: the terms of each chunk, states between chunks, and outputs.

A chunk has T tokens. What its tokens change in the state solves a unit triangular system (`ops/delta/chunked.py`).
Blocks of tokens double, from one token to half a chunk, in two places:

    decays for each key channel   the older half of a pair of blocks meets the newer half at the border between them
    the inverse of the system     from the inverses X and Z of two blocks and what is left of one under the other, Y,
                                  follows the inverse of both: X, Z, and -Z @ Y @ X

Each doubling is a product of whole chunks in which a mask leaves the pairs of that level. Steps are in units of log 2.
A decay is a power of two of a sum of steps, never of a difference, so small steps keep their digits beside large ones.
A step below FORGOTTEN counts as FORGOTTEN, and so does a reset: the decay is exactly zero in fp32 either way.

Shapes: B batch, L length, N chunks, H heads, T and S tokens of a chunk, I steps of a chunk, K key channels of a head,
V value channels, D decays of a head: 1 or K.
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.triton_math import FORGOTTEN, LOG2E, load_rows, narrowed, product


@triton.jit
def load_tile(tiles, column, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load columns of a matrix in fp32, zeros past the last one."""
    return load_rows(tiles, tl.arange(0, ROWS), WIDTH, ROWS, column, WIDTH, WIDTH % BLOCK == 0, tl.float32)


@triton.jit
def store_rows(rows, row, stride, count, column, value, WIDTH: tl.constexpr):
    """Store rows of a tensor, none past the last row and column."""
    inside = (row < count)[:, None] & (column < WIDTH)[None, :]
    tl.store(rows + row[:, None] * stride + column[None, :], narrowed(value, rows.dtype.element_ty), mask=inside)


@triton.jit
def load_state(states, k, v, K: tl.constexpr, V: tl.constexpr):
    """Load a block of a head's state."""
    return tl.load(states + k[:, None] * V + v[None, :], mask=(k < K)[:, None] & (v < V)[None, :], other=0.0)


@triton.jit
def store_state(states, k, v, state_KV, K: tl.constexpr, V: tl.constexpr):
    tl.store(states + k[:, None] * V + v[None, :], state_KV, mask=(k < K)[:, None] & (v < V)[None, :])


@triton.jit
def load_steps(log_decay, reset, row, stride, L, d, D: tl.constexpr, HAS_RESET: tl.constexpr):
    """Load the logarithms of decays, `[T, D]`: none past the last token, FORGOTTEN at the start of a document."""
    step_TD = load_rows(log_decay, row, stride, L, d, D, D == 1, tl.float32) * LOG2E
    step_TD = tl.where(step_TD < FORGOTTEN, FORGOTTEN, step_TD)
    if HAS_RESET:
        is_reset_T = tl.load(reset + row, mask=row < L, other=0) != 0
        step_TD = tl.where(is_reset_T[:, None], FORGOTTEN, step_TD)
    return step_TD


@triton.jit
def summed(which_TI, x_IK):
    """Multiply by a matrix of zeros and ones, as exactly as fp32 is."""
    high_IK = (x_IK.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # what TF32 holds
    which_TI = which_TI.to(tl.float32)
    return tl.dot(which_TI, high_IK, input_precision="tf32") + tl.dot(which_TI, x_IK - high_IK, input_precision="tf32")


@triton.jit
def channels_of(c, BY_CHANNEL: tl.constexpr):
    """Return the decays of key channels."""
    if BY_CHANNEL:
        found = c
    else:
        found = tl.arange(0, 1)
    return found


@triton.jit
def total(which_TI, step_TD, BY_CHANNEL: tl.constexpr):
    """Return the sum of some steps for each token."""
    if BY_CHANNEL:
        sum_TD = summed(which_TI, step_TD)
    else:
        sum_TD = tl.sum(tl.where(which_TI, tl.trans(step_TD), 0.0), 1)[:, None]
    return sum_TD


@triton.jit
def since(step_TD, T: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Return the decays since the start of the chunk."""
    t = tl.arange(0, T)
    return tl.exp2(total(t[:, None] >= t[None, :], step_TD, BY_CHANNEL))


@triton.jit
def until(step_TD, T: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Return the decays of later tokens until the end of the chunk."""
    t = tl.arange(0, T)
    return tl.exp2(total(t[:, None] < t[None, :], step_TD, BY_CHANNEL))


@triton.jit
def decays_between(step_T1, T: tl.constexpr):
    """Return how much of token S is left at token T by one decay a head, nothing of later tokens.

    Sums are added in float64 and split into two fp32 numbers, so that their differences are as exact as fp32 can be.
    """
    t = tl.arange(0, T)
    exact_T1 = tl.cumsum(step_T1.to(tl.float64), 0)
    sum_T1 = exact_T1.to(tl.float32)
    rest_T1 = (exact_T1 - sum_T1.to(tl.float64)).to(tl.float32)
    exponent_TS = (sum_T1 - tl.trans(sum_T1)) + (rest_T1 - tl.trans(rest_T1))
    return tl.exp2(tl.where(t[:, None] >= t[None, :], exponent_TS, float("-inf")))


@triton.jit
def reach_at(level, T: tl.constexpr):
    """Return the first and last step between each token and the border of its pair of blocks of 2^level tokens.

    A token of the newer block counts its own step, one of the older block does not.
    """
    t = tl.arange(0, T)
    start, newer = t >> level << level, (t >> level & 1) == 1
    return tl.where(newer, start, t + 1), tl.where(newer, t, start + (1 << level) - 1)


@triton.jit
def met_at(level, T: tl.constexpr):
    """Return the first and last token of the older block that each token of a newer block meets; others meet none."""
    t = tl.arange(0, T)
    start, newer = t >> level << level, (t >> level & 1) == 1
    return tl.where(newer, start - (1 << level), T), start - 1


@triton.jit
def within(first_T, last_T, T: tl.constexpr):
    """Return which numbers of the second dimension are between those of the first."""
    i = tl.arange(0, T)[None, :]
    return (i >= first_T[:, None]) & (i <= last_T[:, None])


@triton.jit
def load_met(met_TS, level, T: tl.constexpr):
    """Load the numbers of pairs of tokens that meet at a level, zeros for all others. Registers hold one level."""
    t = tl.arange(0, T)
    first_T, last_T = met_at(level, T)
    return tl.load(met_TS + t[:, None] * T + t[None, :], mask=within(first_T, last_T, T), other=0.0)


@triton.jit
def inverse_of(left_TS, T: tl.constexpr, LEVELS: tl.constexpr):
    """Return the inverse of the unit matrix plus what is below the diagonal of a matrix in memory."""
    t = tl.arange(0, T)
    inverse_TS = (t[:, None] == t[None, :]).to(tl.float32)
    for level in range(LEVELS):
        inverse_TS -= product(inverse_TS, product(load_met(left_TS, level, T), inverse_TS))
    return inverse_TS


@triton.jit
def weigh(
    q, k, erase, log_decay, reset, since_NTK, of_e_NTK, kept_NTK, total_ND,
    L, q_b, q_l, q_h, k_b, k_l, k_h, erase_b, erase_l, erase_h, decay_b, decay_l, decay_h, chunks,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    BLOCK_K: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_RESET: tl.constexpr,
):  # fmt: skip
    """Compute what meets states: q and e with the decays since the start of a chunk, k with those until its end.

    total: the decays of the whole chunk.
    """
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, c = (tl.program_id(2) // blocks).to(tl.int64), tl.program_id(2) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    t, d = tl.arange(0, T), channels_of(c, BY_CHANNEL)
    row, chunk = n * T + t, (b * chunks + n) * H + h
    step_TD = load_steps(log_decay + b * decay_b + h * decay_h, reset + b * L, row, decay_l, L, d, D, HAS_RESET)
    since_TD = since(step_TD, T, BY_CHANNEL)
    q_TK = load_rows(q + b * q_b + h * q_h, row, q_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    store_rows(since_NTK + chunk * T * K, t, K, T, c, q_TK * since_TD, K)
    e_TK = load_rows(erase + b * erase_b + h * erase_h, row, erase_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    store_rows(of_e_NTK + chunk * T * K, t, K, T, c, e_TK * since_TD, K)
    k_TK = load_rows(k + b * k_b + h * k_h, row, k_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    store_rows(kept_NTK + chunk * T * K, t, K, T, c, k_TK * until(step_TD, T, BY_CHANNEL), K)
    tl.store(total_ND + chunk * D + d, tl.exp2(tl.sum(step_TD, 0)), mask=d < D)


@triton.jit
def meet(
    x, k, log_decay, reset, met_NTS, L, x_b, x_l, x_h, k_b, k_l, k_h, decay_b, decay_l, decay_h, chunks,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, T: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_RESET: tl.constexpr,
):  # fmt: skip
    """Compute what is left of each k of a chunk under its own x, q or e, and under that of later tokens."""
    n, b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tl.arange(0, T)
    row, chunk = n * T + t, (b * chunks + n) * H + h
    x += b * x_b + h * x_h
    k += b * k_b + h * k_h
    log_decay += b * decay_b + h * decay_h
    reset += b * L
    met_TS, own_T = tl.zeros((T, T), tl.float32), tl.zeros((T,), tl.float32)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        x_TK = load_rows(x, row, x_l, L, c, K, K % BLOCK_K == 0, tl.float32)
        k_TK = load_rows(k, row, k_l, L, c, K, K % BLOCK_K == 0, tl.float32)
        if BY_CHANNEL:
            own_T += tl.sum(x_TK * k_TK, 1)
            step_TK = load_steps(log_decay, reset, row, decay_l, L, c, D, HAS_RESET)
            for level in range(LEVELS):
                first_T, last_T = reach_at(level, T)
                decay_TK = tl.exp2(summed(within(first_T, last_T, T), step_TK))
                pair_TS = product(x_TK * decay_TK, tl.trans(k_TK * decay_TK))
                first_T, last_T = met_at(level, T)
                met_TS += tl.where(within(first_T, last_T, T), pair_TS, 0.0)
        else:
            met_TS += product(x_TK, tl.trans(k_TK))
    if BY_CHANNEL:
        met_TS += tl.where(t[:, None] == t[None, :], own_T[:, None], 0.0)
    else:
        met_TS *= decays_between(load_steps(log_decay, reset, row, decay_l, L, tl.arange(0, 1), D, HAS_RESET), T)
    store_rows(met_NTS + chunk * T * T, t, T, T, t, met_TS, T)


@triton.jit
def solve(
    left_NTS, of_e_NTK, written, inverse_NTS, erased_NTK, own_NTV, L, written_b, written_l, written_h, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute what a chunk changes in any state before it.

    inverse: of the system. erased: the inverse times e with the decays since the start. own: the changes of a state of
    zeros.
    """
    n, b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tl.arange(0, T)
    chunk = (b * chunks + n) * H + h
    inverse_TS = inverse_of(left_NTS + chunk * T * T, T, LEVELS)
    store_rows(inverse_NTS + chunk * T * T, t, T, T, t, inverse_TS, T)
    written += b * written_b + h * written_h
    for first in range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        written_TV = load_rows(written, n * T + t, written_l, L, v, V, V % BLOCK_V == 0, tl.float32)
        store_rows(own_NTV + chunk * T * V, t, V, T, v, product(inverse_TS, written_TV), V)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        e_TK = load_tile(of_e_NTK + chunk * T * K, c, T, K, BLOCK_K)
        store_rows(erased_NTK + chunk * T * K, t, K, T, c, product(inverse_TS, e_TK), K)


@triton.jit
def load_total(total_ND, c, D: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Load the decays of a whole chunk, `[K, 1]` or one for all."""
    return tl.load(total_ND + c, mask=c < D, other=0.0)[:, None] if BY_CHANNEL else tl.load(total_ND)


@triton.jit
def carry_states(
    erased_NTK, kept_NTK, own_NTV, total_ND, start_KV, states_NKV, changes_NTV, end_KV, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks of a head, and save the state before each and what each changes.

    The state is in registers: one block of key channels, or two.
    """
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    b, h = tl.program_id(1).to(tl.int64), (tl.program_id(0) // blocks).to(tl.int64)
    v, t, c = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, T), tl.arange(0, BLOCK_K)
    more = BLOCK_K + c
    state_KV = load_state(start_KV + (b * H + h) * K * V, c, v, K, V)
    if K > BLOCK_K:
        more_KV = load_state(start_KV + (b * H + h) * K * V, more, v, K, V)
    for n in range(chunks):
        chunk = (b * chunks + n) * H + h
        erased, kept, total_D = erased_NTK + chunk * T * K, kept_NTK + chunk * T * K, total_ND + chunk * D
        store_state(states_NKV + chunk * K * V, c, v, state_KV, K, V)
        change_TV = load_tile(own_NTV + chunk * T * V, v, T, V, BLOCK_V)
        change_TV -= product(load_tile(erased, c, T, K, BLOCK_K), state_KV)
        if K > BLOCK_K:
            store_state(states_NKV + chunk * K * V, more, v, more_KV, K, V)
            change_TV -= product(load_tile(erased, more, T, K, BLOCK_K), more_KV)
            more_KV = load_total(total_D, more, D, BY_CHANNEL) * more_KV
            more_KV += product(tl.trans(load_tile(kept, more, T, K, BLOCK_K)), change_TV)
        store_rows(changes_NTV + chunk * T * V, t, V, T, v, change_TV, V)
        state_KV = load_total(total_D, c, D, BY_CHANNEL) * state_KV
        state_KV += product(tl.trans(load_tile(kept, c, T, K, BLOCK_K)), change_TV)
    store_state(end_KV + (b * H + h) * K * V, c, v, state_KV, K, V)
    if K > BLOCK_K:
        store_state(end_KV + (b * H + h) * K * V, more, v, more_KV, K, V)


@triton.jit
def read_outputs(
    read_NTS, since_NTK, states_NKV, changes_NTV, y, L, y_b, y_l, y_h, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a chunk from the state before it and what it changes."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, v = (tl.program_id(2) // blocks).to(tl.int64), tl.program_id(2) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, T)
    chunk = (b * chunks + n) * H + h
    change_TV = load_tile(changes_NTV + chunk * T * V, v, T, V, BLOCK_V)
    y_TV = product(load_tile(read_NTS + chunk * T * T, t, T, T, T), change_TV)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        since_TK = load_tile(since_NTK + chunk * T * K, c, T, K, BLOCK_K)
        y_TV += product(since_TK, load_state(states_NKV + chunk * K * V, c, v, K, V))
    store_rows(y + b * y_b + h * y_h, n * T + t, y_l, L, v, y_TV, V)
