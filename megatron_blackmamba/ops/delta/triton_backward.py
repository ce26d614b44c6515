"""Triton kernels of the delta rule's gradients: states in reverse, and what belongs to values and to keys.

All terms of a step's gradient are added, none subtracted: what a pair of tokens contributes counts for the steps between
the two.

Shapes: B batch, L length, N chunks, H heads, T and S tokens of a chunk, I steps of a chunk, K key channels of a head,
V value channels, D decays of a head: 1 or K.
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.delta.triton_forward import (
    decays_between,
    load_state,
    load_steps,
    load_tile,
    load_total,
    met_at,
    store_rows,
    store_state,
    sums_of,
)
from megatron_blackmamba.ops.triton_math import load_rows, product


@triton.jit
def pass_gradients(
    read_NTS, since_NTK, erased_NTK, kept_NTK, total_ND, dy, dend_KV, dends_NKV, dchanges_NTV, dstart_KV,
    L, dy_b, dy_l, dy_h, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Walk back over the chunks of a head; save the gradients of the state behind each and of what each changes."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    b, h = tl.program_id(1).to(tl.int64), (tl.program_id(0) // blocks).to(tl.int64)
    c, v, t = tl.arange(0, BLOCK_K), tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, T)
    dstate_KV = load_state(dend_KV + (b * H + h) * K * V, c, v, K, V)
    for step in range(chunks):
        n = tl.cast(chunks - 1 - step, tl.int64)
        chunk = (b * chunks + n) * H + h
        store_state(dends_NKV + chunk * K * V, c, v, dstate_KV, K, V)
        dy_TV = load_rows(dy + b * dy_b + h * dy_h, n * T + t, dy_l, L, v, V, V % BLOCK_V == 0, tl.float32)
        dchange_TV = product(tl.trans(load_tile(read_NTS + chunk * T * T, t, T, T, T)), dy_TV)
        dchange_TV += product(load_tile(kept_NTK + chunk * T * K, c, T, K, BLOCK_K), dstate_KV)
        store_rows(dchanges_NTV + chunk * T * V, t, V, T, v, dchange_TV, V)
        dstate_KV = load_total(total_ND + chunk * D, c, D, BY_CHANNEL) * dstate_KV
        dstate_KV += product(tl.trans(load_tile(since_NTK + chunk * T * K, c, T, K, BLOCK_K)), dy_TV)
        dstate_KV -= product(tl.trans(load_tile(erased_NTK + chunk * T * K, c, T, K, BLOCK_K)), dchange_TV)
    store_state(dstart_KV + (b * H + h) * K * V, c, v, dstate_KV, K, V)


@triton.jit
def of_values(
    inverse_NTS, changes_NTV, dchanges_NTV, dy, dsolved_NTV, dleft_NTS, dread_NTS, dwritten,
    L, dy_b, dy_l, dy_h, dwritten_b, dwritten_l, dwritten_h, chunks,
    H: tl.constexpr, V: tl.constexpr, T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of written values, and of what is left of k under the e and q of later tokens."""
    n, b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tl.arange(0, T)
    row, chunk = n * T + t, (b * chunks + n) * H + h
    inverse_ST = tl.trans(load_tile(inverse_NTS + chunk * T * T, t, T, T, T))
    dleft_TS, dread_TS = tl.zeros((T, T), tl.float32), tl.zeros((T, T), tl.float32)
    for first in range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        dsolved_TV = product(inverse_ST, load_tile(dchanges_NTV + chunk * T * V, v, T, V, BLOCK_V))
        store_rows(dsolved_NTV + chunk * T * V, t, V, T, v, dsolved_TV, V)
        store_rows(dwritten + b * dwritten_b + h * dwritten_h, row, dwritten_l, L, v, dsolved_TV, V)
        change_VS = tl.trans(load_tile(changes_NTV + chunk * T * V, v, T, V, BLOCK_V))
        dleft_TS -= product(dsolved_TV, change_VS)
        dy_TV = load_rows(dy + b * dy_b + h * dy_h, row, dy_l, L, v, V, V % BLOCK_V == 0, tl.float32)
        dread_TS += product(dy_TV, change_VS)
    store_rows(dleft_NTS + chunk * T * T, t, T, T, t, tl.where(t[:, None] > t[None, :], dleft_TS, 0.0), T)
    store_rows(dread_NTS + chunk * T * T, t, T, T, t, tl.where(t[:, None] >= t[None, :], dread_TS, 0.0), T)


