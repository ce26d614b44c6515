"""Triton kernels that take many sequences one token further: products on tensor cores, sequences in tiles.

Inputs of products are rounded to the weights' dtype, sums are fp32. Sequences that chose the same expert share the
reading of its weights; nothing is copied, and an expert that nobody chose is not read.

Shapes: B sequences, D model, I inner, K taps, M = R + 2N, P parts of a sum, F hidden units, E experts, C columns, O
rows of a weight.
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.decoding.triton_one import choose, load_choice_bias
from megatron_blackmamba.ops.decoding.triton_shared import (
    activation,
    convolve,
    dot,
    let_next_start,
    load_each,
    wait_for_previous,
)
from megatron_blackmamba.ops.triton_math import LOG2E, narrowed, sigmoid, softplus


@triton.jit
def load_transposed(weight, rows, inside, first, C: tl.constexpr, BLOCK: tl.constexpr):
    """Load some columns of some rows of a matrix, transposed."""
    c = first + tl.arange(0, BLOCK)
    mask = inside[None, :] & (c < C)[:, None]
    return tl.load(weight + rows.to(tl.int64)[None, :] * C + c[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["B"])
def mamba_in_rows(
    normed_BD, in_proj, conv_IK, conv_bias_I, x_proj, window_BWI, x_BI, z_BI, parts_PBM, last_B, eod, B,
    D: tl.constexpr, I: tl.constexpr, K: tl.constexpr, M: tl.constexpr, M2: tl.constexpr,
    RESTARTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute in_proj and convolution for some channels, and these channels' part of x_proj.

    RESTARTS: forget the window of a sequence whose last token is eod.
    """
    let_next_start(OVERLAP)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < I
    b = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    wait_for_previous(OVERLAP)
    x, z = tl.zeros((TOKENS, ROWS), tl.float32), tl.zeros((TOKENS, ROWS), tl.float32)
    for first in range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        normed = tl.load(normed_BD + b[:, None] * D + d[None, :], mask=(b < B)[:, None] & (d < D)[None, :], other=0.0)
        x = dot(normed, load_transposed(in_proj, i, inside, first, D, BLOCK), x)
        z = dot(normed, load_transposed(in_proj + I * D, i, inside, first, D, BLOCK), z)
    at, here = b[:, None] * I + i[None, :], (b < B)[:, None] & inside[None, :]
    tl.store(z_BI + at, z, mask=here)
    remembers = here
    if RESTARTS:
        remembers = here & (tl.load(last_B + b, mask=b < B, other=0) != eod)[:, None]
    window = window_BWI + b.to(tl.int64)[:, None] * ((K - 1) * I) + i[None, :]
    olds = load_each(window, I, remembers, K - 1)
    taps, bias = load_each(conv_IK + i[None, :] * K, 1, inside[None, :], K), tl.load(conv_bias_I + i, mask=inside)
    m = tl.arange(0, M2)
    shared = tl.load(x_proj + m[None, :] * I + i[:, None], mask=(m < M)[None, :] & inside[:, None], other=0.0)
    y = convolve(x, bias[None, :], taps, olds, window, I, here, K)
    tl.store(x_BI + at, y, mask=here)
    part = dot(narrowed(y, x_proj.dtype.element_ty), shared, tl.zeros((TOKENS, M2), tl.float32))
    rows = (tl.program_id(0) * B + b).to(tl.int64)
    tl.store(parts_PBM + rows[:, None] * M2 + m[None, :], part, mask=(b < B)[:, None])


