"""Triton kernels that take one sequence one token further: products are sums in registers.

A program asks for all its weights at once and for its inputs afterwards, because memory takes longest to answer.

Shapes: D model, I inner, N state, R rank of dt, K taps, M = R + 2N, P parts of a sum, F hidden units, E experts, C
columns.
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.decoding.triton_shared import (
    activation,
    convolve,
    let_next_start,
    load_each,
    wait_for_previous,
)
from megatron_blackmamba.ops.triton_math import sigmoid


@triton.jit
def load_rows(weight, rows, inside, C: tl.constexpr, BLOCK: tl.constexpr):
    """Load some rows of a matrix, as one tile for each BLOCK columns."""
    tiles = ()
    start = weight + rows.to(tl.int64)[:, None] * C
    for first in tl.static_range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (c < C)[None, :]
        tiles = tiles + (tl.load(start + c[None, :], mask=mask, other=0.0),)
    return tiles


@triton.jit
def times(tiles, x_C, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Multiply loaded rows by a vector. Each thread loads what meets its own part of the rows: nothing is exchanged."""
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.static_range(0, C, BLOCK):
        x = load_for_rows(x_C, first, C, BLOCK, ROWS)
        sums += tiles[first // BLOCK].to(tl.float32) * x
    return tl.sum(sums, 1)


@triton.jit
def load_for_rows(x_C, first, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Load a part of a vector, once for each row."""
    c = (first + tl.arange(0, BLOCK))[None, :] + tl.zeros((ROWS, 1), tl.int32)
    return tl.load(x_C + c, mask=c < C, other=0.0)


@triton.jit
def load_normed(stream_D, norm_D, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Load the residual stream times the norm's weight, as tiles, and the factor that is missing to its norm."""
    tiles = ()
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.static_range(0, D, BLOCK):
        x = load_for_rows(stream_D, first, D, BLOCK, ROWS)
        squares += x * x
        tiles = tiles + (x * load_for_rows(norm_D, first, D, BLOCK, ROWS),)
    return tiles, 1.0 / tl.sqrt(tl.sum(squares, 1) / D + eps)


@triton.jit
def times_tiles(tiles, x_tiles, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.static_range(0, D, BLOCK):
        sums += tiles[first // BLOCK].to(tl.float32) * x_tiles[first // BLOCK]
    return tl.sum(sums, 1)


@triton.jit
def mamba_in_one(
    stream_D, norm_D, in_proj, conv_IK, conv_bias_I, x_proj, window_WI, x_I, z_I, parts_PM, last, eod, eps,
    D: tl.constexpr, I: tl.constexpr, K: tl.constexpr, M: tl.constexpr, M2: tl.constexpr,
    RESTARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute norm, in_proj and convolution for some channels, and these channels' part of x_proj.

    RESTARTS: forget the window of a sequence whose last token is eod.
    """
    let_next_start(OVERLAP)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < I
    x_rows = load_rows(in_proj, i, inside, D, BLOCK)
    z_rows = load_rows(in_proj + I * D, i, inside, D, BLOCK)
    m = tl.arange(0, M2)
    shared = tl.load(x_proj + m[:, None] * I + i[None, :], mask=(m < M)[:, None] & inside[None, :], other=0.0)
    taps, bias = load_each(conv_IK + i * K, 1, inside, K), tl.load(conv_bias_I + i, mask=inside, other=0.0)
    wait_for_previous(OVERLAP)
    remembers = inside
    if RESTARTS:
        remembers = inside & (tl.load(last) != eod)
    olds = load_each(window_WI + i, I, remembers, K - 1)
    normed, scale = load_normed(stream_D, norm_D, eps, D, BLOCK, ROWS)
    x = times_tiles(x_rows, normed, D, BLOCK, ROWS) * scale
    z = times_tiles(z_rows, normed, D, BLOCK, ROWS) * scale
    y = convolve(x, bias, taps, olds, window_WI + i, I, inside, K)
    tl.store(x_I + i, y, mask=inside)
    tl.store(z_I + i, z, mask=inside)
    part = tl.sum(shared.to(tl.float32) * y[None, :], 1)
    tl.store(parts_PM + tl.program_id(0) * M2 + m, part)


@triton.jit
def add_product_one(
    weight, x_C, stream_O, expert, factor,
    C: tl.constexpr, O: tl.constexpr, ROUTED: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply some rows of a weight, with ROUTED of the chosen expert's, by x, and add that to the stream."""
    let_next_start(OVERLAP)
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = o < O
    if ROUTED:
        wait_for_previous(OVERLAP)
        rows = load_rows(weight + tl.load(expert).to(tl.int64) * (O * C), o, inside, C, BLOCK)
        y = times(rows, x_C, C, BLOCK, ROWS) * tl.load(factor)
    else:
        rows = load_rows(weight, o, inside, C, BLOCK)
        wait_for_previous(OVERLAP)
        y = times(rows, x_C, C, BLOCK, ROWS)
    if ADD:
        y += tl.load(stream_O + o, mask=inside, other=0.0)
    tl.store(stream_O + o, y, mask=inside)


@triton.jit
def gated_in_one(
    stream_D, norm_D, router_ED, router_bias_E, choice_bias_E, fc1_EGD, hidden_F, expert, factor, eps,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, E2: tl.constexpr, BIASED: tl.constexpr,
    GELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute norm, router and the chosen expert's hidden units. Each program routes by itself. E = 0: an MLP.

    BIASED: "" chooses by logits, "logits" by logits plus bias, "scores" by their sigmoids plus bias.
    """
    let_next_start(OVERLAP)
    first_f = tl.program_id(0) * (ROWS * TILES) + tl.arange(0, ROWS)
    fc1 = fc1_EGD
    if E > 0:
        e = tl.arange(0, E2)
        router, bias_E = load_rows(router_ED, e, e < E, D, BLOCK), tl.load(router_bias_E + e, mask=e < E, other=0.0)
        choice_E = load_choice_bias(choice_bias_E, e, E, BIASED)
        wait_for_previous(OVERLAP)
        for_router, scale_E = load_normed(stream_D, norm_D, eps, D, BLOCK, E2)
        logits_E = times_tiles(router, for_router, D, BLOCK, E2) * scale_E + bias_E
        chosen, logit = choose(logits_E, e, choice_E, E, BIASED)
        fc1 += chosen.to(tl.int64) * (2 * F * D)
        if tl.program_id(0) == 0:
            tl.store(expert, chosen)
            tl.store(factor, sigmoid(logit))
        gates = load_rows(fc1, first_f, first_f < F, D, BLOCK)
        ups = load_rows(fc1 + F * D, first_f, first_f < F, D, BLOCK)
        normed, scale = load_normed(stream_D, norm_D, eps, D, BLOCK, ROWS)
    else:
        gates = load_rows(fc1, first_f, first_f < F, D, BLOCK)
        ups = load_rows(fc1 + F * D, first_f, first_f < F, D, BLOCK)
        wait_for_previous(OVERLAP)
        normed, scale = load_normed(stream_D, norm_D, eps, D, BLOCK, ROWS)
    for tile in tl.static_range(TILES):
        f = first_f + tile * ROWS
        this_gates, this_ups = gates, ups
        if tile + 1 < TILES:
            gates = load_rows(fc1, f + ROWS, f + ROWS < F, D, BLOCK)
            ups = load_rows(fc1 + F * D, f + ROWS, f + ROWS < F, D, BLOCK)
        gate = times_tiles(this_gates, normed, D, BLOCK, ROWS) * scale
        up = times_tiles(this_ups, normed, D, BLOCK, ROWS) * scale
        tl.store(hidden_F + f, activation(gate, GELU) * up, mask=f < F)


@triton.jit
def load_choice_bias(choice_bias_E, e, E: tl.constexpr, BIASED: tl.constexpr):
    if BIASED == "":
        bias = tl.zeros(e.shape, tl.float32)
    else:
        bias = tl.load(choice_bias_E + e, mask=e < E, other=0.0)
    return bias


@triton.jit
def choose(logits_E, e, choice_E, E: tl.constexpr, BIASED: tl.constexpr):
    """Return the expert of a token and its logit."""
    selecting_E = (sigmoid(logits_E) if BIASED == "scores" else logits_E) + choice_E
    chosen = tl.argmax(tl.where(e < E, selecting_E, float("-inf")), 0)
    return chosen, tl.sum(tl.where(e == chosen, logits_E, 0.0), 0)
