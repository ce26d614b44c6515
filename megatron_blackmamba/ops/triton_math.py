"""Functions shared by the Triton kernels: activations, and loads and stores over time.

A kernel processes STEPS tokens at a time and loads their inputs together, ahead of use, to hide memory latency. Tuples
have one entry per token. EVEN promises that the length and the channels divide into whole steps and blocks.

Token indices are 64-bit: token × stride may exceed 2^31.

Shapes: I a block of channels.
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INVERSE_ROOT_2 = tl.constexpr(0.7071067811865476)
FORGOTTEN = tl.constexpr(-256.0)  # 2^-256 is 0 in fp32, and so is its product with any decay

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def log2(x):
        return tl.log2(x)

    @triton.jit
    def narrowed(x, dtype: tl.constexpr):
        if dtype == tl.bfloat16:  # the interpreter cuts digits off
            bits = x.to(tl.int32, bitcast=True)
            x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        return x.to(dtype)

    @triton.jit
    def product(x, y):
        return tl.dot(x.to(tl.float32), y.to(tl.float32))  # the interpreter takes bf16 for integers

else:
    log2 = libdevice.fast_log2f  # one instruction where tl.log2 takes fifteen; the interpreter does not know it

    @triton.jit
    def narrowed(x, dtype: tl.constexpr):
        """Round to a number format."""
        return x.to(dtype)

    @triton.jit
    def product(x, y):
        """Multiply bf16 as it is, and fp32 as three products in TF32."""
        return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), accurate in float32 even where exp(x) is tiny, as it is for time steps."""
    e = tl.exp2(tl.minimum(x, 20.0) * LOG2E)
    series = e * (1.0 - e * (0.5 - e * (0.33333334 - e * (0.25 - e * 0.2))))
    return tl.where(x > 20.0, x, tl.where(e < 0.03125, series, log2(1.0 + e) * LN2))


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) as a squared reciprocal root: five instructions fewer than a division."""
    root = tl.rsqrt(1.0 + tl.exp2(-x * LOG2E))
    return root * root


@triton.jit
def load_channels(values, i, inside, PRESENT: tl.constexpr, BLOCK_I: tl.constexpr):
    return tl.load(values + i, mask=inside, other=0.0) if PRESENT else tl.zeros((BLOCK_I,), tl.float32)


@triton.jit
def load_rows(rows, row, stride, count, column, WIDTH: tl.constexpr, EVEN: tl.constexpr, PRODUCTS: tl.constexpr):
    """Load rows of a tensor for products, zeros past the last row and column."""
    inside = (row < count)[:, None]
    if not EVEN:
        inside = inside & (column < WIDTH)[None, :]
    return tl.load(rows + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(PRODUCTS)


@triton.jit
def load_tokens(rows, stride, t, last, i, inside, STEPS: tl.constexpr, EVEN: tl.constexpr):
    """Load STEPS rows of a block of channels from token t on; rows past the last one repeat it."""
    values = ()
    if EVEN:  # whole blocks only: one comparison for all of them
        start = rows + tl.minimum(t, last - STEPS) * stride
        for k in tl.static_range(STEPS):
            values = values + (tl.load(start + k * stride + i),)
    else:
        for k in tl.static_range(STEPS):
            values = values + (tl.load(rows + tl.minimum(t + k, last - 1) * stride + i, mask=inside, other=0.0),)
    return values


@triton.jit
def store_tokens(rows, stride, values, t, last, i, inside, STEPS: tl.constexpr, EVEN: tl.constexpr):
    for k in tl.static_range(STEPS):
        store_token(rows, stride, values[k], t + k, last, i, inside, EVEN)


@triton.jit
def store_token(rows, stride, value, t, last, i, inside, EVEN: tl.constexpr):
    value = value.to(rows.dtype.element_ty)
    row = rows + tl.cast(t, tl.int64) * stride
    if EVEN:
        tl.store(row + i, value)
    else:
        tl.store(row + i, value, mask=inside & (t < last))


@triton.jit
def sum_of_rows(parts, P, width: tl.constexpr, x, inside, BLOCK: tl.constexpr, ROWS: tl.constexpr = 16):
    """Add up columns x of a matrix `[P, width]` of partial sums, in a fixed order."""
    rows = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, P, ROWS):
        p = first + rows
        mask = (p < P)[:, None] & inside[None, :]
        sums += tl.load(parts + p.to(tl.int64)[:, None] * width + x[None, :], mask=mask, other=0.0)
    return tl.sum(sums, 0)
