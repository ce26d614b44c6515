"""The step of the recurrence, as the selective-scan kernels take it.

Shapes: I a block of channels, N state.
"""

import triton
import triton.language as tl

from megatron_blackmamba.ops.triton_math import softplus

RESET = tl.constexpr(-1e30)  # added to an exponent: the decay becomes exactly zero, at no cost a state


@triton.jit
def load_row(rows, t, last, n, width: tl.constexpr, EVEN: tl.constexpr):
    """Load B or C of one token, shared by all channels; past the last token, load the last one."""
    return tl.load(rows + (t if EVEN else tl.minimum(t, last - 1)) * width + n)


@triton.jit
def time_step(raw, bias, t, last, SOFTPLUS: tl.constexpr, EVEN: tl.constexpr):
    """Return delta of one token, zero past the last one: a token with zero time step does not change the state."""
    delta = raw.to(tl.float32) + bias
    if SOFTPLUS:
        delta = softplus(delta)
    return delta if EVEN else tl.where(t < last, delta, 0.0)


@triton.jit
def reset_exponent(reset, t, last, EVEN: tl.constexpr):
    """Return the term that a reset before token t adds to the exponent of the decay; 0 past the last token."""
    if EVEN:
        is_reset = tl.load(reset + t)
    else:
        is_reset = tl.load(reset + t, mask=t < last, other=0)
    return tl.where(is_reset != 0, RESET, 0.0)


@triton.jit
def decay(delta_I, rate_NI, reset, t, last, HAS_RESET: tl.constexpr, EVEN: tl.constexpr):
    """Return exp(delta * A) with A in units of log 2, zero where the state is reset."""
    exponent_NI = delta_I[None, :] * rate_NI
    if HAS_RESET:
        exponent_NI += reset_exponent(reset, t, last, EVEN)
    return tl.exp2(exponent_NI)


@triton.jit
def save_state(start, h_NI, n, i, inside, I: tl.constexpr, EVEN: tl.constexpr):
    """Store the states of a block of channels from a thread that owns them, in fp32 or bf16."""
    h_NI = h_NI.to(start.dtype.element_ty)
    if EVEN:
        tl.store(state_at(start, n, i, I, True), h_NI)
    else:
        tl.store(state_at(start, n, i, I, True), h_NI, mask=inside[None, :])


@triton.jit
def state_at(start, n, i, I: tl.constexpr, WHOLE_CHANNELS: tl.constexpr):
    """Return pointers to the states of a block of channels.

    From their alignment Triton decides how many channels a thread loads at once: for fp32, four. Then the states of a
    channel are spread over four threads, and sums over channels and over states cost least together; so bf16 is read
    likewise. WHOLE_CHANNELS hides the alignment: a thread then owns its channels, and sums over the states stay in its
    registers.
    """
    pointers_NI = (start + i)[None, :] + (n * I)[:, None]
    width: tl.constexpr = start.dtype.element_ty.primitive_bitwidth // 8
    if WHOLE_CHANNELS:
        pointers_NI = tl.multiple_of(pointers_NI, [width, width])
    elif width == 2 and I % 4 == 0:
        pointers_NI = tl.multiple_of(pointers_NI, [8, 8])
    return pointers_NI
