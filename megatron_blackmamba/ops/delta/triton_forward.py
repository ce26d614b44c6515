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
def sums_of(step_TD, T: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Return for each token the sum of steps since the start of the chunk, and that of later steps until its end."""
    t = tl.arange(0, T)
    since_TI = t[:, None] >= t[None, :]
    if BY_CHANNEL:
        since_TD = product(since_TI.to(tl.float32), step_TD)
        until_TD = product((t[:, None] < t[None, :]).to(tl.float32), step_TD)
    else:
        step_1I = tl.trans(step_TD)
        since_TD = tl.sum(tl.where(since_TI, step_1I, 0.0), 1)[:, None]
        until_TD = tl.sum(tl.where(since_TI, 0.0, step_1I), 1)[:, None]
    return since_TD, until_TD


@triton.jit
def decays_between(step_T1, T: tl.constexpr):
    """Return how much of token S is left at token T by one decay a head, nothing of later tokens."""
    t = tl.arange(0, T)
    since_TI = t[:, None] >= t[None, :]
    exponent_TS = product(since_TI.to(tl.float32), tl.where(since_TI & (t[:, None] > t[None, :]), step_T1, 0.0))
    return tl.where(since_TI, tl.exp2(exponent_TS), 0.0)


@triton.jit
def met_at(level, T: tl.constexpr):
    """Return which steps lie between each token and the border of its pair of blocks, and the pairs of tokens there.

    A block has 2^level tokens. A token of the newer block counts its own step, one of the older block does not.
    """
    t, i = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    newer = ((t >> level) & 1) == 1
    reach_TI = ((t >> level) == (i >> level)) & ((i <= t) == newer)
    pair_TS = newer & (((t >> level) - 1) == (i >> level))
    return reach_TI, pair_TS


@triton.jit
def inverse_of(left_TS, T: tl.constexpr, LEVELS: tl.constexpr):
    """Return the inverse of the unit matrix plus a strictly lower triangular one."""
    t = tl.arange(0, T)
    inverse_TS = (t[:, None] == t[None, :]).to(tl.float32)
    for level in range(LEVELS):
        _, pair_TS = met_at(level, T)
        inverse_TS -= product(inverse_TS, product(tl.where(pair_TS, left_TS, 0.0), inverse_TS))
    return inverse_TS


@triton.jit
def prepare(
    q, k, erase, written, log_decay, reset,
    inverse_NTS, read_NTS, since_NTK, erased_NTK, kept_NTK, own_NTV, total_ND,
    L, q_b, q_l, q_h, k_b, k_l, k_h, erase_b, erase_l, erase_h, written_b, written_l, written_h, decay_b, decay_l,
    decay_h, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, T: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_RESET: tl.constexpr,
):  # fmt: skip
    """Compute what a chunk does to any state before it.

    inverse: of the system. read: what is left of each k under the q of later tokens. since: q with the decays since
    the start. erased: the inverse times e with these decays. kept: k with the decays until the end. own: what the
    chunk changes in a state of zeros. total: the decays of the whole chunk.
    """
    n, b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tl.arange(0, T)
    row = n * T + t
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    erase += b * erase_b + h * erase_h
    written += b * written_b + h * written_h
    log_decay += b * decay_b + h * decay_h
    reset += b * L
    chunk = (b * chunks + n) * H + h
    earlier_TS = t[:, None] > t[None, :]

    left_TS, read_TS = tl.zeros((T, T), tl.float32), tl.zeros((T, T), tl.float32)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        q_TK = load_rows(q, row, q_l, L, c, K, K % BLOCK_K == 0, tl.float32)
        k_TK = load_rows(k, row, k_l, L, c, K, K % BLOCK_K == 0, tl.float32)
        e_TK = load_rows(erase, row, erase_l, L, c, K, K % BLOCK_K == 0, tl.float32)
        if BY_CHANNEL:
            step_TK = load_steps(log_decay, reset, row, decay_l, L, c, D, HAS_RESET)
            read_TS += tl.where(t[:, None] == t[None, :], tl.sum(q_TK * k_TK, 1)[:, None], 0.0)
            for level in range(LEVELS):
                reach_TI, pair_TS = met_at(level, T)
                decay_TK = tl.exp2(product(reach_TI.to(tl.float32), step_TK))
                met_KS = tl.trans(k_TK * decay_TK)
                left_TS += tl.where(pair_TS, product(e_TK * decay_TK, met_KS), 0.0)
                read_TS += tl.where(pair_TS, product(q_TK * decay_TK, met_KS), 0.0)
        else:
            left_TS += product(e_TK, tl.trans(k_TK))
            read_TS += product(q_TK, tl.trans(k_TK))
    if not BY_CHANNEL:
        step_T1 = load_steps(log_decay, reset, row, decay_l, L, tl.arange(0, 1), D, HAS_RESET)
        decay_TS = decays_between(step_T1, T)
        left_TS = tl.where(earlier_TS, left_TS * decay_TS, 0.0)
        read_TS *= decay_TS
    store_rows(read_NTS + chunk * T * T, t, T, T, t, read_TS, T)
    inverse_TS = inverse_of(left_TS, T, LEVELS)
    store_rows(inverse_NTS + chunk * T * T, t, T, T, t, inverse_TS, T)

    for first in range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        written_TV = load_rows(written, row, written_l, L, v, V, V % BLOCK_V == 0, tl.float32)
        store_rows(own_NTV + chunk * T * V, t, V, T, v, product(inverse_TS, written_TV), V)
    for first in range(0, K, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        if BY_CHANNEL:
            d = c
        else:
            d = tl.arange(0, 1)
        step_TD = load_steps(log_decay, reset, row, decay_l, L, d, D, HAS_RESET)
        since_TD, until_TD = sums_of(step_TD, T, BY_CHANNEL)
        since_TD = tl.exp2(since_TD)
        tl.store(total_ND + chunk * D + d, tl.exp2(tl.sum(step_TD, 0)), mask=d < D)
        e_TK = load_rows(erase, row, erase_l, L, c, K, K % BLOCK_K == 0, tl.float32)
        store_rows(erased_NTK + chunk * T * K, t, K, T, c, product(inverse_TS, e_TK * since_TD), K)
        q_TK = load_rows(q, row, q_l, L, c, K, K % BLOCK_K == 0, tl.float32)
        store_rows(since_NTK + chunk * T * K, t, K, T, c, q_TK * since_TD, K)
        k_TK = load_rows(k, row, k_l, L, c, K, K % BLOCK_K == 0, tl.float32)
        store_rows(kept_NTK + chunk * T * K, t, K, T, c, k_TK * tl.exp2(until_TD), K)


@triton.jit
def load_total(total_ND, c, D: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Load the decays of a whole chunk, `[K, 1]` or one for all."""
    return tl.load(total_ND + c, mask=c < D, other=0.0)[:, None] if BY_CHANNEL else tl.load(total_ND)


@triton.jit
def pass_states(
    erased_NTK, kept_NTK, own_NTV, total_ND, start_KV, states_NKV, changes_NTV, end_KV, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks of a head, and save the state before each and what each changes."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    b, h = tl.program_id(1).to(tl.int64), (tl.program_id(0) // blocks).to(tl.int64)
    c, v, t = tl.arange(0, BLOCK_K), tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, T)
    state_KV = load_state(start_KV + (b * H + h) * K * V, c, v, K, V)
    for n in range(chunks):
        chunk = (b * chunks + n) * H + h
        store_state(states_NKV + chunk * K * V, c, v, state_KV, K, V)
        change_TV = load_tile(own_NTV + chunk * T * V, v, T, V, BLOCK_V)
        change_TV -= product(load_tile(erased_NTK + chunk * T * K, c, T, K, BLOCK_K), state_KV)
        store_rows(changes_NTV + chunk * T * V, t, V, T, v, change_TV, V)
        kept_TK = load_tile(kept_NTK + chunk * T * K, c, T, K, BLOCK_K)
        state_KV = load_total(total_ND + chunk * D, c, D, BY_CHANNEL) * state_KV
        state_KV += product(tl.trans(kept_TK), change_TV)
    store_state(end_KV + (b * H + h) * K * V, c, v, state_KV, K, V)


@triton.jit
def outputs(
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