@triton.jit
def of_keys(
    q, k, erase, log_decay, reset, states_NKV, dends_NKV, changes_NTV, dsolved_NTV, dleft_NTS, dread_NTS, dy,
    dq, dk, derase, ddecay,
    L, q_b, q_l, q_h, k_b, k_l, k_h, erase_b, erase_l, erase_h, decay_b, decay_l, decay_h, dy_b, dy_l, dy_h,
    dq_b, dq_l, dq_h, dk_b, dk_l, dk_h, derase_b, derase_l, derase_h, ddecay_x, ddecay_b, ddecay_l, ddecay_h, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, T: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_RESET: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q, k, e and decays in a chunk, for a block of key channels.

    With one decay a head, each block of channels stores its part of the decay's gradient.
    """
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, block = (tl.program_id(2) // blocks).to(tl.int64), tl.program_id(2) % blocks
    c, t = block * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, T)
    row, chunk = n * T + t, (b * chunks + n) * H + h
    if BY_CHANNEL:
        d = c
    else:
        d = tl.arange(0, 1)
    step_TD = load_steps(log_decay + b * decay_b + h * decay_h, reset + b * L, row, decay_l, L, d, D, HAS_RESET)
    since_TD, until_TD = sums_of(step_TD, T, BY_CHANNEL)
    since_TD, until_TD = tl.exp2(since_TD), tl.exp2(until_TD)

    dq_TK, dk_TK = tl.zeros((T, BLOCK_K), tl.float32), tl.zeros((T, BLOCK_K), tl.float32)
    de_TK, dtotal_K = tl.zeros((T, BLOCK_K), tl.float32), tl.zeros((BLOCK_K,), tl.float32)
    for first in range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        state_KV = load_state(states_NKV + chunk * K * V, c, v, K, V)
        dy_TV = load_rows(dy + b * dy_b + h * dy_h, row, dy_l, L, v, V, V % BLOCK_V == 0, tl.float32)
        dq_TK += product(dy_TV, tl.trans(state_KV))
        de_TK -= product(load_tile(dsolved_NTV + chunk * T * V, v, T, V, BLOCK_V), tl.trans(state_KV))
        dend_KV = load_state(dends_NKV + chunk * K * V, c, v, K, V)
        dk_TK += product(load_tile(changes_NTV + chunk * T * V, v, T, V, BLOCK_V), tl.trans(dend_KV))
        dtotal_K += tl.sum(state_KV * dend_KV, 1)
    dq_TK, dk_TK, de_TK = dq_TK * since_TD, dk_TK * until_TD, de_TK * since_TD
    q_TK = load_rows(q + b * q_b + h * q_h, row, q_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    k_TK = load_rows(k + b * k_b + h * k_h, row, k_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    e_TK = load_rows(erase + b * erase_b + h * erase_h, row, erase_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    dsince_TK, duntil_TK = q_TK * dq_TK + e_TK * de_TK, k_TK * dk_TK
    dtotal_D = tl.exp2(tl.sum(step_TD, 0)) * (dtotal_K if BY_CHANNEL else tl.sum(dtotal_K))

    # Step I counts for tokens T >= I since the start, for tokens S < I until the end, and in pairs S < I <= T.
    dleft_TS = load_tile(dleft_NTS + chunk * T * T, t, T, T, T)
    dread_TS = load_tile(dread_NTS + chunk * T * T, t, T, T, T)
    from_IT = (t[:, None] <= t[None, :]).to(tl.float32)
    after_IS = t[:, None] > t[None, :]
    if BY_CHANNEL:
        dstep_ID = product(from_IT, dsince_TK) + product(after_IS.to(tl.float32), duntil_TK) + dtotal_D[None, :]
        own_T1 = tl.sum(tl.where(t[:, None] == t[None, :], dread_TS, 0.0), 1)[:, None]
        dq_TK += own_T1 * k_TK
        dk_TK += own_T1 * q_TK
        for level in range(LEVELS):
            reach_TI, pair_TS = met_at(level, T)
            decay_TK = tl.exp2(product(reach_TI.to(tl.float32), step_TD))
            left_TS, read_TS = tl.where(pair_TS, dleft_TS, 0.0), tl.where(pair_TS, dread_TS, 0.0)
            met_TK = k_TK * decay_TK
            de_met_TK = product(left_TS, met_TK) * decay_TK
            dq_met_TK = product(read_TS, met_TK) * decay_TK
            dk_met_TK = product(tl.trans(left_TS), e_TK * decay_TK) + product(tl.trans(read_TS), q_TK * decay_TK)
            dk_met_TK *= decay_TK
            dreach_TK = e_TK * de_met_TK + q_TK * dq_met_TK + k_TK * dk_met_TK
            dstep_ID += product(tl.trans(reach_TI.to(tl.float32)), dreach_TK)
            de_TK += de_met_TK
            dq_TK += dq_met_TK
            dk_TK += dk_met_TK
    else:
        decay_TS = decays_between(step_TD, T)
        dleft_TS *= decay_TS
        dread_TS *= decay_TS
        de_TK += product(dleft_TS, k_TK)
        dq_TK += product(dread_TS, k_TK)
        dk_TK += product(tl.trans(dleft_TS), e_TK) + product(tl.trans(dread_TS), q_TK)
        dpair_TS = dleft_TS * product(e_TK, tl.trans(k_TK)) + dread_TS * product(q_TK, tl.trans(k_TK))
        from_start_1T, until_end_1S = tl.sum(dsince_TK, 1)[None, :], tl.sum(duntil_TK, 1)[None, :]
        dstep_IS = tl.where(after_IS, product(from_IT, dpair_TS) + until_end_1S, from_start_1T)
        dstep_ID = (tl.sum(dstep_IS, 1) + dtotal_D)[:, None]
    store_rows(dq + b * dq_b + h * dq_h, row, dq_l, L, c, dq_TK, K)
    store_rows(dk + b * dk_b + h * dk_h, row, dk_l, L, c, dk_TK, K)
    store_rows(derase + b * derase_b + h * derase_h, row, derase_l, L, c, de_TK, K)
    ddecay += b * ddecay_b + h * ddecay_h + (0 if BY_CHANNEL else block * ddecay_x)
    store_rows(ddecay, row, ddecay_l, L, d, dstep_ID, D)
