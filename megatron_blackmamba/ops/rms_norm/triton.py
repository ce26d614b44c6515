"""RMS norm of a residual stream in Triton: one kernel forward; backward one, and a sum for the weight's gradient.

Forward, a program takes one token: it adds the branch of the layer before to the stream, and normalises the sum.
Backward, it takes a few: it adds the gradient of the stream, writes the branch's gradient in the branch's dtype, and
leaves one partial sum of the weight's gradient.

Shapes: T tokens, D channels, P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.backends import FP32_OR_BF16, Takes, multiprocessors
from megatron_blackmamba.ops.gradients import first_order

TAKES = Takes("cuda", (torch.float32,))
CHANNELS_AT_ONCE = 10_240
"""Channels of the backward pass that a multiprocessor holds in registers: five programs of 2,048."""
WARPS, WARPS_AT_ONCE = 4, 64
LARGEST_D = 8192


def unsupported(x: Tensor, weight_D: Tensor, branch: Tensor | None = None) -> str | None:
    if weight_D.dtype not in FP32_OR_BF16:
        return f"takes float32 or bfloat16 weights, not {weight_D.dtype}"
    if branch is not None and (branch.dtype not in FP32_OR_BF16 or branch.shape != x.shape):
        return f"takes a float32 or bfloat16 branch like the stream, not {branch.dtype} {tuple(branch.shape)}"
    return None if x.shape[-1] <= LARGEST_D else f"up to {LARGEST_D} channels, not {x.shape[-1]}"


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return norm_and_stream(x, weight_D, eps)[0]


def norm_and_stream(
    x: Tensor, weight_D: Tensor, eps: float, branch: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    return _Norm.apply(x, weight_D, eps, branch, dtype or weight_D.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, branch, dtype):
        ctx.set_materialize_grads(False)
        rows = x.contiguous()
        added = rows if branch is None else branch.contiguous()
        stream = x.view_as(x) if branch is None else torch.empty_like(rows)
        y = torch.empty_like(rows, dtype=dtype)
        scale_T = rows.new_empty(rows.shape[:-1])
        if scale_T.numel():
            with torch.cuda.device_of(x):
                norm_forward[(scale_T.numel(),)](
                    rows, added, weight, y, rows if branch is None else stream, scale_T, eps,
                    BRANCH=branch is not None, **_options(rows),
                )  # fmt: skip
        ctx.save_for_backward(rows if branch is None else stream, weight, scale_T)
        ctx.branch = None if branch is None else branch.dtype
        return y, stream

    @staticmethod
    @first_order
    def backward(ctx, grad_y, grad_stream):
        x, weight, scale_T = ctx.saved_tensors
        if grad_y is None:
            grad_branch = None if ctx.branch is None or grad_stream is None else grad_stream.to(ctx.branch)
            return grad_stream, None, None, grad_branch, None
        grad_x, T = torch.empty_like(x), scale_T.numel()
        cast = ctx.branch not in (None, x.dtype)
        grad_cast = torch.empty_like(x, dtype=ctx.branch) if cast else grad_x
        grad_branch = None if ctx.branch is None else grad_cast
        if not T:
            return grad_x, torch.zeros_like(weight), None, grad_branch, None
        sums_PD = x.new_empty(min(programs(x), T), x.shape[-1])
        stream = None if grad_stream is None else grad_stream.contiguous()
        with torch.cuda.device_of(x):
            norm_backward[(len(sums_PD),)](
                x, weight, scale_T, grad_y.contiguous(), stream, grad_x, grad_cast, sums_PD, T,
                ADD=stream is not None, CAST=cast, **_options(x),
            )  # fmt: skip
        return grad_x, sums_PD.sum(0).to(weight.dtype), None, grad_branch, None


def programs(x: Tensor) -> int:
    """Return as many programs of the backward pass as run at once: more would leave the GPU half empty at the end."""
    at_once = max(1, CHANNELS_AT_ONCE // triton.next_power_of_2(x.shape[-1]))
    return multiprocessors(x.device) * min(at_once, WARPS_AT_ONCE // WARPS)


def _options(x: Tensor) -> dict[str, int]:
    return {"D": x.shape[-1], "BLOCK": triton.next_power_of_2(x.shape[-1]), "num_warps": WARPS}


@triton.jit
def norm_forward(
    x_TD, branch_TD, weight_D, y_TD, stream_TD, scale_T, eps,
    BRANCH: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0)
    if BRANCH:
        x += tl.load(branch_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(stream_TD + t * D + d, x, mask=d < D)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_TD + t * D + d, (x * scale * weight).to(y_TD.dtype.element_ty), mask=d < D)
    tl.store(scale_T + t, scale)


@triton.jit(do_not_specialize=["T"])
def norm_backward(
    x_TD, weight_D, scale_T, grad_y_TD, grad_stream_TD, grad_x_TD, grad_cast_TD, sums_PD, T,
    ADD: tl.constexpr, CAST: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    weight = tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for t in range(first, T, tl.num_programs(0)):
        scale = tl.load(scale_T + t)
        normed = tl.load(x_TD + t * D + d, mask=d < D, other=0.0) * scale
        grad_y = tl.load(grad_y_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        sums += grad_y * normed
        grad_y *= weight
        grad = scale * (grad_y - normed * (tl.sum(grad_y * normed, 0) / D))
        if ADD:
            grad += tl.load(grad_stream_TD + t * D + d, mask=d < D, other=0.0)
        tl.store(grad_x_TD + t * D + d, grad, mask=d < D)
        if CAST:
            tl.store(grad_cast_TD + t * D + d, grad.to(grad_cast_TD.dtype.element_ty), mask=d < D)
    tl.store(sums_PD + tl.program_id(0) * D + d, sums, mask=d < D)
