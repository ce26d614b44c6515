"""The causal convolution in Triton, with bias, SiLU and resets in the same pass, forward and backward.

Every input is read once: a program walks over time with the last K - 1 inputs of its channels in registers. The
backward walks the other way, recomputing what SiLU was given. Weight and bias gradients leave each tile of time as a
partial sum and are summed in a fixed order, so results repeat bit by bit. What comes out lies in memory as x does.

Shapes: B batch, L length, I inner channels, K taps, W = K - 1 the window, P tiles of time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.causal_conv1d import reference
from megatron_blackmamba.ops.causal_conv1d.halves import RowGradient
from megatron_blackmamba.ops.causal_conv1d.inputs import Inputs
from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.library import empty_like_rows, with_channels_contiguous
from megatron_blackmamba.ops.triton_math import load_tokens, sigmoid, store_tokens, sum_of_rows
from megatron_blackmamba.ops.triton_support import too_long

TAKES = Takes("cuda", UP_TO_FP32)
TAKES_ROWS = True
BLOCK, WARPS, STEPS, TILE = 128, 1, 4, 128
SUM_BLOCK, SUM_ROWS = 64, 32


def unsupported(inputs: Inputs) -> str | None:
    x_BLI, taps = inputs.x_BLI, inputs.weight_IK.shape[1]
    if not 2 <= taps <= STEPS + 1:
        return f"2 to {STEPS + 1} taps, not {taps}"
    if x_BLI.numel() == 0:
        return "the input is empty"
    return too_long(*x_BLI.shape[:2], TILE)


def convolve(inputs: Inputs) -> Tensor:
    return _Convolution.apply(*inputs)


def convolve_rows(xz_BLJ: Tensor, inputs: Inputs, gradient: RowGradient) -> tuple[Tensor, Tensor, Tensor]:
    """Return the convolved first half of the rows, twice, and their second half. `inputs` describes the first half."""
    return _ConvolvedRows.apply(xz_BLJ, inputs.weight_IK, inputs.bias_I, inputs.activation, inputs.reset_BL, gradient)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, activation: str | None, window, reset):
        inputs = _ready(Inputs(x, weight, bias, activation, window, reset))
        ctx.save_for_backward(*inputs._replace(activation=None))
        ctx.activation = activation
        return _run_forward(inputs)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        inputs = Inputs(*ctx.saved_tensors)._replace(activation=ctx.activation)
        dy = with_channels_contiguous(dy)
        dx = empty_like_rows(inputs.x_BLI)
        dweight, dbias = _run_backward(inputs, dy, None, dx)
        dwindow = _window_gradient(inputs, dy) if ctx.needs_input_grad[4] else None
        return dx, dweight, dbias, None, dwindow, None


class _ConvolvedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, xz, weight, bias, activation: str | None, reset, gradient: RowGradient):
        ctx.set_materialize_grads(False)
        x, z = with_channels_contiguous(xz).chunk(2, dim=-1)
        inputs = _ready(Inputs(x, weight, bias, activation, None, reset))
        ctx.save_for_backward(*inputs._replace(activation=None))
        ctx.activation, ctx.gradient = activation, gradient
        y = _run_forward(inputs)
        return y, y.view_as(y), z

    @staticmethod
    @first_order
    def backward(ctx, dy, dy_again, dz):
        inputs = Inputs(*ctx.saved_tensors)._replace(activation=ctx.activation)
        if dy is None:
            dy, dy_again = dy_again, None
        dy = torch.zeros_like(inputs.x_BLI) if dy is None else with_channels_contiguous(dy)
        dxz = ctx.gradient.take(inputs.x_BLI, dz)
        more = None if dy_again is None else with_channels_contiguous(dy_again)
        dweight, dbias = _run_backward(inputs, dy, more, dxz.chunk(2, dim=-1)[0])
        return dxz, dweight, dbias, None, None, None


def _ready(inputs: Inputs) -> Inputs:
    """Return the inputs as the kernels take them."""
    x, window, reset = inputs.x_BLI, inputs.initial_window_BWI, inputs.reset_BL
    return inputs._replace(
        x_BLI=with_channels_contiguous(x),
        initial_window_BWI=None if window is None else window.to(x.dtype).contiguous(),
        reset_BL=None if reset is None else reset.contiguous().view(torch.uint8),
    )


def _run_forward(inputs: Inputs) -> Tensor:
    x = inputs.x_BLI
    B, L, I = x.shape
    y = empty_like_rows(x)
    with torch.cuda.device_of(x):
        convolve_forward[(triton.cdiv(I, BLOCK), B, triton.cdiv(L, TILE))](
            *_tensors(inputs), y, L, I, x.stride(0), x.stride(1), y.stride(0), y.stride(1),
            EVEN=I % BLOCK == 0 and L % STEPS == 0, **_switches(inputs),
        )  # fmt: skip
    return y


def _run_backward(inputs: Inputs, dy: Tensor, more: Tensor | None, dx: Tensor) -> tuple[Tensor, Tensor | None]:
    """Write dx from dy + more; return the gradients of weight and bias."""
    x, weight, bias = inputs.x_BLI, inputs.weight_IK, inputs.bias_I
    (B, L, I), K, tiles = x.shape, weight.shape[1], triton.cdiv(x.shape[1], TILE)
    sums_BPTI = torch.empty(B, tiles, K + 1, I, dtype=torch.float32, device=x.device)
    added = dy if more is None else more
    convolve_backward[(triton.cdiv(I, BLOCK), B, tiles)](
        *_tensors(inputs), dy, added, dx, sums_BPTI,
        L, I, x.stride(0), x.stride(1), dy.stride(0), dy.stride(1), added.stride(0), added.stride(1),
        dx.stride(0), dx.stride(1), HAS_MORE=more is not None, **_switches(inputs),
    )  # fmt: skip
    dweight = torch.empty(I, K, dtype=weight.dtype, device=x.device)
    dbias = None if bias is None else torch.empty_like(bias)
    add_up[(triton.cdiv((K + 1) * I, SUM_BLOCK),)](
        sums_BPTI, dweight, dweight if dbias is None else dbias, B * tiles, I=I, K=K, HAS_BIAS=dbias is not None,
        BLOCK=SUM_BLOCK, ROWS=SUM_ROWS, num_warps=4,
    )  # fmt: skip
    return dweight, dbias


def _window_gradient(inputs: Inputs, dy: Tensor) -> Tensor:
    """Return the gradient of the initial window, which reaches only the first outputs."""
    window, reset = inputs.initial_window_BWI, inputs.reset_BL
    assert window is not None
    W = window.shape[1]
    with torch.enable_grad():
        window = window.detach().requires_grad_()
        reset = None if reset is None else reset[:, :W].bool()
        first = inputs._replace(x_BLI=inputs.x_BLI[:, :W], initial_window_BWI=window, reset_BL=reset)
        return torch.autograd.grad(reference.convolve(first), window, dy[:, :W])[0]


def _tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    x, weight, bias, _, window, reset = inputs
    return x, weight.contiguous(), *(x if absent is None else absent for absent in (bias, window, reset))


def _switches(inputs: Inputs) -> dict:
    _, weight, bias, activation, window, reset = inputs
    return {
        "K": weight.shape[1], "SILU": activation == "silu",
        "HAS_BIAS": bias is not None, "HAS_WINDOW": window is not None, "HAS_RESET": reset is not None,
        "BLOCK_I": BLOCK, "STEPS": STEPS, "TILE": TILE, "num_warps": WARPS,
    }  # fmt: skip


@triton.jit
def _load_input(x, window, row, L, x_l, I, i, inside, K: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Load the input of one token: before the sequence the window's or zero, after it zero."""
    value_I = tl.load(x + row * x_l + i, mask=inside & (row >= 0) & (row < L), other=0.0)
    if HAS_WINDOW:
        value_I += tl.load(window + (row + K - 1) * I + i, mask=inside & (row < 0), other=0.0)
    return value_I.to(tl.float32)


