"""RMS norm of a residual stream in Triton: one kernel forward; backward one, and a sum for the weight's gradient.

Forward, a program takes one token. Backward, it takes a few: it adds the gradient that comes down the stream past the
norm, and leaves one partial sum of the weight's gradient.

Shapes: T tokens, D channels, P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.triton_support import interpreted, unavailable

__all__ = ["norm_and_stream", "unavailable", "unsupported"]

PROGRAMS = 1024
"""Most programs of the backward pass, and so partial sums of the weight's gradient."""
LARGEST_D = 8192


def unsupported(x: Tensor, weight_D: Tensor) -> str | None:
    if not x.is_cuda and not interpreted():
        return "the tensors are not on a CUDA device"
    if x.dtype != torch.float32 or weight_D.dtype not in (torch.float32, torch.bfloat16):
        return f"takes a float32 stream and float32 or bfloat16 weights, not {x.dtype} and {weight_D.dtype}"
    return None if x.shape[-1] <= LARGEST_D else f"up to {LARGEST_D} channels, not {x.shape[-1]}"


def norm_and_stream(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _Norm.apply(x, weight_D, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.set_materialize_grads(False)
        rows = x.contiguous()
        y = torch.empty_like(rows, dtype=weight.dtype)
        scale_T = rows.new_empty(rows.shape[:-1])
        if scale_T.numel():
            with torch.cuda.device_of(x):
                norm_forward[(scale_T.numel(),)](rows, weight, y, scale_T, eps, **_options(rows))
        ctx.save_for_backward(rows, weight, scale_T)
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx, grad_y, grad_stream):
        x, weight, scale_T = ctx.saved_tensors
        if grad_y is None:
            return grad_stream, None, None
        grad_x, T = torch.empty_like(x), scale_T.numel()
        if not T:
            return grad_x, torch.zeros_like(weight), None
        sums_PD = x.new_empty(min(PROGRAMS, T), x.shape[-1])
        stream = None if grad_stream is None else grad_stream.contiguous()
        with torch.cuda.device_of(x):
            norm_backward[(len(sums_PD),)](
                x, weight, scale_T, grad_y.contiguous(), stream, grad_x, sums_PD, T,
                ADD=stream is not None, **_options(x),
            )  # fmt: skip
        return grad_x, sums_PD.sum(0).to(weight.dtype), None


def _options(x: Tensor) -> dict[str, int]:
    return {"D": x.shape[-1], "BLOCK": triton.next_power_of_2(x.shape[-1]), "num_warps": 4}


@triton.jit
def norm_forward(x_TD, weight_D, y_TD, scale_T, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_TD + t * D + d, (x * scale * weight).to(y_TD.dtype.element_ty), mask=d < D)
    tl.store(scale_T + t, scale)


@triton.jit(do_not_specialize=["T"])
def norm_backward(
    x_TD, weight_D, scale_T, grad_y_TD, grad_stream_TD, grad_x_TD, sums_PD, T,
    ADD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
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
    tl.store(sums_PD + tl.program_id(0) * D + d, sums, mask=d < D)