@triton.jit(do_not_specialize=["B"])
def sum_parts(
    parts_PBM, sums_BM, B,
    M2: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up the parts of x_proj for some columns of a sequence."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    p, m = tl.arange(0, STEP), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((STEP, COLUMNS), tl.float32)
    for first in tl.static_range(0, PARTS, STEP):
        at = parts_PBM + ((first + p) * B + b)[:, None] * M2 + m[None, :]
        sums += tl.load(at, mask=(first + p < PARTS)[:, None], other=0.0)
    tl.store(sums_BM + b * M2 + m, tl.sum(sums, 0))


@triton.jit(do_not_specialize=["B"])
def mamba_scan_rows(
    sums_BM, dt_proj, dt_bias_I, A_IN, D_I, state_BIN, x_BI, z_BI, y_BI, last_B, eod, B,
    I: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, R: tl.constexpr, R2: tl.constexpr, M2: tl.constexpr,
    RESTARTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute dt_proj, one token of the scan, and the gate, for some channels of some sequences.

    RESTARTS: forget the sequences whose last token is eod.
    """
    let_next_start(OVERLAP)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside, valid = i < I, b < B
    r, n = tl.arange(0, R2), tl.arange(0, N2)
    wait_for_previous(OVERLAP)
    here = valid[:, None, None] & inside[None, :, None] & (n < N)[None, None, :]
    state = state_BIN + b.to(tl.int64)[:, None, None] * (I * N) + (i[:, None] * N + n[None, :])[None, :, :]
    remembers = here
    if RESTARTS:
        remembers = here & (tl.load(last_B + b, mask=valid, other=0) != eod)[:, None, None]
    h = tl.load(state, mask=remembers, other=0.0)
    sums, known = sums_BM + b[:, None] * M2, valid[:, None] & (n < N)[None, :]
    rank = tl.load(sums + r[None, :], mask=valid[:, None] & (r < R)[None, :], other=0.0)
    w = tl.load(dt_proj + i[None, :] * R + r[:, None], mask=inside[None, :] & (r < R)[:, None], other=0.0)
    B_BN = tl.load(sums + R + n[None, :], mask=known, other=0.0)
    C_BN = tl.load(sums + R + N + n[None, :], mask=known, other=0.0)
    A = tl.load(A_IN + i[:, None] * N + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)
    at, both = b[:, None] * I + i[None, :], valid[:, None] & inside[None, :]
    x, z = tl.load(x_BI + at, mask=both, other=0.0), tl.load(z_BI + at, mask=both, other=0.0)
    bias, skip = tl.load(dt_bias_I + i, mask=inside, other=0.0), tl.load(D_I + i, mask=inside, other=0.0)
    delta = dot(narrowed(rank, dt_proj.dtype.element_ty), w, tl.zeros((TOKENS, ROWS), tl.float32))
    delta = softplus(delta + bias[None, :])
    h = h * tl.exp2(delta[:, :, None] * (A * LOG2E)[None, :, :]) + (delta * x)[:, :, None] * B_BN[:, None, :]
    tl.debug_barrier()  # several threads may have loaded an element that one of them stores
    tl.store(state, h, mask=here)
    y = (tl.sum(h * C_BN[:, None, :], 2) + skip[None, :] * x) * z * sigmoid(z)
    tl.store(y_BI + at, narrowed(y, y_BI.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["B"])
def add_product_rows(
    weight, x_BC, stream_BO, B,
    C: tl.constexpr, O: tl.constexpr, ADD: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add x times some rows of a weight to the stream."""
    let_next_start(OVERLAP)
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    wait_for_previous(OVERLAP)
    y = product(x_BC, b, b < B, weight, o, o < O, C, TOKENS, ROWS, BLOCK)
    at, here = stream_BO + b.to(tl.int64)[:, None] * O + o[None, :], (b < B)[:, None] & (o < O)[None, :]
    if ADD:
        y += tl.load(at, mask=here, other=0.0)
    tl.store(at, y, mask=here)


@triton.jit
def product(
    x_BC, b, valid, weight, rows, inside, C: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    y = tl.zeros((TOKENS, ROWS), tl.float32)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        x = tl.load(x_BC + b[:, None] * C + c[None, :], mask=valid[:, None] & (c < C)[None, :], other=0.0)
        y = dot(
            narrowed(x.to(tl.float32), weight.dtype.element_ty),
            load_transposed(weight, rows, inside, first, C, BLOCK),
            y,
        )
    return y


@triton.jit
def route(
    stream_BD, norm_D, router_ED, router_bias_E, choice_bias_E, normed_BD, expert_B, factor_B, eps,
    D: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, BIASED: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the norm of a sequence's residual stream, its expert and the expert's factor. E = 0: the norm alone."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E2)
    if E > 0:
        bias_E = tl.load(router_bias_E + e, mask=e < E, other=0.0)
        choice_E = load_choice_bias(choice_bias_E, e, E, BIASED)
    squares = tl.zeros((BLOCK,), tl.float32)
    logits = tl.zeros((E2, BLOCK), tl.float32)
    for first in tl.static_range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        x = tl.load(stream_BD + b * D + d, mask=d < D, other=0.0)
        squares += x * x
        if E > 0:
            x *= tl.load(norm_D + d, mask=d < D, other=0.0)
            router = tl.load(
                router_ED + e[:, None] * D + d[None, :], mask=(e < E)[:, None] & (d < D)[None, :], other=0.0
            )
            logits += router * x[None, :]
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
    for first in tl.static_range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        x = tl.load(stream_BD + b * D + d, mask=d < D, other=0.0) * tl.load(norm_D + d, mask=d < D, other=0.0)
        tl.store(normed_BD + b * D + d, narrowed(x * scale, normed_BD.dtype.element_ty), mask=d < D)
    if E > 0:
        chosen, logit = choose(tl.sum(logits, 1) * scale + bias_E, e, choice_E, E, BIASED)
        tl.store(expert_B + b, chosen)
        tl.store(factor_B + b, sigmoid(logit))


@triton.jit
def of_expert(expert_B, expert, B, B2: tl.constexpr, ROUTED: tl.constexpr, OVERLAP: tl.constexpr):
    """Return all sequences, which of them chose an expert, the place of each among those, and their number."""
    wait_for_previous(OVERLAP)
    b = tl.arange(0, B2)
    mine = b < B
    if ROUTED:
        mine = mine & (tl.load(expert_B + b, mask=b < B, other=-1) == expert)
    counted = mine.to(tl.int32)
    return b, mine, tl.cumsum(counted, 0) - counted, tl.sum(counted, 0)


@triton.jit
def sequences_at(first, b, mine, place_B, count, TOKENS: tl.constexpr):
    """Return the sequences from a place on among those of an expert, and which of them there are."""
    places = first + tl.arange(0, TOKENS)
    hit = (place_B[None, :] == places[:, None]) & mine[None, :]
    return tl.sum(tl.where(hit, b[None, :], 0), 1), places < count


@triton.jit(do_not_specialize=["B"])
def gated_in_rows(
    normed_BD, fc1_EGD, hidden_BF, expert_B, B,
    D: tl.constexpr, F: tl.constexpr, B2: tl.constexpr, ROUTED: tl.constexpr, GELU: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute some hidden units of one expert, for the sequences that chose it."""
    let_next_start(OVERLAP)
    f = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1)
    fc1 = fc1_EGD + expert.to(tl.int64) * (2 * F * D)
    all_B, mine, place_B, count = of_expert(expert_B, expert, B, B2, ROUTED, OVERLAP)
    for tile in range(0, count, TOKENS):
        b, valid = sequences_at(tile, all_B, mine, place_B, count, TOKENS)
        gate, up = tl.zeros((TOKENS, ROWS), tl.float32), tl.zeros((TOKENS, ROWS), tl.float32)
        for first in range(0, D, BLOCK):
            d = first + tl.arange(0, BLOCK)
            x = tl.load(normed_BD + b[:, None] * D + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
            gate = dot(x, load_transposed(fc1, f, f < F, first, D, BLOCK), gate)
            up = dot(x, load_transposed(fc1 + F * D, f, f < F, first, D, BLOCK), up)
        hidden = narrowed(activation(gate, GELU) * up, hidden_BF.dtype.element_ty)
        tl.store(hidden_BF + b[:, None] * F + f[None, :], hidden, mask=valid[:, None] & (f < F)[None, :])


@triton.jit(do_not_specialize=["B"])
def add_expert_rows(
    fc2_EDF, hidden_BF, stream_BD, expert_B, factor_B, B,
    D: tl.constexpr, F: tl.constexpr, B2: tl.constexpr, ROUTED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add the outputs of one expert to some channels of the stream of the sequences that chose it."""
    let_next_start(OVERLAP)
    d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1)
    fc2 = fc2_EDF + expert.to(tl.int64) * (D * F)
    all_B, mine, place_B, count = of_expert(expert_B, expert, B, B2, ROUTED, OVERLAP)
    for tile in range(0, count, TOKENS):
        b, valid = sequences_at(tile, all_B, mine, place_B, count, TOKENS)
        y = product(hidden_BF, b, valid, fc2, d, d < D, F, TOKENS, ROWS, BLOCK)
        if ROUTED:
            y *= tl.load(factor_B + b, mask=valid, other=0.0)[:, None]
        at, here = stream_BD + b[:, None] * D + d[None, :], valid[:, None] & (d < D)[None, :]
        tl.store(at, tl.load(at, mask=here, other=0.0) + y, mask=here)
