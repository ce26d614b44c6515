"""Functions and kernels that decoding one sequence and many sequences share.

Shapes: B sequences, D model, I inner, N state, R rank of dt, M = R + 2N, P parts of a sum.
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from megatron_blackmamba.ops.triton_math import INVERSE_ROOT_2, LOG2E, narrowed, sigmoid, softplus


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Let the next kernel start once every program of this one has."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait until the kernel before this one has written everything."""
    if OVERLAP:
        gdc_wait()


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def dot(x, y, sums):
        return tl.dot(x.to(tl.float32), y.to(tl.float32), sums)  # the interpreter takes bf16 for integers

else:

    @triton.jit
    def dot(x, y, sums):
        return tl.dot(x, y, sums, input_precision="ieee")


@triton.jit
def activation(gate, GELU: tl.constexpr):
    if GELU:
        return gate * 0.5 * (1.0 + tl.erf(gate * INVERSE_ROOT_2))
    return gate * sigmoid(gate)


@triton.jit
def load_each(start, step, mask, COUNT: tl.constexpr):
    """Load COUNT times, `step` further each time."""
    parts = ()
    for k in tl.static_range(COUNT):
        parts = parts + (tl.load(start + k * step, mask=mask, other=0.0),)
    return parts


@triton.jit
def convolve(x, bias, taps, olds, window, step, mask, K: tl.constexpr):
    """Return the convolution at a token, with its SiLU; shift the window, whose loaded elements are `olds`.

    Several threads load an element that one of them stores. Without the barrier a thread could load what another has
    stored already.
    """
    tl.debug_barrier()
    y = bias + x * taps[K - 1]
    for k in tl.static_range(K - 1):
        y += olds[k] * taps[k]
        if k > 0:
            tl.store(window + (k - 1) * step, olds[k], mask=mask)
    tl.store(window + (K - 2) * step, x, mask=mask)
    return y * sigmoid(y)


@triton.jit
def embed(
    tokens_B, embedding_VD, stream_BD, multiplier,
    D: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_B + b)
    x = tl.load(embedding_VD + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(stream_BD + b * D + d, x * multiplier, mask=d < D)


@triton.jit(do_not_specialize=["B"])
def mamba_scan(
    parts_PBM, dt_proj, dt_bias_I, A_IN, D_I, state_BIN, x_BI, z_BI, y_BI, last_B, eod, B,
    I: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, R: tl.constexpr, R2: tl.constexpr, M2: tl.constexpr,
    PARTS: tl.constexpr, STEP: tl.constexpr, RESTARTS: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up the parts of x_proj; then dt_proj, one token of the scan, and the gate, for some channels of a sequence.

    What dt_proj reads is rounded to its dtype if y is stored in that. RESTARTS: forget the sequences whose last token
    is eod.
    """
    let_next_start(OVERLAP)
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < I
    p, r, n = tl.arange(0, STEP), tl.arange(0, R2), tl.arange(0, N2)
    at, here = i[:, None] * N + n[None, :], inside[:, None] & (n < N)[None, :]
    w = tl.load(dt_proj + i[:, None] * R + r[None, :], mask=inside[:, None] & (r < R)[None, :], other=0.0)
    A = tl.load(A_IN + at, mask=here, other=0.0)
    bias = tl.load(dt_bias_I + i, mask=inside, other=0.0)
    skip = tl.load(D_I + i, mask=inside, other=0.0)
    wait_for_previous(OVERLAP)
    remembers = here
    if RESTARTS:
        remembers = here & (tl.load(last_B + b) != eod)
    h = tl.load(state_BIN + b * I * N + at, mask=remembers, other=0.0)
    x = tl.load(x_BI + b * I + i, mask=inside, other=0.0)
    z = tl.load(z_BI + b * I + i, mask=inside, other=0.0)
    dt, B_N, C_N = tl.zeros((STEP, R2), tl.float32), tl.zeros((STEP, N2), tl.float32), tl.zeros((STEP, N2), tl.float32)
    for first in tl.static_range(0, PARTS, STEP):
        start = parts_PBM + ((first + p) * B + b)[:, None] * M2
        held = (first + p < PARTS)[:, None]
        dt += tl.load(start + r[None, :], mask=held & (r < R)[None, :], other=0.0)
        B_N += tl.load(start + R + n[None, :], mask=held & (n < N)[None, :], other=0.0)
        C_N += tl.load(start + R + N + n[None, :], mask=held & (n < N)[None, :], other=0.0)
    rank = narrowed(tl.sum(dt, 0), y_BI.dtype.element_ty).to(tl.float32)
    delta = softplus(tl.sum(w.to(tl.float32) * rank[None, :], 1) + bias)
    h = h * tl.exp2(delta[:, None] * A * LOG2E) + (delta * x)[:, None] * tl.sum(B_N, 0)[None, :]
    tl.debug_barrier()  # several threads may have loaded an element that one of them stores
    tl.store(state_BIN + b * I * N + at, h, mask=here)
    y = tl.sum(h * tl.sum(C_N, 0)[None, :], 1) + skip * x
    y *= z * sigmoid(z)
    tl.store(y_BI + b * I + i, narrowed(y, y_BI.dtype.element_ty), mask=inside)


@triton.jit
def find_largest(logits_BV, largest_BP, token_BP, V, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Find the largest of some of a sequence's logits; the token -1 if one of them is not finite."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_BV + b * V + v, mask=v < V, other=0.0)
    broken = tl.max((logits - logits != 0.0).to(tl.int32), 0)
    place = tl.argmax(tl.where(v < V, logits, float("-inf")), 0)
    largest = tl.max(tl.where(v < V, logits, float("-inf")), 0)
    token = tl.where(broken != 0, -1, tl.program_id(1) * BLOCK + place)
    tl.store(largest_BP + b * PARTS + tl.program_id(1), tl.where(broken != 0, float("inf"), largest))
    tl.store(token_BP + b * PARTS + tl.program_id(1), token)


@triton.jit
def choose_largest(largest_BP, token_BP, token_B, PARTS: tl.constexpr, P2: tl.constexpr, OVERLAP: tl.constexpr):
    """Choose the largest of the parts, the first of equal ones."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, P2)
    largest = tl.load(largest_BP + b * PARTS + p, mask=p < PARTS, other=float("-inf"))
    tl.store(token_B + b, tl.load(token_BP + b * PARTS + tl.argmax(largest, 0)).to(tl.int64))