@triton.jit
def _load_weights(weight_IK, i, inside, K: tl.constexpr):
    """Load the weights, one tuple entry per tap, the current token's first."""
    weights = ()
    for back in tl.static_range(K):
        weights = weights + (tl.load(weight_IK + i * K + K - 1 - back, mask=inside, other=0.0).to(tl.float32),)
    return weights


@triton.jit
def _is_reset(reset, row, L, HAS_RESET: tl.constexpr):
    if HAS_RESET:
        return tl.load(reset + row, mask=(row >= 0) & (row < L), other=0) != 0
    return False


@triton.jit
def _advance(past, x_I, restarts, K: tl.constexpr, HAS_RESET: tl.constexpr):
    """Return the window of a token, itself first, from the previous token's window."""
    window = (x_I,)
    for back in tl.static_range(K - 1):
        window = window + (tl.where(restarts, 0.0, past[back]) if HAS_RESET else past[back],)
    return window


@triton.jit(do_not_specialize=["L"])
def convolve_forward(
    x, weight_IK, bias, window, reset, y, L, I, x_b, x_l, y_b, y_l,
    K: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RESET: tl.constexpr,
    BLOCK_I: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = i < I
    weights = _load_weights(weight_IK, i, inside, K)
    bias_I = tl.load(bias + i, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros((BLOCK_I,), tl.float32)
    x += b * x_b
    y += b * y_b
    window += b * (K - 1) * I
    reset += b * L
    first = tl.program_id(2).to(tl.int64) * TILE
    last = tl.minimum(first + TILE, L)

    past = ()
    for _ in tl.static_range(K):
        past = past + (tl.zeros((BLOCK_I,), tl.float32),)
    for back in tl.static_range(K - 1, 0, -1):
        x_I = _load_input(x, window, first - back, L, x_l, I, i, inside, K, HAS_WINDOW)
        past = _advance(past, x_I, _is_reset(reset, first - back, L, HAS_RESET), K, HAS_RESET)
    for t in range(first, last, STEPS):
        xs = load_tokens(x, x_l, t, last, i, inside, STEPS, EVEN)
        ys = ()
        for k in tl.static_range(STEPS):
            past = _advance(past, xs[k].to(tl.float32), _is_reset(reset, t + k, L, HAS_RESET), K, HAS_RESET)
            y_I = bias_I
            for back in tl.static_range(K):
                y_I += weights[back] * past[back]
            ys = ys + (y_I * sigmoid(y_I) if SILU else y_I,)
        store_tokens(y, y_l, ys, t, last, i, inside, STEPS, EVEN)


@triton.jit(do_not_specialize=["L"])
def convolve_backward(
    x, weight_IK, bias, window, reset, dy, more, dx, sums_BPTI,
    L, I, x_b, x_l, dy_b, dy_l, more_b, more_l, dx_b, dx_l,
    K: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RESET: tl.constexpr,
    HAS_MORE: tl.constexpr, BLOCK_I: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute gradients for dy + more.

    Walk from STEPS tokens past the tile, whose outputs its last inputs still reach, back to its start."""
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = i < I
    weights = _load_weights(weight_IK, i, inside, K)
    bias_I = tl.load(bias + i, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else tl.zeros((BLOCK_I,), tl.float32)
    x += b * x_b
    dy += b * dy_b
    more += b * more_b
    dx += b * dx_b
    window += b * (K - 1) * I
    reset += b * L
    first = tl.program_id(2).to(tl.int64) * TILE

    xs = ()  # of the tokens t - (K - 1) .. t + STEPS - 1
    sums = ()  # of each tap, then of the bias
    later = ()  # gradients of what the K - 1 tokens after t gave to SiLU, the nearest first
    for back in tl.static_range(K - 1):
        xs = xs + (_load_input(x, window, first + TILE + STEPS - K + 1 + back, L, x_l, I, i, inside, K, HAS_WINDOW),)
        later = later + (tl.zeros((BLOCK_I,), tl.float32),)
    for _ in tl.static_range(K + 1):
        sums = sums + (tl.zeros((BLOCK_I,), tl.float32),)
    for back in range(0, TILE + STEPS, STEPS):
        t = first + TILE - back
        carried = xs
        xs = ()
        dys = ()
        for k in tl.static_range(STEPS):
            xs = xs + (_load_input(x, window, t - K + 1 + k, L, x_l, I, i, inside, K, HAS_WINDOW),)
            dy_I = tl.load(dy + (t + k) * dy_l + i, mask=inside & (t + k < L), other=0.0).to(tl.float32)
            if HAS_MORE:
                dy_I += tl.load(more + (t + k) * more_l + i, mask=inside & (t + k < L), other=0.0).to(tl.float32)
            dys = dys + (dy_I,)
        for k in tl.static_range(K - 1):
            xs = xs + (carried[k],)
        for k in tl.static_range(STEPS - 1, -1, -1):
            past = (xs[k + K - 1],)
            restarts = False
            for reach in tl.static_range(K - 1):
                restarts = restarts | _is_reset(reset, t + k - reach, L, HAS_RESET)
                x_I = xs[k + K - 2 - reach]
                past = past + (tl.where(restarts, 0.0, x_I) if HAS_RESET else x_I,)
            g_I = dys[k]
            if SILU:
                given_I = bias_I
                for reach in tl.static_range(K):
                    given_I += weights[reach] * past[reach]
                gate_I = sigmoid(given_I)
                g_I *= gate_I * (1.0 + given_I * (1.0 - gate_I))
            dx_I = weights[0] * g_I
            for reach in tl.static_range(K - 1):
                dx_I += weights[reach + 1] * later[reach]
            own = (back > 0) & (t + k < L)
            tl.store(dx + (t + k) * dx_l + i, dx_I.to(dx.dtype.element_ty), mask=inside & own)

            later = _advance(later, g_I, False, K - 1, False)
            if HAS_RESET:  # nothing before this token reaches it or the ones after it
                cut = ()
                for reach in tl.static_range(K - 1):
                    cut = cut + (tl.where(_is_reset(reset, t + k, L, HAS_RESET), 0.0, later[reach]),)
                later = cut
            own_g_I = tl.where(own, g_I, 0.0)
            added = ()
            for reach in tl.static_range(K):
                added = added + (sums[reach] + own_g_I * past[reach],)
            sums = added + (sums[K] + own_g_I,)
        xs_next = ()
        for k in tl.static_range(K - 1):
            xs_next = xs_next + (xs[k],)
        xs = xs_next
    sums_BPTI += (b * tl.num_programs(2) + tl.program_id(2)) * (K + 1) * I
    for tap in tl.static_range(K + 1):
        tl.store(sums_BPTI + tap * I + i, sums[tap], mask=inside)


@triton.jit(do_not_specialize=["P"])
def add_up(
    sums_PTI, dweight_IK, dbias_I, P,
    I: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of each tap, and of the bias behind them."""
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    back, i = x // I, x % I
    sums = sum_of_rows(sums_PTI, P, (K + 1) * I, x, back <= K, BLOCK, ROWS)
    tl.store(dweight_IK + i * K + K - 1 - back, sums.to(dweight_IK.dtype.element_ty), mask=back < K)
    if HAS_BIAS:
        tl.store(dbias_I + i, sums.to(dbias_I.dtype.element_ty), mask=back == K)
