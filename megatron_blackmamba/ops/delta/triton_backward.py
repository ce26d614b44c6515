"""Triton kernels of the delta rule's gradients: states in reverse, and what belongs to values and to keys.

All terms of a step's gradient are added, none subtracted: what a pair of tokens contributes counts for the steps
between the two.

Shapes: B batch, L length, N chunks, H heads, T and S tokens of a chunk, I steps of a chunk, K key channels of a head,
V value channels, D decays of a head: 1 or K.
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.delta.triton_forward import (
    channels_of,
    decays_between,
    load_met,
    load_state,
    load_steps,
    load_tile,
    load_total,
    reach_at,
    since,
    store_rows,
    store_state,
    summed,
    until,
    within,
)
from megatron_blackmamba.ops.triton_math import load_rows, product


@triton.jit
def of_outputs(
    read_NTS, dy, own_NTV, L, dy_b, dy_l, dy_h, chunks,
    H: tl.constexpr, V: tl.constexpr, T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute what the outputs of a chunk add to the gradients of what it changes."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, v = (tl.program_id(2) // blocks).to(tl.int64), tl.program_id(2) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    t, chunk = tl.arange(0, T), (b * chunks + n) * H + h
    dy_TV = load_rows(dy + b * dy_b + h * dy_h, n * T + t, dy_l, L, v, V, V % BLOCK_V == 0, tl.float32)
    own_TV = product(tl.trans(load_tile(read_NTS + chunk * T * T, t, T, T, T)), dy_TV)
    store_rows(own_NTV + chunk * T * V, t, V, T, v, own_TV, V)


@triton.jit
def carry_gradients(
    since_NTK, erased_NTK, kept_NTK, own_NTV, total_ND, dy, dend_KV, dends_NKV, dchanges_NTV, dstart_KV,
    L, dy_b, dy_l, dy_h, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Walk back over the chunks of a head; save the gradients of the state behind each and of what each changes."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    b, h = tl.program_id(1).to(tl.int64), (tl.program_id(0) // blocks).to(tl.int64)
    v, t, c = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, T), tl.arange(0, BLOCK_K)
    more = BLOCK_K + c
    dstate_KV = load_state(dend_KV + (b * H + h) * K * V, c, v, K, V)
    if K > BLOCK_K:
        dmore_KV = load_state(dend_KV + (b * H + h) * K * V, more, v, K, V)
    for step in range(chunks):
        n = tl.cast(chunks - 1 - step, tl.int64)
        chunk = (b * chunks + n) * H + h
        since, erased, kept = since_NTK + chunk * T * K, erased_NTK + chunk * T * K, kept_NTK + chunk * T * K
        store_state(dends_NKV + chunk * K * V, c, v, dstate_KV, K, V)
        dy_TV = load_rows(dy + b * dy_b + h * dy_h, n * T + t, dy_l, L, v, V, V % BLOCK_V == 0, tl.float32)
        dchange_TV = load_tile(own_NTV + chunk * T * V, v, T, V, BLOCK_V)
        dchange_TV += product(load_tile(kept, c, T, K, BLOCK_K), dstate_KV)
        if K > BLOCK_K:
            store_state(dends_NKV + chunk * K * V, more, v, dmore_KV, K, V)
            dchange_TV += product(load_tile(kept, more, T, K, BLOCK_K), dmore_KV)
            dmore_KV = load_total(total_ND + chunk * D, more, D, BY_CHANNEL) * dmore_KV
            dmore_KV += product(tl.trans(load_tile(since, more, T, K, BLOCK_K)), dy_TV)
            dmore_KV -= product(tl.trans(load_tile(erased, more, T, K, BLOCK_K)), dchange_TV)
        store_rows(dchanges_NTV + chunk * T * V, t, V, T, v, dchange_TV, V)
        dstate_KV = load_total(total_ND + chunk * D, c, D, BY_CHANNEL) * dstate_KV
        dstate_KV += product(tl.trans(load_tile(since, c, T, K, BLOCK_K)), dy_TV)
        dstate_KV -= product(tl.trans(load_tile(erased, c, T, K, BLOCK_K)), dchange_TV)
    store_state(dstart_KV + (b * H + h) * K * V, c, v, dstate_KV, K, V)
    if K > BLOCK_K:
        store_state(dstart_KV + (b * H + h) * K * V, more, v, dmore_KV, K, V)


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
def of_sum(which_IT, x_TK, BY_CHANNEL: tl.constexpr):
    """Add up what tokens say of a step, for each channel or for all."""
    if BY_CHANNEL:
        sum_ID = summed(which_IT, x_TK)
    else:
        sum_ID = tl.sum(tl.where(which_IT, tl.sum(x_TK, 1)[None, :], 0.0), 1)[:, None]
    return sum_ID


@triton.jit
def of_states(
    q, k, erase, log_decay, reset, states_NKV, dends_NKV, changes_NTV, dsolved_NTV, dy, dq_NTK, de_NTK, dk, ddecay,
    L, q_b, q_l, q_h, k_b, k_l, k_h, erase_b, erase_l, erase_h, decay_b, decay_l, decay_h, dy_b, dy_l, dy_h,
    dk_b, dk_l, dk_h, ddecay_p, ddecay_b, ddecay_l, ddecay_h, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_RESET: tl.constexpr,
):  # fmt: skip
    """Compute the parts of the gradients of q, e, k and decays that come through the states before and behind a chunk.

    With one decay a head, each block of channels has a part of its gradient. Step I counts for tokens T >= I since the
    start, and for tokens S < I until the end.
    """
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, block = (tl.program_id(2) // blocks).to(tl.int64), tl.program_id(2) % blocks
    c, t = block * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, T)
    row, chunk = n * T + t, (b * chunks + n) * H + h
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
    d = channels_of(c, BY_CHANNEL)
    step_TD = load_steps(log_decay + b * decay_b + h * decay_h, reset + b * L, row, decay_l, L, d, D, HAS_RESET)
    since_TD = since(step_TD, T, BY_CHANNEL)
    dq_TK, de_TK, dk_TK = dq_TK * since_TD, de_TK * since_TD, dk_TK * until(step_TD, T, BY_CHANNEL)
    store_rows(dq_NTK + chunk * T * K, t, K, T, c, dq_TK, K)
    store_rows(de_NTK + chunk * T * K, t, K, T, c, de_TK, K)
    store_rows(dk + b * dk_b + h * dk_h, row, dk_l, L, c, dk_TK, K)
    q_TK = load_rows(q + b * q_b + h * q_h, row, q_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    e_TK = load_rows(erase + b * erase_b + h * erase_h, row, erase_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    k_TK = load_rows(k + b * k_b + h * k_h, row, k_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    dstep_ID = of_sum(t[:, None] <= t[None, :], q_TK * dq_TK + e_TK * de_TK, BY_CHANNEL)
    dstep_ID += of_sum(t[:, None] > t[None, :], k_TK * dk_TK, BY_CHANNEL)
    dstep_ID += (tl.exp2(tl.sum(step_TD, 0)) * (dtotal_K if BY_CHANNEL else tl.sum(dtotal_K)))[None, :]
    ddecay += b * ddecay_b + h * ddecay_h + (0 if BY_CHANNEL else block * ddecay_p)
    store_rows(ddecay, row, ddecay_l, L, d, dstep_ID, D)


@triton.jit
def of_met(
    x, k, log_decay, reset, dmet_NTS, dx_NTK, dx, dk, ddecay,
    L, x_b, x_l, x_h, k_b, k_l, k_h, decay_b, decay_l, decay_h, dx_b, dx_l, dx_h, dk_b, dk_l, dk_h,
    ddecay_p, ddecay_b, ddecay_l, ddecay_h, chunks,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, T: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_RESET: tl.constexpr,
):  # fmt: skip
    """Compute from the gradients of what `meet` returns those of x, and parts of the ones of k and decays.

    dx_NTK: the part of x's gradient that comes through states. A step counts in pairs of tokens S < I <= T.
    """
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, block = (tl.program_id(2) // blocks).to(tl.int64), tl.program_id(2) % blocks
    c, t = block * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, T)
    d = channels_of(c, BY_CHANNEL)
    row, chunk = n * T + t, (b * chunks + n) * H + h
    step_TD = load_steps(log_decay + b * decay_b + h * decay_h, reset + b * L, row, decay_l, L, d, D, HAS_RESET)
    x_TK = load_rows(x + b * x_b + h * x_h, row, x_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    k_TK = load_rows(k + b * k_b + h * k_h, row, k_l, L, c, K, K % BLOCK_K == 0, tl.float32)
    dx_TK = load_tile(dx_NTK + chunk * T * K, c, T, K, BLOCK_K)
    dmet_NTS += chunk * T * T
    if BY_CHANNEL:
        own_T1 = tl.load(dmet_NTS + t * (T + 1))[:, None]
        dx_TK += own_T1 * k_TK
        dk_TK, dstep_ID = own_T1 * x_TK, tl.zeros((T, BLOCK_K), tl.float32)
        for level in range(LEVELS):
            first_T, last_T = reach_at(level, T)
            decay_TK = tl.exp2(summed(within(first_T, last_T, T), step_TD))
            pair_TS = load_met(dmet_NTS, level, T)
            dx_met_TK = product(pair_TS, k_TK * decay_TK) * decay_TK
            dk_met_TK = product(tl.trans(pair_TS), x_TK * decay_TK) * decay_TK
            dx_TK += dx_met_TK
            dk_TK += dk_met_TK
            reach_IT = (t[:, None] >= first_T[None, :]) & (t[:, None] <= last_T[None, :])
            dstep_ID += summed(reach_IT, x_TK * dx_met_TK + k_TK * dk_met_TK)
    else:
        dmet_TS = load_tile(dmet_NTS, t, T, T, T) * decays_between(step_TD, T)
        dx_TK += product(dmet_TS, k_TK)
        dk_TK = product(tl.trans(dmet_TS), x_TK)
        dpair_IS = summed(t[:, None] <= t[None, :], dmet_TS * product(x_TK, tl.trans(k_TK)))
        dstep_ID = tl.sum(tl.where(t[:, None] > t[None, :], dpair_IS, 0.0), 1)[:, None]
    store_rows(dx + b * dx_b + h * dx_h, row, dx_l, L, c, dx_TK, K)
    store_rows(dk + b * dk_b + h * dk_h, row, dk_l, L, c, dk_TK, K)
    ddecay += b * ddecay_b + h * ddecay_h + (0 if BY_CHANNEL else block * ddecay_p)
    store_rows(ddecay, row, ddecay_l, L, d, dstep_ID, D)
